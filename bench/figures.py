#!/usr/bin/env python3
"""Print the figures of lab/performance.md as Markdown tables.

    bench/figures.py balance|static|shared|rehome|in-flight|links|ablation|growth|whole-step [--data DIR] [--foremoe PROGRAM]

Each row runs `foremoe plan INPUT --json` one or more times, single-threaded, on load tables in DIR (default: data).
growth and whole-step draw their own tables with `foremoe synth`. Three reference planners plan the same tables: "quota"
is `--policy ultraep --policy-option whole_group=1`; "dynamic" and "static" are in reference_planners.cpp, which must be built next to PROGRAM.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import tempfile

TABLES = (
    "q30-ep8", "q30-ep8-bursty", "q30-ep16", "q30-ep16-bursty", "q30-ep64", "q30-ep64-shuffled", "q30-ep64-bursty",
    "v3-ep64", "v3-ep64-skewed", "v3-ep64-bursty",
)


def printed(program, *options):
    """Return the program's standard output. If the program fails, exit with its output."""
    done = subprocess.run([program, *map(str, options)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{options}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def command_line(description, *, data=False):
    """Return a parser with --foremoe and, if `data`, --data for the repository's load tables."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", default="data", help="folder of the load tables")
    parser.add_argument("--foremoe", default="build/release/bin/foremoe", help="the program")
    return parser


class Runs:
    def __init__(self, program, data):
        self.program, self.data = program, data

    def plan(self, load, *options):
        """Return the output of `plan --json`, plus the whole program's cpu_seconds."""
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

    def reference(self, planner, name, guest_slots):
        """Return the output of a planner of reference_planners.cpp."""
        program = os.path.join(os.path.dirname(self.program), "reference_planners")
        command = [program, planner, os.path.join(self.data, f"load-{name}.safetensors"), str(guest_slots)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def synth(self, folder, *options):
        out = os.path.join(folder, "load.safetensors")
        subprocess.run([self.program, "synth", "--out", out, *map(str, options)], check=True, capture_output=True)
        return out


def rho(d):
    return f"{d['rho']['mean']:.3f}/{d['rho']['max']:.3f}"


def copies(d):
    return f"{d['copies_per_layer_event']:.1f}"


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
    print()


def balance(runs):
    def rows():
        for name in TABLES:
            for g in (1, 2):
                d = runs.plan(name, "--guest-slots", g)
                quota = runs.plan(name, "--guest-slots", g, "--policy", "ultraep", "--policy-option", "whole_group=1")
                dynamic = runs.reference("dynamic", name, g)
                yield (name, g, rho(d), copies(d), f"{rho(quota)}, {copies(quota)}", f"{rho(dynamic)}, {copies(dynamic)}",
                       f"{d['plan_us_per_layer_micro_step']:.0f}")
    table(("table", "G", "ρ mean/max", "copies", "quota", "dynamic", "planning, µs"), rows())


def static(runs):
    def rows():
        for name in TABLES:
            for g in (1, 2, 4):
                d = runs.plan(name, "--guest-slots", g, "--residency", "static")
                yield name, g, rho(d), rho(runs.reference("static", name, g))
    table(("table", "G", "ρ mean/max", "reference"), rows())


def shared(runs):
    def rows():
        for name in TABLES:
            d = runs.plan(name, "--guest-slots", 2, "--residency", "shared")
            quota = runs.plan(name, "--guest-slots", 2, "--policy", "ultraep", "--policy-option", "whole_group=1")
            ratio = d["copies_per_layer_event"] / quota["copies_per_layer_event"]
            yield name, rho(d), copies(d), copies(quota), f"{ratio:.2f}"
    table(("table", "ρ mean/max", "copies", "quota", "ratio"), rows())


def rehome(runs):
    def rows():
        for name in ("q30-ep8", "q30-ep8-bursty", "q30-ep16", "q30-ep16-bursty"):
            for moves in ("free", 10):
                d = runs.plan(name, "--guest-slots", 1, "--rehome", moves)
                yield name, moves, rho(d), copies(d), d["home_moves"]
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
        for name in (n for n in TABLES if "ep64" in n):
            vanilla = runs.plan(name, "--guest-slots", 0, "--policy", "vanilla")["node_link_tokens"]["max"]
            for g, prefer in ((1, "balance"), (2, "balance"), (2, "links")):
                d = runs.plan(name, "--guest-slots", g, "--prefer", prefer)
                yield (name, g, prefer, f"{d['node_link_tokens']['max'] / vanilla:.3f}", rho(d), copies(d))
    table(("table", "G", "--prefer", "busiest link ÷ vanilla's", "ρ mean/max", "copies"), rows())


def ablation(runs):
    def rows():
        for name in ("q30-ep8", "q30-ep64", "q30-ep64-bursty"):
            for stages in ("T", "B", "BT", "BL", "BLT", "BPT", "BLP", "BLPT"):
                d = runs.plan(name, "--guest-slots", 1, "--stages", stages)
                yield name, stages, rho(d), copies(d)
    table(("table", "--stages", "ρ mean/max", "copies"), rows())


def growth(runs):
    bursty = ("--tokens-per-rank", 4096, "--sequences-per-rank", 1, "--group-spread", 1)
    loads = [(64, 256, "usual"), (256, 512, "usual"), (1024, 2048, "usual"), (4096, 8192, "usual"),
             *((ranks, ranks, "bursty") for ranks in (128, 256, 512, 1024))]

    def rows():
        for ranks, experts, kind in loads:
            with tempfile.TemporaryDirectory() as folder:
                options = bursty if kind == "bursty" else ()
                shape = ("--ranks", ranks, "--experts", experts, "--layers", 1, "--micro-steps", 8 if ranks < 4096 else 2)
                d = runs.plan(runs.synth(folder, *shape, *options), "--guest-slots", 1)
            us, copies = d["plan_us_per_layer_micro_step"], d["copies_per_layer_event"]
            unit = ranks * experts + copies * ranks * math.log2(ranks)
            yield (kind, ranks, experts, rho(d), f"{copies:.1f}", f"{us:.0f}", f"{d['cpu_seconds']:.2f}",
                   f"{1000 * us / unit:.1f}")
    table(("load", "R", "E", "ρ mean/max", "copies", "stages L, P, T: µs per (layer, micro-step)", "all planning, CPU s",
           "c, ns"), rows())


def whole_step(runs):
    def rows():
        with tempfile.TemporaryDirectory() as folder:
            load = runs.synth(folder, "--shape", "Qwen3-30B-A3B", "--ranks", 64, "--micro-steps", 32)
            for threads in (1, 2):
                d = runs.plan(load, "--guest-slots", 1, "--threads", threads)
                yield (threads, rho(d), copies(d), f"{d['plan_us_per_layer_micro_step']:.0f}", f"{d['cpu_seconds']:.1f}",
                       f"{d['plan_seconds']:.1f}")
    table(("threads", "ρ mean/max", "copies", "stages L, P, T: µs per (layer, micro-step)", "whole step, CPU s", "wall s"), rows())


def main():
    tables = {f.__name__.replace("_", "-"): f for f in (balance, static, shared, rehome, in_flight, links, ablation, growth, whole_step)}
    parser = command_line(__doc__, data=True)
    parser.add_argument("table", nargs="+", choices=[*tables, "all"])
    arguments = parser.parse_args()
    runs = Runs(arguments.foremoe, arguments.data)
    for name in tables if "all" in arguments.table else arguments.table:
        tables[name](runs)


if __name__ == "__main__":
    main()
