"""What one plan is worth.

Keywords are the options of the command line, with the same defaults.

Written by scripts/python_keywords from the tables of options: do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal

from . import _core
from ._core import Evaluation, Load, Plan
from ._keywords import Homes, remark_on_unused
from .files import expect


def evaluate(
    load: Load,
    policy: str = "foremoe",
    *,
    guest_slots: int = 1,
    residency: Literal["static", "resident", "shared", "free", "auto"] = "resident",
    rehome: int | Literal["free"] = 0,
    in_flight: int = 1,
    stages: str = "BLPT",
    prefer: Literal["balance", "links"] = "balance",
    tolerance: float | None = None,
    max_copies_per_rank: int | Literal["none", "hidden"] | None = None,
    max_copies_per_source: int | Literal["none"] = "none",
    min_tokens_per_guest: int = 0,
    seed: int = 0,
    cluster: str | None = None,
    model: str | Mapping[str, Any] | None = None,
    sequence_tokens: int = 4096,
    keep_activations: bool = False,
    bytes_per_parameter: int = 2,
    optimizer_shards: int = 1,
    separate_uplinks: bool = False,
    rollout_seconds: float = 0.0,
    rollout_tail_seconds: float = 0.0,
    memory_budget: float | None = None,
    prefetch_depth: int = 2,
    path: Literal["auto", "host", "peer"] = "auto",
    align: int = 128,
    policy_options: Mapping[str, float | str] | None = None,
    homes: Homes = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> Evaluation:
    """Plans with one policy, checks the plan, measures it and, with a cluster, simulates the step.

    load: What is planned.
    policy: Who plans: a key of foremoe.policies().
    guest_slots: Guest slots: how many copies of experts a rank has room for in one layer. 0 … 65536.
    residency: static: copies are chosen once per step. resident: each layer's copies stay until they are replaced.
        shared: layers lend each other the guest slots, so copies are fetched at every use. free: any expert anywhere
        (forward-only phases). auto: of static, resident and shared the one with which a simulated step is quickest
        within memory_budget; free in recompute where that is quicker.
    rehome: How many homes may move to another rank, per layer. 0 … 2147483646.
    in_flight: Micro-steps whose forward has run and whose backward has not, at most (1F1B). 1 … 2147483647.
    stages: Planner stages that run. B: base placement. L: relocation. P: replication. T: exact token assignment. none:
        no stage.
    prefer: balance: the least loaded busiest rank. links: also less traffic between nodes, within tolerance.
    tolerance: A micro-step is balanced when its busiest rank is at most this fraction above the mean. None: 0.006; 0.01
        where residency is shared. 0 … 1.
    max_copies_per_rank: Copies into a rank, per event (one pass of one micro-step) and layer. none: no limit. hidden:
        as many as the links of cluster carry while one layer of model computes. None: G. 0 … 2147483646.
    max_copies_per_source: Copies of experts whose home is one rank, per event and layer. 0 … 2147483646.
    min_tokens_per_guest: A copy serves no tokens or at least this many. Above 0 the assignment is no longer exact. 0 …
        2147483647.
    seed: Random seed. The same seed gives the same plan. 0 … 18446744073709551615.
    cluster: Cluster to model: a100, gb200, h100, h20, h200, or a file that foremoe calibrate wrote. Nodes are as large
        as the cluster's unless ranks_per_node says otherwise.
    model: Model: Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3, GLM-4.5-Air, Kimi-K2, Mixtral-8x7B, or its config.json.
        Or a dict of its shape: name, moe_layers, experts, top_k, shared_experts, hidden, intermediate, vocabulary,
        heads, kv_heads, head_width.
    sequence_tokens: Length of a sequence. A token attends to half as many tokens on average. 1 … 16777216.
    keep_activations: Keep all activations for the backward pass (default: keep layer inputs, recompute the rest).
    bytes_per_parameter: Size of a weight and of a row's element: 2 for bf16, 4 for float32. 1 … 8.
    optimizer_shards: Data-parallel ranks that share one expert's optimizer state. 1 … 65536.
    separate_uplinks: Model host copies and network traffic on separate PCIe uplinks (default: shared).
    rollout_seconds: Duration of the step's rollout, for the speedup of the whole RL step. 0 … 1e+09.
    rollout_tail_seconds: How long the rollout's last sequences leave the planner to place experts. What placement takes
        beyond that, measured here, is charged beside the modelled step. 0 … 1e+09.
    memory_budget: Memory of one rank, 10⁹ bytes. The largest micro-batch that fits is printed, and residency auto stays
        within it. None: none. above 0, at most 1e+09.
    prefetch_depth: How many turns (one layer of one pass of one micro-step) ahead copies may begin. 1 … 65536.
    path: Source of copies. host: the node's cache of experts in host memory. peer: the rank that owns the expert. auto:
        whichever path is less busy.
    align: Tokens: rho_padded rounds each replica up to a multiple of it.
    policy_options: Options that one policy alone has, such as dyn of feplb, for those that have it; InputError lists
        them.
    homes: Before planning: None for contiguous ones, int32 [layers, experts], or a plan's.
    previous: Plan of the former step, for a warm start.
    previous_load: Load of the former step, for policies that predict.
    threads: 0: as many as processors. The result does not depend on it.

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
        "cluster": cluster,
        "model": dict(model) if isinstance(model, Mapping) else model,
        "sequence_tokens": sequence_tokens,
        "keep_activations": keep_activations,
        "bytes_per_parameter": bytes_per_parameter,
        "optimizer_shards": optimizer_shards,
        "separate_uplinks": separate_uplinks,
        "rollout_seconds": rollout_seconds,
        "rollout_tail_seconds": rollout_tail_seconds,
        "memory_budget": memory_budget,
        "prefetch_depth": prefetch_depth,
        "path": path,
        "align": align,
    }
    result: Evaluation = _core._evaluate(
        load, policy, options, dict(policy_options or {}), homes, previous, previous_load, threads
    )
    remark_on_unused(evaluate, load, [policy], options, previous)
    return result


def evaluate_plan(
    plan: Plan,
    load: Load,
    *,
    recompute_plan: Plan | None = None,
    phase: Literal["recompute", "policy_update"] | None = None,
    cluster: str | None = None,
    model: str | Mapping[str, Any] | None = None,
    sequence_tokens: int = 4096,
    keep_activations: bool = False,
    bytes_per_parameter: int = 2,
    optimizer_shards: int = 1,
    separate_uplinks: bool = False,
    rollout_seconds: float = 0.0,
    memory_budget: float | None = None,
    prefetch_depth: int = 2,
    path: Literal["auto", "host", "peer"] = "auto",
    align: int = 128,
    policy_options: Mapping[str, float | str] | None = None,
    homes: Homes = None,
    threads: int = 0,
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
    cluster, model, sequence_tokens, keep_activations, bytes_per_parameter, optimizer_shards, separate_uplinks,
        rollout_seconds, memory_budget, prefetch_depth, path, align, policy_options, homes, threads: As evaluate() has
        them.

    Raises InputError, with the name of the keyword in `.field`, for a value that cannot be.
    """
    expect(Plan, plan=plan)
    expect(Load, load=load)
    expect(Plan | None, recompute_plan=recompute_plan)
    expect(str | None, phase=phase)
    expect(Mapping | None, policy_options=policy_options)
    expect(Integral, threads=threads)
    options = {
        "cluster": cluster,
        "model": dict(model) if isinstance(model, Mapping) else model,
        "sequence_tokens": sequence_tokens,
        "keep_activations": keep_activations,
        "bytes_per_parameter": bytes_per_parameter,
        "optimizer_shards": optimizer_shards,
        "separate_uplinks": separate_uplinks,
        "rollout_seconds": rollout_seconds,
        "memory_budget": memory_budget,
        "prefetch_depth": prefetch_depth,
        "path": path,
        "align": align,
    }
    result: Evaluation = _core._evaluate_plan(
        plan, load, options, dict(policy_options or {}), recompute_plan, phase, homes, threads
    )
    remark_on_unused(evaluate_plan, load, [plan.policy], options, phase=phase)
    return result
