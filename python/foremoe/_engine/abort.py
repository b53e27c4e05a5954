"""The end of exchanges on NCCL in which this rank waits for a rank that has failed.

Such a rank waits for its device, which no exception reaches; torch's watchdog ends it only minutes later. So a thread
of each rank looks for failures while a phase runs. After one, it aborts the rank's NCCL groups if the device does not
finish its queued work within GRACE_SECONDS. Each rank decides for itself; a rank that is not waiting aborts no group.

After an abort the device goes on with wrong values. So groups are aborted only while the phase can still raise an
error, or after it has raised one, never after its result was accepted.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .background import Background, pause

_log = logging.getLogger("foremoe")

GRACE_SECONDS = 2.5
"""Time for a device to finish its queued work. A device that takes longer is waiting for another rank."""
LOOK_SECONDS = 1.0
"""Seconds between looks for a failure: few, since all ranks ask the same store."""
_POLL_SECONDS = 0.001


def unwrapped(group: Any) -> Any:
    """Returns the process group inside a wrapper of slime or miles, which is None while they sleep."""
    return getattr(group, "group", group)


def abort_group(group: Any) -> None:
    """Ends all exchanges of an NCCL group on this rank, also those for which the device waits.

    The group can only be destroyed afterwards.
    """
    inside = unwrapped(group)
    if inside is not None:
        inside.abort()


def finished_check(stream: Any) -> Callable[[], bool]:
    """Returns a function that tells whether the work now queued on the stream has finished."""
    if stream is None:
        return lambda: True
    try:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    except RuntimeError:  # the device has failed, so it waits for no rank
        return lambda: True
    return event.query


class Abort:
    """Aborts the NCCL groups of one rank. The training thread calls enter() and leave() around each phase."""

    def __init__(self, groups: Sequence[Any], device: torch.device, store: Any, failures: Sequence[str]) -> None:
        """store: A torch.distributed.Store for the thread alone. failures: Its keys that a failed rank sets."""
        self._groups = list(groups)
        self._device = device
        self._store = store
        self._failures = list(failures)
        self._thread = Background("abort") if self._groups else None
        self._watching: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._watching.set_result(None)
        self._stream: Any = None  # of the training thread
        self._lock = threading.Lock()  # of the members below
        self._is_watched = False
        self._left: Callable[[], bool] | None = None  # set by leave(): whether the phase's queued work has finished
        self.has_aborted = False

    def enter(self) -> None:
        """Begins to look for failures."""
        if self._thread is None:
            return
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with self._lock:
            self._left = None
            if not self._is_watched:
                self._is_watched = True
                self._watching = self._thread.submit(self._watch)

    def leave(self, failed: bool) -> None:
        """Ends the phase. failed: it raises an error; the thread looks on until the queued work has finished.

        Otherwise waits for the device, and raises RuntimeError if groups were aborted.
        """
        if self._thread is None:
            return
        finished = finished_check(self._stream)
        while not failed and not finished() and not self.has_aborted:
            time.sleep(_POLL_SECONDS)
        with self._lock:
            self._left = finished if failed else lambda: True
        if not failed and self.has_aborted:
            raise RuntimeError("a rank failed while this one waited for it, so that NCCL groups were aborted")

    def close(self) -> bool:
        """Ends the thread, after it has decided about a failed phase. Returns whether a rank has failed."""
        if self._thread is None:
            return False
        concurrent.futures.wait([self._watching], 2 * (GRACE_SECONDS + LOOK_SECONDS))
        self._thread.close(failed=True)
        return self._has_failed()

    def _watch(self) -> None:
        finished: Callable[[], bool] | None = None  # whether the work queued at `since` has finished
        since = 0.0
        while True:
            if finished() if finished is not None else self._has_failed():
                finished, since = finished_check(self._stream), time.monotonic()
            with self._lock:
                if self._left is not None and self._left():
                    self._is_watched = False
                    return
                if finished is not None and not finished() and time.monotonic() - since > GRACE_SECONDS:
                    self.has_aborted = True
                    break
            pause(LOOK_SECONDS if finished is None else LOOK_SECONDS / 10)
        aborting = Background("abort-groups", len(self._groups))  # an abort may wait for kernels of another group
        aborted = [aborting.submit(abort_group, group) for group in self._groups]
        aborting.close()
        for error in filter(None, (of.exception() for of in aborted)):
            _log.warning("could not abort an NCCL group: %s", error)

    def _has_failed(self) -> bool:
        try:
            return any(self._store.check([key]) for key in self._failures)
        except RuntimeError:  # the rank that serves the store has ended
            return True
