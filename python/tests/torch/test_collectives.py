"""Layers of a planned phase issue two all-to-alls per pass, no other collectives and no device waits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from counting import Counter
from training import LAYERS, begin, draw_all_routes, draw_batches, draw_routes


def routes_with_a_gap(layer: int | None, rank: int) -> list[Any]:
    """Routes of two micro-steps. In micro-step 0, one row of rank 1 has no route in `layer`."""
    routes = draw_all_routes(rank, 2, 8)
    if layer is not None and rank == 1:
        routes[0][1, 5, layer] = -1
    return routes


def count_in_a_phase(
    rank: int, routes: list[Any] | None = None, *, path: str = "peer", micro_step: int = 0, **options: Any
) -> dict[str, int]:
    """Counts collectives and device waits in the layers of one micro-step, forward and backward. Excludes copies and
    gradients of guests, which use their own group."""
    ep, model, _ = begin(dtype=torch.float32, path=path)
    (batch,) = draw_batches(rank, 1, 8)
    counter = Counter()
    drawn = mock.patch("foremoe.torch.figures.judge", return_value="")  # the drawn routes do not match the batch
    options = {"unrouted": "drop", "on_mismatch": "refuse", **options}
    with drawn, ep.plan(routes or draw_routes(rank, 1, 8), **options) as phase:
        for m in phase.micro_steps:
            with phase.micro_step(m):
                if m == micro_step:
                    counter.count_layers(model, batch)
                else:
                    model.model(batch, use_cache=False).last_hidden_state.sum().backward()
        phase.drain()
    counter.counts.pop("batch_isend_irecv", None)
    return counter.counts


@pytest.mark.parametrize("path", ["peer", "host"])
def test_a_planned_layer_exchanges_no_counts_and_never_waits(rank: int, path: str) -> None:
    assert count_in_a_phase(rank, path=path) == {"all_to_all_single": 4 * LAYERS}


def test_a_layer_with_complete_routes_exchanges_no_counts_even_if_routes_may_be_missing(rank: int) -> None:
    for layer, micro_step in ((None, 0), (1, 1)):
        counts = count_in_a_phase(rank, routes_with_a_gap(layer, rank), unrouted="home", micro_step=micro_step)
        assert counts == {"all_to_all_single": 4 * LAYERS}


def test_a_layer_with_a_missing_route_adds_one_exchange_of_counts_and_rows(rank: int) -> None:
    counts = count_in_a_phase(rank, routes_with_a_gap(1, rank), unrouted="home")
    assert counts.pop("all_to_all_single") == 4 * LAYERS + 5
    assert set(counts) == {"waits"}


def test_a_layer_with_its_own_routing_adds_one_exchange_of_counts(rank: int) -> None:
    counts = count_in_a_phase(rank, on_mismatch="home")
    assert counts.pop("all_to_all_single") == 5 * LAYERS
    assert set(counts) == {"waits"}


def test_the_counter_sees_the_exchange_of_counts_without_a_plan(rank: int) -> None:
    _, model, _ = begin("own", torch.float32)
    counter = Counter()
    counter.count_layers(model, draw_batches(rank, 1, 8)[0])
    assert counter.counts["all_to_all_single"] == 5 * LAYERS
    assert counter.counts["waits"] >= LAYERS
