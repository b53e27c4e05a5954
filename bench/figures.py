#!/usr/bin/env python3
"""The figures of lab/performance.md, printed as Markdown tables.

    bench/figures.py balance|static|shared|rehome|in-flight|links|ablation|growth|whole-step [--data DIR] [--foremoe PROGRAM]

Each row is one or more runs of `foremoe plan INPUT --json`, one thread, on the load tables of DIR (default data);
growth and whole-step draw their own with `foremoe synth`. What a row is held against stands beside it: figures of
simple planners on the same tables, given with the tables ("quota": an UltraEP-style search; "dynamic": a prototype with plain
retention; "static": guests by the tight sets of all micro-steps).
"""

import argparse
import json
import math
import os
import resource
import subprocess
import tempfile

# table: G: (quota mean, max, copies; static mean, max; dynamic mean, max, copies)
REFERENCE = {
    "q30-ep8": {1: (1.038, 1.129, 4.6, 1.099, 1.330, 1.017, 1.175, 4.1), 2: (1.013, 1.051, 5.9, 1.013, 1.108, 1.002, 1.010, 1.4)},
    "q30-ep8-bursty": {1: (1.062, 1.202, 4.6, 1.369, 1.997, 1.020, 1.263, 5.4), 2: (1.016, 1.080, 6.3, 1.195, 1.613, 1.003, 1.019, 3.4)},
    "q30-ep16": {1: (1.044, 1.116, 9.0, 1.094, 1.269, 1.025, 1.422, 7.7), 2: (1.013, 1.034, 11.8, 1.001, 1.018, 1.002, 1.010, 1.3)},
    "q30-ep16-bursty": {1: (1.067, 1.144, 9.8, 1.605, 2.467, 1.020, 1.365, 11.4), 2: (1.016, 1.045, 13.2, 1.316, 1.672, 1.004, 1.010, 5.9)},
    "q30-ep64": {1: (1.057, 1.090, 39.6, 1.073, 1.209, 1.008, 1.010, 9.6), 2: (1.011, 1.022, 51.5, 1.000, 1.003, 1.002, 1.010, 2.7)},
    "q30-ep64-shuffled": {1: (1.063, 1.086, 37.9, 1.009, 1.033, 1.005, 1.010, 2.7), 2: (1.012, 1.018, 50.5, 1.000, 1.000, 1.002, 1.010, 2.1)},
    "q30-ep64-bursty": {1: (1.075, 1.114, 40.0, 1.488, 1.757, 1.018, 1.239, 33.7), 2: (1.013, 1.030, 53.0, 1.058, 1.156, 1.003, 1.010, 6.3)},
    "v3-ep64": {1: (1.063, 1.090, 38.4, 1.057, 1.109, 1.008, 1.010, 12.1), 2: (1.014, 1.024, 52.0, 1.000, 1.004, 1.004, 1.010, 3.7)},
    "v3-ep64-skewed": {1: (1.077, 1.105, 40.9, 1.165, 1.291, 1.037, 1.291, 36.6), 2: (1.014, 1.025, 55.1, 1.001, 1.005, 1.002, 1.010, 4.9)},
    "v3-ep64-bursty": {1: (1.081, 1.148, 41.2, 1.931, 2.260, 1.045, 1.282, 50.9), 2: (1.015, 1.030, 54.1, 1.390, 1.566, 1.006, 1.010, 18.8)},
}
STATIC_4 = {
    "q30-ep8": (1.000, 1.013), "q30-ep8-bursty": (1.045, 1.200), "q30-ep16": (1.000, 1.005), "q30-ep16-bursty": (1.047, 1.184),
    "q30-ep64": (1.000, 1.003), "q30-ep64-shuffled": (1.000, 1.000), "q30-ep64-bursty": (1.000, 1.002), "v3-ep64": (1.001, 1.004),
    "v3-ep64-skewed": (1.001, 1.005), "v3-ep64-bursty": (1.009, 1.038),
}


class Runs:
    def __init__(self, program, data):
        self.program, self.data = program, data

    def plan(self, load, *options):
        """What `plan --json` prints, and cpu_seconds of the whole program."""
        path = load if load.endswith(".safetensors") else os.path.join(self.data, f"load-{load}.safetensors")
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "plan.safetensors")
            threads = [] if "--threads" in options else ["--threads", "1"]
            command = [self.program, "plan", path, "--out", out, "--json", *threads, *map(str, options)]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return {**json.loads(printed), "cpu_seconds": cpu_seconds}

    def synth(self, folder, *options):
        out = os.path.join(folder, "load.safetensors")
        subprocess.run([self.program, "synth", "--out", out, *map(str, options)], check=True, capture_output=True)
        return out


def rho(d):
    return f"{d['rho']['mean']:.3f}/{d['rho']['max']:.3f}"


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
    print()


def balance(runs):
    def rows():
        for name, by_slots in REFERENCE.items():
            for g, (qm, qx, qc, _, _, dm, dx, dc) in by_slots.items():
                d = runs.plan(name, "--guest-slots", g)
                yield (name, g, rho(d), f"{d['copies_per_layer_event']:.1f}", f"{qm:.3f}/{qx:.3f}, {qc}", f"{dm:.3f}/{dx:.3f}, {dc}",
                       f"{d['plan_us_per_layer_micro_step']:.0f}")
    table(("table", "G", "ρ mean/max", "copies", "quota", "dynamic", "planning, µs"), rows())


def static(runs):
    def rows():
        for name, by_slots in REFERENCE.items():
            for g in (1, 2, 4):
                mean, largest = STATIC_4[name] if g == 4 else by_slots[g][3:5]
                d = runs.plan(name, "--guest-slots", g, "--residency", "static")
                yield name, g, rho(d), f"{mean:.3f}/{largest:.3f}"
    table(("table", "G", "ρ mean/max", "reference"), rows())


def shared(runs):
    def rows():
        for name, by_slots in REFERENCE.items():
            d = runs.plan(name, "--guest-slots", 2, "--residency", "shared")
            copies, quota = d["copies_per_layer_event"], by_slots[2][2]
            yield name, rho(d), f"{copies:.1f}", quota, f"{copies / quota:.2f}"
    table(("table", "ρ mean/max", "copies", "quota", "ratio"), rows())


def rehome(runs):
    def rows():
        for name in ("q30-ep8", "q30-ep8-bursty", "q30-ep16", "q30-ep16-bursty"):
            for moves in ("free", 10):
                d = runs.plan(name, "--guest-slots", 1, "--rehome", moves)
                yield name, moves, rho(d), f"{d['copies_per_layer_event']:.1f}", d["home_moves"]
    table(("table", "--rehome", "ρ mean/max", "copies", "home moves, all layers"), rows())


def in_flight(runs):
    def rows():
        for name in ("q30-ep64", "v3-ep64-bursty"):
            for g in (1, 2):
                cells = []
                for k in (1, 2, 4, 8):
                    d = runs.plan(name, "--guest-slots", g, "--in-flight", k)
                    cells.append(f"{d['copies_per_layer_event'] * d['events'] / d['micro_steps']:.1f} at {rho(d)}")
                yield name, g, *cells
    table(("table", "G", "K = 1", "K = 2", "K = 4", "K = 8"), rows())


def links(runs):
    def rows():
        for name in (n for n in REFERENCE if "ep64" in n):
            vanilla = runs.plan(name, "--guest-slots", 0, "--policy", "vanilla")["node_link_tokens"]["max"]
            for g, prefer in ((1, "balance"), (2, "balance"), (2, "links")):
                d = runs.plan(name, "--guest-slots", g, "--prefer", prefer)
                yield (name, g, prefer, f"{d['node_link_tokens']['max'] / vanilla:.3f}", rho(d), f"{d['copies_per_layer_event']:.1f}")
    table(("table", "G", "--prefer", "busiest link ÷ vanilla's", "ρ mean/max", "copies"), rows())


def ablation(runs):
    def rows():
        for name in ("q30-ep8", "q30-ep64", "q30-ep64-bursty"):
            for stages in ("T", "B", "BT", "BL", "BLT", "BPT", "BLP", "BLPT"):
                d = runs.plan(name, "--guest-slots", 1, "--stages", stages)
                yield name, stages, rho(d), f"{d['copies_per_layer_event']:.1f}"
    table(("table", "--stages", "ρ mean/max", "copies"), rows())


def growth(runs):
    def rows():
        for ranks in (64, 256, 1024):
            experts = max(2 * ranks, 256)
            with tempfile.TemporaryDirectory() as folder:
                load = runs.synth(folder, "--ranks", ranks, "--experts", experts, "--layers", 1, "--micro-steps", 8)
                d = runs.plan(load, "--guest-slots", 1)
            us, copies = d["plan_us_per_layer_micro_step"], d["copies_per_layer_event"]
            unit = ranks * experts + copies * ranks * math.log2(ranks)
            yield ranks, experts, rho(d), f"{copies:.1f}", f"{us:.0f}", f"{d['cpu_seconds']:.2f}", f"{1000 * us / unit:.1f}"
    table(("R", "E", "ρ mean/max", "copies", "stages L, P, T: µs per (layer, micro-step)", "all planning, CPU s", "c, ns"), rows())


def whole_step(runs):
    def rows():
        with tempfile.TemporaryDirectory() as folder:
            load = runs.synth(folder, "--shape", "Qwen3-30B-A3B", "--ranks", 64, "--micro-steps", 32)
            for threads in (1, 2):
                d = runs.plan(load, "--guest-slots", 1, "--threads", threads)
                yield (threads, rho(d), f"{d['copies_per_layer_event']:.1f}", f"{d['plan_us_per_layer_micro_step']:.0f}", f"{d['cpu_seconds']:.1f}",
                       f"{d['plan_seconds']:.1f}")
    table(("threads", "ρ mean/max", "copies", "stages L, P, T: µs per (layer, micro-step)", "whole step, CPU s", "wall s"), rows())


def main():
    tables = {f.__name__.replace("_", "-"): f for f in (balance, static, shared, rehome, in_flight, links, ablation, growth, whole_step)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="+", choices=[*tables, "all"])
    parser.add_argument("--data", default="data", help="folder of the load tables")
    parser.add_argument("--foremoe", default="build/release/bin/foremoe", help="the program")
    arguments = parser.parse_args()
    runs = Runs(arguments.foremoe, arguments.data)
    for name in tables if "all" in arguments.table else arguments.table:
        tables[name](runs)


if __name__ == "__main__":
    main()
