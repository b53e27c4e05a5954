"""Plans requested by Megatron-LM trainers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import (
    Case,
    begin_groups,
    counts_of,
    group_of,
    make_config,
    make_net,
    rho_at_homes,
    run_step,
)
from processes import DEVICE
from refusals import refusal
from test_shares import FAILED, failing_on, saved

import foremoe
import foremoe.megatron
import foremoe.slime
from foremoe._engine.shares import Shares
from foremoe.megatron.counts import gathered_counts
from foremoe.megatron.metrics import figures

CASE = Case(ep=2)


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
    own = FAILED.replace("rank 2", "rank 1")
    assert said == (own if rank >= 2 else f"InputError: rank 2 refused: {own}")
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


@pytest.mark.parametrize("residency", [None, "auto"])
def test_a_step_that_no_plan_makes_faster_runs_with_rows_at_home(rank: int, residency: str | None) -> None:
    begin_groups(4)
    net = make_net(make_config(CASE))
    expected = run_step(CASE, net, net, 0)["losses"]
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    replicas = foremoe.megatron.attach(net, ranks_per_node=2, residency=residency, cluster="h100")
    plan = replicas.plan(counts_of(0, rank))
    with replicas.step(plan):
        losses = run_step(CASE, net, net, 0)["losses"]
    assert plan.finish().options["stages"] == "" and plan.finish().residency == "resident"
    metrics = replicas.metrics()
    assert metrics["foremoe/copies"] == 0 and metrics["foremoe/rho_computed"] == metrics["foremoe/rho_vanilla"]
    torch.testing.assert_close(losses, expected)
    for name, p in net.named_parameters():
        if name in gradients:
            torch.testing.assert_close(p.grad, gradients[name])
    replicas.detach()
