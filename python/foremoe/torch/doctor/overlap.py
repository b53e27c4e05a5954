"""Copies of experts overlap with computing: a rank waits less for copies that start a turn ahead.

With depth 1 a copy starts in the turn that reads it, and nothing hides it. With depth 2 it starts a turn earlier. On a
CPU the link between ranks is a delay as long as a turn; on GPUs it is the machine's own.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics

import torch
import torch.distributed as dist

from .._measured import delayed_copies
from ..measure import Measurement
from .checks import Check, Found
from .hardware import Hardware
from .ranks import Failure
from .staging import REASON

LEAST_HIDDEN = 0.3
"""Of the time that copies take with depth 1, which depth 2 must hide."""
SIZES = {
    "cpu": {"hidden": 64, "intermediate": 128, "tokens": 256, "dtype": "float32"},
    "cuda": {"hidden": 2048, "intermediate": 1024, "tokens": 4096, "dtype": "bfloat16"},
}
RUNS = 2


def checks() -> list[Check]:
    return [Check("copies overlap with computing", _check, lambda h: REASON if h.shares_gpu else "")]


def _sizes(hardware: Hardware, depth: int) -> argparse.Namespace:
    return argparse.Namespace(
        **SIZES[hardware.device],
        layers=3,
        experts=24,
        top_k=4,
        micro_steps=3,
        guest_slots=2,
        residency="shared",  # experts are copied in every turn
        prefetch_depth=depth,
        step_spread=0.7,
        group_spread=0.5,
        runs=RUNS,
    )


def _check(hardware: Hardware) -> Found:
    device = hardware.device_of(dist.get_rank())
    measurements = {depth: Measurement(_sizes(hardware, depth), device) for depth in (1, 2)}
    delay = 0.0
    if hardware.device == "cpu":
        sizes = measurements[2].sizes
        without = measurements[2].step("vanilla")["wall"]
        delay = without / (2 * sizes.layers * sizes.micro_steps)  # a turn
    waited: dict[int, float] = {}
    for depth, measurement in measurements.items():
        with delayed_copies(delay) if delay else contextlib.nullcontext():
            runs = [measurement.step("foremoe") for _ in range(RUNS + 1)][1:]  # the first one warms up
        waited[depth] = statistics.median(run["exposed"] for run in runs)
        measurement.ep.detach()
    hidden = torch.tensor(1 - waited[2] / waited[1] if waited[1] else torch.nan, device=device)
    dist.broadcast(hidden, 0)  # clocks differ
    share = float(hidden)
    link = f", each copy delayed by {1e3 * delay:.1f} ms" if delay else ""
    seen = f"waited {1e3 * waited[1]:.1f} ms a step at depth 1, {1e3 * waited[2]:.1f} ms at depth 2{link}"
    if not share >= LEAST_HIDDEN:
        raise Failure(f"depth 2 hides {share:.0%} of what depth 1 waits: {seen}")
    return Found(f"depth 2 hides {share:.0%}: {seen}", {"hidden": share, "depth_1": waited[1], "depth_2": waited[2]})
