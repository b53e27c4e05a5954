"""Checks the suggested buffer capacity for Megatron-LM's flex dispatcher against the dispatcher's formula."""

from __future__ import annotations

import math
import types
from concurrent.futures import Future

import numpy as np
import pytest

import foremoe
from foremoe.megatron import Plan
from foremoe.megatron.capacity import Buffers, home_slots, planned_slots

RANKS, EXPERTS, TOP_K, TOKENS = 4, 8, 2, 48


def load_of(counts: np.ndarray) -> foremoe.Load:
    return foremoe.Load.from_array(counts.astype(np.int64), top_k=TOP_K, ranks_per_node=2, name="counts")


def drawn(seed: int, micro_steps: int = 3, layers: int = 2, tokens: int = TOKENS) -> foremoe.Load:
    random = np.random.default_rng(seed)
    counts = np.zeros((micro_steps, layers, RANKS, EXPERTS), np.int64)
    for place in np.ndindex(micro_steps, layers):
        popular = random.random(EXPERTS) ** 4 + 0.02
        for rank in range(RANKS):
            for _ in range(tokens):
                chosen = random.choice(EXPERTS, TOP_K, replace=False, p=popular / popular.sum())
                counts[(*place, rank)][chosen] += 1
    return load_of(counts)


def rows_beyond(load: foremoe.Load, slots: np.ndarray, factor: float, *, align: int = 1, padded: bool = False) -> int:
    """Number of rows that exceed HybridEP's budget, over all layers, micro-steps and ranks."""
    beyond = 0
    for m, layer, rank, _ in np.ndindex(*slots.shape[:3], 1):
        tokens = [int(load.array[m, layer, r].sum()) // TOP_K for r in range(RANKS)]
        num_tokens = max(tokens) if padded else tokens[rank]
        budget = int(num_tokens * TOP_K * factor)
        rows = sum(math.ceil(int(rows) / align) * align for rows in slots[m, layer, rank])
        beyond += max(0, rows - budget)
    return beyond


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("align", "padded"), [(1, False), (16, False), (1, True)])
def test_the_factor_is_the_smallest_that_drops_no_row(seed: int, align: int, padded: bool) -> None:
    load = drawn(seed, tokens=TOKENS - seed)
    plan = foremoe.plan(load, guest_slots=1)
    for slots in (planned_slots(plan), home_slots(load)):
        factor = Buffers(align, padded).factor(load, slots)
        assert factor == round(factor, 3) >= 1
        assert rows_beyond(load, slots, factor, align=align, padded=padded) == 0
        less = round(factor - 0.001, 3)
        assert less < 1 or rows_beyond(load, slots, less, align=align, padded=padded) > 0


def test_a_plan_suggests_its_capacity_factor() -> None:
    load = drawn(1)
    future: Future[foremoe.Plan] = Future()
    future.set_result(made := foremoe.plan(load, guest_slots=1))
    plan = Plan(load, types.SimpleNamespace(finish=future.result), "policy_update", 1, Buffers())  # type: ignore[arg-type]
    # Oracle: the most rows of any rank in any layer and micro-step.
    rows = made.slot_tokens.sum(-1)
    assert plan.suggested_rank_capacity_factor() == math.ceil(1000 * int(rows.max()) / (TOKENS * TOP_K)) / 1000
    assert Buffers().factor(load, home_slots(load)) > 1.3 > 1.1 > plan.suggested_rank_capacity_factor()


def test_rounding_of_the_factor_drops_no_row() -> None:
    """In floating point, int(1000 · 1.001) is 1000 instead of 1001."""
    assert int(1000 * 1.001) == 1000
    load = load_of(np.array([[[[1000, 0], [1000, 0]]]]))
    for rows in range(1000, 4000):
        factor = Buffers().factor(load, np.array([[[[rows], [0]]]]))
        assert rows <= int(1000 * factor) <= rows + 1


def test_the_rows_of_each_slot_are_padded() -> None:
    load = load_of(np.full((1, 1, 2, 4), 10))
    assert Buffers(16).factor(load, home_slots(load)) == 1.6  # 2 experts of 20 rows, padded to 32 rows; 40 tokens


def test_a_rank_without_tokens_needs_an_infinite_factor_unless_ranks_are_padded() -> None:
    load = load_of(np.array([[[[6, 6], [0, 0]]]]))
    assert Buffers().factor(load, home_slots(load)) == math.inf
    assert Buffers(padded_ranks=True).factor(load, home_slots(load)) == 1
    empty = load_of(np.zeros((1, 1, 2, 2)))
    assert Buffers().factor(empty, home_slots(empty)) == 1


def test_buffer_sizes_follow_the_configuration() -> None:
    def of(**fields: object) -> Buffers:
        return Buffers.of(types.SimpleNamespace(**fields))

    assert of() == Buffers(1, False)
    assert of(moe_flex_dispatcher_backend="ncclep", moe_hybridep_pad_uneven_dispatch_inputs=True) == Buffers(1, False)
    assert of(moe_flex_dispatcher_backend="hybridep", moe_hybridep_pad_uneven_dispatch_inputs=True) == Buffers(1, True)
    assert of(moe_flex_dispatcher_backend="hybridep", use_transformer_engine_op_fuser=True) == Buffers(1, False)
