"""How a planned step of Megatron-LM ends: complete, by micro-batches that are not the plan's, or by an error.

One spawn of four processes runs all checks.
"""

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
from torch.distributed import distributed_c10d

import foremoe.megatron
from foremoe._engine.guests import Guests
from foremoe.megatron.step import Step


def consult_twice(net: Any) -> None:
    net.moe[1].register_forward_pre_hook(lambda layer, inputs: (layer.router(inputs[0]), None)[1])


def pass_by_router(net: Any) -> None:
    router = net.moe[1].router
    net.moe[1].route = lambda hidden, *given: router.forward(hidden, *given)


def replay_nothing(net: Any) -> None:
    net.moe[1].router.router_replay.clear_router_replay_action()


def turn_choice(net: Any) -> None:
    """As many rows for each expert as planned, but not those that are replayed."""
    net.moe[0].router.register_forward_hook(lambda *of: tuple(out.roll(1, 0) for out in of[2]))


def failures() -> dict[str, str]:
    """Micro-batches that are not the plan's."""

    def run(
        step: int, order: str, ep: int = 4, spoilt: bool = False, change: Callable[[Any], Any] = lambda net: None
    ) -> str:
        begin_groups(ep)
        net = make_net(make_config(Case(ep=ep)))
        replicas = foremoe.megatron.attach(net, ranks_per_node=2)
        plan = replicas.plan(counts_of(0, dist.get_rank()))
        first = None
        try:
            with replicas.step(plan):
                micro_step = -1
                for act in order:
                    if act == "f":
                        micro_step += 1
                        replay(net, step, micro_step % MICRO_STEPS)
                        change(net)
                        y = net(batch(step, micro_step % MICRO_STEPS))
                        first = y if first is None else first
                    else:
                        y.sum().backward()
                if spoilt:  # as if a row had gone elsewhere, and no exchange had failed of it
                    net.moe[0].token_dispatcher.step.others[0, 0] = True
        except RuntimeError as error:
            message = " ".join([str(error), *getattr(error, "__notes__", [])])
            with pytest.raises(RuntimeError, match="attach anew"):
                replicas.plan(counts_of(0, dist.get_rank()))
            return message
        y.sum().backward()
        return "nothing"

    return {
        "fewer": run(0, "fbfb"),
        "more": run(0, "fbfbfbf"),
        "out of order": run(0, "ff"),
        "no backward": run(0, "fbfbf"),
        "a router twice": run(0, "fb", change=consult_twice),
        "no router": run(0, "fb", change=pass_by_router),
        "no replay": run(0, "fb", change=replay_nothing),
        "other order": run(0, "fbfbfb", change=turn_choice),
        "other routes": run(1, "fbfbfb"),
        "of another replica": run(0, "fbfbfb", ep=2, spoilt=dist.get_rank() < 2),
    }


def left(ranks: tuple[int, ...], micro_steps: int) -> str:
    """These ranks leave the step by an error of the trainer's own, after so many micro-batches; it is caught. Others
    ask late for the gradients that they sent, and nothing of their step is left by then."""
    own = Guests.bring_home

    def bring_home_late(self: Any, layer: int) -> None:
        time.sleep(0.5)
        own(self, layer)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() not in ranks:
            patch.setattr(Guests, "bring_home", bring_home_late)
        return left_by(ranks, micro_steps)


def left_by(ranks: tuple[int, ...], micro_steps: int) -> str:
    begin_groups(2)
    net = make_net(make_config(Case(ep=2)))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    plan = replicas.plan(counts_of(0, dist.get_rank()))
    y = None
    try:
        with replicas.step(plan):
            for m in range(MICRO_STEPS):
                if dist.get_rank() in ranks and m == micro_steps:
                    raise ValueError("the loss is not finite")
                replay(net, 0, m)
                y = net(batch(0, m))
                y.sum().backward()
            if dist.get_rank() in ranks:
                raise ValueError("the loss is not finite")
        said = "nothing"
    except (ValueError, RuntimeError) as error:
        with pytest.raises(RuntimeError, match="attach anew"):
            replicas.plan(counts_of(0, dist.get_rank()))
        said = str(error)
    del replicas, plan, net, y
    gc.collect()
    return said


def fail_to_end() -> dict[str, Any]:
    """The end of a step fails on one rank, after all have said that theirs was complete."""
    begin_groups(2)
    net = make_net(make_config(Case(ep=2)))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    closed: list[bool] = []
    own = Step.close

    def close(self: Any, complete: bool) -> None:
        closed.append(complete)
        own(self, complete)
        if complete and dist.get_rank() == 2:
            raise ValueError("a copy was lost")

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "close", close)
        plan = replicas.plan(counts_of(0, dist.get_rank()))
        for work in (lambda: run_planned(replicas, net, plan), lambda: replicas.plan(counts_of(0, dist.get_rank()))):
            try:
                work()
                said.append("nothing")
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
    groups = len(distributed_c10d._world.pg_names)
    replicas.detach()
    return {"closed": closed, "said": said, "groups": len(distributed_c10d._world.pg_names) - groups}


def run_planned(replicas: Any, net: Any, plan: Any) -> Any:
    """Returns a weak reference to the step."""
    trains = plan.phase == "policy_update"
    with replicas.step(plan), torch.set_grad_enabled(trains):
        step = weakref.ref(net.moe[0].token_dispatcher.step)
        for m in range(MICRO_STEPS):
            replay(net, 0, m)
            y = net(batch(0, m))
            if trains:
                y.sum().backward()
    return step


def let_go() -> list[Any]:
    """Of each phase what is left of its step, without the garbage collector."""
    begin_groups(4)
    net = make_net(make_config(Case()))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2)
    gc.disable()
    steps = [
        run_planned(replicas, net, replicas.plan(counts_of(0, dist.get_rank()), phase))
        for phase in ("policy_update", "recompute")
    ]
    left = [step() is None for step in steps]
    gc.enable()
    return left


def work(rank: int) -> dict[str, Any]:
    return {
        "failed": failures(),
        "left": [left((0, 1), 1), left((2,), MICRO_STEPS)],
        "end": fail_to_end(),
        "gone": let_go(),
    }


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("fewer", "the step was left before the last micro-step of its plan"),
        ("more", "moe.0: ran once more than the 3 micro-steps of the plan"),
        ("out of order", "moe.0: its forward of micro-step 1 ran out of order"),
        ("no backward", "the step was left before the last micro-step of its plan"),
        ("a router twice", "moe.1: its router was consulted 2 times in micro-step 0; expected once"),
        ("no router", "moe.1: its router was consulted 0 times in micro-step 0; expected once"),
        ("no replay", "moe.1: its RouterReplay has no router_replay_action, but routes were given to it or to others"),
        ("other order", "the rows of moe.0 in micro-step 0 were not those"),
        ("other routes", "the rows of moe.0 in micro-step 0 were not those that counts told plan()"),
    ],
)
def test_micro_batches_that_are_not_the_plans_end_the_step(found: list[dict[str, Any]], what: str, words: str) -> None:
    for of in found:
        assert words in of["failed"][what], of["failed"][what]


def test_replicas_of_a_group_that_failed_do_not_use_its_gradients(found: list[dict[str, Any]]) -> None:
    said = [of["failed"]["of another replica"] for of in found]
    assert all("the rows of moe.0 in micro-step 0 were not those" in message for message in said[:2]), said
    assert all("rows in another expert-parallel group were not those of its plan" in m for m in said[2:]), said


def test_an_error_in_one_expert_parallel_group_ends_the_steps_of_the_others(found: list[dict[str, Any]]) -> None:
    for which, ranks in enumerate([(0, 1), (2,)]):
        failed = tuple(f"rank {rank} failed: ValueError: the loss is not finite: do not use" for rank in ranks)
        for rank, of in enumerate(found):
            said = of["left"][which]
            assert said == "the loss is not finite" if rank in ranks else said.startswith(failed), (which, rank, said)


def test_an_error_at_the_end_of_a_step_ends_it_as_one_inside_and_the_other_ranks_hear_of_it(
    found: list[dict[str, Any]],
) -> None:
    own, *others = [found[rank]["end"] for rank in (2, 0, 1, 3)]
    assert own["closed"] == [True, False] and own["said"][0] == "a copy was lost" and "attach anew" in own["said"][1]
    for of in others:
        assert of["closed"] == [True] and of["said"][0] == "nothing"
        assert of["said"][1].startswith("rank 2 failed: ValueError: a copy was lost: do not use the step's gradients")
    assert [of["end"]["groups"] for of in found] == [0] * len(found)  # something may be on its way in them


def test_a_step_that_has_ended_leaves_nothing_to_the_garbage_collector(found: list[dict[str, Any]]) -> None:
    assert [of["gone"] for of in found] == [[True, True]] * len(found)
