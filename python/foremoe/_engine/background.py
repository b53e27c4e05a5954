"""Background threads that outlive neither their owner nor the interpreter.

A daemon thread that returns from torch while the interpreter ends aborts the process. A pool of concurrent.futures
would keep the process until its calls have returned, which may wait for ranks that have ended. So these are daemon
threads that wait by collective() and pause() only, and are stopped and joined before the interpreter ends.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")

END_SECONDS = 5.0
"""Longest wait for stopped threads. A longer call of foremoe._core never returns to an interpreter that ends."""
_POLL_SECONDS = 0.001

_this = threading.local()  # stopped: Event of the Background that runs this thread
_all: weakref.WeakSet[Background] = weakref.WeakSet()
_kept: list[Any] = []  # see keep()


class Stopped(BaseException):
    """Ends a call in a thread that was stopped."""


class Background:
    """Runs calls in threads of its own, in the order of submit()."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=_run, args=(self._calls, self._stopped), name=f"foremoe-{name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()
            weakref.finalize(self, self._calls.put, None).atexit = False
        _all.add(self)

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._is_closed:
            raise RuntimeError("the background threads have ended, by detach() or with the interpreter")
        future: Future[T] = Future()
        self._calls.put((future, lambda: call(*arguments)))
        return future

    def stop(self) -> None:
        """Cancels calls that have not begun, and those that wait. Returns at once."""
        self._is_closed = True
        self._stopped.set()

    def close(self, failed: bool = False) -> None:
        """Ends the threads after the submitted calls. failed: After stop(), within END_SECONDS."""
        self._is_closed = True
        if failed:
            self.stop()
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) if failed else None)


def _run(calls: queue.SimpleQueue[Any], stopped: threading.Event) -> None:
    _this.stopped = stopped
    while (item := calls.get()) is not None:
        future, call = item
        try:
            pause(0)
            future.set_result(call())
        except Stopped:
            future.set_exception(CancelledError())
        except BaseException as error:
            future.set_exception(error)
        del item, future, call  # which refer to tensors


def pause(seconds: float = _POLL_SECONDS) -> None:
    """Sleeps. Raises Stopped at once in a thread that is stopped."""
    stopped = getattr(_this, "stopped", None)
    if stopped is None:
        time.sleep(seconds)
    elif stopped.wait(seconds):
        raise Stopped


def keep(*objects: Any) -> None:
    """Keeps objects until the process ends, since transfers may use them that no rank waits for."""
    _kept.extend(objects)


def collective(call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    """Runs a collective of torch.distributed. Raises Stopped in a stopped thread that waits for other ranks."""
    if not hasattr(_this, "stopped"):
        call(*arguments, **more)
        return
    work = call(*arguments, **more, async_op=True)
    try:
        while not work.is_completed():
            pause()
    except Stopped:
        keep(work, arguments, more)
        raise
    work.wait()


def at_end(call: Callable[..., Any], *arguments: Any) -> None:
    """Runs a call at the interpreter's end, after all background threads have ended."""
    atexit.unregister(_end_all)
    atexit.register(call, *arguments)
    atexit.register(_end_all)  # calls run in the reverse order


@atexit.register
def _end_all() -> None:
    for background in list(_all):
        background.stop()
    for background in list(_all):
        background.close(failed=True)
