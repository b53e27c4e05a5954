"""Copies between ranks that share one GPU.

NCCL refuses two ranks on one GPU. gloo exchanges CUDA tensors in collectives, through pinned host memory of its own,
but its send and recv would read device memory as if it were the host's. So on such ranks, and in the doctor alone,
point-to-point operations are staged through the host. Whatever is timed then says nothing about a link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .hardware import Hardware

REASON = "ranks share a GPU, so copies between them go through host memory"


class _Arrival:
    """A receive into host memory, brought to the device by the one who waits."""

    def __init__(self, work: Any, host: Tensor, device: Tensor) -> None:
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        with exempt():
            self._device.copy_(self._host)


@contextlib.contextmanager
def staged(hardware: Hardware) -> Iterator[None]:
    """Inside, batch_isend_irecv takes CUDA tensors of ranks that share a GPU. Elsewhere it changes nothing."""
    if not hardware.shares_gpu:
        yield
        return
    start = dist.batch_isend_irecv

    def start_on_host(operations: list[Any]) -> list[Any]:
        with exempt():
            hosts = [
                operation.tensor.cpu()
                if operation.op is dist.isend
                else torch.empty_like(operation.tensor, device="cpu")
                for operation in operations
            ]
        staged_operations = [
            dist.P2POp(operation.op, host, group=operation.group, group_peer=operation.group_peer)
            for operation, host in zip(operations, hosts, strict=True)
        ]
        return [
            work if operation.op is dist.isend else _Arrival(work, host, operation.tensor)
            for work, host, operation in zip(start(staged_operations), hosts, operations, strict=True)
        ]

    dist.batch_isend_irecv = start_on_host  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = start


@contextlib.contextmanager
def exempt() -> Iterator[None]:
    """Waits for the device inside are the doctor's own, and not reported."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
