"""Runs training steps of miles, a fork of slime, under plans, or in shadow mode.

    --custom-megatron-init-path foremoe.miles.init
    --train-env-vars '{"FOREMOE_ATTACH": "mode=active,guest_slots=1"}'

foremoe.slime describes both flags. Only the first is needed in shadow mode; `foremoe.miles.schedule.metrics()` returns
the metrics. Active mode reads the lists of miles' routing_replay_manager, and is refused with --offload-train-target
disk, which switches off the backup of device memory on the host.

Written from the sources of miles and of its fork of Megatron-LM (foremoe.supported names the revision). lab/engines
runs miles' own train(), forward_only() and its groups that sleep, as for slime. Untested: miles' actors, on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import slime
from .megatron.rehearsal import Call, Routes
from .megatron.schedule import Schedule

schedule: Schedule | None = None
"""miles' schedule, with the metrics; None before init()."""


def init(args: Any) -> None:
    """Wraps miles' schedule. miles calls this function in each process that trains, before it builds the model."""
    global schedule
    schedule = slime.installed("miles", args, routes)


def routes(call: Call, layers: Sequence[Any]) -> Routes | None:
    """Returns the routes that miles replays in a call; None if it replays none."""
    from miles.utils.replay_base import routing_replay_manager as manager

    if not manager.enabled or (call.forward_only and manager.stage != "replay_forward"):
        return None
    return [map(_without_padding, micro_batch) for micro_batch in slime.recorded(call, layers)]


def _without_padding(routes: Tensor) -> Tensor:
    """Replaces rows of −1, [rows, top_k], by the first experts, as miles does when it replays them."""
    first = torch.arange(routes.shape[1], device=routes.device, dtype=routes.dtype)
    return torch.where((routes == -1).all(1, keepdim=True), first, routes)
