"""Plans of a pipeline stage, as Replicas.plan() returns them, and the table that maps a rank's rows to slots."""

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
    """Parameters for planning the MoE layers of this pipeline stage.

    in_flight: Number of micro-steps whose forward has run on this stage when the first backward begins.
    """

    arguments: AttachArguments
    ranks: Ranks
    num_layers: int
    num_experts: int
    top_k: int
    in_flight: int
    buffers: Buffers

    def load_of(self, counts: Counts) -> foremoe.Load:
        """Returns the load of counts, int64 [micro_steps, layers, ranks, experts]."""
        return foremoe.Load.from_array(
            counts, top_k=self.top_k, ranks_per_node=self.ranks.ranks_per_node, name="counts"
        )

    def nothing(self) -> foremoe.Load:
        """Returns a load without rows."""
        shape = self.in_flight, self.num_layers, self.ranks.num_ranks, self.num_experts
        return self.load_of(np.zeros(shape, np.int64))

    def start(self, counts: Counts, shares: Shares, phase: str) -> Plan:
        """Starts planning in the background. Collective. counts: See load_of()."""
        load = self.load_of(counts)
        in_flight = min(self.in_flight, load.num_micro_steps) if phase == "policy_update" else 1
        running = shares.start_plan(load, phase=phase, in_flight=in_flight)
        return Plan(load, running, phase, in_flight, self.buffers)


class Plan:
    """A phase that is being planned; created by Replicas.plan().

    Attributes:
        load: Load of the expert-parallel group.
        phase: recompute or policy_update.
        in_flight: Micro-steps in flight.
        running: The plan in progress.
    """

    def __init__(self, load: foremoe.Load, running: SharedPlan, phase: str, in_flight: int, buffers: Buffers) -> None:
        self.load = load
        self.phase = phase
        self.in_flight = in_flight
        self.running = running
        self._buffers = buffers

    def finish(self) -> foremoe.Plan:
        """Waits until the whole plan is final."""
        return self.running.finish()

    def suggested_rank_capacity_factor(self) -> float:
        """Returns the smallest moe_expert_rank_capacity_factor for the plan. Waits until the plan is final.

        With this factor, at least 1 and a multiple of 0.001, the buffers of HybridEP and NCCL-EP have room for all
        rows in all layers and micro-steps.

        Returns infinity if a rank without rows of its own in a micro-step computes rows of other ranks.
        """
        plan = self.finish()
        return self._buffers.factor(self.load, planned_slots(plan))


class EmptyPlan(Plan):
    """Placeholder for the plan of a pipeline stage without MoE layers."""

    def __init__(self) -> None:
        pass

    def finish(self) -> foremoe.Plan:
        raise RuntimeError("this pipeline stage has no MoE layers: it has no plan")


def slot_table(
    turn: foremoe.RankTurn, slot_expert: np.ndarray[Any, np.dtype[np.int32]], homes: int = 0
) -> np.ndarray[Any, Any]:
    """Returns, for each slot, its expert and the range [first, end) of this rank's rows for that expert.

    Args:
        turn: Turn of this rank.
        slot_expert: int32 [ranks, slots]; −1: empty.
        homes: First slots of each rank that serve all rows of their experts that other slots do not, however many
            these are. 0: slots serve the planned rows.

    Returns:
        int32 [3, ranks · slots]; empty slots have an empty range of expert 0.
    """
    table = np.zeros((3, *slot_expert.shape), np.int32)
    table[0] = np.maximum(slot_expert, 0)
    served = np.zeros(int(slot_expert.max()) + 1, np.int32)  # rows of each expert in earlier blocks
    for expert, rank, slot, rows in turn.blocks:
        if slot >= homes:
            table[1:, rank, slot] = served[expert], served[expert] + rows
            served[expert] += rows
    table[1, :, :homes], table[2, :, :homes] = served[slot_expert[:, :homes]], np.iinfo(np.int32).max
    return table.reshape(3, -1)
