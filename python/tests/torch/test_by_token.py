"""Dispatch by token on two nodes of two ranks: results, rows between ranks, collectives, fallbacks and refusals."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import Counter
from processes import DEVICE, RANKS, gather
from refusals import input_error
from test_equal import error_of
from test_host_path import after_publishing, flip_a_bit
from training import (
    EXPERTS,
    LAYERS,
    TOP_K,
    begin,
    draw_batches,
    draw_routes,
    expected_gradients,
    gradient_error,
    loss_of,
    make_model,
    recompute,
    reference,
    run_phase,
    run_step,
    spread,
    whole_gradients,
)

import foremoe
from foremoe._engine.planned_phase import PlannedPhase
from foremoe.torch import exchange
from foremoe.torch.doctor.layers import Experts, Net, Sizes, draw_inputs
from foremoe.torch.doctor.layers import draw_routes as net_routes

F32, F64 = torch.float32, torch.float64
MODEL = {
    "moe_layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "hidden": 32, "intermediate": 16, "vocabulary": 64,
    "heads": 2, "head_width": 16,
}  # fmt: skip
ROW_BYTES = 64  # of the simulated rows: 32 numbers of bfloat16
CASES: dict[str, dict[str, Any]] = {
    "one rank per node": {"ranks_per_node": 1},
    "no guests": {"guest_slots": 0},
    "ddp": {"wrapper": "ddp"},
    "fsdp2": {"wrapper": "fsdp2"},
    "rows without a route at homes": {"unrouted": "home"},
    "routers choose": {"wrong": 0.2},
    "float32": {"dtype": F32},
}
for residency in ("static", "resident", "shared"):
    for path in ("peer", "host"):
        key, of = f"{residency}, {path}", {"residency": residency, "path": path}
        CASES[f"{key}, uneven"] = {**of, "uneven": True, "guest_slots": 2}
        CASES[f"{key}, checkpointing"] = {**of, "checkpointing": True}
        if residency != "shared":
            CASES[f"{key}, whole checkpoint"] = {**of, "checkpointing": "whole"}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_one_eager_process(rank: int, case: str) -> None:
    result = run_step(rank, **{"dtype": F64, "seed": 1, "dispatch": "token", **CASES[case]})
    assert result["fallbacks"] == 0
    assert (sum(gather(result["copies"])) > 0) == (case != "no guests")


@pytest.mark.parametrize("case", ["resident", "shared", "checkpointing"])
def test_layers_without_their_guests_are_dispatched_by_row(rank: int, case: str) -> None:
    of: dict[str, Any] = {"checkpointing": True} if case == "checkpointing" else {"residency": case}
    spoil = after_publishing(flip_a_bit)
    result = run_step(rank, F64, seed=1, dispatch="token", path="host", host_timeout=0.3, spoil=spoil, **of)
    assert result["fallbacks"] > 0


def test_forwards_under_a_recompute_plan_match_those_without_a_plan(rank: int) -> None:
    begun = spread

    def by_token(model: Any, **options: Any) -> Any:
        return begun(model, **options, dispatch="token")

    with mock.patch("training.spread", by_token):
        worst, figures = recompute(rank, draw_routes)
    assert worst < 1e-12
    assert sum(gather(figures["copies"])) > 0


def test_a_second_forward_in_a_micro_step_gives_the_same_output(rank: int) -> None:
    """Under shared residency, the guests of the first layers have left by then."""
    for residency in ("resident", "shared"):
        ep, model, _ = begin(dispatch="token", ranks_per_node=2, residency=residency)
        (batch,), routes = draw_batches(rank, 1, 5), draw_routes(rank, 1, 5)
        with ep.plan(routes) as phase:
            with phase.micro_step(0):
                first = model(batch).logits
                with torch.no_grad():
                    again = model(batch).logits
                first.sum().backward()
            phase.drain()
        assert float((again - first).abs().max() / first.abs().max()) < 1e-12
        ep.detach()


def gradients_of(dtype: Any, **options: Any) -> dict[str, Any]:
    ep, model, trained = begin(dtype=dtype, **options)
    run_phase(ep, trained, 9)
    found = whole_gradients(ep, model)
    ep.detach()
    return found


def test_bfloat16_errors_are_at_most_twice_those_by_row(rank: int) -> None:
    batches, routes = ([draw(r, 2, 9) for r in range(RANKS)] for draw in (draw_batches, draw_routes))
    _, exact = reference(F64, batches, routes, weights=torch.bfloat16)
    by_row, by_token = (
        error_of(gradients_of(torch.bfloat16, dispatch=of, ranks_per_node=2), exact) for of in ("row", "token")
    )
    assert 0 < by_token <= 2 * by_row


def test_gates_wider_than_hidden_states_are_as_exact_as_by_row(rank: int) -> None:
    """bfloat16 hidden states, experts and gates in float32. The loss is linear, since the output is rounded."""
    forward_rows, gradients = Experts.forward_rows, []

    def in_float32(layer: Experts, rows: Any, offsets: Any, weights: Any) -> Any:
        return forward_rows(layer, rows.float(), offsets, weights)

    for dispatch in ("row", "token"):
        net = Net(Sizes(layers=1, experts=16, top_k=6, tokens=24), DEVICE)
        ep = net.spread(ranks_per_node=2, dispatch=dispatch)
        gates = []
        in_layers = mock.patch.object(Experts, "forward_rows", in_float32)
        with in_layers, ep.plan(net_routes(net.sizes, rank, RANKS)) as phase:
            for m, hidden in enumerate(draw_inputs(net.sizes, rank)):
                with phase.micro_step(m):
                    given = hidden.to(DEVICE, torch.bfloat16)
                    for layer in net.moe:
                        assert layer._ids is not None and layer._execute is not None
                        gate = torch.softmax(given.float() @ layer.router.weight.T, -1).gather(-1, layer._ids)
                        gate.retain_grad()
                        gates.append(gate)
                        given = given + layer._execute(given, layer._ids, gate)
                    given.float().sum().backward()
            phase.drain()
        gradients.append(torch.cat([gate.grad.double().flatten() for gate in gates]))
        ep.detach()
    by_row, by_token = gradients
    assert float(by_row.norm()) > 0
    assert float((by_token - by_row).norm() / by_row.norm()) < 1e-5


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_the_same_plan_gives_the_same_bits(rank: int, dtype: Any) -> None:
    first, second = (gradients_of(dtype, dispatch="token", ranks_per_node=2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_on_one_node_results_and_collectives_are_those_by_row(rank: int) -> None:
    by_row, by_token = (gradients_of(F32, dispatch=of, ranks_per_node=RANKS) for of in ("row", "token"))
    assert all(torch.equal(by_row[name], by_token[name]) for name in by_row)
    assert count_in_a_phase(rank, ranks_per_node=RANKS) == {"all_to_all_single": 4 * LAYERS}


def count_in_a_phase(rank: int, **options: Any) -> dict[str, int]:
    """Counts collectives and device waits in the layers of one micro-step. Excludes copies and guests' gradients."""
    ep, model, _ = begin(dtype=F32, dispatch="token", **options)
    (batch,), counter = draw_batches(rank, 1, 8), Counter()
    with ep.plan(draw_routes(rank, 1, 8)) as phase:
        with phase.micro_step(0):
            counter.count_layers(model, batch)
        phase.drain()
    ep.detach()
    counter.counts.pop("batch_isend_irecv", None)
    return counter.counts


def test_a_layer_exchanges_rows_over_two_groups_and_no_counts_and_never_waits(rank: int) -> None:
    assert count_in_a_phase(rank, ranks_per_node=2) == {"all_to_all_single": 8 * LAYERS}


@contextlib.contextmanager
def counted_rows(ep: Any) -> Iterator[list[int]]:
    """Counts the rows that this rank sends to ranks of other nodes, and to other ranks of its node."""
    rows, send_rows = [0, 0], exchange._exchange

    def counted(given: Any, send: list[int], recv: list[int], channel: Any) -> Any:
        for target, size in zip(dist.get_process_group_ranks(channel.group), send, strict=True):
            if target != ep.rank:
                rows[target // ep.ranks.ranks_per_node == ep.ranks.node] += size
        return send_rows(given, send, recv, channel)

    with mock.patch.object(exchange, "_exchange", counted):
        yield rows


def rows_by_simulation(plan: foremoe.Plan, dispatch: str, ranks_per_node: int, seed: int) -> list[int]:
    """Rows that the simulator sends between nodes and within nodes in a recompute phase of two micro-steps."""
    ranks = plan.num_ranks
    of = np.stack([routes.numpy() for rank in range(ranks) for routes in draw_routes(rank, 2, seed)])  # [rank and m, …]
    routes = of.reshape(-1, LAYERS, TOP_K).astype(np.int16)
    trace = foremoe.Trace.from_arrays(
        routes, np.linspace(0, len(routes), len(of) + 1).astype(np.int64), num_experts=EXPERTS,
        micro_step=np.tile(np.arange(2, dtype=np.int32), ranks), rank=np.arange(ranks, dtype=np.int32).repeat(2),
        ranks=ranks,
    )  # fmt: skip
    load = foremoe.collect(trace, ranks_per_node=ranks_per_node)
    figures = foremoe.evaluate_plan(
        plan,
        load,
        phase="recompute",
        cluster="h100",
        model=MODEL,
        dispatch=dispatch,
        rows="token" if dispatch == "token" else "order",
    ).figures
    assert not figures["dispatch_estimated"]
    row_bytes = {link["link"]: link["row_bytes"] for link in figures["phases"][0]["traffic"]}
    return [row_bytes["network"] // ROW_BYTES, row_bytes["peers"] // ROW_BYTES]


def expect_simulated_rows(rank: int, ranks_per_node: int, **options: Any) -> None:
    """Asserts that a recompute phase sends as many rows between nodes and within nodes as the simulator."""
    sent: dict[str, list[int]] = {}
    for dispatch in ("row", "token"):
        ep = spread(make_model(F32), dispatch=dispatch, ranks_per_node=ranks_per_node, **options)
        with torch.no_grad(), ep.plan(draw_routes(rank, 2, 7), phase="recompute") as phase, counted_rows(ep) as rows:
            for m, batch in enumerate(draw_batches(rank, 2, 7)):
                with phase.micro_step(m):
                    loss_of(ep.layers[0].model, batch)
        sent[dispatch] = np.sum(gather(rows), 0).tolist()
        assert sent[dispatch] == rows_by_simulation(phase.plan, dispatch, ranks_per_node, 7)
        ep.detach()
    assert sent["token"][0] < sent["row"][0]


@pytest.mark.parametrize("residency", ["static", "shared"])
def test_as_many_rows_cross_nodes_as_the_simulator_counts(rank: int, residency: str) -> None:
    expect_simulated_rows(rank, 2, residency=residency)


@pytest.mark.parametrize(("options", "words"), [
    ({"dispatch": "expert"}, "dispatch: 'expert', expected row or token"),
    ({"dispatch": "token", "ranks_per_node": 3}, "dispatch: token needs equally many ranks on all nodes"),
])  # fmt: skip
def test_invalid_arguments_are_rejected_by_name(rank: int, options: dict[str, Any], words: str) -> None:
    assert input_error(lambda: spread(make_model(F32), **options)).startswith(words)


def test_a_plan_that_is_never_entered_delays_nothing(rank: int) -> None:
    ep, model, trained = begin(dispatch="token", ranks_per_node=2)
    ep.plan(draw_routes(rank, 4, 3))
    run_phase(ep, trained, 9)
    assert gradient_error(ep, model, expected_gradients(9)) < 1e-12
    ep.plan(draw_routes(rank, 4, 3))
    ep.detach()


@pytest.mark.parametrize("dispatch", ["row", "token"])
@pytest.mark.parametrize("by_error", [False, True])
def test_a_phase_is_freed_when_it_has_ended(rank: int, dispatch: str, by_error: bool) -> None:
    ep, _, trained = begin(dispatch=dispatch, ranks_per_node=2)
    kept: list[Any] = []

    def between(m: int) -> None:
        if by_error and m == 2:
            dist.barrier()
            raise KeyError

    opens = PlannedPhase.open

    def opened(self: PlannedPhase, *arguments: Any, **options: Any) -> None:
        kept.append(weakref.ref(self))
        opens(self, *arguments, **options)

    with contextlib.suppress(KeyError), mock.patch.object(PlannedPhase, "open", opened):
        run_phase(ep, trained, 9, between=between)
    ep.detach()
    gc.collect()
    assert kept[0]() is None
