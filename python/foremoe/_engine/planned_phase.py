"""The execution of a planned phase on one rank: its turns and its guests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
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
from .shares import SharedPlan


class PlannedPhase:
    """A phase in execution. To begin it, call the constructor and then open().

    The constructor raises on all ranks or on none, before any transfer. open() may fail on a single rank.
    """

    guests: Guests
    cursor: TurnCursor

    def __init__(
        self,
        running: SharedPlan,
        load: foremoe.Load,
        ranks: Ranks,
        *,
        phase: str,
        expert_bytes: int,
        path: str,
        depth: int,
        in_flight: int = 1,
        rows: str = "order",
    ) -> None:
        """Waits until the plan may begin. Raises InputError for a plan that cannot be executed.

        rows: Argument of foremoe.RankTurns.
        """
        self.plan = running.begin()
        expect_executable(self.plan, ranks.table, in_flight)
        self.turns = foremoe.RankTurns(
            self.plan, load, rank=ranks.rank, phase=phase, expert_bytes=expert_bytes, path=path, depth=depth, rows=rows
        )
        self.num_micro_steps = load.num_micro_steps
        self.has_backward = phase == "policy_update"
        self.wait_for = running.wait_for  # waits until the given micro-step is planned
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
        """Allocates guest buffers and, for the host path, the arenas of nodes. Collective.

        Args:
            out_of_order: Text of the error for a pass that runs out of order.
            gradient_type: See Guests.
            memory: Node memory of the host path.
            host_timeout: Seconds that a phase waits for experts in node memory.
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
        """Returns a LayerTurn, which documents the arguments."""
        backward = self.turns["backward", turn.micro_step, turn.layer].index if self.has_backward else -1
        return LayerTurn(self.cursor, name, turn, backward, refuses_again)

    def lacks_backward(self, micro_step: int) -> bool:
        """Returns whether the phase has backwards and the backward of this micro-step has not ended."""
        return self.has_backward and self.cursor.last < self.turns["backward", micro_step, 0].index

    def is_complete(self) -> bool:
        """Returns whether all turns have run."""
        return self.cursor.last + 1 == len(self.turns)

    def close(self, complete: bool) -> None:
        """Ends the phase. complete: True waits for all transfers; False ends at once."""
        self.cursor.is_open = False
        if complete:
            self.guests.finish()
        else:
            self.guests.abandon()


def slots_at_begin(plan: foremoe.Plan) -> np.ndarray[Any, Any]:
    """Returns the slots that are final when a plan begins: all, or under residency shared the first micro-step's."""
    if plan.residency != "shared" or plan.num_events == 0:
        return plan.slot_expert
    first: np.ndarray[Any, Any] = plan._slots_of_event(0)[0]
    return first
