"""Adapters (LoRA) on experts, as Megatron-Bridge attaches them.

Megatron-Bridge replaces a linear layer of experts by a LoRALinear, which adds the output of a ParallelLinearAdapter to
that of the wrapped layer. SequentialMLP then has an adapter for each expert, TEGroupedMLP one for all experts of a
rank. Adapters belong to the home: each is a further weight of the experts that it serves. So the copy of an expert
includes its home's adapter, and the gradients of the copies are added to those of the home's adapter. Guests run the
trainer's own classes with other parameters. Guests of a TEGroupedMLP have an adapter for each slot, since they come
from different homes.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import foremoe


def adapted(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (name, layer) of layers with an adapter, of Megatron-Bridge or of peft."""
    for name, layer in module.named_modules():
        if hasattr(layer, "to_wrap") or hasattr(layer, "base_layer"):
            yield name, layer


def router_of(layer: Any) -> Any:
    """Returns the router of an MoE layer, without the adapter that may wrap it."""
    return getattr(layer.router, "to_wrap", layer.router)


def replay_of(layer: Any) -> Any:
    """Returns the RouterReplay of an MoE layer's router; None if it has none."""
    return getattr(router_of(layer), "router_replay", None)


def expect_copyable(experts: torch.nn.Module, name: str) -> None:
    """Raises InputError if experts have adapters with which guests cannot compute."""
    for of, layer in adapted(experts):
        adapter = getattr(layer, "adapter", None)
        kinds = [type(layer).__name__, type(adapter).__name__]
        has_dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in layer.modules())
        if kinds != ["LoRALinear", "ParallelLinearAdapter"] or has_dropout:
            found = kinds[0] if adapter is None else f"{kinds[0]} with {kinds[1]}"
            raise foremoe.InputError(
                f"model_chunks: {name} has an adapter on its experts ({of}: {found}{', with dropout' * has_dropout}); "
                "expected LoRALinear with ParallelLinearAdapter of Megatron-Bridge without dropout, or adapters only "
                "outside the experts, or mode='shadow'",
                field="model_chunks",
            )


class Adapters:
    """The adapters of the guests of one layer."""

    def __init__(self, experts: Any, guests: Any, slots: int) -> None:
        """Wraps the linear layers of guests like those of the layer's experts."""
        self._pairs: list[tuple[Any, Any]] = []  # a layer of the experts, the guests' layer
        is_sequential = hasattr(experts, "local_experts")
        for guest in guests.local_experts if is_sequential else [guests]:
            for name, own in adapted(experts.local_experts[0] if is_sequential else experts):
                adapter = _like(own.adapter) if is_sequential else _OfSlots(_like(own.adapter) for _ in range(slots))
                layer = _like(own, to_wrap=getattr(guest, name), adapter=adapter)
                setattr(guest, name, layer)
                self._pairs.append((own, layer))

    def prepare(self, tokens: Tensor) -> None:
        """Call before each forward of the guests. tokens: int64 [slots], rows of each slot, on the host."""
        for own, layer in self._pairs:
            layer._adapter_enabled = own._adapter_enabled
            if isinstance(layer.adapter, _OfSlots):
                layer.adapter.tokens = tokens.tolist()


class _OfSlots(torch.nn.ModuleList):
    """An adapter for each guest slot, in place of one for all rows."""

    tokens: list[int]

    def forward(self, rows: Tensor, *_: Any, **__: Any) -> Tensor:
        parts = torch.split(rows, self.tokens)
        return torch.cat([adapter(part) for adapter, part in zip(self, parts, strict=True)])


def _like(module: Any, **instead: Any) -> Any:
    """Returns a module with the same code and settings, but other parameters and no hooks. instead: Its children."""
    made = copy.copy(module)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(made, hooks, collections.OrderedDict())
    made._buffers = dict(module._buffers)
    made._parameters = {
        name: None if p is None else torch.nn.Parameter(p.detach()) for name, p in module._parameters.items()
    }
    made._modules = {
        name: instead[name] if name in instead else _like(child) for name, child in module._modules.items()
    }
    return made
