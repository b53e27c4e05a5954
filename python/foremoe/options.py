"""Options as values: what `**options` of the package's functions can be.

    options: foremoe.options.EvaluateOptions = {"guest_slots": 2, "cluster": "h100", "model": "qwen3-30b-a3b"}
    foremoe.evaluate(load, "foremoe", **options)

They are the options of the command line. Annotated[int, 1, "…"] is an int whose default is 1, and what it means.

Written by python/generators/generate_options.py from the tables of options: do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from ._core import Load, Plan

Homes = npt.NDArray[np.int32] | Plan | None

# fmt: off


class PlannerOptions(TypedDict, total=False):
    """Options of every function that plans."""

    rehome: Annotated[int | Literal["free"], 0, "How many homes may move to another rank, per layer. 0 … 2147483646."]
    in_flight: Annotated[int, 1,
        "Micro-steps whose forward has run and whose backward has not, at most (1F1B). 1 … 2147483647."]
    stages: Annotated[str, "BLPT",
        "Planner stages that run. B: base placement. L: relocation. P: replication. T: exact token assignment. S: B "
        "revises its choice even where more copies are expected to hide. none: no stage."]
    prefer: Annotated[Literal["balance", "links"], "balance",
        "balance: the least loaded busiest rank. links: also less traffic between nodes, within tolerance."]
    tolerance: Annotated[float | None, None,
        "A micro-step is balanced when its busiest rank is at most this fraction above the mean. None: 0.006; 0.01 "
        "where residency is shared. 0 … 1."]
    max_copies_per_source: Annotated[int | Literal["none"], "none",
        "Copies of experts whose home is one rank, per event and layer. 0 … 2147483646."]
    min_tokens_per_guest: Annotated[int, 0,
        "A copy serves no tokens or at least this many. Above 0 the assignment is no longer exact. 0 … 2147483647."]
    seed: Annotated[int, 0, "Random seed. The same seed gives the same plan. 0 … 18446744073709551615."]
    homes: Annotated[Homes, None, "Before planning: None for contiguous ones, int32 [layers, experts], or a plan's."]
    previous: Annotated[Plan | None, None, "Plan of the former step, for a warm start."]
    previous_load: Annotated[Load | None, None, "Load of the former step, for policies that predict."]
    threads: Annotated[int, 0, "0: as many as processors. The result does not depend on it."]


class PolicyOptions(PlannerOptions, total=False):
    """Options of those with one number of slots."""

    guest_slots: Annotated[int, 1,
        "Guest slots: how many copies of experts a rank has room for in one layer. 0 … 65536."]
    policy_options: Annotated[Mapping[str, float | str] | None, None,
        "Options that one policy alone has, such as dyn of feplb, for those that have it; InputError lists them."]


class PlanOptions(PolicyOptions, total=False):
    """Options of plan(), start_plan()."""

    residency: Annotated[Literal["static", "resident", "shared", "free"], "resident",
        "static: copies are chosen once per step. resident: each layer's copies stay until they are replaced. shared: "
        "layers lend each other the guest slots, so copies are fetched at every use. free: any expert anywhere "
        "(forward-only phases)."]
    max_copies_per_rank: Annotated[int | Literal["none"] | None, None,
        "Copies into a rank, per event (one pass of one micro-step) and layer. none: no limit. None: G. 0 … "
        "2147483646."]


class ModelOptions(TypedDict, total=False):
    """Options of every function that models time."""

    model: Annotated[str | Mapping[str, Any] | None, None,
        "Model: Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3, GLM-4.5-Air, Kimi-K2, Mixtral-8x7B, GPT-32x1.3B, "
        "GPT-16x3.2B, GPT-8x6.7B, Mixtral-16x2B, or its config.json. Or a dict of its shape: name, moe_layers, "
        "experts, top_k, expert_groups, groups_per_token, shared_experts, hidden, intermediate, vocabulary, heads, "
        "kv_heads, head_width."]
    sequence_tokens: Annotated[int, 4096,
        "Length of a sequence. A token attends to half as many tokens on average. 1 … 16777216."]
    keep_activations: Annotated[bool, False,
        "Keep all activations for the backward pass (default: keep layer inputs, recompute the rest)."]
    recompute_experts: Annotated[bool, False,
        "With keep_activations: recompute what is inside the experts in the backward pass, keep all else."]
    bytes_per_parameter: Annotated[int, 2, "Size of a weight and of a row's element: 2 for bf16, 4 for float32. 1 … 8."]
    optimizer_shards: Annotated[int, 1, "Data-parallel ranks that share one expert's optimizer state. 1 … 65536."]
    dispatch: Annotated[Literal["token", "row"], "token",
        "How rows travel. token: a token once to each node that serves it and from there once to each rank, as in "
        "DeepEP and HybridEP. row: every token–expert assignment directly to its rank, as in Megatron-LM's alltoall "
        "and in foremoe.torch. Of a load, which tokens share experts is not known: token is then an expectation."]
    other_seconds_per_layer: Annotated[float, 0.0,
        "Time per layer and pass that is not modelled (parameter gathers, permutations, launches), fitted to a "
        "measured step. 0 … 1e+09."]
    separate_uplinks: Annotated[bool, False,
        "Model host copies and network traffic on separate PCIe uplinks (default: shared)."]
    align: Annotated[int, 128, "Tokens: rho_padded rounds each replica up to a multiple of it."]


class PhaseOptions(ModelOptions, total=False):
    """Options of those that simulate."""

    rollout_seconds: Annotated[float, 0.0,
        "Duration of the step's rollout, for the speedup of the whole RL step. 0 … 1e+09."]
    planners: Annotated[int, 0,
        "Who places experts together, each some of the model's layers. 0: all ranks. 0 … 1048576."]
    planning_threads: Annotated[int, 1, "Threads of each planner. 1 … 1024."]
    plan_gather_seconds: Annotated[float, 0.04,
        "What it takes to gather the planners' parts, unless one places all layers in less. 0 … 1e+09."]
    memory_budget: Annotated[float | None, None,
        "Memory of one rank, 10⁹ bytes. The largest micro-batch that fits is printed, and residency auto stays within "
        "it. None: none. above 0, at most 1e+09."]
    prefetch_depth: Annotated[int, 2,
        "How many turns (one layer of one pass of one micro-step) ahead copies may begin. 1 … 65536."]


class CompareOptions(PolicyOptions, ModelOptions, total=False):
    """Options of compare()."""

    residency: Annotated[Literal["static", "resident", "shared", "free"], "resident",
        "static: copies are chosen once per step. resident: each layer's copies stay until they are replaced. shared: "
        "layers lend each other the guest slots, so copies are fetched at every use. free: any expert anywhere "
        "(forward-only phases)."]
    max_copies_per_rank: Annotated[int | Literal["none", "hidden"] | None, None,
        "Copies into a rank, per event (one pass of one micro-step) and layer. none: no limit. hidden: as many as the "
        "links of cluster carry while one layer of model computes. None: G. 0 … 2147483646."]
    cluster: Annotated[str | None, None,
        "Cluster to model: a100, gb200, h100, h20, h200, or a file that foremoe calibrate wrote. Nodes are as large "
        "as the cluster's unless ranks_per_node says otherwise."]


class SimulateOptions(PolicyOptions, PhaseOptions, total=False):
    """Options of simulate()."""

    residency: Annotated[Literal["static", "resident", "shared", "free", "auto"], "resident",
        "static: copies are chosen once per step. resident: each layer's copies stay until they are replaced. shared: "
        "layers lend each other the guest slots, so copies are fetched at every use. free: any expert anywhere "
        "(forward-only phases). auto: of static, resident and shared the one with which a simulated step is quickest "
        "within memory_budget; free in recompute where that is quicker."]
    max_copies_per_rank: Annotated[int | Literal["none", "hidden"] | None, None,
        "Copies into a rank, per event (one pass of one micro-step) and layer. none: no limit. hidden: as many as the "
        "links of cluster carry while one layer of model computes. None: G. 0 … 2147483646."]
    rollout_tail_seconds: Annotated[float, 0.0,
        "How long the rollout's last sequences leave the planner to place experts. What placement takes beyond that, "
        "measured here, is charged beside the modelled step. 0 … 1e+09."]
    path: Annotated[Literal["auto", "host", "peer"], "auto",
        "Source of copies. host: the node's cache of experts in host memory. peer: the rank that owns the expert. "
        "auto: whichever path is less busy."]


class EvaluateOptions(SimulateOptions, total=False):
    """Options of evaluate()."""

    cluster: Annotated[str | None, None,
        "Cluster to model: a100, gb200, h100, h20, h200, or a file that foremoe calibrate wrote. Nodes are as large "
        "as the cluster's unless ranks_per_node says otherwise."]


class EvaluatePlanOptions(PhaseOptions, total=False):
    """Options of evaluate_plan()."""

    policy_options: Annotated[Mapping[str, float | str] | None, None,
        "Options that one policy alone has, such as dyn of feplb, for those that have it; InputError lists them."]
    homes: Annotated[Homes, None, "Before planning: None for contiguous ones, int32 [layers, experts], or a plan's."]
    threads: Annotated[int, 0, "0: as many as processors. The result does not depend on it."]
    cluster: Annotated[str | None, None,
        "Cluster to model: a100, gb200, h100, h20, h200, or a file that foremoe calibrate wrote. Nodes are as large "
        "as the cluster's unless ranks_per_node says otherwise."]
    path: Annotated[Literal["auto", "host", "peer"], "auto",
        "Source of copies. host: the node's cache of experts in host memory. peer: the rank that owns the expert. "
        "auto: whichever path is less busy."]


class ReportOptions(PlannerOptions, PhaseOptions, total=False):
    """Options of write_report()."""

    residency: Annotated[Literal["static", "resident", "shared", "free"], "resident",
        "static: copies are chosen once per step. resident: each layer's copies stay until they are replaced. shared: "
        "layers lend each other the guest slots, so copies are fetched at every use. free: any expert anywhere "
        "(forward-only phases)."]
    max_copies_per_rank: Annotated[int | Literal["none", "hidden"] | None, None,
        "Copies into a rank, per event (one pass of one micro-step) and layer. none: no limit. hidden: as many as the "
        "links of cluster carry while one layer of model computes. None: G. 0 … 2147483646."]
    rollout_tail_seconds: Annotated[float, 0.0,
        "How long the rollout's last sequences leave the planner to place experts. What placement takes beyond that, "
        "measured here, is charged beside the modelled step. 0 … 1e+09."]


class CollectOptions(TypedDict, total=False):
    """Options of collect()."""

    ranks: Annotated[int | None, None,
        "Ranks of the expert-parallel group. A trace is batched anew when it was recorded for another number; a load "
        "is folded to a divisor of its own. None: as the file says. 1 … 65536."]
    ranks_per_node: Annotated[int | None, None,
        "Ranks that share one fast interconnect. None: as the file says; 8 for a trace that is batched anew. 1 … "
        "65536."]
    tokens_per_rank: Annotated[int, 8192,
        "Bound on a rank's tokens in one micro-step when a trace is batched anew. A token counts once here, however "
        "many experts it chose. 1 … 1099511627776."]
    threads: Annotated[int, 0, "0: as many as processors. The result does not depend on it."]


class ImportOptions(TypedDict, total=False):
    """Options of import_files()."""

    format: Annotated[str | None, None, "Format. None: detected."]
    model: Annotated[str | None, None, "Name of the model, for the trace's metadata. A known one also sets experts."]
    experts: Annotated[int | None, None, "Experts of a layer. None: the largest id + 1. 1 … 65536."]
    layers: Annotated[int | None, None,
        "Layers of headerless arrays; elsewhere checked against what is recorded. None: as recorded. 1 … 65535."]
    top_k: Annotated[int | None, None,
        "Experts of a token, of headerless arrays and of counts. None: as recorded. 1 … 65535."]
    ranks_per_node: Annotated[int | None, None,
        "Where ranks are recorded: ranks of a node. None: 8, or all if fewer. 1 … 65536."]
    pipeline_stages: Annotated[int, 1,
        "Megatron: number of pipeline stages; ascending ranks are split evenly among them. 1 … 65536."]
    drop_recomputed: Annotated[bool, False,
        "Megatron trace: drop a call that equals an earlier one of its layer, which is activation recomputation."]
    drop_empty_layers: Annotated[bool, False, "Leave out layers without any route (dense ones)."]
    counts_at: Annotated[Literal["auto", "source", "received"], "auto",
        "Megatron counts: at the source (a rank counts its own tokens) or as received (by its own experts)."]


class SynthesisOptions(TypedDict, total=False):
    """Options of synthesize_load(), synthesize_trace()."""

    routing: Annotated[str, "grpo", "Routing model."]
    shape: Annotated[str | None, None, "Take layers, experts and top-k of a model."]
    layers: Annotated[int | None, None, "MoE layers. None: 4, or the shape's. 1 … 1048576."]
    experts: Annotated[int | None, None, "Experts of a layer. None: 128, or the shape's. 1 … 65535."]
    top_k: Annotated[int | None, None, "Experts that a token chooses. None: 8, or the shape's. 1 … 65535."]
    expert_groups: Annotated[int | None, None,
        "Groups of a layer's experts, in equal runs, of which a token takes no more than groups_per_token. Not taken "
        "from the shape. None: 1, no limit. 1 … 65535."]
    groups_per_token: Annotated[int | None, None,
        "Groups that a token takes experts from at most: those whose best experts score highest. A score is the "
        "popularity and noise. None: 1, no limit. 1 … 65535."]
    micro_steps: Annotated[int, 32, "Micro-steps of the step. 1 … 1048576."]
    ranks: Annotated[int, 8, "Ranks of the expert-parallel group. 1 … 65536."]
    ranks_per_node: Annotated[int | None, None, "Ranks of a node. None: 8, or all if fewer. 1 … 65536."]
    tokens_per_rank: Annotated[int, 8192, "Tokens of a rank in a micro-step. A token counts once. 1 … 2147483648."]
    sequences_per_rank: Annotated[int, 2, "Sequences of a rank in a micro-step. 1 … 65536."]
    group_size: Annotated[int, 16, "Sequences of a GRPO group. 1 … 1048576."]
    length_spread: Annotated[float, 0.5, "Sequence lengths are proportional to exp(this · normal). 0 … 10."]
    layout: Annotated[Literal["grouped", "shuffled"], "grouped",
        "grouped: a group's sequences share a micro-step. shuffled: they are anywhere."]
    step_spread: Annotated[float, 0.7, "grpo: how skewed the step is. 0 … 20."]
    group_spread: Annotated[float, 0.5, "grpo: how much groups differ. 0 … 20."]
    skew: Annotated[float, 1.0, "zipf: 0 is uniform. 0 … 100."]
    permute_probability: Annotated[float, 0.0,
        "zipf: probability that a micro-step draws anew which experts are popular. 0 … 1."]
    concentration: Annotated[float, 0.5, "dirichlet: of a layer, above 0. 0 … 1e+09."]
    sequence_concentration: Annotated[float, 0.0,
        "dirichlet: of a sequence around its layer. 0: all sequences alike. 0 … 1e+09."]
    seed: Annotated[int, 1, "Random seed. The same seed and options give the same bytes. 0 … 18446744073709551615."]
