"""The devices of this machine, and how the doctor's ranks use them."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe

RANKS = (2, 3, 4, 6, 8)
"""Numbers of ranks that divide the experts of every check."""
SHARED = "ranks share a GPU, so copies between them go through host memory"


@dataclass(frozen=True)
class Hardware:
    """Devices and backend of all ranks. Sent to their processes."""

    device: str  # cpu or cuda
    gpus: int  # number used by the ranks; 0 on a CPU
    ranks: int
    backend: str  # gloo or nccl

    @property
    def shares_gpu(self) -> bool:
        """Whether all ranks run on one GPU."""
        return self.device == "cuda" and self.gpus < self.ranks

    def device_of(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus) if self.device == "cuda" else torch.device("cpu")


def find_hardware(ranks: int | None = None, device: str | None = None) -> Hardware:
    """Returns the hardware that the ranks run on.

    Args:
        ranks: Number of ranks. None: one per GPU, at most 8; two if they share a GPU or run on the CPU.
        device: "cpu" or "cuda". None: CUDA if torch finds a GPU.

    Raises:
        InputError: for an invalid number of ranks, and for CUDA where torch finds no GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus == 0:
        raise foremoe.InputError("device: cuda, but torch finds no GPU", field="device")
    if ranks is not None and ranks not in RANKS:
        raise foremoe.InputError(f"ranks: {ranks}, expected 2, 3, 4, 6 or 8", field="ranks")
    if device == "cpu" or gpus == 0:
        return Hardware("cpu", 0, ranks or 2, "gloo")
    if gpus == 1 or not dist.is_nccl_available():
        return Hardware("cuda", 1, ranks or 2, "gloo")
    if ranks is not None and ranks > gpus:
        raise foremoe.InputError(f"ranks: {ranks}, but NCCL needs a GPU each and there are {gpus}", field="ranks")
    ranks = ranks or max(n for n in RANKS if n <= gpus)
    return Hardware("cuda", ranks, ranks, "nccl")


def versions(hardware: Hardware) -> dict[str, Any]:
    """Returns versions and names of devices; nothing that identifies the machine or its user."""
    cuda, nccl = hardware.device == "cuda", hardware.backend == "nccl"
    return {
        "foremoe": foremoe.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,  # type: ignore[no-untyped-call]
        "gpus": [torch.cuda.get_device_name(i) for i in range(hardware.gpus)],
    }


class _Arrival:
    """A receive into host memory. wait() copies it to the device."""

    def __init__(self, work: Any, host: Tensor, device: Tensor) -> None:
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        with unreported_waits():
            self._device.copy_(self._host)


@contextlib.contextmanager
def staged(hardware: Hardware) -> Iterator[None]:
    """Lets batch_isend_irecv accept CUDA tensors of ranks that share a GPU, by copies through the host, until exit.

    gloo's collectives exchange CUDA tensors, but its send and recv would read device memory as if it were the host's.
    """
    if not hardware.shares_gpu or hardware.backend != "gloo":
        yield
        return
    start = dist.batch_isend_irecv

    def start_on_host(operations: list[Any]) -> list[Any]:
        with unreported_waits():
            hosts = [
                o.tensor.cpu() if o.op is dist.isend else torch.empty_like(o.tensor, device="cpu") for o in operations
            ]
        works = start(
            [
                dist.P2POp(o.op, h, group=o.group, group_peer=o.group_peer)
                for o, h in zip(operations, hosts, strict=True)
            ]
        )
        return [
            work if o.op is dist.isend else _Arrival(work, host, o.tensor)
            for work, host, o in zip(works, hosts, operations, strict=True)
        ]

    dist.batch_isend_irecv = start_on_host  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = start


@contextlib.contextmanager
def unreported_waits() -> Iterator[None]:
    """Disables CUDA's reports of host waits for the device, until exit."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
