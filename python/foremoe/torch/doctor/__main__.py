"""The command `python -m foremoe.torch.doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

import foremoe
from foremoe._engine.choice import cluster_of

from . import checks, equality
from .hardware import Hardware, find_hardware
from .layers import Sizes
from .ranks import FAILED, Check, examine
from .report import cluster_file_of, document_of, table_of

DESCRIPTION = """\
Check whether planned steps run correctly on this machine, and how fast.

The doctor starts ranks of its own: one per GPU, or two that share the only GPU, with NCCL; two on a CPU, with gloo. It
prints one line per check: passed, failed, or cannot run here, with what was seen or why; and last which depth and path
to use. The exit code is 0 if no check failed, 1 if one did, and 2 for invalid arguments.
"""
SPEED = Sizes(layers=4, experts=48, top_k=4, hidden=128, intermediate=256, tokens=512, micro_steps=4, routing="grpo")
SIZES = {
    "layers": "MoE layers",
    "experts": "experts of a layer",
    "top_k": "experts of a token",
    "hidden": "width of a token",
    "intermediate": "width inside an expert",
    "tokens": "tokens of a rank in a micro-step",
    "micro_steps": "micro-steps of the step",
}


def all_checks(hardware: Hardware, sizes: Sizes) -> list[Check]:
    """Returns the checks in the order of the table. sizes: Sizes of the layers for speed checks."""
    return [*equality.checks(), *checks.checks(hardware, sizes)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m foremoe.torch.doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file, to attach to an issue")
    parser.add_argument("--cluster", metavar="FILE", help="also write a cluster file, with the links as measured")
    parser.add_argument(
        "--base", choices=foremoe.clusters(),
        help="preset of all other values of the cluster file (default: that with the GPU's name)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks: 2, 3, 4, 6 or 8")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch finds a GPU")
    parser.add_argument(
        "--check", action="append", metavar="TEXT", help="run only checks whose name contains this; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all checks and exit")
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="SECONDS", help="begin no check after this time (default 180)"
    )
    group = parser.add_argument_group("layers of the check 'speed of a planned step'")
    for name, what in SIZES.items():
        default = getattr(SPEED, name)
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default {default})")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=SPEED.dtype)
    return parser


def _machine(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[Hardware, str | None]:
    """Returns the hardware, and the preset for the cluster file. Exits with 2 for invalid arguments."""
    for name in SIZES:
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(given, name)}, must be at least 1")
    if not given.limit > 0:
        parser.error(f"--limit: {given.limit}, must be above 0")
    try:
        hardware = find_hardware(given.ranks, given.device)
    except foremoe.InputError as error:
        parser.error(f"--{error}")
    if given.experts % hardware.ranks != 0 or given.top_k > given.experts:
        parser.error(f"--experts: {given.experts}, must be a multiple of {hardware.ranks} ranks, at least --top-k")
    base = given.base or cluster_of(hardware.device_of(0))
    if given.cluster and base is None:
        parser.error("--base: no preset has the name of this device; expected one of its kind")
    for option in ("json", "cluster"):
        if path := getattr(given, option):
            try:
                with open(path, "a"):  # fail before two minutes of work, not after
                    pass
            except OSError as error:
                parser.error(f"--{option}: {error}")
    return hardware, base


def _chosen(parser: argparse.ArgumentParser, given: argparse.Namespace, hardware: Hardware) -> list[Check]:
    """Returns the checks to run. Exits with 2 if --check names none."""
    sizes = dataclasses.replace(SPEED, dtype=given.dtype, **{name: getattr(given, name) for name in SIZES})
    every = all_checks(hardware, sizes)
    for text in given.check or []:
        if not any(text in check.name for check in every):
            parser.error(f"--check: no check's name contains '{text}'; --list prints all names")
    return [check for check in every if not given.check or any(text in check.name for text in given.check)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    hardware, base = _machine(parser, given)
    chosen = _chosen(parser, given, hardware)
    if given.list:
        print("\n".join(check.name for check in chosen))
        return 0
    begin = time.monotonic()
    rows = []
    for check, outcome, seconds in examine(hardware, chosen, limit=given.limit):
        rows.append((check, outcome, seconds))
        if sys.stderr.isatty():
            print(f"{len(rows)}/{len(chosen)} {check.name}: {outcome.status}", file=sys.stderr)
    document = document_of(hardware, rows, time.monotonic() - begin)
    print(table_of(document))
    if given.json:
        with open(given.json, "w") as file:
            file.write(json.dumps(document, indent=2) + "\n")
    if given.cluster:
        try:
            text = cluster_file_of(document, str(base))
        except foremoe.InputError as error:
            print(f"--cluster: {error}", file=sys.stderr)
            return 1
        with open(given.cluster, "w") as file:
            file.write(text)
    return int(document[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
