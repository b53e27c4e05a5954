"""What Replicas.plan() returns, and what a rank reads in it: which of its rows go to each slot."""

from __future__ import annotations

from typing import Any

import numpy as np

import foremoe

from .capacity import Buffers, planned_slots
from .shares import SharedPlan


class Plan:
    """A phase that is being planned; Replicas.plan() makes it."""

    def __init__(
        self,
        load: foremoe.Load,
        running: foremoe.RunningPlan | SharedPlan,
        phase: str,
        in_flight: int,
        buffers: Buffers,
    ) -> None:
        self.load = load  # of the expert-parallel group
        self.phase = phase
        self.in_flight = in_flight  # micro-steps
        self._running = running
        self._buffers = buffers

    def begin(self) -> foremoe.Plan:
        """Waits until slots are final; the quotas of micro-step m are when wait_for(m) has returned."""
        return self._running.begin()

    def wait_for(self, micro_step: int) -> None:
        self._running.wait_for(micro_step)

    def finish(self) -> foremoe.Plan:
        """Waits until all of it is final."""
        return self._running.finish()

    def suggested_rank_capacity_factor(self) -> float:
        """The least moe_expert_rank_capacity_factor, a multiple of 0.001, with which the buffers of HybridEP and
        NCCL-EP hold all rows of the plan, in all its layers and micro-steps. Waits until all of it is final.

        Infinity where a rank that has no rows of its own in a micro-step computes those of others.
        """
        return self._buffers.factor(self.load, planned_slots(self.finish()))


class NoPlan(Plan):
    """The plan of a pipeline stage without MoE layers: there is none."""

    def __init__(self) -> None:
        pass

    def begin(self) -> foremoe.Plan:
        raise RuntimeError("this pipeline stage has no MoE layers: it has no plan")

    def wait_for(self, micro_step: int) -> None:
        pass

    def finish(self) -> foremoe.Plan:
        return self.begin()


def slot_table(turn: foremoe.RankTurn, slot_expert: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, Any]:
    """Which of this rank's rows go to each slot: its expert, and from which to before which of the expert's rows here.

    slot_expert: int32 [ranks, slots]. Returns int32 [3, ranks · slots]; an empty slot gets no rows of expert 0.
    """
    table = np.zeros((3, *slot_expert.shape), np.int32)
    table[0] = np.maximum(slot_expert, 0)
    before = 0, 0  # expert, its rows that earlier blocks took
    for expert, rank, rows in turn.blocks:
        begin = before[1] if before[0] == expert else 0
        slot = int((slot_expert[rank] == expert).argmax())
        table[1:, rank, slot] = begin, begin + rows
        before = expert, begin + rows
    return table.reshape(3, -1)
