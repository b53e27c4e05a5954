"""Compares Megatron-LM's flex dispatcher under a plan with its all-to-all dispatcher.

Uses Megatron-LM's own managers; gloo code replaces their kernels (megatron_flex_kernels.py).
"""

from __future__ import annotations

from typing import Any

import megatron_flex_kernels as kernels
import pytest
import torch
from megatron_flex_kernels import ROUTER
from megatron_training import (
    Case,
    batch,
    begin_groups,
    counts_of,
    differences,
    expect_equal,
    expect_planned_rows,
    make_config,
    make_net,
    replay,
    stale_guests,
    train,
    train_unplanned,
    under_a_plan,
)
from processes import gather
from refusals import input_error

import foremoe.megatron

OVERLAP = {"overlap_grad_reduce": True}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "EP 4": (Case(config=ROUTER), {}),
    "EP 2 × 2, overlap, recomputed, two guests": (
        Case(ep=2, ddp=OVERLAP, recompute="moe", config=ROUTER),
        {"guest_slots": 2},
    ),
    "EP 4, shared experts overlapped": (
        Case(config=ROUTER | {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True}),
        {},
    ),
}


class SharpenRouters:
    """Scales router weights so that some chosen experts get probability 0, and counts these."""

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


of_backends = pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])


@of_backends
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_the_all_to_all_dispatcher(rank: int, name: str, backend: str) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    kernels.expect(backend)
    case, options = CASES[name]
    if "overlapped" in name and "set_shared_experts" in vars(MoEFlexTokenDispatcher):
        pytest.skip("this megatron-core's flex dispatcher refuses overlapped shared experts")
    begin_groups(case.ep)
    found, metrics = under_a_plan(kernels.with_backend(case, backend), options)
    kernels.nccl_ep_finalize()
    expect_equal(found, train_unplanned(case))
    expect_planned_rows(metrics)


@of_backends
def test_a_chosen_expert_of_probability_zero_keeps_its_row(rank: int, backend: str) -> None:
    kernels.expect(backend)
    begin_groups(4)
    sharp = SharpenRouters()
    expected = train(Case(config=ROUTER), sharp)
    assert sharp.zeros > 20
    found, _ = under_a_plan(kernels.with_backend(Case(config=ROUTER), backend), {}, SharpenRouters())
    kernels.nccl_ep_finalize()
    expect_equal(found, expected)


def test_top_k_of_the_probabilities_would_lose_a_row_of_probability_zero() -> None:
    from foremoe.megatron.dispatch import chosen_slots

    routing_map = torch.tensor([[False, False, True, True], [True, False, False, True], [False, True, False, False]])
    probs = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]])
    weights, slots = chosen_slots(routing_map, probs, 2)
    assert slots[0].tolist() == [3, 2] and weights[0].tolist() == [1, 0]
    assert sorted(slots[1].tolist()) == [0, 3]
    assert slots[2].tolist() == [1, -1]
    own = torch.zeros_like(routing_map).scatter(1, torch.topk(probs, 2).indices, True)
    assert not torch.equal(own[:2], routing_map[:2])


def test_a_stale_guest_is_detected(rank: int) -> None:
    kernels.expect("deepep")
    begin_groups(4)
    with stale_guests():
        found, _ = under_a_plan(kernels.with_backend(Case(config=ROUTER), "deepep"), {})
    assert max(gather(differences(found, train_unplanned(Case(config=ROUTER)))["loss"])) > 1e-6


def test_the_nccl_ep_context_is_recreated_when_the_number_of_experts_changes(rank: int) -> None:
    """Runs the model before, in and after a step."""
    kernels.expect("ncclep")
    begin_groups(4)
    case = kernels.with_backend(Case(config=ROUTER), "ncclep", capacity=4.0)
    net = make_net(make_config(case))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    kernels.CONTEXTS.clear()
    kernels.nccl_ep_finalize()
    plan = replicas.plan(counts_of(0, rank)[:1], phase="recompute")

    def run() -> None:
        replay(net, 0, 0)
        with torch.no_grad():
            net(batch(0, 0))

    run()
    with replicas.step(plan):
        run()
    run()
    assert kernels.CONTEXTS == [8, 12, 8]
    kernels.nccl_ep_finalize()


def test_a_plan_that_exceeds_the_buffers_is_rejected(rank: int) -> None:
    """megatron-core 0.16 lacks moe_expert_rank_capacity_factor, so the test sets it."""
    kernels.expect("hybridep")
    begin_groups(4)
    net = make_net(make_config(kernels.with_backend(Case(config=ROUTER), "hybridep")))
    for layer in net.moe:
        layer.config.moe_expert_rank_capacity_factor = 0.99
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    plan = replicas.plan(counts_of(0, rank))
    words = "moe_expert_rank_capacity_factor: 0.99, but this plan has rows without room then; expected 1."
    assert input_error(lambda: replicas.step(plan).__enter__()).startswith(words)
