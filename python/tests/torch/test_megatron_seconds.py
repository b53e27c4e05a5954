"""Step times that shadow mode models."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_training import EXPERTS, FFN, HIDDEN, TOP_K, Case, make_config

import foremoe
from foremoe import _core
from foremoe.megatron.seconds import Modelled, shape_of


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("dispatcher", "dispatch"), [("alltoall", "row"), ("flex", "token")])
def test_modelled_seconds_match_a_simulated_policy_update_without_planning_again(
    monkeypatch: pytest.MonkeyPatch, in_flight: int, dispatcher: str, dispatch: str
) -> None:
    config = make_config(Case())
    config.moe_token_dispatcher_type = dispatcher
    load = foremoe.synthesize_load(layers=2, experts=EXPERTS, top_k=TOP_K, micro_steps=4, ranks=4, tokens_per_rank=64)
    plan = foremoe.plan(load, guest_slots=2, in_flight=in_flight)
    step = foremoe.evaluate_plan(
        plan, load, recompute_plan=foremoe.plan(load, "vanilla") if in_flight > 1 else None,
        cluster="h100", model=shape_of(config, load.num_layers), bytes_per_parameter=8, keep_activations=True,
        path="peer", prefetch_depth=3, dispatch=dispatch,
    )  # fmt: skip

    planned = []
    for name in ("_plan", "_start_plan", "_evaluate"):
        own = getattr(_core, name)

        def counting(*given: Any, name: str = name, own: Any = own, **more: Any) -> Any:
            planned.append(name)
            return own(*given, **more)

        monkeypatch.setattr(_core, name, counting)
    seconds = Modelled("h100", None, config, depth=3, threads=1).seconds(plan, load)
    assert planned == []
    assert seconds == step.figures["phases"][1]["seconds"]
    foremoe.start_plan(load, "vanilla").finish()
    assert planned == ["_start_plan"]


def test_experts_behind_latent_projections_are_modelled_with_their_width() -> None:
    """A shared expert has the layer's width, so it counts as several routed experts."""
    config = make_config(Case(config={"moe_latent_size": HIDDEN // 4, "moe_shared_expert_intermediate_size": FFN}))
    shape = shape_of(config, 1)
    assert (shape["hidden"], shape["intermediate"], shape["shared_experts"]) == (HIDDEN // 4, FFN, 4)
