"""Replay of given experts in routers of transformers, and a check whether a router permits replay."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import foremoe

_ROWS = 3  # in a trial
_TOKENS = "input_ids"  # argument of routers that look experts up by token id, such as DeepSeek-V4's first ones


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


class _Unhooked(torch.nn.Module):
    """A router without its hooks, which may replay routes of other rows."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.router.forward(*args, **kwargs)


@torch.no_grad()
def expect_replayable(name: str, router: torch.nn.Module, *, num_experts: int, top_k: int, hidden_size: int) -> bool:
    """Returns whether the router of this block chooses by one torch.topk() over its experts.

    False: the router looks experts up by token id, so that there is nothing to replay. Raises InputError if it chooses
    in another way. Runs the router on the CPU with zeros as rows, parameters and further arguments: token ids, or one
    number per expert.
    """
    state = {
        f"router.{of}": torch.zeros(tensor.shape, dtype=tensor.dtype)
        for of, tensor in itertools.chain(router.named_parameters(), router.named_buffers())
    }
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    _, *further = inspect.signature(router.forward).parameters.values()
    needed = [of.name for of in further if of.default is of.empty and of.kind is of.POSITIONAL_OR_KEYWORD]
    hits = []
    for names in (needed, [of.name for of in further]):
        for shape in ((_ROWS, hidden_size), (1, _ROWS, hidden_size)):
            mode = GivenTopK(torch.arange(top_k).expand(_ROWS, -1), num_experts)
            others: dict[str, Tensor] = {of: torch.zeros(num_experts, dtype=dtype) for of in names}
            if _TOKENS in names:
                others[_TOKENS] = torch.zeros(shape[:-1], dtype=torch.long)
            with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), mode:  # routers may draw noise
                torch.func.functional_call(_Unhooked(router), state, (torch.zeros(shape, dtype=dtype),), others)
                hits.append(mode.hits)
    if 1 in hits:
        return True
    if 0 in hits and _TOKENS in needed:
        return False
    raise foremoe.InputError(
        f"model: {name} has a router, {type(router).__name__}, whose choice cannot be replayed; expected one "
        "torch.topk() over its experts",
        field="model",
    )
