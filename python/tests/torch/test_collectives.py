"""What the layers of a planned phase ask of process groups and the device: two all-to-alls a pass, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from counting import Counter
from training import (
    LAYERS,
    draw_all_routes,
    draw_batches,
    draw_routes,
    make_model,
    on_all_ranks,
    spread,
)

from foremoe._engine import arena, communication, guests, host_path
from foremoe.hf import _EXECUTE
from foremoe.torch import dispatch, exchange, parallel


def lacking_in(layer: int | None, rank: int) -> list[Any]:
    """Routes of two micro-steps; in one layer of the first one a row of rank 1 has none."""
    routes = draw_all_routes(rank, 2, 8)
    if layer is not None and rank == 1:
        routes[0][1, 5, layer] = -1
    return routes


def count_in_a_phase(
    rank: int,
    *,
    planned: bool = True,
    path: str = "peer",
    routes: list[Any] | None = None,
    unrouted: str = "drop",
    on_mismatch: str = "refuse",
    micro_step: int = 0,
) -> dict[str, int]:
    """Collectives and waits for the device in the layers of one micro-step, forward and backward."""
    model = make_model(torch.float32)
    ep = spread(model, path=path)
    ep.wrap(model, None if planned else "own")
    (batch,) = draw_batches(rank, 1, 8)
    phase = ep.plan(routes or draw_routes(rank, 1, 8), unrouted=unrouted, on_mismatch=on_mismatch)
    counter = Counter()

    def run(m: int) -> None:
        with phase.micro_step(m):
            model.model(batch, use_cache=False).last_hidden_state.sum().backward()

    def count() -> None:
        with counter.collectives(arena, dispatch, exchange, guests, host_path, communication, parallel):
            out = model.model(batch, use_cache=False).last_hidden_state
            with counter.waits():
                out.backward(torch.ones_like(out))

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        executes = [_EXECUTE[layer.experts] for layer in ep.layers]
        for layer, execute in zip(ep.layers, executes, strict=True):
            layer.execute_by(counter.watched(execute))
        yield
        for layer, execute in zip(ep.layers, executes, strict=True):
            layer.execute_by(execute)

    if not planned:
        with watched():
            count()
        return counter.counts
    with phase:
        for m in range(micro_step):
            run(m)
        with phase.micro_step(micro_step), watched():
            count()
        for m in range(micro_step + 1, len(phase.micro_steps)):
            run(m)
        phase.drain()
    return counter.counts


def work(rank: int) -> dict[str, Any]:
    with mock.patch("foremoe.torch.figures.judge", return_value=""):  # drawn routes are those of other rows
        return counts_of_phases(rank)


def counts_of_phases(rank: int) -> dict[str, Any]:
    return {
        "peer": count_in_a_phase(rank),
        "host": count_in_a_phase(rank, path="host"),
        "home, none lacks": count_in_a_phase(rank, routes=lacking_in(None, rank), unrouted="home"),
        "home, layer 1": count_in_a_phase(rank, routes=lacking_in(1, rank), unrouted="home"),
        "home, the next micro-step": count_in_a_phase(rank, routes=lacking_in(1, rank), unrouted="home", micro_step=1),
        "routers choose": count_in_a_phase(rank, on_mismatch="home"),
        "unplanned": count_in_a_phase(rank, planned=False),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


@pytest.mark.parametrize("case", ["peer", "host", "home, none lacks", "home, the next micro-step"])
def test_a_planned_layer_exchanges_no_counts_and_waits_for_nothing(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        counts = dict(of[case])
        counts.pop("batch_isend_irecv", None)  # copies and gradients, on their own group
        assert counts == {"all_to_all_single": 4 * LAYERS}, counts


def test_a_layer_in_which_a_rank_lacks_a_route_exchanges_counts_and_rows_once_more(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["home, layer 1"]["all_to_all_single"] == 4 * LAYERS + 5
        assert set(of["home, layer 1"]) - {"batch_isend_irecv"} == {"all_to_all_single", "waits"}


def test_a_layer_whose_router_chooses_exchanges_counts_once_more(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["routers choose"]["all_to_all_single"] == 5 * LAYERS
        assert set(of["routers choose"]) - {"batch_isend_irecv"} == {"all_to_all_single", "waits"}


def test_the_same_count_without_a_plan_sees_the_exchange_of_counts(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["unplanned"]["all_to_all_single"] == 5 * LAYERS
        assert of["unplanned"]["waits"] >= LAYERS
