#!/usr/bin/env python3
"""Compare token assignment with HiGHS on identical instances, in one run.

    bench/token_assignment_highs.py cells BENCH [--filter REGEX]
    bench/token_assignment_highs.py plan PLAN LOAD

`cells` runs BENCH, the built token_assignment_bench, cell by cell. After each cell, HiGHS solves the same draws. `plan`
solves the instances given by a plan's placements and the load table with HiGHS, for comparison with
plan_us_per_layer_micro_step of `foremoe plan --json`.

HiGHS solves LP 1 of FineMoE: minimise t over quotas x ≥ 0 such that each expert's quotas sum to its load and each
rank's quotas to at most t. HiGHS runs dual simplex on one thread, warm-started from the previous instance's basis.
HiGHS's time is from its own run-time clock, and excludes building and changing the model. The time of a draw is the
minimum over passes on both sides, because other programs on the machine can only add time.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile

import highspy
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

PASSES = 5  # as in the benchmark


class Lp1:
    """LP 1 over a fixed set of slots. The experts in the slots and the experts' loads may change."""

    def __init__(self, num_experts, num_ranks, slots_per_rank):
        self.num_experts = num_experts
        self.num_slots = num_ranks * slots_per_rank
        self.expert_of_slot = np.full(self.num_slots, -1)
        self.solver = highspy.Highs()
        for option, value in {"output_flag": False, "threads": 1, "solver": "simplex"}.items():
            self.solver.setOptionValue(option, value)
        inf = highspy.kHighsInf
        lp = highspy.HighsLp()
        lp.num_col_ = self.num_slots + 1  # a quota per slot, then t
        lp.num_row_ = num_experts + num_ranks
        lp.col_cost_ = np.append(np.zeros(self.num_slots), 1.0)
        lp.col_lower_ = np.zeros(lp.num_col_)
        lp.col_upper_ = np.append(np.zeros(self.num_slots), inf)  # empty slots serve nothing
        lp.row_lower_ = np.append(np.zeros(num_experts), np.full(num_ranks, -inf))
        lp.row_upper_ = np.zeros(lp.num_row_)
        rank_rows = num_experts + np.arange(num_ranks)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.append(np.arange(self.num_slots + 1), self.num_slots + num_ranks)
        lp.a_matrix_.index_ = np.append(np.repeat(rank_rows, slots_per_rank), rank_rows)
        lp.a_matrix_.value_ = np.append(np.ones(self.num_slots), -np.ones(num_ranks))
        self.solver.passModel(lp)

    def place(self, expert_of_slot):
        """Place experts into slots. expert_of_slot: [rank × slot], −1 for empty slots."""
        for slot in np.flatnonzero(expert_of_slot != self.expert_of_slot):
            old, new = self.expert_of_slot[slot], expert_of_slot[slot]
            if old >= 0:
                self.solver.changeCoeff(int(old), int(slot), 0.0)
            if new >= 0:
                self.solver.changeCoeff(int(new), int(slot), 1.0)
            self.solver.changeColBounds(int(slot), 0.0, highspy.kHighsInf if new >= 0 else 0.0)
        self.expert_of_slot = expert_of_slot.copy()

    def solve(self, expert_load):
        """Return (seconds by HiGHS's clock, t)."""
        for expert, load in enumerate(expert_load):
            self.solver.changeRowBounds(expert, float(load), float(load))
        before = self.solver.getRunTime()
        self.solver.run()
        seconds = self.solver.getRunTime() - before
        if self.solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            sys.exit(f"HiGHS ended with {self.solver.getModelStatus()}")
        return seconds, self.solver.getInfo().objective_function_value


def ceil_of(t):
    return math.ceil(t - 1e-6 * max(1.0, abs(t)) / 16)  # ⌈t⌉, tolerating float error in t


def solve_draws(slot_expert, load):
    """Solve a sequence of loads on one placement with HiGHS. Return (seconds, ⌈t⌉), both [draw]."""
    seconds = np.full(len(load), np.inf)
    objective = np.zeros(len(load), np.int64)
    for _ in range(PASSES):
        lp = Lp1(load.shape[1], *slot_expert.shape)
        lp.place(slot_expert.ravel())
        for draw, of_draw in enumerate(load):
            taken, t = lp.solve(of_draw)
            seconds[draw] = min(seconds[draw], taken)
            objective[draw] = ceil_of(t)
    return seconds, objective


def run_cell(bench, name, path):
    subprocess.run([bench, f"--benchmark_filter=^{name}/"], env={**os.environ, "FOREMOE_DRAWS": path},
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return load_file(path)


def cells(args):
    listed = subprocess.run([args.bench, "--benchmark_list_tests", f"--benchmark_filter={args.filter}"],
                            stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    names = [name.split("/iterations:")[0] for name in listed if name.startswith("assign_cold/")]
    print("| E | R | replicas | Zipf | ours µs, median | p99 | HiGHS µs, median | p99 | ratio of medians | of p99 | objective |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|:--|")
    medians, tails, differing = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            draws = run_cell(args.bench, name, os.path.join(folder, "draws.safetensors"))
            theirs, objective = solve_draws(draws["slot_expert"], draws["load"])
            ours = draws["seconds"]
            differ = int(np.count_nonzero(objective != draws["max_load"]))
            (our_median, our_p99), (median, p99) = (1e6 * np.percentile(x, [50, 99]) for x in (ours, theirs))
            medians.append(median / our_median)
            tails.append(p99 / our_p99)
            differing += differ
            cell = " | ".join(part.split(":")[1] for part in name.split("/")[1:])
            print(f"| {cell} | {our_median:.2f} | {our_p99:.2f} | {median:.0f} | {p99:.0f} | {medians[-1]:.1f} "
                  f"| {tails[-1]:.1f} | {'same' if differ == 0 else f'{differ} differ'} |", flush=True)
    mean = math.exp(np.mean(np.log(medians)))
    print(f"\nratio of medians: geometric mean {mean:.1f}, least {min(medians):.1f}; "
          f"ratio of p99: least {min(tails):.1f}, geometric mean {math.exp(np.mean(np.log(tails))):.1f}; "
          f"objectives that differ: {differing} of {300 * len(names)}")
    sys.exit(differing > 0)


def plan(args):
    with safe_open(args.plan, "np") as file:
        slot_expert = file.get_tensor("slot_expert")  # [event][layer][rank][slot]
        slot_tokens = file.get_tensor("slot_tokens")
        micro_step = file.get_tensor("event_micro_step")
        forward = file.get_tensor("event_pass") == 0
    load = load_file(args.load)["load"].astype(np.int64).sum(axis=2)  # [micro_step][layer][expert]
    _, layers, ranks, slots = slot_expert.shape
    seconds, above = [], 0
    for layer in range(layers):
        lp = Lp1(load.shape[2], ranks, slots)
        for event in np.flatnonzero(forward):
            lp.place(slot_expert[event, layer].ravel().astype(np.int64))
            taken, t = lp.solve(load[micro_step[event], layer])
            seconds.append(taken)
            above += int(slot_tokens[event, layer].astype(np.int64).sum(axis=1).max() > ceil_of(t))
    result = {"highs_us_per_layer_micro_step": 1e6 * float(np.mean(seconds)),
              "highs_us_median": 1e6 * float(np.median(seconds)),
              "instances": len(seconds), "plan_above_optimum": above}
    print(json.dumps(result, indent=2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True)
    mode = modes.add_parser("cells", help="the grid of random placements and Zipf loads")
    mode.add_argument("bench", help="the built token_assignment_bench")
    mode.add_argument("--filter", default="assign_cold", help="cells to run, a regular expression on their names")
    mode.set_defaults(run=cells)
    mode = modes.add_parser("plan", help="the placements of a plan")
    mode.add_argument("plan", help="foremoe.plan file")
    mode.add_argument("load", help="foremoe.load file of the same micro-steps and ranks")
    mode.set_defaults(run=plan)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
