"""The devices of this machine, and how the doctor's ranks use them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import foremoe

RANKS = (2, 3, 4, 6, 8)
"""Numbers of ranks that divide the experts of every check."""
SHARED = "ranks share a GPU, so NCCL connects them through the host, and they compute in turn"


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
        ranks: Number of ranks. None: one per GPU, at most 8; two if they share the only GPU or run on the CPU.
        device: "cpu" or "cuda". None: CUDA if torch finds a GPU.

    Raises:
        InputError: for an invalid number of ranks, and for CUDA where torch finds no GPU or has no NCCL.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus == 0:
        raise foremoe.InputError("device: cuda, but torch finds no GPU", field="device")
    if ranks is not None and ranks not in RANKS:
        raise foremoe.InputError(f"ranks: {ranks}, expected 2, 3, 4, 6 or 8", field="ranks")
    if device == "cpu" or gpus == 0:
        return Hardware("cpu", 0, ranks or 2, "gloo")
    if not dist.is_nccl_available():
        raise foremoe.InputError("device: cuda, but this torch has no NCCL", field="device")
    if gpus == 1:
        return Hardware("cuda", 1, ranks or 2, "nccl")
    if ranks is not None and ranks > gpus:
        raise foremoe.InputError(f"ranks: {ranks}, but there are {gpus} GPUs, one per rank", field="ranks")
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
