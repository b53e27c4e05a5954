"""How gradients are summed over ranks: other weights' in buckets, guests' in no shorter type than float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import Counter
from training import RANKS, draw_batches, draw_routes, loss_of, make_model, on_all_ranks, spread

from foremoe._engine.guests import Guests
from foremoe.torch import buckets
from foremoe.torch.buckets import average_in_buckets

SHAPES = [(3, 5), (), (700,), (0,), (40, 2), (9, 1)]
TYPES = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float32, torch.bfloat16]


def draw(rank: int, *, whole: bool) -> list[Any]:
    """Of different shapes and types, one of them not contiguous; whole: numbers whose sums are exact."""
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


def average(rank: int, *, whole: bool, bucket_bytes: int) -> dict[str, Any]:
    tensors = draw(rank, whole=whole)
    expected = average_each(tensors)
    counter = Counter()
    with counter.collectives(buckets):
        average_in_buckets(tensors, dist.group.WORLD, bucket_bytes)
    worst = max(
        float(((a - b).abs() / torch.finfo(a.dtype).eps).max()) if a.numel() else 0.0
        for a, b in zip(tensors, expected, strict=True)
    )
    return {"collectives": counter.counts, "worst": worst}


def average_sparse(rank: int) -> list[float]:
    tensor = torch.sparse_coo_tensor([[rank, RANKS]], [4.0, 8.0], (RANKS + 1,), check_invariants=True)
    average_in_buckets([tensor], dist.group.WORLD)
    found: list[float] = tensor.to_dense().tolist()
    return found


def drain(rank: int) -> dict[str, Any]:
    """The collectives of a drain that average other weights, and how many of these there are."""
    model = make_model(torch.float32)
    ep = spread(model)
    ep.wrap(model)
    counter = Counter()
    with ep.plan(draw_routes(rank, 1, 5)) as phase:
        with phase.micro_step(0):
            loss_of(model, draw_batches(rank, 1, 5)[0]).backward()
        with counter.collectives(buckets):
            phase.drain()
    return {"collectives": counter.counts, "parameters": len(ep.dense_parameters())}


def sum_guests(rank: int) -> dict[str, int]:
    """Experts' gradients in bfloat16, as the drain leaves them, against sums in float32 that are rounded once."""
    model = make_model(torch.bfloat16)
    ep = spread(model, residency="resident", guest_slots=2)
    ep.wrap(model)
    batches, routes = draw_batches(rank, 6, 9), draw_routes(rank, 6, 9)
    guests: list[Any] = []  # (layer, name, expert, gradient) of each turn of this rank's guests
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
    of_all: list[Any] = [None] * RANKS
    dist.all_gather_object(of_all, guests)
    sums: dict[Any, Any] = {}
    shares: dict[Any, int] = {}
    for layer, name, expert, gradient in (one for of in of_all for one in of):
        if expert // ep.ranks.homes == rank:
            key = layer, name, expert % ep.ranks.homes
            sums[key] = sums.get(key, 0) + gradient.double()
            shares[key] = shares.get(key, 0) + bool(gradient.any())
    found = {"several": sum(n > 2 for n in shares.values()), "wrong": 0, "numbers": 0}
    for (layer, name, home), total in sums.items():
        of_home = homes[layer][name][home].float()
        expected = (of_home + total.float()).bfloat16() / RANKS
        found["wrong"] += int((ep.layers[layer].weights()[name].grad[home] != expected).sum())
        found["numbers"] += expected.numel()
    return found


def work(rank: int) -> dict[str, Any]:
    return {
        "whole": average(rank, whole=True, bucket_bytes=1 << 20),
        "any": average(rank, whole=False, bucket_bytes=1 << 20),
        "small buckets": average(rank, whole=False, bucket_bytes=64),
        "sparse": average_sparse(rank),
        "drain": drain(rank),
        "guests": sum_guests(rank),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_means_in_buckets_are_those_of_each_tensor(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["whole"]["worst"] == 0
        assert of["any"]["worst"] <= 4
        assert of["small buckets"]["worst"] <= 4


def test_sparse_gradients_are_averaged(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["sparse"] == [1.0] * RANKS + [8.0]


def test_tensors_of_one_type_share_a_collective_up_to_the_size_of_a_bucket(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["any"]["collectives"] == {"all_reduce": 3}
        assert of["small buckets"]["collectives"] == {"all_reduce": 4}


def test_a_drain_averages_all_other_weights_in_one_collective(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["drain"]["parameters"] > 20
        assert of["drain"]["collectives"] == {"all_reduce": 1}


def test_gradients_of_guests_in_bfloat16_are_summed_in_float32_and_rounded_once(found: list[dict[str, Any]]) -> None:
    assert sum(of["guests"]["several"] for of in found) > 10
    # In float32 the order of a sum decides, where it lies halfway between two numbers in bfloat16.
    wrong, numbers = (sum(of["guests"][name] for of in found) for name in ("wrong", "numbers"))
    assert wrong <= 1e-4 * numbers
