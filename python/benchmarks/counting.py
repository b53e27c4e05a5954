"""Time to check and count a micro-step's routes in ep.plan(), compared with PyTorch in the same run.

The last line times a whole ep.plan() on one rank until it returns, while planning continues in the background. The
PyTorch column of this line contains only the counting, which ep.plan() formerly did in PyTorch.

PYTHONPATH=build/python $(scripts/setup torch) python/benchmarks/counting.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from timing import median_seconds
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from foremoe import _core
from foremoe.hf import expert_layers
from foremoe.torch import ExpertParallel


def in_torch(routes: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Check and count routes as plan() formerly did: all row checks and one bincount per layer."""
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


def whole_plan(routes: torch.Tensor, num_experts: int, micro_steps: int, runs: int) -> float:
    """Return ep.plan()'s seconds per micro-step for `micro_steps` copies of `routes`, in a model with tiny experts."""
    config = Qwen3MoeConfig(
        num_hidden_layers=routes.shape[1], num_experts=num_experts, num_experts_per_tok=routes.shape[2],
        hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, vocab_size=16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        ep = ExpertParallel(expert_layers(Qwen3MoeForCausalLM(config)), guest_slots=0)
        planned = []
        seconds = median_seconds(lambda: planned.append(ep.plan([routes] * micro_steps)), runs)
        for phase in planned:
            phase.wait_for_plan()
        dist.destroy_process_group()
    return seconds / micro_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--micro-steps", type=int, default=4, help="of the phase that ep.plan() plans")
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
        if dtype == torch.int32:
            of_routes = before
    plan = whole_plan(drawn.to(torch.int32), a.experts, a.micro_steps, a.runs)
    print(f"ep.plan()    PyTorch {1e3 * of_routes:7.1f} ms whole {1e3 * plan:6.1f} ms   1/{of_routes / plan:.1f}")


if __name__ == "__main__":
    main()
