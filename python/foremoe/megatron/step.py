"""One planned step: turns in order, guests in place, and what was computed.

A turn is a pass of one layer in one micro-step. Micro-batches run one after the other, each forward and then backward,
as in Megatron-LM's schedule without pipelining: a layer's n-th forward is that of micro-step n. A forward inside a
backward pass is the recomputation of a checkpoint; it runs its micro-step's turn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import foremoe
from foremoe.torch.guests import Guests

from .experts import GuestExperts, MoE, gradient_type

if TYPE_CHECKING:
    from .replicas import Plan


class LayerTurn:
    """One layer of one micro-step."""

    table: Tensor  # int32 [3, slots of all ranks], see _table(); on the device
    planned: Tensor  # int32 [experts], rows of this rank; on the device

    def __init__(self, step: Step, layer: int, turn: foremoe.RankTurn, backward: int) -> None:
        """backward: its turn, −1 in a phase without."""
        self._step = step
        self._layer = layer
        self.micro_step = turn.micro_step
        self.forward = turn.index
        self.backward = backward
        self.ran = False  # forward
        self.send = turn.send.tolist()
        self.recv = turn.recv.tolist()
        self.received = torch.from_numpy(np.ascontiguousarray(turn.received.T))
        self.tokens = self.received.sum(0)
        self.homes = step.homes
        self.home_rows = int(turn.slot_offsets[self.homes])

    def to_slots(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Each row goes to the slot that the plan gives it. Does not wait for the device."""
        expert, first, end = self.table.unbind()
        expert = expert.long()
        # Looked at when the step ends.
        others = (routing_map.sum(0, dtype=torch.int32) != self.planned).any()
        self._step.others[self.micro_step, self._layer] |= others
        place = (routing_map.cumsum(0, dtype=torch.int32) - 1)[:, expert]  # of the row among its expert's here
        mine = routing_map[:, expert] & (place >= first) & (place < end)
        return mine, probs[:, expert] * mine

    def wait_for_guests(self) -> None:
        self._step.engine.wait(self._step.ready_turn(self))

    def run_guests(self, rows: Tensor, probs: Tensor) -> Tensor:
        return self._step.guests[self._layer](rows, self.tokens[self.homes :], probs)

    def computed(self, rows: int) -> None:
        self._step.computed[self.micro_step, self._layer] = rows

    def forward_ran(self) -> None:
        if not self.ran:
            self.ran, self._step.last = True, self.forward

    def backward_begins(self) -> None:
        step = self._step
        step.expect_running()
        if self.backward != step.last + 1:
            raise RuntimeError(
                f"{step.moes[self._layer].name}: its backward ran out of order; a planned step runs micro-batches one "
                "after the other, each forward, then backward"
            )
        step.engine.begin(self.backward)
        step.engine.wait(self.backward)

    @torch.no_grad()
    def backward_ends(self) -> list[Tensor | None]:
        step, layer = self._step, self._layer
        if step.guests:
            step.guests[layer].sum_gradients()
        step.engine.end(self.backward, layer)
        if self.micro_step == step.num_micro_steps - 1:
            step.engine.bring_home(layer)
        arrived = step.engine.take_home(layer)
        step.last = self.backward
        return [
            _add(parameter, arrived.get((home, name)))
            for name, parameters in step.moes[layer].own.items()
            for home, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]


def _add(parameter: torch.nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """Adds a gradient where DistributedDataParallel sums those of micro-batches; without it, returns it to autograd."""
    if gradient is None:
        return None
    held: Tensor | None = getattr(parameter, "main_grad", None)
    if held is None:
        return gradient
    held += gradient
    return None


class Step:
    """The execution of a plan."""

    def __init__(
        self,
        plan: Plan,
        moes: Sequence[MoE],
        guests: Sequence[GuestExperts],
        *,
        copy_group: Any,
        rank: int,
        depth: int,
        device: torch.device,
    ) -> None:
        self.moes, self.guests = list(moes), list(guests)
        self.num_micro_steps = plan.load.num_micro_steps
        self.plan = plan.begin()
        self.homes = self.plan.num_slots - self.plan.guest_slots
        self.last = -1  # turn that ran
        self._planned = plan
        self._rank = rank
        self._device = device
        self._open = True
        self._next = [0] * len(self.moes)  # micro-step
        self._of: list[LayerTurn] = []  # the micro-step that runs
        self.computed = np.zeros((self.num_micro_steps, len(self.moes)), np.int64)  # rows
        # Where this rank's rows were others than planned.
        self.others = torch.zeros(self.num_micro_steps, len(self.moes), dtype=torch.bool, device=device)
        self._backward = plan.phase == "policy_update"
        self._turns = foremoe.RankTurns(
            self.plan, plan.load, rank=rank, phase=plan.phase, expert_bytes=self.moes[0].expert_bytes(), path="peer",
            depth=depth,
        )  # fmt: skip
        gradients = gradient_type(self.moes)
        self.engine = Guests(
            self.moes,  # type: ignore[arg-type]  # what copies need of an ExpertLayer
            self._turns,
            copy_group,
            guest_slots=self.plan.guest_slots,
            shared=False,
            host=lambda: None,
            gradient_type=gradients,
        )
        for layer, of in enumerate(self.guests):
            sums = of.point_at(self.engine.weights(layer, 0), gradients if self._backward else None)
            if sums:
                self.engine.add_gradients(layer, sums)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foremoe-megatron")
        self._prepared: Future[_Prepared] = self._pool.submit(self._prepare, 0)

    def turn_of(self, layer: int) -> LayerTurn:
        """The turn of the forward of this layer that begins."""
        self.expect_running()
        name = self.moes[layer].name
        if torch._C._current_graph_task_id() >= 0:
            turn = self._of[layer] if self._of else None
            if turn is None or not turn.ran:
                raise RuntimeError(f"{name}: its forward ran inside a backward pass, but not for the second time")
            self.engine.begin(self.ready_turn(turn))
            return turn
        micro_step = self._next[layer]
        if micro_step == self.num_micro_steps:
            raise RuntimeError(f"{name}: ran once more than the {micro_step} micro-steps of the plan")
        if layer == 0:
            self._of = self._begin(self._prepared.result())
            if micro_step + 1 < self.num_micro_steps:
                self._prepared = self._pool.submit(self._prepare, micro_step + 1)
        turn = self._of[layer] if self._of else None
        if turn is None or turn.micro_step != micro_step or turn.forward != self.last + 1:
            raise RuntimeError(
                f"{name}: its forward ran out of order; a planned step runs micro-batches one after the other, each "
                "forward, then backward"
            )
        self._next[layer] += 1
        self.engine.begin(turn.forward)
        return turn

    def ready_turn(self, turn: LayerTurn) -> int:
        """Up to which copies may start. While a layer is computed again, layers after it have their backward before its
        own: nothing may be copied yet for what comes after these."""
        return min(turn.backward, self.last + 1) if turn.ran else turn.forward

    def expect_running(self) -> None:
        if not self._open:
            raise RuntimeError(
                "a planned layer ran after its step had ended: forward and backward belong inside step()"
            )

    def _prepare(self, micro_step: int) -> _Prepared:
        """In the background, while the micro-step before runs."""
        self._planned.wait_for(micro_step)
        turns = [self._turns["forward", micro_step, layer] for layer in range(len(self.moes))]
        tables = np.stack([_table(turn, self.plan.slot_expert[turn.event, turn.layer]) for turn in turns])
        rows = self._planned.load.array[micro_step, :, self._rank].astype(np.int32)
        return _Prepared(
            [
                LayerTurn(self, turn.layer, turn, self._turns["backward", micro_step, turn.layer].index)
                if self._backward
                else LayerTurn(self, turn.layer, turn, -1)
                for turn in turns
            ],
            self._pinned(tables),
            self._pinned(rows),
        )

    def _pinned(self, array: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory()

    def _begin(self, prepared: _Prepared) -> list[LayerTurn]:
        tables = prepared.tables.to(self._device, non_blocking=True)
        rows = prepared.rows.to(self._device, non_blocking=True)
        for turn, table, planned in zip(prepared.turns, tables.unbind(), rows.unbind(), strict=True):
            turn.table, turn.planned = table, planned
        return prepared.turns

    def is_complete(self) -> bool:
        return self.last + 1 == len(self._turns)

    def close(self, complete: bool) -> None:
        """Ends the step. complete: after all that was sent has arrived; else as soon as can be."""
        self._open = False
        self._pool.shutdown(wait=True, cancel_futures=True)
        if complete:
            self.engine.finish()
        else:
            self.engine.abandon()
        for of in self.guests:
            of.release()


class _Prepared:
    """A micro-step before it runs."""

    def __init__(self, turns: list[LayerTurn], tables: Tensor, rows: Tensor) -> None:
        self.turns = turns
        self.tables = tables  # int32 [layers, 3, slots of all ranks], on the host
        self.rows = rows  # int32 [layers, experts], of this rank; on the host


def _table(turn: foremoe.RankTurn, slot_expert: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, Any]:
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
