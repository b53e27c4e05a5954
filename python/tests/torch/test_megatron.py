"""Megatron-LM's MoE layers under a plan, against the same layers as Megatron-LM runs them.

One spawn of four processes runs all checks: expert parallelism of 4, and of 2 with two expert-data-parallel replicas.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import (
    LAYERS,
    MICRO_STEPS,
    Case,
    begin_groups,
    count_waits,
    counts_of,
    differences,
    expect_equal,
    forward_only,
    is_same,
    make_config,
    make_net,
    modelled_seconds,
    state,
    train,
    train_unplanned,
)

import foremoe
import foremoe.megatron
from foremoe.megatron import experts
from foremoe.megatron import shadow as shadow_module
from foremoe.megatron import step as steps

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "users" / "adopting.md"
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}
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
    "alltoall, EP 4, shared experts": (Case(config={"moe_shared_expert_intermediate_size": 8}), {}),
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
        """Whether the model is as it was."""
        before = state(self.model)
        self.replicas.detach()
        dispatchers = [m.token_dispatcher for m in self.model.modules() if hasattr(m, "token_dispatcher")]
        return is_same(state(self.model), before) and all(
            a is b for a, b in zip(dispatchers, self.dispatchers, strict=True)
        )


def compare(case: Case, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    expected = train_unplanned(case)
    planned = Planned(**options)
    found = train(case, planned.prepare, planned.inside, **more)
    result: dict[str, Any] = differences(found, expected)
    result |= {"same": planned.same, "detached": planned.detach(), "metrics": planned.metrics}
    return result | {"rows": found["rows"], "rows_planned": planned.rows, "rows_before": expected["rows"]}


def shadow() -> dict[str, Any]:
    """Counting changes nothing; what it says is what counts say."""
    case = Case(ep=2, ddp=OVERLAP)
    expected = train_unplanned(case)
    gathered: list[Any] = []

    def prepare(model: Any) -> Any:
        return foremoe.megatron.attach(model, mode="shadow", ranks_per_node=2)

    replicas: list[Any] = []

    @contextlib.contextmanager
    def inside(of: Any, step: int) -> Any:
        replicas[:] = [of]
        with of.step():
            yield

    with pytest.MonkeyPatch.context() as patch:
        gather = shadow_module.gathered_counts

        def watched(own: Any, group: Any) -> Any:
            gathered.append(own.clone())
            return gather(own, group)

        patch.setattr(shadow_module, "gathered_counts", watched)
        found = train(case, prepare, inside)
        replicas[0].detach()
    layers = [m for m in replicas[0]._chunks[0].modules() if hasattr(m, "token_dispatcher")]
    first = dist.get_rank() // 2 * 2
    of_group = sum(counts_of(1, r) for r in (first, first + 1))
    at_homes = of_group.view(MICRO_STEPS, LAYERS, 2, -1).sum(-1).double()
    return {
        "equal": found["losses"] == expected["losses"]
        and all(torch.equal(a, b) for a, b in zip(found["inputs"], expected["inputs"], strict=True))
        and all(
            torch.equal(a[name], b[name])
            for a, b in zip(found["weights"], expected["weights"], strict=True)
            for name in b
        ),
        "counted": [torch.equal(own, counts_of(step, dist.get_rank())) for step, own in enumerate(gathered)],
        "metrics": replicas[0].metrics(),
        "seconds": modelled_seconds([counts_of(1, r) for r in (first, first + 1)]),
        "rho": float((at_homes.amax(-1) / at_homes.mean(-1)).mean()),
        "hooks": sum(len(layer.router._forward_hooks) for layer in layers),
    }


def mutate() -> dict[str, Any]:
    """Each trap, fallen into: what the checks above then say."""
    found: dict[str, Any] = {}
    case = Case(ep=2, ddp=OVERLAP)
    with pytest.MonkeyPatch.context() as patch:
        late: list[Any] = []
        patch.setattr(steps, "_add", lambda parameter, gradient: late.append((parameter, gradient)))

        def add(replicas: Any, step: int) -> None:
            for parameter, gradient in late:
                if gradient is not None:
                    parameter.main_grad += gradient
            late.clear()

        found["gradients after backward"] = compare(case, {}, after=add)["dw"]
        begin_groups(2)
        found["and without overlap"] = compare(Case(ep=2, ddp={}), {}, after=add)["dw"]
    begin_groups(2)
    net = make_net(make_config(case))
    before = state(net)["parameters"]
    replicas = foremoe.megatron.attach(net)
    net.moe[0].guests = replicas._guests[0].module
    found["a registered guest is not seen"] = [name for name, _ in net.named_parameters()] == before
    with pytest.MonkeyPatch.context() as patch:
        first: dict[Any, Any] = {}

        def stale(self: Any, expert: int) -> Any:
            return first.setdefault((id(self), expert), self.parameters[expert].detach().clone())

        patch.setattr(experts.Stack, "__getitem__", stale)
        found["a stale guest"] = compare(case, {})["loss"]
    return found


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (case, options) in (CASES | ROUNDED).items():
        begin_groups(case.ep)
        found[name] = compare(case, options)
    begin_groups(2)
    found["shadow"] = shadow()
    begin_groups(2)
    found["mutated"] = mutate()
    begin_groups(4)
    found["waits"] = {planned: count_waits(planned) for planned in (True, False)}
    found["forward only"] = forward_only()
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_megatrons_own_layers(found: list[dict[str, Any]], case: str) -> None:
    expect_equal(found, case)


def test_in_shorter_types_they_are_so_to_rounding(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert max(of["float32"][what] for what in ("loss", "dx", "dw")) <= 2e-6, of["float32"]
        short = of["bfloat16, gradients in float32"]
        assert short["loss"] <= 1e-3 and short["dw"] <= 2e-2, short


@pytest.mark.parametrize("case", CASES | ROUNDED)
def test_nothing_is_registered_and_detached_models_are_as_before(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        assert of[case]["same"] and of[case]["detached"]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_computes_the_rows_that_were_planned_for_it(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        for metrics in of[case]["metrics"]:
            assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"], rel=1e-12)
            assert metrics["foremoe/rho_planned"] <= metrics["foremoe/rho_vanilla"]
            for of_rho, of_buffers in (("rho_planned_max", ""), ("rho_vanilla_max", "_vanilla")):  # as many tokens each
                factor = metrics[f"foremoe/rank_capacity_factor{of_buffers}"]
                assert 0 <= factor - metrics[f"foremoe/{of_rho}"] < 0.002
        if "recomputed" not in case and "shared" not in case:
            assert of[case]["rows"] == of[case]["rows_planned"]
            if "no guests" in case:
                assert of[case]["rows"] == of[case]["rows_before"]


def test_guests_level_the_load(found: list[dict[str, Any]]) -> None:
    of = [of["alltoall, EP 4"] for of in found]
    assert of[0]["metrics"][0]["foremoe/rho_vanilla"] > 1.3
    assert of[0]["metrics"][0]["foremoe/rho_planned"] < 1.1
    assert all(sum(one["metrics"][step]["foremoe/copies"] for one in of) > LAYERS for step in range(2))


def test_a_planned_layer_exchanges_no_counts_and_waits_for_nothing(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["waits"][True] == {}
        own = of["waits"][False]
        assert own["all_gather"] == LAYERS and own["synchronize"] >= LAYERS and own["to_host"] >= LAYERS, own


def test_shadow_mode_changes_nothing_and_tells_what_counts_tell(found: list[dict[str, Any]]) -> None:
    for of in found:
        shadow = of["shadow"]
        assert shadow["equal"]
        assert shadow["counted"] == [True, True]
        assert shadow["metrics"]["foremoe/rho_vanilla"] == pytest.approx(shadow["rho"], rel=1e-12)
        assert shadow["metrics"]["foremoe/rho_planned"] < shadow["metrics"]["foremoe/rho_vanilla"]
        assert shadow["metrics"]["foremoe/copies"] > 0
        assert shadow["metrics"]["foremoe/modelled_seconds_vanilla"] == shadow["seconds"]["vanilla"]
        assert shadow["metrics"]["foremoe/modelled_seconds"] == shadow["seconds"]["foremoe"]
        assert shadow["hooks"] == 0


def test_each_trap_is_seen(found: list[dict[str, Any]]) -> None:
    assert max(of["mutated"]["gradients after backward"] for of in found) > 1e-3
    assert max(of["mutated"]["and without overlap"] for of in found) < 1e-12
    assert not any(of["mutated"]["a registered guest is not seen"] for of in found)
    assert max(of["mutated"]["a stale guest"] for of in found) > 1e-6


def test_old_log_probabilities_are_computed_under_a_plan(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["forward only"]["worst"] <= 1e-12
        assert of["forward only"]["metrics"]["foremoe/copies"] >= 0
