"""Plans of a step.

Keywords are the options of the command line, with the same defaults.

Written by scripts/python_keywords from the tables of options: do not edit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Literal

from . import _core
from ._core import Load, Plan, RunningPlan
from ._keywords import Homes, remark_on_unused
from .files import expect


def plan(
    load: Load,
    policy: str = "foremoe",
    *,
    guest_slots: int = 1,
    residency: Literal["static", "resident", "shared", "free"] = "resident",
    rehome: int | Literal["free"] = 0,
    in_flight: int = 1,
    stages: str = "BLPT",
    prefer: Literal["balance", "links"] = "balance",
    tolerance: float | None = None,
    max_copies_per_rank: int | Literal["none"] | None = None,
    max_copies_per_source: int | Literal["none"] = "none",
    min_tokens_per_guest: int = 0,
    seed: int = 0,
    policy_options: Mapping[str, float | str] | None = None,
    homes: Homes = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
    layers: slice | range | None = None,
    on_micro_step: Callable[[int], object] | None = None,
) -> Plan:
    """Plans a step: what sits in every slot and how many tokens it serves. Raises PolicySkipped where the policy is not
    defined for the load. Ctrl-C ends it.

    load: What is planned.
    policy: Who plans: a key of foremoe.policies().
    guest_slots: Guest slots: how many copies of experts a rank has room for in one layer. 0 … 65536.
    residency: static: copies are chosen once per step. resident: each layer's copies stay until they are replaced.
        shared: layers lend each other the guest slots, so copies are fetched at every use. free: any expert anywhere
        (forward-only phases).
    rehome: How many homes may move to another rank, per layer. 0 … 2147483646.
    in_flight: Micro-steps whose forward has run and whose backward has not, at most (1F1B). 1 … 2147483647.
    stages: Planner stages that run. B: base placement. L: relocation. P: replication. T: exact token assignment. none:
        no stage.
    prefer: balance: the least loaded busiest rank. links: also less traffic between nodes, within tolerance.
    tolerance: A micro-step is balanced when its busiest rank is at most this fraction above the mean. None: 0.006; 0.01
        where residency is shared. 0 … 1.
    max_copies_per_rank: Copies into a rank, per event (one pass of one micro-step) and layer. none: no limit. None: G.
        0 … 2147483646.
    max_copies_per_source: Copies of experts whose home is one rank, per event and layer. 0 … 2147483646.
    min_tokens_per_guest: A copy serves no tokens or at least this many. Above 0 the assignment is no longer exact. 0 …
        2147483647.
    seed: Random seed. The same seed gives the same plan. 0 … 18446744073709551615.
    policy_options: Options that one policy alone has, such as dyn of feplb, for those that have it; InputError lists
        them.
    homes: Before planning: None for contiguous ones, int32 [layers, experts], or a plan's.
    previous: Plan of the former step, for a warm start.
    previous_load: Load of the former step, for policies that predict.
    threads: 0: as many as processors. The result does not depend on it.
    layers: Plan these layers of the load alone; Plan.join() puts parts together.
    on_micro_step: Called with 0, 1, … when the plan of that micro-step is final, from another thread. What it raises
        ends planning.

    Raises InputError, with the name of the keyword in `.field`, for a value that cannot be.
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    expect(Mapping | None, policy_options=policy_options)
    expect(Plan | None, previous=previous)
    expect(Load | None, previous_load=previous_load)
    expect(Integral, threads=threads)
    expect(Callable | None, on_micro_step=on_micro_step)
    options = {
        "guest_slots": guest_slots,
        "residency": residency,
        "rehome": rehome,
        "in_flight": in_flight,
        "stages": stages,
        "prefer": prefer,
        "tolerance": tolerance,
        "max_copies_per_rank": max_copies_per_rank,
        "max_copies_per_source": max_copies_per_source,
        "min_tokens_per_guest": min_tokens_per_guest,
        "seed": seed,
    }
    result: Plan = _core._plan(
        load,
        policy,
        options,
        homes,
        previous,
        previous_load,
        layers,
        threads,
        on_micro_step,
        dict(policy_options or {}),
    )
    remark_on_unused(plan, load, [policy], options, previous)
    return result


def start_plan(
    load: Load,
    policy: str = "foremoe",
    *,
    guest_slots: int = 1,
    residency: Literal["static", "resident", "shared", "free"] = "resident",
    rehome: int | Literal["free"] = 0,
    in_flight: int = 1,
    stages: str = "BLPT",
    prefer: Literal["balance", "links"] = "balance",
    tolerance: float | None = None,
    max_copies_per_rank: int | Literal["none"] | None = None,
    max_copies_per_source: int | Literal["none"] = "none",
    min_tokens_per_guest: int = 0,
    seed: int = 0,
    policy_options: Mapping[str, float | str] | None = None,
    homes: Homes = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> RunningPlan:
    """Begins to plan a step in the background, as plan() would.

    load: What is planned.
    policy: Who plans: a key of foremoe.policies().
    guest_slots, residency, rehome, in_flight, stages, prefer, tolerance, max_copies_per_rank, max_copies_per_source,
        min_tokens_per_guest, seed, policy_options, homes, previous, previous_load, threads: As plan() has them.

    Raises InputError, with the name of the keyword in `.field`, for a value that cannot be.
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    expect(Mapping | None, policy_options=policy_options)
    expect(Plan | None, previous=previous)
    expect(Load | None, previous_load=previous_load)
    expect(Integral, threads=threads)
    options = {
        "guest_slots": guest_slots,
        "residency": residency,
        "rehome": rehome,
        "in_flight": in_flight,
        "stages": stages,
        "prefer": prefer,
        "tolerance": tolerance,
        "max_copies_per_rank": max_copies_per_rank,
        "max_copies_per_source": max_copies_per_source,
        "min_tokens_per_guest": min_tokens_per_guest,
        "seed": seed,
    }
    return _core._start_plan(load, policy, options, dict(policy_options or {}), homes, previous, previous_load, threads)
