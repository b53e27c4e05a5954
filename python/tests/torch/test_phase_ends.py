"""Gradients from before a phase, and phases that end by an error: nothing is lost, doubled or averaged by halves.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refusals import refusal
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import (
    RANKS,
    draw_batches,
    draw_routes,
    loss_of,
    make_model,
    on_all_ranks,
    reference,
    spread,
    whole_gradients,
    worst_difference,
)

from foremoe._engine.planned_phase import PlannedPhase

MICRO_STEPS = 2


def make(wrapper: str | None = None) -> tuple[Any, Any]:
    model = make_model(torch.float64)
    ep = spread(model)
    ep.wrap(model, wrapper)
    return ep, model


def run(ep: Any, model: Any, rank: int, seed: int, after: Callable[[], None] = lambda: None) -> None:
    """A phase. after: called when it has been drained, inside of it."""
    with ep.plan(draw_routes(rank, MICRO_STEPS, seed)) as phase:
        for m, batch in enumerate(draw_batches(rank, MICRO_STEPS, seed)):
            with phase.micro_step(m):
                loss_of(model, batch).backward()
        phase.drain()
        after()


def expected(seed: int) -> dict[str, Any]:
    batches = [draw_batches(r, MICRO_STEPS, seed) for r in range(RANKS)]
    return reference(torch.float64, batches, [draw_routes(r, MICRO_STEPS, seed) for r in range(RANKS)])[1]


def use_bucket_views(rank: int) -> dict[str, Any]:
    """Gradients that lie in DistributedDataParallel's buckets, which it makes anew after the first backward."""
    ep, model = make("own")
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    of_3, of_4 = expected(3), expected(4)
    found: dict[str, Any] = {"steps": []}
    for _ in range(4):
        model.zero_grad(set_to_none=False)
        run(ep, trained, rank, 3)
        found["steps"].append(worst_difference(whole_gradients(ep, model), of_3)[0])
    run(ep, trained, rank, 4)
    both = {name: of_3[name] + of_4[name] for name in of_3}
    found["added"] = worst_difference(whole_gradients(ep, model), both)[0]
    with contextlib.suppress(KeyError), ep.plan(draw_routes(rank, MICRO_STEPS, 5)) as phase:
        for m, batch in enumerate(draw_batches(rank, MICRO_STEPS, 5)):
            with phase.micro_step(m):
                loss_of(trained, batch).backward()
        dist.barrier()
        raise KeyError
    dense = {name: p.grad for name, p in model.named_parameters() if ".experts." not in name}
    found["given back"] = worst_difference(dense, {name: both[name] for name in dense})[0]
    return found


def end_in_no_sync(rank: int) -> str:
    """Gradients that the trainer means to average in a later phase."""
    ep, model = make("own")
    trained = DistributedDataParallel(model)

    def without_averaging() -> None:
        with trained.no_sync():
            run(ep, trained, rank, 3)

    return refusal(without_averaging)


def begin_in_no_sync(rank: int) -> float:
    """The last micro-step averages those of all."""
    ep, model = make("own")
    trained = DistributedDataParallel(model)
    with ep.plan(draw_routes(rank, MICRO_STEPS, 3)) as phase:
        for m, batch in enumerate(draw_batches(rank, MICRO_STEPS, 3)):
            is_last = m == MICRO_STEPS - 1
            with phase.micro_step(m), contextlib.nullcontext() if is_last else trained.no_sync():
                loss_of(trained, batch).backward()
        phase.drain()
    return worst_difference(whole_gradients(ep, model), expected(3))[0]


def shard_experts_later(rank: int) -> str:
    ep, model = make("own")
    fully_shard(model)
    return refusal(lambda: run(ep, model, rank, 3))


def fail_after_the_drain(rank: int) -> dict[str, Any]:
    """One rank, whose trainer catches the error and goes on."""
    ep, model = make()

    def log() -> None:
        if rank == 1:
            raise ValueError("no such metric")

    found: dict[str, Any] = {"said": refusal(lambda: run(ep, model, rank, 3, log))}
    found["kept"] = worst_difference(whole_gradients(ep, model), expected(3))[0]
    model.zero_grad()
    run(ep, model, rank, 4)
    found["next"] = worst_difference(whole_gradients(ep, model), expected(4))[0]
    return found


def freeze_inside(rank: int) -> str:
    ep, model = make()
    routes, batches = draw_routes(rank, MICRO_STEPS, 3), draw_batches(rank, MICRO_STEPS, 3)

    def freeze() -> None:
        with ep.plan(routes) as phase:
            for m, batch in enumerate(batches):
                with phase.micro_step(m):
                    loss_of(model, batch).backward()
                if rank == 2:
                    ep.expert_parameters()[0].requires_grad_(False)
            phase.drain()

    return refusal(freeze)


def fail_to_close(rank: int) -> dict[str, str]:
    """On one rank what a phase has begun cannot be ended, after the drain."""
    ep, model = make()
    close = PlannedPhase.close

    def fail(self: Any, complete: bool) -> None:
        close(self, complete)
        if rank == 1:
            raise OSError("no space is left")

    with mock.patch.object(PlannedPhase, "close", fail):
        found = {"said": refusal(lambda: run(ep, model, rank, 3))}
    dist.barrier()
    found["next"] = refusal(lambda: ep.plan(draw_routes(rank, MICRO_STEPS, 4)))
    return found


def plan_otherwise(rank: int) -> dict[str, str]:
    """Ranks whose planners do not agree, in guests or in quotas."""
    found = {}
    for which, table in (("guests", "slot_expert"), ("quotas", "slot_tokens")):
        ep, model = make()
        begin = ep._memory, PlannedPhase.__init__

        def other(self: Any, *of: Any, init: Any = begin[1], table: str = table, **more: Any) -> None:
            init(self, *of, **more)
            if rank == 2:
                changed = getattr(self.plan, table).copy()
                changed[(0,) * changed.ndim] += 1
                self.plan = mock.Mock(wraps=self.plan, **{name: getattr(self.plan, name) for name in PLAIN})
                setattr(self.plan, table, changed)

        with mock.patch.object(PlannedPhase, "__init__", other):
            found[which] = refusal(lambda ep=ep, model=model: run(ep, model, rank, 3))
    return found


PLAIN = ("guest_slots", "num_slots", "residency", "slot_expert", "slot_tokens", "event_micro_step", "event_pass")
CASES = {
    "bucket views": use_bucket_views,
    "end in no_sync": end_in_no_sync,
    "begin in no_sync": begin_in_no_sync,
    "sharded later": shard_experts_later,
    "after the drain": fail_after_the_drain,
    "frozen inside": freeze_inside,
    "close": fail_to_close,
    "plans": plan_otherwise,
}


def work(rank: int) -> dict[str, Any]:
    return {name: case(rank) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_gradients_in_buckets_are_neither_doubled_nor_lost(found: list[dict[str, Any]]) -> None:
    for of in found:
        views = of["bucket views"]
        assert max(views["steps"]) <= 1e-12
        assert views["added"] <= 1e-12
        assert views["given back"] <= 1e-12


def test_a_phase_that_averages_nothing_is_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "the last micro-step ran inside no_sync()" in of["end in no_sync"]
        assert of["begin in no_sync"] <= 1e-12


def test_experts_that_fsdp_has_taken_are_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "is no longer the parameter that was spread; fully_shard()" in of["sharded later"]


def test_an_error_after_the_drain_leaves_all_ranks_alike(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        after = of["after the drain"]
        assert after["said"] == ("ValueError: no such metric" if rank == 1 else "nothing")
        assert max(after["kept"], after["next"]) <= 1e-12


def test_experts_that_one_rank_freezes_inside_a_phase_end_it_on_all(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        said = "the weights experts were frozen or unfrozen inside a phase"
        assert (said if rank == 2 else f"rank 2 failed: RuntimeError: {said}") in of["frozen inside"]


def test_a_phase_that_cannot_be_closed_is_told_to_all(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        close = of["close"]
        assert close["said"] == ("OSError: no space is left" if rank == 1 else "nothing")
        assert ("a phase failed" if rank == 1 else "rank 1 failed: OSError: no space is left") in close["next"]


def test_plans_that_differ_between_ranks_are_refused(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        others = [2] if rank != 2 else [0, 1, 3]
        assert f"ranks {others} of the group planned other guests than rank {rank}" in of["plans"]["guests"]
        assert "quotas of the plan: " in of["plans"]["quotas"]
