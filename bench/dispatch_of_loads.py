#!/usr/bin/env python3
"""How well a load tells how long --dispatch token takes: the table of lab/performance.md.

    bench/dispatch_of_loads.py [--data DIR] [--foremoe PROGRAM]

Simulates the same routes twice on 64 ranks, as a trace, whose tokens are counted, and as its load, of which they are expected.
"""

import argparse
import functools
import json
import os
import tempfile

import numpy as np
from figures import printed, table
from safetensors.numpy import save_file

RANKS = 64
GROUPS, PER_TOKEN = 8, 4  # of DeepSeek-V3


def group_limited(path, experts=256, top_k=8, tokens=2048, micro_steps=2):
    """Routes drawn as DeepSeek-V3's router chooses: the groups whose two best experts score best, then the best experts of these."""
    random = np.random.default_rng(3)
    base = 0.7 * random.normal(size=experts)
    routes = []
    for source in range(micro_steps * RANKS):
        if source % 16 == 0:
            topic = random.normal(size=experts)
        score = base + topic + 0.3 * random.normal(size=experts) + random.gumbel(size=(tokens, experts))
        of_group = np.sort(score.reshape(tokens, GROUPS, -1), 2)[:, :, -2:].sum(2)
        kept = np.zeros((tokens, GROUPS), bool)
        np.put_along_axis(kept, np.argsort(-of_group, 1)[:, :PER_TOKEN], True, 1)
        score[~np.repeat(kept, experts // GROUPS, 1)] = -np.inf
        routes.append(np.argpartition(-score, top_k, 1)[:, :top_k].astype(np.uint16))
    sources = np.arange(micro_steps * RANKS)
    save_file({"routed_experts": np.concatenate(routes)[:, None], "cu_seqlens": np.arange(len(sources) + 1) * tokens,
               "micro_step": (sources // RANKS).astype(np.int32), "rank": (sources % RANKS).astype(np.int32)}, path,
              {"format": "foremoe.trace/1", "num_experts": str(experts), "top_k": str(top_k), "ranks": str(RANKS), "ranks_per_node": "8"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--foremoe", default="build/release/bin/foremoe")
    arguments = parser.parse_args()

    call = functools.partial(printed, arguments.foremoe)

    def inputs(folder):
        """Name, model, trace, and how the trace is batched."""
        drawn = ["synth", "--kind", "trace", "--ranks", RANKS, "--experts", 128]
        for name, options in (
            ("two sequences a rank", ["--layers", 1, "--micro-steps", 3, "--tokens-per-rank", 8192, "--group-spread", 0.5]),
            ("one sequence a rank", ["--layers", 2, "--micro-steps", 4, "--tokens-per-rank", 2048, "--sequences-per-rank", 1,
                                     "--group-spread", 1]),
        ):
            path = os.path.join(folder, f"{name}.safetensors")
            call(*drawn, *options, "--out", path)
            yield f"drawn, {name}", "qwen3-30b-a3b", path, []
        batched = ["--ranks", RANKS, "--tokens-per-rank", 2048]
        yield "recorded, rollout-mixed", "qwen3-30b-a3b", os.path.join(arguments.data, "rollout-mixed.safetensors"), batched
        path = os.path.join(folder, "groups.safetensors")
        group_limited(path)
        yield "drawn, 4 of 8 groups", "deepseek-v3", path, []

    def seconds(path, model, dispatch, batched):
        found = json.loads(call("simulate", path, *batched, "--cluster", "h100", "--model", model, "--guest-slots", 2, "--dispatch", dispatch,
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
