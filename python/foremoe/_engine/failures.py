"""How the ranks of a group learn that one of them failed, and why.

A rank that fails leaves its reason in the store of the default group, and closes its channels to the others. On gloo
their exchanges end at once, with an error that names no rank; so they look the reason up. A rank that dies leaves no
reason. Then the survivors leave word that they live, and name those that do not.

On NCCL, an exchange that a rank does not join ends by torch's watchdog, when its timeout expires.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.02
_FAILED, _LOST, _LIVES, _CALLS = "failed", "lost", "lives", "calls"
_KEPT = 64  # calls


class LostConnection(RuntimeError):
    """Another rank has lost a connection."""


class Channel:
    """A process group for rows, copies or agreement. Users ask for the group at each use. Since nobody else refers to
    it, close() ends its connections, and with them what other ranks exchange over it."""

    def __init__(self, group: Any, *, is_own: bool = False) -> None:
        """is_own: whether close() ends the group; a group of the user's stays."""
        self._group = group
        self._is_own = is_own
        self.ends_exchanges = is_own and dist.get_backend(group) == "gloo"  # of other ranks, when it is closed

    @property
    def is_closed(self) -> bool:
        return self._group is None

    @property
    def group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the exchanges between ranks are closed, since a phase failed or detach() ran")
        return self._group

    def close(self) -> None:
        if self._is_own and self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class Failures:
    """What the ranks of one group say of their failures. Each says it once."""

    def __init__(self, name: str, ranks: Sequence[int], own: int, channels: Sequence[Channel]) -> None:
        """name: of this group and nothing else, the same on all of its ranks. ranks: in the default group. own: this
        rank there. channels: between these ranks."""
        self._store = distributed_c10d.PrefixStore(f"foremoe/failures/{name}", distributed_c10d._get_default_store())
        self._ranks = list(ranks)
        self._own = own
        self._channels = list(channels)
        self._told = False

    def end(self, error: BaseException) -> str:
        """Ends the work of all ranks because of an error on this one. Returns which other rank failed, and why, where
        the error is a lost connection to it; "" where the error is this rank's own, and from the second call on."""
        if self._told:
            return ""
        self._told = True
        lost = _is_lost_connection(error)
        try:
            if lost:
                return self._wait_for_reason()
            self._store.compare_set(_FAILED, "", f"{self._own} {type(error).__name__}: {error}")  # the first one counts
            return ""
        except RuntimeError:  # the store ended with the process that serves it
            return "the rank that serves the store of the default group ended" if lost else ""
        finally:
            for channel in self._channels:
                if channel.ends_exchanges:
                    channel.close()

    def reason(self) -> str:
        """Which rank failed first, and why; "" where none has left word."""
        if not self._store.check([_FAILED]):
            return ""
        rank, error = self._store.get(_FAILED).decode().split(" ", 1)
        return f"rank {rank} failed: {error}"

    def expect_connected(self) -> None:
        """Raises LostConnection where another rank has lost a connection: then a rank may have died."""
        if self._store.check([_LOST]):
            raise LostConnection("another rank lost a connection")

    def note(self, number: int, call: str) -> None:
        """Leaves word of this rank's call of a number, for those that wait for its announcement."""
        self._store.set(f"{_CALLS}/{number}", call)
        with contextlib.suppress(RuntimeError):  # not every store deletes
            self._store.delete_key(f"{_CALLS}/{number - _KEPT}")

    def noted(self, number: int) -> str:
        """Of which call of this number a rank has left word; "" of none."""
        key = f"{_CALLS}/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait_for_reason(self) -> str:
        """Until a rank has left its reason, or all ranks but those that died have said that they live."""
        self._store.set(_LOST, "")
        self._store.set(f"{_LIVES}/{self._own}", "")
        silent = [rank for rank in self._ranks if rank != self._own]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and silent:
            if reason := self.reason():
                return reason
            silent = [rank for rank in silent if not self._store.check([f"{_LIVES}/{rank}"])]
            time.sleep(_POLL_SECONDS)
        if not silent:
            return "the connection between ranks was lost"
        ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return f"{ranks} died, or did not answer for {PATIENCE_SECONDS:g} seconds"


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a peer is gone, or does not answer: gloo raises it where this rank is connected to it."""
    return isinstance(error, LostConnection) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
