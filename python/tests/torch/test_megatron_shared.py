"""Megatron-LM's MoE layers under plans of residency shared: guests of all layers lie in the same few buffers.

One spawn of four processes runs all checks. What is expected is what Megatron-LM's own layers compute.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_training import (
    EXPERTS,
    FFN,
    HIDDEN,
    LAYERS,
    Case,
    begin_groups,
    count_waits,
    differences,
    expect_equal,
    forward_only,
    make_config,
    make_net,
    train_unplanned,
    under_a_plan,
)

import foremoe
import foremoe.megatron
from foremoe._engine import guests
from foremoe.megatron import experts
from foremoe.megatron import step as steps

SHARED = {"residency": "shared"}
OVERLAP = {"overlap_grad_reduce": True}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "EP 4": (Case(), SHARED),
    "EP 4, two guests, deep": (Case(), SHARED | {"guest_slots": 2, "depth": 3}),
    "EP 4, one buffer": (Case(), SHARED | {"depth": 1}),
    "EP 4, a policy of that residency": (Case(), {"policy": "feplb"}),
    "EP 2 × 2": (Case(ep=2, ddp={}), SHARED),
    "EP 2 × 2, overlap, layers recomputed": (Case(ep=2, ddp=OVERLAP, recompute="moe"), SHARED),
    "EP 2 × 2, sharded, overlap": (Case(ep=2, ddp=OVERLAP | {"use_distributed_optimizer": True}), SHARED),
}


def compare(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """With bytes: of weights and of sums of gradients in which guests are computed, in one step. And waiting: at most
    so many gradients have come home and are not added, when a layer's backward has ended."""
    held: dict[int, int] = {}
    waiting = [0]
    with pytest.MonkeyPatch.context() as patch:
        run = experts.GuestExperts.__call__

        def watched(self: Any, *args: Any) -> Any:
            for parameters in self._parameters.values():
                for of in (tensor for p in parameters for tensor in (p, p.main_grad) if tensor is not None):
                    held[of.untyped_storage().data_ptr()] = of.untyped_storage().nbytes()
            return run(self, *args)

        def forget(self: Any) -> None:
            held.clear()

        end = steps.MicroBatchRows.backward_ends

        def count(self: Any) -> Any:
            result = end(self)
            waiting.append(sum(map(len, self._step.engine.guests._home)))
            return result

        patch.setattr(steps.MicroBatchRows, "backward_ends", count)
        patch.setattr(experts.GuestExperts, "__call__", watched)
        patch.setattr(foremoe.megatron.Replicas, "_expect_usable", forget)  # a step begins
        found, metrics = under_a_plan(case, options)
    return differences(found, train_unplanned(case)) | {
        "metrics": metrics, "bytes": sum(held.values()), "waiting": max(waiting)
    }  # fmt: skip


def mutate() -> dict[str, float]:
    """What goes wrong where buffers are lent without care."""

    def broken(where: Any, name: str, by: Any) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, by)
            found = compare(*CASES["EP 4"])
            return float(max(found[what] for what in ("loss", "dx", "dw")))

    first: dict[Any, Any] = {}

    def stale(self: Any, expert: int) -> Any:
        return first.setdefault((id(self), expert), self.parameters[expert].detach().clone())

    def left(self: Any, layer: int, name: str, slot: int) -> Any:
        return self._gradients[layer, name][slot].clone()

    class Keeps(steps.KeptWeights):
        def pack(self, tensor: Any) -> Any:
            return tensor

    return {
        "a stale guest": broken(experts.Stack, "__getitem__", stale),
        "a backward reads the buffers of its forward": broken(steps, "KeptWeights", Keeps),
        "a slot serves another layer with its gradients": broken(guests.Guests, "_take_gradient", left),
    }


class Hides(torch.autograd.Function):
    """rows @ weight.T, whose weight autograd does not see."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.rows, ctx.weight = rows, weight
        return rows @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.weight, grads[0].T @ ctx.rows


def hidden() -> dict[str, Any]:
    """Experts that keep their weights where nobody sees it: what attach() says, and what else goes wrong."""
    from megatron.core.tensor_parallel import layers

    with pytest.MonkeyPatch.context() as patch:
        multiply = "linear_with_grad_accumulation_and_async_allreduce"
        patch.setattr(layers, multiply, lambda input, weight, **_: Hides.apply(input, weight))
        with pytest.raises(foremoe.InputError) as raised:
            foremoe.megatron.attach(make_net(make_config(Case())), ranks_per_node=2, **SHARED)
        patch.setattr(experts.GuestExperts, "try_lending", lambda _: None)
        found = compare(*CASES["EP 4"])
    return {"said": str(raised.value), "wrong": max(found[what] for what in ("dx", "dw"))}


def refused() -> list[str]:
    """Layers of other shapes, and a checkpoint of several layers."""
    found = []
    config = make_config(Case())
    net = make_net(config)
    net.moe[1] = make_net(make_config(Case(), moe_ffn_hidden_size=2 * FFN, ffn_hidden_size=2 * FFN), 1).moe[0]
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.megatron.attach(net, ranks_per_node=2, **SHARED)
    found.append(str(raised.value))
    try:
        under_a_plan(Case(recompute="all"), SHARED)
    except RuntimeError as error:
        found.append(str(error))
    return found


def checkpointed() -> dict[str, str]:
    """What attach() says of Megatron-LM's own blocks of four layers, by how they are recomputed."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

    found = {}
    sparse, dense = (
        get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False) for experts in (EXPERTS, None)
    )
    for name, method, layers, specs in (
        ("one by one", "uniform", 1, [sparse] * 4),
        ("some one by one", "block", 2, [sparse] * 4),
        ("by two", "uniform", 2, [dense, sparse, sparse, sparse]),
        ("by two of which one is dense", "uniform", 2, [dense, sparse, sparse, dense]),
    ):
        config = make_config(
            Case(), num_layers=4, recompute_granularity="full", recompute_method=method, recompute_num_layers=layers
        )
        block = TransformerBlock(config, TransformerBlockSubmodules(layer_specs=specs))
        try:
            foremoe.megatron.attach(block, ranks_per_node=2, **SHARED).detach()
            found[name] = "nothing"
        except foremoe.InputError as error:
            found[name] = str(error)
        foremoe.megatron.attach(block, ranks_per_node=2).detach()
    return found


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (case, options) in CASES.items():
        begin_groups(case.ep)
        found[name] = compare(case, options)
    begin_groups(4)
    found["resident"] = compare(Case(), {})
    found["waits"] = count_waits(True, **SHARED)
    found["forward only"] = forward_only(**SHARED)
    found["mutated"] = mutate()
    found["hidden"] = hidden()
    found["refused"] = refused()
    found["checkpointed"] = checkpointed()
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_megatrons_own_layers(found: list[dict[str, Any]], case: str) -> None:
    expect_equal(found, case)
    for of in found:
        metrics = of[case]["metrics"]
        assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"], rel=1e-12)
        assert metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
    assert sum(of[case]["metrics"]["foremoe/copies"] for of in found) > 0


def test_copies_are_fetched_at_every_use(found: list[dict[str, Any]]) -> None:
    copies = {case: sum(of[case]["metrics"]["foremoe/copies"] for of in found) for case in ("EP 4", "resident")}
    assert copies["EP 4"] > 2 * copies["resident"], copies


def test_guests_of_all_layers_have_the_memory_of_a_few_turns(found: list[dict[str, Any]]) -> None:
    of_one = 3 * HIDDEN * FFN * 8  # weights of an expert, and a sum of its gradients
    assert max(of["EP 4"]["bytes"] for of in found) == (2 + 1) * of_one
    assert max(of["EP 4, two guests, deep"]["bytes"] for of in found) == (3 + 1) * 2 * of_one
    assert max(of["EP 2 × 2"]["waiting"] for of in found) == 0 < max(of["EP 4"]["waiting"] for of in found)
    assert max(of["resident"]["bytes"] for of in found) == 2 * LAYERS * of_one


def test_a_planned_layer_exchanges_no_counts_and_waits_for_nothing(found: list[dict[str, Any]]) -> None:
    assert all(of["waits"] == {} for of in found)


def test_old_log_probabilities_are_computed_under_a_plan(found: list[dict[str, Any]]) -> None:
    assert all(of["forward only"]["worst"] <= 1e-12 for of in found)


def test_each_trap_is_seen(found: list[dict[str, Any]]) -> None:
    for trap in found[0]["mutated"]:
        assert max(of["mutated"][trap] for of in found) > 1e-6, (trap, [of["mutated"][trap] for of in found])


def test_experts_that_hide_their_weights_are_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["hidden"]["wrong"] > 1e-6
        assert of["hidden"]["said"].startswith(
            "residency: shared, but the experts of moe.0 read weights in the backward where they lay in the forward"
        )


def test_what_cannot_share_buffers_is_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        shapes, checkpoint = of["refused"]
        assert shapes.startswith("residency: shared, but experts of moe.1 are of other shapes or types than those of")
        assert "under residency shared a checkpoint may hold one MoE layer, not several" in checkpoint


def test_checkpoints_of_several_moe_layers_are_refused_when_that_is_configured(found: list[dict[str, Any]]) -> None:
    for of in found:
        several = (
            "recompute_num_layers: 2, so that a checkpoint holds several MoE layers; expected 1 under residency shared"
        )
        assert of["checkpointed"] == {
            "one by one": "nothing",
            "some one by one": "nothing",
            "by two": several,
            "by two of which one is dense": "nothing",
        }
