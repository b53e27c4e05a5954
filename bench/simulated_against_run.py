#!/usr/bin/env python3
"""The simulator compared with execution: a table of lab/performance.md.

    bench/simulated_against_run.py [--data DIR] [--foremoe PROGRAM] [--ranks N]

Calibrates this machine, executes vanilla and foremoe on a recorded step (`foremoe run`), and simulates the same step on the calibrated
cluster (`foremoe simulate`). Compares the measured and the predicted ratio foremoe ÷ vanilla of the experts' critical path: Σ over turns
of the slowest rank's expert time. Measured times are CPU seconds, fitted over all ranks and five repeats.
"""

import functools
import json
import os
import tempfile

from figures import command_line, printed, table

HIDDEN, INTERMEDIATE, LAYERS, MICRO_STEPS = 128, 64, 2, 4


def config(folder, experts, top_k):
    """Write the shape that `foremoe run` executes as a config.json. The attention sizes are placeholders."""
    path = os.path.join(folder, "small.json")
    with open(path, "w") as file:
        json.dump({"model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
                   "intermediate_size": INTERMEDIATE, "num_experts": experts, "num_experts_per_tok": top_k, "vocab_size": 1000,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}, file)
    return path


def main():
    parser = command_line(__doc__, data=True)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()

    call = functools.partial(printed, arguments.foremoe)

    def rows(folder):
        cluster = os.path.join(folder, "machine.toml")
        call("calibrate", "--ranks", arguments.ranks, "--hidden", HIDDEN, "--intermediate", INTERMEDIATE, "--out", cluster)
        model = config(folder, 128, 8)
        for name in ("rollout-math-full", "rollout-mixed"):
            step = [os.path.join(arguments.data, name + ".safetensors"), "--ranks", arguments.ranks, "--tokens-per-rank", 1024, "--layers", LAYERS,
                    "--micro-steps", MICRO_STEPS, "--guest-slots", 2, "--policy", "vanilla,foremoe", "--json"]
            run = json.loads(call("run", *step, "--hidden", HIDDEN, "--intermediate", INTERMEDIATE, "--work-flops", 0, "--no-reference"))
            measured = {(o["policy"], o["phase"]): o["critical_path_seconds"] for o in run}
            simulated = {(o["policy"], s["phase"]): s["parts"]["experts"]
                         for o in json.loads(call("simulate", *step, "--cluster", cluster, "--model", model, "--bytes-per-parameter", 4,
                                                  "--keep-activations"))
                         for s in o["phases"]}
            for phase in ("recompute", "policy_update"):
                real = measured["foremoe", phase] / measured["vanilla", phase]
                said = simulated["foremoe", phase] / simulated["vanilla", phase]
                yield (name, phase, f"{1e3 * simulated['vanilla', phase]:.1f}", f"{1e3 * measured['vanilla', phase]:.1f}", f"{said:.3f}",
                       f"{real:.3f}", f"{100 * (said / real - 1):+.1f} %")

    with tempfile.TemporaryDirectory() as folder:
        table(("input", "phase", "vanilla simulated, ms", "vanilla measured, ms", "foremoe ÷ vanilla simulated", "measured", "difference"),
              list(rows(folder)))


if __name__ == "__main__":
    main()
