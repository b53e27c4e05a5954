"""Plans requested by Megatron-LM trainers, directly and through slime's hooks."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import re
import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import (
    EXPERTS,
    LAYERS,
    MICRO_STEPS,
    STEPS,
    Case,
    batch,
    begin_groups,
    counts_of,
    expect_equal,
    expect_planned_rows,
    group_of,
    is_bitwise,
    make_config,
    make_net,
    replay,
    rho_at_homes,
    routes_of,
    run_step,
    train,
    train_unplanned,
)
from processes import DEVICE, gather
from refusals import refusal
from test_shares import FAILED, failing_on, saved

import foremoe
import foremoe.megatron
import foremoe.slime
from foremoe._engine.shares import Shares
from foremoe.megatron.counts import gathered_counts
from foremoe.megatron.metrics import figures

CASE, SLIMES = Case(ep=2), Case(ep=2, ddp={"overlap_grad_reduce": True})
DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "users" / "adopting.md"


def make() -> tuple[Any, Any]:
    """Builds a model with replicas attached, in two expert-parallel groups."""
    begin_groups(2)
    net = make_net(make_config(CASE))
    return net, foremoe.megatron.attach(net, ranks_per_node=2)


def test_counts_of_different_shapes_are_rejected_on_all_ranks(rank: int) -> None:
    own = torch.zeros(2 + rank // 3, 6, 16, dtype=torch.int64, device=DEVICE)
    for counts, experts in ((own, 16), (own[:, :, :0], 0)):
        said = refusal(lambda counts=counts: gathered_counts(counts, dist.group.WORLD))
        shapes = [[2 + of // 3, 6, experts] for of in range(4)]
        assert said.startswith(f"InputError: counts: ranks have shapes {shapes}")


def test_a_planning_error_ends_the_step_of_all_groups_and_the_next_step_runs(rank: int) -> None:
    """Planning fails on one rank of one of the two expert-parallel groups."""
    net, replicas = make()
    counts = counts_of(0, rank)
    with failing_on(3):
        plan = replicas.plan(counts)
        said = refusal(lambda: replicas.step(plan).__enter__())
    other = "InputError: plan: another expert-parallel group refused its plan"
    assert said == (FAILED.replace("rank 2", "rank 1") if rank >= 2 else other)
    with replicas.step(replicas.plan(counts)):
        run_step(CASE, net, net, 0)
    assert 1 <= replicas.metrics()["foremoe/rho_computed"] < 1.1
    replicas.plan(counts)  # this plan is never executed
    replicas.detach()


def test_an_error_in_a_counts_function_is_raised_on_all_ranks(rank: int) -> None:
    """Passes a function that returns counts, and that fails on rank 2."""
    _, replicas = make()

    def read() -> Any:
        if rank == 2:
            raise KeyError("routed_experts")
        return counts_of(0, rank)

    own = "KeyError: 'routed_experts'"
    assert refusal(lambda: replicas.plan(read)) == (own if rank == 2 else f"InputError: rank 2 refused: {own}")
    replicas.detach()


def test_a_plan_begun_earlier_is_reused_only_for_the_same_counts_and_phase_on_all_ranks(rank: int) -> None:
    net, replicas = make()
    counts = counts_of(0, rank)
    begun = replicas.plan(lambda: counts)
    assert replicas.plan(lambda: counts.numpy(), begun=begun) is begun
    for arguments in ((counts_of(int(rank == 3), rank),), (counts[:2],), (counts, "recompute")):
        assert replicas.plan(*arguments, begun=begun) is not begun
    with replicas.step(begun):
        run_step(CASE, net, net, 0)
    replicas.detach()


def test_explicit_plans_in_shadow_mode_do_not_mix_with_background_plans(rank: int) -> None:
    """The main and a background thread each start a plan. The main thread is first on even ranks only."""
    begin_groups(2)
    net = make_net(make_config(CASE))
    replicas = foremoe.megatron.attach(net, mode="shadow", ranks_per_node=2, cluster=None)
    own, has_begun = Shares.start_plan, threading.Event()

    def start_plan(self: Any, load: Any, **more: Any) -> Any:
        is_first = (threading.current_thread() is threading.main_thread()) == (rank % 2 == 0)
        if not is_first:
            has_begun.wait()
        made = own(self, load, **more)
        if is_first:
            has_begun.set()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shares, "start_plan", start_plan)
        with replicas.step():
            run_step(CASE, net, net, 0)
        plan = replicas.plan(counts_of(1, rank))
        made = plan.finish()
        replicas.detach()
    assert saved(made) == saved(foremoe.plan(plan.load, guest_slots=1))
    of_plan = figures(plan.load, made, replicas._stage.buffers)
    for step, metrics in enumerate((replicas.metrics(), of_plan)):
        expected = rho_at_homes(sum(counts_of(step, of) for of in group_of(rank)))
        assert metrics["foremoe/rho_vanilla"] == pytest.approx(expected, rel=1e-12)


ARGS = types.SimpleNamespace(num_experts=EXPERTS, use_routing_replay=True, offload_train=False)


def fill_slimes_lists(rank: int) -> None:
    """Installs a fake slime.utils.routing_replay with routes [rows, top_k] per layer and micro-step of the rollout."""

    class Replay:
        def __init__(self, lists: list[Any]) -> None:
            self.top_indices_list = lists

    class RoutingReplay:
        all_routing_replays = tuple(
            Replay([routes_of(step, m, layer, rank).int().cpu() for step in range(STEPS) for m in range(MICRO_STEPS)])
            for layer in range(LAYERS)
        )

    for name in ("slime", "slime.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["slime.utils.routing_replay"] = types.SimpleNamespace(RoutingReplay=RoutingReplay)  # type: ignore


def log_probabilities(model: Any) -> list[Any]:
    with torch.no_grad():
        found = []
        for step in range(STEPS):
            for m in range(MICRO_STEPS):
                replay(model.module, step, m)
                found.append(model(batch(step, m)))
    return found


def train_with(hooks: Any, hook: Any, prepare: Any = lambda model: None) -> tuple[dict[str, Any], list[Any]]:
    """Trains, calling `hook` as slime does. Returns the result of train() and each step's metrics."""
    finalized: list[Any] = []
    metrics: list[Any] = []

    def begin(model: Any) -> Any:
        model.config.finalize_model_grads_func = lambda *_, num_tokens: finalized.append(num_tokens)
        prepare(model)
        return [model]

    @contextlib.contextmanager
    def inside(model: Any, step: int) -> Any:
        hook(ARGS, 0, step, model, None, None)
        yield

    def after(model: Any, step: int) -> None:
        model[0].config.finalize_model_grads_func(model, num_tokens=step)
        metrics.append(hooks.replicas.metrics())

    found = train(SLIMES, begin, inside, after)
    assert finalized == list(range(STEPS))
    return found, metrics


def test_slimes_hooks_plan_training_steps_and_log_probabilities(rank: int) -> None:
    begin_groups(2)
    fill_slimes_lists(rank)
    hooks = foremoe.slime.Hooks(mode="active", ranks_per_node=2)

    def prepare(model: Any) -> None:
        before = log_probabilities(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ROUTING_REPLAY_STAGE", "replay_forward")
            hooks.before_log_prob(ARGS, [model], "")
        planned = log_probabilities(model)
        hooks.before_training(ARGS, 0, {"num_microbatches": [MICRO_STEPS] * STEPS})
        assert max(float((a - b).abs().max()) for a, b in zip(planned, before, strict=True)) <= 1e-12
        assert sum(gather(hooks.replicas.metrics()["foremoe/copies"])) > 0

    found, metrics = train_with(hooks, hooks.before_train_step, prepare)
    expect_equal(found, train_unplanned(SLIMES))
    for of in metrics:
        expect_planned_rows(of)
    lists = sys.modules["slime.utils.routing_replay"].RoutingReplay.all_routing_replays
    if rank == 2:
        lists[1].top_indices_list.pop()
    said = refusal(lambda: hooks.before_train_step(ARGS, 0, 1, [types.SimpleNamespace()], None, None))
    own = f"all_routing_replays: {LAYERS} layers with [{STEPS * MICRO_STEPS - 1}, {STEPS * MICRO_STEPS}]"
    assert said.startswith(f"InputError: {'' if rank == 2 else 'rank 2 refused: '}{own}")
    hooks.replicas.detach()
    assert sum(gather(hooks.replicas.metrics()["foremoe/copies"])) > 0


def test_the_documented_flag_enables_shadow_mode_and_changes_no_results(rank: int) -> None:
    """Imports the function named by the flag in docs/users/adopting.md, as slime does."""
    begin_groups(2)
    fill_slimes_lists(rank)
    (path,) = re.findall(r"--custom-megatron-before-train-step-hook-path (\S+)", DOCS.read_text())
    module, _, name = path.rpartition(".")
    hooks = foremoe.slime.hooks
    found, _ = train_with(hooks, getattr(importlib.import_module(module), name))
    hooks.replicas.detach()
    assert is_bitwise(found, train_unplanned(SLIMES))
    metrics = hooks.replicas.metrics()
    assert 1 <= metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
    assert "foremoe/rho_computed" not in metrics


@pytest.mark.skipif(DEVICE.type == "cuda", reason="slime's gloo groups are faked with those of the CPU")
def test_shadow_mode_uses_only_groups_that_slime_keeps_when_it_offloads(rank: int) -> None:
    """Between steps slime ends all groups but those made with backend="gloo". Written from its sources."""
    begin_groups(2)
    fill_slimes_lists(rank)
    hooks = foremoe.slime.Hooks(ranks_per_node=2)
    kept: list[Any] = []
    used: list[Any] = []
    make = dist.new_group

    def new_group(*arguments: Any, backend: str, **keywords: Any) -> Any:
        assert backend == "gloo"
        kept.append(make(*arguments, backend=backend, **keywords))
        return kept[-1]

    def noted(collective: Any) -> Any:
        def call(*arguments: Any, group: Any = None, **keywords: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():  # it may plan while slime offloads
                used.append(group)
            return collective(*arguments, group=group, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ARGS, "offload_train", True)
        patch.setattr(dist, "get_backend", lambda *_: "cpu:gloo")  # not the word by which slime knows gloo
        patch.setattr(dist, "new_group", new_group)
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single"):
            patch.setattr(dist, name, noted(getattr(dist, name)))
        found, _ = train_with(hooks, hooks.before_train_step)
        hooks.replicas.detach()  # waits for the background thread
    assert is_bitwise(found, train_unplanned(SLIMES))
    assert hooks.replicas.metrics()["foremoe/rho_planned"] < hooks.replicas.metrics()["foremoe/rho_vanilla"]
    assert used and all(any(group is of for of in kept) for group in used)
