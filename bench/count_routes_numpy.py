#!/usr/bin/env python3
"""The baseline of count_routes_bench: numpy.bincount, layer by layer, on routes with Qwen3-30B-A3B's shape.

Prints ids per second on one core. With --validate, the time includes numpy checks of range and distinct entries.
"""

import argparse
import time

import numpy as np

TOKENS, LAYERS, TOP_K, EXPERTS = 16_384, 48, 8, 128


def synthetic_routes(rng):
    """Draw U8 routes [tokens, layers, top_k], distinct within a row, with low ids more frequent."""
    weight = np.log(np.arange(EXPERTS) + 8.0)
    routes = np.empty((TOKENS, LAYERS, TOP_K), np.uint8)
    for layer in range(LAYERS):
        key = rng.gumbel(size=(TOKENS, EXPERTS)).astype(np.float32) - weight.astype(np.float32)
        routes[:, layer] = np.argpartition(-key, TOP_K, axis=1)[:, :TOP_K]
    return routes


def count(routes):
    return np.stack([np.bincount(routes[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])


def validate(routes):
    ordered = np.sort(routes, axis=2)
    if (routes >= EXPERTS).any() or (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise ValueError("malformed routes")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--validate", action="store_true")
    args = parser.parse_args()
    routes = synthetic_routes(np.random.default_rng(1))
    best = float("inf")
    for _ in range(args.repeat):
        start = time.process_time()
        if args.validate:
            validate(routes)
        count(routes)
        best = min(best, time.process_time() - start)
    print(f"{routes.size / best / 1e9:.3f} G ids/s")


if __name__ == "__main__":
    main()
