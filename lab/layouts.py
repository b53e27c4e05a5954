#!/usr/bin/env python3
"""What a plan gains over the best layout that needs none, for large models.

    python lab/layouts.py [--micro-steps 12] [--draws 3] [--dispatch token] [--threads N]      needs the package foremoe

`foremoe layout` models every expert-parallel size and number of stages on H100 nodes of eight, with and without a plan,
for synthetic routes of two layers and 8,192 tokens per rank and micro-step (grpo: 16 sequences of a group together).
Prints, for each model, the fastest layout that fits without a plan, the fastest with one, and the gain: mean and
standard deviation over draws. The last column has the gains at each expert-parallel size, at its fastest number of
stages.
"""

from __future__ import annotations

import argparse
import collections
import statistics
from typing import Any

import foremoe

JOBS = [("Qwen3-30B-A3B", 64), ("Qwen3-235B-A22B", 128), ("GLM-4.5", 160), ("DeepSeek-V3", 256)]


def spread(values: list[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def described(layouts: list[str], seconds: list[float], memory: list[int]) -> str:
    names = " or ".join(dict.fromkeys(layouts))
    return f"{names}: {spread(seconds, 1)} s, {max(memory) / 1e9:.0f} GB"


def steps(found: dict[str, Any], kind: str) -> dict[tuple[int, int], dict[str, Any]]:
    """Returns the steps of a kind that fit, by expert-parallel size and stages."""
    return {(of["ep"], of["stages"]): of[kind] for of in found["layouts"] if of[kind] and of[kind]["fits"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-steps", type=int, default=12)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--dispatch", choices=("token", "row"), default="token")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    print("| model, GPUs | without a plan | with a plan | gain | gain at an expert-parallel size |\n|---|---|---|---|---|")
    for model, gpus in JOBS:
        gains: list[float] = []
        of_size: dict[int, list[float]] = collections.defaultdict(list)
        rows: dict[str, tuple[list[str], list[float], list[int]]] = {k: ([], [], []) for k in ("unplanned", "planned")}
        for seed in range(1, given.draws + 1):
            load = foremoe.synthesize_load(
                shape=model, layers=2, ranks=gpus, micro_steps=given.micro_steps, tokens_per_rank=8192, seed=seed
            )
            found = foremoe.layout(load, cluster="h100", model=model, dispatch=given.dispatch, threads=given.threads)
            least = {}
            for kind, (names, seconds, memory) in rows.items():
                fits = steps(found, kind)
                ep, stages = min(fits, key=lambda layout: fits[layout]["seconds"])
                names.append(f"EP {ep}, {stages} stages")
                seconds.append(fits[ep, stages]["seconds"])
                memory.append(fits[ep, stages]["memory_bytes"])
                least[kind] = seconds[-1]
            gains.append(least["unplanned"] / least["planned"])
            planned, unplanned = steps(found, "planned"), steps(found, "unplanned")
            for ep in sorted({ep for ep, _ in planned}):
                best = min(of["seconds"] for layout, of in planned.items() if layout[0] == ep)
                without = [of["seconds"] for layout, of in unplanned.items() if layout[0] == ep]
                if without:
                    of_size[ep].append(min(without) / best)
        sizes = ", ".join(f"{ep}: {statistics.mean(of):.2f}" for ep, of in sorted(of_size.items()))
        print(f"| {model}, {gpus} | {described(*rows['unplanned'])} | {described(*rows['planned'])} | "
              f"{spread(gains, 3)} | {sizes} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
