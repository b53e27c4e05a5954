"""Plans a step. Options are those of the command line (foremoe.options)."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Unpack, overload

from . import _core
from ._core import Load, Plan, RunningPlan
from ._errors import InputError
from ._evaluation import evaluate
from ._files import expect
from .options import EvaluateOptions, StartPlanOptions, expect_options, split


@overload
def plan(
    load: Load,
    policy: str = "foremoe",
    *,
    ep: None = None,
    layers: slice | range | None = None,
    on_micro_step: Callable[[int], object] | None = None,
    **options: Unpack[EvaluateOptions],
) -> Plan: ...


@overload
def plan(load: Load, policy: str = "foremoe", *, ep: int, **options: Unpack[EvaluateOptions]) -> list[Plan]: ...


def plan(
    load: Load,
    policy: str = "foremoe",
    *,
    ep: int | None = None,
    layers: slice | range | None = None,
    on_micro_step: Callable[[int], object] | None = None,
    **options: Unpack[EvaluateOptions],
) -> Plan | list[Plan]:
    """Plans a step: the expert in every slot, and the tokens that the slot serves. Ctrl-C ends planning.

    With a cluster, copies have the price that cluster and model imply, and policy foremoe makes no plan (vanilla's)
    where the modelled step would take longer with one. With residency="auto" it makes the fastest of several plans.

    Args:
        load: Load to plan.
        policy: A key of foremoe.policies().
        ep: Ranks of an expert-parallel group: the load's ranks form groups of `ep` neighbours. Returns the plan of each
            of load.groups(ep). None: one group. Needs `layers`, `on_micro_step`, `previous` and `previous_load` None.
        layers: Layers of the load to plan; Plan.join() joins the parts. None: all.
        on_micro_step: Called with 0, 1, … when the plan of that micro-step is final, from another thread. An exception
            that it raises ends planning.
        **options: foremoe.options.StartPlanOptions; the most common are guest_slots (number of guests per rank and
            layer), residency, in_flight, homes and previous. With `cluster`: foremoe.options.EvaluateOptions. Such a
            plan needs `layers` and `on_micro_step` None.

    Raises:
        PolicySkipped: if the policy is not defined for the load.
        InputError: for an invalid value, with the option's name in `.field`.
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    expect(Callable | None, on_micro_step=on_micro_step)
    expect(Integral | None, ep=ep)
    expect_options(EvaluateOptions, "plan", options)
    if ep is not None:
        of_one: dict[str, object] = {"layers": layers, "on_micro_step": on_micro_step}
        of_one |= {name: options.get(name) for name in ("previous", "previous_load")}
        for name, value in of_one.items():
            if value is not None:
                raise InputError(f"{name}: belongs to one group; with ep, plan each load of load.groups()", field=name)
        return [plan(group, policy, **options) for group in load.groups(ep)]
    if options.get("cluster") is not None:
        for name, value in {"layers": layers, "on_micro_step": on_micro_step}.items():
            if value is not None:
                raise InputError(f"{name}: needs cluster None; a plan is chosen for the whole step", field=name)
        return evaluate(load, policy, **options).plan
    for name in options.keys() - StartPlanOptions.__annotations__.keys() - {"cluster"}:
        raise InputError(f"{name}: needs a cluster", field=name)
    options.pop("cluster", None)
    asked, arguments = split(options)
    return _core._plan(load, policy, asked, layers=layers, on_micro_step=on_micro_step, **arguments)


def start_plan(load: Load, policy: str = "foremoe", **options: Unpack[StartPlanOptions]) -> RunningPlan:
    """Starts planning a step in the background. See plan().

    Args:
        load: Load to plan.
        policy: A key of foremoe.policies().
        **options: foremoe.options.StartPlanOptions.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`.
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    expect_options(StartPlanOptions, "start_plan", options)
    asked, arguments = split(options)
    return _core._start_plan(load, policy, asked, **arguments)
