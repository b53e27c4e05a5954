"""Copies of guests from the node's arena, and the fallback for missing experts.

A copy can start when its buffer is free and its expert was found intact in the arena. Before each micro-step the ranks
agree on the layers in which one of them lacks a guest. In these layers all rows go to homes, in forward, recomputation
and backward. A copy that could not start is retried before every micro-step of its lease. Experts of the next
micro-step are checked while this one runs.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

import foremoe

from .arena import NodeArena
from .failures import Channel
from .node_memory import Expert
from .votes import Votes


def _expert_of(copy: foremoe.Copy) -> Expert:
    return copy.layer, copy.expert


class HostPath:
    """Copies into this rank by the host path."""

    def __init__(
        self, arena: NodeArena, turns: foremoe.RankTurns, agreement: Channel, num_layers: int, num_micro_steps: int
    ) -> None:
        """agreement: Channel on which ranks agree about missing guests."""
        self._arena = arena
        self._votes = Votes([agreement])
        self._num_layers = num_layers
        self._num_micro_steps = num_micro_steps
        self._turns_of_micro_step = len(turns) // num_micro_steps
        # Copies that have not started. _later: (first turn in which the buffer is free, copy). _open: copies with a
        # free buffer.
        self._later = collections.deque(
            (turn, copy)
            for turn in range(len(turns))
            for copy in turns.starting(turn)
            if copy.path == "host" and copy.rank == turns.rank
        )
        self._open: list[foremoe.Copy] = []
        self._started: list[tuple[int, Callable[[], None]]] = []  # (turn that reads the copy, its wait function)
        self._intact: set[Expert] = set()  # among the experts checked for this micro-step
        self._check: Future[set[Expert]] = self._arena.check(self._experts_for(0))
        self.copies = 0
        self.exposed_seconds = 0.0

    def _due(self, micro_step: int) -> list[foremoe.Copy]:
        """Returns the copies that the micro-step reads and that have not started."""

        def reaches(copy: foremoe.Copy) -> bool:
            turns = self._turns_of_micro_step
            return copy.arrives // turns <= micro_step <= copy.closes // turns

        return [copy for copy in [*self._open, *(copy for _, copy in self._later)] if reaches(copy)]

    def _experts_for(self, micro_step: int) -> list[Expert]:
        """Returns the experts to check for the micro-step, in the order of use."""
        before = micro_step * self._turns_of_micro_step
        # Intact copies for earlier micro-steps will have started by then.
        unknown = (c for c in self._due(micro_step) if c.arrives >= before or _expert_of(c) not in self._intact)
        return list(dict.fromkeys(_expert_of(copy) for copy in unknown))

    def agree(self, micro_step: int) -> set[int]:
        """Returns the layers in which a rank lacks a guest in this micro-step. Collective, before the first layer."""
        begin = time.perf_counter()
        self._intact = self._check.result()
        self.exposed_seconds += time.perf_counter() - begin
        lacks = [0] * self._num_layers
        for copy in self._due(micro_step):
            if _expert_of(copy) not in self._intact:
                lacks[copy.layer] = 1
        found = self._votes.most(lacks)
        if micro_step + 1 < self._num_micro_steps:
            self._check = self._arena.check(self._experts_for(micro_step + 1))
        return {layer for layer, lacking in enumerate(found) if lacking}

    def begin(self, turn: int, slot_of: Callable[[foremoe.Copy], dict[str, Tensor]]) -> None:
        """Starts the copies with a free buffer and an intact expert."""
        while self._later and self._later[0][0] <= turn:
            self._open.append(self._later.popleft()[1])
        if not self._open:
            return
        intact = self._intact | (self._check.result() if self._check.done() else set())
        wait_on: list[foremoe.Copy] = []
        for copy in self._open:
            if _expert_of(copy) in intact:
                self._started.append((copy.arrives, self._arena.copy(_expert_of(copy), slot_of(copy))))
                self.copies += 1
            elif copy.closes > turn:
                wait_on.append(copy)
        self._open = wait_on

    def waits(self, turn: int) -> list[Callable[[], None]]:
        """Returns functions that wait for the copies that this or an earlier turn reads. Called once per turn."""
        due = [wait for arrives, wait in self._started if arrives <= turn]
        self._started = [(arrives, wait) for arrives, wait in self._started if arrives > turn]
        return due

    def close(self, complete: bool) -> None:
        """Ends the copies. complete: True waits for copies that have started; False ends at once."""
        self._arena.close(complete)
