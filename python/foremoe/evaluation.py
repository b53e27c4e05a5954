"""What plans are worth, and several policies side by side.

Keywords are the options of the command line, with the same defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack

from . import _core
from ._core import Evaluation, Load, Plan
from ._keywords import names_of, remark_on_unused, split, takes
from .files import expect
from .options import CompareOptions, EvaluateOptions, EvaluatePlanOptions, SimulateOptions


@takes(EvaluateOptions)
def evaluate(load: Load, policy: str = "foremoe", **options: Unpack[EvaluateOptions]) -> Evaluation:
    """Plans with one policy, checks the plan, measures it and, with a cluster, simulates the step.

    load: What is planned.
    policy: Who plans: a key of foremoe.policies().
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    asked, beside = split(options)
    result = _core._evaluate(load, policy, asked, **beside)
    remark_on_unused(evaluate, load, [policy], asked, beside)
    return result


@takes(EvaluatePlanOptions)
def evaluate_plan(
    plan: Plan,
    load: Load,
    *,
    recompute_plan: Plan | None = None,
    phase: Literal["recompute", "policy_update"] | None = None,
    **options: Unpack[EvaluatePlanOptions],
) -> Evaluation:
    """As evaluate(), of a plan that is there: nothing is planned.

    plan: Of the policy update, unless phase says otherwise; all of it. Its policy, with policy_options, says what is
        done online.
    load: What the plan serves.
    recompute_plan: Of recompute, with one micro-step in flight. None: the same as plan; with a cluster, plan must have
        one in flight then.
    phase: What is simulated. None: a step, which is recompute and then the policy update. Otherwise this phase of plan
        alone: figures has one entry in phases, as a step has it (of residency free, a step in which plan serves both
        phases), and none of the whole step's (step_seconds, …). recompute_plan must be None then, and recompute wants
        one micro-step in flight.
    """
    expect(Plan, plan=plan)
    expect(Load, load=load)
    expect(Plan | None, recompute_plan=recompute_plan)
    expect(str | None, phase=phase)
    asked, beside = split(options)
    result = _core._evaluate_plan(plan, load, asked, recompute_plan=recompute_plan, phase=phase, **beside)
    remark_on_unused(evaluate_plan, load, [plan.policy], asked, beside, phase=phase)
    return result


@takes(CompareOptions)
def compare(
    load: Load, policies: str | Sequence[str] = "all", **options: Unpack[CompareOptions]
) -> list[dict[str, Any]]:
    """Plans with several policies, checks each plan, and returns what `foremoe compare --json` prints.

    load: What is planned.
    policies: Who plans: keys of foremoe.policies(), several in a list; "all" for every system, without the variants.
    """
    expect(Load, load=load)
    asked, beside = split(options)
    names = names_of(policies)
    result: list[dict[str, Any]] = _core._compare(load, names, asked, **beside)
    remark_on_unused(compare, load, names, asked, beside)
    return result


@takes(SimulateOptions)
def simulate(
    load: Load, policies: str | Sequence[str] = "all", *, cluster: str, **options: Unpack[SimulateOptions]
) -> list[dict[str, Any]]:
    """Predicts what a step takes on a cluster with each policy: what `foremoe simulate --json` prints.

    load: What is planned.
    policies: Who plans: keys of foremoe.policies(), several in a list; "all" for every system, without the variants.
    cluster: Cluster to model: a key of foremoe.clusters(), or a file that foremoe calibrate wrote. Nodes are as large
        as the cluster's.
    """
    expect(Load, load=load)
    asked, beside = split({"cluster": cluster, **options})
    names = names_of(policies)
    result: list[dict[str, Any]] = _core._simulate(load, names, asked, **beside)
    remark_on_unused(simulate, load, names, asked, beside)
    return result
