"""Compares models with adapters (LoRA) under a plan with the same models without one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron_lora import adapt_experts, adapt_outside
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
    train_unplanned,
    under_a_plan,
)
from processes import gather
from refusals import input_error

import foremoe.megatron
from foremoe._engine.guests import Guests
from foremoe.megatron import lora

GROUPED = {"moe_grouped_gemm": True}
OVERLAP = {"overlap_grad_reduce": True}
ALIKE = functools.partial(adapt_experts, alike=True)
OUTSIDE = {
    "EP 4": (Case(adapt=adapt_outside), {}),
    "EP 4, TEGroupedMLP": (Case(config=GROUPED, adapt=adapt_outside), {}),
    "EP 4, shared": (Case(adapt=adapt_outside), {"residency": "shared"}),
    "EP 2 × 2, overlap": (Case(ep=2, ddp=OVERLAP, adapt=adapt_outside), {}),
}
ON_EXPERTS = {
    f"{kind}, {name}": (Case(config=config, adapt=adapt_experts, **case), options)
    for kind, config in (("SequentialMLP", {}), ("TEGroupedMLP", GROUPED))
    for name, case, options in (
        ("EP 4", {}, {"guest_slots": 2}),
        ("EP 4, shared", {}, {"residency": "shared"}),
        ("EP 4, allgather", {"dispatcher": "allgather"}, {}),
        ("EP 4, recomputed", {"recompute": "moe"}, {}),
        ("EP 2 × 2, overlap", {"ep": 2, "ddp": OVERLAP}, {}),
        ("EP 2 × 2, overlap, shared", {"ep": 2, "ddp": OVERLAP}, {"residency": "shared"}),
        ("EP 2 × 2, sharded", {"ep": 2, "ddp": {"use_distributed_optimizer": True} | OVERLAP}, {}),
    )
} | {
    f"TEGroupedMLP, one adapter for all ranks, {name}": (Case(config=GROUPED, adapt=ALIKE, **case), options)
    for name, case, options in (
        ("EP 4", {}, {}),
        ("EP 2 × 2, overlap", {"ep": 2, "ddp": OVERLAP}, {}),
        ("EP 2 × 2, overlap, shared", {"ep": 2, "ddp": OVERLAP}, {"residency": "shared"}),
    )
}  # fmt: skip


@contextlib.contextmanager
def gradients_sent() -> Iterator[set[str]]:
    """Collects names of weights whose gradients this rank's guests send home."""
    names: set[str] = set()
    own = Guests._take_gradient

    def watched(self: Any, layer: int, name: str, slot: int) -> Any:
        names.add(name)
        return own(self, layer, name, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guests, "_take_gradient", watched)
        yield names


@pytest.mark.parametrize("name", OUTSIDE)
def test_adapters_outside_the_experts_change_nothing_and_send_no_gradient(rank: int, name: str) -> None:
    case, options = OUTSIDE[name]
    begin_groups(case.ep)
    with gradients_sent() as sent:
        found, metrics = under_a_plan(case, options)
    expect_equal(found, train_unplanned(case))
    expect_planned_rows(metrics)
    assert sum(gather(metrics["foremoe/copies"])) > 0
    assert sent == set()


def test_routes_of_a_router_with_an_adapter_are_checked(rank: int) -> None:
    begin_groups(4)
    net = make_net(make_config(Case()))
    adapt_outside(net)
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    replay(net, 0, 0)
    net.moe[1].router.to_wrap.router_replay.clear_router_replay_action()
    plan = replicas.plan(counts_of(0, rank, micro_steps=1), phase="recompute")
    words = r"moe\.1: its RouterReplay has no router_replay_action"
    with pytest.raises(RuntimeError, match=words), torch.no_grad(), replicas.step(plan):
        net(batch(0, 0))


@pytest.mark.parametrize("name", ON_EXPERTS)
def test_guests_compute_with_the_adapter_of_their_home_and_its_gradient_goes_home(rank: int, name: str) -> None:
    case, options = ON_EXPERTS[name]
    begin_groups(case.ep)
    with gradients_sent() as sent:
        found, metrics = under_a_plan(case, options)
    expect_equal(found, train_unplanned(case))
    expect_planned_rows(metrics)
    assert set().union(*gather(sent)) == {
        f"linear_fc{i}.adapter.linear_{of}.weight" for i in (1, 2) for of in ("in", "out")
    }


@pytest.mark.parametrize("config", [{}, GROUPED])
def test_adapters_and_weights_of_experts_train_together(rank: int, config: dict[str, Any]) -> None:
    def adapt(net: Any) -> None:
        adapt_experts(net)
        net.requires_grad_(True)

    case = Case(ep=2, ddp=OVERLAP, config=config, adapt=adapt)
    begin_groups(2)
    found, _ = under_a_plan(case, {})
    expect_equal(found, train_unplanned(case))


@pytest.mark.parametrize("config", [{}, GROUPED])
def test_the_comparison_notices_guests_with_the_adapter_of_their_own_rank(rank: int, config: dict[str, Any]) -> None:
    def misplaced(self: Any, tokens: Any) -> None:
        own(self, tokens)
        for of_experts, of_guests in self._pairs:
            for at in of_guests.adapter if config else [of_guests.adapter]:
                for p, q in zip(at.parameters(), of_experts.adapter.parameters(), strict=True):
                    p.data = q.detach()

    own = lora.Adapters.prepare
    case = Case(config=config, adapt=adapt_experts)
    begin_groups(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora.Adapters, "prepare", misplaced)
        found, _ = under_a_plan(case, {})
    assert max(gather(max(differences(found, train_unplanned(case)).values()))) > 1e-3


def adapted_net(config: dict[str, Any], **options: Any) -> Any:
    begin_groups(4)
    net = make_net(make_config(Case(config=config)))
    adapt_experts(net, **options)
    return net


@pytest.mark.parametrize("config", [{}, GROUPED])
def test_guests_use_no_adapter_while_the_trainer_switches_adapters_off(rank: int, config: dict[str, Any]) -> None:
    net = adapted_net(config)
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    wrappers = [of for layer in net.moe for _, of in lora.adapted(layer.experts)]
    outputs: dict[tuple[bool, bool], Any] = {}
    for enabled in (True, False):
        for of in wrappers:
            of._adapter_enabled = enabled
        with torch.no_grad():
            replay(net, 0, 0)
            outputs[enabled, False] = net(batch(0, 0))
            with replicas.step(replicas.plan(counts_of(0, rank, micro_steps=1), phase="recompute")):
                replay(net, 0, 0)
                outputs[enabled, True] = net(batch(0, 0))
        assert torch.allclose(outputs[enabled, True], outputs[enabled, False], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(outputs[True, True], outputs[False, True], rtol=1e-3)


@pytest.mark.parametrize("config", [{}, GROUPED])
@pytest.mark.parametrize("what", ["dropout", "DoRALinear", "GroupedExpertLinearAdapter", "peft"])
def test_adapters_that_guests_cannot_repeat_are_rejected_by_name(rank: int, config: dict[str, Any], what: str) -> None:
    net = adapted_net(config, dropout=0.1 if what == "dropout" else 0.0)
    first = "local_experts.0.linear_fc1" if not config else "linear_fc1"
    layer = net.moe[0].experts.get_submodule(first)
    found = {
        "dropout": "LoRALinear with ParallelLinearAdapter, with dropout",
        "DoRALinear": "DoRALinear with ParallelLinearAdapter",
        "GroupedExpertLinearAdapter": "LoRALinear with GroupedExpertLinearAdapter",
        "peft": "LoraColumnParallelLinear",
    }[what]
    if what == "DoRALinear":
        layer.__class__ = type(what, (type(layer),), {})
    if what == "GroupedExpertLinearAdapter":
        layer.adapter.__class__ = type(what, (type(layer.adapter),), {})
    if what == "peft":
        layer.__class__ = type("LoraColumnParallelLinear", (torch.nn.Module,), {})
        layer._modules = {"base_layer": layer.to_wrap, "lora_A": layer.adapter}
    said = input_error(lambda: foremoe.megatron.attach(net))
    assert said.startswith(f"model_chunks: moe.0 has an adapter on its experts ({first}: {found}); expected LoRALinear")
    foremoe.megatron.attach(net, mode="shadow").detach()


def test_adapters_on_some_experts_of_a_rank_are_rejected(rank: int) -> None:
    net = adapted_net({})
    expert = net.moe[1].experts.local_experts[0]
    expert.linear_fc2 = expert.linear_fc2.to_wrap
    said = input_error(lambda: foremoe.megatron.attach(net))
    assert said.startswith("model_chunks: experts of moe.1 have different parameters; expected the same, such as an ")


def test_experts_are_not_permuted_once_they_have_adapters(rank: int) -> None:
    """One adapter serves all experts of a rank, so it cannot move with them."""
    homes = (torch.arange(8) % 4).expand(3, 8).to(torch.int32).numpy()
    for config in ({}, GROUPED):
        net = adapted_net(config)
        said = input_error(lambda net=net: foremoe.megatron.permute_experts(net, homes))
        assert said.startswith("model_chunks: moe.0 has adapters; expected permute_experts() before they are added")
