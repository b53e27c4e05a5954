"""The command `python -m foremoe.torch.doctor`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import foremoe

from . import bandwidth, equality, failure, overlap, waits
from .checks import Check, examine
from .hardware import find_hardware
from .report import FAILED, document_of, table_of

DESCRIPTION = """\
Check whether planned steps run correctly on this machine.

The doctor starts ranks of its own: one per GPU with NCCL, or two that share the only GPU or the CPU, with gloo. It
prints one line per check: passed, failed, or cannot run here, with what was seen or why. The exit code is 0 if no
check failed, 1 if one did, and 2 for invalid arguments.
"""


def all_checks() -> list[Check]:
    return [check for module in (equality, waits, overlap, bandwidth, failure) for check in module.checks()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m foremoe.torch.doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file, to attach to an issue")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks, 2 to 4")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch finds a GPU")
    parser.add_argument(
        "--check", action="append", metavar="TEXT", help="run only checks whose name contains this; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all checks and exit")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="SECONDS", help="begin no check after this time (default 120)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    checks = all_checks()
    if given.check:
        for text in given.check:
            if not any(text in check.name for check in checks):
                parser.error(f"--check: no check's name contains '{text}'; --list prints all names")
        checks = [check for check in checks if any(text in check.name for text in given.check)]
    if given.list:
        print("\n".join(check.name for check in checks))
        return 0
    if not given.limit > 0:
        parser.error(f"--limit: {given.limit}, must be above 0")
    try:
        hardware = find_hardware(given.ranks, given.device)
        if given.json:
            with open(given.json, "a"):  # refused before two minutes of work, not after
                pass
    except (foremoe.InputError, OSError) as error:
        parser.error(f"--{error}" if isinstance(error, foremoe.InputError) else f"--json: {error}")
    begin = time.monotonic()
    rows = []
    for row in examine(hardware, checks, limit=given.limit):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"{len(rows)}/{len(checks)} {row.check}: {row.outcome.status}", file=sys.stderr)
    document = document_of(hardware, rows, time.monotonic() - begin)
    print(table_of(document))
    if given.json:
        with open(given.json, "w") as file:
            file.write(json.dumps(document, indent=2) + "\n")
    return int(document[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
