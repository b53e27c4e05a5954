"""Runs slime's training steps under plans, or in shadow mode.

    --custom-megatron-init-path foremoe.slime.init

This flag selects shadow mode, which counts each step's routes. The log and `foremoe.slime.schedule.metrics()` report
the possible gain. A second flag passes other arguments of foremoe.megatron.attach() to the processes that train:

    --train-env-vars '{"FOREMOE_ATTACH": "mode=active,guest_slots=1"}'

Active mode reads routes from the lists that slime replays (--use-rollout-routing-replay or --use-routing-replay). From
the first training step on it also plans log-probabilities that replay routes. Critics, the reference model and the
teacher run unchanged.

With --colocate or --offload-train, slime ends all process groups when it sleeps, and makes them again. It keeps the
contents of device memory. Active mode runs only if both hold; shadow mode is done before slime sleeps.

Written from slime's sources (foremoe.supported names the revision). lab/engines runs slime's own train() and
forward_only(), and its groups that sleep, on four CPU ranks, for a few MoE layers. Untested: slime's actors, on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ._errors import refuse
from .megatron.lora import router_of
from .megatron.rehearsal import Call, Routes
from .megatron.schedule import Adapter, Schedule, install

schedule: Schedule | None = None
"""slime's schedule, with the metrics; None before init()."""


def init(args: Any) -> None:
    """Wraps slime's schedule. slime calls this function in each process that trains, before it builds the model."""
    global schedule
    schedule = installed("slime", args, routes)


def installed(trainer: str, args: Any, of_call: Callable[[Call, Sequence[Any]], Routes | None]) -> Schedule:
    """Wraps the schedule of slime, or of miles, its fork. of_call: Returns the routes of a call; see Adapter.

    Raises InputError if active mode cannot run with these arguments of the trainer.
    """
    module = f"{trainer}.backends.megatron_utils.model"
    made = install(Adapter(trainer, (module,), of_call, is_policy=_is_actor, sleeps=lambda: bool(args.offload_train)))
    if made.is_active:
        if not args.use_routing_replay:
            refuse("use_routing_replay", "is False; mode active needs --use-rollout-routing-replay (R3)")
        if getattr(args, "moe_router_fusion", False):
            refuse("moe_router_fusion", "is True; expected False, since a fused router ignores replayed routes")
        if args.offload_train:
            _expect_kept(trainer)
    return made


def _is_actor(call: Call) -> bool:
    return bool(getattr(call.chunks[0], "role", "actor") == "actor")


def _expect_kept(trainer: str) -> None:
    """Raises InputError unless the trainer makes groups again, and restores device memory, when it wakes up."""
    maker = dist.new_group.__module__
    if maker != f"{trainer}.utils.reloadable_process_group":
        refuse("offload_train", f"is True, but torch.distributed.new_group is of {maker}, so that groups do not return")
    variable = "TMS_INIT_ENABLE_CPU_BACKUP"
    if (value := os.environ.get(variable)) != "1":
        refuse("offload_train", f"is True with {variable}={value}; expected 1, which keeps the contents of memory")


def routes(call: Call, layers: Sequence[Any]) -> Routes | None:
    """Returns the routes that slime replays in a call; None if it replays none."""
    if os.environ.get("ENABLE_ROUTING_REPLAY") != "1":
        return None
    replays = not call.forward_only or os.environ.get("ROUTING_REPLAY_STAGE") == "replay_forward"
    return recorded(call, layers) if replays else None


def recorded(call: Call, layers: Sequence[Any]) -> Routes:
    """Returns the routes that the routers take next from their lists. Each is copied to the device when it is read.

    Raises InputError if a list is too short, or is read only when it is replayed.
    """
    of_layers = [_next_routes(router_of(layer), i, call.num_micro_batches) for i, layer in enumerate(layers)]
    return [
        (
            of.to(router_of(layer).weight.device, non_blocking=True)
            for of, layer in zip(micro_batch, layers, strict=True)
        )
        for micro_batch in zip(*of_layers, strict=True)
    ]


def _next_routes(router: Any, layer: int, micro_batches: int) -> list[Tensor]:
    if not hasattr(router, "routing_replay"):
        refuse("routing_replay", "is missing in the router of this MoE layer; expected one in each", f"[{layer}]")
    recorded, first = router.routing_replay.top_indices_list, router.routing_replay.forward_index
    end = first + micro_batches
    if len(recorded) < end:
        has = f"has {len(recorded)} micro-batches; expected {first} to {end - 1} among them"
        refuse("top_indices_list", has, f"[{layer}]")
    for m, of in enumerate(recorded[first:end]):
        if hasattr(of, "materialize_for_routing_replay"):
            refuse("top_indices_list", "is read when it is replayed, which is not supported", f"[{layer}][{first + m}]")
    return list(recorded[first:end])
