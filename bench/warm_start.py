#!/usr/bin/env python3
"""Effect of --previous under drifting popularity: plans of a step without and with the previous step's plan.

    bench/warm_start.py [--foremoe PROGRAM]

Both steps are drawn from the same popularity, except that a fraction (drift) of every count of the second step comes
from another one. There are three draws of four layers and 16 micro-steps. ρ is given as mean and maximum over layers
and micro-steps. Copies are summed over the step, all layers and draws. Needs numpy and safetensors.
"""

import json
import pathlib
import subprocess
import tempfile

import numpy as np
from figures import command_line
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

MICRO_STEPS = 16
DRAWS = 3
RANKS = (8, 16)


def draw(program, folder, seed, ranks):
    out = folder / f"draw-{seed}.safetensors"
    shape = ["--ranks", ranks, "--layers", 4, "--micro-steps", 2 * MICRO_STEPS]
    rest = ["--sequences-per-rank", 2, "--tokens-per-rank", 4096, "--seed", seed, "--out", out]
    subprocess.run([program, "synth", *map(str, [*shape, *rest])], check=True, capture_output=True)
    with safe_open(out, "np") as file:
        return load_file(out)["load"].astype(np.int64), file.metadata()


def plan(program, load, out, *options):
    command = [program, "plan", load, "--out", out, "--threads", "1", "--json", *options]
    return json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


def main():
    program = command_line(__doc__).parse_args().foremoe
    print("| ranks | --residency | drift | ρ mean/max | copies | ρ with --previous | copies |")
    print("|---|---|---|---|---|---|---|")
    for ranks in RANKS:
        for residency in ("static", "resident"):
            for drift in (0, 0.1, 0.5, 1):
                sums = {"cold": [0, 0, 0], "warm": [0, 0, 0]}
                for seed in range(1, DRAWS + 1):
                    with tempfile.TemporaryDirectory() as name:
                        folder = pathlib.Path(name)
                        counts, metadata = draw(program, folder, seed, ranks)
                        other, _ = draw(program, folder, 1000 + seed, ranks)
                        second = (1 - drift) * counts[MICRO_STEPS:] + drift * other[MICRO_STEPS:]
                        for step, load in (("first", counts[:MICRO_STEPS]), ("second", np.rint(second))):
                            save_file({"load": load.astype(np.int32)}, folder / f"{step}.safetensors", metadata)
                        options = ("--residency", residency)
                        plan(program, folder / "first.safetensors", folder / "former.plan", *options)
                        for kind, previous in (("cold", ()), ("warm", ("--previous", folder / "former.plan"))):
                            figures = plan(program, folder / "second.safetensors", folder / "plan", *options, *previous)
                            mean, largest, copies = sums[kind]
                            rho = figures["rho"]
                            sums[kind] = [
                                mean + rho["mean"] / DRAWS,
                                max(largest, rho["max"]),
                                copies + figures["copies"],
                            ]
                cells = [cell for m, x, c in sums.values() for cell in (f"{m:.4f}/{x:.4f}", c)]
                print("| " + " | ".join(map(str, [ranks, residency, drift, *cells])) + " |", flush=True)


if __name__ == "__main__":
    main()
