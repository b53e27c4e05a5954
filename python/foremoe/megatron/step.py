"""One planned step of a pipeline stage: turns in order, guests in place, and what was computed.

A turn is a pass of one layer in one micro-step. Passes run in the order of Megatron-LM's schedules without virtual
stages (1F1B): a few forwards first, one where there is no pipeline, then a backward and a forward by turns. So the n-th
forward of a layer is that of micro-step n, and a backward is that of the oldest micro-step in flight. A forward inside
a backward pass is the recomputation of a checkpoint: it runs its micro-step's turn again.

With several micro-steps in flight the forward and the backward of a micro-step are different events of the plan.
Between them guests may leave and come back; each rank computes the same rows of the same experts in both, but a guest
may come back into another slot.

Under residency `shared` the guests of all layers lie in the same few buffers, and are fetched for each turn. Between a
forward and its backward a buffer serves other layers, so what autograd keeps of the guests' weights is where they lie.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

import foremoe
from foremoe._engine.guests import Guests
from foremoe._engine.lent import KeptWeights
from foremoe._engine.turn_cursor import TurnCursor

from .experts import GuestExperts, MoE, gradient_type
from .metrics import named_spread
from .plan import Plan, slot_table

_OUT_OF_ORDER = (
    "ran out of order; a planned step runs the micro-batches of a stage in the order of Megatron-LM's schedule without "
    "virtual stages, and of the phase recompute forwards alone"
)


class LayerTurn:
    """One layer of one micro-step."""

    table: Tensor  # int32 [3, slots of all ranks], see slot_table(); on the device
    planned: Tensor  # int32 [experts], rows of this rank; on the device

    def __init__(self, step: Step, turn: foremoe.RankTurn, backward: int) -> None:
        """turn: whose slots serve the rows. backward: its turn, −1 in a phase without."""
        self._step = step
        self.layer = turn.layer
        self.micro_step = turn.micro_step
        self.forward = turn.index
        self.backward = backward
        self.ran = turn.index == backward  # forward; what a checkpoint computes again reads the slots of the backward
        self._again: LayerTurn | None = None
        self.guest_order: list[int] | None = None
        self.send = turn.send.tolist()
        self.recv = turn.recv.tolist()
        self.received = torch.from_numpy(np.ascontiguousarray(turn.received.T))
        self.tokens = self.received.sum(0)
        self.homes = step.homes
        self.home_rows = int(turn.slot_offsets[self.homes])

    @property
    def again(self) -> LayerTurn:
        """As a checkpoint computes it again."""
        return self._again or self

    def computed_again(self, turn: foremoe.RankTurn, guests: list[int], guests_before: list[int]) -> LayerTurn:
        """The layer as a checkpoint computes it again, and its backward pass, where the plan moves guests in between.

        turn: backward. guests, guests_before: experts in this rank's guest slots then and in the forward, −1 where a
        slot has no rows.
        """
        self._again = LayerTurn(self._step, turn, self.backward)
        if guests != guests_before:
            self.guest_order = [guests_before.index(expert) if expert >= 0 else -1 for expert in guests]
        return self._again

    def to_slots(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Each row goes to the slot that the plan gives it. Does not wait for the device."""
        expert, first, end = self.table.unbind()
        expert = expert.long()
        # Looked at when the step ends.
        others = (routing_map.sum(0, dtype=torch.int32) != self.planned).any()
        self._step.others[self.micro_step, self.layer] |= others
        place = (routing_map.cumsum(0, dtype=torch.int32) - 1)[:, expert]  # of the row among its expert's here
        mine = routing_map[:, expert] & (place >= first) & (place < end)
        return mine, probs[:, expert] * mine

    def wait_for_guests(self) -> None:
        self._step.cursor.wait(self)

    def run_guests(self, rows: Tensor, probs: Tensor) -> Tensor:
        if self.guest_order is not None and torch.is_grad_enabled():
            moved: Tensor = _MovedGuests.apply(rows, probs, self, self.guest_order)
            return moved
        return self.run_guests_in_place(rows, probs)

    def weights(self) -> dict[str, Tensor]:
        """Of the guests, where this turn, or its backward pass, finds them: by name [guest slots, …]."""
        return self._step.engine.weights(self.layer, self.backward if self.ran else self.forward)

    def run_guests_in_place(self, rows: Tensor, probs: Tensor) -> Tensor:
        """Rows of the guest slots of this turn."""
        step, weights = self._step, self.weights()
        guests, tokens = step.guests[self.layer], self.tokens[self.homes :]
        if not step.shares_buffers:
            return guests(rows, tokens, probs)
        step.point_guests(self.layer, weights)
        kept = KeptWeights(weights, self)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            return guests(rows, tokens, probs)

    def computed(self, rows: int) -> None:
        self._step.computed[self.micro_step, self.layer] = rows

    def forward_ran(self) -> None:
        self._step.cursor.end_forward(self)

    def backward_begins(self) -> None:
        step = self._step
        step.expect_running()
        step.cursor.begin_backward(self, f"{step.moes[self.layer].name}: its backward {_OUT_OF_ORDER}")

    @torch.no_grad()
    def backward_ends(self) -> list[Tensor | None]:
        step, layer = self._step, self.layer
        if step.guests:
            sums = step.guests[layer].sum_gradients()
            if step.shares_buffers:  # they go home now, and the next turn's are summed in the same place
                step.engine.add_gradients(layer, sums)
        step.cursor.end_backward(self)
        if self.micro_step == step.num_micro_steps - 1:
            step.engine.bring_home(layer)
        if layer == 0:
            step.backward_ran(self.micro_step)
        if step.shares_buffers and step.has_main_grads:
            # Kept until its layer's next backward pass, it would take as much memory as sums of all layers.
            for other, moe in enumerate(step.moes):
                for (home, name), gradient in step.engine.take_home(other).items():
                    _add(moe.own[name][home], gradient)
        arrived = step.engine.take_home(layer)
        return [
            _add(parameter, arrived.get((home, name)))
            for name, parameters in step.moes[layer].own.items()
            for home, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]


class _MovedGuests(torch.autograd.Function):
    """Rows of guests whose backward finds them in other slots than their forward. It computes the forward again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor, turn: LayerTurn, order: list[int]) -> Tensor:
        """order: [guest slot of the backward], guest slot of the forward; −1 where a slot has no rows."""
        ctx.save_for_backward(rows, probs)
        ctx.turn, ctx.order = turn, order
        return turn.run_guests_in_place(rows, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        turn, order = ctx.turn, ctx.order
        sizes = turn.tokens[turn.homes :].tolist()

        def moved(of_slots: Tensor) -> Tensor:
            parts = of_slots.split(sizes)  # type: ignore[no-untyped-call]
            return torch.cat([parts[slot] for slot in order if slot >= 0])

        rows, probs = (moved(of).detach().requires_grad_() for of in ctx.saved_tensors)
        with torch.enable_grad():
            out = turn.again.run_guests_in_place(rows, probs)
        torch.autograd.backward(out, moved(grads[0]))
        place = moved(torch.arange(sum(sizes), device=rows.device))  # of each of the moved rows

        def back(of: Tensor) -> Tensor | None:
            return None if of.grad is None else torch.empty_like(of.grad).index_copy(0, place, of.grad)

        return back(rows), back(probs), None, None


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
        self._planned: Plan | None = plan
        self._rank = rank
        self._device = device
        self._open = True
        self._next = [0] * len(self.moes)  # micro-step
        # Micro-steps whose forward has begun and whose backward has not ended, in order.
        self._in_flight: collections.deque[list[LayerTurn]] = collections.deque()
        self.computed = np.zeros((self.num_micro_steps, len(self.moes)), np.int64)  # rows
        # Where this rank's rows were others than planned.
        self.others = torch.zeros(self.num_micro_steps, len(self.moes), dtype=torch.bool, device=device)
        self._backward = plan.phase == "policy_update"
        self._turns = foremoe.RankTurns(
            self.plan, plan.load, rank=rank, phase=plan.phase, expert_bytes=self.moes[0].expert_bytes(), path="peer",
            depth=depth,
        )  # fmt: skip
        self.shares_buffers = self.plan.residency == "shared"
        self.has_main_grads = all(hasattr(p, "main_grad") for moe in self.moes for p in moe.parameters())
        gradients = gradient_type(self.moes)
        self.engine = Guests(
            self.moes,  # type: ignore[arg-type]  # what copies need of an ExpertLayer
            self._turns,
            copy_group,
            guest_slots=self.plan.guest_slots,
            shared=self.shares_buffers,
            host=lambda: None,
            gradient_type=gradients,
        )
        self.cursor = TurnCursor(self.engine)
        self._trained = [self.engine.trained(i) if self._backward else set() for i in range(len(self.moes))]
        self._sums: list[dict[str, Tensor]] = []  # of guests' gradients: [layer], or one for all; by name [slots, …]
        for layer in range(len(self.guests)):
            weights = self.engine.weights(layer, 0)
            names = set().union(*self._trained) if self.shares_buffers else self._trained[layer]
            if layer == 0 or not self.shares_buffers:
                self._sums.append({name: torch.zeros_like(weights[name], dtype=gradients) for name in sorted(names)})
            if not self.shares_buffers:
                self.engine.add_gradients(layer, self._sums[layer])
                self.point_guests(layer, weights)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foremoe-megatron")
        self._prepared: Future[_Prepared] | None = self._pool.submit(self._prepare, 0)

    def point_guests(self, layer: int, weights: dict[str, Tensor]) -> None:
        """From now on the layer's guests have these weights, by name [guest slots, …]."""
        sums = self._sums[0 if self.shares_buffers else layer]
        self.guests[layer].point_at(weights, {name: sums[name] for name in self._trained[layer]})

    def turn_of(self, layer: int) -> LayerTurn:
        """The turn of the forward of this layer that begins."""
        self.expect_running()
        name = self.moes[layer].name
        if torch._C._current_graph_task_id() >= 0:
            # Its backward comes next, and that is the oldest micro-step's.
            turn = self._in_flight[0][layer] if self._in_flight else None
            if turn is None or not turn.ran:
                raise RuntimeError(f"{name}: its forward ran inside a backward pass, but not for the second time")
            if self.shares_buffers and turn.backward != self.cursor.last + 1:
                what = "under residency shared a checkpoint may hold one MoE layer, not several: recompute_num_layers=1"
                raise RuntimeError(f"{name}: {what}")
            turn = turn.again
        else:
            micro_step = self._next[layer]
            if micro_step == self.num_micro_steps:
                raise RuntimeError(f"{name}: ran once more than the {micro_step} micro-steps of the plan")
            if layer == 0:
                assert self._prepared is not None
                self._begin(self._prepared.result())
                if micro_step + 1 < self.num_micro_steps:
                    self._prepared = self._pool.submit(self._prepare, micro_step + 1)
            turn = self._in_flight[-1][layer] if self._in_flight else None
            if turn is None or turn.micro_step != micro_step:
                raise RuntimeError(f"{name}: its forward {_OUT_OF_ORDER}")
            self._next[layer] += 1
        self.cursor.begin_forward(turn, f"{name}: its forward {_OUT_OF_ORDER}")
        return turn

    def backward_ran(self, micro_step: int) -> None:
        """Through all layers."""
        assert self._in_flight[0][0].micro_step == micro_step
        self._in_flight.popleft()

    def expect_running(self) -> None:
        if not self._open:
            raise RuntimeError(
                "a planned layer ran after its step had ended: forward and backward belong inside step()"
            )

    def _prepare(self, micro_step: int) -> _Prepared:
        """In the background, while the micro-step before runs."""
        planned = self._planned
        assert planned is not None
        planned.wait_for(micro_step)
        turns: list[LayerTurn] = []
        of_tables: list[LayerTurn] = []
        tables = []
        for layer in range(len(self.moes)):
            forward = self._turns["forward", micro_step, layer]
            backward = self._turns["backward", micro_step, layer] if self._backward else None
            turn = LayerTurn(self, forward, -1 if backward is None else backward.index)
            turns.append(turn)
            of_tables.append(turn)
            tables.append(self._table_of(forward))
            if backward is not None and backward.event != forward.event:
                then, before = self._served(backward), self._served(forward)
                if (then != before).any():
                    of_rank = (experts[self._rank, self.homes :].tolist() for experts in (then, before))
                    of_tables.append(turn.computed_again(backward, *of_rank))
                    tables.append(self._table_of(backward))
        rows = planned.load.array[micro_step, :, self._rank].astype(np.int32)
        return _Prepared(turns, of_tables, self._pinned(np.stack(tables)), self._pinned(rows))

    def _served(self, turn: foremoe.RankTurn) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The expert of each slot with rows, of all ranks: [ranks, slots]; −1 where there are none."""
        place = turn.event, turn.layer
        return np.where(self.plan.slot_tokens[place] > 0, self.plan.slot_expert[place], -1)

    def _table_of(self, turn: foremoe.RankTurn) -> np.ndarray[Any, Any]:
        return slot_table(turn, self.plan.slot_expert[turn.event, turn.layer])

    def _pinned(self, array: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory()

    def _begin(self, prepared: _Prepared) -> None:
        tables = prepared.tables.to(self._device, non_blocking=True)
        rows = prepared.rows.to(self._device, non_blocking=True).unbind()
        for turn, table in zip(prepared.of_tables, tables.unbind(), strict=True):
            turn.table, turn.planned = table, rows[turn.layer]
        if not self._backward:
            self._in_flight.clear()
        self._in_flight.append(prepared.turns)

    def is_complete(self) -> bool:
        return self.cursor.last + 1 == len(self._turns)

    def other_rows(self) -> list[list[int]]:
        """(micro-step, layer) where rows of any rank of the plan were not those of it. Collective, once.

        metrics() is known from then on.
        """
        own = torch.stack([torch.from_numpy(self.computed).to(self._device), self.others.long()])
        parts = [torch.empty_like(own) for _ in range(self.plan.num_ranks)]
        dist.all_gather(parts, own, group=self.moes[0].layer.ep_group)
        computed, others = torch.stack(parts, -1).cpu().unbind()
        self._of_ranks = computed.numpy()
        places: list[list[int]] = torch.nonzero(others.any(-1)).tolist()
        return places

    def metrics(self) -> dict[str, float]:
        return {
            **named_spread("rho_computed", self._of_ranks),
            "foremoe/copies": float(self.engine.copies["peer"]),
            "foremoe/exposed_seconds": self.engine.exposed_seconds,
        }

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
        # Turns refer to this step: with them its tensors would live until garbage is collected.
        self._in_flight.clear()
        self._sums.clear()
        self._prepared = self._planned = None


class _Prepared:
    """A micro-step before it runs."""

    def __init__(self, turns: list[LayerTurn], of_tables: list[LayerTurn], tables: Tensor, rows: Tensor) -> None:
        self.turns = turns
        self.of_tables = of_tables  # all turns, with those of recomputations that differ
        self.tables = tables  # int32 [of_tables, 3, slots of all ranks], on the host
        self.rows = rows  # int32 [layers, experts], of this rank; on the host
