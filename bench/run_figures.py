#!/usr/bin/env python3
"""Print the figures on plan execution in lab/performance.md as Markdown tables.

    bench/run_figures.py gain|memory|returns|bitwise|regression [--data DIR] [--foremoe PROGRAM] [--plot FILE]

Each row is one run of `foremoe run INPUT --json`. Times are fitted to the thread CPU times of all ranks and repeats, and printed as ratios
between policies of the same run. `regression` trains for 100 steps and needs matplotlib for its plot.
"""

import json
import math
import os
import subprocess
import sys

from figures import command_line, table

TABLES_OF_8 = ("load-q30-ep8", "load-q30-ep8-bursty")
ROLLOUTS = ("rollout-math-full", "rollout-mixed")


class Runs:
    def __init__(self, program, data):
        self.program, self.data = program, data

    def run(self, name, *options):
        """Run a table and return its results by (policy, phase)."""
        path = os.path.join(self.data, name + ".safetensors")
        command = [self.program, "run", path, "--json", *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
        return {(o["policy"], o["phase"]): o for o in json.loads(done.stdout)}


def gain(runs):
    """Critical path of foremoe ÷ vanilla, compared with the ratio of their largest rank loads, which ρ predicts."""
    def rows():
        for name in (*ROLLOUTS, *TABLES_OF_8):
            size = ["--layers", 2, "--micro-steps", 4, "--hidden", 256, "--intermediate", 128, "--tokens-per-rank", 1024]
            if name in TABLES_OF_8:  # 8,192 tokens a rank
                size = ["--layers", 1, "--micro-steps", 2, "--hidden", 64, "--intermediate", 64]
            options = ["--ranks", 8, "--guest-slots", 2, "--policy", "vanilla,foremoe", *size, "--work-flops", 0, "--no-reference"]
            done = runs.run(name, *options)
            for phase in ("recompute", "policy_update"):
                vanilla, ours = done["vanilla", phase], done["foremoe", phase]
                measured = ours["critical_path_seconds"] / vanilla["critical_path_seconds"]
                predicted = ours["critical_path_rows"] / vanilla["critical_path_rows"]
                spread = measured * math.hypot(ours["critical_path_spread"], vanilla["critical_path_spread"])
                yield (name, phase, f"{vanilla['rho_computed']['mean']:.3f}", f"{ours['rho_computed']['mean']:.3f}", f"{predicted:.3f}",
                       f"{measured:.3f} ± {spread:.3f}", f"{100 * (measured / predicted - 1):+.1f} %", f"{1 / measured:.2f}×")
    table(("input", "phase", "ρ vanilla", "ρ foremoe", "predicted", "measured", "difference", "speedup of experts"), rows())


def memory(runs):
    """A rank's guest memory by residency, and the number and bytes of copies."""
    def rows():
        for residency in ("static", "resident", "shared"):
            done = runs.run("load-q30-ep8-bursty", "--ranks", 8, "--guest-slots", 2, "--policy", "foremoe", "--layers", 4, "--micro-steps", 4,
                            "--hidden", 64, "--intermediate", 32, "--residency", residency, "--repeats", 1, "--no-reference")
            for phase in ("recompute", "policy_update"):
                o = done["foremoe", phase]
                yield (residency, phase, o["guest_weight_bytes_per_rank"], o["guest_gradient_bytes_per_rank"], o["copies"],
                       o["copy_bytes"]["host_path"], o["copy_bytes"]["peer_path"], o["arena_bytes"], f"{o['rho_computed']['mean']:.3f}")
    table(("residency", "phase", "guest weights, bytes", "guest gradients, bytes", "copies", "host path, bytes", "peer path, bytes", "arena, bytes",
           "ρ"), rows())


def returns(runs):
    """Bytes of gradients sent home. A guest that stays in its slot sends its summed gradient once."""
    def rows():
        for name in ("load-q30-ep8", "load-q30-ep8-bursty"):
            sent = {}
            for residency in ("static", "resident", "shared"):
                done = runs.run(name, "--ranks", 8, "--guest-slots", 2, "--policy", "foremoe", "--layers", 2, "--micro-steps", 16,
                                "--hidden", 16, "--intermediate", 8, "--residency", residency, "--repeats", 1, "--no-reference")
                sent[residency] = done["foremoe", "policy_update"]["gradient_return_bytes"]
            yield (name, *(sent[r] for r in ("static", "resident", "shared")), f"{sent['static'] / sent['shared']:.2f}",
                   f"{sent['resident'] / sent['shared']:.2f}")
    table(("table", "static, bytes", "resident, bytes", "shared, bytes", "static ÷ shared", "resident ÷ shared"), rows())


def bitwise(runs):
    """Cost of outputs whose bits do not depend on a row's position."""
    def rows():
        for hidden, intermediate in ((64, 32), (256, 128)):
            options = ["--ranks", 8, "--guest-slots", 2, "--policy", "vanilla,foremoe", "--layers", 1, "--micro-steps", 2, "--hidden", hidden,
                       "--intermediate", intermediate, "--bitwise"]
            done = runs.run("rollout-math-full", *options)
            o = done["foremoe", "recompute"]
            yield (f"{hidden} × {intermediate}", f"{o['bitwise_cost']:.2f}×", done["vanilla", "recompute"]["output_digest"] == o["output_digest"])
    table(("hidden × intermediate", "cost of the forward", "outputs as vanilla's, bit for bit"), rows())


def regression(runs, plot=None):
    """Losses of 100 training steps with and without balancing."""
    losses = {}
    for optimizer, rate in (("sgd", 0.02), ("adam", 0.003)):
        done = runs.run("rollout-math-full", "--ranks", 8, "--guest-slots", 1, "--policy", "vanilla,foremoe", "--layers", 2, "--micro-steps", 2,
                        "--hidden", 16, "--intermediate", 8, "--steps", 100, "--optimizer", optimizer, "--learning-rate", rate, "--repeats", 1,
                        "--no-reference")
        losses[optimizer] = {p: done[p, "policy_update"]["losses"] for p in ("vanilla", "foremoe")}

    def rows():
        for optimizer, by_policy in losses.items():
            a, b = by_policy["vanilla"], by_policy["foremoe"]
            yield (optimizer, f"{a[0]:.4f}", f"{a[-1]:.4f}", f"{b[-1]:.4f}", f"{max(abs(x - y) for x, y in zip(a, b)):.2e}")
    table(("optimizer", "first loss", "last, vanilla", "last, foremoe", "largest difference at any step"), rows())
    if plot:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
        for axis, (optimizer, by_policy) in zip(axes, losses.items()):
            axis.plot(by_policy["vanilla"], color="0.6", linewidth=4, label="vanilla")
            axis.plot(by_policy["foremoe"], color="tab:blue", linewidth=1.2, label="foremoe")
            axis.set(title=optimizer, xlabel="step", ylabel="loss")
            axis.legend(frameon=False)
        figure.tight_layout()
        figure.savefig(plot)


def main():
    parser = command_line(__doc__, data=True)
    parser.add_argument("figure", choices=("gain", "memory", "returns", "bitwise", "regression"))
    parser.add_argument("--plot", help="regression: where to save the picture")
    arguments = parser.parse_args()
    runs = Runs(arguments.foremoe, arguments.data)
    if arguments.figure == "regression":
        regression(runs, arguments.plot)
    else:
        globals()[arguments.figure](runs)


if __name__ == "__main__":
    main()
