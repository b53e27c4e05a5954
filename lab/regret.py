#!/usr/bin/env python3
"""How much slower than the best plan are the default and --residency auto of policy foremoe?

    python lab/regret.py [--dispatch row] [--threads N]      needs the package foremoe; some minutes

58 cases: ten drawn loads, three recorded toy rollouts and the routes of gpt-oss-20b, on 8 to 64 H100, with one and two
guest slots. For each, all nine plans (residency × prefer) are modelled, with their planning time as measured here. The
regret of a choice is its step with planning ÷ the best of the nine − 1. Prints mean and maximum over the cases, and the
number of cases in which the choice is slower than no plan.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import foremoe
from foremoe import _core

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
PLANS = [(r, p) for r in ("static", "resident", "shared") for p in ("balance", "links", "time")]


def inputs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """File, model and input options of each case, without guest slots."""
    for name in ("q30-ep8", "q30-ep8-bursty", "q30-ep16", "q30-ep16-bursty", "q30-ep64", "q30-ep64-shuffled",
                 "q30-ep64-bursty", "v3-ep64", "v3-ep64-skewed", "v3-ep64-bursty"):  # fmt: skip
        model, recorded = ("qwen3-30b-a3b" if name.startswith("q30") else "deepseek-v3"), int(name.split("-")[1][2:])
        for ranks in (8, 16, 64) if recorded == 64 and model != "deepseek-v3" else {min(8, recorded), recorded}:
            if model == "deepseek-v3" and ranks != 64:
                continue
            cut = {"micro_steps": 16} if recorded == 64 else {}
            yield f"load-{name}", model, {"ranks": ranks, "fold": True, "ranks_per_node": 8, **cut}
    for name, ranks in itertools.product(("math", "math-full", "mixed"), (8, 16)):
        cut = {} if name == "math" else {"layers": 4}
        yield f"rollout-{name}", "qwen3-30b-a3b", {"ranks": ranks, "ranks_per_node": 8, "tokens_per_rank": 1024, **cut}
    for ranks, tokens, node in ((8, 1024, 8), (8, 4096, 8), (16, 1024, 8), (16, 4096, 8), (32, 1024, 4)):
        yield "rollout-gptoss", "gpt-oss-20b", {"ranks": ranks, "ranks_per_node": node, "tokens_per_rank": tokens}


def placed(load: foremoe.Load, **options: Any) -> tuple[float, str]:
    """Seconds of the step with measured planning, and the plan that was chosen."""
    figures = foremoe.evaluate(load, cluster="h100", **options).figures
    return figures["placement"]["step_seconds"], figures.get("choice", {}).get("plan", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatch", choices=("token", "row"), default="token")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    regrets: dict[str, list[float]] = {}
    slower: dict[str, int] = {}
    for (file, model, of_input), slots in itertools.product(inputs(), (1, 2)):
        (load,) = _core._read_input(str(DATA / f"{file}.safetensors"), of_input, given.threads)
        options = {"model": model, "dispatch": given.dispatch, "guest_slots": slots, "threads": given.threads}
        seconds = {f"{r}, {p}": placed(load, residency=r, prefer=p, **options)[0] for r, p in PLANS}
        none = seconds["no plan"] = foremoe.evaluate(load, "vanilla", cluster="h100", **options).figures["step_seconds"]
        best = min(seconds.values())
        chosen = {plan: plan for plan in seconds}
        chosen |= {"default": placed(load, **options)[1], "auto": placed(load, residency="auto", **options)[1]}
        for name, plan in chosen.items():
            regrets.setdefault(name, []).append(100 * (seconds[plan] / best - 1))
            slower[name] = slower.get(name, 0) + (seconds[plan] > none)
        print(f"{file}, {of_input['ranks']} ranks, G = {slots}: best {min(seconds, key=seconds.__getitem__)}, default "
              f"{chosen['default']} {regrets['default'][-1]:.1f} %, auto {chosen['auto']} {regrets['auto'][-1]:.1f} %",
              flush=True)  # fmt: skip
    print(f"{'':20} {'mean %':>7} {'max %':>7} {'slower than no plan':>20}   of {len(regrets['default'])} cases")
    for name, of_cases in regrets.items():
        print(f"{name:20} {statistics.mean(of_cases):7.2f} {max(of_cases):7.1f} {slower[name]:20}")


if __name__ == "__main__":
    main()
