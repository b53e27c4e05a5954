"""What systems are compared on: loads that are drawn or recorded, and the cluster on which their step is modelled."""

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
_MODELLED = {option["name"] for table in ("cost", "simulation") for option in _TABLES[table]} - {"path"}  # a system's


@dataclass(frozen=True)
class Drawn:
    """load: what is executed. former: the load of the step before, where systems know it."""

    load: Load
    former: Load | None = None


@dataclass(frozen=True)
class Input:
    """label: its name in the table.

    draw: the load of one seed. draws: over how many seeds, from `seed` on, figures are means.
    modelled: options of foremoe.evaluate(): cluster, model, …; without a cluster nothing is modelled.
    dispatches: how rows travel. Each system plans once, and its step is modelled with each of them.
    guest_slots: of systems that do not set their own.
    steps: how many steps of equal length the micro-steps are. plan_each_step: each is planned on its own, from homes
        alone. over_steps: which statistic of the steps a figure then is, see Column.over_steps.
    former_plan: systems planned the former step too, and begin with the placement that they ended it with.
    estimated: rows by token are expected values, as counts do not record which experts a token chose together.
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
        """Raises InputError for a dispatch that does not exist, and for options that exclude each other."""
        for dispatch in self.dispatches:
            if dispatch not in DISPATCHES:
                raise InputError(f"{self.label}: no dispatch '{dispatch}'; there are {', '.join(DISPATCHES)}")

    @property
    def by_dispatch(self) -> tuple[str, ...]:
        """The dispatches; one that is empty where nothing is modelled."""
        return self.dispatches if self.modelled else ("",)

    def cases(self, seed: int, threads: int) -> Iterator[Case]:
        """What systems meet with one seed: the steps that are planned on their own."""
        drawn = self.draw(seed)
        parts = [drawn.load.array]
        if self.plan_each_step:
            parts = list(drawn.load.array.reshape(self.steps, -1, *drawn.load.array.shape[1:]))
        for part in parts:
            load = like(drawn.load, part) if len(parts) > 1 else drawn.load
            yield Case(self, drawn, load, drawn.former, seed, threads)


@dataclass(frozen=True)
class Case:
    """One step, or what one expert-parallel group has of it.

    load: what is executed in it. drawn: what it is part of. before: the same system's plan of the step before, where
    steps are planned on their own.
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
    **options: Any,
) -> Input:
    """An input whose load is drawn.

    former_step: systems know the load of a step before this one: same popularity of experts, other tokens.
    drift: share of the last step's tokens that follow another popularity. It grows from 0 in equal parts.
    trace: every token's route is drawn, so that rows by token are counted.
    options: of foremoe.evaluate() (cluster, model, …) and of foremoe.synthesize_load(). `model` gives layers, experts
        and top_k where these are absent.
    """
    modelled, synthesis, seed = _divided(options)
    kinds = {"trace": trace, "drift": bool(drift), "former_step": former_step}
    if sum(kinds.values()) > 1:
        raise InputError(f"{label}: {', '.join(kind for kind, given in kinds.items() if given)} exclude each other")
    if (drift or plan_each_step) and steps == 1:
        raise InputError(f"{label}: drift and plan_each_step need several steps")
    if (former_step and plan_each_step) or (former_plan and not former_step):
        raise InputError(f"{label}: former_step cannot be beside plan_each_step, and former_plan needs it")

    def draw(seed: int) -> Drawn:
        if trace:
            return Drawn(_core._collect(foremoe.synthesize_trace(**synthesis, seed=seed), {}, 0))
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
    label: str, file: str, *, shuffled: bool = False, batching: Options | None = None, **options: Any
) -> Input:
    """An input of a trace or a load table.

    file: from the repository's root. shuffled: a seed draws the order in which sequences are batched.
    batching: keywords of collect(). options: keywords of Input, and of foremoe.evaluate().
    """
    modelled = {key: options.pop(key) for key in list(options) if key in _MODELLED}
    is_trace = not pathlib.Path(file).name.startswith("load-")
    if (shuffled or batching) and not is_trace:
        raise InputError(f"{label}: a load table is batched already")
    if options.get("draws", 1) > 1 and not shuffled:
        raise InputError(f"{label}: every draw is the same unless shuffled")

    def draw(seed: int) -> Drawn:
        if not is_trace:
            return Drawn(foremoe.read_load(ROOT / file))
        trace = foremoe.read_trace(ROOT / file)
        if shuffled:
            trace = _in_order(trace, np.random.default_rng(seed).permutation(trace.num_sequences))
        # Not by collect(), which remarks on batching anew: the experiment asks for it.
        return Drawn(_core._collect(trace, dict(batching or {}), 0))

    return Input(label, draw, modelled, estimated=not is_trace, **options)


def _in_order(trace: Trace, order: np.ndarray[Any, Any]) -> Trace:
    """The sequences in another order, without the batching that was recorded."""
    begins, ends = trace.cu_seqlens[:-1][order], trace.cu_seqlens[1:][order]
    tokens = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    lengths = np.concatenate([[0], np.cumsum(ends - begins)]).astype(np.int64)
    return Trace.from_arrays(
        np.ascontiguousarray(trace.routed_experts[tokens]), lengths, num_experts=trace.num_experts,
        layer_ids=np.ascontiguousarray(trace.layer_ids), model=trace.model,
    )  # fmt: skip


def like(load: Load, counts: np.ndarray[Any, Any]) -> Load:
    """A load of other counts, of the same job."""
    counts = np.ascontiguousarray(counts)
    ranks_per_node = min(load.ranks_per_node, counts.shape[2])
    return Load.from_array(counts, top_k=load.top_k, ranks_per_node=ranks_per_node, name=load.name)


def _divided(options: Options) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Options that model, options that draw, and the first seed. A model without a cluster only has a shape."""
    modelled = {key: value for key, value in options.items() if key in _MODELLED}
    synthesis = {key: value for key, value in options.items() if key not in _MODELLED}
    if shape := _core._check_evaluation({key: modelled[key] for key in ("cluster", "model") if key in modelled}):
        synthesis = {"layers": shape["moe_layers"], "experts": shape["experts"], "top_k": shape["top_k"], **synthesis}
    seed = synthesis.pop("seed", 1)
    return modelled if "cluster" in modelled else {}, synthesis, seed


def _drifting(synthesis: Options, seed: int, drift: float, steps: int) -> Load:
    """Of two loads that differ in popularity, the first gives way to the second from step to step."""
    first, second = (foremoe.synthesize_load(**synthesis, seed=seed + more) for more in (0, 1_000_000))
    part = np.repeat(np.linspace(0, drift, steps), first.num_micro_steps // steps)[:, None, None, None]
    return like(first, np.rint((1 - part) * first.array + part * second.array).astype(np.int64))
