"""Replaces the kernels of DeepEP, HybridEP and NCCL-EP, which Megatron-LM's managers call, by gloo code for tests.

Each rank gathers all rows and selects its own, so all ranks must have the same number of tokens. The replacements
test the arguments of the managers. They do not test streams, fixed-size device buffers, or types below float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import Case

# The managers cast probabilities to float32, so the router computes them in float32.
ROUTER = {"moe_router_dtype": "fp32"}
BACKENDS = ["deepep", "hybridep"]  # available in this megatron-core
CONTEXTS: list[int] = []  # number of experts of each NCCL-EP context, in order of creation
_context: dict[str, Any] = {}


def with_backend(case: Case, backend: str, capacity: float = 1.2) -> Case:
    """capacity: moe_expert_rank_capacity_factor for NCCL-EP. Without a plan, Megatron-LM would exceed the default."""
    config = {**case.config, "moe_flex_dispatcher_backend": backend}
    if backend == "ncclep" and not _has_eager_mode():
        config["moe_expert_rank_capacity_factor"] = capacity
    return Case(case.ep, "flex", case.ddp, case.recompute, config, case.dtype)


def _has_eager_mode() -> bool:
    """Returns whether NCCL-EP sizes its buffers by the rows of a step, if no capacity is set: from 0.20 on."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    return hasattr(token_dispatcher, "nccl_ep_release_context")


def _gathered(x: Any, group: Any) -> Any:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.stack(parts)


def _summed(x: Any, group: Any) -> Any:
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total[dist.get_rank(group)].clone()  # kernels return no views, so that callers may add in place


class _Gather(torch.autograd.Function):
    """[tokens, …] → [ranks, tokens, …]"""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _summed(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """[ranks, tokens, …] on each rank → this rank's [tokens, …] of the sum over ranks"""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gathered(grads[0], ctx.group), None


def _sum_rows(x: Any, rank: Any, token: Any, like: Any, group: Any) -> Any:
    """Returns rows [rows, hidden] to their source ranks and adds those of the same token."""
    full = torch.zeros(like, dtype=x.dtype).index_put((rank, token), x, accumulate=True)
    return _Sum.apply(full, group)


def fused_dispatch(x: Any, indices: Any, probs: Any, num_experts: int, group: Any, **_: Any) -> Any:
    """DeepEP's dispatch: a rank receives a token once, however many of the rank's experts the token chose."""
    own = num_experts // dist.get_world_size(group)
    local = _gathered(indices, group) - dist.get_rank(group) * own
    mine = (local >= 0) & (local < own) & (_gathered(indices, group) >= 0)
    rank, token = mine.any(-1).nonzero(as_tuple=True)
    everyones, rows = _Gather.apply(x, group), mine[rank, token]
    weights = _Gather.apply(probs, group)[rank, token] * rows
    tokens = torch.bincount(local[mine], minlength=own)
    handle = rank, token, everyones.shape
    return everyones[rank, token], torch.where(rows, local[rank, token], -1), weights, tokens, handle


def fused_combine(x: Any, group: Any, handle: Any, **_: Any) -> Any:
    return _sum_rows(x, *handle, group), None


def _by_expert(x: Any, routing_map: Any, probs: Any, group: Any, own: int) -> Any:
    """Returns this rank's rows, grouped by expert, their probabilities, the tokens per expert, and their sources."""
    mine = slice(dist.get_rank(group) * own, (dist.get_rank(group) + 1) * own)
    expert, rank, token = _gathered(routing_map, group)[..., mine].permute(2, 0, 1).nonzero(as_tuple=True)
    everyones = _Gather.apply(x, group)
    weights = _Gather.apply(probs, group)[..., mine][rank, token, expert]
    return everyones[rank, token], weights, torch.bincount(expert, minlength=own), (rank, token, everyones.shape, group)


def hybrid_ep_dispatch(
    x: Any, routing_map: Any, probs: Any, group: Any, num_local_experts: int, num_permuted_tokens: Any = None, **_: Any
) -> Any:
    rows, weights, tokens, places = _by_expert(x, routing_map, probs, group, num_local_experts)
    assert num_permuted_tokens is None
    return rows, weights, None, tokens, places


def hybrid_ep_combine(x: Any, handle: Any, **_: Any) -> Any:
    return _sum_rows(x, *handle)


def ensure_nccl_ep_bootstrapped(group: Any, num_experts: int, **options: Any) -> None:
    if not _context:
        _context.update(group=group, num_experts=num_experts, **options)
        CONTEXTS.append(num_experts)


def is_nccl_ep_bootstrapped() -> bool:
    return bool(_context)


def nccl_ep_finalize() -> None:
    _context.clear()


class _Buffer:
    def __init__(self, num_local_experts: int, recv_capacity_per_rank: int | None, **_: Any) -> None:
        assert num_local_experts * dist.get_world_size(_context["group"]) == _context["num_experts"]
        assert (recv_capacity_per_rank or 0) <= (_context["recv_capacity_per_rank"] or 0)
        self.own, self.capacity, self.places = num_local_experts, recv_capacity_per_rank, None


def nccl_ep_dispatch(buffer: Any, x: Any, indices: Any, probs: Any, **_: Any) -> Any:
    shape = len(x), _context["num_experts"]
    routing_map = torch.zeros(shape, dtype=torch.bool).scatter(1, indices, True)
    spread = torch.zeros(shape, dtype=probs.dtype).scatter(1, indices, probs)
    rows, weights, tokens, buffer.places = _by_expert(x, routing_map, spread, _context["group"], buffer.own)
    empty = 0 if buffer.capacity is None else buffer.capacity - len(rows)
    assert empty >= 0
    return (
        torch.cat([rows, rows.new_zeros(empty, rows.shape[1])]),
        tokens,
        torch.cat([weights, weights.new_zeros(empty)]),
    )


def nccl_ep_combine(buffer: Any, x: Any, **_: Any) -> Any:
    return _sum_rows(x[: len(buffer.places[0])], *buffer.places)


def expect(backend: str) -> None:
    """Installs the kernels in Megatron-LM. Skips the test if this megatron-core lacks the backend."""
    apply()
    if backend not in BACKENDS:
        pytest.skip(f"this megatron-core has no {backend}")


def apply() -> None:
    """Installs the kernels in Megatron-LM until this process ends."""
    import megatron.core.transformer.moe.fused_a2a as fused_a2a
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    torch.compiler.set_stance("force_eager")  # avoids compiling dispatch_preprocess
    torch.cuda.synchronize = lambda *_: None
    kernels = [fused_dispatch, fused_combine, hybrid_ep_dispatch, hybrid_ep_combine]
    if hasattr(token_dispatcher, "_NCCLEPManager"):
        BACKENDS[:] = [*BACKENDS[:2], "ncclep"]
        kernels += [ensure_nccl_ep_bootstrapped, is_nccl_ep_bootstrapped, nccl_ep_dispatch, nccl_ep_combine]
        token_dispatcher.new_nccl_ep_buffer = _Buffer
        fused_a2a.nccl_ep_finalize = nccl_ep_finalize
    for kernel in kernels:
        setattr(token_dispatcher, kernel.__name__, kernel)
    token_dispatcher.set_deepep_num_sms = lambda _: None
