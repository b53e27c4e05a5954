"""Training under a plan gives the same loss and gradients as one eager process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import RANKS, gather
from refusals import refusal
from training import (
    begin,
    draw_batches,
    draw_routes,
    make_model,
    recompute,
    reference,
    run_phase,
    run_step,
    spread,
    whole_gradients,
)

F32, F64 = torch.float32, torch.float64
RESIDENCIES = ("static", "resident", "shared")
BALANCERS = ("feplb", "llep", "ultraep", "moonep")  # their plans are always `shared`
STEPS: dict[str, dict[str, Any]] = {
    "ddp": {"seed": 4, "wrapper": "ddp"},
    "no guests": {"guest_slots": 0, "path": "host"},
}
for residency in RESIDENCIES:
    STEPS[f"{residency}, float32"] = {"dtype": F32, "seed": 1, "residency": residency}
    STEPS[f"{residency}, auto"] = {"seed": 5, "residency": residency, "path": "auto"}
    for path in ("peer", "host"):
        key, of = f"{residency}, {path}", {"residency": residency, "path": path}
        STEPS[f"{key}, plain"] = of
        STEPS[f"{key}, checkpointing"] = {**of, "checkpointing": True}
        STEPS[f"{key}, two guests, uneven"] = {**of, "seed": 3, "uneven": True, "guest_slots": 2}
        if residency != "shared":
            STEPS[f"{key}, whole checkpoint"] = {**of, "checkpointing": "whole"}
for policy in BALANCERS:
    STEPS[policy] = {"seed": 6, "policy": policy}

copies: dict[str, tuple[int, int]] = {}  # per case, over all ranks: copies by either path, and by the host path


def copies_of(rank: int, case: str) -> tuple[int, int]:
    if case not in copies:
        result = run_step(rank, **{"dtype": F64, **STEPS[case]})
        assert result["fallbacks"] == 0
        found = gather((result["copies"], result["host_copies"]))
        copies[case] = sum(of for of, _ in found), sum(of for _, of in found)
    return copies[case]


@pytest.mark.parametrize("case", STEPS)
def test_losses_and_gradients_match_one_eager_process(rank: int, case: str) -> None:
    copied, from_host = copies_of(rank, case)
    if case not in BALANCERS:  # a balancer may plan no copies
        assert (copied > 0) == (case != "no guests"), "guests were there"
    if "auto" in case:
        assert (0 < from_host < copied) if "shared" in case else (0 <= from_host <= copied)
    else:
        assert from_host == (copied if "host" in case else 0), "by the path that was asked for"


def test_resident_guests_are_copied_less_often_and_not_again_for_recomputation(rank: int) -> None:
    static, resident, shared = (copies_of(rank, f"{of}, peer, plain")[0] for of in RESIDENCIES)
    assert static < resident < shared
    for of in ("static, peer", "static, host", "resident, peer", "resident, host"):
        assert copies_of(rank, f"{of}, plain") == copies_of(rank, f"{of}, checkpointing")


def error_of(grads: dict[str, Any], expected: dict[str, Any]) -> float:
    """Root of the sum of squared relative errors over all tensors."""
    total = 0.0
    for name, grad in grads.items():
        exact = expected[name].double()
        total += float(((grad.double() - exact).norm() / exact.norm().clamp(min=1e-30)) ** 2)
    return total**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errors_are_close_to_one_eager_process(rank: int, dtype: Any) -> None:
    """Compares errors relative to float64."""
    batches, routes = ([draw(r, 2, 9) for r in range(RANKS)] for draw in (draw_batches, draw_routes))
    _, exact = reference(F64, batches, routes, weights=dtype)
    try:
        _, eager = reference(dtype, batches, routes)
    except RuntimeError as error:
        pytest.skip(f"torch has no CPU kernel: {error}")
    ep, model, trained = begin(dtype=dtype, guest_slots=1, ranks_per_node=2)
    run_phase(ep, trained, 9)
    assert 0 < error_of(whole_gradients(ep, model), exact) <= 1.5 * error_of(eager, exact)


def step_an_optimizer(ep: Any) -> None:
    torch.optim.SGD(ep.expert_parameters(), lr=0.1).step()


@torch.no_grad()
def scale_by_hand(ep: Any) -> None:
    for weight in ep.expert_parameters():
        weight.mul_(0.9)


def replace(ep: Any) -> None:
    last = ep.layers[-1]
    last.set_weights({name: torch.nn.Parameter(0.9 * w.detach()) for name, w in last.weights().items()})


@pytest.mark.parametrize(("change", "words"), [
    (step_an_optimizer, "an optimizer of experts stepped"), (scale_by_hand, "the weights experts were changed"),
    (replace, "the weights experts were replaced"),
])  # fmt: skip
def test_weights_changed_in_a_phase_are_rejected_and_gradients_are_kept(
    rank: int, change: Callable[[Any], None], words: str
) -> None:
    """Weights that change inside a phase would make guests stale."""
    ep, _, trained = begin(dtype=F32, residency="shared")
    weights = ep.expert_parameters()
    gradients = [torch.ones_like(w) for w in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    said = refusal(lambda: run_phase(ep, trained, 5, between=lambda m: change(ep) if m else None))
    assert said == f"RuntimeError: {words} inside a phase, before drain()"
    assert all(w.grad is gradient for w, gradient in zip(weights, gradients, strict=True))


def test_a_checkpoint_of_several_layers_is_rejected_with_shared_residency(rank: int) -> None:
    """Layers share guest buffers in turn, so a recomputation of several layers would need them twice."""
    ep, model, _ = begin(dtype=F32, residency="shared")
    (batch,), routes = draw_batches(rank, 1, 5), draw_routes(rank, 1, 5)

    def run(ids: Any) -> Any:
        return model.model(ids, use_cache=False).last_hidden_state

    refused = pytest.raises(RuntimeError, match="a checkpoint may hold one MoE layer")
    with refused, ep.plan(routes) as phase, phase.micro_step(0):
        out = torch.utils.checkpoint.checkpoint(run, batch, use_reentrant=False)
        (out.sum() + 0 * model.model.embed_tokens.weight.sum()).backward()


@pytest.mark.parametrize("path", ["peer", "host"])
def test_a_forward_only_phase_gives_the_same_outputs(rank: int, path: str) -> None:
    worst, figures = recompute(rank, draw_routes, path=path)
    assert worst < 1e-12
    assert sum(gather(figures["copies"])) > 0


def test_evaluation_needs_no_plan(rank: int) -> None:
    """Without a phase every row is served at home, and the output equals that of the whole model."""
    whole, model = make_model(F32), make_model(F32)
    spread(model)
    (batch,) = draw_batches(rank, 1, 7)
    with torch.no_grad():
        expected = whole(batch).logits
        assert float((model(batch).logits - expected).abs().max() / expected.abs().max()) < 1e-5
