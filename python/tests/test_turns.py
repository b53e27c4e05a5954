"""Checks RankTurns against a short numpy executor that follows the definitions."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from conftest import draw_load, expect_refused

import foremoe


def draw_rows(load: foremoe.Load, micro_step: int, layer: int, seed: int) -> list[np.ndarray]:
    """Draws routes, int32 [tokens, 1] per rank, that match the load. Two more rows per rank have no route."""
    random = np.random.default_rng(seed)
    rows = []
    for counts in load.array[micro_step, layer]:
        routes = np.concatenate([np.repeat(np.arange(load.num_experts), counts), [-1, -1]]).astype(np.int32)
        rows.append(random.permutation(routes)[:, None])
    return rows


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
def test_rows_dispatched_by_turns_reach_the_slot_of_their_expert(residency: str, in_flight: int) -> None:
    load = draw_load(3)
    plan = foremoe.plan(load, guest_slots=1, residency=residency, in_flight=in_flight)
    ranks = [foremoe.RankTurns(plan, load, rank=r) for r in range(load.num_ranks)]
    assert len(ranks[0]) == 2 * load.num_micro_steps * load.num_layers
    for index in range(0, len(ranks[0]), 2):
        turns = [turn_of_rank[index] for turn_of_rank in ranks]
        m, layer, event = turns[0].micro_step, turns[0].layer, turns[0].event
        rows = draw_rows(load, m, layer, index)
        orders = [turn.row_order(routes) for turn, routes in zip(turns, rows, strict=True)]
        sent = []
        for turn, order, routes in zip(turns, orders, rows, strict=True):
            assert sorted(order) == list(np.flatnonzero(routes >= 0))
            sent.append(np.split(routes.ravel()[order], np.cumsum(turn.send)[:-1]))
        for r, turn in enumerate(turns):
            np.testing.assert_array_equal(turn.recv, [len(sent[s][r]) for s in range(load.num_ranks)])
            received = np.concatenate([sent[s][r] for s in range(load.num_ranks)])
            computed = received[turn.to_slots]
            np.testing.assert_array_equal(np.diff(turn.slot_offsets), plan.slot_tokens[event, layer, r])
            expected = np.repeat(plan.slot_expert[event, layer, r], plan.slot_tokens[event, layer, r])
            np.testing.assert_array_equal(computed, expected)
            for source in range(load.num_ranks):
                came = [np.count_nonzero(sent[source][r] == expert) for expert in plan.slot_expert[event, layer, r]]
                np.testing.assert_array_equal(turn.received[:, source], came)
            of_rank = np.full(len(rows[r]), -1)  # destination rank of each row
            of_rank[orders[r]] = np.repeat(np.arange(load.num_ranks), turn.send)
            for expert in range(load.num_experts):
                to = [np.full(count, rank) for of, rank, _, count in turn.blocks if of == expert]
                goes = of_rank[rows[r][:, 0] == expert]
                np.testing.assert_array_equal(goes, np.concatenate([goes[:0], *to]))
            served_by = turn.slots(rows[r])
            assert served_by.dtype == np.int32
            assert served_by.shape == rows[r].shape
            np.testing.assert_array_equal(served_by.ravel() < 0, rows[r].ravel() < 0)
            sent_rows = served_by.ravel()[orders[r]]
            np.testing.assert_array_equal(sent_rows // plan.num_slots, of_rank[orders[r]])
            np.testing.assert_array_equal(plan.slot_expert[event, layer].ravel()[sent_rows], rows[r].ravel()[orders[r]])
            counts = np.bincount(sent_rows, minlength=load.num_ranks * plan.num_slots)
            in_blocks = np.zeros_like(counts)
            for expert, rank, slot, count in turn.blocks:
                assert plan.slot_expert[event, layer, rank, slot] == expert
                in_blocks[rank * plan.num_slots + slot] += count
            np.testing.assert_array_equal(in_blocks, counts)


def test_turns_are_indexed_by_pass_and_by_number(load: foremoe.Load) -> None:
    plan = foremoe.plan(load)
    turns = foremoe.RankTurns(plan, load, rank=1)
    turn = turns["backward", 2, 1]
    assert (turn.layer_pass, turn.micro_step, turn.layer) == ("backward", 2, 1)
    again = turns[turn.index]
    np.testing.assert_array_equal(again.to_slots, turn.to_slots)
    assert (turns.rank, turns.phase, turns.depth) == (1, "policy_update", 2)
    home = turns.at_homes("forward", 0, 0)
    per_home = load.array[0, 0].sum(0)[4:8]
    assert plan.guest_slots > 0
    guests = np.zeros(plan.guest_slots, np.int64)  # have no rows
    np.testing.assert_array_equal(np.diff(home.slot_offsets), np.append(per_home, guests))
    np.testing.assert_array_equal(home.received.sum(1), np.append(per_home, guests))
    routes = draw_rows(load, 0, 0, 0)[1]
    homes = load.num_experts // load.num_ranks
    expected = np.where(routes < 0, -1, routes // homes * plan.num_slots + routes % homes)
    np.testing.assert_array_equal(home.slots(routes), expected)


def test_the_peer_path_is_rejected_for_residency_free(load: foremoe.Load) -> None:
    plan = foremoe.plan(load, guest_slots=1, residency="free")
    foremoe.RankTurns(plan, load, rank=0, phase="recompute", path="host")
    with pytest.raises(foremoe.InputError, match="path: peer cannot serve a plan of residency free"):
        foremoe.RankTurns(plan, load, rank=0, phase="recompute", path="peer")


def test_copies_match_the_plan_and_both_ends_agree(load: foremoe.Load) -> None:
    plan = foremoe.plan(load, guest_slots=1)
    ranks = [foremoe.RankTurns(plan, load, rank=r, path="peer") for r in range(load.num_ranks)]
    homes = load.num_experts // load.num_ranks
    arrived = 0
    held = np.full((load.num_layers, load.num_ranks), -1)
    for index in range(len(ranks[0])):
        for r, turns in enumerate(ranks):
            turn = turns[index]
            for copy in turn.copies:
                assert (copy.rank, copy.layer, copy.arrives, copy.path) == (r, turn.layer, index, "peer")
                assert copy.source == plan.home[copy.layer, copy.expert]
                held[copy.layer, r] = copy.expert
                arrived += 1
            guest = plan.slot_expert[turn.event, turn.layer, r, homes]
            assert guest in (-1, held[turn.layer, r]), "a guest sits where no copy brought it"
            for copy in turns.starting(index):
                other = ranks[copy.source if copy.rank == r else copy.rank]
                assert any(repr(copy) == repr(one) for one in other.starting(index))
    assert arrived > 0


def test_an_arena_contains_the_experts_that_its_node_copies_by_the_host_path(load: foremoe.Load) -> None:
    plan = foremoe.plan(load, guest_slots=1)
    ranks = [foremoe.RankTurns(plan, load, rank=r, path="host") for r in range(load.num_ranks)]
    fetched: list[set[tuple[int, int]]] = [set(), set()]
    for r, turns in enumerate(ranks):
        for index in range(len(turns)):
            for copy in turns.starting(index):
                assert (copy.rank, copy.path) == (r, "host")
                fetched[r // load.ranks_per_node].add((copy.layer, copy.expert))
    assert all(fetched)
    assert [turns.arena(node) for node in range(2) for turns in ranks] == [
        sorted(of_node) for of_node in fetched for _ in ranks
    ]
    with pytest.raises(foremoe.InputError, match="node: 2, but there are 2"):
        ranks[0].arena(2)


def test_gradients_are_returned_home_once(load: foremoe.Load) -> None:
    plan = foremoe.plan(load, guest_slots=1)
    ends: dict[tuple[int, ...], list[int]] = {}
    for r in range(load.num_ranks):
        turns = foremoe.RankTurns(plan, load, rank=r)
        for index in range(len(turns)):
            for g in turns.returning(index):
                ends.setdefault((index, g.expert, g.guest, g.home, g.slot), []).append(r)
        for layer in range(load.num_layers):
            for g in turns.draining(layer):
                ends.setdefault((len(turns) + layer, g.expert, g.guest, g.home, g.slot), []).append(r)
    assert ends
    for (_, _, guest, home, _), ranks in ends.items():
        assert sorted(ranks) == sorted((guest, home))
    assert not foremoe.RankTurns(plan, load, rank=0, phase="recompute").draining(0)


def test_views_outlive_their_plan_and_load() -> None:
    load = draw_load()
    turn = foremoe.RankTurns(foremoe.plan(load), load, rank=0)[0]
    expected = turn.to_slots.copy()
    view, copies = turn.to_slots, turn.copies
    del turn, load
    gc.collect()
    np.testing.assert_array_equal(view, expected)
    assert all(repr(copy) for copy in copies)


def test_routes_that_disagree_with_the_load_are_rejected(load: foremoe.Load) -> None:
    turn = foremoe.RankTurns(foremoe.plan(load), load, rank=0)["forward", 0, 0]
    routes = draw_rows(load, 0, 0, 0)[0]
    for wrong, words in [
        (routes[:-5], "rows fewer of expert"),
        (np.concatenate([routes, [[3]]]).astype(np.int32), "1 rows more of expert 3"),
        (np.where(routes < 0, 99, routes).astype(np.int32), "expert 99, but there are 16"),
        (routes.astype(np.int64), "is int64"),
        (routes.ravel(), "[tokens, top_k]"),
        (routes[: len(routes) // 2 * 2].reshape(-1, 2), "the load's top_k is 1"),
        (np.repeat(routes, 2, 1)[:, ::2], "not C-contiguous"),
    ]:
        for made in (turn.row_order, turn.slots):
            expect_refused(lambda made=made, wrong=wrong: made(wrong), "routes", words)


def test_a_plan_of_another_load_is_rejected(load: foremoe.Load) -> None:
    with pytest.raises(foremoe.InputError, match="different load"):
        foremoe.RankTurns(foremoe.plan(draw_load(5)), load, rank=0)
    turns = foremoe.RankTurns(foremoe.plan(load), load, rank=0)
    with pytest.raises(IndexError):
        turns[len(turns)]
    with pytest.raises(foremoe.InputError, match="pass"):
        turns["sideways", 0, 0]
    with pytest.raises(foremoe.InputError, match="layer"):
        turns["forward", 0, 9]
