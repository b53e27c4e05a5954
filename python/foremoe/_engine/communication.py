"""Exchanges between ranks other than the rows of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .background import collective


def start_point_to_point(operations: list[Any]) -> list[Any]:
    """Starts point-to-point operations together. Returns one handle per operation, to wait for it."""
    if not operations:
        return []
    works = dist.batch_isend_irecv(operations)
    return works if len(works) == len(operations) else [works[0]] * len(operations)  # one handle for all


def gathered_bytes(own: bytes, group: Any) -> list[bytes]:
    """Returns the byte strings of all ranks of a gloo group; lengths may differ. Collective."""
    lengths = gathered(torch.tensor([len(own)]), group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    return [of.numpy()[:length].tobytes() for of, length in zip(gathered(padded, group), lengths, strict=True)]


def exchanged_bytes(parts: Sequence[bytes], group: Any) -> list[bytes]:
    """Sends bytes to each rank of a gloo group. Returns those of each rank. Collective."""
    send = torch.tensor([len(part) for part in parts])
    recv = torch.empty_like(send)
    collective(dist.all_to_all_single, recv, send, group=group)
    joined = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)[: int(send.sum())]
    found = torch.empty(int(recv.sum()), dtype=torch.uint8)
    collective(dist.all_to_all_single, found, joined, recv.tolist(), send.tolist(), group=group)
    return [part.numpy().tobytes() for part in found.split(recv.tolist())]  # type: ignore[no-untyped-call]


def gathered(own: Tensor, group: Any, dim: int = 0) -> Tensor:
    """Returns the tensors of all ranks, stacked along a new dimension. Collective; shapes must be equal."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    collective(dist.all_gather, parts, own, group=group)
    return torch.stack(parts, dim)


def gathered_rows(own: Tensor, group: Any, dim: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the row counts of all ranks, int64, stacked along a new dimension. Collective; shapes must be equal.

    Sends int32, which halves the bytes: no rank has 2³¹ rows in a micro-step.
    """
    return np.ascontiguousarray(gathered(own.int(), group, dim).cpu().numpy().astype(np.int64))
