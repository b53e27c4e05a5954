"""Micro-steps with several forwards or without a backward produce the gradients of one eager process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import RANKS, gather
from refusals import refusal
from training import (
    TOP_K,
    begin,
    draw_batches,
    draw_routes,
    execute_eagerly,
    gradient_error,
    loss_of,
    make_model,
    reference,
    run_phase,
    spread,
)

from foremoe.hf import expert_layers

MICRO_STEPS = 3
SEED = 6
F64 = torch.float64
SKIPPED = {(0, 0), (1, 1), (3, 0)}  # (rank, micro-step) without a backward


def drawn(rank: int) -> tuple[list[Any], list[Any]]:
    return draw_batches(rank, MICRO_STEPS, SEED), draw_routes(rank, MICRO_STEPS, SEED)


def expected(skipped: set[tuple[int, int]]) -> dict[str, Any]:
    """Return the gradients of one eager process that omits the skipped batches."""
    kept = [[m for m in range(MICRO_STEPS) if (rank, m) not in skipped] for rank in range(RANKS)]
    of_all = [drawn(rank) for rank in range(RANKS)]
    batches = [[of[0][m] for m in own] for of, own in zip(of_all, kept, strict=True)]
    routes = [[of[1][m] for m in own] for of, own in zip(of_all, kept, strict=True)]
    return reference(F64, batches, routes)[1]


def eager_logits(batch: Any, routes: Any) -> Any:
    """Return the logits of one eager process that replays the routes."""
    model = make_model(F64)
    for i, layer in enumerate(expert_layers(model)):
        ids = routes[:, :, i].reshape(-1, TOP_K)
        layer.execute_by(lambda hidden, _, gates, layer=layer, ids=ids: execute_eagerly(layer, hidden, ids, gates))
        layer.replay(ids)
    with torch.no_grad():
        return model(batch).logits


def make(checkpoint: str, **options: Any) -> tuple[Any, Any, Any]:
    """Begin training. `checkpoint` selects how decoder layers are checkpointed; "" disables checkpoints."""
    ep, model, trained = begin(**options)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
        model.enable_input_require_grads()
        model.train()
    return ep, model, trained


@pytest.mark.parametrize("options", [
    {"residency": "resident"}, {"residency": "shared"}, {"path": "host", "ranks_per_node": 2},
])  # fmt: skip
@pytest.mark.parametrize(("look", "checkpoint"), [
    ("before", ""), ("before", "not reentrant"), ("after", "not reentrant"), ("before, after, late", ""),
    ("before, after", "reentrant"),
])  # fmt: skip
def test_forwards_without_gradients_replay_the_routes_and_change_no_gradient(
    rank: int, look: str, checkpoint: str, options: dict[str, Any]
) -> None:
    """`look` lists when these forwards run, relative to the forward with gradients."""
    batches, routes = drawn(rank)
    ep, model, trained = make(checkpoint, **options)
    with ep.plan(routes) as phase:
        for m, batch in enumerate(batches):

            def look_at(when: str, m: int = m, batch: Any = batch) -> None:
                if when in look:
                    with torch.no_grad():
                        found = model(batch, use_cache=False).logits[:, :-1]
                    own = eager_logits(batch, routes[m])[:, :-1]
                    assert float((found - own).abs().max() / own.abs().max()) <= 1e-12

            with phase.micro_step(m):
                look_at("before")
                loss = loss_of(trained, batch)
                look_at("after")
                loss.backward()
                look_at("late")
        phase.drain()
    assert gradient_error(ep, model, expected(set())) <= 1e-12
    assert sum(gather(phase.figures()["copies"])) > 0


@pytest.mark.parametrize("checkpoint", ["", "not reentrant"])
@pytest.mark.parametrize("residency", ["resident", "shared"])
def test_batches_without_a_backward_add_no_gradients(rank: int, residency: str, checkpoint: str) -> None:
    batches, routes = drawn(rank)
    ep, model, trained = make(checkpoint, residency=residency)
    with ep.plan(routes) as phase:
        for m, batch in enumerate(batches):
            with phase.micro_step(m):
                loss = loss_of(trained, batch)
                if (rank, m) not in SKIPPED:
                    loss.backward()
        phase.drain()
    assert gradient_error(ep, model, expected(SKIPPED)) <= 1e-12
    assert phase.figures()["skipped"] == sum(r == rank for r, _ in SKIPPED)


@pytest.mark.parametrize(("options", "words"), [
    ({"wrapper": "ddp"}, "micro-step 0 ended without its backward, but DistributedDataParallel and FSDP2 need it"),
    ({"checkpoint": "reentrant"}, "micro-step 0 ended without its backward, but its forward ran without gradients, or"),
])  # fmt: skip
def test_a_missing_backward_that_is_required_is_rejected_with_its_micro_step(
    rank: int, options: dict[str, Any], words: str
) -> None:
    ep, _, trained = make(**{"checkpoint": "", **options})
    said = refusal(lambda: run_phase(ep, trained, backward=lambda loss: None))
    assert words in said and "(0 * loss).backward()" in said


def test_missing_and_repeated_forwards_are_rejected_with_their_micro_step(rank: int) -> None:
    batches, routes = drawn(rank)
    ep, model, trained = begin()

    def none() -> None:
        with ep.plan(routes) as phase:
            for m in range(2):
                with phase.micro_step(m):
                    pass

    assert "model.layers.0.mlp: micro-step 0 ended without its forward" in refusal(none)
    ep, model, trained = begin()
    said = refusal(
        lambda: run_phase(ep, trained, 6, backward=lambda loss: (loss + loss_of(model, batches[0])).backward())
    )
    assert "its forward ran twice in one micro-step (0) with gradients" in said


def test_a_phase_left_after_its_first_micro_step_is_rejected(rank: int) -> None:
    ep, _, trained = begin()
    batches, routes = drawn(rank)

    def leave() -> None:
        with ep.plan(routes) as phase:
            with phase.micro_step(0):
                loss = loss_of(trained, batches[0])
            loss.backward()

    assert refusal(leave).startswith("RuntimeError: ")


def test_routes_may_be_arrays_or_packed_sequences(rank: int) -> None:
    _, routes = drawn(rank)
    ep = spread(make_model(F64))
    packed = [of.reshape(1, -1, *of.shape[2:]) for of in routes]
    arrays = [of.to(torch.int16).numpy() for of in routes]
    arrays[0].flags.writeable = False
    own, *others = (torch.from_numpy(ep.plan(of).routes.counts) for of in (routes, arrays, packed))
    assert all(own.equal(of) for of in others)
    longer = [of.clone() for of in packed]
    longer[1][:, 10] = -1
    assert "routes[1]: rows between rows with routes have none" in refusal(lambda: ep.plan(longer))
    lists = [of.tolist() for of in routes]
    assert "routes[0]: is a list; expected a tensor or an array" in refusal(lambda: ep.plan(lists))
    assert "routes: is one array" in refusal(lambda: ep.plan(arrays[0]))
