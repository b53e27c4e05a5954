"""Planned steps for the Megatron engines of verl, from the routes that R3 or R2 replays, and shadow mode.

    export VERL_USE_EXTERNAL_MODULES=foremoe.verl

This variable selects shadow mode: the actor's update counts routes, and verl's metrics include the estimated benefit
of balancing, such as actor/foremoe/rho_vanilla and actor/foremoe/rho_planned. A second variable sets other arguments of
foremoe.megatron.attach():

    export FOREMOE_ATTACH=mode=active,guest_slots=1,residency=static

Values are numbers, null (None: `cluster=null`), true and false; anything else is a string.

In active mode each mini-batch's update has its own plan, and so have old log-probabilities, from the second training
step on, if they replay routes (R3). The reference model and the critic are unchanged.

verl imports this module in each of its processes while verl itself is being imported. The module waits until verl has
imported its Megatron engine, or its actor before 0.8, and wraps the schedule there (foremoe.megatron.schedule).

With R3, verl replays the routes of every token except a sequence's last; for that token and for padding, the router
chooses. These rows do not affect the loss: no token attends to them, and their logits are not used. So they get filler
routes (foremoe.megatron.filler).
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from ._import_hook import WhenImported
from ._variable import given_arguments
from .supported import VERL, expect

if TYPE_CHECKING:
    from .megatron.rehearsal import Call
    from .megatron.schedule import Schedule

ENGINE = "verl.workers.engine.megatron.transformer_impl"
ACTOR = "verl.workers.actor.megatron_actor"  # before 0.8
schedule: Schedule | None = None
"""The wrapped schedule; None until verl has imported its engine."""


def init(module: str) -> Schedule:
    """Wraps the schedule that the module looks up. Raises ImportError for an unsupported version of verl."""
    global schedule
    try:
        import verl

        VERL.expect("foremoe.verl", verl.__version__, given_arguments()["mode"])
        from .megatron.filler import Filler
        from .megatron.schedule import Adapter, install
    except ModuleNotFoundError as error:
        raise ImportError(f"foremoe.verl needs verl {VERL.accepted} and Megatron-LM: {error}") from error
    filler, before = Filler(), schedule
    adapter = Adapter("verl", (module,), routes=filler.routes, is_policy=_is_policy, replays=module == ENGINE)
    schedule = install(adapter)
    if module == ENGINE and schedule is not before:
        _extend_engine(importlib.import_module(ENGINE).MegatronEngineWithLMHead, schedule)
        if schedule.is_active:
            replays = importlib.import_module("verl.utils.megatron.router_replay_patch")
            filler.fill(replays.RouterReplay, schedule)
    return schedule


def _is_policy(call: Call) -> bool:
    step = call.keywords["forward_step_func"]
    engine = getattr(getattr(step, "func", step), "__self__", None)
    return engine is None or _is_actor(engine)  # None: before 0.8, whose module serves no critic


def _is_actor(engine: Any) -> bool:
    """Returns whether the engine trains a language model: not the reference model, nor a critic."""
    return not engine.engine_config.forward_only and getattr(engine.model_config, "model_type", "") != "value_model"


def _extend_engine(engine: Any, schedule: Schedule) -> None:
    """Adds early refusals to the engine's initialize(), and foremoe's metrics to those of an update."""
    initialize, forward_backward_batch = engine.initialize, engine.forward_backward_batch

    @functools.wraps(initialize)
    def checked(self: Any) -> Any:
        if _is_actor(self):
            _expect_supported(self.engine_config, schedule.mode)
        return initialize(self)

    @functools.wraps(forward_backward_batch)
    def measured(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        output = forward_backward_batch(self, data, loss_function, forward_only)
        if not forward_only and _is_actor(self) and "metrics" in output:
            output["metrics"].update({name: [value] for name, value in schedule.metrics().items()})
        return output

    engine.initialize, engine.forward_backward_batch = checked, measured


def _expect_supported(engine: Any, mode: str) -> None:
    """Raises InputError with the unsupported field of verl's configuration and its expected value."""
    values = {
        "dynamic_context_parallel": getattr(engine, "dynamic_context_parallel", False),
        "replay": engine.router_replay.mode,
        "use_remove_padding": engine.use_remove_padding,
        "sequence_parallel": engine.sequence_parallel or engine.tensor_model_parallel_size == 1,
    }
    expect(values, mode, "verl", of="verl's engine")


def _wrap(module: str) -> None:
    try:
        init(module)
    except ImportError as error:  # which verl would take for an engine that is not installed
        raise RuntimeError(str(error)) from error


WhenImported({name: functools.partial(_wrap, name) for name in (ENGINE, ACTOR)}).install()
