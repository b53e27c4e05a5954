"""Inputs of experiments: drawn or recorded loads, and the cluster on which their step is modelled."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import foremoe
from foremoe import InputError, Load, Plan, Trace, _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
Options = Mapping[str, Any]

DISPATCHES = ("token", "row")
_TABLES = _core._option_tables()
_MODELLED = {option["name"] for table in ("cost", "simulation") for option in _TABLES[table]} - {"path"}  # per system


@dataclass(frozen=True)
class Drawn:
    """load: the load to execute. former: the previous step's load, if systems know it."""

    load: Load
    former: Load | None = None


@dataclass(frozen=True)
class Input:
    """label: the input's name in the table.

    draw: returns the load of a seed. draws: number of seeds, from `seed` on, over which figures are averaged.
    modelled: options of foremoe.evaluate() such as cluster and model; without a cluster nothing is modelled.
    dispatches: how rows are sent. Each system plans once, and its step is modelled with each dispatch.
    guest_slots: default for systems that do not set their own.
    steps: number of steps of equal length. plan_each_step: plan each step separately, starting from homes.
        over_steps: the statistic that combines the figures of these steps, see Column.over_steps.
    former_plan: systems also plan the former step, and start with that step's final placement.
    estimated: rows by token are expected values, since counts do not record which experts a token chose together.
    """

    label: str
    draw: Callable[[int], Drawn]
    modelled: Options = field(default_factory=dict)
    dispatches: tuple[str, ...] = ("token",)
    guest_slots: int = 1
    seed: int = 1
    draws: int = 1
    steps: int = 1
    plan_each_step: bool = False
    over_steps: str = ""
    former_plan: bool = False
    estimated: bool = True

    def __post_init__(self) -> None:
        """Raises InputError for an unknown dispatch."""
        for dispatch in self.dispatches:
            if dispatch not in DISPATCHES:
                raise InputError(f"{self.label}: no dispatch '{dispatch}'; there are {', '.join(DISPATCHES)}")

    @property
    def by_dispatch(self) -> tuple[str, ...]:
        """The dispatches, or one empty string where nothing is modelled."""
        return self.dispatches if self.modelled else ("",)

    def cases(self, seed: int, threads: int) -> Iterator[Case]:
        """Yields the separately planned steps of one seed."""
        drawn = self.draw(seed)
        parts = [drawn.load.array]
        if self.plan_each_step:
            parts = list(drawn.load.array.reshape(self.steps, -1, *drawn.load.array.shape[1:]))
        for part in parts:
            load = like(drawn.load, part) if len(parts) > 1 else drawn.load
            yield Case(self, drawn, load, drawn.former, seed, threads)


@dataclass(frozen=True)
class Case:
    """One step, or one expert-parallel group's part of it.

    load: the load to execute. drawn: the draw that the load is part of. before: the same system's plan of the
    previous step, if each step is planned separately.
    """

    on: Input
    drawn: Drawn
    load: Load
    former: Load | None
    seed: int
    threads: int
    before: Plan | None = None

    def of(self, load: Load, former: Load | None) -> Case:
        return replace(self, load=load, former=former)


def drawn(
    label: str,
    *,
    dispatch: str | tuple[str, ...] = "token",
    guest_slots: int = 1,
    draws: int = 1,
    steps: int = 1,
    plan_each_step: bool = False,
    over_steps: str = "",
    former_plan: bool = False,
    former_step: bool = False,
    drift: float = 0.0,
    trace: bool = False,
    packed: Options | None = None,
    **options: Any,
) -> Input:
    """Makes an input whose load is drawn.

    former_step: systems know the load of an earlier step with the same popularity of experts and other tokens. drift:
    share of the last step's tokens that follow another popularity. The share grows linearly from 0. trace: draw every
    token's route, so that rows by token are counted, not estimated. packed: keywords of pack(), which batches a drawn
    trace anew. options: of foremoe.evaluate() (cluster, model, …) and of foremoe.synthesize_load(). `model` gives
    layers, experts and top_k if these are absent.
    """
    modelled, synthesis, seed = _divided(options)
    kinds = {"trace": trace, "drift": bool(drift), "former_step": former_step}
    if sum(kinds.values()) > 1:
        raise InputError(f"{label}: {', '.join(kind for kind, given in kinds.items() if given)} exclude each other")
    if (drift or plan_each_step) and steps == 1:
        raise InputError(f"{label}: drift and plan_each_step need several steps")
    if (former_step and plan_each_step) or (former_plan and not former_step):
        raise InputError(f"{label}: former_step excludes plan_each_step, and former_plan needs former_step")

    def draw(seed: int) -> Drawn:
        if trace:
            return Drawn(_collected(foremoe.synthesize_trace(**synthesis, seed=seed), packed, {}))
        if drift:
            return Drawn(_drifting(synthesis, seed, drift, steps))
        if not former_step:
            return Drawn(foremoe.synthesize_load(**synthesis, seed=seed))
        count = synthesis["micro_steps"]
        both = foremoe.synthesize_load(**{**synthesis, "micro_steps": 2 * count}, seed=seed)
        return Drawn(like(both, both.array[count:]), like(both, both.array[:count]))

    dispatches = (dispatch,) if isinstance(dispatch, str) else dispatch
    return Input(
        label, draw, modelled, dispatches, guest_slots, seed, draws, steps, plan_each_step, over_steps, former_plan,
        estimated=not trace,
    )  # fmt: skip


def recorded(
    label: str,
    file: str,
    *,
    shuffled: bool = False,
    batching: Options | None = None,
    packed: Options | None = None,
    **options: Any,
) -> Input:
    """Makes an input from a trace or a load table.

    file: path from the repository's root. shuffled: the seed determines the order in which sequences are batched.
    batching: keywords of collect(). packed: keywords of pack(), which batches instead. options: keywords of Input and
    of foremoe.evaluate().
    """
    modelled = {key: options.pop(key) for key in list(options) if key in _MODELLED}
    is_trace = not pathlib.Path(file).name.startswith("load-")
    if (shuffled or batching or packed) and not is_trace:
        raise InputError(f"{label}: a load table is batched already")
    if options.get("draws", 1) > 1 and not shuffled:
        raise InputError(f"{label}: every draw is the same unless shuffled")

    def draw(seed: int) -> Drawn:
        if not is_trace:
            return Drawn(foremoe.read_load(ROOT / file))
        trace = foremoe.read_trace(ROOT / file)
        if shuffled:
            trace = _in_order(trace, np.random.default_rng(seed).permutation(trace.num_sequences))
        return Drawn(_collected(trace, packed, batching or {}))

    return Input(label, draw, modelled, estimated=not is_trace, **options)


def _collected(trace: Trace, packed: Options | None, batching: Options) -> Load:
    if packed is not None:
        trace = foremoe.pack(trace, **packed)
    return _core._collect(trace, dict(batching), 0)  # collect() would log that it batches again, as requested


def _in_order(trace: Trace, order: np.ndarray[Any, Any]) -> Trace:
    """Reorders the sequences and drops the recorded batching."""
    begins, ends = trace.cu_seqlens[:-1][order], trace.cu_seqlens[1:][order]
    tokens = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    lengths = np.concatenate([[0], np.cumsum(ends - begins)]).astype(np.int64)
    return Trace.from_arrays(
        np.ascontiguousarray(trace.routed_experts[tokens]), lengths, num_experts=trace.num_experts,
        layer_ids=np.ascontiguousarray(trace.layer_ids), model=trace.model,
    )  # fmt: skip


def like(load: Load, counts: np.ndarray[Any, Any]) -> Load:
    """Makes a load with other counts and the same job parameters."""
    counts = np.ascontiguousarray(counts)
    ranks_per_node = min(load.ranks_per_node, counts.shape[2])
    return Load.from_array(counts, top_k=load.top_k, ranks_per_node=ranks_per_node, name=load.name)


def _divided(options: Options) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Splits options into modelling, drawing and first seed. Without a cluster, a model gives only the shape."""
    modelled = {key: value for key, value in options.items() if key in _MODELLED}
    synthesis = {key: value for key, value in options.items() if key not in _MODELLED}
    if shape := _core._check_evaluation({key: modelled[key] for key in ("cluster", "model") if key in modelled}):
        synthesis = {"layers": shape["moe_layers"], "experts": shape["experts"], "top_k": shape["top_k"], **synthesis}
    seed = synthesis.pop("seed", 1)
    return modelled if "cluster" in modelled else {}, synthesis, seed


def _drifting(synthesis: Options, seed: int, drift: float, steps: int) -> Load:
    """Blends two loads of different popularity. The second load's share grows from step to step."""
    first, second = (foremoe.synthesize_load(**synthesis, seed=seed + more) for more in (0, 1_000_000))
    part = np.repeat(np.linspace(0, drift, steps), first.num_micro_steps // steps)[:, None, None, None]
    return like(first, np.rint((1 - part) * first.array + part * second.array).astype(np.int64))
