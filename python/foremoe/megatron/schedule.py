"""One wrapper of the schedule for every trainer of Megatron-LM models.

Each trainer calls forward_backward_func(forward_step_func=…, data_iterator=…, model=…, num_microbatches=…,
forward_only=…), and looks this function up as get_forward_backward_func() in a module of its own. install() replaces
that name, so that each call is planned, or evaluated in shadow mode. An adapter says where its trainer looks the
function up, and which routes a call replays, unless a rehearsal (rehearsal.py) finds them.

    schedule = install(Adapter("slime", ("slime.backends.megatron_utils.model",), routes=of_lists))
    schedule.metrics()

The first training call attaches to its model. From then on, all training calls of that model are planned, and those
forward-only calls that replay routes. In active mode a training call without routes is an error on all ranks.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe._errors import refuse
from foremoe._variable import HOME, VARIABLE, given_arguments

from .attach import attach
from .counts import Counts
from .rehearsal import Call, Routes, count, rehearse
from .replicas import Replicas

LOOK_UP = "get_forward_backward_func"
_log = logging.getLogger("foremoe")


@dataclass(frozen=True)
class Adapter:
    """What differs between trainers.

    Attributes:
        trainer: Its name, for messages.
        modules: Modules in which it looks up get_forward_backward_func.
        routes: Returns the routes of each micro-batch, [micro-batch][layer] integers [rows, top_k] of this rank, given
            the call and the MoE layers of this pipeline stage. −1: the router chooses. None: the call replays none.
        is_policy: Whether a call is of the policy. Calls of other models pass through.
        replays: Whether the trainer can replay routes. If not, active mode is refused.
        sleeps: Whether the trainer ends its process groups between steps, so that shadow mode must be done by then.
    """

    trainer: str
    modules: tuple[str, ...]
    routes: Callable[[Call, Sequence[Any]], Routes | None] = rehearse
    is_policy: Callable[[Call], bool] = lambda call: True
    replays: bool = True
    sleeps: Callable[[], bool] = lambda: False


class Schedule:
    """A trainer's schedule under plans, or in shadow mode.

    Attributes:
        replicas: Result of attach(); None before the first training call.
    """

    def __init__(self, adapter: Adapter, arguments: dict[str, Any]) -> None:
        """arguments: Arguments of attach(), with the mode."""
        self.replicas: Replicas | None = None
        self._adapter = adapter
        self._arguments = arguments
        self._chunks: list[Any] = []

    @property
    def mode(self) -> str:
        return str(self._arguments["mode"])

    @property
    def is_active(self) -> bool:
        return self.mode != "shadow"

    def metrics(self) -> dict[str, float]:
        """Returns Replicas.metrics(); empty before the first training call."""
        return {} if self.replicas is None else self.replicas.metrics()

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the schedule with planned calls."""

        @functools.wraps(forward_backward)
        def run(**keywords: Any) -> Any:
            return self._run(forward_backward, Call(keywords))

        return run

    def _run(self, forward_backward: Callable[..., Any], call: Call) -> Any:
        passes = call.forward_only and (self.replicas is None or not self.is_active)
        if passes or not self._adapter.is_policy(call):
            return forward_backward(**call.keywords)
        if self.replicas is None:  # not earlier: weights may be offloaded before the first step
            self.replicas, self._chunks = attach(call.chunks, **self._arguments), call.chunks
        if [id(chunk) for chunk in call.chunks] != [id(chunk) for chunk in self._chunks]:
            if call.forward_only or not self.is_active:
                return forward_backward(**call.keywords)
            refuse(
                "model",
                f"is another than that of the first training step of {self._adapter.trainer}; expected the same",
            )
        if self.is_active:
            return self._run_planned(forward_backward, call, self.replicas)
        with self.replicas.step():
            result = forward_backward(**call.keywords)
        if self._adapter.sleeps():
            self.replicas.wait()
        return result

    def _run_planned(self, forward_backward: Callable[..., Any], call: Call, replicas: Replicas) -> Any:
        routes: Routes | None = None
        refused: Exception | None = None
        try:
            routes = self._adapter.routes(call, replicas.layers)
        except Exception as error:  # raised by plan(), on all ranks
            refused = error
        if call.forward_only and not replicas.any(routes is not None or refused is not None):
            return forward_backward(**call.keywords)
        chosen = False

        def counts() -> Counts:
            nonlocal chosen
            if refused is not None:
                raise refused
            if not replicas.layers:
                return np.zeros((call.num_micro_batches, 0, 0), np.int64)
            if routes is None:
                refuse(
                    "router_replay", f"gives no routes to the routers of a step of {self._adapter.trainer}; "
                    f"expected replay of recorded routes (R3), or mode=shadow in {VARIABLE}",
                )  # fmt: skip
            found, chosen = count(routes, replicas.num_experts)
            return found

        plan = replicas.plan(counts, "recompute" if call.forward_only else "policy_update")
        routes = None  # frees the memory of all routes
        is_home = replicas.any(chosen)
        if is_home and replicas.any(replicas.is_flex):
            if call.forward_only:
                return forward_backward(**call.keywords)
            refuse(
                "routes", "are missing for some rows, which a plan computes at home; that needs "
                "moe_token_dispatcher_type alltoall or allgather, not flex",
            )  # fmt: skip
        with replicas.step(plan, on_mismatch=HOME if is_home else None):
            return forward_backward(**call.keywords)


def install(adapter: Adapter, arguments: dict[str, Any] | None = None) -> Schedule:
    """Replaces get_forward_backward_func in the modules of the adapter, which it imports.

    If they are replaced already, returns that schedule; a module that was executed again gets a new one.

    arguments: Arguments of attach(). None: those of the variable FOREMOE_ATTACH.

    Raises ImportError, with the missing name, if a module or the function is not in the installed version, and
    InputError for active mode if the trainer replays no routes.
    """
    schedule = Schedule(adapter, given_arguments() if arguments is None else arguments)
    if schedule.is_active and not adapter.replays:
        refuse("mode", f"is active, but {adapter.trainer} replays no recorded routes; set mode=shadow in {VARIABLE}")
    for name in adapter.modules:
        try:
            module = importlib.import_module(name)
            look_up = getattr(module, LOOK_UP)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"foremoe: this version of {adapter.trainer} has no {name}.{LOOK_UP}: {error}") from error

        if (earlier := getattr(look_up, "foremoe", None)) is not None:
            return earlier  # type: ignore[no-any-return]

        def looked_up(*given: Any, of: Callable[..., Any] = look_up, **named: Any) -> Callable[..., Any]:
            return schedule.wrap(of(*given, **named))

        looked_up.foremoe = schedule  # type: ignore[attr-defined]
        setattr(module, LOOK_UP, looked_up)
    _log.setLevel(min(_log.getEffectiveLevel(), logging.INFO))  # rank 0 logs the metrics of each step
    return schedule
