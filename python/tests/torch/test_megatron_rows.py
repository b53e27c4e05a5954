"""Row counts of a micro-batch under tensor and context parallelism, against Megatron-LM's own division of tokens."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.utils import get_batch_on_this_cp_rank

import foremoe
from foremoe.megatron import Place, counts_from_routes
from foremoe.megatron.rows import local_tokens

EXPERTS, TOP_K, LAYERS = 10, 3, 2
LENGTHS = [7, 1, 16, 5]
PLACES = [Place(tp, t, cp, c) for tp, cp in ((1, 1), (2, 1), (1, 2), (2, 2)) for t in range(tp) for c in range(cp)]


def draw_routes(lengths: list[int] = LENGTHS) -> list[Any]:
    """Draws int16 [tokens, layers, top_k] per sequence, of distinct experts."""
    random = torch.Generator().manual_seed(1)
    return [torch.rand(n, LAYERS, EXPERTS, generator=random).argsort(-1)[..., :TOP_K].short() for n in lengths]


def rows_of_megatron(lengths: list[int], padded_to: int, place: Place) -> list[int]:
    """Returns the token of each row in a micro-batch [batch, tokens], −1 for padding."""
    tokens, begin = torch.full((len(lengths), padded_to), -1), 0
    for of, length in zip(tokens, lengths, strict=True):
        of[:length] = torch.arange(begin, begin + length)
        begin += length
    options = (
        {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    )
    with pytest.MonkeyPatch.context() as patch:
        for ask in ("megatron.core.parallel_state.get_context_parallel_{}", "torch.distributed.get_{}"):  # from 0.18 on
            patch.setattr(ask.format("world_size"), lambda *_: place.cp_size)
            patch.setattr(ask.format("rank"), lambda *_: place.cp_rank)
        of_cp = get_batch_on_this_cp_rank({"tokens": tokens}, **options)["tokens"]
    # scatter_to_sequence_parallel_region() divides the first dimension of [tokens, batch]
    return of_cp.T.chunk(place.tp_size)[place.tp_rank].flatten().tolist()  # type: ignore[no-any-return]


def counted(routes: list[Any], rows: list[int], first: int) -> Any:
    """Counts row by row; rows without a token take experts in turn."""
    tokens = torch.cat(routes)
    counts, turn = np.zeros((LAYERS, EXPERTS), np.int64), first
    for row in rows:
        known = row >= 0 and int(tokens[row].min()) >= 0
        for layer in range(LAYERS):
            for j in range(TOP_K):
                counts[layer, int(tokens[row, layer, j]) if known else (turn + j) % EXPERTS] += 1
        turn += 0 if known else TOP_K
    return counts


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_padded_rows_are_those_of_megatron(place: Place) -> None:
    assert local_tokens(LENGTHS, place, 16).tolist() == rows_of_megatron(LENGTHS, 16, place)


@pytest.mark.parametrize("padded_to", [None, 16])
def test_counts_match_a_count_of_every_row(padded_to: int | None) -> None:
    routes = draw_routes()
    routes[2][3:5] = -1
    for place in PLACES:
        rows = rows_of_megatron(LENGTHS, 16, place) if padded_to else local_tokens(LENGTHS, place).tolist()
        found = counts_from_routes(routes, num_experts=EXPERTS, padded_to=padded_to, first=5, place=place)
        np.testing.assert_array_equal(found, counted(routes, rows, 5))


def test_the_counts_of_all_ranks_are_those_of_all_tokens() -> None:
    """Sequences need no padding here. TP 2 × CP 2; each rank of the expert-parallel group counts its own rows."""
    routes = draw_routes([8, 16, 24])
    expected = counted(routes, list(range(48)), 0)
    for padded_to, of in ((None, routes), (16, draw_routes([16, 16, 16]))):
        places = [place for place in PLACES if (place.tp_size, place.cp_size) == (2, 2)]
        counts = [counts_from_routes(of, num_experts=EXPERTS, padded_to=padded_to, place=place) for place in places]
        assert {int(c.sum()) for c in counts} == {48 // 4 * TOP_K * LAYERS}
        np.testing.assert_array_equal(sum(counts), expected if padded_to is None else counted(of, list(range(48)), 0))


def rejected(routes: list[Any], words: str, **options: Any) -> None:
    given = {"num_experts": EXPERTS, "first": 0, "place": Place(2, 0, 2, 0)} | options
    with pytest.raises(foremoe.InputError, match=f"^{re.escape(words)}"):
        counts_from_routes(routes, **given)


@pytest.mark.parametrize(("change", "words"), [
    ({"padded_to": 12}, "routes[2]: has 16 tokens; expected at most padded_to = 12"),
    ({"padded_to": 18}, "padded_to: 18; expected a multiple of 8, for Place(tp_size=2, tp_rank=0, cp_size=2, cp_rank"),
    ({"first": None}, "routes: have none for 4 of this rank's rows (4 of padding), where the router would choose"),
    ({"num_experts": 9}, "routes[0]: has id 9; expected at most 8"),
])  # fmt: skip
def test_options_that_do_not_fit_the_routes_are_rejected_by_name(change: dict[str, Any], words: str) -> None:
    rejected(draw_routes(), words, **change)


def test_routes_that_cannot_be_counted_are_rejected_by_name() -> None:
    rejected([], "routes: has no sequence")
    rejected([torch.zeros(8, 2)], "routes[0]: is torch.float32 [8, 2]; expected integers [tokens, layers, top_k]")
    whole, wider = torch.zeros(8, 2, 3).int(), torch.zeros(8, 2, 4).int()
    rejected([whole, wider], "routes[1]: is torch.int32 [8, 2, 4]; expected integers [tokens, 2, 3]")
    routes = draw_routes()
    routes[2][9, 1] = -1
    rejected(routes, "routes[2][9]: has ids below 0 in some of its layers")
