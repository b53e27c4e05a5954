"""A phase under its plan on one rank, while it runs: its turns in order, and guests in their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

import foremoe

from .arena import NodeArena
from .arguments import expect_executable
from .guests import Guests
from .host_path import HostPath
from .layer_turn import LayerTurn, TurnCursor
from .layers import CopiedLayer
from .node_memory import NodeMemory
from .ranks import Ranks


class PlanInProgress(Protocol):
    """As foremoe.RunningPlan."""

    def begin(self) -> foremoe.Plan: ...

    def wait_for(self, micro_step: int, /) -> None: ...


class PlannedPhase:
    """It begins in two calls. What the first one refuses, all ranks refuse, and nothing is on its way. The second one,
    open(), may fail on one rank alone."""

    guests: Guests
    cursor: TurnCursor

    def __init__(
        self,
        running: PlanInProgress,
        load: foremoe.Load,
        ranks: Ranks,
        *,
        phase: str,
        expert_bytes: int,
        path: str,
        depth: int,
        in_flight: int = 1,
    ) -> None:
        """Waits until the plan may begin. Raises InputError for a plan that cannot be executed."""
        self.plan = running.begin()
        expect_executable(self.plan, in_flight)
        self.turns = foremoe.RankTurns(
            self.plan, load, rank=ranks.rank, phase=phase, expert_bytes=expert_bytes, path=path, depth=depth
        )
        self.num_micro_steps = load.num_micro_steps
        self.has_backward = phase == "policy_update"
        self.wait_for = running.wait_for  # micro-step: until it is planned
        self._ranks = ranks

    def open(
        self,
        layers: Sequence[CopiedLayer],
        out_of_order: str,
        *,
        gradient_type: torch.dtype | None = None,
        memory: NodeMemory | None = None,
        host_timeout: float = 0.0,
    ) -> None:
        """Makes room for guests and, where copies come by the host path, the arenas of nodes. Collective.

        out_of_order: what to say of a pass that ran out of order. gradient_type: as Guests takes it. memory: for the
        host path. host_timeout: for how many seconds a phase waits for experts in there.
        """
        self.guests = Guests(layers, self.plan, self.turns, self._ranks, gradient_type)
        self.cursor = TurnCursor(self.guests, out_of_order)
        if any(self.turns.arena(node) for node in range(self._ranks.num_nodes)):
            assert memory is not None and self._ranks.agreement is not None
            arena = NodeArena(layers, self.turns, self._ranks, memory, timeout=host_timeout)
            self.guests.host_path = HostPath(
                arena, self.turns, self._ranks.agreement, len(layers), self.num_micro_steps
            )

    def layer_turn(self, name: str, turn: foremoe.RankTurn, refuses_again: str = "") -> LayerTurn:
        """As LayerTurn takes them."""
        backward = self.turns["backward", turn.micro_step, turn.layer].index if self.has_backward else -1
        return LayerTurn(self.cursor, name, turn, backward, refuses_again)

    def lacks_backward(self, micro_step: int) -> bool:
        """Whether the backward of this micro-step has not ended, in a phase with backwards."""
        return self.has_backward and self.cursor.last < self.turns["backward", micro_step, 0].index

    def is_complete(self) -> bool:
        """Whether all turns have run."""
        return self.cursor.last + 1 == len(self.turns)

    def close(self, complete: bool) -> None:
        """complete: after all that was sent has arrived; else as soon as can be."""
        self.cursor.is_open = False
        if complete:
            self.guests.finish()
        else:
            self.guests.abandon()
