"""Megatron-LM's flex dispatcher under a plan, with its own managers and stand-ins for their kernels.

One spawn of four processes runs all checks. What is expected is what Megatron-LM's all-to-all dispatcher computes.
"""

from __future__ import annotations

from typing import Any

import megatron_flex_kernels as kernels
import pytest
import torch
import torch.distributed as dist
from megatron_flex_kernels import ROUTER
from megatron_training import (
    Case,
    begin_groups,
    counts_of,
    differences,
    expect_equal,
    make_config,
    make_net,
    train,
    under_a_plan,
)

import foremoe
import foremoe.megatron
from foremoe.megatron import experts

OVERLAP = {"overlap_grad_reduce": True}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "EP 4": (Case(config=ROUTER), {}),
    "EP 2 × 2, overlap, recomputed, two guests": (
        Case(ep=2, ddp=OVERLAP, recompute="moe", config=ROUTER),
        {"guest_slots": 2},
    ),
}


class Sharp:
    """Routers so sure that some of the chosen experts have probability 0."""

    def __init__(self) -> None:
        self.zeros = 0

    def __call__(self, model: Any) -> None:
        def count(module: Any, inputs: Any, output: Any) -> None:
            probs, routing_map = output
            self.zeros += int((probs[routing_map] == 0).sum())

        with torch.no_grad():
            for module in model.modules():
                if hasattr(module, "token_dispatcher"):
                    module.router.weight.mul_(2000)
                    module.router.register_forward_hook(count)


def work(rank: int) -> dict[str, Any]:
    kernels.apply()
    found: dict[str, Any] = {"backends": kernels.BACKENDS}
    for name, (case, options) in CASES.items():
        begin_groups(case.ep)
        expected = train(case)
        for backend in kernels.BACKENDS:
            of, metrics = under_a_plan(kernels.with_backend(case, backend), options)
            found[f"{name}, {backend}"] = differences(of, expected) | {"metrics": metrics}
            kernels.nccl_ep_finalize()
    begin_groups(4)
    sharp = Sharp()
    expected = train(Case(config=ROUTER), sharp)
    found["zeros"] = sharp.zeros
    for backend in kernels.BACKENDS:
        of, _ = under_a_plan(kernels.with_backend(Case(config=ROUTER), backend), {}, Sharp())
        found[f"zeros, {backend}"] = differences(of, expected)
    with pytest.MonkeyPatch.context() as patch:
        first: dict[Any, Any] = {}

        def stale(self: Any, expert: int) -> Any:
            return first.setdefault((id(self), expert), self.parameters[expert].detach().clone())

        patch.setattr(experts.Stack, "__getitem__", stale)
        expected = train(Case(config=ROUTER))
        of, _ = under_a_plan(kernels.with_backend(Case(config=ROUTER), "deepep"), {})
        found["a stale guest"] = differences(of, expected)["loss"]
    found["refused"] = refused()
    found["contexts"] = contexts() if "ncclep" in kernels.BACKENDS else None
    return found


def contexts() -> list[int]:
    """The numbers of experts for which NCCL-EP's contexts are made: before, in and after a step."""
    from megatron_training import batch, replay

    case = kernels.with_backend(Case(config=ROUTER), "ncclep", moe_expert_rank_capacity_factor=4.0)
    net = make_net(make_config(case))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    kernels.CONTEXTS.clear()
    kernels.nccl_ep_finalize()
    plan = replicas.plan(counts_of(0, dist.get_rank())[:1], phase="recompute")

    def run() -> None:
        replay(net, 0, 0)
        with torch.no_grad():
            net(batch(0, 0))

    run()
    with replicas.step(plan):
        run()
    run()
    return list(kernels.CONTEXTS)


def refused() -> str:
    """A plan for which the configured buffers are too small. 0.16 has no such field."""
    net = make_net(make_config(kernels.with_backend(Case(config=ROUTER), "hybridep")))
    for layer in net.moe:
        layer.config.moe_expert_rank_capacity_factor = 0.99
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    plan = replicas.plan(counts_of(0, dist.get_rank()))
    try:
        with replicas.step(plan):
            return "nothing"
    except foremoe.InputError as error:
        return f"{error.field}: {error}"


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_megatrons_all_to_all(
    found: list[dict[str, Any]], case: str, backend: str
) -> None:
    if backend not in found[0]["backends"]:
        pytest.skip("this megatron-core has no NCCL-EP")
    expect_equal(found, f"{case}, {backend}")
    for of in found:
        one = of[f"{case}, {backend}"]
        assert one["metrics"]["foremoe/rho_computed"] == pytest.approx(one["metrics"]["foremoe/rho_planned"], rel=1e-12)
        assert one["metrics"]["foremoe/rho_planned"] < one["metrics"]["foremoe/rho_vanilla"]


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])
def test_a_chosen_expert_of_probability_zero_keeps_its_row(found: list[dict[str, Any]], backend: str) -> None:
    assert all(of["zeros"] > 20 for of in found)
    if backend not in found[0]["backends"]:
        pytest.skip("this megatron-core has no NCCL-EP")
    for of in found:
        assert max(of[f"zeros, {backend}"].values()) <= 1e-12, of[f"zeros, {backend}"]


def test_the_largest_probabilities_alone_would_lose_it() -> None:
    from foremoe.megatron.dispatch import chosen_slots

    routing_map = torch.tensor([[False, False, True, True], [True, False, False, True], [False, True, False, False]])
    probs = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]])
    weights, slots = chosen_slots(routing_map, probs, 2)
    assert slots[0].tolist() == [3, 2] and weights[0].tolist() == [1, 0]
    assert sorted(slots[1].tolist()) == [0, 3]
    assert slots[2].tolist() == [1, -1]
    own = torch.zeros_like(routing_map).scatter(1, torch.topk(probs, 2).indices, True)
    assert not torch.equal(own[:2], routing_map[:2])


def test_a_stale_guest_is_seen(found: list[dict[str, Any]]) -> None:
    assert max(of["a stale guest"] for of in found) > 1e-6


def test_nccls_context_is_made_anew_where_the_number_of_experts_changes(found: list[dict[str, Any]]) -> None:
    if found[0]["contexts"] is None:
        pytest.skip("this megatron-core has no NCCL-EP")
    assert all(of["contexts"] == [8, 12, 8] for of in found)


def test_a_plan_that_needs_larger_buffers_is_refused(found: list[dict[str, Any]]) -> None:
    field = "moe_expert_rank_capacity_factor"
    for of in found:
        words = f"{field}: {field}: 0.99, with which rows of this plan have no room; expected 1."
        assert of["refused"].startswith(words), of["refused"]
