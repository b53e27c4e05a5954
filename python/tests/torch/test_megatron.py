"""Compares Megatron-LM's MoE layers under a plan with the same layers without one.

Uses EP 4, and EP 2 with two expert-data-parallel replicas.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import (
    LAYERS,
    Case,
    begin_groups,
    counts_of,
    differences,
    expect_equal,
    expect_no_waits,
    expect_planned_forwards,
    expect_shadow,
    group_of,
    is_bitwise,
    is_same,
    make_config,
    make_net,
    stale_guests,
    state,
    train,
    train_unplanned,
)
from processes import LATER, gather

import foremoe.megatron
from foremoe.megatron import step as steps

OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True}
CASES = {
    "alltoall, EP 4": (Case(), {}),
    "alltoall, EP 4, static": (Case(), {"residency": "static"}),
    "alltoall, EP 4, no guests": (Case(), {"guest_slots": 0}),
    "alltoall, EP 4, no guests of vanilla": (Case(), {"policy": "vanilla"}),
    "alltoall, EP 4, two guests, deep": (Case(), {"guest_slots": 2, "depth": 5}),
    "allgather, EP 4": (Case(dispatcher="allgather"), {}),
    "allgather, EP 2 × 2, overlap": (Case(ep=2, dispatcher="allgather", ddp=OVERLAP), {}),
    "alltoall, EP 2 in two groups": (Case(ep=2), {}),
    "alltoall, EP 2 × 2": (Case(ep=2, ddp={}), {}),
    "alltoall, EP 2 × 2, overlap": (Case(ep=2, ddp=OVERLAP), {}),
    "alltoall, EP 2 × 2, sharded": (Case(ep=2, ddp=SHARDED), {}),
    "alltoall, EP 2 × 2, sharded, overlap": (Case(ep=2, ddp=SHARDED | OVERLAP), {}),
    "alltoall, EP 2 × 2, parameters gathered": (Case(ep=2, ddp=SHARDED | OVERLAP | {"overlap_param_gather": True}), {}),
    "alltoall, EP 4, layers recomputed": (Case(recompute="moe"), {}),
    "alltoall, EP 2 × 2, all recomputed, overlap": (Case(ep=2, recompute="all", ddp=OVERLAP), {}),
    "alltoall, EP 4, multi-token prediction": (Case(config={"mtp_num_layers": 2}), {}),
    "alltoall, EP 2 × 2, multi-token prediction, all recomputed, overlap": (
        Case(ep=2, recompute="all", ddp=OVERLAP, config={"mtp_num_layers": 1}),
        {},
    ),
    "alltoall, EP 4, shared experts": (Case(config={"moe_shared_expert_intermediate_size": 8}), {}),
    "alltoall, EP 4, shared experts overlapped": (Case(config=OVERLAPPED | {"moe_shared_expert_gate": True}), {}),
    "alltoall, EP 2 × 2, TP 2, shared experts overlapped": (Case(ep=2, config=OVERLAPPED, tp=2), {}),
    "alltoall, EP 2 × 2, shared experts overlapped, layers recomputed, overlap": (
        Case(ep=2, recompute="moe", ddp=OVERLAP, config=OVERLAPPED),
        {"residency": "shared"},
    ),
    "alltoall, EP 4, overlap without shared experts": (Case(config={"moe_shared_expert_overlap": True}), {}),
}
ROUNDED = {
    "float32": (Case(dtype=torch.float32, ddp={}), {}),
    "bfloat16, gradients in float32": (Case(dtype=torch.bfloat16, ddp=OVERLAP | {"grad_reduce_in_fp32": True}), {}),
}


class Planned:
    """attach() and step() for train()."""

    def __init__(self, **options: Any) -> None:
        self.options = {"ranks_per_node": 2, **options}
        self.before: dict[str, Any] = {}
        self.same = True
        self.metrics: list[dict[str, float]] = []
        self.rows: list[int] = []

    def prepare(self, model: Any) -> Any:
        self.model = model
        self.dispatchers = [m.token_dispatcher for m in model.modules() if hasattr(m, "token_dispatcher")]
        before = state(model)
        self.replicas = foremoe.megatron.attach([model], **self.options)
        self.same &= is_same(state(model), before)
        return self.replicas

    @contextlib.contextmanager
    def inside(self, replicas: Any, step: int) -> Any:
        plan = replicas.plan(counts_of(step, dist.get_rank()))
        before = state(self.model)
        with replicas.step(plan):
            self.same &= is_same(state(self.model), before)
            yield
            self.same &= is_same(state(self.model), before)
        self.metrics.append(replicas.metrics())
        made = plan.finish()
        self.rows.append(int(made.slot_tokens[:, :, replicas._ranks.rank].sum()))

    def detach(self) -> bool:
        """Detaches. Returns whether the model and its dispatchers are unchanged."""
        before = state(self.model)
        self.replicas.detach()
        dispatchers = [m.token_dispatcher for m in self.model.modules() if hasattr(m, "token_dispatcher")]
        return is_same(state(self.model), before) and all(
            a is b for a, b in zip(dispatchers, self.dispatchers, strict=True)
        )


def compare(case: Case, options: dict[str, Any], **more: Any) -> tuple[dict[str, float], Planned, dict[str, Any]]:
    """Returns differences from an unplanned run, the planned run, and the result of train()."""
    case.begin_groups()
    planned = Planned(**options)
    found = train(case, planned.prepare, planned.inside, **more)
    return differences(found, train_unplanned(case)), planned, found


@pytest.mark.parametrize("name", CASES | ROUNDED)
def test_losses_and_gradients_match_unplanned_layers_and_models_are_unchanged(rank: int, name: str) -> None:
    """Also checks that no module is registered, ranks compute their planned rows, and detach() restores the model."""
    case, options = (CASES | ROUNDED)[name]
    worst, planned, found = compare(case, options)
    assert planned.same and planned.detach()
    if name == "float32":
        assert max(worst.values()) <= 2e-6, worst
    elif name in ROUNDED:
        assert worst["loss"] <= 1e-3 and worst["dw"] <= 2e-2, worst
    else:
        expect_equal(found, train_unplanned(case))
    for metrics in planned.metrics:
        assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"], rel=1e-12)
        assert metrics["foremoe/rho_planned"] <= metrics["foremoe/rho_vanilla"]
        for of_rho, of_buffers in (("rho_planned_max", ""), ("rho_vanilla_max", "_vanilla")):  # equal tokens per rank
            factor = metrics[f"foremoe/rank_capacity_factor{of_buffers}"]
            assert 0 <= factor - metrics[f"foremoe/{of_rho}"] < 0.002
    if "recomputed" not in name and "shared" not in name and "multi-token" not in name:
        assert found["rows"] == planned.rows
        assert "no guests" not in name or found["rows"] == train_unplanned(case)["rows"]
    if name == "alltoall, EP 4":
        assert planned.metrics[0]["foremoe/rho_vanilla"] > 1.3 > 1.1 > planned.metrics[0]["foremoe/rho_planned"]
        assert all(sum(gather(of["foremoe/copies"])) > LAYERS for of in planned.metrics)


@pytest.mark.parametrize("planned", [True, False])
def test_a_planned_layer_exchanges_no_counts_and_never_waits(rank: int, planned: bool) -> None:
    expect_no_waits(planned)


@pytest.mark.parametrize("mtp", [None, 1])
def test_shadow_mode_changes_no_results_and_its_metrics_match_the_counts(rank: int, mtp: int | None) -> None:
    """Metrics leave out layers for multi-token prediction."""
    begin_groups(2)
    case = Case(ep=2, ddp=OVERLAP, config={"mtp_num_layers": mtp})
    attached: list[Any] = []

    def prepare(model: Any) -> Any:
        attached.append(
            foremoe.megatron.attach(model, mode="shadow", ranks_per_node=2, cluster="h100", prefer="balance")
        )
        attached.extend(layer.router for layer in model.modules() if hasattr(layer, "token_dispatcher"))
        return attached[0]

    found = train(case, prepare, lambda replicas, step: replicas.step())
    replicas, *routers = attached
    replicas.detach()
    assert is_bitwise(found, train_unplanned(case))
    expect_shadow(replicas.metrics(), [counts_of(1, of) for of in group_of(rank)])
    assert replicas.metrics()["foremoe/copies"] > 0
    assert not any(router._forward_hooks for router in routers)


def test_gradients_added_after_the_backward_are_lost_only_with_overlapped_reduction(rank: int) -> None:
    late: list[Any] = []

    def add(replicas: Any, step: int) -> None:
        for parameter, gradient in late:
            if gradient is not None:
                parameter.main_grad += gradient
        late.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_add", lambda parameter, gradient: late.append((parameter, gradient)))
        overlapping, alone = (compare(Case(ep=2, ddp=ddp), {}, after=add)[0]["dw"] for ddp in (OVERLAP, {}))
    assert max(gather(overlapping)) > 1e-3
    assert max(gather(alone)) < LATER


def test_registered_and_stale_guests_are_detected(rank: int) -> None:
    begin_groups(2)
    net = make_net(make_config(Case(ep=2, ddp=OVERLAP)))
    before = state(net)["parameters"]
    replicas = foremoe.megatron.attach(net)
    net.moe[0].guests = replicas._guests[0].module
    assert [name for name, _ in net.named_parameters()] != before
    with stale_guests():
        assert max(gather(compare(Case(ep=2, ddp=OVERLAP), {})[0]["loss"])) > 1e-6


def test_old_log_probabilities_are_unchanged_under_a_plan(rank: int) -> None:
    expect_planned_forwards()
