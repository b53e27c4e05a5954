"""What all ranks that train one model must find alike, and refuse together.

Its ranks are those of all pipeline and tensor parallel groups and of all replicas. Where one of them refused alone, the
others would wait for it in the next exchange, until a timeout.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe

from .alike import digest_of, expect_none_refused, expect_values_alike, number_of, words_of
from .communication import gathered
from .failures import Failures

_REFUSES, _LEFT = 1, 2


class Agreement:
    """Words between all ranks. A rank that gives up leaves its word without waiting."""

    def __init__(self, groups: Sequence[Any], failures: Failures) -> None:
        """groups: of gloo, so that nothing here waits for a device. What reaches all ranks of the first, and then all
        of the second, has reached all."""
        self._groups = list(groups)
        self._failures = failures
        self.is_over = False  # a rank has left, as far as this one has heard

    def expect_open(self) -> None:
        """Raises RuntimeError where a rank has left."""
        if self.is_over:
            raise RuntimeError("a step failed: what it sent may still be on its way; attach anew with other groups")

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Collective. Raises RuntimeError where a rank has left."""
        return self._most(int(flag), 0)[0] == _REFUSES

    def expect_alike(self, values: Mapping[str, str], refused: Exception | None = None) -> None:
        """All ranks have the same values, by name, and none refuses. Collective.

        Raises InputError that names the rank that refuses, and why, or the value that differs; on a rank that refuses,
        what it refuses by. Raises as any().
        """
        words = None if refused is None else words_of(refused)
        own = json.dumps([words, values])
        word, most, least = self._most(int(refused is not None), number_of(own))
        if word != _REFUSES and most == -least:
            return
        said = self._said(own.encode())
        if refused is not None:
            raise refused
        expect_none_refused({rank: words for rank, (words, _) in said.items()})
        expect_values_alike({rank: values for rank, (_, values) in said.items()})

    def _said(self, own: bytes) -> dict[int, Any]:
        """What each rank says, in JSON. Collective."""
        longest = torch.tensor([len(own)])
        self._reduce(longest)
        table = torch.zeros(dist.get_world_size(), int(longest), dtype=torch.uint8)
        table[dist.get_rank(), : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._reduce(table)
        return {rank: json.loads(bytes(row.tolist()).rstrip(b"\0")) for rank, row in enumerate(table)}

    def _most(self, word: int, number: int) -> list[int]:
        self.expect_open()
        found = torch.tensor([word, number, -number])
        self._reduce(found)
        most: list[int] = found.tolist()
        if most[0] == _LEFT:
            self.is_over = True
            reason = self._failures.reason() or "another rank left its step by an error"
            raise RuntimeError(f"{reason}: do not use the step's gradients")
        return most

    def _reduce(self, found: torch.Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)

    def leave(self, error: BaseException) -> str:
        """Tells all ranks that this one has given up, unless another had, which they all know. Nothing can be agreed
        upon afterwards. Returns which other rank failed, and why, where the error is a lost connection to it."""
        if self.is_over:
            return ""
        self.is_over = True
        ended_by = self._failures.end(error)
        for group in self._groups:
            with contextlib.suppress(RuntimeError):  # the others may be gone
                dist.all_reduce(torch.tensor([_LEFT, 0, 0]), dist.ReduceOp.MAX, group=group, async_op=True)
        return ended_by


def slots_at_begin(plan: foremoe.Plan) -> np.ndarray[Any, Any]:
    """The slots that are final when a plan begins: all; under residency shared those of the first micro-step."""
    if plan.residency != "shared" or plan.num_events == 0:
        return plan.slot_expert
    first: np.ndarray[Any, Any] = plan._slots_of_event(0)[0]
    return first


def others_than(decides: Any, table: np.ndarray[Any, Any], group: Any, device: torch.device) -> list[int]:
    """The ranks of the group that have another one. Collective."""
    digest = bytes.fromhex(digest_of(decides, table))
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    return [rank for rank, of in enumerate(gathered(mine, group)) if not torch.equal(of, mine)]
