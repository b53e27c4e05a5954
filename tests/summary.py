#!/usr/bin/env python3
"""Counts the tests of the last ctest run, in which each process runs many tests: tests/summary.py build/asan

Prints skipped and failed tests, the ten slowest tests, and one line of counts.
"""

import pathlib
import re
import sys

GTEST = re.compile(r"^\[ +(OK|SKIPPED|FAILED) +\] ([\w/.]+?)(?:, where .*)?(?: \((\d+) ms\))$", re.MULTILINE)
STARTED = re.compile(r"^\[ RUN      \] ([\w/.]+)$", re.MULTILINE)
PYTHON = re.compile(r"^(\w+) \(([\w.]+)\)(?:\n.*)? \.\.\. (ok|FAIL|ERROR|skipped .*)$", re.MULTILINE)
ENTRY = re.compile(r'^\d+/\d+ Testing: (\S+)\n(.*?)^"\1" end time:', re.MULTILINE | re.DOTALL)


def tests_of(entry, text):
    """Returns (name, outcome, seconds) of every test of a process, or of the process if it does not list its tests."""
    found = {name: (outcome, int(ms) / 1000) for outcome, name, ms in GTEST.findall(text)}
    for name in STARTED.findall(text):
        found.setdefault(name, ("FAILED", 0.0))  # the process ended during this test
    for name, place, outcome in PYTHON.findall(text):
        word = {"ok": "OK", "FAIL": "FAILED", "ERROR": "FAILED"}.get(outcome, "SKIPPED")
        found[f"{place}.{name}" if not place.endswith(name) else place] = (word, 0.0)
    seconds = float(re.search(r"^Test time = +([\d.]+) sec", text, re.MULTILINE)[1])
    passed = re.search(r"^Test Passed\.", text, re.MULTILINE)
    if not found and re.search(r"OK \(skipped=\d+\)$", text, re.MULTILINE):
        found[entry] = ("SKIPPED", seconds)  # ctest logs its exit code 77 as passed
    if not passed and all(outcome != "FAILED" for outcome, _ in found.values()):
        found[entry] = ("SKIPPED" if "Test Skipped." in text else "FAILED", seconds)
    return [(f"{entry}: {name}" if name != entry else entry, *rest) for name, rest in found.items()] or [(entry, "OK", seconds)]


def main():
    log = pathlib.Path(sys.argv[1], "Testing", "Temporary", "LastTest.log").read_text(encoding="utf-8", errors="replace")
    tests = [test for entry, text in ENTRY.findall(log) for test in tests_of(entry, text)]
    for word in ("SKIPPED", "FAILED"):
        for name in (name for name, outcome, _ in tests if outcome == word):
            print(f"{word.lower()}: {name}")
    slowest = sorted(tests, key=lambda test: -test[2])[:10]
    print("slowest: " + ", ".join(f"{name.split(': ')[-1]} {seconds:.1f} s" for name, _, seconds in slowest))
    count = lambda word: sum(outcome == word for _, outcome, _ in tests)
    print(f"{len(tests)} tests: {count('OK')} passed, {count('FAILED')} failed, {count('SKIPPED')} skipped")


if __name__ == "__main__":
    main()
