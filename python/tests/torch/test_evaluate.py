"""Forwards without a plan, of which ranks run different numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refusal
from training import draw_batches, draw_routes, make_model, on_all_ranks, spread


def generate(rank: int) -> dict[str, Any]:
    """Completions of different lengths; rank 2 generates none. Then a phase."""
    whole, model = make_model(torch.float32), make_model(torch.float32)
    ep = spread(model)
    (prompt,) = draw_batches(rank, 1, 7)
    options = {"max_new_tokens": [2, 7, 0, 4][rank], "do_sample": False, "pad_token_id": 0}
    with ep.evaluate():
        completion = model.generate(prompt, **options) if rank != 2 else prompt
    expected = whole.generate(prompt, **options) if rank != 2 else prompt
    found: dict[str, Any] = {"same": torch.equal(completion, expected), "gradients": True}
    with ep.evaluate():
        for _ in range(1 + rank % 2):
            with ep.unplanned():
                model(prompt)
    with ep.evaluate():
        found["gradients"] = model(prompt).logits.requires_grad
    with torch.no_grad(), ep.plan(draw_routes(rank, 1, 7), phase="recompute") as phase, phase.micro_step(0):
        model(prompt)
    return found


def fail(rank: int) -> dict[str, str]:
    model = make_model(torch.float32)
    ep = spread(model)
    (batch,) = draw_batches(rank, 1, 7)

    def raise_on_one_rank() -> None:
        with ep.evaluate():
            for i in range(3):
                model(batch)
                if rank == 1 and i == 1:
                    raise KeyError("a bad batch")

    def run_another_layer() -> None:
        with ep.evaluate():
            hidden = torch.zeros(4, 32)
            model.model.layers[1 if rank == 3 else 0].mlp(hidden.view(1, 4, 32))

    def enter_in_a_phase() -> None:
        with ep.plan(draw_routes(rank, 1, 7), phase="recompute"), ep.evaluate():
            pass

    sharded = make_model(torch.float32)
    of_sharded = spread(sharded)
    of_sharded.wrap(sharded, "fsdp2")
    return {
        "raised": refusal(raise_on_one_rank),
        "layers": refusal(run_another_layer),
        "fsdp2": refusal(of_sharded.evaluate().__enter__),
        "phase": refusal(enter_in_a_phase),
    }


def work(rank: int) -> dict[str, Any]:
    return {"generated": generate(rank), "failed": fail(rank)}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_ranks_generate_completions_of_different_lengths(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["generated"] == {"same": True, "gradients": False}


def test_what_one_rank_raises_ends_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        expected = "KeyError: 'a bad batch'" if rank == 1 else "RuntimeError: rank 1 failed inside evaluate()"
        assert of["failed"]["raised"] == expected


def test_different_layers_at_the_same_time_are_refused_by_all_ranks(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "MoE layer 0 on rank 2, MoE layer 1 on rank 3" in of["failed"]["layers"]


def test_evaluation_is_refused_where_it_cannot_run(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "FSDP2 gathers weights" in of["failed"]["fsdp2"]
        assert "inside a phase" in of["failed"]["phase"]
