"""Checks and counts the routes passed to plan().

Each rank checks its own routes. Then ranks exchange counts, once. If a rank refuses its routes, all ranks raise. The
rank with the most micro-steps determines their number. Rows without a route that must be computed are located during
counting, so that layers need not search for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe import _core
from foremoe._engine.arguments import expect_phase, expect_same_homes
from foremoe._engine.communication import gathered_rows
from foremoe._engine.together import Given, digest_of, facts_of, refused_together
from foremoe._files import expect

from .dispatch import ON_MISMATCH
from .spread import SpreadExperts, expect_no_hooks

UNROUTED = ("drop", "home")
RoutesOfMicroStep = Tensor | np.ndarray[Any, np.dtype[Any]]
_INTEGERS = {torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64}
_FEWEST_ROWS, _FEWEST_ENTRIES = 8, 4  # with fewer, a working router may produce constant routes
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Routes:
    """The routes of this rank's micro-steps, and the counts of all ranks.

    own: [micro-step] int32 [rows, layers, top_k]; empty for micro-steps in which only other ranks have a batch.
    num_own: Number of micro-steps in which this rank has a batch.
    unrouted: [micro-step][layer] int64 [rows], this rank's rows without a route that are computed at homes.
    num_rows: Number of rows of all ranks and micro-steps. dropped: Number of dropped rows.
    drop: Whether rows without a route are dropped. on_mismatch: See ExpertParallel.plan().
    counts: int64 [micro_steps, layers, ranks, experts]. num_unrouted: int64 [micro_steps, layers, ranks].
    """

    own: list[Tensor]
    num_own: int
    unrouted: list[list[Tensor]]
    counts: Counts
    num_unrouted: Counts
    num_rows: int
    dropped: int
    drop: bool
    on_mismatch: str


def _facts_of(previous: foremoe.Plan | None) -> str:
    """Returns a digest of everything that planning reads of a previous plan."""
    if previous is None:
        return "None"
    slots, home = previous.slot_expert, previous.home
    return digest_of(previous.residency, previous.guest_slots, slots.shape, slots, home.shape, home)


def gather_routes(
    experts: SpreadExperts,
    routes: Sequence[RoutesOfMicroStep],
    phase: str,
    unrouted: str,
    on_mismatch: str,
    previous: foremoe.Plan | None,
    *,
    as_many: bool,
    add_facts: Sequence[Callable[[Given], None]] = (),
) -> Routes:
    """Checks and counts the arguments of ExpertParallel.plan(). Collective over all replicas. Raises InputError, on all
    ranks.

    as_many: Whether all ranks need equally many micro-steps. add_facts: Functions that add facts that must be equal.
    """
    own_group = dist.get_process_group_ranks(experts.ranks.group)
    with refused_together(experts.ranks.trainers) as given:
        expect(foremoe.Plan | None, previous=previous)
        given.expect_equal({"phase": repr(phase), "unrouted": repr(unrouted), "on_mismatch": repr(on_mismatch)})
        given.expect_equal({"previous": _facts_of(previous)}, f"ranks {own_group}")
        for of in add_facts:
            of(given)
        given.expect_equal(facts_of(experts.layers))  # weights may have been frozen since
        if on_mismatch not in ON_MISMATCH:
            raise foremoe.InputError(
                f"on_mismatch: '{on_mismatch}', expected refuse, replay or home", field="on_mismatch"
            )
        if previous is not None:
            expect_same_homes(previous, experts.ranks.table, "previous")
        experts.expect_own()
        if phase == "policy_update":
            expect_no_hooks(experts.layers)
        own = _counted(experts, routes, phase, unrouted, may_be_constant=on_mismatch == "replay")
        rows = sum(len(of.routes) for of in own)
        dropped = sum(int((of.routes[:, 0, 0] < 0).sum()) for of in own) if unrouted == "drop" else 0
        given.told = own_group[0], len(own), rows, dropped
        if as_many:
            given.expect_equal({"routes": f"{len(own)} micro-steps"})
    by_group: dict[int, int] = {}  # per replica, the largest number of micro-steps of a rank
    for first, micro_steps, _, _ in given.of_all:
        by_group[first] = max(micro_steps, by_group.get(first, 0))
    num_own, most = len(own), by_group[own_group[0]]
    if min(by_group.values()) == 0:
        raise foremoe.InputError("routes: there is no micro-step, on any rank", field="routes")
    own += [_no_rows(experts)] * (most - num_own)
    of_this_rank = torch.from_numpy(np.stack([of.counts for of in own])).to(experts.ranks.device)
    counts = gathered_rows(of_this_rank, experts.ranks.group, 2)
    return Routes(
        own=[of.routes for of in own],
        num_own=num_own,
        unrouted=[of.unrouted for of in own],
        counts=np.ascontiguousarray(counts[..., :-1]),
        num_unrouted=np.ascontiguousarray(counts[..., -1]),
        num_rows=sum(rows for first, _, rows, _ in given.of_all if first == own_group[0]),
        dropped=sum(of for first, *_, of in given.of_all if first == own_group[0]),
        drop=unrouted == "drop",
        on_mismatch=on_mismatch,
    )


@dataclass(frozen=True)
class _MicroStep:
    """This rank's rows in one micro-step.

    routes: int32 [rows, layers, top_k]. unrouted: [layer] int64 [rows]; see Routes.
    counts: int64 [layers, experts + 1]; the last column counts rows without a route that must be computed.
    """

    routes: Tensor
    unrouted: list[Tensor]
    counts: Counts


def _no_rows(experts: SpreadExperts) -> _MicroStep:
    layers = len(experts.layers)
    return _MicroStep(
        routes=torch.empty(0, layers, experts.top_k, dtype=torch.int32),
        unrouted=[torch.empty(0, dtype=torch.int64)] * layers,
        counts=np.zeros((layers, experts.num_experts + 1), np.int64),
    )


def _counted(
    experts: SpreadExperts, routes: Sequence[RoutesOfMicroStep], phase: str, unrouted: str, *, may_be_constant: bool
) -> list[_MicroStep]:
    """Checks and counts all micro-steps of this rank. Raises InputError with the argument's name."""
    expect_phase(phase)
    if unrouted not in UNROUTED:
        raise foremoe.InputError(f"unrouted: '{unrouted}', expected drop or home", field="unrouted")
    if isinstance(routes, (Tensor, np.ndarray)):
        raise foremoe.InputError(
            f"routes: is one {'tensor' if isinstance(routes, Tensor) else 'array'}; expected a list with one of each "
            "micro-step",
            field="routes",
        )
    return [_counted_micro_step(experts, of, m, unrouted, may_be_constant) for m, of in enumerate(routes)]


def _counted_micro_step(
    experts: SpreadExperts, given: RoutesOfMicroStep, m: int, unrouted: str, may_be_constant: bool
) -> _MicroStep:
    layers, top_k = len(experts.layers), experts.top_k

    def refuse(what: str, entry: str = "") -> NoReturn:
        raise foremoe.InputError(f"routes[{m}]{entry}: {what}", field="routes", index=f"[{m}]{entry}")

    if not isinstance(given, (Tensor, np.ndarray)):
        refuse(f"is a {type(given).__name__}; expected a tensor or an array")
    of = given if isinstance(given, Tensor) else torch.from_numpy(given.copy())  # the array may be read-only
    if of.dtype not in _INTEGERS or of.dim() not in (3, 4) or tuple(of.shape[-2:]) != (layers, top_k):
        refuse(f"is {of.dtype} {list(of.shape)}; expected integers [rows, {layers}, {top_k}]")
    flat = of.detach().cpu().reshape(-1, layers, top_k).contiguous()
    if flat.dtype == torch.int32 and flat.data_ptr() == of.data_ptr():
        flat = flat.clone()  # the trainer may overwrite its tensor, even while it is counted
    try:
        ids, counts = _core._count_routes(flat.numpy(), experts.num_experts)
    except foremoe.InputError as error:
        refuse(error.problem, error.index)
    own = torch.from_numpy(ids)
    if not may_be_constant and layers * top_k >= _FEWEST_ENTRIES and _is_constant(own):
        refuse(
            "all rows have the same experts in every layer, so their capture did not run; expected the rows' own routes"
        )
    found = [torch.empty(0, dtype=torch.int64)] * layers
    num_unrouted = np.zeros((layers, 1), np.int64)
    missing = len(own) - counts.sum(1) // top_k  # rows without a route, by layer
    if unrouted == "home":
        found = [(own[:, i, 0] < 0).nonzero()[:, 0] if missing[i] else found[i] for i in range(layers)]
        num_unrouted[:, 0] = missing
    elif missing.any():
        refusal = _read_rows_without_route(own, of.shape)
        if refusal:
            refuse(refusal)
    return _MicroStep(own, found, np.concatenate([counts, num_unrouted], 1))


def _is_constant(own: Tensor) -> bool:
    """Returns whether many rows have a route, and all routes are equal."""
    routed = own[(own[:, :, 0] >= 0).any(1)]
    return len(routed) >= _FEWEST_ROWS and bool((routed == routed[0]).all())


def _read_rows_without_route(own: Tensor, shape: Sequence[int]) -> str:
    """Returns why dropped rows would certainly be read, or ""; experts add nothing to dropped rows."""
    routed = own[:, :, 0] >= 0  # [rows, layers]
    if bool((routed.any(-1) != routed.all(-1)).any()):
        return "a row has a route in some layers alone; expected one in all or in none, or unrouted='home'"
    if len(shape) == 4:
        of_token = routed[:, 0].int().view(*shape[:2])
        inside = (of_token.cumsum(1) > 0) & (of_token.flip(1).cumsum(1).flip(1) > 0)
        holes = inside & (of_token == 0)
        if bool((holes[:, 1:] & holes[:, :-1]).any()):  # single holes are last tokens of packed sequences
            return (
                "rows between rows with routes have none; expected one, or unrouted='home', or for packed sequences "
                "that are padded [rows, layers, top_k]"
            )
    return ""
