"""Options of the package's functions: those of the command line, with `_` for `-` and the same defaults.

    options: foremoe.options.EvaluateOptions = {"guest_slots": 2, "cluster": "h100", "model": "qwen3-30b-a3b"}
    foremoe.evaluate(load, "foremoe", **options)

Each is declared as Annotated[type, default]. `foremoe plan --help-all`, `simulate --help-all`, `import --help-all` and
`synth --help-all` explain them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from ._core import Homes, Load, Plan
from ._files import expect

AnyHomes = npt.NDArray[np.int32] | Homes | Plan | None
"""Homes of all experts, as None (contiguous), their ranks as int32 [layers, experts], Homes, or a plan."""


class PlannerOptions(TypedDict, total=False):
    """Options of every function that plans."""

    rehome: Annotated[int | Literal["free"], 0]
    in_flight: Annotated[int, 1]
    stages: Annotated[str, "BLPT"]
    prefer: Annotated[
        Literal["balance", "links", "time"] | None, None
    ]  # None: time with a price or cluster, else balance
    copy_price: Annotated[float | None, None]  # None: of cluster and model
    free_copies: Annotated[float | None, None]  # None: of cluster and model
    tolerance: Annotated[float | None, None]  # None: 0.006; 0.01 under residency shared
    max_copies_per_source: Annotated[int | Literal["none"], "none"]
    min_tokens_per_guest: Annotated[int, 0]
    seed: Annotated[int, 0]
    homes: Annotated[AnyHomes, None]  # before planning
    previous: Annotated[Plan | None, None]  # plan of the former step, for a warm start
    previous_load: Annotated[Load | None, None]  # load of the former step, for policies that predict
    threads: Annotated[int, 0]  # 0: one per processor; the result does not depend on it


class PolicyOptions(PlannerOptions, total=False):
    """Options of functions with one number of guest slots."""

    guest_slots: Annotated[int, 1]
    policy_options: Annotated[Mapping[str, float | str] | None, None]  # specific to one system, such as dyn of feplb


class StartPlanOptions(PolicyOptions, total=False):
    """Options of start_plan(), and of plan() without a cluster."""

    residency: Annotated[Literal["static", "resident", "shared", "free"], "resident"]
    max_copies_per_rank: Annotated[int | Literal["none"] | None, None]  # None: guest_slots


class ModelOptions(TypedDict, total=False):
    """Options of the cost model, apart from the cluster."""

    model: Annotated[str | Mapping[str, Any] | None, None]  # a name, a config.json, or a dict of its shape
    sequence_tokens: Annotated[int | None, None]  # None: the lengths in the trace; 4096 for a load
    keep_activations: Annotated[bool, False]
    recompute_experts: Annotated[bool, False]
    bytes_per_parameter: Annotated[int, 2]
    optimizer_shards: Annotated[int | None, None]  # None: the number of expert-parallel groups
    dispatch: Annotated[Literal["token", "row"], "token"]
    other_seconds_per_layer: Annotated[float, 0.0]
    separate_uplinks: Annotated[bool, False]
    align: Annotated[int, 128]  # rho_padded rounds each replica's tokens up to a multiple of it


class SimulationOptions(ModelOptions, total=False):
    """Options of the simulator, apart from cluster and path."""

    rollout_seconds: Annotated[float, 0.0]
    rollout_tail_seconds: Annotated[float, 0.0]
    planners: Annotated[int, 0]  # 0: one per rank
    planning_threads: Annotated[int, 1]
    plan_gather_seconds: Annotated[float, 0.04]
    memory_budget: Annotated[float | None, None]  # GB, 10⁹ bytes
    rows: Annotated[Literal["order", "token"], "order"]  # token: needs a load from a trace, and dispatch by token
    prefetch_depth: Annotated[int, 2]


class CompareOptions(PolicyOptions, ModelOptions, total=False):
    """Options of compare()."""

    residency: Annotated[Literal["static", "resident", "shared", "free"], "resident"]
    max_copies_per_rank: Annotated[int | Literal["none", "hidden"] | None, None]  # hidden: needs a cluster
    cluster: Annotated[str | None, None]


class SimulateOptions(PolicyOptions, SimulationOptions, total=False):
    """Options of simulate()."""

    residency: Annotated[Literal["static", "resident", "shared", "free", "auto"], "resident"]
    max_copies_per_rank: Annotated[int | Literal["none", "hidden"] | None, None]
    path: Annotated[Literal["auto", "host", "peer"], "auto"]


class LayoutOptions(ModelOptions, total=False):
    """Options of layout()."""

    residency: Annotated[Literal["auto", "static", "resident", "shared"], "auto"]  # auto: whichever is the fastest
    memory_budget: Annotated[float | None, None]  # GB, 10⁹ bytes; None: the memory of the device
    path: Annotated[Literal["auto", "host", "peer"], "auto"]
    rows: Annotated[Literal["order", "token"], "order"]
    prefetch_depth: Annotated[int, 2]
    threads: Annotated[int, 0]  # 0: one per processor; the result does not depend on it


class EvaluateOptions(SimulateOptions, total=False):
    """Options of evaluate(), and of plan() with a cluster."""

    cluster: Annotated[str | None, None]


class ReportOptions(PlannerOptions, SimulationOptions, total=False):
    """Options of write_report()."""

    residency: Annotated[Literal["static", "resident", "shared", "free"], "resident"]
    max_copies_per_rank: Annotated[int | Literal["none", "hidden"] | None, None]


class ImportOptions(TypedDict, total=False):
    """Options of import_files()."""

    format: Annotated[str | None, None]  # None: detected
    counts: Annotated[bool, False]  # the files contain tokens per expert
    model: Annotated[str | None, None]
    experts: Annotated[int | None, None]  # None: the largest id + 1
    weightless_experts: Annotated[int, 0]
    layers: Annotated[int | None, None]
    top_k: Annotated[int | None, None]
    ranks: Annotated[int | None, None]  # of the load, for counts
    ranks_per_node: Annotated[int | None, None]  # None: 8, or all if fewer
    pipeline_stages: Annotated[int, 1]
    drop_recomputed: Annotated[bool, False]
    drop_repeating_rows: Annotated[bool, False]
    drop_empty_layers: Annotated[bool, False]
    fill_prefixes: Annotated[bool, False]
    strict: Annotated[bool, False]
    counts_at: Annotated[Literal["auto", "source", "received"], "auto"]


class SynthesisOptions(TypedDict, total=False):
    """Options of synthesize_load() and synthesize_trace()."""

    routing: Annotated[str, "grpo"]
    shape: Annotated[str | None, None]  # model that gives layers, experts and top_k
    layers: Annotated[int | None, None]  # None: 4, or the shape's
    experts: Annotated[int | None, None]  # None: 128, or the shape's
    top_k: Annotated[int | None, None]  # None: 8, or the shape's
    expert_groups: Annotated[int | None, None]
    groups_per_token: Annotated[int | None, None]
    micro_steps: Annotated[int, 32]
    ranks: Annotated[int, 8]
    ranks_per_node: Annotated[int | None, None]  # None: 8, or all ranks if fewer
    tokens_per_rank: Annotated[int, 8192]
    sequences_per_rank: Annotated[int, 2]
    group_size: Annotated[int, 16]
    length_spread: Annotated[float, 0.5]
    layout: Annotated[Literal["grouped", "shuffled"], "grouped"]
    step_spread: Annotated[float, 0.7]  # grpo
    group_spread: Annotated[float, 0.5]  # grpo
    skew: Annotated[float, 1.0]  # zipf
    permute_probability: Annotated[float, 0.0]  # zipf
    concentration: Annotated[float, 0.5]  # dirichlet
    sequence_concentration: Annotated[float, 0.0]  # dirichlet
    seed: Annotated[int, 1]


# Options that are in no C++ table, and their classes; the C++ library checks homes.
_ARGUMENTS: dict[str, Any] = {
    "policy_options": Mapping | None,
    "homes": object,
    "previous": Plan | None,
    "previous_load": Load | None,
    "threads": Integral,
    "ep": Integral | None,
}


def expect_options(kind: type, function: str, given: Mapping[str, Any]) -> None:
    """Raises TypeError, with the nearest name, for an option that is not declared in the TypedDict `kind`."""
    for name in given:
        if name not in kind.__annotations__:
            near = difflib.get_close_matches(name, kind.__annotations__, 1)
            hint = f". Did you mean '{near[0]}'?" if near else f"; help(foremoe.{function}) lists its options"
            raise TypeError(f"{function}() has no option '{name}'{hint}")


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates options of the C++ tables from the other arguments of the bindings.

    Raises InputError for an argument of a wrong class.
    """
    arguments = {name: given[name] for name in _ARGUMENTS if name in given}
    for name, value in arguments.items():
        expect(_ARGUMENTS[name], **{name: value})
    arguments["policy_options"] = dict(arguments.get("policy_options") or {})
    options = {name: value for name, value in given.items() if name not in _ARGUMENTS}
    if isinstance(options.get("model"), Mapping):
        options["model"] = dict(options["model"])
    return options, arguments


def policy_names(policies: str | Sequence[str]) -> list[str]:
    """Returns names from a list, or from a text with commas. Raises InputError that names the argument and index."""
    expect(str | Sequence, policies=policies)
    names = policies.split(",") if isinstance(policies, str) else list(policies)
    for i, name in enumerate(names):
        expect(str, **{f"policies[{i}]": name})
    return names
