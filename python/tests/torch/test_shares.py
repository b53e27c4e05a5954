"""Ranks plan in shares: each plans some of the layers, and all get the plan that each would make alone.

One spawn of four processes runs all checks.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import begin_rank, run_ranks
from refusals import refusal
from training import LAYERS, RANKS, draw_batches, draw_routes, make_model, spread

import foremoe
from foremoe._engine import shares as shares_module
from foremoe._engine.shares import Shares, layers_of
from foremoe._engine.together import Channel

PLANNED: list[dict[str, Any]] = [
    {"policy": "foremoe", "residency": "resident"},
    {"policy": "foremoe", "residency": "resident", "prefer": "links", "seed": 7},
    {"policy": "foremoe", "residency": "static"},
    {"policy": "foremoe", "residency": "shared"},
    {"policy": "foremoe", "residency": "shared", "in_flight": 2, "guest_slots": 2},
    {"policy": "static", "residency": "static"},
    {"policy": "vanilla", "residency": "shared"},
    {"policy": "eplb", "residency": "static"},
]
FINISH = [  # how a plan is waited for
    lambda running, last: running.begin(),
    lambda running, last: (running.wait_for(last), running.begin())[1],
    lambda running, last: running.finish(),
]


def draw(layers: int, seed: int | None = None) -> foremoe.Load:
    return foremoe.synthesize_load(
        layers=layers, experts=16, top_k=2, ranks=RANKS, ranks_per_node=2, micro_steps=4, tokens_per_rank=256,
        sequences_per_rank=1, group_spread=1, seed=layers if seed is None else seed,
    )  # fmt: skip


def saved(plan: foremoe.Plan) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan")
        return pathlib.Path(f"{folder}/plan").read_bytes()


@contextlib.contextmanager
def watched(before: Callable[[range], None] = lambda layers: None) -> Any:
    """The layers that this rank plans as a share; before(layers) comes first."""
    planned: list[range] = []
    own = shares_module._core._plan

    def plan(*arguments: Any, layers: range, **keywords: Any) -> Any:
        planned.append(layers)
        before(layers)
        return own(*arguments, layers=layers, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares_module, "SMALLEST", 0)
        patch.setattr(shares_module._core, "_plan", plan)
        yield planned


def share() -> dict[str, Any]:
    """Plans of groups of ranks, without a model."""
    found: dict[str, Any] = {"same": [], "planned": []}
    channel = Channel(dist.group.WORLD)
    for i, options in enumerate(PLANNED):
        options = {"guest_slots": 1, **options}
        shares = Shares(channel, {"threads": 1, **options})
        for layers in (6, 2):
            load = draw(layers)
            with watched() as planned:
                running = shares.start_plan(load)
                joined = FINISH[i % len(FINISH)](running, load.num_micro_steps - 1)
                running.finish()
            found["same"].append(saved(joined) == saved(foremoe.plan(load, **options)))
            found["planned"].append([list(of) for of in planned])
        shares.close()

    def fail(layers: range) -> None:
        if dist.get_rank() == 2:
            raise MemoryError("no room")

    load = draw(6)
    shares = Shares(channel, {"policy": "foremoe", "threads": 1})
    with watched(fail):
        failing = shares.start_plan(load)
        found["a rank fails"] = [refusal(failing.begin), refusal(lambda: failing.wait_for(0)), refusal(failing.finish)]
    cold, previous = foremoe.plan(load), foremoe.plan(draw(6, seed=60))
    with watched():
        warm = shares.start_plan(load, previous=previous).finish()
    found["small"] = type(shares.start_plan(load)) is foremoe.RunningPlan
    shares_module.SMALLEST = 0
    found["then"] = saved(shares.start_plan(load).finish()) == saved(cold)
    found["from a previous plan"] = (
        saved(warm) == saved(foremoe.plan(load, previous=previous)),
        saved(warm) != saved(cold),
    )
    found["streamed"] = stream(channel, load)
    few = draw(2)
    found["no such micro-step"] = refusal(lambda: shares.start_plan(load).wait_for(4))
    found["previous of other layers"] = refusal(shares.start_plan(load, previous=foremoe.plan(few)).begin)
    found["wrong option"] = refusal(shares.start_plan(few, guest_slots=-1).begin)  # two ranks have no layers of it
    shares.close()
    return found


def stream(channel: Channel, load: foremoe.Load) -> dict[str, Any]:
    """Residency shared: a phase can begin while all but the first micro-step are still to be planned."""
    shares = Shares(channel, {"policy": "foremoe", "residency": "shared", "threads": 1})
    go, begun = threading.Event(), []

    def hold(layers: range) -> None:
        begun.append(layers)
        if len(begun) > 1:
            assert go.wait(60)

    with watched(hold):
        running = shares.start_plan(load)
        turns = foremoe.RankTurns(running.begin(), load, rank=dist.get_rank(), path="peer")
        first = [copy.arrives for copy in turns.starting(0)]
        held = not go.is_set()
        go.set()
        found = {"same": held and saved(running.finish()) == saved(foremoe.plan(load, residency="shared"))}
    whole = foremoe.RankTurns(running.finish(), load, rank=dist.get_rank(), path="peer")
    found["first"] = first == [copy.arrives for copy in whole.starting(0)]

    def fail(layers: range) -> None:
        begun.append(layers)
        if len(begun) == 3 and dist.get_rank() == 2:
            raise MemoryError("no room")

    begun.clear()
    with watched(fail):
        failing = shares.start_plan(load)
        failing.begin()
        failing.wait_for(1)
        found["fails later"] = [refusal(lambda: failing.wait_for(2)), refusal(failing.finish)]
    shares.close()
    return found


def train(rank: int) -> dict[str, Any]:
    """Phases of foremoe.torch, the second one from the plan of the first; then one that a rank cannot plan."""
    model = make_model(torch.float64)
    ep = spread(model)
    ep.wrap(model)
    found: dict[str, Any] = {"planned": [], "same": []}
    previous = None
    for step in range(2):
        with watched() as planned, ep.plan(draw_routes(rank, 2, step), previous=previous) as phase:
            for m, batch in enumerate(draw_batches(rank, 2, step)):
                with phase.micro_step(m):
                    (model(batch).logits.sum() / 64).backward()
            phase.drain()
        found["planned"].append([list(of) for of in planned])
        found["same"].append(saved(phase.plan) == saved(foremoe.plan(phase._load, guest_slots=1, previous=previous)))
        previous = phase.plan

    def fail(layers: range) -> None:
        if rank == 1:
            raise MemoryError("no room")

    with watched(fail):
        failing = ep.plan(draw_routes(rank, 2, 2))
        found["a rank fails"] = refusal(failing.__enter__)
    ep.detach()
    return found


def work(rank: int, folder: str) -> None:
    begin_rank(rank, RANKS, folder)
    torch.save(share() | {"torch": train(rank)}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(RANKS, work, folder)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]


def test_shares_join_to_the_plan_that_a_rank_makes_alone(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["same"] == [True] * 2 * len(PLANNED)
        assert of["from a previous plan"] == (True, True)


def test_every_layer_is_planned_by_one_rank(found: list[dict[str, Any]]) -> None:
    for case, options in enumerate(PLANNED):
        for i, layers in enumerate((6, 2)):
            by_rank = [of["planned"][2 * case + i] for of in found]
            streams = options["policy"] == "foremoe" and options["residency"] == "shared"
            blocks = 3 if streams else 1  # of one, one and two micro-steps
            for block in range(blocks):
                every = [layer for of in by_rank for share in of[block : block + 1] for layer in share]
                assert every == ([] if options["policy"] == "eplb" else list(range(layers)))
            assert max(len(share) for of in by_rank for share in [*of, []]) <= -(-layers // RANKS)


def test_what_one_rank_raises_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    for of in found:
        failed = "RuntimeError: rank 2 could not plan its layers: MemoryError('no room')"
        assert of["a rank fails"] == [failed] * 3
        assert of["small"] and of["then"]
        assert of["no such micro-step"] == "InputError: micro_step: 4 is not in 0 … 3"
        assert of["previous of other layers"] == "InputError: previous: has 2 layers, but the load has 6"
        assert of["wrong option"].startswith("InputError: guest_slots")


def test_micro_steps_of_residency_shared_stream_in(found: list[dict[str, Any]]) -> None:
    failed = "RuntimeError: rank 2 could not plan its layers: MemoryError('no room')"
    for of in found:
        assert of["streamed"] == {"same": True, "first": True, "fails later": [failed] * 2}


def test_ranks_of_an_expert_parallel_plan_in_shares(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        own = layers_of(rank, RANKS, LAYERS)
        assert of["torch"]["planned"] == 2 * [[list(own)] if own else []]
        assert of["torch"]["same"] == [True, True]
        failed = "RuntimeError: rank 1 could not plan its layers: MemoryError('no room')"
        assert of["torch"]["a rank fails"].startswith(failed)
