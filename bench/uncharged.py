#!/usr/bin/env python3
"""Upper bounds on the costs that the simulator does not charge: a table of lab/performance.md.

    bench/uncharged.py [--data DIR] [--foremoe PROGRAM]

Qwen3-30B-A3B on H100s, two guest slots, mean milliseconds per step and rank:

memory of copies   memory traffic: each copy is read once and written once
adding gradients   memory traffic at home: two reads and one write per returned gradient
24 processors      UltraEP reserves 24 of 132 processors for copies: this fraction of the time in which copies and
                   gradients cross a link at full speed
other optimizer    optimizer of the dense parameters, divided among the ranks, computed as for experts
busiest mover      extra time of the rank that sends or receives most homes, beyond the charged mean

Each cost is an upper bound, because it assumes no overlap with work that uses other resources.
"""

import functools
import json
import os
import tempfile

import numpy as np
from figures import command_line, printed, table
from safetensors.numpy import load_file

MEMORY = 2.96e12  # bytes per second: data/clusters/h100.toml
LINKS = {"peers": 370e9, "network": 45e9, "host": 53e9}
PROCESSORS = 24 / 132
GRADIENT, OPTIMIZER, WEIGHT = 4, 12, 2  # bytes per parameter, as in src/foremoe/cluster/cost_model.h
# Qwen3-30B-A3B: attention and router of 48 layers, embedding and head.
OTHER_PARAMETERS = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128) + 2 * 2048 * 151936


def busiest_mover(call, load, policy, ranks):
    """Return the largest number of homes that a rank sends or receives ÷ the mean, or 1 if no home moves."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "plan.safetensors")
        call("plan", load, "--policy", policy, "--guest-slots", 2, "--out", out)
        home = load_file(out)["home"]
    before = np.broadcast_to(np.arange(home.shape[1]) * ranks // home.shape[1], home.shape)
    moved = home != before
    busiest = max(np.bincount(of[moved], minlength=ranks).max() for of in (home, before))
    return busiest * ranks / moved.sum() if moved.any() else 1


def carried(of, what):
    """Return a rank's mean bytes of copies or gradients by link, without the host-link share of network traffic."""
    traffic = [{link["link"]: link[f"{what}_bytes"] for link in phase["traffic"]} for phase in of["phases"]]
    found = {link: sum(phase[link] for phase in traffic) / of["ranks"] for link in LINKS}
    return found | {"host": found["host"] - found["network"]}


def uncharged(call, load, of):
    """Return the seconds of each cost, in column order."""
    ranks, moving = of["ranks"], of["home_move_seconds"]
    copies, gradients = carried(of, "copy"), carried(of, "gradient")
    crossing = sum((copies[link] + gradients[link]) / speed for link, speed in LINKS.items())
    return [
        2 * sum(copies.values()) / MEMORY,
        3 * sum(gradients.values()) / MEMORY,
        PROCESSORS * crossing,
        OTHER_PARAMETERS / ranks * (GRADIENT + 2 * OPTIMIZER + WEIGHT) / MEMORY,
        moving * (busiest_mover(call, load, of["policy"], ranks) - 1) if moving else 0,
    ]


def main():
    arguments = command_line(__doc__, data=True).parse_args()
    call = functools.partial(printed, arguments.foremoe)

    def rows():
        for name in ("q30-ep8-bursty", "q30-ep64-bursty"):
            load = os.path.join(arguments.data, f"load-{name}.safetensors")
            found = json.loads(call("simulate", load, "--cluster", "h100", "--model", "qwen3-30b-a3b", "--guest-slots", 2,
                                    "--policy", "vanilla,ema,eplb,ultraep,relibra,foremoe", "--json"))  # fmt: skip
            for of in found:
                costs, step = uncharged(call, load, of), of["step_seconds"]
                yield (name, of["policy"], f"{1e3 * step:.0f}", *(f"{1e3 * cost:.1f}" for cost in costs),
                       f"{100 * sum(costs) / step:.2f} %")  # fmt: skip

    table(["load", "policy", "step, ms", "memory of copies", "adding gradients", "24 processors", "other optimizer", "busiest mover",
           "all ÷ step"], rows())  # fmt: skip


if __name__ == "__main__":
    main()
