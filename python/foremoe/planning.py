"""Planning, evaluating, comparing and simulating; loads read and drawn.

Keywords are the options of the command line, with the same defaults.

Written by scripts/python_keywords from the tables of options: do not edit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _core
from ._core import Evaluation, Load, Plan, RunningPlan, Trace
from .files import expect

Homes = npt.NDArray[np.int32] | Plan | None
Path = str | os.PathLike[str]

_log = logging.getLogger("foremoe")


def _listed(policies: str | Sequence[str]) -> list[str]:
    expect(str | Sequence, policies=policies)
    names = policies.split(",") if isinstance(policies, str) else list(policies)
    for i, name in enumerate(names):
        expect(str, **{f"policies[{i}]": name})
    return names


def _given(function: Callable[..., object], options: Mapping[str, object]) -> set[str]:
    """The names of those that are not as the function has them by default."""
    defaults: dict[str, object] = getattr(function, "__kwdefaults__", None) or {}
    return {name for name, value in options.items() if value != defaults.get(name)}


def _remark(remarks: Sequence[str]) -> None:
    for remark in remarks:
        _log.warning(remark.replace("`", ""))


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
    _remark(_core._unused_options(load, [policy], options, _given(plan, options), previous))
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


def compare(
    load: Load,
    policies: str | Sequence[str] = "all",
    *,
    guest_slots: int = 1,
    residency: Literal["static", "resident", "shared", "free"] = "resident",
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
    align: int = 128,
    policy_options: Mapping[str, float | str] | None = None,
    homes: Homes = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> list[dict[str, Any]]:
    """Plans with several policies, checks each plan, and returns what `foremoe compare --json` prints.

    load: What is planned.
    policies: Who plans: keys of foremoe.policies(), several in a list; "all" for every system, without the variants.
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
        "align": align,
    }
    names = _listed(policies)
    result: list[dict[str, Any]] = _core._compare(
        load, names, options, dict(policy_options or {}), homes, previous, previous_load, threads
    )
    _remark(_core._unused_options(load, names, options, _given(compare, options), previous))
    return result


def simulate(
    load: Load,
    policies: str | Sequence[str] = "all",
    *,
    cluster: str,
    model: str | Mapping[str, Any] | None = None,
    sequence_tokens: int = 4096,
    keep_activations: bool = False,
    bytes_per_parameter: int = 2,
    optimizer_shards: int = 1,
    separate_uplinks: bool = False,
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
) -> list[dict[str, Any]]:
    """Predicts what a step takes on a cluster with each policy: what `foremoe simulate --json` prints.

    load: What is planned.
    policies: Who plans: keys of foremoe.policies(), several in a list; "all" for every system, without the variants.
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
    expect(Mapping | None, policy_options=policy_options)
    expect(Plan | None, previous=previous)
    expect(Load | None, previous_load=previous_load)
    expect(Integral, threads=threads)
    options = {
        "cluster": cluster,
        "model": dict(model) if isinstance(model, Mapping) else model,
        "sequence_tokens": sequence_tokens,
        "keep_activations": keep_activations,
        "bytes_per_parameter": bytes_per_parameter,
        "optimizer_shards": optimizer_shards,
        "separate_uplinks": separate_uplinks,
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
        "rollout_seconds": rollout_seconds,
        "rollout_tail_seconds": rollout_tail_seconds,
        "memory_budget": memory_budget,
        "prefetch_depth": prefetch_depth,
        "path": path,
        "align": align,
    }
    names = _listed(policies)
    result: list[dict[str, Any]] = _core._simulate(
        load, names, options, dict(policy_options or {}), homes, previous, previous_load, threads
    )
    _remark(_core._unused_options(load, names, options, _given(simulate, options), previous))
    return result


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
    _remark(_core._unused_options(load, [policy], options, _given(evaluate, options), previous))
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
        alone: figures has one entry in stages, as a step has it (of residency free, a step in which plan serves both
        phases), and none of the whole step's (step_seconds, …). recompute_plan must be None then, and recompute wants
        one micro-step in flight.
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
    memory_budget: Memory of one rank, 10⁹ bytes. The largest micro-batch that fits is printed, and residency auto stays
        within it. None: none. above 0, at most 1e+09.
    prefetch_depth: How many turns (one layer of one pass of one micro-step) ahead copies may begin. 1 … 65536.
    path: Source of copies. host: the node's cache of experts in host memory. peer: the rank that owns the expert. auto:
        whichever path is less busy.
    align: Tokens: rho_padded rounds each replica up to a multiple of it.
    policy_options: Options that one policy alone has, such as dyn of feplb, for those that have it; InputError lists
        them.
    homes: Before planning: None for contiguous ones, int32 [layers, experts], or a plan's.
    threads: 0: as many as processors. The result does not depend on it.

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
    given = _given(evaluate_plan, {**options, "phase": phase})
    _remark(_core._unused_options(load, [plan.policy], options, given))
    return result


def collect(
    trace: Trace,
    *,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    tokens_per_rank: int = 8192,
    threads: int = 0,
) -> Load:
    """Counts the tokens of a trace: its load. The routes are checked on the way.

    trace: What a rollout recorded.
    ranks: Ranks of the expert-parallel group. A trace is batched anew when it was recorded for another number; a load
        is folded to a divisor of its own. None: as the file says. 1 … 65536.
    ranks_per_node: Ranks that share one fast interconnect. None: as the file says; 8 for a trace that is batched anew.
        1 … 65536.
    tokens_per_rank: Bound on a rank's tokens in one micro-step when a trace is batched anew. A token counts once here,
        however many experts it chose. 1 … 1099511627776.
    threads: 0: as many as processors. The result does not depend on it.

    Raises InputError, with the name of the keyword in `.field`, for a value that cannot be.
    """
    expect(Trace, trace=trace)
    expect(Integral, threads=threads)
    options = {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens_per_rank": tokens_per_rank,
    }
    load = _core._collect(trace, options, threads)
    _remark(load.remarks)
    return load


def import_files(
    paths: Path | Sequence[Path],
    *,
    format: str | None = None,
    model: str | None = None,
    experts: int | None = None,
    layers: int | None = None,
    top_k: int | None = None,
    ranks_per_node: int | None = None,
    pipeline_stages: int = 1,
    drop_recomputed: bool = False,
    drop_empty_layers: bool = False,
    counts_at: Literal["auto", "source", "received"] = "auto",
) -> tuple[Trace | Load, dict[str, Any]]:
    """Reads the routes that a rollout engine or trainer recorded, as `foremoe import` does: a trace, or a load of
    counts, and a report of what was read.

    paths: A file, or several in the order of their sequences.
    format: Format. None: detected.
    model: Name of the model, for the trace's metadata. A known one also sets experts.
    experts: Experts of a layer. None: the largest id + 1. 1 … 65536.
    layers: Layers of headerless arrays; elsewhere checked against what is recorded. None: as recorded. 1 … 65535.
    top_k: Experts of a token, of headerless arrays and of counts. None: as recorded. 1 … 65535.
    ranks_per_node: Where ranks are recorded: ranks of a node. None: 8, or all if fewer. 1 … 65536.
    pipeline_stages: Megatron: number of pipeline stages; ascending ranks are split evenly among them. 1 … 65536.
    drop_recomputed: Megatron trace: drop a call that equals an earlier one of its layer, which is activation
        recomputation.
    drop_empty_layers: Leave out layers without any route (dense ones).
    counts_at: Megatron counts: at the source (a rank counts its own tokens) or as received (by its own experts).

    Raises InputError, with the name of the keyword in `.field`, for a value that cannot be.
    """
    expect(str | os.PathLike | Sequence, paths=paths)
    options = {
        "format": format,
        "model": dict(model) if isinstance(model, Mapping) else model,
        "experts": experts,
        "layers": layers,
        "top_k": top_k,
        "ranks_per_node": ranks_per_node,
        "pipeline_stages": pipeline_stages,
        "drop_recomputed": drop_recomputed,
        "drop_empty_layers": drop_empty_layers,
        "counts_at": counts_at,
    }
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    result: tuple[Trace | Load, dict[str, Any]] = _core._import_files([os.fspath(p) for p in paths], options)
    return result


def synthesize_load(
    *,
    routing: str = "grpo",
    shape: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    micro_steps: int = 32,
    ranks: int = 8,
    ranks_per_node: int | None = None,
    tokens_per_rank: int = 8192,
    sequences_per_rank: int = 2,
    group_size: int = 16,
    length_spread: float = 0.5,
    layout: Literal["grouped", "shuffled"] = "grouped",
    step_spread: float = 0.7,
    group_spread: float = 0.5,
    skew: float = 1.0,
    permute_probability: float = 0.0,
    concentration: float = 0.5,
    sequence_concentration: float = 0.0,
    seed: int = 1,
) -> Load:
    """Draws a load from a model of routing: grpo, zipf, dirichlet, or one of the stress workloads w0 to w7. The same
    keywords draw the same.

    routing: Routing model.
    shape: Take layers, experts and top-k of a model.
    layers: MoE layers. None: 4, or the shape's. 1 … 1048576.
    experts: Experts of a layer. None: 128, or the shape's. 1 … 65535.
    top_k: Experts that a token chooses. None: 8, or the shape's. 1 … 65535.
    micro_steps: Micro-steps of the step. 1 … 1048576.
    ranks: Ranks of the expert-parallel group. 1 … 65536.
    ranks_per_node: Ranks of a node. None: 8, or all if fewer. 1 … 65536.
    tokens_per_rank: Tokens of a rank in a micro-step. A token counts once. 1 … 2147483648.
    sequences_per_rank: Sequences of a rank in a micro-step. 1 … 65536.
    group_size: Sequences of a GRPO group. 1 … 1048576.
    length_spread: Sequence lengths are proportional to exp(this · normal). 0 … 10.
    layout: grouped: a group's sequences share a micro-step. shuffled: they are anywhere.
    step_spread: grpo: how skewed the step is. 0 … 20.
    group_spread: grpo: how much groups differ. 0 … 20.
    skew: zipf: 0 is uniform. 0 … 100.
    permute_probability: zipf: probability that a micro-step draws anew which experts are popular. 0 … 1.
    concentration: dirichlet: of a layer, above 0. 0 … 1e+09.
    sequence_concentration: dirichlet: of a sequence around its layer. 0: all sequences alike. 0 … 1e+09.
    seed: Random seed. The same seed and options give the same bytes. 0 … 18446744073709551615.

    Raises InputError, with the name of the keyword in `.field`, for a value that cannot be.
    """
    options = {
        "routing": routing,
        "shape": shape,
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "micro_steps": micro_steps,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens_per_rank": tokens_per_rank,
        "sequences_per_rank": sequences_per_rank,
        "group_size": group_size,
        "length_spread": length_spread,
        "layout": layout,
        "step_spread": step_spread,
        "group_spread": group_spread,
        "skew": skew,
        "permute_probability": permute_probability,
        "concentration": concentration,
        "sequence_concentration": sequence_concentration,
        "seed": seed,
    }
    _remark(_core._unused_of_synthesis(options, _given(synthesize_load, options)))
    return _core._synthesize_load(options)


def synthesize_trace(
    *,
    routing: str = "grpo",
    shape: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    micro_steps: int = 32,
    ranks: int = 8,
    ranks_per_node: int | None = None,
    tokens_per_rank: int = 8192,
    sequences_per_rank: int = 2,
    group_size: int = 16,
    length_spread: float = 0.5,
    layout: Literal["grouped", "shuffled"] = "grouped",
    step_spread: float = 0.7,
    group_spread: float = 0.5,
    skew: float = 1.0,
    permute_probability: float = 0.0,
    concentration: float = 0.5,
    sequence_concentration: float = 0.0,
    seed: int = 1,
) -> Trace:
    """Draws a trace from a model of routing: grpo, zipf, dirichlet, or one of the stress workloads w0 to w7. The same
    keywords draw the same.

    routing: Routing model.
    shape: Take layers, experts and top-k of a model.
    layers: MoE layers. None: 4, or the shape's. 1 … 1048576.
    experts: Experts of a layer. None: 128, or the shape's. 1 … 65535.
    top_k: Experts that a token chooses. None: 8, or the shape's. 1 … 65535.
    micro_steps: Micro-steps of the step. 1 … 1048576.
    ranks: Ranks of the expert-parallel group. 1 … 65536.
    ranks_per_node: Ranks of a node. None: 8, or all if fewer. 1 … 65536.
    tokens_per_rank: Tokens of a rank in a micro-step. A token counts once. 1 … 2147483648.
    sequences_per_rank: Sequences of a rank in a micro-step. 1 … 65536.
    group_size: Sequences of a GRPO group. 1 … 1048576.
    length_spread: Sequence lengths are proportional to exp(this · normal). 0 … 10.
    layout: grouped: a group's sequences share a micro-step. shuffled: they are anywhere.
    step_spread: grpo: how skewed the step is. 0 … 20.
    group_spread: grpo: how much groups differ. 0 … 20.
    skew: zipf: 0 is uniform. 0 … 100.
    permute_probability: zipf: probability that a micro-step draws anew which experts are popular. 0 … 1.
    concentration: dirichlet: of a layer, above 0. 0 … 1e+09.
    sequence_concentration: dirichlet: of a sequence around its layer. 0: all sequences alike. 0 … 1e+09.
    seed: Random seed. The same seed and options give the same bytes. 0 … 18446744073709551615.

    Raises InputError, with the name of the keyword in `.field`, for a value that cannot be.
    """
    options = {
        "routing": routing,
        "shape": shape,
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "micro_steps": micro_steps,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens_per_rank": tokens_per_rank,
        "sequences_per_rank": sequences_per_rank,
        "group_size": group_size,
        "length_spread": length_spread,
        "layout": layout,
        "step_spread": step_spread,
        "group_spread": group_spread,
        "skew": skew,
        "permute_probability": permute_probability,
        "concentration": concentration,
        "sequence_concentration": sequence_concentration,
        "seed": seed,
    }
    _remark(_core._unused_of_synthesis(options, _given(synthesize_trace, options)))
    return _core._synthesize_trace(options)
