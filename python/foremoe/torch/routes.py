"""The routes of a phase, from what plan() is given to what its phase needs of them.

Each rank checks its own. Then all ranks count together, once: where a rank refuses its routes, all end here; the rank
with most micro-steps says how many there are. Rows without a route that are to be computed are found when they are
counted, so that no layer has to look for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import foremoe
from foremoe._engine.alike import facts_of, refused_together
from foremoe._engine.arguments import expect_phase
from foremoe._engine.communication import gathered

from .dispatch import ON_MISMATCH
from .spread import SpreadExperts

UNROUTED = ("drop", "home")
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Routes:
    """The routes of this rank's micro-steps, and the counts of all ranks.

    own: [micro-step] int32 [rows, layers, top_k]; no rows where others have a batch and this rank has none.
    num_own: micro-steps in which this rank has a batch.
    unrouted: [micro-step][layer] int64 [rows], this rank's rows without a route that are computed at homes.
    drop: whether rows without a route are dropped. on_mismatch: as plan() takes it.
    counts: int64 [micro_steps, layers, ranks, experts]. num_unrouted: int64 [micro_steps, layers, ranks].
    """

    own: list[Tensor]
    num_own: int
    unrouted: list[list[Tensor]]
    counts: Counts
    num_unrouted: Counts
    drop: bool
    on_mismatch: str


def gather_routes(
    experts: SpreadExperts, routes: Sequence[Tensor], phase: str, unrouted: str, on_mismatch: str, *, as_many: bool
) -> Routes:
    """What ExpertParallel.plan() was given, checked and counted. Collective. Raises InputError, on all ranks.

    as_many: all ranks must have the same number of micro-steps.
    """
    with refused_together(experts.ranks.group) as given:
        given.expect_alike({"phase": repr(phase), "unrouted": repr(unrouted), "on_mismatch": repr(on_mismatch)})
        given.expect_alike(facts_of(experts.layers))  # weights may have been frozen since
        if on_mismatch not in ON_MISMATCH:
            raise foremoe.InputError(f"on_mismatch: '{on_mismatch}', expected refuse or home", field="on_mismatch")
        own = _checked(experts, routes, phase, unrouted)
        given.told = len(own)
        if as_many:
            given.expect_alike({"routes": f"{len(own)} micro-steps"})
    num_own, most = len(own), max(given.of_all)
    if most == 0:
        raise foremoe.InputError("routes: there is no micro-step, on any rank", field="routes")
    layers = len(experts.layers)
    own += [torch.empty(0, layers, experts.top_k, dtype=torch.int32)] * (most - num_own)
    found = [[_unrouted_rows(of[:, i], unrouted) for i in range(layers)] for of in own]
    counts = _counts_of_all_ranks(experts, own, found)
    return Routes(
        own=own,
        num_own=num_own,
        unrouted=found,
        counts=np.ascontiguousarray(counts[..., :-1]),
        num_unrouted=np.ascontiguousarray(counts[..., -1]),
        drop=unrouted == "drop",
        on_mismatch=on_mismatch,
    )


def _checked(experts: SpreadExperts, routes: Sequence[Tensor], phase: str, unrouted: str) -> list[Tensor]:
    """[micro-step] int32 [rows, layers, top_k]. Raises InputError that names the argument."""
    expect_phase(phase)
    if unrouted not in UNROUTED:
        raise foremoe.InputError(f"unrouted: '{unrouted}', expected drop or home", field="unrouted")
    if isinstance(routes, Tensor):
        raise foremoe.InputError("routes: is one tensor; expected a list with one of each micro-step", field="routes")
    return [_checked_micro_step(experts, of, m, unrouted) for m, of in enumerate(routes)]


def _checked_micro_step(experts: SpreadExperts, of: Tensor, m: int, unrouted: str) -> Tensor:
    layers, top_k = len(experts.layers), experts.top_k

    def refuse(what: str) -> None:
        raise foremoe.InputError(f"routes[{m}]: {what}", field="routes", index=f"[{m}]")

    if of.is_floating_point() or of.dim() not in (3, 4) or tuple(of.shape[-2:]) != (layers, top_k):
        refuse(f"is {of.dtype} {list(of.shape)}; expected integers [rows, {layers}, {top_k}]")
    flat = of.detach().to("cpu", torch.int32).reshape(-1, layers, top_k)
    if flat.numel() and int(flat.max()) >= experts.num_experts:
        refuse(f"expert {int(flat.max())}, but there are {experts.num_experts}")
    missing = flat < 0
    if bool((missing.any(-1) != missing.all(-1)).any()):
        refuse("a row has a route for some of its top_k experts alone")
    ordered = flat.sort(-1).values
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
    if bool(twice.any()):
        row, layer = twice.nonzero()[0].tolist()
        refuse(f"row {row} has an expert twice in layer {layer}")
    if unrouted == "drop":
        routed = ~missing.all(-1)  # [rows, layers]
        if bool((routed.any(-1) != routed.all(-1)).any()):
            refuse("a row has a route in some layers alone; expected one in all or in none, or unrouted='home'")
        if of.dim() == 4:
            of_token = routed[:, 0].int().view(of.shape[:2])
            inside = (of_token.cumsum(1) > 0) & (of_token.flip(1).cumsum(1).flip(1) > 0)
            if bool((inside & (of_token == 0)).any()):
                refuse("a row between rows with routes has none; expected one, or unrouted='home'")
    return flat.contiguous()


def _unrouted_rows(of: Tensor, unrouted: str) -> Tensor:
    """Rows that are to be computed although they have no route, int64 [rows]. of: of one layer, [rows, top_k]."""
    return (of[:, 0] < 0).nonzero()[:, 0] if unrouted == "home" else torch.empty(0, dtype=torch.int64)


def _counts_of_all_ranks(experts: SpreadExperts, routes: list[Tensor], unrouted: list[list[Tensor]]) -> Counts:
    """int64 [micro_steps, layers, ranks, experts + 1]; the last are rows without a route that are to be computed."""
    own = torch.zeros(len(routes), len(experts.layers), experts.num_experts + 1, dtype=torch.int64)
    for m, of in enumerate(routes):
        for i in range(len(experts.layers)):
            ids = of[:, i].reshape(-1)
            own[m, i, :-1] = torch.bincount(ids[ids >= 0], minlength=experts.num_experts)
            own[m, i, -1] = len(unrouted[m][i])
    counts: Counts = gathered(own.to(experts.ranks.device), experts.ranks.group, 2).cpu().numpy()
    return counts
