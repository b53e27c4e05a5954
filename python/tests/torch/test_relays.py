"""Destinations of tokens, computed for all ranks in one process and followed row by row."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import foremoe
from foremoe._engine.homes import HomeTable
from foremoe._engine.ranks import Ranks
from foremoe.torch.by_token import Fan
from foremoe.torch.relays import Sent, TokenRows, joined, packed, unpacked

LAYERS, TOP_K, HOMES = 2, 3, 2


def draw_routes(random: np.random.Generator, tokens: int, experts: int) -> Any:
    """Draws skewed routes, int32 [tokens, layers, top_k]. About a tenth of the tokens have none."""
    scores = np.log(np.arange(1, experts + 1) ** -0.7) + random.gumbel(size=(tokens, LAYERS, experts))
    routes = (-scores).argsort(-1)[..., :TOP_K].astype(np.int32)
    routes[random.random(tokens) < 0.1] = -1
    return routes


def followed(rows: list[Any], dispatches: list[Any], width: int) -> list[Any]:
    """Moves rows over both hops, as all ranks together would. Returns those that each rank receives, [rank]."""
    ranks = range(len(rows))
    across = [list(ranks)[rank % width :: width] for rank in ranks]
    within = [list(ranks)[rank // width * width :][:width] for rank in ranks]
    hops = [("relay", across, [of.across for of in dispatches]), ("rank", within, [of.within for of in dispatches])]
    for hop, peers, sizes in hops:
        copies = [of[dispatch.tables[f"{hop}_row"].numpy()] for of, dispatch in zip(rows, dispatches, strict=True)]
        sent = [np.split(of, np.cumsum(send)[:-1]) for of, (send, _) in zip(copies, sizes, strict=True)]
        parts = [[sent[source][peers[source].index(rank)] for source in peers[rank]] for rank in ranks]
        assert [[len(part) for part in of] for of in parts] == [recv for _, recv in sizes]
        rows = [np.concatenate(of) for of in parts]
    return rows


@pytest.mark.parametrize(
    ("nodes", "width", "most"), [(2, 2, 40), (3, 4, 17), (1, 3, 9), (4, 1, 30), (2, 9, 25), (2, 2, 40000)]
)
def test_every_row_arrives_at_its_slot_and_every_sum_has_all_copies(nodes: int, width: int, most: int) -> None:
    """Nodes of nine ranks need masks of two bytes; 40,000 tokens need entries of four bytes. Rank 1 has no tokens."""
    random, num_ranks = np.random.default_rng(most), nodes * width
    experts = HOMES * num_ranks
    routes = [draw_routes(random, 0 if rank == 1 else most - rank, experts) for rank in range(num_ranks)]
    counts = np.stack(
        [[np.bincount(of[:, i][of[:, i] >= 0], minlength=experts) for of in routes] for i in range(LAYERS)]
    )
    load = foremoe.Load.from_array(counts[None].astype(np.int64), top_k=TOP_K, ranks_per_node=width)
    plan = foremoe.plan(load, guest_slots=1)
    table = HomeTable.contiguous(LAYERS, experts, num_ranks)
    ranks = [Ranks(None, rank, num_ranks, table, width, torch.device("cpu")) for rank in range(num_ranks)]
    turns = [
        [
            foremoe.RankTurns(plan, load, rank=rank, path="peer", rows="token")["forward", 0, layer]
            for layer in range(LAYERS)
        ]
        for rank in range(num_ranks)
    ]
    own = [[np.ascontiguousarray(of[:, layer]) for layer in range(LAYERS)] for of in routes]
    sent = [[Sent(*of, ranks[rank]) for of in zip(turns[rank], own[rank], strict=True)] for rank in range(num_ranks)]
    parts = [[packed(sent[source], rank, ranks[source]) for rank in range(num_ranks)] for source in range(num_ranks)]
    found = [
        [unpacked(parts[source][rank], turns[rank], source, ranks[rank]) for source in range(num_ranks)]
        for rank in range(num_ranks)
    ]
    for layer in range(LAYERS):
        dispatches: list[TokenRows] = [
            joined(turns[rank][layer], sent[rank][layer], [of[layer] for of in found[rank]], ranks[rank])
            for rank in range(num_ranks)
        ]
        named = [np.stack([np.full(len(of), rank), np.arange(len(of))], 1) for rank, of in enumerate(routes)]
        received = followed(named, dispatches, width)  # (source, token)
        for rank, (dispatch, turn) in enumerate(zip(dispatches, [of[layer] for of in turns], strict=True)):
            assert len(np.unique(received[rank], axis=0)) == len(received[rank]), "a token arrives once"
            entries = dispatch.tables["entries"].numpy()
            computed = np.concatenate([received[rank][entries // TOP_K], entries[:, None] % TOP_K], 1)
            expected = []
            for source, of in enumerate(own):
                slots = turns[source][layer].slots(of[layer])
                expected += [
                    (slots[token, entry] % plan.num_slots, source, token, entry)
                    for token, entry in np.argwhere(slots // plan.num_slots == rank)
                ]
            slot = np.repeat(np.arange(plan.num_slots), np.diff(turn.slot_offsets))
            assert sorted(zip(slot.tolist(), *computed.T.tolist(), strict=True)) == sorted(expected)
            order = dispatch.tables["slot_order"].numpy()
            summed = computed[order, 2].tolist()
            ends = dispatch.tables["slot_first"].numpy()
            assert all(summed[b:e] == sorted(summed[b:e]) for b, e in itertools.pairwise(ends)), "by entry"


def test_sums_are_the_transpose_of_copies() -> None:
    """Row 1 has no copy."""
    random = np.random.default_rng(0)
    row = np.array([3, 0, 0, 2, 3, 3, 2])
    order, first = row.argsort(kind="stable"), np.array([0, 2, 2, 4, 7])
    fan = Fan(*(torch.from_numpy(of.astype(np.int32)) for of in (row, order, first)))
    rows, copies = (torch.from_numpy(random.standard_normal((size, 5))) for size in (4, 7))
    assert torch.equal(fan.copied(rows), rows[row])
    assert torch.equal(fan.summed(copies)[1], torch.zeros(5))
    assert float((fan.copied(rows) * copies).sum()) == pytest.approx(
        float((rows * fan.summed(copies)).sum()), rel=1e-14
    )


def test_bfloat16_sums_are_rounded_once() -> None:
    copies = torch.cat([torch.full((1, 4), 256.0), torch.ones(4, 4)]).bfloat16()
    fan = Fan(torch.zeros(5).int(), torch.arange(5).int(), torch.tensor([0, 5]).int())
    assert fan.summed(copies).tolist() == [[260.0] * 4]  # rounding each sum would give 256
