"""What this machine has, and how the doctor's ranks run on it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import foremoe

MOST_RANKS = 4


@dataclass(frozen=True)
class Hardware:
    """How ranks run. It travels to the processes of the ranks."""

    device: str  # cpu or cuda
    gpus: int  # that the ranks use; 0 on a CPU
    ranks: int
    backend: str  # gloo or nccl

    @property
    def shares_gpu(self) -> bool:
        """All ranks run on one GPU. NCCL refuses that; gloo exchanges rows through host memory."""
        return self.device == "cuda" and self.backend == "gloo"

    def device_of(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus) if self.device == "cuda" else torch.device("cpu")

    def describe(self) -> str:
        where = {0: "the CPU", 1: "one GPU"}.get(self.gpus, f"{self.gpus} GPUs")
        return f"{self.ranks} ranks on {where}, {self.backend}"


def find_hardware(ranks: int | None = None, device: str | None = None) -> Hardware:
    """The hardware that the ranks run on.

    Args:
        ranks: number of ranks; None for one per GPU, at most 4, or for 2 where they share a GPU or run on the CPU.
        device: "cpu", "cuda", or None for CUDA if torch finds a GPU.

    Raises:
        InputError: invalid number of ranks, or CUDA was asked for and torch finds no GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus == 0:
        raise foremoe.InputError("device: cuda, but torch finds no GPU", field="device")
    if ranks is not None and not 2 <= ranks <= MOST_RANKS:
        raise foremoe.InputError(f"ranks: {ranks}, expected 2 to {MOST_RANKS}", field="ranks")
    if device == "cpu" or gpus == 0:
        return Hardware("cpu", 0, ranks or 2, "gloo")
    if gpus == 1 or not dist.is_nccl_available():
        return Hardware("cuda", 1, ranks or 2, "gloo")
    if ranks is not None and ranks > gpus:
        raise foremoe.InputError(f"ranks: {ranks}, but NCCL needs a GPU each and there are {gpus}", field="ranks")
    ranks = ranks or (4 if gpus >= 4 else 2)
    return Hardware("cuda", ranks, ranks, "nccl")


def versions(hardware: Hardware) -> dict[str, Any]:
    """Versions and names of devices. Nothing that identifies the machine or its user."""
    found: dict[str, Any] = {
        "foremoe": foremoe.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda if hardware.device == "cuda" else None,
        "nccl": None,
        "driver": None,
        "gpus": [],
    }
    if hardware.device == "cuda":
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(hardware.gpus)]
        found["driver"] = _driver()
    if hardware.backend == "nccl":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _driver() -> str | None:
    """The version of the GPU driver, as its kernel module reports it; None where that cannot be read."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)
