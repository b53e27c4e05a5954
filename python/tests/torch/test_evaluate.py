"""Ranks run different numbers of forwards without a plan."""

from __future__ import annotations

import contextlib

import pytest
import torch
from refusals import refusal
from training import begin, draw_batches, draw_routes, make_model, spread


def test_ranks_generate_completions_of_different_lengths(rank: int) -> None:
    """Rank 2 generates no completion. A planned phase follows."""
    whole, model = make_model(torch.float32), make_model(torch.float32)
    ep = spread(model)
    (prompt,) = draw_batches(rank, 1, 7)
    options = {"max_new_tokens": [2, 7, 0, 4][rank], "do_sample": False, "pad_token_id": 0}
    with ep.evaluate():
        completion = model.generate(prompt, **options) if rank != 2 else prompt
    assert torch.equal(completion, whole.generate(prompt, **options) if rank != 2 else prompt)
    with ep.evaluate():
        for _ in range(1 + rank % 2):
            with ep.unplanned():
                model(prompt)
    with ep.evaluate():
        assert not model(prompt).logits.requires_grad
    with torch.no_grad(), ep.plan(draw_routes(rank, 1, 7), phase="recompute") as phase, phase.micro_step(0):
        model(prompt)


def test_an_error_on_one_rank_stops_all_ranks(rank: int) -> None:
    ep, model, _ = begin(dtype=torch.float32)

    def raise_on_one_rank() -> None:
        with ep.evaluate():
            for i in range(3):
                model(draw_batches(rank, 1, 7)[0])
                if rank == 1 and i == 1:
                    raise KeyError("a bad batch")

    expected = "KeyError: 'a bad batch'" if rank == 1 else "RuntimeError: rank 1 failed inside evaluate()"
    assert refusal(raise_on_one_rank) == expected


def test_running_different_layers_at_the_same_time_is_rejected(rank: int) -> None:
    ep, model, _ = begin(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="MoE layer 0 on rank 2, MoE layer 1 on rank 3"), ep.evaluate():
        model.model.layers[1 if rank == 3 else 0].mlp(torch.zeros(1, 4, 32))


def test_evaluation_is_rejected_under_fsdp2_and_inside_a_phase(rank: int) -> None:
    ep, _, _ = begin("fsdp2", torch.float32)
    assert "FSDP2 gathers weights" in refusal(ep.evaluate().__enter__)
    ep, _, _ = begin(dtype=torch.float32)
    with contextlib.suppress(RuntimeError), ep.plan(draw_routes(rank, 1, 7), phase="recompute"):
        assert "a phase is running" in refusal(ep.evaluate().__enter__)
