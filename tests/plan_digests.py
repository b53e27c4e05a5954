#!/usr/bin/env python3
"""Compares digests of plans with data/plan-digests.tsv. Plans the ten load tables with a foremoe binary.

    tests/plan_digests.py build/release/bin/foremoe            all tables, residencies, G 1 and 2, every policy (minutes)
    tests/plan_digests.py --quick build/asan/bin/foremoe       tables of 8 and 16 ranks, resident and static, G 1
    tests/plan_digests.py --write build/release/bin/foremoe    rewrites the file, if plans change intentionally

A digest is the first 32 hex digits of the SHA-256 over name, dtype, shape and bytes of the plan file's tensors home,
slot_expert, slot_tokens, event_micro_step and event_pass. Metadata is excluded. If a policy cannot plan a table, the
digest is the exit code.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIGESTS = ROOT / "data" / "plan-digests.tsv"
TENSORS = ("home", "slot_expert", "slot_tokens", "event_micro_step", "event_pass")
RESIDENCIES = ("static", "resident", "shared", "free")
HEAD = "# sha256 of plans, written by tests/plan_digests.py --write: table, residency, guest slots, policy, digest or exit code\n"


def policies(binary):
    """Returns the policies listed by `foremoe plan --help`."""
    for help_option in ("--help-all", "--help"):
        done = subprocess.run([binary, "plan", help_option], capture_output=True, text=True)
        if done.returncode == 0 and "\nPolicies:\n" in done.stdout:
            listed = done.stdout.split("\nPolicies:\n")[1].splitlines()
            names = [line.split()[0] for line in listed if line.startswith("  ") and line[2:3].strip()]
            return list(dict.fromkeys(names))  # a policy has one line for each of its options
    sys.exit(f"tests/plan_digests.py: `{binary} plan --help` lists no policies")


def digest_of(path):
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    digest = hashlib.sha256()
    for name in TENSORS:
        tensor = header[name]
        first, last = (begin + offset for offset in tensor["data_offsets"])
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
        digest.update(data[first:last])
    return digest.hexdigest()[:32]


def plan(binary, case):
    table, residency, guest_slots, policy = case
    with tempfile.TemporaryDirectory(prefix="foremoe-digest-") as folder:
        out = pathlib.Path(folder) / "plan.safetensors"
        command = [binary, "plan", f"data/load-{table}.safetensors", "--policy", policy, "-G", guest_slots,
                   "--threads", "1", "--out", str(out)]  # fmt: skip
        run = functools.partial(subprocess.run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        done = run([*command, "--residency", residency])
        if f"policy {policy} plans residency" in done.stderr:  # a policy with a fixed residency rejects others
            done = run(command)
        if done.returncode == 0:
            return digest_of(out)
        if done.returncode != 2:
            print(f"{' '.join(case)}: {done.stderr.strip()}", file=sys.stderr)
        return f"exit {done.returncode}"


def cases(binary, quick):
    tables = sorted(path.stem.removeprefix("load-") for path in (ROOT / "data").glob("load-*.safetensors"))
    if quick:
        tables = [table for table in tables if "ep64" not in table]
    residencies, guest_slots = (("static", "resident"), ("1",)) if quick else (RESIDENCIES, ("1", "2"))
    return list(itertools.product(tables, residencies, guest_slots, policies(binary)))


def frozen():
    rows = (line.split("\t") for line in DIGESTS.read_text().splitlines() if not line.startswith("#"))
    return {tuple(row[:4]): row[4] for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--write takes all cases")

    todo = cases(options.binary, options.quick)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        digests = dict(zip(todo, pool.map(lambda case: plan(options.binary, case), todo)))
    if options.write:
        DIGESTS.write_text(HEAD + "".join("\t".join((*case, digests[case])) + "\n" for case in todo))
        print(f"{len(digests)} digests written to {DIGESTS.relative_to(ROOT)}")
        return 0

    wanted = frozen()
    if not options.quick:
        todo += [case for case in wanted if case not in digests]
    differing = [case for case in todo if digests.get(case, "no such plan") != wanted.get(case, "not in the file")]
    for case in differing:
        print(f"{' '.join(case)}: {digests.get(case, 'no such plan')}, was {wanted.get(case, 'not in the file')}")
    print(f"{len(todo)} plans, {len(differing)} differ from {DIGESTS.relative_to(ROOT)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
