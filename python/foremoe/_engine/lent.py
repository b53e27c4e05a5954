"""Guests whose buffers contain other experts between forward and backward, as under residency shared."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import foremoe

from .layers import ExpertLayer
from .sharded import local


class KeptWeights:
    """Saves the position of a tensor that is part of a guest's weights instead of the tensor."""

    def __init__(self, weights: dict[str, Tensor], guests: Any) -> None:
        """weights: By name [guest slots, …], in their present buffers. guests.weights() returns later ones."""
        self._guests = guests
        self._of = {
            weight.untyped_storage().data_ptr(): (name, weight.storage_offset()) for name, weight in weights.items()
        }

    def pack(self, tensor: Tensor) -> Any:
        found = self._of.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        name, begin = found
        return name, tensor.size(), tensor.stride(), tensor.storage_offset() - begin

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        name, size, stride, offset = packed
        weight = self._guests.weights()[name]
        return weight.as_strided(size, stride, weight.storage_offset() + offset)  # type: ignore[no-any-return]


def try_lending_layers(layers: Iterable[ExpertLayer]) -> None:
    """Calls try_lending_layer() for the first layer of each kind."""
    tried = set()
    for layer in layers:
        kind = kind_of(layer, getattr(layer, "experts", None))
        if kind not in tried:
            try_lending_layer(layer)
        tried.add(kind)


def kind_of(layer: object, experts: object) -> tuple[type, ...]:
    """Returns a key, equal for layers that compute by the same functions. experts: Module with these functions."""
    modules = experts.modules() if isinstance(experts, torch.nn.Module) else ()
    return type(layer), *map(type, modules)


def try_lending_layer(layer: ExpertLayer) -> None:
    """Calls try_lending() for the layer's first expert on this rank, with one row."""
    one = {name: local(weight.detach())[:1] for name, weight in layer.weights().items()}
    trained = [name for name, weight in layer.weights().items() if weight.requires_grad]

    def run(weights: dict[str, Tensor]) -> Callable[[], list[Tensor]]:
        of = next((weight for weight in weights.values() if weight.is_floating_point()), torch.empty(0))
        rows = of.new_ones(1, layer.hidden_size).requires_grad_()
        leaves = {name: weight.detach().requires_grad_(name in trained) for name, weight in weights.items()}
        out = layer.forward_rows(rows, torch.ones(1, dtype=torch.int32, device=rows.device), leaves)
        inputs = [rows, *(leaves[name] for name in trained)]
        return lambda: [g for g in torch.autograd.grad(out.sum(), inputs, allow_unused=True) if g is not None]

    try_lending(layer.name, one, run)


def try_lending(
    layer: str, weights: dict[str, Tensor], run: Callable[[dict[str, Tensor]], Callable[[], list[Tensor]]]
) -> None:
    """Raises InputError if a layer's backward reads its forward's buffers. Changes the buffers between the passes.

    Args:
        weights: Weights of the trial, by name [experts, …].
        run: Runs a forward on the given weights in place. Returns its backward, which returns gradients.
    """

    def gradients(lent: bool) -> list[Tensor]:
        places = [{name: weight.clone() for name, weight in weights.items()}]
        kept = KeptWeights(places[0], types.SimpleNamespace(weights=lambda: places[-1]))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            backward = run(places[0])
        if lent:
            places.append({name: weight.clone() for name, weight in weights.items()})
            for weight in places[0].values():
                weight.data.fill_(torch.nan if weight.is_floating_point() else 1)
        return backward()

    for expected, found in zip(gradients(False), gradients(True), strict=True):
        if (found.isnan() & ~expected.isnan()).any():
            raise foremoe.InputError(
                f"residency: shared, but in the backward the experts of {layer} read weights at the addresses of the "
                "forward, where other experts' weights are by then; expected functions that keep weights by "
                "save_for_backward(), or another residency",
                field="residency",
            )
