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
chooses. These rows do not affect the loss: no token attends to them, and their logits are not used. So they get
predictable routes, all experts in turn (foremoe.megatron.with_filler_routes()), and the statistics of an expert bias
leave them out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._errors import refuse
from ._import_hook import WhenImported
from ._variable import given_arguments
from .supported import VERL, expect

if TYPE_CHECKING:
    from torch import Tensor

    from .megatron.rehearsal import Call, Routes
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
        from .megatron.schedule import Adapter, install
    except ModuleNotFoundError as error:
        raise ImportError(f"foremoe.verl needs verl {VERL.accepted} and Megatron-LM: {error}") from error
    filler = _Filler()
    schedule = install(Adapter("verl", (module,), routes=filler.routes, is_policy=_is_policy))
    if module == ENGINE:
        _extend_engine(importlib.import_module(ENGINE).MegatronEngineWithLMHead, schedule)
        if schedule.is_active:
            filler.fill(importlib.import_module("verl.utils.megatron.router_replay_patch").RouterReplay, schedule)
    elif schedule.is_active:
        refuse("mode", f"is active; expected shadow with verl {verl.__version__}, which replays no recorded routes")
    return schedule


def _is_policy(call: Call) -> bool:
    """Engines of the reference model are forward-only, and the critic's is of another class."""
    step = call.keywords["forward_step_func"]
    engine = getattr(getattr(step, "func", step), "__self__", None)
    if engine is None:  # before 0.8: the module serves only the actor, and the reference model without training
        return True
    return hasattr(engine, "_foremoe_expected") and not engine.engine_config.forward_only


def _extend_engine(engine: Any, schedule: Schedule) -> None:
    """Adds early refusals to the engine's initialize(), and foremoe's metrics to those of an update."""
    initialize, forward_backward_batch = engine.initialize, engine.forward_backward_batch

    @functools.wraps(initialize)
    def checked(self: Any) -> Any:
        if not self.engine_config.forward_only:
            _expect_supported(self.engine_config, schedule.mode)
        return initialize(self)

    @functools.wraps(forward_backward_batch)
    def measured(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        output = forward_backward_batch(self, data, loss_function, forward_only)
        if not (forward_only or self.engine_config.forward_only) and "metrics" in output:
            output["metrics"].update({name: [value] for name, value in schedule.metrics().items()})
        return output

    engine._foremoe_expected = True
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


class _Filler:
    """Routes of the rows that verl does not replay."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}  # of filler, by id of a RouterReplay: int64 [experts]

    def fill(self, replay: Any, schedule: Schedule) -> None:
        """Gives filler routes to all rows that RouterReplay.set_target_indices() would leave to the router."""
        own = replay.set_target_indices

        @functools.wraps(own)
        def set_target_indices(self_: Any, routes: Tensor, replay_mask: Tensor | None = None) -> None:
            from .megatron import with_filler_routes

            layers = schedule.replicas.layers if schedule.replicas is not None else []
            if replay_mask is None or not layers:
                own(self_, routes, *([] if replay_mask is None else [replay_mask]))
                return
            experts, is_replayed = layers[0].config.num_moe_experts, replay_mask.bool().reshape(-1)
            first = int(layers[0].local_expert_indices[0])
            filled = with_filler_routes(routes, is_replayed, num_experts=experts, first=first)
            rows = filled[~is_replayed].flatten().bincount(minlength=experts)
            self._rows[id(self_)] = rows + self._rows.get(id(self_), 0)
            own(self_, filled)

        replay.set_target_indices = set_target_indices

    def routes(self, call: Call, layers: Sequence[Any]) -> Routes | None:
        """Rehearses, and subtracts the rows of filler from the statistics of an expert bias before they are counted."""
        from .megatron.adapters import router_of
        from .megatron.rehearsal import rehearse

        if layers and getattr(layers[0].config, "experimental_attention_variant", None) == "dsv4_hybrid":
            refuse("experimental_attention_variant", "is 'dsv4_hybrid', whose rows are split otherwise over ranks")
        self._rows.clear()
        found = rehearse(call, layers)
        for layer in layers if found is not None and not call.forward_only else []:
            router = router_of(layer)
            rows = self._rows.get(id(router.router_replay))
            if rows is not None and getattr(router, "enable_expert_bias", False):
                router.local_tokens_per_expert -= rows
        return found


WhenImported({name: lambda name=name: init(name) for name in (ENGINE, ACTOR)}).install()
