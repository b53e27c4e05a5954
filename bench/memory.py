#!/usr/bin/env python3
"""Print the memory of the fullest rank and the memory left for activations, a table of lab/performance.md.

    bench/memory.py [--foremoe PROGRAM]

Qwen3-30B-A3B on H100s with 80 GB: one micro-step with the routing and size of the experiment review-memory, on its 64
ranks, and on 8 ranks whose experts' optimizer states are divided among 8 groups. All 48 layers are drawn, because the
rank that needs most memory may differ between four layers and all 48. The table gives GB (10⁹ bytes) on the fullest
rank at its peak in the policy update, from `foremoe simulate --json`. The script fails if weights, gradients and
optimizer do not add up to the state that the program reports. Activations and free memory are given for recomputing
whole layers, recomputing only inside experts, and recomputing nothing. Activations follow the formulas under *Bytes* in
docs/users/simulation.md (activations_per_token and activations_per_row in src/foremoe/cluster/cost_model.cpp).
Activations exclude the output head's logits, 1.2 GB for 4,096 tokens in bf16 if stored in full.
"""

import functools
import json
import os
import tempfile

from figures import command_line, printed, table

CAPACITY = 80e9
# Qwen3-30B-A3B: parameters per expert, and the other parameters, replicated on every rank.
LAYERS, EXPERTS, EXPERT = 48, 128, 3 * 2048 * 768
OTHERS = LAYERS * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * EXPERTS) + 2 * 2048 * 151936
WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12  # bytes per parameter
MODES = {"layers": [], "experts": ["--keep-activations", "--recompute-experts"], "none": ["--keep-activations"]}
G2 = "vanilla,foremoe,relibra,ultraep,fastermoe"
RUNS = ((G2, ("--guest-slots", 2)), ("foremoe", ("--guest-slots", 1)), ("foremoe", ("--guest-slots", 2, "--residency", "shared")))


def states(ranks, shards):
    """Return a rank's bytes of weights, gradients and optimizer states."""
    own = LAYERS * EXPERTS // ranks * EXPERT
    return (own + OTHERS) * WEIGHT, (own + OTHERS) * GRADIENT, own * OPTIMIZER / shards + OTHERS * OPTIMIZER / ranks


def main():
    call = functools.partial(printed, command_line(__doc__).parse_args().foremoe)

    def memory(load, policies, options):
        """Return bytes by part, by policy."""
        how = ["--cluster", "h100", "--model", "qwen3-30b-a3b", "--dispatch", "row"]  # --dispatch does not affect memory
        found = json.loads(call("simulate", load, *how, "--policy", policies, *options, "--json"))
        return {of["policy"]: phase["memory"] for of in found for phase in of["phases"] if phase["phase"] == "policy_update"}

    def rows():
        for ranks, shards in ((64, 1), (8, 8)):
            with tempfile.TemporaryDirectory() as folder:
                load = os.path.join(folder, "mixed.load.safetensors")
                call("synth", "--shape", "qwen3-30b-a3b", "--micro-steps", 1, "--ranks", ranks, "--sequences-per-rank", 1,
                     "--tokens-per-rank", 4096, "--step-spread", 0.6, "--group-spread", 1, "--out", load)  # fmt: skip
                for policies, options in RUNS:
                    by_mode = [memory(load, policies, ("--optimizer-shards", shards, *options, *mode)) for mode in MODES.values()]
                    for policy, of in by_mode[0].items():
                        state, guests = states(ranks, shards), of["guest_weights"] + of["guest_gradients"]
                        if abs(of["state"] / sum(state) - 1) > 1e-6:
                            raise SystemExit(f"{policy}: state is {of['state']}, not {state} together")
                        activations = [modes[policy]["activations"] for modes in by_mode]
                        left = [CAPACITY - sum(state) - guests - bytes_ for bytes_ in activations]
                        name = ", ".join([policy, *map(str, options[1::2])])
                        yield ranks, name, *(f"{part / 1e9:.1f}" for part in (*state, guests, *activations, *left))

    parts = ("activations", "left")
    table(["ranks", "system, G", "weights", "gradients", "optimizer", "guests", *(f"{part}, {mode}" for part in parts for mode in MODES)],
          rows())  # fmt: skip


if __name__ == "__main__":
    main()
