"""How fast rows and experts travel. What was sent must arrive, so that a figure is that of a working link."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .._measured import least_seconds
from .checks import Check, Found
from .hardware import Hardware
from .ranks import Failure
from .staging import REASON

BYTES = {"cpu": 2**23, "cuda": 2**27}
"""That a rank sends, or copies."""
RUNS = 4


def checks() -> list[Check]:
    return [
        Check("bandwidth: all-to-all", _all_to_all),
        Check("bandwidth: copies between ranks", _between_ranks, lambda h: REASON if h.shares_gpu else ""),
        Check("bandwidth: copies from host memory", _from_host),
    ]


def _measure(name: str, sent: int, expected: Tensor, to: Tensor, run: Callable[[], object]) -> Found:
    """Collective. sent: bytes of a rank. expected: what `to` must hold after run()."""
    seconds = least_seconds(run, dist.group.WORLD, to.device, RUNS)
    differs = torch.tensor(int(not torch.equal(to, expected)), device=to.device)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if int(differs):
        raise Failure("what arrived is not what was sent")
    rate = sent / seconds / 1e9
    return Found(f"{rate:.3g} GB/s per rank, {sent / 1e6:.0f} MB {name}", {"gigabytes_per_second": rate})


def _filled(count: int, value: int, device: torch.device) -> Tensor:
    return torch.full((count,), value, dtype=torch.uint8, device=device)


def _all_to_all(hardware: Hardware) -> Found:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = hardware.device_of(rank)
    part = BYTES[hardware.device] // ranks
    rows = _filled(part * ranks, rank, device)
    to = _filled(part * ranks, 255, device)
    expected = torch.arange(ranks, dtype=torch.uint8, device=device).repeat_interleave(part, output_size=part * ranks)
    # A rank keeps its own part.
    return _measure("to all others", part * (ranks - 1), expected, to, lambda: dist.all_to_all_single(to, rows))


def _between_ranks(hardware: Hardware) -> Found:
    """Around a ring, all at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, count = hardware.device_of(rank), BYTES[hardware.device]
    expert, to = _filled(count, rank, device), _filled(count, 255, device)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks

    def run() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, expert, group_peer=after), dist.P2POp(dist.irecv, to, group_peer=before)]
        )
        for work in works:
            work.wait()

    return _measure("around the ring of ranks", count, _filled(count, before, device), to, run)


def _from_host(hardware: Hardware) -> Found:
    """From pinned memory to the device; on a CPU, from shared memory. All ranks at once."""
    rank = dist.get_rank()
    device, count = hardware.device_of(rank), BYTES[hardware.device]
    host = _filled(count, rank + 1, torch.device("cpu"))
    host = host.pin_memory() if device.type == "cuda" else host.share_memory_()  # type: ignore[no-untyped-call]
    to = _filled(count, 255, device)
    name = "from pinned memory" if device.type == "cuda" else "from shared memory"
    return _measure(name, count, host.to(device), to, lambda: to.copy_(host, non_blocking=True))
