"""A rank that fails ends the others: they raise an error in bounded time, and none takes its gradients for whole.

The last rank fails in the middle of a phase, in two ways: it raises an error that its trainer catches, so that its
process lives on, or it is killed.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Sequence

import torch.distributed as dist

from .checks import Check, Found
from .equality import Net, draw_inputs, draw_routes, spread
from .hardware import Hardware
from .ranks import GROUP_TIMEOUT, Report
from .report import FAILED, PASSED, Outcome
from .staging import staged

LIMIT = GROUP_TIMEOUT + 15.0
"""Seconds in which the others must have ended: the group's timeout, and what it takes to notice it."""


class PlantedError(RuntimeError):
    """The error of the rank that fails."""


def checks() -> list[Check]:
    return [
        Check(
            f"others end when a rank {how}",
            functools.partial(_run, how),
            judge=functools.partial(_judge, how),
            limit=LIMIT,
            grace=LIMIT,
            ends_ranks=True,
        )
        for how in ("raises", "is killed")
    ]


def _run(how: str, hardware: Hardware) -> Found:
    rank = dist.get_rank()
    net = Net("float32", hardware.device_of(rank))
    with staged(hardware):
        ep = spread(net)
        with ep.plan(draw_routes(rank)) as phase:
            for m, hidden in enumerate(draw_inputs(rank)):
                with phase.micro_step(m):
                    out = net(hidden.to(ep.expert_parameters()[0]))
                    if m == 1 and rank == hardware.ranks - 1:
                        if how == "is killed":
                            os.kill(os.getpid(), signal.SIGKILL)
                        raise PlantedError("planted by the doctor")
                    out.square().mean().backward()
            phase.drain()
    return Found("", {})


def _judge(how: str, reports: Sequence[Report]) -> Outcome:
    *others, last = reports
    expected = last.ended == "died" if how == "is killed" else last.ended == "raised" and "Planted" in last.text
    if not expected:
        return Outcome(FAILED, f"rank {last.rank} was to fail, but {last.text or 'ended without an error'}")
    wrong = [f"rank {r.rank} {r.text or 'ended without an error'}" for r in others if r.ended not in ("raised", "died")]
    if wrong:
        return Outcome(FAILED, "; ".join(wrong))
    seconds = max(report.seconds for report in others) - last.seconds
    return Outcome(
        PASSED,
        f"after {max(0.0, seconds):.1f} s; rank {others[0].rank}: {others[0].text.split('. ')[0]}",
        {"seconds": max(0.0, seconds)},
    )
