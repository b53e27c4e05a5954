"""Loads and traces: collected, imported, drawn.

Keywords are the options of the command line, with the same defaults.

Written by scripts/python_keywords from the tables of options: do not edit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

from . import _core
from ._core import Load, Trace
from ._keywords import given, remark
from .files import Path, expect


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
    remark(load.remarks)
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
    remark(_core._unused_of_synthesis(options, given(synthesize_load, options)))
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

    routing, shape, layers, experts, top_k, micro_steps, ranks, ranks_per_node, tokens_per_rank, sequences_per_rank,
        group_size, length_spread, layout, step_spread, group_spread, skew, permute_probability, concentration,
        sequence_concentration, seed: As synthesize_load() has them.

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
    remark(_core._unused_of_synthesis(options, given(synthesize_trace, options)))
    return _core._synthesize_trace(options)
