"""Megatron-LM's MoE layers under plans with residency shared, in which guests of all layers share a few buffers.

The expected results come from Megatron-LM's own layers.
"""

from __future__ import annotations

import functools
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
    differences,
    expect_equal,
    expect_no_waits,
    expect_planned_forwards,
    expect_planned_rows,
    make_config,
    make_net,
    stale_guests,
    train_unplanned,
    under_a_plan,
)
from processes import DEVICE, gather
from refusals import input_error

import foremoe
import foremoe.megatron
from foremoe._engine.session import Session
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
    "resident": (Case(), {}),
}


@functools.cache
def compare(case: str) -> tuple[dict[str, Any], dict[str, float], int, int]:
    """Return the result of train(), metrics, the bytes of the guests' weight and gradient buffers in one step, and the
    largest number of gradients that have arrived at home but are not yet added when a layer's backward ends."""
    of_case, options = CASES[case]
    begin_groups(of_case.ep)
    held: dict[int, int] = {}
    waiting = [0]
    with pytest.MonkeyPatch.context() as patch:
        run = experts.GuestExperts.__call__

        def watched(self: Any, *args: Any) -> Any:
            for parameters in self._parameters.values():
                for of in (tensor for p in parameters for tensor in (p, p.main_grad) if tensor is not None):
                    held[of.untyped_storage().data_ptr()] = of.untyped_storage().nbytes()
            return run(self, *args)

        end = steps.MicroBatchRows.backward_ends

        def count(self: Any) -> Any:
            result = end(self)
            waiting.append(sum(map(len, self._step.engine.guests._home)))
            return result

        patch.setattr(steps.MicroBatchRows, "backward_ends", count)
        patch.setattr(experts.GuestExperts, "__call__", watched)
        begins = Session.watch
        patch.setattr(Session, "watch", lambda session: (held.clear(), begins(session)))
        found, metrics = under_a_plan(of_case, options)
    return found, metrics, sum(held.values()), max(waiting)


def spoilt() -> dict[str, float]:
    """Returns differences(), of a run with the faults that are injected now."""
    return differences(compare.__wrapped__("EP 4")[0], train_unplanned(CASES["EP 4"][0]))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_megatrons_own_layers(rank: int, case: str) -> None:
    found, metrics, _, _ = compare(case)
    expect_equal(found, train_unplanned(CASES[case][0]))
    expect_planned_rows(metrics)
    assert sum(gather(metrics["foremoe/copies"])) > 0


def test_guests_are_copied_again_for_every_use(rank: int) -> None:
    of_shared, of_resident = (sum(gather(compare(case)[1]["foremoe/copies"])) for case in ("EP 4", "resident"))
    assert of_shared > 2 * of_resident


def test_guests_of_all_layers_share_the_buffers_of_a_few_turns(rank: int) -> None:
    of_one = 3 * HIDDEN * FFN * 8  # weights of an expert, or a sum of its gradients
    for case, held in (("EP 4", 2 + 1), ("EP 4, two guests, deep", (3 + 1) * 2), ("resident", 2 * LAYERS)):
        assert max(gather(compare(case)[2])) == held * of_one
    assert max(gather(compare("EP 2 × 2")[3])) == 0 < max(gather(compare("EP 4")[3]))


def test_a_planned_layer_exchanges_no_counts_and_never_waits(rank: int) -> None:
    expect_no_waits(**SHARED)


def test_old_log_probabilities_are_unchanged_under_a_plan(rank: int) -> None:
    expect_planned_forwards(**SHARED)


def take_without_clearing(self: Any, layer: int, name: str, slot: int) -> Any:
    return self._gradients[layer, name][slot].clone()


class KeepForwardBuffers(steps.KeptWeights):
    def pack(self, tensor: Any) -> Any:
        return tensor


@pytest.mark.parametrize(("name", "by"), [
    ("foremoe.megatron.step.KeptWeights", KeepForwardBuffers),  # a backward reads its forward's buffers
    ("foremoe._engine.guests.Guests._take_gradient", take_without_clearing),  # the next layer adds to them
])  # fmt: skip
def test_faults_in_buffer_sharing_change_the_results(rank: int, name: str, by: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, by)
        assert max(gather(max(spoilt().values()))) > 1e-6


def test_a_stale_guest_is_detected(rank: int) -> None:
    with stale_guests():
        assert max(gather(max(spoilt().values()))) > 1e-6


class Hides(torch.autograd.Function):
    """rows @ weight.T, with the weight hidden from autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.rows, ctx.weight = rows, weight
        return rows @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.weight, grads[0].T @ ctx.rows


def test_experts_that_hide_their_weights_are_rejected_and_would_get_wrong_gradients(rank: int) -> None:
    from megatron.core.tensor_parallel import layers

    begin_groups(4)
    with pytest.MonkeyPatch.context() as patch:
        multiply = "linear_with_grad_accumulation_and_async_allreduce"
        patch.setattr(layers, multiply, lambda input, weight, **_: Hides.apply(input, weight))
        words = (
            "residency: shared, but in the backward the experts of moe\\.0 read weights at the addresses of the forward"
        )
        with pytest.raises(foremoe.InputError, match=words):
            foremoe.megatron.attach(make_net(make_config(Case())), ranks_per_node=2, **SHARED)
        patch.setattr(experts.GuestExperts, "try_lending", lambda _: None)
        worst = spoilt()
    assert max(worst["dx"], worst["dw"]) > 1e-6


def test_layers_of_different_shapes_cannot_share_buffers(rank: int) -> None:
    begin_groups(4)
    net = make_net(make_config(Case()))
    net.moe[1] = make_net(make_config(Case(), moe_ffn_hidden_size=2 * FFN, ffn_hidden_size=2 * FFN), 1).moe[0]
    with pytest.raises(
        foremoe.InputError, match=r"residency: shared, but experts of moe\.1 are of other shapes or types"
    ):
        foremoe.megatron.attach(net, ranks_per_node=2, **SHARED)


def test_a_checkpoint_of_all_layers_cannot_share_buffers(rank: int) -> None:
    begin_groups(4)
    with pytest.raises(RuntimeError, match="under residency shared a checkpoint may hold one MoE layer, not several"):
        under_a_plan(Case(recompute="all"), SHARED)


@pytest.mark.parametrize(("method", "layers", "sparse", "refused"), [
    ("uniform", 1, [True] * 4, False), ("block", 2, [True] * 4, False), ("uniform", 2, [False, True, True, True], True),
    ("uniform", 2, [False, True, True, False], False),
])  # fmt: skip
def test_attach_rejects_configured_checkpoints_of_several_moe_layers(
    rank: int, method: str, layers: int, sparse: list[bool], refused: bool
) -> None:
    """Uses Megatron-LM's own TransformerBlock with four layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

    begin_groups(4)
    specs = [get_gpt_layer_local_spec(num_experts=EXPERTS if of else None, moe_grouped_gemm=False) for of in sparse]
    config = make_config(
        Case(), num_layers=4, recompute_granularity="full", recompute_method=method, recompute_num_layers=layers
    )
    block = TransformerBlock(config, TransformerBlockSubmodules(layer_specs=specs)).to(DEVICE)
    several = "a checkpoint holds several MoE layers; expected 1 under residency shared"
    words = f"recompute_num_layers: 2, so that {several}" if refused else "nothing"
    assert input_error(lambda: foremoe.megatron.attach(block, ranks_per_node=2, **SHARED).detach()) == words
    foremoe.megatron.attach(block, ranks_per_node=2).detach()
