"""Micro-steps with more than one forward, and with less than one backward: gradients are those of one eager process.

One start of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refusal
from training import (
    RANKS,
    TOP_K,
    draw_batches,
    draw_routes,
    execute_eagerly,
    loss_of,
    make_model,
    on_all_ranks,
    reference,
    spread,
    whole_gradients,
    worst_difference,
)

from foremoe.hf import expert_layers

MICRO_STEPS = 3
SEED = 6
F64 = torch.float64
SKIPPED = {(0, 0), (1, 1), (3, 0)}  # (rank, micro-step) without a backward


def drawn(rank: int) -> tuple[list[Any], list[Any]]:
    return draw_batches(rank, MICRO_STEPS, SEED), draw_routes(rank, MICRO_STEPS, SEED)


def expected(skipped: set[tuple[int, int]]) -> dict[str, Any]:
    """Gradients of one eager process that has no batch where one is skipped."""
    kept = [[m for m in range(MICRO_STEPS) if (rank, m) not in skipped] for rank in range(RANKS)]
    of_all = [drawn(rank) for rank in range(RANKS)]
    batches = [[of[0][m] for m in own] for of, own in zip(of_all, kept, strict=True)]
    routes = [[of[1][m] for m in own] for of, own in zip(of_all, kept, strict=True)]
    return reference(F64, batches, routes)[1]


def eager_logits(batch: Any, routes: Any) -> Any:
    """Of one eager process that replays the routes."""
    model = make_model(F64)
    for i, layer in enumerate(expert_layers(model)):
        ids = routes[:, :, i].reshape(-1, TOP_K)
        layer.execute_by(lambda hidden, _, gates, layer=layer, ids=ids: execute_eagerly(layer, hidden, ids, gates))
        layer.replay(ids)
    with torch.no_grad():
        return model(batch).logits


def run(
    rank: int,
    *,
    look: str = "",
    checkpoint: str = "",
    skips: bool = False,
    wrapper: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A phase of one rank. look: when forwards without gradients run beside the one that has them. checkpoint: how
    decoder layers are checkpointed."""
    batches, routes = drawn(rank)
    model = make_model(F64)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
        model.enable_input_require_grads()
        model.train()
    ep = spread(model, **options)
    trained = ep.wrap(model, wrapper)
    worst = 0.0
    with ep.plan(routes) as phase:
        for m, batch in enumerate(batches):

            def look_at(when: str, m: int = m, batch: Any = batch) -> None:
                nonlocal worst
                if when in look:
                    with torch.no_grad():
                        found = model(batch, use_cache=False).logits[:, :-1]
                    own = eager_logits(batch, routes[m])[:, :-1]
                    worst = max(worst, float((found - own).abs().max() / own.abs().max()))

            with phase.micro_step(m):
                look_at("before")
                loss = loss_of(trained, batch)
                look_at("after")
                if skips and (rank, m) in SKIPPED:
                    continue
                loss.backward()
                look_at("late")
        phase.drain()
    difference, whose = worst_difference(whole_gradients(ep, model), expected(SKIPPED if skips else set()))
    figures = phase.figures()
    ep.detach()
    return {
        "difference": difference, "whose": whose, "looked": worst, "copies": figures["copies"],
        "skipped": figures["skipped"],
    }  # fmt: skip


def leave_out(rank: int, *, forward: bool = True, wrapper: str | None = None, reentrant: bool = False) -> str:
    """What is said where all ranks leave out the backward of a micro-step, or its forward too."""
    batches, routes = drawn(rank)
    model = make_model(F64)
    if reentrant:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.train()
    ep = spread(model)
    trained = ep.wrap(model, wrapper)

    def left_out() -> None:
        with ep.plan(routes) as phase:
            with phase.micro_step(0):
                if forward:
                    loss_of(trained, batches[0])
            with phase.micro_step(1):
                pass

    return refusal(left_out)


LOOKS = {
    f"{residency}, {look}, {checkpoint or 'plain'}": {"residency": residency, "look": look, "checkpoint": checkpoint}
    for residency in ("resident", "shared")
    for look, checkpoint in (
        ("before", ""),
        ("before", "not reentrant"),
        ("after", "not reentrant"),
        ("before, after, late", ""),
        ("before, after", "reentrant"),
    )
}
SKIPS = {
    f"skips, {residency}, {checkpoint or 'plain'}": {"residency": residency, "skips": True, "checkpoint": checkpoint}
    for residency in ("resident", "shared")
    for checkpoint in ("", "not reentrant")
}


def twice_with_gradients(rank: int) -> str:
    batches, routes = drawn(rank)
    model = make_model(F64)
    ep = spread(model)
    ep.wrap(model)

    def both() -> None:
        with ep.plan(routes) as phase, phase.micro_step(0):
            (loss_of(model, batches[0]) + loss_of(model, batches[0])).backward()

    return refusal(both)


def backward_afterwards(rank: int) -> str:
    batches, routes = drawn(rank)
    model = make_model(F64)
    ep = spread(model)
    ep.wrap(model)

    def late() -> None:
        with ep.plan(routes) as phase:
            with phase.micro_step(0):
                loss = loss_of(model, batches[0])
            loss.backward()

    return refusal(late)


def other_forms(rank: int) -> dict[str, Any]:
    """Counts of the same routes in other forms."""
    _, routes = drawn(rank)
    ep = spread(make_model(F64))

    def counts(of: list[Any], **options: Any) -> Any:
        return torch.from_numpy(ep.plan(of, **options).routes.counts)

    packed = [of.reshape(1, -1, *of.shape[2:]) for of in routes]
    arrays = [of.to(torch.int16).numpy() for of in routes]
    arrays[0].flags.writeable = False
    longer = [of.clone() for of in packed]
    longer[1][:, 10] = -1
    own = counts(routes)
    return {
        "arrays": torch.equal(own, counts(arrays)),
        "packed": torch.equal(own, counts(packed)),
        "longer hole": refusal(lambda: ep.plan(longer)),
        "list": refusal(lambda: ep.plan([of.tolist() for of in routes])),
        "one array": refusal(lambda: ep.plan(arrays[0])),
    }


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {case: run(rank, **options) for case, options in {**LOOKS, **SKIPS}.items()}
    found["host path"] = run(rank, look="before, after", path="host", ranks_per_node=2)
    found["ddp"] = leave_out(rank, wrapper="ddp")
    found["no forward"] = leave_out(rank, forward=False)
    found["reentrant"] = leave_out(rank, reentrant=True)
    found["twice"] = twice_with_gradients(rank)
    found["late"] = backward_afterwards(rank)
    found["forms"] = other_forms(rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


@pytest.mark.parametrize("case", [*LOOKS, "host path"])
def test_forwards_without_gradients_replay_the_routes_and_change_no_gradient(
    found: list[dict[str, Any]], case: str
) -> None:
    for of in found:
        assert of[case]["difference"] <= 1e-12, of[case]
        assert of[case]["looked"] <= 1e-12, of[case]
    assert sum(of[case]["copies"] for of in found) > 0


@pytest.mark.parametrize("case", SKIPS)
def test_batches_without_a_backward_count_for_nothing(found: list[dict[str, Any]], case: str) -> None:
    for rank, of in enumerate(found):
        assert of[case]["difference"] <= 1e-12, of[case]
        assert of[case]["skipped"] == sum(r == rank for r, _ in SKIPPED)


def test_a_backward_that_cannot_be_left_out_names_the_micro_step(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "micro-step 0 ended without its backward, but DistributedDataParallel and FSDP2 need it" in of["ddp"]
        assert "micro-step 0 ended without its backward, but its forward ran without gradients, or" in of["reentrant"]
        assert all("(0 * loss).backward()" in of[case] for case in ("ddp", "reentrant"))
        assert "model.layers.0.mlp: micro-step 0 ended without its forward" in of["no forward"]
        assert "its forward ran twice in one micro-step (0) with gradients" in of["twice"]
        assert of["late"].startswith("RuntimeError: ")


def test_arrays_and_packed_sequences_are_routes(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["forms"]["arrays"] and of["forms"]["packed"]
        assert "routes[1]: rows between rows with routes have none" in of["forms"]["longer hole"]
        assert "routes[0]: is a list; expected a tensor or an array" in of["forms"]["list"]
        assert "routes: is one array" in of["forms"]["one array"]
