#!/usr/bin/env python3
"""What a plan gains over the best layout that needs none, for large models.

    python lab/layouts.py [--draws 3] [--dispatch row] [--residency static] [--rows token] [--models NAME …]

Needs the package foremoe, and an hour of CPU time.

`foremoe layout` models every expert-parallel size and number of stages on H100 nodes of eight, with and without a plan,
for synthetic routes of two layers (grpo: 16 sequences of a group together). Each rank has 24 sequences of about 4,096
tokens: in micro-steps of two, or of one, which needs less memory. Prints, for each model, the fastest of all these
layouts that fits without a plan, the fastest with one, and the gain: mean and standard deviation over draws. The last
column has the gains at each expert-parallel size, at its fastest number of stages and sequences.
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


Layout = tuple[int, int, int]  # expert-parallel size, stages, sequences of a micro-step


def layouts_of(model: str, gpus: int, seed: int, options: dict[str, Any]) -> dict[str, dict[Layout, dict[str, Any]]]:
    """Returns the steps that fit, by kind and layout."""
    fits: dict[str, dict[Layout, dict[str, Any]]] = {"unplanned": {}, "planned": {}}
    for sequences in (1, 2):
        drawn: dict[str, Any] = {
            "shape": model, "layers": 2, "ranks": gpus, "micro_steps": 24 // sequences,
            "sequences_per_rank": sequences, "tokens_per_rank": 4096 * sequences, "seed": seed,
        }  # fmt: skip
        known = options["rows"] == "token"  # needs the routes
        load = foremoe.collect(foremoe.synthesize_trace(**drawn)) if known else foremoe.synthesize_load(**drawn)
        for of in foremoe.layout(load, cluster="h100", model=model, **options)["layouts"]:
            for kind, steps in fits.items():
                if of[kind] and of[kind]["fits"]:
                    steps[of["ep"], of["stages"], sequences] = of[kind]
    return fits


def name_of(layout: Layout) -> str:
    ep, stages, sequences = layout
    return f"EP {ep}, {stages} stages, {4096 * sequences} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--dispatch", choices=("token", "row"), default="token")
    parser.add_argument("--residency", choices=("auto", "static", "resident", "shared"), default="auto")
    parser.add_argument("--rows", choices=("order", "token"), default="order")
    parser.add_argument("--models", nargs="+", default=[model for model, _ in JOBS])
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    options = {name: getattr(given, name) for name in ("dispatch", "residency", "rows", "threads")}
    print("| model, GPUs | without a plan | with a plan | gain | gain at an expert-parallel size |\n|---|---|---|---|---|")
    for model, gpus in JOBS:
        if model not in given.models:
            continue
        gains: list[float] = []
        of_size: dict[int, list[float]] = collections.defaultdict(list)
        rows: dict[str, tuple[list[str], list[float], list[int]]] = {k: ([], [], []) for k in ("unplanned", "planned")}
        for seed in range(1, given.draws + 1):
            fits = layouts_of(model, gpus, seed, options)
            for kind, (names, seconds, memory) in rows.items():
                best = min(fits[kind], key=lambda layout: fits[kind][layout]["seconds"])
                names.append(name_of(best))
                seconds.append(fits[kind][best]["seconds"])
                memory.append(fits[kind][best]["memory_bytes"])
            gains.append(rows["unplanned"][1][-1] / rows["planned"][1][-1])
            for ep in sorted({layout[0] for layout in fits["planned"]}):
                least = {
                    kind: min((of["seconds"] for layout, of in steps.items() if layout[0] == ep), default=0.0)
                    for kind, steps in fits.items()
                }
                if least["unplanned"]:
                    of_size[ep].append(least["unplanned"] / least["planned"])
        sizes = ", ".join(f"{ep}: {statistics.mean(of):.2f}" for ep, of in sorted(of_size.items()))
        print(f"| {model}, {gpus} | {described(*rows['unplanned'])} | {described(*rows['planned'])} | "
              f"{spread(gains, 3)} | {sizes} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
