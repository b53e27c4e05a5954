#!/usr/bin/env python3
"""Accuracy of times predicted from a load for --dispatch token: a table of lab/performance.md.

    bench/dispatch_of_loads.py [--data DIR] [--foremoe PROGRAM]

Simulates the same routes on 64 ranks twice: as a trace, which counts tokens exactly, and as its load, which gives expected counts.
"""

import functools
import json
import os
import tempfile

from figures import command_line, printed, table

RANKS = 64


def main():
    arguments = command_line(__doc__, data=True).parse_args()

    call = functools.partial(printed, arguments.foremoe)

    def inputs(folder):
        """Yield name, model, trace and batching options."""
        def drawn(name, *options):
            path = os.path.join(folder, f"{name}.safetensors")
            call("synth", "--kind", "trace", "--ranks", RANKS, *options, "--out", path)
            return path

        two = drawn("two", "--layers", 1, "--micro-steps", 3)
        yield "drawn, two sequences a rank", "qwen3-30b-a3b", two, []
        bursty = ["--sequences-per-rank", 1, "--tokens-per-rank", 2048, "--group-spread", 1]
        one = drawn("one", "--layers", 2, "--micro-steps", 4, *bursty)
        yield "drawn, one sequence a rank", "qwen3-30b-a3b", one, []
        batched = ["--ranks", RANKS, "--tokens-per-rank", 2048]
        yield "recorded, rollout-mixed", "qwen3-30b-a3b", os.path.join(arguments.data, "rollout-mixed.safetensors"), batched
        groups = ["--expert-groups", 8, "--groups-per-token", 4]  # as in DeepSeek-V3
        for name, options in (("4 of 8 groups", groups), ("without its model's groups", [])):
            path = drawn(name, "--layers", 1, "--micro-steps", 2, "--shape", "deepseek-v3", *bursty, *options)
            yield f"drawn, {name}", "deepseek-v3", path, []

    def seconds(path, model, dispatch, batched):
        found = json.loads(call("simulate", path, *batched, "--cluster", "h100", "--model", model, "--guest-slots", 2, "--dispatch", dispatch,
                                "--sequence-tokens", 4096,  # a load does not record lengths
                                "--policy", "vanilla,foremoe", "--json"))
        return {of["policy"]: of["step_seconds"] for of in found}

    def rows():
        with tempfile.TemporaryDirectory() as folder:
            for name, model, trace, batched in inputs(folder):
                load = os.path.join(folder, "load.safetensors")
                call("collect", trace, *batched, "--out", load)
                for dispatch in ("token", "row"):
                    counted, expected = seconds(trace, model, dispatch, batched), seconds(load, model, dispatch, [])
                    for policy, of_trace in counted.items():
                        difference = 100 * (expected[policy] / of_trace - 1)
                        yield name, dispatch, policy, f"{of_trace:.4f}", f"{expected[policy]:.4f}", f"{difference:+.2f} %"

    table(["routes", "dispatch", "policy", "trace, s", "load, s", "difference"], rows())


if __name__ == "__main__":
    main()
