"""Replay of given experts in routers of transformers, and a check whether a router permits replay."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import foremoe

_ROWS = 3  # in a trial


class GivenTopK(TorchFunctionMode):
    """Makes a router's top-k over experts return given ids, and their gates, so that gradients reach the router."""

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        super().__init__()
        self._ids, self._num_experts = ids, num_experts
        self.hits = 0
        self.rows: int | None = None  # number of routed rows, if not that of the ids
        self.own: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            x = args[0]
            k = args[1] if len(args) > 1 else kwargs["k"]
            if k == self._ids.shape[1] and x.shape == (self._ids.shape[0], self._num_experts):
                self.hits += 1
                self.own = func(*args, **kwargs).indices
                ids = torch.where(self._ids >= 0, self._ids, self.own)
                return torch.return_types.topk((x.gather(-1, ids), ids))
            if k == self._ids.shape[1] and x.dim() == 2 and x.shape[1] == self._num_experts:
                self.rows = x.shape[0]
        return func(*args, **kwargs)


@torch.no_grad()
def expect_replayable(name: str, router: torch.nn.Module, *, num_experts: int, top_k: int, hidden_size: int) -> None:
    """Raises InputError if the router of this block does not choose by one torch.topk() over its experts.

    Runs the router on the CPU with zeros as rows and parameters. If a router cannot be called in this way, checks its
    first forward instead.
    """
    state = {
        of: torch.zeros(tensor.shape, dtype=tensor.dtype)
        for of, tensor in itertools.chain(router.named_parameters(), router.named_buffers())
    }
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    hits = []
    for shape in ((_ROWS, hidden_size), (1, _ROWS, hidden_size)):
        mode = GivenTopK(torch.arange(top_k).expand(_ROWS, -1), num_experts)
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), mode:  # routers may draw noise
            torch.func.functional_call(router, state, (torch.zeros(shape, dtype=dtype),))
            hits.append(mode.hits)
    if hits and 1 not in hits:
        raise foremoe.InputError(
            f"model: {name} has a router, {type(router).__name__}, whose choice cannot be replayed; expected one "
            "torch.topk() over its experts",
            field="model",
        )
