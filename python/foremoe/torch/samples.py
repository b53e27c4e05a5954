"""Samples and digests of parameters, for comparison between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SAMPLE = 4  # elements of a tensor
_AT_ONCE = 1 << 22  # elements
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _few_of(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Returns four elements of each tensor, or all if fewer, at positions that depend on its size. One dict per type
    and device."""
    alike: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        few = flat[:: max(1, (len(flat) - 1) // (_SAMPLE - 1))][:_SAMPLE]
        alike.setdefault((few.dtype, few.device), {})[name] = few
    return list(alike.values())


@torch.no_grad()
def samples_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns a few elements of each tensor, with one copy from the device per type."""
    found: dict[str, str] = {}
    for of_kind in _few_of(tensors):
        sizes = [len(few) for few in of_kind.values()]
        of_all = torch.split(torch.cat(list(of_kind.values())).cpu(), sizes)
        found.update({name: str(few.double().tolist()) for name, few in zip(of_kind, of_all, strict=True)})
    return found


@torch.no_grad()
def number_of_samples(tensors: Mapping[str, Tensor], total: Tensor) -> Tensor:
    """Returns total, int64 [], combined with a hash of a few elements of each tensor. Does not wait for the device."""
    for of_kind in _few_of(tensors):
        total = total * 31 + _number_of(torch.cat(list(of_kind.values()))).to(total.device)
    return total


@torch.no_grad()
def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns a digest of all bits of each tensor, in hex, with one copy from the device."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    numbers = torch.stack([_number_of(tensor.detach()).to(device) for tensor in tensors.values()]).tolist()
    return {name: f"{number & (1 << 64) - 1:016x}" for name, number in zip(tensors, numbers, strict=True)}


def _number_of(tensor: Tensor) -> Tensor:
    """Returns the sum of all elements' bits, each times a function of its position, int64 []. Wraps on overflow."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = tensor.reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.uint8))
    for part in torch.split(words, _AT_ONCE):
        place = torch.arange(1, len(part) + 1, device=part.device)
        total = total * 1_000_003 + (part * (place * place + 2 * place + 7)).sum()
    return total
