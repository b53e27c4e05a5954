"""Which failures abort the NCCL groups of a rank. Groups and the device are stand-ins, without process groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from foremoe._engine import abort
from foremoe._engine.abort import Abort

CPU = torch.device("cpu")
SOON = 0.05
"""Seconds within which a thread looks again, and the grace, in these tests."""


class Group:
    """A process group that counts its aborts."""

    aborts = 0

    def abort(self) -> None:
        self.aborts += 1


class Rank:
    """A rank with two groups, whose device waits and whose peers have failed as the test says."""

    def __init__(self) -> None:
        self.groups = Group(), Group()
        self.is_waiting = False
        self.store = dist.HashStore()
        self.abort = Abort(self.groups, CPU, self.store, ["other", "failed"])

    def fail(self) -> None:
        self.store.set("failed", "")

    def aborts(self) -> list[int]:
        """Waits until the thread would have aborted. Returns the aborts of each group."""
        time.sleep(10 * SOON)
        return [group.aborts for group in self.groups]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank()
    monkeypatch.setattr(abort, "finished_check", lambda *_: lambda: not rank.is_waiting)
    monkeypatch.setattr(abort, "LOOK_SECONDS", SOON)
    monkeypatch.setattr(abort, "GRACE_SECONDS", SOON)
    yield rank
    rank.abort.close()


def test_a_rank_that_waits_inside_a_phase_aborts_all_its_groups_once_and_cannot_end_well(one: Rank) -> None:
    one.abort.enter()
    one.is_waiting = True
    assert one.aborts() == [0, 0]  # nobody has failed
    one.fail()
    assert one.aborts() == [1, 1]
    one.is_waiting = False
    with pytest.raises(RuntimeError, match="groups were aborted"):
        one.abort.leave(failed=False)
    assert one.aborts() == [1, 1]
    assert one.abort.close()


def test_a_rank_that_begins_to_wait_long_after_the_failure_aborts_its_groups(one: Rank) -> None:
    one.abort.enter()
    one.fail()
    assert one.aborts() == [0, 0]
    one.is_waiting = True
    assert one.aborts() == [1, 1]


def test_what_the_device_began_before_an_error_is_aborted(one: Rank) -> None:
    one.abort.enter()
    one.is_waiting = True
    one.fail()
    one.abort.leave(failed=True)
    assert one.abort.close()
    assert [group.aborts for group in one.groups] == [1, 1]


def test_no_group_is_aborted_after_a_phase_that_ended_well(one: Rank) -> None:
    one.abort.enter()
    one.abort.leave(failed=False)
    one.is_waiting = True
    one.fail()
    assert one.aborts() == [0, 0]


def test_no_group_is_aborted_for_exchanges_that_begin_after_a_failed_phase(one: Rank) -> None:
    one.abort.enter()
    one.fail()
    one.abort.leave(failed=True)
    time.sleep(5 * SOON)
    one.is_waiting = True
    assert one.aborts() == [0, 0]


def test_a_device_that_makes_progress_is_not_aborted_however_busy(one: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def finishes_later(*_: object) -> Callable[[], bool]:
        since = time.monotonic()
        return lambda: time.monotonic() - since > SOON / 2

    monkeypatch.setattr(abort, "finished_check", finishes_later)
    one.abort.enter()
    one.fail()
    assert one.aborts() == [0, 0]


def test_a_phase_that_ends_well_first_waits_for_its_device(one: Rank) -> None:
    one.abort.enter()
    one.is_waiting = True
    done = threading.Timer(5 * SOON, lambda: setattr(one, "is_waiting", False))
    done.start()
    one.abort.leave(failed=False)
    assert not one.is_waiting


def test_one_thread_watches_phases_that_follow_each_other(one: Rank) -> None:
    for _ in range(5):
        one.abort.enter()
        one.abort.leave(failed=False)
    one.abort.enter()
    one.is_waiting = True
    one.fail()
    assert one.aborts() == [1, 1]


def test_a_store_that_ends_with_its_rank_is_a_failure(one: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        def check(self, *_: object) -> bool:
            raise RuntimeError("Connection reset by peer")

        set = check

    monkeypatch.setattr(one.abort, "_store", Ended())
    one.abort.enter()
    one.is_waiting = True
    assert one.aborts() == [1, 1]


def test_work_that_begins_after_a_failed_phase_was_left_aborts_nothing(
    one: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, done = [1], [0]

    def finished_check(*_: object) -> Callable[[], bool]:
        last = queued[0]
        return lambda: done[0] >= last

    monkeypatch.setattr(abort, "finished_check", finished_check)
    one.abort.enter()
    one.fail()
    one.abort.leave(failed=True)
    queued[0], done[0] = 2, 1  # the second one never finishes
    assert one.aborts() == [0, 0]


def test_ranks_without_nccl_groups_start_no_thread() -> None:
    nothing = Abort([], CPU, None, [])
    nothing.enter()
    nothing.leave(failed=False)
    assert nothing._thread is None
