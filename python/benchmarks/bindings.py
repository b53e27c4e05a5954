"""Overhead of calls from Python over the C++ functions that they call. In the root of the repository:

PYTHONPATH=build/python $(scripts/setup python) python/benchmarks/bindings.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import numpy as np
from timing import median_seconds

import foremoe


def overhead_of_plan(load: foremoe.Load, runs: int) -> float:
    """Return the median seconds of plan() beyond the planner's own wall time."""
    overheads = []
    for _ in range(runs):
        begin = time.perf_counter()
        plan = foremoe.plan(load, threads=1)
        overheads.append(time.perf_counter() - begin - plan.times.wall_seconds)
    return statistics.median(overheads)


def main() -> None:
    small = foremoe.Load.from_array(np.full((1, 1, 4, 16), 10, np.int64))
    large = foremoe.read_load("data/load-q30-ep64-bursty.safetensors")
    shape = "×".join(map(str, large.array.shape))
    print(f"plan beside planning, 1×1×4×16          {1e3 * overhead_of_plan(small, 200):8.3f} ms")
    print(f"plan beside planning, {shape:<17} {1e3 * overhead_of_plan(large, 5):8.3f} ms")
    array = large.array.copy()
    print(f"Load.from_array, {shape:<22} {1e3 * median_seconds(lambda: foremoe.Load.from_array(array), 20):8.3f} ms")

    plan = foremoe.plan(large)
    turns = foremoe.RankTurns(plan, large, rank=5, expert_bytes=9437184)
    make = median_seconds(lambda: foremoe.RankTurns(plan, large, rank=5, expert_bytes=9437184), 3)
    print(f"RankTurns of the step, 64 ranks         {1e3 * make:8.3f} ms, {len(turns)} turns")
    numbers = iter(range(10**9))
    each = median_seconds(lambda: turns[next(numbers) % len(turns)], 2000)
    print(f"one turn, 64 ranks                      {1e6 * each:8.1f} µs")
    turn = turns["forward", 3, 1]
    counts = large.array[3, 1, 5]
    routes = np.random.default_rng(0).permutation(np.repeat(np.arange(large.num_experts), counts)).astype(np.int32)
    routes = routes[: len(routes) // large.top_k * large.top_k].reshape(-1, large.top_k)
    order = median_seconds(lambda: turn.row_order(routes), 200)
    print(f"row_order of {routes.size} rows               {1e6 * order:8.1f} µs")

    command = [sys.executable, "-c", "import foremoe"]
    bare = [sys.executable, "-c", "import numpy"]
    with_foremoe = median_seconds(lambda: subprocess.run(command, check=True), 9)
    with_numpy = median_seconds(lambda: subprocess.run(bare, check=True), 9)
    print(f"import foremoe                          {with_foremoe:8.3f} s, import numpy {with_numpy:.3f} s")


if __name__ == "__main__":
    main()
