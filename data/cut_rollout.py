#!/usr/bin/env python3
"""Cuts some layers out of a recorded rollout (a foremoe.trace/1 file): how data/rollout-math.safetensors was made.

    data/cut_rollout.py IN.safetensors OUT.safetensors --layers 0 7

All sequences and their recorded batching are kept, so the micro-steps are those of the original. Needs the
safetensors and numpy packages.
"""

import argparse
import json

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="positions on the trace's layer axis")
    arguments = parser.parse_args()

    with safe_open(arguments.input, "np") as trace:
        metadata = trace.metadata()
        tensors = {name: trace.get_tensor(name) for name in trace.keys()}  # noqa: SIM118  it cannot be iterated
    tensors["routed_experts"] = np.ascontiguousarray(tensors["routed_experts"][:, arguments.layers])
    layer_ids = json.loads(metadata["layer_ids"])
    metadata["layer_ids"] = json.dumps([layer_ids[layer] for layer in arguments.layers])
    metadata["origin"] += f"; cut to layers {', '.join(str(layer_ids[layer]) for layer in arguments.layers)}"
    save_file(tensors, arguments.output, metadata)


if __name__ == "__main__":
    main()
