"""Plans of a step.

Keywords are the options of the command line, with the same defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Unpack

from . import _core
from ._core import Load, Plan, RunningPlan
from ._keywords import remark_on_unused, split, takes
from .files import expect
from .options import Homes, PlanOptions


@takes(PlanOptions)
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
    """Plans a step: what sits in every slot and how many tokens it serves. Ctrl-C ends it.

    Raises PolicySkipped where the policy is not defined for the load.

    load: What is planned.
    policy: Who plans: a key of foremoe.policies().
    guest_slots: Guest slots: how many copies of experts a rank has room for in one layer. 0 … 65536.
    residency: static: copies are chosen once per step. resident: each layer's copies stay until they are replaced.
        shared: layers lend each other the guest slots, so copies are fetched at every use. free: any expert anywhere
        (forward-only phases).
    rehome: How many homes may move to another rank, per layer. 0 … 2147483646.
    in_flight: Micro-steps whose forward has run and whose backward has not, at most (1F1B). 1 … 2147483647.
    stages: Planner stages that run. B: base placement. L: relocation. P: replication. T: exact token assignment. S: B
        revises its choice even where more copies are expected to hide. none: no stage.
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
    """
    asked = {name: value for name, value in locals().items() if name in PlanOptions.__annotations__}
    expect(Load, load=load)
    expect(str, policy=policy)
    expect(Callable | None, on_micro_step=on_micro_step)
    options, beside = split(asked)
    made: Plan = _core._plan(load, policy, options, layers=layers, on_micro_step=on_micro_step, **beside)
    remark_on_unused(plan, load, [policy], options, beside)
    return made


@takes(PlanOptions)
def start_plan(load: Load, policy: str = "foremoe", **options: Unpack[PlanOptions]) -> RunningPlan:
    """Begins to plan a step in the background, as plan() would.

    load: What is planned.
    policy: Who plans: a key of foremoe.policies().
    """
    expect(Load, load=load)
    expect(str, policy=policy)
    planner, beside = split(options)
    return _core._start_plan(load, policy, planner, **beside)
