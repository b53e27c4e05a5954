"""Capacities of foremoe.fit() drop no row, and the next smaller ones do, by each trainer's rule applied to tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import expect_refused

import foremoe

MODEL = {
    "moe_layers": 2, "hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2, "heads": 2, "head_width": 32,
    "vocabulary": 100,
}  # fmt: skip
RANKS, EXPERTS, TOP_K, MICRO_STEPS, LAYERS = 4, 8, 2, 3, 2
Tokens = dict[tuple[int, int, int], np.ndarray[Any, Any]]


def drawn(seed: int) -> tuple[foremoe.Load, Tokens]:
    """Returns a load, and the experts of each token by (micro-step, layer, rank): int [tokens, top_k]."""
    random = np.random.default_rng(seed)
    counts = np.zeros((MICRO_STEPS, LAYERS, RANKS, EXPERTS), np.int64)
    tokens: Tokens = {}
    for m in range(MICRO_STEPS):
        sizes = random.integers(300, 900, RANKS)
        for layer in range(LAYERS):
            popular = random.random(EXPERTS) ** 3 + 0.02
            for rank in range(RANKS):
                chosen = [
                    random.choice(EXPERTS, TOP_K, replace=False, p=popular / popular.sum()) for _ in range(sizes[rank])
                ]
                tokens[m, layer, rank] = np.array(chosen)
                counts[m, layer, rank] = np.bincount(tokens[m, layer, rank].ravel(), minlength=EXPERTS)
    return foremoe.Load.from_array(counts, top_k=TOP_K, ranks_per_node=2, name="drawn"), tokens


def fit(load: foremoe.Load, moe_layers: int = LAYERS, **options: Any) -> dict[str, Any]:
    return foremoe.fit(load, cluster="h100", model=MODEL | {"moe_layers": moe_layers}, prefer="balance", **options)


def capacity(found: dict[str, Any], trainer: str, option: str) -> dict[str, Any]:
    (one,) = (c for c in found["capacities"] if c["trainer"].startswith(trainer) and c["option"] == option)
    return dict(one)


def slots_of(load: foremoe.Load, plan: foremoe.Plan | None) -> np.ndarray[Any, Any]:
    """Returns the rows of each slot, [micro_steps, layers, ranks, slots]. None: all experts at home."""
    if plan is None:
        return load.array.sum(2).reshape(MICRO_STEPS, LAYERS, RANKS, -1)
    rows = np.zeros((MICRO_STEPS, *plan.slot_tokens.shape[1:]), np.int64)
    rows[plan.event_micro_step] = plan.slot_tokens
    return rows


def dropped_by_experts(tokens: Tokens, factor: float) -> int:
    """Megatron-LM's apply_router_token_dropping: counts tokens, one at a time, against get_capacity."""
    dropped = 0
    for chosen in tokens.values():
        expert_capacity = math.ceil((len(chosen) * TOP_K / EXPERTS) * factor)
        kept = [0] * EXPERTS
        for token in chosen:
            for expert in token:
                if kept[expert] < expert_capacity:
                    kept[expert] += 1
                else:
                    dropped += 1
    return dropped


def dropped_by_ranks(tokens: Tokens, slots: np.ndarray[Any, Any], factor: float, pad: int) -> int:
    """HybridEP: rows, one at a time, against the budget of setup_metadata. Each slot's rows are padded."""
    dropped = 0
    for m, layer, rank in tokens:
        budget = int(len(tokens[m, layer, rank]) * TOP_K * factor)
        budget += -budget % 256
        at = 0
        for rows in slots[m, layer, rank]:
            for _ in range(int(rows)):
                dropped += at >= budget
                at += 1
            at += -at % pad
        dropped += at > budget  # padding beyond the buffer sets the overflow flag, too
    return dropped


def dropped_by_titan(tokens: Tokens, slots: np.ndarray[Any, Any], factor: float) -> int:
    dropped = 0
    for m, layer, rank in tokens:
        num_permuted = int(len(tokens[m, layer, rank]) * RANKS * min(slots.shape[-1], TOP_K) * factor)
        dropped += sum(row >= num_permuted for row in range(int(slots[m, layer, rank].sum())))
    return dropped


class Stash:
    """Megatron-LM's PagedStashManager for tensors of one width, with one micro-step or 1F1B: pages of 64 rows."""

    def __init__(self, tokens: Tokens, slots: np.ndarray[Any, Any], rank: int, rank_factor: float, pad: int) -> None:
        self.average, self.rows = {}, {}
        for m in range(MICRO_STEPS):
            for layer in range(LAYERS):
                budget = int(len(tokens[m, layer, rank]) * TOP_K * rank_factor)
                budget += -budget % 256
                self.average[m, layer] = int(budget // rank_factor)
                self.rows[m, layer] = sum(int(rows) + -int(rows) % pad for rows in slots[m, layer, rank])

    def largest_average(self, in_flight: int) -> int:
        most = now = 0
        for forward, m in schedule(in_flight):
            now += (1 if forward else -1) * sum(self.average[m, layer] for layer in range(LAYERS))
            most = max(most, now)
        return most

    def pages_missing(self, factor: float, tensors: int, in_flight: int, has_all_layers: bool) -> int:
        """A layer whose backward comes next is not stashed, if the model has no other layers."""
        free = (int(tensors * self.largest_average(in_flight) * factor) + 63) // 64
        missing = 0
        order = [
            (forward, m, layer)
            for forward, m in schedule(in_flight)
            for layer in (range(LAYERS) if forward else reversed(range(LAYERS)))
        ]
        kept = {of[1:] for of, after in itertools.pairwise(order) if has_all_layers and after == (False, *of[1:])}
        for forward, m, layer in order:
            for _ in range(0 if (m, layer) in kept else tensors):
                free -= (1 if forward else -1) * (-(-self.rows[m, layer] // 64))
                missing = max(missing, -free)
        return missing


def schedule(in_flight: int) -> list[tuple[bool, int]]:
    """1F1B: (is forward, micro-step)."""
    order = [(True, m) for m in range(min(in_flight, MICRO_STEPS))]
    for m in range(MICRO_STEPS):
        order.append((False, m))
        if m + in_flight < MICRO_STEPS:
            order.append((True, m + in_flight))
    return order


def expect_smallest(found: dict[str, Any], dropped: Callable[[float], int]) -> None:
    assert dropped(found["smallest"]) == 0
    assert dropped(found["rounded"]) == 0
    assert 0 <= found["rounded"] - found["smallest"] < 1.0001e-4
    assert dropped(math.nextafter(found["smallest"], 0)) > 0


@pytest.mark.parametrize("seed", range(4))
def test_capacities_are_the_smallest_that_drop_no_row(seed: int) -> None:
    load, tokens = drawn(seed)
    plan = foremoe.plan(load, guest_slots=1)
    found = fit(load, guest_slots=1)
    for part, of in (("now", None), ("planned", plan)):
        slots = slots_of(load, of)
        expect_smallest(
            capacity(found[part], "Megatron-LM", "moe_expert_capacity_factor"),
            lambda factor: dropped_by_experts(tokens, factor),
        )
        for trainer, pad in (("Megatron-LM 0.19", 1), ("Megatron-LM 0.20", 256)):
            expect_smallest(
                capacity(found[part], trainer, "moe_expert_rank_capacity_factor"),
                lambda factor, slots=slots, pad=pad: dropped_by_ranks(tokens, slots, factor, pad),  # type: ignore[misc]
            )
        expect_smallest(
            capacity(found[part], "torchtitan", "non_blocking_capacity_factor"),
            lambda factor, slots=slots: dropped_by_titan(tokens, slots, factor),  # type: ignore[misc]
        )


@pytest.mark.parametrize("moe_layers", [LAYERS, 4 * LAYERS])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_stash_holds_all_rows_for_any_number_of_tensors(seed: int, in_flight: int, moe_layers: int) -> None:
    load, tokens = drawn(seed)
    found = fit(load, moe_layers, guest_slots=1, in_flight=in_flight)
    has_all_layers = moe_layers == LAYERS
    slots = slots_of(load, None)
    for trainer, pad in (("Megatron-LM 0.19", 1), ("Megatron-LM 0.20", 256)):
        rank_factor = capacity(found["now"], trainer, "moe_expert_rank_capacity_factor")["rounded"]
        stashes = [Stash(tokens, slots, rank, rank_factor, pad) for rank in range(RANKS)]
        one = capacity(found["now"], trainer, "moe_paged_stash_buffer_size_factor_cuda")
        for factor in (one["smallest"], one["rounded"]):
            for tensors in (1, 2, 3, 64):
                assert not any(stash.pages_missing(factor, tensors, in_flight, has_all_layers) for stash in stashes)
        # With one row less for each of 64 tensors, one page is missing.
        row = 1.01 / min(stash.largest_average(in_flight) for stash in stashes)
        less = one["smallest"] - row
        assert any(stash.pages_missing(less, 64, in_flight, has_all_layers) for stash in stashes)


def test_a_rank_without_tokens_has_no_capacity() -> None:
    counts = np.zeros((1, 1, 2, 4), np.int64)
    counts[0, 0, 0] = [3, 3, 3, 3]
    load = foremoe.Load.from_array(counts, top_k=2, ranks_per_node=2, name="one rank")
    found = foremoe.fit(load, cluster="h100", model={**MODEL, "moe_layers": 1, "experts": 4})
    assert capacity(found["now"], "Megatron-LM", "moe_expert_capacity_factor")["smallest"] > 0
    for one in found["now"]["capacities"][1:]:
        assert one["smallest"] is None and one["rounded"] is None


def test_the_rank_factor_agrees_with_the_one_that_the_megatron_adapter_suggests() -> None:
    capacity_of_adapter = pytest.importorskip("foremoe.megatron.capacity")
    load, _ = drawn(1)
    ours = capacity(fit(load)["now"], "Megatron-LM 0.19", "moe_expert_rank_capacity_factor")["smallest"]
    theirs = capacity_of_adapter.Buffers().factor(load, capacity_of_adapter.home_slots(load))
    least = load.array.sum(-1).min()
    assert theirs - 256 / least <= ours <= theirs, "the adapter does not count on the buffer's rounding to 256 rows"


def test_megatrons_own_router_drops_as_the_capacity_says() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    load, tokens = drawn(2)
    one = capacity(fit(load)["now"], "Megatron-LM", "moe_expert_capacity_factor")

    def dropped(factor: float, policy: str) -> int:
        total = 0
        for chosen in tokens.values():
            routing_map = torch.zeros(len(chosen), EXPERTS, dtype=torch.bool).scatter_(1, torch.tensor(chosen), True)
            probs = torch.rand(routing_map.shape, generator=torch.Generator().manual_seed(3)) * 0.9 + 0.1
            probs = probs * routing_map
            _, kept = apply_router_token_dropping(probs, routing_map, TOP_K, factor, drop_policy=policy)
            total += int(routing_map.sum() - kept.sum())
        return total

    for policy in ("probs", "position"):
        assert dropped(one["smallest"], policy) == 0
        assert dropped(math.nextafter(one["smallest"], 0), policy) > 0


def test_peaks_are_those_of_the_plan_and_of_simulate() -> None:
    load, _ = drawn(3)
    found = fit(load, guest_slots=1, memory_budget=1)
    simulated = foremoe.simulate(
        load, "vanilla,foremoe", cluster="h100", model=MODEL, prefer="balance", memory_budget=1
    )
    for part, other in zip((found["now"], found["planned"]), simulated, strict=True):
        assert part["most_rows"]["rows"] == other["peak_tokens_per_rank"] == max(r["rows"] for r in part["ranks"])
        assert part["most_memory"]["bytes"] == other["memory_bytes_per_rank"] == sum(part["memory"].values())
        assert part["largest_micro_batch_tokens"] == other["largest_micro_batch_tokens"]
    assert found["planned"]["most_rows"]["rows"] == slots_of(load, foremoe.plan(load)).sum(-1).max()
    assert found["now"]["most_rows"]["rows"] == slots_of(load, None).sum(-1).max()


def test_refuses_wrong_arguments() -> None:
    load, _ = drawn(0)
    expect_refused(lambda: foremoe.fit(None, cluster="h100"), "load")  # type: ignore[arg-type]
    expect_refused(lambda: fit(load, policy="best"), "policy")
    expect_refused(lambda: fit(load, memory_budget=-1), "memory_budget")
    expect_refused(lambda: fit(load, most_guest_slots=-1), "most_guest_slots")
    expect_refused(lambda: fit(load, most_guest_slots=1.5), "most_guest_slots")
    expect_refused(lambda: foremoe.fit(load, cluster="h100", model={**MODEL, "experts": 16}), "model")
    with pytest.raises(TypeError, match="Did you mean 'guest_slots'"):
        fit(load, guest_slot=1)
