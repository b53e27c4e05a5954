"""The rows that verl assigns to a rank and their number per expert, compared with a token-by-token count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import foremoe
from foremoe.megatron import Place, with_filler_routes
from foremoe.megatron.rows import local_tokens
from foremoe.verl.routes import counts_of

EXPERTS, TOP_K, RECORDED = 10, 3, 4
LENGTHS, RESPONSES = [7, 1, 13, 24, 5], [3, 0, 12, 0, 5]
SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
PLACES = [Place(tp, t, cp, c) for tp, cp in SIZES for t in range(tp) for c in range(cp)]


def rows_by_hand(lengths: list[int], place: Place) -> list[tuple[int, int] | None]:
    """Return (sequence, token) per row, or None for padding. Context-parallel rank c has pieces c and 2·size − 1 − c of
    each padded sequence. Its rows are divided into one contiguous run per tensor-parallel rank."""
    pieces = 2 * place.cp_size if place.cp_size > 1 else 1
    rows: list[tuple[int, int] | None] = []
    for s, length in enumerate(lengths):
        padded = length
        while padded % (pieces * place.tp_size):
            padded += 1
        of_piece = padded // pieces
        for p in range(padded):
            if p // of_piece in (place.cp_rank, 2 * place.cp_size - 1 - place.cp_rank) or pieces == 1:
                rows.append((s, p) if p < length else None)
    run = len(rows) // place.tp_size
    return rows[place.tp_rank * run : (place.tp_rank + 1) * run]


def draw_routes(missing_last: bool = False) -> list[Any]:
    """Draw int16 [tokens, layers, top_k] routes per sequence. The last rows of one sequence are all zeros."""
    random = torch.Generator().manual_seed(1)
    routes = [
        torch.randint(EXPERTS, (n - missing_last * (s % 2), RECORDED, TOP_K), generator=random, dtype=torch.int16)
        for s, n in enumerate(LENGTHS)
    ]
    routes[2][-3:] = 0
    return routes


def counts_by_hand(routes: list[Any], place: Place, layers: list[int], first: int) -> np.ndarray:
    counts = np.zeros((len(layers), EXPERTS), np.int64)
    next_expert = first
    for row in rows_by_hand(LENGTHS, place):
        is_replayed = row is not None and RESPONSES[row[0]] > 0 and row[1] < LENGTHS[row[0]] - 1
        for i, layer in enumerate(layers):
            if row is not None and is_replayed:
                chosen = set(routes[row[0]][row[1], layer].tolist())
            else:
                chosen = {(next_expert + j) % EXPERTS for j in range(TOP_K)}
            for expert in chosen:
                counts[i, expert] += 1
        if not is_replayed:
            next_expert += TOP_K
    return counts


def count(routes: list[Any], place: Place = PLACES[0], layers: Any = (0, 2, 3), first: int = 5, **more: Any) -> Any:
    options = {"layers": layers, "num_experts": EXPERTS, "top_k": TOP_K, "first": first, **more}
    return counts_of(routes, RESPONSES, LENGTHS, place=place, **options)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_each_rank_gets_the_tokens_that_verl_assigns_to_it(place: Place) -> None:
    begins = np.cumsum([0, *LENGTHS])
    expected = [-1 if row is None else begins[row[0]] + row[1] for row in rows_by_hand(LENGTHS, place)]
    assert local_tokens(LENGTHS, place).tolist() == expected


def test_each_token_belongs_to_exactly_one_rank() -> None:
    for tp, cp in SIZES:
        of_ranks = [local_tokens(LENGTHS, place) for place in PLACES if (place.tp_size, place.cp_size) == (tp, cp)]
        assert len({len(tokens) for tokens in of_ranks}) == 1
        every = np.concatenate(of_ranks)
        assert sorted(every[every >= 0]) == list(range(sum(LENGTHS)))
    # On the first of two context-parallel ranks, sequences of 3 and 5 tokens are padded to 4 and 8.
    assert local_tokens([3, 5], Place(1, 0, 2, 0)).tolist() == [0, -1, 3, 4, -1, -1]


@pytest.mark.parametrize("missing_last", [False, True])
def test_counts_match_a_count_of_every_row(missing_last: bool) -> None:
    routes = draw_routes(missing_last)
    for place in PLACES:
        for first in (0, 5):
            expected = counts_by_hand(routes, place, [0, 2, 3], first)
            np.testing.assert_array_equal(count(routes, place, first=first), expected)
    np.testing.assert_array_equal(count(routes, layers=range(4)), counts_by_hand(routes, PLACES[0], [0, 1, 2, 3], 5))


def test_rows_that_are_not_replayed_get_experts_round_robin() -> None:
    replayed = np.zeros(50, bool)
    for begin, end in ((0, 6), (8, 20), (45, 49)):  # sequences with a response, without their last tokens
        replayed[begin:end] = True
    routes = torch.full((50, TOP_K), -1)
    found = with_filler_routes(routes, torch.from_numpy(replayed), num_experts=EXPERTS, first=8)
    assert (found[replayed] == -1).all()
    assert found[~replayed].flatten().tolist() == [(8 + i) % EXPERTS for i in range(TOP_K * (50 - 22))]
    assert not found.equal(with_filler_routes(routes, torch.from_numpy(replayed), num_experts=EXPERTS, first=0))


def test_routes_that_cannot_be_replayed_are_rejected_by_name() -> None:
    def refused(words: str) -> Any:
        return pytest.raises(foremoe.InputError, match=words)

    routes = draw_routes()
    with refused(r"routed_experts\[2\]: is \[11, 4, 3\]; expected \[13 or 12, layers, 3\]"):
        count([*routes[:2], routes[2][:-2], *routes[3:]])
    with refused(r"routed_experts\[0\]: is \[7, 4, 2\]; expected \[7 or 6, layers, 3\]"):
        count([routes[0][:, :, :2], *routes[1:]])
    with refused(r"routed_experts\[40\]: is \[7, 12\]"):
        count([routes[0].flatten(1), *routes[1:]], names=[40, 41, 42, 43, 44])
    with refused(r"routed_experts\[0\]: has 4 layers; expected layer 4 too, counted from 0"):
        count(routes, layers=[0, 4])
    for value in (-1, EXPERTS):
        routes = draw_routes()
        routes[4][3, 2, 1] = value
        with refused(rf"routed_experts\[4\]: has ids from -?\d to \d+; expected 0 to {EXPERTS - 1}"):
            count(routes)
        count(routes, layers=[0, 1, 3])  # the bad routes belong to another layer
    routes = draw_routes()
    for s, token in ((4, 4), (3, 0)):  # a last token, and a sequence without a response
        routes[s][token] = -1
    np.testing.assert_array_equal(count(routes), count(draw_routes()))
