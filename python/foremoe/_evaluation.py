"""Evaluates plans and compares policies. Options are those of the command line (foremoe.options)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, Unpack

from . import _core
from ._core import Evaluation, Load, Plan
from ._files import expect
from .options import (
    AnyHomes,
    CompareOptions,
    EvaluateOptions,
    LayoutOptions,
    SimulateOptions,
    SimulationOptions,
    expect_options,
    policy_names,
    split,
)


def evaluate(load: Load, policy: str = "foremoe", **options: Unpack[EvaluateOptions]) -> Evaluation:
    """Plans with one policy, checks the plan, measures it and, with a cluster, simulates the step.

    Args:
        load: Load to plan.
        policy: A key of foremoe.policies().
        **options: foremoe.options.EvaluateOptions.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`.
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    expect_options(EvaluateOptions, "evaluate", options)
    asked, arguments = split(options)
    return _core._evaluate(load, policy, asked, **arguments)


def evaluate_plan(
    plan: Plan,
    load: Load,
    *,
    recompute_plan: Plan | None = None,
    phase: Literal["recompute", "policy_update"] | None = None,
    cluster: str | None = None,
    path: Literal["auto", "host", "peer"] = "auto",
    policy_options: Mapping[str, float | str] | None = None,
    homes: AnyHomes = None,
    threads: int = 0,
    **options: Unpack[SimulationOptions],
) -> Evaluation:
    """Evaluates an existing plan, with the same results as evaluate().

    Args:
        plan: Plan of all layers for the policy update, or for `phase`. Its policy, with `policy_options`, determines
            the system's online behaviour.
        load: Load that the plan serves.
        recompute_plan: Plan of recompute, with one micro-step in flight. If None, recompute uses `plan`, which must
            have one micro-step in flight if a cluster is given.
        phase: None simulates a step: recompute, then the policy update. Otherwise simulates only this phase with
            `plan`. `phases` then has one entry, equal to that of a step (under residency free, of a step in which
            `plan` serves both phases). Figures of the whole step (step_seconds, …) are missing. recompute_plan must be
            None, and recompute needs one micro-step in flight.
        cluster: A name of foremoe.clusters(), or a file that `foremoe calibrate` wrote. None predicts no times.
        path: Source of copies.
        policy_options: Options specific to the plan's policy.
        homes: Homes before planning.
        threads: Number of threads; 0 for one per processor.
        **options: foremoe.options.SimulationOptions.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`.
    """
    expect(Plan, plan=plan)
    expect(Load, load=load)
    expect(Plan | None, recompute_plan=recompute_plan)
    expect(str | None, phase=phase)
    expect_options(SimulationOptions, "evaluate_plan", options)
    named = {"policy_options": policy_options, "homes": homes, "threads": threads, "cluster": cluster, "path": path}
    asked, arguments = split({**options, **named})
    return _core._evaluate_plan(plan, load, asked, recompute_plan=recompute_plan, phase=phase, **arguments)


def compare(
    load: Load, policies: str | Sequence[str] = "all", *, ep: int | None = None, **options: Unpack[CompareOptions]
) -> list[dict[str, Any]]:
    """Plans with several policies, checks each plan, and returns what `foremoe compare --json` prints.

    Args:
        load: Load to plan.
        policies: Keys of foremoe.policies(); "all" for every system, without the variants.
        ep: Ranks of an expert-parallel group: the load's ranks form groups of `ep` neighbours, each planned on its own.
            ρ then covers all groups, and `groups` has the figures of each. None: one group. `previous` belongs to one
            group, so it must be None.
        **options: foremoe.options.CompareOptions.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`.
    """
    expect(Load, load=load)
    expect_options(CompareOptions, "compare", options)
    asked, arguments = split({**options, "ep": ep})
    result: list[dict[str, Any]] = _core._compare(load, policy_names(policies), asked, **arguments)
    return result


def simulate(
    load: Load,
    policies: str | Sequence[str] = "all",
    *,
    cluster: str,
    ep: int | None = None,
    **options: Unpack[SimulateOptions],
) -> list[dict[str, Any]]:
    """Predicts a step's time on a cluster with each policy, and returns what `foremoe simulate --json` prints.

    Args:
        load: Load to plan.
        policies: Keys of foremoe.policies(); "all" for every system, without the variants.
        cluster: A name of foremoe.clusters(), or a file that `foremoe calibrate` wrote. Nodes have
            the cluster's size.
        ep: Ranks of an expert-parallel group: the load's ranks form groups of `ep` neighbours, each planned on its own.
            The step is then the slowest group's, and `groups` has the figures of each. None: one group. `previous`
            belongs to one group, so it must be None.
        **options: foremoe.options.SimulateOptions.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`.
    """
    expect(Load, load=load)
    expect_options(SimulateOptions, "simulate", options)
    asked, arguments = split({**options, "ep": ep})
    names = policy_names(policies)
    result: list[dict[str, Any]] = _core._simulate(load, names, {"cluster": cluster, **asked}, **arguments)
    return result


def fit(
    load: Load,
    policy: str = "foremoe",
    *,
    cluster: str,
    most_guest_slots: int = 4,
    ep: int | None = None,
    **options: Unpack[SimulateOptions],
) -> dict[str, Any]:
    """Finds out before a step whether it fits into memory, and returns what `foremoe fit --json` prints.

    `now` describes vanilla (contiguous homes, no guests), `planned` the policy's plan: the most rows and bytes by rank,
    layer and micro-step, the terms of the memory, the first place that exceeds the limit (`exceeds`, None if none), the
    largest micro-batch, and the smallest capacities of trainers without drops. Each capacity follows the trainer's own
    rule, cited in src/foremoe/evaluate/capacity.h:

    - Megatron-LM, moe_expert_capacity_factor: get_capacity in core/transformer/moe/moe_utils.py, megatron-core 0.19.2.
    - Megatron-LM, moe_expert_rank_capacity_factor: core/transformer/moe/token_dispatcher.py, 0.19.2 and main (0.20).
    - Megatron-LM, moe_paged_stash_buffer_size_factor_cuda: core/transformer/moe/paged_stash.py, 0.19.2 and main (0.20).
    - torchtitan 0.2.2, non_blocking_capacity_factor: torchtitan/distributed/deepep/hybridep.py.

    NeMo Automodel 0.5.0 computes no capacity from its option moe_expert_capacity_factor.

    Args:
        load: Load to plan.
        policy: A key of foremoe.policies().
        cluster: A name of foremoe.clusters(), or a file that `foremoe calibrate` wrote.
        most_guest_slots: If vanilla does not fit, up to this number of guest slots are tried.
        ep: Ranks of an expert-parallel group: the load's ranks form groups of `ep` neighbours, each planned on its own.
            Figures are then the largest of all groups, and `groups` has those of each. None: one group. `previous`
            belongs to one group, so it must be None.
        **options: foremoe.options.SimulateOptions. The limit is memory_budget; without it, the memory of the device.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`, and if the policy has no plan.
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    expect(Integral, most_guest_slots=most_guest_slots)
    expect_options(SimulateOptions, "fit", options)
    asked, arguments = split({**options, "ep": ep})
    found: dict[str, Any] = _core._fit(load, policy, {"cluster": cluster, **asked}, int(most_guest_slots), **arguments)
    return found


def layout(load: Load, *, cluster: str, gpus: int | None = None, **options: Unpack[LayoutOptions]) -> dict[str, Any]:
    """Finds the expert-parallel size and number of pipeline stages with the fastest step within a rank's memory.

    Returns what `foremoe layout --json` prints. `layouts` has every layout: its seconds and memory `unplanned`, and
    `planned` with foremoe's plan (None if that cannot be the fastest or does not fit, see `not_planned`). `best` is the
    fastest that fits, `best_unplanned` the fastest without a plan. `remarks` says what the seconds do not include.

    Args:
        load: Load of all ranks of the job, best collected from a trace, so that its tokens are known.
        cluster: A name of foremoe.clusters(), or a file that `foremoe calibrate` wrote.
        gpus: Ranks of the job, which must be those of the load. None: those of the load.
        **options: foremoe.options.LayoutOptions.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`, and if no layout fits.
    """
    expect(Load, load=load)
    expect(Integral | None, gpus=gpus)
    expect_options(LayoutOptions, "layout", options)
    asked, arguments = split({"cluster": cluster, **options})
    threads = arguments.get("threads", 0)
    found: dict[str, Any] = _core._layout(load, None if gpus is None else int(gpus), asked, threads)
    return found
