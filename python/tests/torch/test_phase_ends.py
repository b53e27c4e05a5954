"""Gradients from before a phase and phases that end by an error: no gradient is lost, doubled or partly averaged."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from refusals import refusal
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import begin, draw_routes, expected_gradients, gradient_error, run_phase, worst_difference

from foremoe._engine.planned_phase import PlannedPhase

PLAIN = ("guest_slots", "num_slots", "residency", "slot_expert", "slot_tokens", "event_micro_step", "event_pass")


def test_gradients_in_buckets_are_neither_doubled_nor_lost(rank: int) -> None:
    """Gradients are views of DistributedDataParallel's buckets, which it rebuilds after the first backward."""
    ep, model, _ = begin("own")
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    of_3, of_4 = expected_gradients(3), expected_gradients(4)
    for _ in range(4):
        model.zero_grad(set_to_none=False)
        run_phase(ep, trained, 3)
        assert gradient_error(ep, model, of_3) <= 1e-12
    run_phase(ep, trained, 4)
    both = {name: of_3[name] + of_4[name] for name in of_3}
    assert gradient_error(ep, model, both) <= 1e-12

    def leave(m: int) -> None:
        if m == 2:
            dist.barrier()
            raise KeyError

    with contextlib.suppress(KeyError):
        run_phase(ep, trained, 5, between=leave)
    dense = {name: p.grad for name, p in model.named_parameters() if ".experts." not in name}
    assert worst_difference(dense, {name: both[name] for name in dense})[0] <= 1e-12


def test_a_phase_that_averages_no_gradients_is_rejected(rank: int) -> None:
    ep, model, _ = begin("own")
    trained = DistributedDataParallel(model)
    with trained.no_sync():  # the trainer intends to average in a later phase
        assert "the last micro-step ran inside no_sync()" in refusal(lambda: run_phase(ep, trained))


def test_the_last_micro_step_averages_the_gradients_of_all_micro_steps(rank: int) -> None:
    ep, model, _ = begin("own")
    trained = DistributedDataParallel(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(trained.no_sync())
        run_phase(ep, trained, between=lambda m: stack.close() if m == 1 else None)
    assert gradient_error(ep, model, expected_gradients()) <= 1e-12


def test_experts_sharded_by_fully_shard_are_rejected(rank: int) -> None:
    ep, model, _ = begin("own")
    fully_shard(model)
    said = refusal(lambda: run_phase(ep, model))
    assert "is no longer the parameter that was spread; fully_shard()" in said


def test_an_error_on_one_rank_after_drain_keeps_gradients_correct(rank: int) -> None:
    """One rank fails; its trainer catches the error and continues."""
    ep, model, trained = begin()

    def log() -> None:
        if rank == 1:
            raise ValueError("no such metric")

    said = refusal(lambda: run_phase(ep, trained, after=log))
    assert said == ("ValueError: no such metric" if rank == 1 else "nothing")
    assert gradient_error(ep, model, expected_gradients()) <= 1e-12
    model.zero_grad()
    run_phase(ep, trained, 4)
    assert gradient_error(ep, model, expected_gradients(4)) <= 1e-12


def test_freezing_experts_on_one_rank_inside_a_phase_ends_it_on_all_ranks(rank: int) -> None:
    ep, _, trained = begin()

    def freeze(m: int) -> None:
        if rank == 2 and m > 0:
            ep.expert_parameters()[0].requires_grad_(False)

    said = "the weights experts were frozen or unfrozen inside a phase"
    expected = said if rank == 2 else f"rank 2 failed: RuntimeError: {said}"
    assert expected in refusal(lambda: run_phase(ep, trained, between=freeze))


def test_an_error_on_closing_a_phase_is_reported_to_all_ranks(rank: int) -> None:
    """Closing the phase fails on one rank after the drain."""
    ep, _, trained = begin()
    close = PlannedPhase.close

    def fail(self: Any, complete: bool) -> None:
        close(self, complete)
        if rank == 1:
            raise OSError("no space is left")

    with mock.patch.object(PlannedPhase, "close", fail):
        said = refusal(lambda: run_phase(ep, trained))
    assert said == ("OSError: no space is left" if rank == 1 else "nothing")
    dist.barrier()
    expected = "a rank failed" if rank == 1 else "rank 1 failed: OSError: no space is left"
    assert expected in refusal(lambda: ep.plan(draw_routes(rank, 2, 4)))


@pytest.mark.parametrize("table", ["slot_expert", "slot_tokens"])
def test_plans_that_differ_between_ranks_are_rejected(rank: int, table: str) -> None:
    """One rank's plan differs in guests or in quotas."""
    ep, _, trained = begin()
    init = PlannedPhase.__init__

    def other(self: Any, *of: Any, **more: Any) -> None:
        init(self, *of, **more)
        if rank == 2:
            changed = getattr(self.plan, table).copy()
            changed[(0,) * changed.ndim] += 1
            self.plan = mock.Mock(wraps=self.plan, **{name: getattr(self.plan, name) for name in PLAIN})
            setattr(self.plan, table, changed)

    with mock.patch.object(PlannedPhase, "__init__", other):
        said = refusal(lambda: run_phase(ep, trained))
    assert ("entering a phase with guests " if table == "slot_expert" else "quotas of the plan: ") in said
    assert "on rank 2, " in said
