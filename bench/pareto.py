#!/usr/bin/env python3
"""Pareto-optimal points in (memory, ρ, copies) over all policies on every load table.

    bench/pareto.py [--data DIR] [--foremoe PROGRAM] [--tables A,B] [--points]

Memory is the number of experts in a rank's guest buffers over all layers of the model (not the load table's): layers · G, or G under
`shared` with one set of buffers. A second set would only help systems that copy before the router; this gain is ignored. ρ is the mean over
(layer, micro-step). Copies: per layer and event, over the whole group, including moves of homes. A point beats another if it is no worse in
all three and better in one. Each system plans with 1 and 2 guest slots (finemoe-random and -symmetric with the (d − 1)·E/R that they need,
d = 2). ForeMoE plans with residency static, resident and shared, at its default tolerance and at 0. For each load, the first table counts
our points that no other system beats, and other systems' points that ours equal or beat. It lists the rest. `--points` prints all points.
"""

import json
import os
import subprocess
from dataclasses import dataclass

from figures import TABLES, command_line, table

OURS = [("foremoe", ["--residency", r, *t]) for r in ("static", "resident", "shared") for t in ([], ["--tolerance", "0"])]


LAYERS = {"q30": 48, "v3": 58}  # Qwen3-30B-A3B and DeepSeek-V3


@dataclass(frozen=True)
class Point:
    policy: str
    how: str
    memory: int
    rho: float
    copies: float
    largest: float
    us: float

    def values(self):
        return self.memory, round(self.rho, 4), round(self.copies, 2)

    def covers(self, other):
        return all(a <= b for a, b in zip(self.values(), other.values()))

    def beats(self, other):
        return self.covers(other) and self.values() != other.values()


def points_of(compare, name, path):
    layers = LAYERS[name.split("-")[0]]
    shape = compare(path, 0, "vanilla", [])[0]
    per_rank = shape["experts"] // shape["ranks"]
    for slots in sorted({1, 2, per_rank}):
        others = "finemoe-random,finemoe-symmetric" if slots == per_rank and slots > 2 else "all"
        for policy, options in [(others, []), *([] if slots > 2 else OURS)]:
            for d in compare(path, slots, policy, options):
                if "skipped" in d or (d["policy"] in ("foremoe", "static") and policy == "all"):
                    continue
                memory = 0 if d["guest_slots"] == 0 else slots * (1 if d["residency"] == "shared" else layers)
                copies = d["copies_per_layer_event"] + d["home_moves"] / (d["layers"] * d["events"])
                how = " ".join([f"G={slots}", d["residency"], *options[2:]])
                yield Point(d["policy"], how, memory, d["rho"]["mean"], copies, d["rho"]["max"], d["plan_us_per_layer_micro_step"])


def main():
    parser = command_line(__doc__, data=True)
    parser.add_argument("--tables", default=",".join(TABLES), help="of them, these")
    parser.add_argument("--points", action="store_true", help="print every point as well")
    arguments = parser.parse_args()

    def compare(path, slots, policy, options):
        command = [arguments.foremoe, "compare", path, "--guest-slots", str(slots), "--policy", policy, "--threads", "1", "--json"]
        return json.loads(subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout)

    def row(name, points):
        ours = [p for p in points if p.policy == "foremoe"]
        others = [p for p in points if p.policy not in ("foremoe", "vanilla")]
        beaten = {p: next((o for o in others if o.beats(p)), None) for p in ours}
        left = [o for o in others if not any(p.covers(o) for p in ours)]
        return (name, f"{sum(b is None for b in beaten.values())} of {len(ours)}",
                "; ".join(f"{p.how} by {b.policy} {b.how}" for p, b in beaten.items() if b) or "none",
                f"{len(others) - len(left)} of {len(others)}", "; ".join(f"{o.policy} {o.how}" for o in left) or "none")

    all_points = {}
    def rows():
        for name in arguments.tables.split(","):
            all_points[name] = list(points_of(compare, name, os.path.join(arguments.data, f"load-{name}.safetensors")))
            yield row(name, all_points[name])
    table(("table", "ours that nothing beats", "ours beaten", "others that ours equals or beats", "others left"), rows())
    if arguments.points:
        for name, points in all_points.items():
            table((name, "how", "memory, experts", "ρ mean/max", "copies", "µs"),
                  [(p.policy, p.how, p.memory, f"{p.rho:.4f}/{p.largest:.4f}", f"{p.copies:.2f}", f"{p.us:.0f}")
                   for p in sorted(points, key=lambda p: p.values())])


if __name__ == "__main__":
    main()
