#!/usr/bin/env python3
"""Imports damaged files that Python decodes: python fuzz/import_python.py [SECONDS] [--seed N]

Needs the package foremoe. Changes valid files of every format (torch.save, JSON responses, npz, base64, NRLRE1, counts)
at random and imports them. A file may be refused by InputError only, within 5 CPU seconds and 256 MB of memory. Prints
the number of files; writes one that breaks this to build/fuzz/findings, and exits with 1.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import logging
import pathlib
import pickle
import pickletools
import random
import resource
import signal
import tempfile
import time
import zipfile
from collections.abc import Iterator

import numpy as np

import foremoe

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_SECONDS, MOST_BYTES, MOST_FILE = 5.0, 256 << 20, 1 << 16
OPCODES = [ord(op.code) for op in pickletools.opcodes]


Content = bytes | dict[str, bytes]  # dict: members of an archive
ROUTES = {"layers": 3, "top_k": 2, "experts": 8}
RESPONSES = {"layers": 4, "top_k": 4}
COUNTS = {"top_k": 2, "ranks": 2}


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, content in members.items():
            made.writestr(name, content)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def saved(content: object, protocol: int) -> dict[str, bytes]:
    return {"rollout/data.pkl": pickle.dumps(content, protocol), "rollout/version": b"3\n"}


def seeds() -> Iterator[tuple[str, Content, dict[str, int]]]:
    """Yields suffix, content and options; members of an archive are changed one by one, so that their checksums are right."""
    routes = np.arange(24, dtype=np.int32).reshape(4, 3, 2) % 8
    sample = {"rollout_routed_experts": routes, "tokens": [1, 2, 3, 4, 5], "response_length": 2, "group_index": 0,
              "status": "completed", "weight_versions": ["1"], "cached_tokens": 0}  # fmt: skip
    for protocol in (2, 4):
        yield ".pt", saved({"samples": [sample, sample | {"rollout_routed_experts": routes.tolist()}]}, protocol), ROUTES
        yield ".pt", saved({"logical_count": np.ones((2, 3, 8), np.int64), "rank": 0}, protocol), COUNTS
    responses = json.loads((ROOT / "python/tests/responses.json").read_text())
    for engine in responses.values():
        answers = [turn["response"] for turn in engine["turns"]]
        yield ".jsonl", "\n".join(map(json.dumps, answers)).encode(), RESPONSES
        yield ".json", json.dumps(answers[0]).encode(), RESPONSES
    yield ".npz", {"routed_experts.npy": npy(routes), "routed_experts_1.npy": npy(routes.astype(np.uint8))}, {}
    yield ".txt", base64.b64encode(npy(routes)) + b"\n" + base64.b64encode(npy(routes)), {}
    yield ".json", json.dumps({"logical_count": np.ones((2, 3, 8), int).tolist()}).encode(), COUNTS


def changed(content: bytes, random_: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        at = random_.randrange(len(data) + 1)
        end = min(len(data), at + random_.choice((1, 2, 4, 8, 64)))
        kind = random_.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            data[at:at] = bytes(random_.choice(OPCODES) for _ in range(end - at))
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end] * random_.choice((1, 2, 50))
        elif kind == 4:
            data[at:end] = random_.choice((b"9" * 20, b"[" * 40, b"{" * 40, b"-1", b"\xff" * 8, b"null", b"1e999", b'""'))
        elif at < len(data):
            data[at] = random_.choice(OPCODES)
    return bytes(data[:MOST_FILE]) or b"\0"


def broken(path: pathlib.Path, options: dict[str, int]) -> str:
    """Imports the file. Returns what is wrong; empty if it was read or refused as it should be."""
    began = time.process_time()
    try:
        foremoe.import_files(path, **options)
    except foremoe.InputError as error:
        if not str(error):
            return "an error without a message"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    return f"{seconds:.1f} CPU seconds" if seconds > MOST_SECONDS else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable()
    random_ = random.Random(given.seed)
    valid = list(seeds())
    files = 0
    findings = ROOT / "build/fuzz/findings"
    findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, (suffix, content, options) in enumerate(valid):
            path = pathlib.Path(folder, f"valid{number}{suffix}")
            path.write_bytes(archive(content) if isinstance(content, dict) else content)
            foremoe.import_files(path, **options)
        used = int(pathlib.Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_BYTES, resource.RLIM_INFINITY))
        end = time.monotonic() + given.seconds
        while time.monotonic() < end:
            suffix, content, options = random_.choice(valid)
            if isinstance(content, dict):
                name = random_.choice(list(content))
                damaged = archive(content | {name: changed(content[name], random_)})
                damaged = changed(damaged, random_) if random_.random() < 0.1 else damaged
            else:
                damaged = changed(content, random_)
            path = findings / f"import_python-{files}{suffix}"  # stays there if the process ends
            path.write_bytes(damaged)
            signal.setitimer(signal.ITIMER_PROF, 4 * MOST_SECONDS)  # ends the process
            if problem := broken(path, options):
                print(f"import_python: FOUND {problem} in {path}")
                return 1
            path.unlink()
            files += 1
    print(f"import_python: {files} files in {given.seconds:g} s, nothing found")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
