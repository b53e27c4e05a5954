"""How long ep.plan() takes to check and count the routes of a micro-step, beside the same in PyTorch, in one run.

PYTHONPATH=build/python $(scripts/python_environment torch) python/benchmarks/counting.py
"""

from __future__ import annotations

import argparse

import torch
from timing import median_seconds

from foremoe import _core


def in_torch(routes: torch.Tensor, num_experts: int) -> torch.Tensor:
    """As plan() did it before: every check of rows, and one bincount a layer."""
    flat = routes.to(torch.int32)
    missing = flat < 0
    assert int(flat.max()) < num_experts and not bool((missing.any(-1) != missing.all(-1)).any())
    ordered = flat.sort(-1).values
    assert not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())
    routed = ~missing.all(-1)
    assert not bool((routed.any(-1) != routed.all(-1)).any())
    counts = torch.zeros(flat.shape[1], num_experts, dtype=torch.int64)
    for layer in range(flat.shape[1]):
        ids = flat[:, layer].reshape(-1)
        counts[layer] = torch.bincount(ids[ids >= 0], minlength=num_experts)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    drawn = torch.rand(a.tokens, a.layers, a.experts).topk(a.top_k).indices
    for dtype in (torch.int32, torch.int64, torch.uint8 if a.experts < 256 else torch.int16):
        routes = drawn.to(dtype)
        assert torch.equal(
            in_torch(routes, a.experts), torch.from_numpy(_core._count_routes(routes.numpy(), a.experts)[1])
        )
        before = median_seconds(lambda routes=routes: in_torch(routes, a.experts), a.runs)
        now = median_seconds(lambda routes=routes: _core._count_routes(routes.numpy(), a.experts), a.runs)
        print(f"{dtype!s:12} PyTorch {1e3 * before:7.1f} ms   C++ {1e3 * now:6.1f} ms   1/{before / now:.1f}")


if __name__ == "__main__":
    main()
