"""Megatron-LM's MoE layers with latent projections (moe_latent_size): rows and experts are narrower than the layer.

LatentLinear stands in for Transformer Engine's TELinear, which Megatron-LM requires for the projections.
"""

from __future__ import annotations

from typing import Any

import megatron_flex_kernels as kernels
import pytest
import torch
from megatron_training import (
    FFN,
    Case,
    begin_groups,
    expect_equal,
    expect_planned_rows,
    train_unplanned,
    under_a_plan,
)

LATENT = 12
CONFIG = {"moe_latent_size": LATENT}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "EP 4": (Case(config=CONFIG), {}),
    "EP 4, allgather, shared experts": (
        Case(dispatcher="allgather", config=CONFIG | {"moe_shared_expert_intermediate_size": 8}), {}
    ),
    "EP 2 × 2, overlap, layers recomputed, shared": (
        Case(ep=2, ddp={"overlap_grad_reduce": True}, recompute="moe", config=CONFIG), {"residency": "shared"}
    ),
}  # fmt: skip


class LatentLinear(torch.nn.Linear):
    """TELinear without bias, duplicated on all ranks."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x: Any) -> Any:
        return super().forward(x), None


def with_projections(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import moe_layer

    patch.setattr(moe_layer, "HAVE_TE", True)
    patch.setattr(moe_layer, "TELinear", LatentLinear, raising=False)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_megatrons_own_layers(rank: int, name: str) -> None:
    case, options = CASES[name]
    begin_groups(case.ep)
    with pytest.MonkeyPatch.context() as patch:
        with_projections(patch)
        found, metrics = under_a_plan(case, options)
        expect_equal(found, train_unplanned(case))
    expect_planned_rows(metrics)
    sizes = {tuple(of.shape) for name, of in found["weights"][0].items() if "local_experts" in name}
    assert sizes == {(2 * FFN, LATENT), (LATENT, FFN)}


def test_the_flex_dispatcher_matches_the_all_to_all_dispatcher(rank: int) -> None:
    kernels.expect("deepep")
    begin_groups(4)
    case = Case(config=CONFIG | kernels.ROUTER)
    with pytest.MonkeyPatch.context() as patch:
        with_projections(patch)
        expect_equal(under_a_plan(kernels.with_backend(case, "deepep"), {})[0], train_unplanned(case))
