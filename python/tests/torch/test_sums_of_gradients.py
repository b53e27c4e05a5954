"""Gradient sums over ranks: dense gradients in buckets, guest gradients in at least float32."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from counting import Counter
from processes import RANKS, gather
from training import begin, draw_batches, draw_routes, loss_of, run_phase

from foremoe._engine.guests import Guests
from foremoe.torch.buckets import average_in_buckets

SHAPES = [(3, 5), (), (700,), (0,), (40, 2), (9, 1)]
TYPES = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float32, torch.bfloat16]


def draw(rank: int, *, whole: bool) -> list[Any]:
    """Draw tensors of different shapes and dtypes, one not contiguous. If `whole`, integers, whose sums are exact."""
    random = torch.Generator().manual_seed(rank)
    tensors = []
    for shape, dtype in zip(SHAPES, TYPES, strict=True):
        drawn = torch.randn(shape, generator=random, dtype=torch.float64)
        tensors.append(((drawn * 8).round() if whole else drawn).to(dtype))
    tensors[0] = tensors[0].t()
    return tensors


def average_each(tensors: list[Any]) -> list[Any]:
    of_all = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for tensor in of_all:
        dist.all_reduce(tensor)
        tensor /= RANKS
    return of_all


def average(rank: int, *, whole: bool, bucket_bytes: int) -> tuple[dict[str, int], float]:
    """Return the counted collectives and the worst error in units of the dtype's epsilon."""
    tensors = draw(rank, whole=whole)
    expected = average_each(tensors)
    counter = Counter()
    with counter.collectives():
        average_in_buckets(tensors, dist.group.WORLD, bucket_bytes)
    return counter.counts, max(
        float(((a - b).abs() / torch.finfo(a.dtype).eps).max()) if a.numel() else 0.0
        for a, b in zip(tensors, expected, strict=True)
    )


def test_bucketed_means_match_single_tensors_and_each_dtype_shares_a_collective(rank: int) -> None:
    assert average(rank, whole=True, bucket_bytes=1 << 20)[1] == 0
    for bucket_bytes, collectives in ((1 << 20, 3), (64, 4)):
        counts, worst = average(rank, whole=False, bucket_bytes=bucket_bytes)
        assert worst <= 4
        assert counts == {"all_reduce": collectives}


def test_sparse_gradients_are_averaged(rank: int) -> None:
    tensor = torch.sparse_coo_tensor([[rank, RANKS]], [4.0, 8.0], (RANKS + 1,), check_invariants=True)
    average_in_buckets([tensor], dist.group.WORLD)
    assert tensor.to_dense().tolist() == [1.0] * RANKS + [8.0]


def test_drain_averages_all_dense_gradients_in_one_collective(rank: int) -> None:
    ep, _, trained = begin(dtype=torch.float32)
    assert len(ep.dense_parameters()) > 20
    reduced: list[int] = []  # elements per collective; figures and agreements are small
    reduce = dist.all_reduce

    def counted(of: Any, *more: Any, **named: Any) -> Any:
        reduced.append(of.numel())
        return reduce(of, *more, **named)

    with contextlib.ExitStack() as stack:
        run_phase(
            ep,
            trained,
            5,
            1,
            between=lambda m: m and stack.enter_context(mock.patch.object(dist, "all_reduce", counted)),
        )
    (size,) = (size for size in reduced if size > 100)
    assert size >= sum(p.numel() for p in ep.dense_parameters())


def test_gradients_of_guests_in_bfloat16_are_summed_in_float32_and_rounded_once(rank: int) -> None:
    ep, model, _ = begin(dtype=torch.bfloat16, residency="resident", guest_slots=2)
    batches, routes = draw_batches(rank, 6, 9), draw_routes(rank, 6, 9)
    guests: list[Any] = []  # (layer, name, expert, gradient) per turn of this rank's guests
    add = Guests.add_gradients

    def noted(self: Any, layer: int, gradients: dict[str, Any]) -> None:
        place = self.noted_place
        for name, of in gradients.items():
            experts = phase.plan.slot_expert[place, layer, rank, ep.ranks.homes :]
            guests.extend((layer, name, int(e), g.clone()) for e, g in zip(experts, of, strict=True) if e >= 0)
        add(self, layer, gradients)

    with pytest.MonkeyPatch.context() as patch, ep.plan(routes) as phase:
        patch.setattr(Guests, "add_gradients", noted)
        for m, batch in enumerate(batches):
            with phase.micro_step(m):
                phase.guests.noted_place = int(phase.planned.turns["forward", m, 0].event)
                loss_of(model, batch).backward()
        homes = [{name: w.grad.clone() for name, w in layer.weights().items()} for layer in ep.layers]
        phase.drain()
    sums: dict[Any, Any] = {}
    shares: dict[Any, int] = {}
    for layer, name, expert, gradient in (one for of in gather(guests) for one in of):
        if expert // ep.ranks.homes == rank:
            key = layer, name, expert % ep.ranks.homes
            sums[key] = sums.get(key, 0) + gradient.double()
            shares[key] = shares.get(key, 0) + bool(gradient.any())
    wrong = numbers = 0
    for (layer, name, home), total in sums.items():
        of_home = homes[layer][name][home].float()
        expected = (of_home + total.float()).bfloat16() / RANKS
        wrong += int((ep.layers[layer].weights()[name].grad[home] != expected).sum())
        numbers += expected.numel()
    several, wrong, numbers = map(sum, zip(*gather((sum(n > 2 for n in shares.values()), wrong, numbers)), strict=True))
    assert several > 10
    # If a sum is halfway between two bfloat16 numbers, the float32 summation order decides the rounding.
    assert wrong <= 1e-4 * numbers
