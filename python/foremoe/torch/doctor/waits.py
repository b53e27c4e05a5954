"""Planned layers never make the host wait for the device, in forward or backward. CUDA reports such waits itself."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .checks import Check, Found
from .equality import Net, draw_inputs, draw_routes, spread
from .hardware import Hardware
from .ranks import Failure
from .staging import staged


def checks() -> list[Check]:
    return [Check("no layer waits for the device", _check, _refusal)]


def _refusal(hardware: Hardware) -> str:
    return "" if hardware.device == "cuda" else "only CUDA reports where the host waits for the device"


@contextlib.contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Waits for the device inside, by file and line.

    "warn", not "error": an error would also stop gloo's threads, whose exchange of CUDA tensors waits by design.
    """
    places: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places.update(f"{os.path.basename(w.filename)}:{w.lineno}" for w in found if "synchroniz" in str(w.message))


def _check(hardware: Hardware) -> Found:
    rank = dist.get_rank()
    device = hardware.device_of(rank)
    with _counted() as planted:
        torch.zeros(1, device=device).item()
    if sum(planted.values()) != 1:
        raise Failure(f"a wait that was planted was counted {sum(planted.values())} times")
    net = Net("bfloat16", device)
    waits: Counter[str] = Counter()
    with staged(hardware):
        ep = spread(net)
        inputs = [hidden.to(device, torch.bfloat16) for hidden in draw_inputs(rank)]
        with ep.plan(draw_routes(rank)) as phase:
            for m, hidden in enumerate(inputs):
                with phase.micro_step(m), _counted() as found:
                    net(hidden).square().mean().backward()
                if m > 0:  # the first micro-step also loads kernels
                    waits += found
            phase.drain()
        ep.detach()
    total = torch.tensor(sum(waits.values()), device=device)
    dist.all_reduce(total)
    if int(total):
        where = ", ".join(f"{count} at {place}" for place, count in waits.most_common(5))
        raise Failure(f"{int(total)} waits on all ranks; on this one {where or 'none'}")
    passes = 2 * (len(inputs) - 1) * len(ep.layers)
    return Found(f"none in {passes} passes of layers on each rank", {"waits": 0.0, "passes": float(passes)})
