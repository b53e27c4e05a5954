"""A planned Megatron-LM step completes, differs from its plan or fails with an error."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import MICRO_STEPS, Case, batch, begin_groups, counts_of, make_config, make_net, replay
from refusals import refusal
from torch.distributed import distributed_c10d

import foremoe.megatron
from foremoe._engine.guests import Guests
from foremoe.megatron.step import Step


def consult_twice(net: Any) -> None:
    net.moe[1].register_forward_pre_hook(lambda layer, inputs: (layer.router(inputs[0]), None)[1])


def bypass_router(net: Any) -> None:
    router = net.moe[1].router
    net.moe[1].route = lambda hidden, *given: router.forward(hidden, *given)


def replay_nothing(net: Any) -> None:
    net.moe[1].router.router_replay.clear_router_replay_action()


def rotate_routes(net: Any) -> None:
    """Route the planned number of rows to each expert, but choose rows that differ from the replayed ones."""
    net.moe[0].router.register_forward_hook(lambda *of: tuple(out.roll(1, 0) for out in of[2]))


def make(ep: int = 4) -> tuple[Any, Any, Any]:
    """Return a model, its replicas and a plan."""
    begin_groups(ep)
    net = make_net(make_config(Case(ep=ep)))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    return net, replicas, replicas.plan(counts_of(0, dist.get_rank()))


def error_of_step(
    step: int, order: str, ep: int = 4, spoilt: bool = False, change: Callable[[Any], Any] = lambda net: None
) -> str:
    """Run forwards ("f") and backwards in `order`. Return the step's error, after which the replicas are unusable."""
    net, replicas, plan = make(ep)
    try:
        with replicas.step(plan):
            micro_step = -1
            for act in order:
                if act == "f":
                    micro_step += 1
                    replay(net, step, micro_step % MICRO_STEPS)
                    change(net)
                    y = net(batch(step, micro_step % MICRO_STEPS))
                else:
                    y.sum().backward()
            if spoilt:  # as if a row went to a wrong rank and no exchange failed
                net.moe[0].token_dispatcher.step.deviates[0, 0] = True
    except RuntimeError as error:
        message = " ".join([str(error), *getattr(error, "__notes__", [])])
        with pytest.raises(RuntimeError, match="begin anew"):
            replicas.plan(counts_of(0, dist.get_rank()))
        return message
    return "nothing"


OTHER_ROWS = "the rows of moe.0 in micro-step 0 were not those"


@pytest.mark.parametrize(("step", "order", "change", "words"), [
    (0, "fbfb", None, "the step was left before the last micro-step of its plan"),
    (0, "fbfbfbf", None, "moe.0: ran once more than the 3 micro-steps of the plan"),
    (0, "ff", None, "moe.0: its forward of micro-step 1 ran out of order"),
    (0, "fbfbf", None, "the step was left before the last micro-step of its plan"),
    (0, "fb", consult_twice, "moe.1: its router was consulted 2 times in micro-step 0; expected once"),
    (0, "fb", bypass_router, "moe.1: its router was consulted 0 times in micro-step 0; expected once"),
    (0, "fb", replay_nothing,
     "moe.1: its RouterReplay has no router_replay_action, but routes were given to it or to others"),
    (0, "fbfbfb", rotate_routes, OTHER_ROWS),
    (1, "fbfbfb", None, f"{OTHER_ROWS} that counts told plan()"),
])  # fmt: skip
def test_micro_batches_that_differ_from_the_plan_end_the_step(
    rank: int, step: int, order: str, change: Callable[[Any], Any] | None, words: str
) -> None:
    said = error_of_step(step, order, change=change or (lambda net: None))
    assert words in said, said


def test_other_groups_do_not_use_the_gradients_of_a_failed_group(rank: int) -> None:
    said = error_of_step(0, "fbfbfb", ep=2, spoilt=rank < 2)
    assert (OTHER_ROWS if rank < 2 else "rows in another expert-parallel group were not those of its plan") in said


@pytest.mark.parametrize(("ranks", "micro_steps"), [((0, 1), 1), ((2,), MICRO_STEPS)])
def test_an_error_in_one_expert_parallel_group_ends_the_steps_of_the_others(
    rank: int, ranks: tuple[int, ...], micro_steps: int
) -> None:
    """The trainer on `ranks` raises after `micro_steps` micro-batches and catches its error outside the step. The other
    ranks collect the gradients of their guests later, when these ranks have closed the step."""
    own = Guests.bring_home

    def bring_home_late(self: Any, layer: int) -> None:
        time.sleep(0.5)
        own(self, layer)

    def run() -> None:
        net, replicas, plan = make(2)
        try:
            with replicas.step(plan):
                for m in range(MICRO_STEPS + 1):
                    if rank in ranks and m == micro_steps:
                        raise ValueError("the loss is not finite")
                    if m < MICRO_STEPS:
                        replay(net, 0, m)
                        net(batch(0, m)).sum().backward()
        finally:
            with pytest.raises(RuntimeError, match="begin anew"):
                replicas.plan(counts_of(0, rank))

    with pytest.MonkeyPatch.context() as patch:
        if rank not in ranks:
            patch.setattr(Guests, "bring_home", bring_home_late)
        said = refusal(run)
        gc.collect()
    failed = tuple(f"RuntimeError: rank {of} failed: ValueError: the loss is not finite; do not use" for of in ranks)
    assert said == "ValueError: the loss is not finite" if rank in ranks else said.startswith(failed), said


def run_planned(replicas: Any, net: Any, plan: Any) -> Any:
    """Run a planned step and return a weak reference to it."""
    trains = plan.phase == "policy_update"
    with replicas.step(plan), torch.set_grad_enabled(trains):
        step = weakref.ref(net.moe[0].token_dispatcher.step)
        for m in range(MICRO_STEPS):
            replay(net, 0, m)
            y = net(batch(0, m))
            if trains:
                y.sum().backward()
    return step


def test_an_error_on_closing_a_step_is_reported_to_the_other_ranks(rank: int) -> None:
    """Closing the step fails on one rank after all ranks have reported completion."""
    net, replicas, plan = make(2)
    closed: list[bool] = []
    own = Step.close

    def close(self: Any, complete: bool) -> None:
        closed.append(complete)
        own(self, complete)
        if complete and rank == 2:
            raise ValueError("a copy was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "close", close)
        first = refusal(lambda: run_planned(replicas, net, plan))
        second = refusal(lambda: replicas.plan(counts_of(0, rank)))
    if rank == 2:
        assert closed == [True, False] and first == "ValueError: a copy was lost" and "begin anew" in second
    else:
        assert closed == [True] and first == "nothing"
        told = "RuntimeError: rank 2 failed: ValueError: a copy was lost; do not use the gradients of this step"
        assert second.startswith(told)
    groups = len(distributed_c10d._world.pg_names)
    replicas.detach()
    assert len(distributed_c10d._world.pg_names) == groups  # messages may still be in flight in these groups


def test_a_finished_step_is_freed_without_the_garbage_collector(rank: int) -> None:
    net, replicas, _ = make()
    gc.disable()
    try:
        phases = ("policy_update", "recompute")
        steps = [run_planned(replicas, net, replicas.plan(counts_of(0, rank), phase)) for phase in phases]
        assert [step() for step in steps] == [None, None]
    finally:
        gc.enable()
