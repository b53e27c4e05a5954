"""A failure on one rank ends the phase on all ranks, which report the rank and its error long before a timeout."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from processes import RANKS, begin_rank, rank_starter
from refusals import refusal
from training import begin, draw_batches, draw_routes

from foremoe._engine import abort, failures, planned_phase, shares
from foremoe.torch import relays

FAILING = 2
SECONDS = 60.0
"""Far below gloo's timeout of half an hour, far above what a busy machine needs."""


class Broken(Exception):
    """An error raised by the trainer's own code."""


def break_here() -> None:
    raise Broken("the loss\nis no number")


def break_in_planned_phase() -> None:
    """Fail when the next phase is entered, before its ranks have compared their plans."""
    mock.patch.object(planned_phase, "expect_executable", side_effect=[Broken("the loss\nis no number")]).start()


def break_first_gather() -> None:
    """Fail once, when the destinations of tokens are gathered for the first micro-step."""
    packed, errors = relays.packed, iter([Broken("the loss\nis no number")])

    def fail_once(*arguments: Any) -> bytes:
        for error in errors:
            raise error
        return packed(*arguments)

    mock.patch.object(relays, "packed", fail_once).start()


def train(rank: int, ep: Any, model: Any, breaks: dict[str, Callable[[], None]]) -> None:
    """Train for a phase of two micro-steps. `breaks` maps a place to the function that the failing rank calls there."""
    batches, routes = draw_batches(rank, 2, 1), draw_routes(rank, 2, 1)

    def reach(place: str) -> None:
        if rank == FAILING and place in breaks:
            breaks[place]()

    reach("before")
    with ep.plan(routes) as phase:
        for m, batch in enumerate(batches):
            reach("between")
            with phase.micro_step(m):
                logits = model(batch).logits
                reach("inside")
                (logits.sum() / 64).backward()
        reach("drain")
        phase.drain()


CASES: dict[str, tuple[dict[str, Any], dict[str, Callable[[], None]]]] = {
    "entering": ({}, {"before": break_in_planned_phase}),
    "inside": ({}, {"inside": break_here}),
    "inside, shared": ({"residency": "shared", "depth": 3}, {"inside": break_here}),
    "inside, host path": ({"path": "host", "ranks_per_node": 2}, {"inside": break_here}),
    "inside, by token": ({"dispatch": "token", "ranks_per_node": 2}, {"inside": break_here}),
    "gathering tokens": ({"dispatch": "token", "ranks_per_node": 2}, {"before": break_first_gather}),
    "between": ({}, {"between": break_here}),
    "before the drain": ({}, {"drain": break_here}),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_stop_name_the_failed_rank_and_can_train_again_after_detach(rank: int, case: str) -> None:
    options, breaks = CASES[case]
    threads = set(threading.enumerate())
    ep, model, _ = begin(**options)
    since = time.monotonic()
    said = refusal(lambda: train(rank, ep, model, breaks))
    assert time.monotonic() - since < SECONDS
    mock.patch.stopall()
    own = "Broken: the loss\nis no number"
    assert said.startswith(own if rank == FAILING else f"RuntimeError: rank {FAILING} failed: {own}; "), said
    with pytest.raises(RuntimeError):
        ep.plan(draw_routes(rank, 2, 1))
    ep.detach()
    assert set(threading.enumerate()) <= threads
    again, model, _ = begin(**options)
    train(rank, again, model, {})
    again.detach()
    assert set(threading.enumerate()) <= threads


class StandIn:
    """Lets exchanges of rows over gloo behave as on NCCL: they end by abort_group(), not by another rank's failure."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.aborted: list[Any] = []
        self.is_waiting = False
        self.was_waiting = False  # when its group was aborted

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        make, exchange = failures.Channel.__init__, dist.all_to_all_single

        def make_like_nccl(channel: Any, group: Any, *, is_own: bool = False) -> None:
            make(channel, group, is_own=is_own)
            if is_own and not self.groups:  # the group of rows is the first one
                self.groups.append(group)
                channel.waits_on_device, channel.ends_exchanges = True, False

        def wait(*arguments: Any, group: Any = None, **options: Any) -> None:
            since, work = time.monotonic(), exchange(*arguments, group=group, async_op=True, **options)
            self.is_waiting = True
            while not work.is_completed():
                if group in self.aborted:
                    self.was_waiting = True
                    raise RuntimeError("NCCL communicator was aborted")
                assert time.monotonic() - since < SECONDS, "no thread aborted the group"
                time.sleep(0.001)
            self.is_waiting = False

        with (
            mock.patch.object(failures.Channel, "__init__", make_like_nccl),
            mock.patch.object(abort, "abort_group", self.aborted.append),
            mock.patch.object(abort, "finished_check", lambda *_: lambda: not self.is_waiting),
            mock.patch.object(dist, "all_to_all_single", wait),
        ):
            yield


def leave_early(rank: int, ep: Any) -> None:
    with ep.plan(draw_routes(rank, 2, 1)):
        pass


def test_ranks_that_wait_for_a_failed_rank_on_nccl_end_when_their_groups_are_aborted(rank: int) -> None:
    stand_in, threads = StandIn(), set(threading.enumerate())
    with stand_in.installed():
        ep, model, _ = begin()
        since = time.monotonic()
        said = refusal(lambda: train(rank, ep, model, {"inside": break_here}))
        assert time.monotonic() - since < SECONDS
        own = "Broken: the loss\nis no number"
        if rank == FAILING:
            assert said.startswith(own)
        else:
            assert said.startswith(f"RuntimeError: rank {FAILING} failed: {own}; "), said
            assert stand_in.was_waiting and stand_in.aborted == stand_in.groups == [ep.ranks.rows.group]
        with pytest.raises(RuntimeError, match="cannot be gathered"):  # on all ranks, so that no other one waits
            ep.detach()
        assert rank != FAILING or not stand_in.aborted  # it waits for nobody
    assert set(threading.enumerate()) <= threads


def test_no_group_is_aborted_if_all_ranks_have_left_their_exchanges(rank: int) -> None:
    stand_in = StandIn()
    with stand_in.installed():
        ep, _, _ = begin()
        assert "was left before its last micro-step" in refusal(lambda: leave_early(rank, ep))
        assert "cannot be gathered" in refusal(ep.detach)
        assert stand_in.groups and not stand_in.aborted


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work_until_killed(rank: int, folder: str, place: str) -> None:
    begin_rank(rank, RANKS, folder)
    ep, model, _ = begin()
    if rank == FAILING and place == "planning":
        mock.patch.object(shares._core, "_plan", die).start()
    mock.patch.object(shares, "SMALLEST", 0).start()
    try:
        train(rank, ep, model, {place: die})
    except Exception as error:
        pathlib.Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        time.sleep(failures.PATIENCE_SECONDS + 1)  # so that other ranks do not report this rank as dead
    os._exit(0)


@pytest.mark.parametrize("place", ["inside", "planning"])
def test_surviving_ranks_name_the_killed_rank(tmp_path: pathlib.Path, place: str) -> None:
    arguments = str(tmp_path), place
    ranks = [rank_starter().Process(target=work_until_killed, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [-signal.SIGKILL if r == FAILING else 0 for r in range(RANKS)]
    for rank in set(range(RANKS)) - {FAILING}:
        words = (tmp_path / f"{rank}.txt").read_text()
        assert words.startswith(f"RuntimeError: rank {FAILING} died, or did not answer"), words
