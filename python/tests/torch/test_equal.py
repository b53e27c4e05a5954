"""Training under a plan is training: loss and every gradient are those of one eager process.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from training import (
    RANKS,
    assert_equal_to_eager,
    draw_batches,
    draw_routes,
    loss_of,
    make_model,
    on_all_ranks,
    reference,
    run_step,
    spread,
    steps_of,
    whole_gradients,
)


def error_of(grads: dict[str, Any], expected: dict[str, Any]) -> float:
    """Over all tensors, each relative to its own size."""
    total = 0.0
    for name, grad in grads.items():
        exact = expected[name].double()
        total += float(((grad.double() - exact).norm() / exact.norm().clamp(min=1e-30)) ** 2)
    return total**0.5


def compare_rounding(rank: int, dtype: Any) -> dict[str, Any]:
    """Errors against float64 of training under a plan, and of one eager process, both in this type."""
    batches = [draw_batches(r, 2, 9) for r in range(RANKS)]
    routes = [draw_routes(r, 2, 9) for r in range(RANKS)]
    _, exact = reference(torch.float64, batches, routes, weights=dtype)
    try:
        _, eager = reference(dtype, batches, routes)
    except RuntimeError as error:
        return {"skipped": f"torch has no CPU kernel: {error}"}
    model = make_model(dtype)
    ep = spread(model, guest_slots=1, ranks_per_node=2)
    ep.wrap(model)
    with ep.plan(routes[rank]) as phase:
        for m in phase.micro_steps:
            with phase.micro_step(m):
                loss_of(model, batches[rank][m]).backward()
        phase.drain()
    return {"planned": error_of(whole_gradients(ep, model), exact), "eager": error_of(eager, exact)}


def change_weights_inside(rank: int, change: Callable[[Any], None]) -> str:
    """Weights that change inside a phase make guests stale: that is refused on every rank alike."""
    model = make_model(torch.float32)
    ep = spread(model, residency="shared")
    weights = ep.expert_parameters()
    grads = [torch.ones_like(w) for w in weights]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    batches, routes = draw_batches(rank, 2, 5), draw_routes(rank, 2, 5)
    try:
        with ep.plan(routes) as phase:
            for m, batch in enumerate(batches):
                with phase.micro_step(m):
                    loss_of(model, batch).backward()
                change(ep)
    except RuntimeError as error:
        back = all(w.grad is g for w, g in zip(weights, grads, strict=True))
        return f"{error}; gradients {'as before' if back else 'changed'}"
    return "nothing"


def step_an_optimizer(ep: Any) -> None:
    torch.optim.SGD(ep.expert_parameters(), lr=0.1).step()


@torch.no_grad()
def scale_by_hand(ep: Any) -> None:
    for weight in ep.expert_parameters():
        weight.mul_(0.9)


def replace(ep: Any) -> None:
    last = ep.layers[-1]
    last.set_weights({name: torch.nn.Parameter(0.9 * w.detach()) for name, w in last.weights().items()})


def checkpoint_all_layers(rank: int) -> str:
    """Under `shared` the buffers of one layer are lent to the next: a checkpoint of several is refused."""
    model = make_model(torch.float32)
    ep = spread(model, residency="shared")
    (batch,), routes = draw_batches(rank, 1, 5), draw_routes(rank, 1, 5)
    run = model.model

    def whole(ids: Any) -> Any:
        return run(ids, use_cache=False).last_hidden_state

    embedded = run.embed_tokens.weight
    try:
        with ep.plan(routes) as phase, phase.micro_step(0):
            out = torch.utils.checkpoint.checkpoint(whole, batch, use_reentrant=False)
            (out.sum() + 0 * embedded.sum()).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def evaluate(rank: int) -> float:
    """Without a phase every row runs at its home: the output is that of the whole model."""
    whole, model = make_model(torch.float32), make_model(torch.float32)
    spread(model)
    (batch,) = draw_batches(rank, 1, 7)
    with torch.no_grad():
        expected = whole(batch).logits
        return float((model(batch).logits - expected).abs().max() / expected.abs().max())


def recompute(rank: int, path: str) -> tuple[float, int]:
    """Forwards alone under a plan against those with every row at its home, and the copies. The last token has no
    route."""
    model = make_model(torch.float64)
    ep = spread(model, path=path, ranks_per_node=2)
    batches, routes = draw_batches(rank, 3, 8), draw_routes(rank, 3, 8)
    worst = 0.0
    with torch.no_grad(), ep.plan(routes, phase="recompute") as phase:
        for m, batch in enumerate(batches):
            with phase.micro_step(m):
                with ep.unplanned():
                    expected = model(batch).logits[:, :-1]
                found = model(batch).logits[:, :-1]
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst, phase.figures()["copies"]


RESIDENCIES = ("static", "resident", "shared")
BALANCERS = ("feplb", "llep", "ultraep", "moonep")  # whose plans are `shared`, whatever is asked for


def work(rank: int) -> dict[str, Any]:
    f64 = torch.float64
    found: dict[str, Any] = {}
    for residency in RESIDENCIES:
        for path in ("peer", "host"):
            key, options = f"{residency}, {path}", {"residency": residency, "path": path}
            found[f"float64, {key}, plain"] = run_step(rank, f64, **options)
            found[f"float64, {key}, checkpointing"] = run_step(rank, f64, checkpointing=True, **options)
            found[f"float64, {key}, two guests, uneven"] = run_step(
                rank, f64, seed=3, uneven=True, guest_slots=2, **options
            )
            if residency != "shared":
                found[f"float64, {key}, whole checkpoint"] = run_step(rank, f64, checkpointing="whole", **options)
        found[f"float32, {residency}, peer"] = run_step(rank, torch.float32, seed=1, residency=residency, path="peer")
        found[f"float64, {residency}, auto"] = run_step(rank, f64, seed=5, residency=residency, path="auto")
    found["float64, resident, peer, ddp"] = run_step(rank, f64, seed=4, wrapper="ddp")
    for policy in BALANCERS:
        found[f"float64, {policy}"] = run_step(rank, f64, seed=6, policy=policy)
    found["float64, no guests"] = run_step(rank, f64, guest_slots=0, path="host")
    for name in ("bfloat16", "float16"):
        found[f"rounding, {name}"] = compare_rounding(rank, getattr(torch, name))
    found["stepped"] = change_weights_inside(rank, step_an_optimizer)
    found["scaled"] = change_weights_inside(rank, scale_by_hand)
    found["replaced"] = change_weights_inside(rank, replace)
    found["evaluation"] = evaluate(rank)
    found["recompute"] = {path: recompute(rank, path) for path in ("peer", "host")}
    found["several layers"] = checkpoint_all_layers(rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_losses_and_gradients_are_those_of_one_eager_process(found: list[dict[str, Any]]) -> None:
    assert_equal_to_eager(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_types_round_no_worse_than_one_eager_process(found: list[dict[str, Any]], dtype: str) -> None:
    case = f"rounding, {dtype}"
    if "skipped" in found[0][case]:
        pytest.skip(f"{dtype}: {found[0][case]['skipped']}")
    for of in found:
        assert 0 < of[case]["planned"] <= 1.5 * of[case]["eager"], of[case]


def copies_of(found: list[dict[str, Any]], case: str) -> tuple[int, int]:
    """Into all ranks: by either path, and by the host path."""
    return sum(of[case]["copies"] for of in found), sum(of[case]["host_copies"] for of in found)


def test_guests_were_there(found: list[dict[str, Any]]) -> None:
    for case in steps_of(found[0]):
        if any(policy in case for policy in BALANCERS):
            continue  # they may have found nothing to copy
        copies, _ = copies_of(found, case)
        assert (copies > 0) == ("no guests" not in case), case
    static, resident, shared = (copies_of(found, f"float64, {r}, peer, plain")[0] for r in RESIDENCIES)
    assert static < resident < shared


def test_copies_came_by_the_path_that_was_asked_for(found: list[dict[str, Any]]) -> None:
    for case in steps_of(found[0]):
        copies, from_host = copies_of(found, case)
        if "auto" in case:
            assert 0 <= from_host <= copies, case
        else:
            assert from_host == (copies if "host" in case else 0), case
    copies, from_host = copies_of(found, "float64, shared, auto")
    assert 0 < from_host < copies
    assert all(result["fallbacks"] == 0 for of in found for result in steps_of(of).values())


def test_recomputation_fetches_nothing_where_guests_stay(found: list[dict[str, Any]]) -> None:
    for path in ("peer", "host"):
        for residency in ("static", "resident"):
            plain, again = (found[0][f"float64, {residency}, {path}, {c}"] for c in ("plain", "checkpointing"))
            assert plain["copies"] == again["copies"]


def test_stale_weights_are_refused_and_gradients_stay(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["stepped"] == "an optimizer of experts stepped inside a phase, before drain(); gradients as before"
        assert of["scaled"] == "the weights experts were changed inside a phase, before drain(); gradients as before"
        assert of["replaced"] == "the weights experts were replaced inside a phase, before drain(); gradients as before"


def test_a_checkpoint_of_several_layers_is_refused_under_shared(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "a checkpoint may hold one MoE layer" in of["several layers"]


@pytest.mark.parametrize("path", ["peer", "host"])
def test_a_phase_of_forwards_alone_gives_the_same_outputs(found: list[dict[str, Any]], path: str) -> None:
    for of in found:
        worst, _ = of["recompute"][path]
        assert worst < 1e-12
    assert sum(of["recompute"][path][1] for of in found) > 0


def test_evaluation_needs_no_plan(found: list[dict[str, Any]]) -> None:
    assert max(of["evaluation"] for of in found) < 1e-5
