"""What Replicas.plan() returns, for which layers, and what a rank reads in it: which of its rows go to each slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import foremoe
from foremoe._engine.ranks import Ranks
from foremoe._engine.shares import SharedPlan, Shares

from .arguments import AttachArguments
from .capacity import Buffers, planned_slots
from .counts import Counts


@dataclasses.dataclass(frozen=True)
class PipelineStage:
    """The MoE layers of this pipeline stage, as plans know them.

    in_flight: micro-steps whose forward has run here when the first backward begins.
    """

    arguments: AttachArguments
    ranks: Ranks
    num_layers: int
    num_experts: int
    top_k: int
    in_flight: int
    buffers: Buffers

    def load_of(self, counts: Counts) -> foremoe.Load:
        """counts: int64 [micro_steps, layers, ranks, experts]."""
        return foremoe.Load.from_array(
            counts, top_k=self.top_k, ranks_per_node=self.ranks.ranks_per_node, name="counts"
        )

    def nothing(self) -> foremoe.Load:
        """A load without rows."""
        shape = self.in_flight, self.num_layers, self.ranks.num_ranks, self.num_experts
        return self.load_of(np.zeros(shape, np.int64))

    def start(self, counts: Counts, shares: Shares, phase: str) -> Plan:
        """counts: as load_of() takes them. Collective."""
        load = self.load_of(counts)
        in_flight = min(self.in_flight, load.num_micro_steps) if phase == "policy_update" else 1
        return Plan(load, shares.start_plan(load, in_flight=in_flight), phase, in_flight, self.buffers)


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
        """Waits until it may begin; micro-step m is planned when wait_for(m) has returned."""
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
    for expert, rank, slot, rows in turn.blocks:
        begin = before[1] if before[0] == expert else 0
        table[1:, rank, slot] = begin, begin + rows
        before = expert, begin + rows
    return table.reshape(3, -1)
