"""Experts that a framework has sharded as DTensors: this rank's part, and the required placement."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe

from .layers import CopiedLayer, ExpertLayer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Returns whether a tensor is a DTensor. Does not import DTensor, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, in the same memory; any other tensor unchanged. Differentiable."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_weights(layer: CopiedLayer) -> dict[str, Tensor]:
    """Returns this rank's experts of a spread layer, by name [experts, …]. Differentiable."""
    return {name: local(weight) for name, weight in layer.weights().items()}


@torch.no_grad()
def version_of(weight: Tensor) -> int:
    """Returns a counter of in-place writes. A write through a DTensor does not count for its local part."""
    return weight._version + (local(weight)._version if is_dtensor(weight) else 0)


class Written:
    """Tells whether a weight was written since this object was made.

    FSDP2 replaces the local part of a parameter that its ranks share unevenly, with equal values, in the first forward
    after weights were loaded. The version of another tensor says nothing, so values are compared then.
    """

    @torch.no_grad()
    def __init__(self, weight: Tensor) -> None:
        self._weight, self._local = weight, local(weight)
        self._versions = weight._version, self._local._version

    @torch.no_grad()
    def __call__(self) -> bool:
        if (self._weight._version, self._local._version) != self._versions:
            return True
        now = local(self._weight)
        if now is not self._local and (now.shape != self._local.shape or not torch.equal(now, self._local)):
            return True
        self._local, self._versions = now, (self._weight._version, now._version)
        return False


def num_parts(tensor: Tensor) -> int:
    """Returns the number of different parts into which a DTensor is sharded; 1 for any other tensor."""
    if not is_dtensor(tensor):
        return 1
    of_mesh = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in of_mesh if not placement.is_replicate())


def expect_own_experts(layer: ExpertLayer, group: Any) -> None:
    """Raises InputError if a weight is a DTensor, unless all weights have experts in the order of the group's ranks."""
    weights = layer.weights()
    if not any(is_dtensor(weight) for weight in weights.values()):
        return
    ranks = dist.get_process_group_ranks(group)
    for name, weight in weights.items():
        if not is_dtensor(weight):
            raise foremoe.InputError(f"layers: {name} of {layer.name} is not sharded, but others are", field="layers")
        mesh, placements = weight.device_mesh, weight.placements
        over = mesh.mesh.flatten().tolist()
        if over != ranks:
            raise foremoe.InputError(
                f"group: ranks {ranks}, but {layer.name} has its experts on ranks {over}; expected the same",
                field="group",
            )
        split = [placement for size, placement in zip(mesh.shape, placements, strict=True) if size > 1]
        if len(split) > 1 or not all(placement.is_shard(0) for placement in split):
            raise foremoe.InputError(
                f"layers: {name} of {layer.name} is {placements} on a mesh of {tuple(mesh.shape)}; expected the "
                "experts sharded along one of its dimensions",
                field="layers",
            )
