"""Votes of ranks on a flag or on equal values: one reduction if all ranks agree.

A rank that fails votes without waiting, so that the others learn of it in their next vote.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .failures import Channel
from .together import expect_equal_values, expect_no_errors, number_of, shortened, words_of

_SET, _LEFT = 1, 2


class RankLeft(RuntimeError):
    """Another rank has left the votes."""


class Votes:
    """Votes of ranks, one after the other. A rank that gives up votes without waiting for the others."""

    def __init__(self, channels: Sequence[Channel], device: torch.device | str = "cpu") -> None:
        """
        Args:
            channels: A maximum over the ranks of the first one, and then over those of the second one, reaches every
                rank that votes.
            device: Device of the channels' tensors. With the CPU, nothing here waits for a device.
        """
        self._channels = list(channels)
        self._device = device

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank. Collective. Raises RankLeft if a rank has left."""
        return self._vote(int(flag), 0)[0] == _SET

    def expect_equal(self, values: Mapping[str, str], refused: Exception | None = None) -> None:
        """Requires equal values, by name, on all ranks, and that no rank refuses. Collective.

        Raises InputError with the rank that refuses and its reason, or with the value that differs. The rank that
        refuses raises its own error. Raises RankLeft if a rank has left.
        """
        words = None if refused is None else words_of(refused)
        own = json.dumps([words, {name: shortened(value) for name, value in values.items()}])
        word, most, least = self._vote(int(refused is not None), number_of(own))
        if word != _SET and most == -least:
            return
        said = self._said(own.encode())
        if refused is not None:
            raise refused
        expect_no_errors({rank: words for rank, (words, _) in said.items()})
        expect_equal_values({rank: of for rank, (_, of) in said.items()})

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Returns the maximum of each number over all ranks. Collective. Where ranks may leave, use any() instead."""
        found = torch.tensor(numbers, device=self._device)
        self._reduce(found)
        most: list[int] = found.tolist()
        return most

    def leave(self) -> None:
        """Makes the present or next vote of each other rank raise RankLeft. No vote of this rank may follow."""
        for channel in self._channels:
            with contextlib.suppress(RuntimeError):  # the others may be gone
                vote = torch.tensor([_LEFT, 0, 0], device=self._device)
                dist.all_reduce(vote, dist.ReduceOp.MAX, group=channel.group, async_op=True)

    def _vote(self, word: int, number: int) -> list[int]:
        found = self.most([word, number, -number])
        if found[0] == _LEFT:
            raise RankLeft("another rank left its step by an error")
        return found

    def _said(self, own: bytes) -> dict[int, Any]:
        """Returns the JSON value of each rank. Collective."""
        (longest,) = self.most([len(own)])
        table = torch.zeros(dist.get_world_size(), longest, dtype=torch.uint8, device=self._device)
        table[dist.get_rank(), : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._reduce(table)
        said = [row.tobytes().rstrip(b"\0") for row in table.cpu().numpy()]
        return {rank: json.loads(of) for rank, of in enumerate(said) if of}  # ranks that do not vote say nothing

    def _reduce(self, found: torch.Tensor) -> None:
        for channel in self._channels:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=channel.group)
