"""The end of exchanges on NCCL in which this rank waits for a rank that has failed.

Such a rank waits for its device, which no exception reaches; torch's watchdog ends it only minutes later. So a thread
of each rank looks for failures while a phase runs. It aborts the rank's NCCL groups if, GRACE_SECONDS after a failure,
the device has not finished. Each rank decides for itself: a rank that waits for nobody aborts nothing.

After an abort the device goes on with wrong values. So groups are aborted only while the phase can still raise an
error, or after it has raised one, never after its result was accepted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .background import Background, pause

_log = logging.getLogger("foremoe")

GRACE_SECONDS = 2.5
"""Longest time in which a device finishes what it has begun, unless it waits for another rank."""
LOOK_SECONDS = 1.0
"""Seconds between looks for a failure: few, since all ranks ask the same store."""
_ABORTED = "aborted"


def abort_group(group: Any) -> None:
    """Ends all exchanges of an NCCL group on this rank, also those for which the device waits.

    The group can only be destroyed afterwards.
    """
    inside = getattr(group, "group", group)  # slime and miles wrap groups, and keep none while they sleep
    if inside is not None:
        inside.abort()


def finished_check(device: torch.device) -> Callable[[], bool]:
    """Returns a function that says whether the device has finished what the current stream has begun by now."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
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
        self._lock = threading.Lock()  # of the members below
        self._is_inside = False
        self._is_over = True
        self._has_finished: Callable[[], bool] = lambda: True
        self.has_aborted = False
        self._watching: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._watching.set_result(None)

    @classmethod
    def of_no_group(cls) -> Abort:
        """Returns one that does nothing."""
        return cls([], torch.device("cpu"), None, [])

    def enter(self) -> None:
        """Begins to look for failures."""
        if self._thread is None:
            return
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with self._lock:
            self._is_inside, self._is_over = True, False
            self._has_finished = finished_check(self._device) if stream is None else stream.query
        self._watching = self._thread.submit(self._watch)

    def leave(self, failed: bool) -> None:
        """Ends the phase. failed: it raises an error; looks on until the device has finished what the phase began.

        Raises RuntimeError if groups were aborted although the phase has not failed.
        """
        if self._thread is None:
            return
        with self._lock:
            self._is_inside, self._is_over = False, not failed
            self._has_finished = finished_check(self._device)
        if not failed and self.has_aborted:
            raise RuntimeError("a rank failed while this one waited for it, so that NCCL groups were aborted")

    def close(self) -> bool:
        """Ends the thread, after a failed phase not before all ranks have decided. Returns whether any has aborted."""
        if self._thread is None:
            return False
        concurrent.futures.wait([self._watching], 2 * (GRACE_SECONDS + LOOK_SECONDS))
        self._thread.close(failed=True)
        return self.has_aborted or self._has(_ABORTED)

    def _watch(self) -> None:
        failed_at = None
        while True:
            if failed_at is None and any(map(self._has, self._failures)):
                failed_at = time.monotonic()
            since = 0.0 if failed_at is None else time.monotonic() - failed_at
            with self._lock:
                finished = self._has_finished()
                if self._is_over or (finished and not self._is_inside and since > GRACE_SECONDS + LOOK_SECONDS):
                    return
                if since > GRACE_SECONDS and not finished:
                    self.has_aborted = True
                    break
            pause(LOOK_SECONDS if failed_at is None else LOOK_SECONDS / 10)
        with contextlib.suppress(RuntimeError):
            self._store.set(_ABORTED, "")
        aborting = Background("abort-groups", len(self._groups))  # an abort may wait for kernels of another group
        aborted = [aborting.submit(abort_group, group) for group in self._groups]
        aborting.close()
        for error in filter(None, (of.exception() for of in aborted)):
            _log.warning("could not abort an NCCL group: %s", error)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:  # the rank that serves the store has ended
            return True
