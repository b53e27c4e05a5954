"""Collective calls: all ranks of a group must make the same calls in the same order.

A rank announces each call before its first exchange and waits for the other announcements. If only one rank makes a
call, that call therefore ends with an error that names it, before ranks exchange data of different sizes. On NCCL,
announcements use a gloo group, so that a rank learns of a failure even if its device waits for the failed rank. On
gloo, announcements use the group of copies, which otherwise runs only point-to-point operations. A rank announces a
micro-step in the store without waiting: its exchanges use the group of rows, which closes on a mismatch.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .failures import Channel, Failures
from .together import spelled

_LENGTH = 64  # bytes of a call's name
_POLL_SECONDS = 0.001
_LOOK_SECONDS = 0.1  # between checks of the store


class Calls:
    """Announces the calls of this rank."""

    def __init__(self, channel: Channel, failures: Failures, device: torch.device) -> None:
        """device: Device of the channel's tensors."""
        self._channel = channel
        self._failures = failures
        self._device = device
        self._first = dist.get_process_group_ranks(channel.group)[0]  # distinguishes replicas, which report together
        self._number = 0  # of the last call

    def passing(self, name: str) -> None:
        """Announces a call whose exchanges use other groups. Does not wait."""
        self._number += 1
        self._failures.note(self._first, self._number, name)

    def expect(self, name: str) -> None:
        """Announces a collective call, and waits until all ranks have announced one.

        Raises RuntimeError, on all ranks, if the calls differ or another rank failed.
        """
        self._number += 1
        own = torch.frombuffer(bytearray(name.encode().ljust(_LENGTH)[:_LENGTH]), dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._channel.group))]
        work = dist.all_gather(parts, own, group=self._channel.group, async_op=True)
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                self._expect_no_other(name)
        work.wait()
        ranks = dist.get_process_group_ranks(self._channel.group)
        names = {rank: bytes(part.tolist()).decode().rstrip() for rank, part in zip(ranks, parts, strict=True)}
        if len(set(names.values())) > 1:
            raise RuntimeError(f"ranks make different collective calls: {spelled(names)}; expected the same of all")

    def _expect_no_other(self, name: str) -> None:
        if other := self._failures.noted(self._first, self._number):
            raise RuntimeError(f"ranks make different collective calls: {name} on this one, {other} on another one")
        self._failures.expect_none()
