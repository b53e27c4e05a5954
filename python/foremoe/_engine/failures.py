"""Channels between ranks, and reports of failed ranks.

A rank that fails writes its reason to the store of the default group and closes its channels to the others. On gloo,
exchanges of the other ranks end at once, with an error that names no rank, so these ranks look up the reason. A rank
that dies writes no reason. Then the survivors report that they are alive, and name the ranks that do not report. On
NCCL a rank may wait for its device; see abort.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .abort import Abort, unwrapped

PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.02
_FAILED, _LOST, _LIVES, _CALLS = "failed", "lost", "lives", "calls"
_KEPT = 64  # calls


class LostConnection(RuntimeError):
    """Another rank has failed or lost a connection."""


class Channel:
    """A process group for rows, copies or agreement. Callers read `group` at each use and store no reference, so
    close() ends its connections and the exchanges of other ranks over them."""

    def __init__(self, group: Any, *, is_own: bool = False) -> None:
        """is_own: whether close() destroys the group; a user's group is not destroyed."""
        self._group = group
        self._is_own = is_own
        self.ends_exchanges = is_own and dist.get_backend(group) == "gloo"  # closing it ends exchanges of other ranks
        backend = "" if group is None else dist.get_backend(group)
        # If no backend is named, torch makes gloo and, where there are GPUs, NCCL.
        self.waits_on_device = "nccl" in backend or (backend == "undefined" and torch.cuda.is_available())

    @property
    def group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the exchanges between ranks are closed, since a phase failed or detach() ran")
        return self._group

    def close(self) -> None:
        if self._is_own and self._group is not None:
            destroy_group(self._group)
            self._group = None


def destroy_group(group: Any) -> None:
    inside = unwrapped(group)
    if inside is not None:
        dist.destroy_process_group(inside)


class Failures:
    """Failures that the ranks of one group report. Each rank reports at most one, by its Session."""

    def __init__(
        self, name: str, ranks: Sequence[int], own: int, channels: Sequence[Channel], device: torch.device
    ) -> None:
        """
        Args:
            name: Unique name of this group, the same on all of its ranks.
            ranks: Its ranks in the default group.
            own: This rank in the default group.
            channels: Channels between these ranks. A failure closes our gloo groups, and aborts NCCL groups, also those
                of the trainer, in which this rank waits.
            device: Device of the rows.
        """
        store, prefix = distributed_c10d._get_default_store(), f"foremoe/failures/{name}"
        self._store = distributed_c10d.PrefixStore(prefix, store)
        self._ranks = list(ranks)
        self._own = own
        self._channels = list(channels)
        on_device = [channel.group for channel in channels if channel.waits_on_device]
        # A store's client serves one call at a time, and the training thread may wait in one.
        apart = distributed_c10d.PrefixStore(prefix, store.clone()) if on_device else self._store
        self.abort = Abort(on_device, device, apart, [_FAILED, _LOST])

    def end(self, error: BaseException) -> str:
        """Reports an error of this rank, which ends the exchanges of all ranks.

        Returns the rank that failed and its reason if the error is a lost connection; "" if the error is this rank's
        own.
        """
        lost = self.abort.has_aborted or _is_lost_connection(error)
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
        """Returns the first rank that failed and its reason; "" if none has reported."""
        if not self._store.check([_FAILED]):
            return ""
        rank, error = self._store.get(_FAILED).decode().split(" ", 1)
        return f"rank {rank} failed: {error}"

    def expect_none(self) -> None:
        """Raises LostConnection if a rank has failed, or has lost a connection, since another one may have died."""
        if (reason := self.reason()) or self._store.check([_LOST]):
            raise LostConnection(reason or "another rank lost a connection")

    def note(self, first: int, number: int, call: str) -> None:
        """Stores the name of this rank's call, for ranks that wait for its announcement.

        first: First rank of the group that makes the call. Replicas may run different numbers of micro-steps.
        """
        self._store.set(f"{_CALLS}/{first}/{number}", call)
        with contextlib.suppress(RuntimeError):  # not every store deletes
            self._store.delete_key(f"{_CALLS}/{first}/{number - _KEPT}")

    def noted(self, first: int, number: int) -> str:
        """Returns the stored name of the call of this number; "" without one."""
        key = f"{_CALLS}/{first}/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait_for_reason(self) -> str:
        """Waits until a reason is stored, all other ranks have reported, or PATIENCE_SECONDS have passed."""
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
    """Whether gloo raised the error because a connected peer is gone or does not answer."""
    return isinstance(error, LostConnection) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
