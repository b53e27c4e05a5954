"""Where the plans of Megatron-LM's steps come from: trainers ask for them.

One spawn of four processes runs all checks.
"""

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
    differences,
    make_config,
    make_net,
    replay,
    routes_of,
    run_step,
    train,
)
from refusals import refusal
from test_shares import saved, watched

import foremoe
import foremoe.megatron
import foremoe.slime
from foremoe._engine.shares import Shares
from foremoe.megatron.counts import gathered_counts
from foremoe.megatron.metrics import figures

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "users" / "adopting.md"


def gather_counts() -> list[str]:
    own = torch.zeros(2 + dist.get_rank() // 3, 6, 16, dtype=torch.int64)
    return [refusal(lambda own=of: gathered_counts(own, dist.group.WORLD)) for of in (own, own[:, :, :0])]


def fail_in_a_step() -> dict[str, Any]:
    """One rank of one of two expert-parallel groups cannot plan."""
    case = Case(ep=2)
    net = make_net(make_config(case))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)

    def fail(layers: range) -> None:
        if dist.get_rank() == 3:
            raise ValueError("no plan")

    counts = counts_of(0, dist.get_rank())
    with watched(fail):
        plan = replicas.plan(counts)
        found = {"raised": refusal(lambda: replicas.step(plan).__enter__())}
    with replicas.step(replicas.plan(counts)):
        run_step(case, net, net, 0)
    found["then"] = replicas.metrics()["foremoe/rho_computed"]
    replicas.plan(counts)  # nobody executes it
    replicas.detach()
    return found


def by_function() -> dict[str, Any]:
    """Counts that are made where the ranks plan together, and plans that were begun before."""
    case = Case(ep=2)
    net = make_net(make_config(case))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    rank = dist.get_rank()
    counts = counts_of(0, rank)

    def read() -> Any:
        if rank == 2:
            raise KeyError("routed_experts")
        return counts

    found: dict[str, Any] = {"raised": refusal(lambda: replicas.plan(read))}
    begun = replicas.plan(lambda: counts)
    found["again"] = {
        "same": replicas.plan(lambda: counts.numpy(), begun=begun) is begun,
        "others on one rank": replicas.plan(counts_of(int(rank == 3), rank), begun=begun) is begun,
        "fewer micro-steps": replicas.plan(counts[:2], begun=begun) is begun,
        "another phase": replicas.plan(counts, "recompute", begun=begun) is begun,
    }
    with replicas.step(begun):
        run_step(case, net, net, 0)
    replicas.detach()
    return found


def plan_in_shadow() -> dict[str, Any]:
    """The main thread plans while a step is planned in the background: first on even ranks, last on odd ones."""
    case = Case(ep=2)
    net = make_net(make_config(case))
    replicas = foremoe.megatron.attach(net, mode="shadow", ranks_per_node=2, cluster=None)
    own, has_begun = Shares.start_plan, threading.Event()

    def start_plan(self: Any, load: Any, **more: Any) -> Any:
        is_first = (threading.current_thread() is threading.main_thread()) == (dist.get_rank() % 2 == 0)
        if not is_first:
            has_begun.wait()
        made = own(self, load, **more)
        if is_first:
            has_begun.set()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shares, "start_plan", start_plan)
        with replicas.step():
            run_step(case, net, net, 0)
        plan = replicas.plan(counts_of(1, dist.get_rank()))
        made = plan.finish()
        replicas.detach()
    return {
        "same": saved(made) == saved(foremoe.plan(plan.load, guest_slots=1)),
        "rho": [
            of["foremoe/rho_vanilla"] for of in (replicas.metrics(), figures(plan.load, made, replicas._stage.buffers))
        ],
    }


ARGS = types.SimpleNamespace(num_experts=EXPERTS, use_routing_replay=True, offload_train=False)


def fill_slimes_lists(rank: int) -> None:
    """slime.utils.routing_replay with [rows, top_k] of each layer and micro-step of the rollout."""

    class Replay:
        def __init__(self, lists: list[Any]) -> None:
            self.top_indices_list = lists

    class RoutingReplay:
        all_routing_replays = tuple(
            Replay([routes_of(step, m, layer, rank).int() for step in range(STEPS) for m in range(MICRO_STEPS)])
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


def documented_hook() -> Any:
    """By the flag of docs/users/adopting.md, as slime finds it."""
    (path,) = re.findall(r"--custom-megatron-before-train-step-hook-path (\S+)", DOCS.read_text())
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def slime(rank: int) -> dict[str, Any]:
    """Training with slime's calls of its hooks, on a model of Megatron-LM."""
    fill_slimes_lists(rank)
    case = Case(ep=2, ddp={"overlap_grad_reduce": True})
    expected = train(case)
    found: dict[str, Any] = {}
    active = foremoe.slime.Hooks(mode="active", ranks_per_node=2)
    for mode, hooks, hook in (
        ("active", active, active.before_train_step),
        ("shadow", foremoe.slime.hooks, documented_hook()),
    ):
        finalized: list[Any] = []
        metrics: list[Any] = []

        def finalize(*of: Any, num_tokens: int, finalized: list[Any] = finalized) -> None:
            finalized.append(num_tokens)

        def prepare(model: Any, hooks: Any = hooks, mode: str = mode, finalize: Any = finalize) -> Any:
            model.config.finalize_model_grads_func = finalize
            if mode == "active":
                before = log_probabilities(model)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("ROUTING_REPLAY_STAGE", "replay_forward")
                    hooks.before_log_prob(ARGS, [model], "")
                planned = log_probabilities(model)
                hooks.before_training(ARGS, 0, {"num_microbatches": [MICRO_STEPS] * STEPS})
                found["log_prob"] = max(float((a - b).abs().max()) for a, b in zip(planned, before, strict=True))
                found["log_prob copies"] = hooks.replicas.metrics()["foremoe/copies"]
            return [model]

        @contextlib.contextmanager
        def inside(model: Any, step: int, hook: Any = hook) -> Any:
            hook(ARGS, 0, step, model, None, None)
            yield

        def after(model: Any, step: int, hooks: Any = hooks, metrics: Any = metrics) -> None:
            model[0].config.finalize_model_grads_func(model, num_tokens=step)
            metrics.append(hooks.replicas.metrics())

        got = train(case, prepare, inside, after)
        if mode == "active":
            from slime.utils.routing_replay import RoutingReplay

            if rank == 2:
                RoutingReplay.all_routing_replays[1].top_indices_list.pop()
            found["refused"] = refusal(lambda hook=hook: hook(ARGS, 0, 1, [types.SimpleNamespace()], None, None))
        hooks.replicas.detach()
        found[mode] = differences(got, expected) | {
            "finalized": finalized,
            "metrics": metrics,
            "last": hooks.replicas.metrics(),
            "bitwise": all(
                torch.equal(a[name], b[name])
                for a, b in zip(got["weights"], expected["weights"], strict=True)
                for name in b
            ),
        }
    return found


def work(rank: int) -> dict[str, Any]:
    begin_groups(2)
    found = {"counts": gather_counts(), "step": fail_in_a_step(), "function": by_function(), "shadow": plan_in_shadow()}
    return found | {"slime": slime(rank)}


def test_counts_that_ranks_do_not_have_alike_are_refused_on_all(found: list[dict[str, Any]]) -> None:
    for of in found:
        unlike, empty = of["counts"]
        assert unlike.startswith(
            "InputError: counts: of the ranks are [[2, 6, 16], [2, 6, 16], [2, 6, 16], [3, 6, 16]]"
        )
        assert empty.startswith("InputError: counts: of the ranks are [[2, 6, 0], [2, 6, 0], [2, 6, 0], [3, 6, 0]]")


def test_a_share_that_fails_ends_the_step_of_all_groups_and_the_next_one_runs(found: list[dict[str, Any]]) -> None:
    other = "InputError: plan: another expert-parallel group refused its own"
    own = "RuntimeError: rank 1 could not plan its layers: ValueError('no plan')"
    assert [of["step"]["raised"] for of in found] == [other, other, own, own]
    assert all(1 <= of["step"]["then"] < 1.1 for of in found)


def test_what_a_function_of_counts_raises_on_one_rank_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    own = "KeyError: 'routed_experts'"
    assert [of["function"]["raised"] for of in found] == [
        own if rank == 2 else f"InputError: rank 2 refused: {own}" for rank in range(4)
    ]
    own = f"all_routing_replays: {LAYERS} layers with [{STEPS * MICRO_STEPS - 1}, {STEPS * MICRO_STEPS}]"
    for rank, of in enumerate(found):
        assert of["slime"]["refused"].startswith(f"InputError: {'' if rank == 2 else 'rank 2 refused: '}{own}")


def test_a_plan_that_was_begun_is_that_of_the_same_counts_and_phase_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert [what for what, is_again in of["function"]["again"].items() if is_again] == ["same"]


def test_plans_that_are_made_in_shadow_mode_do_not_meet_those_of_its_steps(found: list[dict[str, Any]]) -> None:
    for first, of in ((rank // 2 * 2, of) for rank, of in enumerate(found)):
        assert of["shadow"]["same"]
        for step, rho in enumerate(of["shadow"]["rho"]):
            at_homes = sum(counts_of(step, r) for r in (first, first + 1)).view(MICRO_STEPS, LAYERS, 2, -1).sum(-1)
            assert rho == pytest.approx(float((at_homes.amax(-1) / at_homes.double().mean(-1)).mean()), rel=1e-12)


def test_slimes_hooks_train_as_planned(found: list[dict[str, Any]]) -> None:
    for of in found:
        active = of["slime"]["active"]
        assert max(active[what] for what in ("loss", "dx", "dw")) <= 1e-12, active
        assert active["finalized"] == list(range(STEPS))
        for metrics in active["metrics"]:
            assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"], rel=1e-12)
            assert metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
    assert sum(of["slime"]["active"]["last"]["foremoe/copies"] for of in found) > 0


def test_slimes_hooks_plan_the_log_probabilities(found: list[dict[str, Any]]) -> None:
    assert max(of["slime"]["log_prob"] for of in found) <= 1e-12
    assert sum(of["slime"]["log_prob copies"] for of in found) > 0


def test_the_documented_flag_is_shadow_mode_and_changes_nothing(found: list[dict[str, Any]]) -> None:
    for of in found:
        shadow = of["slime"]["shadow"]
        assert shadow["bitwise"] and shadow["loss"] == shadow["dx"] == 0
        assert shadow["finalized"] == list(range(STEPS))
        assert 1 <= shadow["last"]["foremoe/rho_planned"] < shadow["last"]["foremoe/rho_vanilla"]
        assert "foremoe/rho_computed" not in shadow["last"]
