"""One planned step of a pipeline stage: order of turns, guest weights, and counts of computed rows.

A turn is a pass of one layer in one micro-step. Passes run in the order of Megatron-LM's schedules without virtual
pipeline stages (1F1B): some forwards first (one if there is no pipeline), then alternately a backward and a forward. So
the n-th forward of a layer belongs to micro-step n, and a backward to the oldest micro-step in flight. A forward inside
a backward pass is a recomputation by a checkpoint: it repeats the forward of its micro-step.

With several micro-steps in flight the forward and the backward of a micro-step are different events of the plan.
Between these events, guests may leave and return. Each rank computes the same rows of the same experts in both events,
but a guest may return to another slot.

Under residency `shared` the guests of all layers share a few buffers and are fetched for each turn. Between a forward
and its backward other layers use the buffer, so autograd saves positions within the guests' weights, not tensors.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import foremoe
from foremoe._engine.background import Background
from foremoe._engine.communication import gathered
from foremoe._engine.layer_turn import LayerTurn
from foremoe._engine.lent import KeptWeights
from foremoe._engine.planned_phase import PlannedPhase
from foremoe._engine.ranks import Ranks
from foremoe._variable import HOME

from .arguments import AttachArguments
from .experts import GuestExperts, MoE, gradient_type
from .metrics import named_spread
from .plan import Plan, slot_table
from .supported import replay_problem, replayed

_OUT_OF_ORDER = (
    "ran out of order; a planned step runs the micro-batches of a pipeline stage in the order of Megatron-LM's "
    "schedule without virtual stages, and of the phase recompute forwards alone"
)


class MicroBatchRows:
    """Row destinations and guests of one layer in one micro-step."""

    table: Tensor  # int32 [3, slots of all ranks], see slot_table(); on the device
    planned: Tensor  # int32 [experts], planned rows of this rank; on the device

    def __init__(self, step: Step, turn: LayerTurn, of: foremoe.RankTurn) -> None:
        """of: Forward or backward turn whose slots serve the rows."""
        self._step = step
        self.turn = turn
        self._again: MicroBatchRows | None = None
        self._serves_any = step.on_mismatch == HOME
        self.guest_order: list[int] | None = None
        self.send = of.send.tolist()
        self.recv = of.recv.tolist()
        self.received = torch.from_numpy(np.ascontiguousarray(of.received.T))  # [ranks, slots], rows for each slot here
        self.tokens = self.received.sum(0)  # [slots], on the host
        self.homes = step.homes
        self.home_rows = int(of.slot_offsets[self.homes])

    @property
    def again(self) -> MicroBatchRows:
        """Returns the rows for recomputation by a checkpoint."""
        return self._again or self

    def computed_again(self, backward: foremoe.RankTurn, guests: list[int], guests_before: list[int]) -> MicroBatchRows:
        """Creates the rows for recomputation by a checkpoint if the plan moves guests between forward and backward.

        guests, guests_before: Experts in this rank's guest slots in the backward and in the forward; −1: no rows.
        """
        self._again = MicroBatchRows(self._step, self.turn, backward)
        if guests != guests_before:
            self.guest_order = [guests_before.index(expert) if expert >= 0 else -1 for expert in guests]
        return self._again

    def to_slots(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Maps rows from experts to the planned slots. Does not wait for the device.

        bool [tokens, experts], [tokens, experts] → bool [tokens, slots of all ranks], [tokens, slots of all ranks].
        """
        expert, first, end = self.table.unbind()
        expert = expert.long()
        unplanned = routing_map.sum(0, dtype=torch.int32) - self.planned
        if self._serves_any:
            others = unplanned.clamp(min=0).sum()
        else:
            others = unplanned.abs().sum()
            if self.turn.micro_step == 0 and (target := replayed(self._step.moes[self.turn.layer].layer)) is not None:
                others += (~routing_map.gather(1, target.to(routing_map.device).long())).sum()
        self._step.deviates[self.turn.micro_step, self.turn.layer].clamp_(min=others)  # other_rows() reads it
        place = (routing_map.cumsum(0, dtype=torch.int32) - 1)[:, expert]  # index among the expert's rows
        mine = routing_map[:, expert] & (place >= first) & (place < end)
        return mine, probs[:, expert] * mine

    def arrived(self, tokens: Tensor) -> None:
        """Takes the rows of each slot, integers [slots], as they are, if they may differ from the plan."""
        if self._serves_any:
            self.tokens = tokens.cpu()
            self.home_rows = int(self.tokens[: self.homes].sum())

    def run_guests(self, rows: Tensor, probs: Tensor) -> Tensor:
        if self.guest_order is not None and torch.is_grad_enabled():
            moved: Tensor = _MovedGuests.apply(rows, probs, self, self.guest_order)
            return moved
        return self.run_guests_in_place(rows, probs, self.tokens[self.homes :])

    def run_guests_in_place(self, rows: Tensor, probs: Tensor, tokens: Tensor) -> Tensor:
        """Computes rows of the guest slots with the weights of the current turn. tokens: int64 [guest slots]."""
        step, weights = self._step, self.turn.weights()
        guests = step.guests[self.turn.layer]
        if not step.engine.guests.are_lent:
            return guests(rows, tokens, probs)
        step.point_guests(self.turn.layer, weights)
        kept = KeptWeights(weights, self.turn)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            return guests(rows, tokens, probs)

    def computed(self, rows: int) -> None:
        """Records the number of rows that this rank computes."""
        self._step.computed[self.turn.micro_step, self.turn.layer] = rows

    @torch.no_grad()
    def backward_ends(self) -> list[Tensor | None]:
        """Ends the backward turn. Returns gradients from guests for the layer's trained parameters; see _add()."""
        step, turn, layer = self._step, self.turn, self.turn.layer
        engine = step.engine
        if step.guests:
            sums = step.guests[layer].sum_gradients()
            if engine.guests.are_lent:  # sent home now; the next turn reuses the sums
                turn.add_gradients(sums)
        turn.end_backward()
        if turn.micro_step == engine.num_micro_steps - 1:
            engine.guests.bring_home(layer)
        if layer == 0:
            step.backward_ran(turn.micro_step)
        if engine.guests.are_lent and step.has_main_grads:
            # If stored until each layer's next backward, these gradients would take the memory of all layers' sums.
            for other, moe in enumerate(step.moes):
                for (home, name), gradient in engine.guests.take_home(other).items():
                    _add(moe.own[name][home], gradient)
        arrived = engine.guests.take_home(layer)
        return [
            _add(parameter, arrived.get((home, name)))
            for name, parameters in step.moes[layer].own.items()
            for home, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]


class _MovedGuests(torch.autograd.Function):
    """Computes rows of guests whose slots differ between forward and backward. Backward recomputes the forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor, turn: MicroBatchRows, order: list[int]) -> Tensor:
        """order: For each guest slot of the backward, the slot of the forward; −1 for a slot without rows."""
        ctx.save_for_backward(rows, probs)
        ctx.turn, ctx.order, ctx.tokens = turn, order, turn.tokens[turn.homes :]
        return turn.run_guests_in_place(rows, probs, ctx.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        turn, order = ctx.turn, ctx.order
        sizes = ctx.tokens.tolist()

        def moved(of_slots: Tensor) -> Tensor:
            parts = of_slots.split(sizes)  # type: ignore[no-untyped-call]
            return torch.cat([parts[slot] for slot in order if slot >= 0])

        rows, probs = (moved(of).detach().requires_grad_() for of in ctx.saved_tensors)
        with torch.enable_grad():
            out = turn.again.run_guests_in_place(
                rows, probs, torch.tensor([sizes[slot] if slot >= 0 else 0 for slot in order])
            )
        torch.autograd.backward(out, moved(grads[0]))
        place = moved(torch.arange(sum(sizes), device=rows.device))  # original index of each moved row

        def back(of: Tensor) -> Tensor | None:
            return None if of.grad is None else torch.empty_like(of.grad).index_copy(0, place, of.grad)

        return back(rows), back(probs), None, None


def _add(parameter: torch.nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """Adds the gradient to main_grad, where DistributedDataParallel sums; returns it if autograd must add it."""
    if gradient is None:
        return None
    held: Tensor | None = getattr(parameter, "main_grad", None)
    if held is None or _has_hook(parameter):
        return gradient
    held += gradient
    return None


def _has_hook(parameter: torch.nn.Parameter) -> bool:
    """Returns whether a hook changes the gradient, as Megatron-Bridge 0.6 sums those of adapters over the ranks. The
    hook does not see gradients that kernels add to main_grad; then no gradient must pass it, or it would be lost."""
    return bool(parameter._backward_hooks) and not getattr(parameter, "grad_added_to_main_grad", False)


class Step:
    """The execution of a plan by Megatron-LM's layers."""

    def __init__(
        self,
        plan: Plan,
        moes: Sequence[MoE],
        guests: Sequence[GuestExperts],
        ranks: Ranks,
        arguments: AttachArguments,
    ) -> None:
        self.moes, self.guests = list(moes), list(guests)
        self.engine = PlannedPhase(
            plan.running, plan.load, ranks, phase=plan.phase, expert_bytes=self.moes[0].expert_bytes(), path="peer",
            depth=arguments.depth, in_flight=plan.in_flight,
        )  # fmt: skip
        gradients = gradient_type(self.moes)
        self.engine.open(self.moes, _OUT_OF_ORDER, gradient_type=gradients)
        self.homes = ranks.homes
        self.on_mismatch = arguments.on_mismatch
        self.has_main_grads = all(
            hasattr(p, "main_grad") and not p._backward_hooks for moe in self.moes for p in moe.parameters()
        )
        self._ranks = ranks
        self._load = plan.load
        self._next = [0] * len(self.moes)  # micro-step
        # Micro-steps whose forward has begun and whose backward has not ended, in order.
        self._in_flight: collections.deque[list[MicroBatchRows]] = collections.deque()
        self.computed = np.zeros((self.engine.num_micro_steps, len(self.moes)), np.int64)  # rows
        # [micro-step, layer], on the device: this rank's rows that differ from the plan; under "home" those beyond it.
        self.deviates = torch.zeros(*self.computed.shape, dtype=torch.int64, device=ranks.device)
        self._trained = [self.engine.guests.trained(i) if self.engine.has_backward else set() for i in range(len(moes))]
        self._sums: list[dict[str, Tensor]] = []  # guests' gradients of each layer, or of all: by name [slots, …]
        for layer in range(len(self.guests)):
            self._make_sums(layer, gradients)
        self._mismatched: dict[str, float] = {}
        self._router_calls = [0] * len(self.moes)  # router calls before each layer's first forward
        self._hooks = [moe.layer.router.register_forward_hook(self._count(i)) for i, moe in enumerate(self.moes)]
        self._pool = Background("megatron")
        self._prepared: Future[_Prepared] | None = self._pool.submit(self._prepare, 0)

    def _count(self, layer: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            self._router_calls[layer] += 1

        return count

    def _expect_replayed(self, layer: int) -> None:
        """Raises RuntimeError unless the router ran exactly once in micro-step 0 and replays given routes."""
        moe, times = self.moes[layer], self._router_calls[layer]
        self._hooks[layer].remove()
        if self.on_mismatch == HOME:  # the router may choose
            return
        if times != 1:
            raise RuntimeError(f"{moe.name}: its router was consulted {times} times in micro-step 0; expected once")
        if refusal := replay_problem(moe.layer):
            raise RuntimeError(f"{moe.name}: {refusal}")

    def _make_sums(self, layer: int, gradients: torch.dtype) -> None:
        shared = self.engine.guests.are_lent
        weights = self.engine.guests.weights(layer, 0)
        names = set().union(*self._trained) if shared else self._trained[layer]
        if layer == 0 or not shared:
            self._sums.append({name: torch.zeros_like(weights[name], dtype=gradients) for name in sorted(names)})
        if not shared:
            self.engine.guests.add_gradients(layer, self._sums[layer])
            self.point_guests(layer, weights)

    def point_guests(self, layer: int, weights: dict[str, Tensor]) -> None:
        """Points the layer's guests at these weights, by name [guest slots, …]."""
        sums = self._sums[0 if self.engine.guests.are_lent else layer]
        self.guests[layer].point_at(weights, {name: sums[name] for name in self._trained[layer]})

    def rows_of(self, layer: int) -> MicroBatchRows:
        """Begins the layer's next forward or a recomputation, and returns its rows."""
        if torch._C._current_graph_task_id() >= 0:
            # A recomputation belongs to the oldest micro-step in flight, whose backward is running.
            rows = self._in_flight[0][layer] if self._in_flight else None
            if rows is None or not rows.turn.ran:
                name = self.moes[layer].name
                raise RuntimeError(f"{name}: its forward ran inside a backward pass, but not for the second time")
            rows = rows.again
        else:
            rows = self._following(layer)
        rows.turn.begin_forward()
        return rows

    def _following(self, layer: int) -> MicroBatchRows:
        """Returns the rows of the layer's next micro-step."""
        name, micro_step = self.moes[layer].name, self._next[layer]
        if micro_step == self.engine.num_micro_steps:
            raise RuntimeError(f"{name}: ran once more than the {micro_step} micro-steps of the plan")
        if layer == 0:
            assert self._prepared is not None
            self._begin(self._prepared.result())
            if micro_step + 1 < self.engine.num_micro_steps:
                self._prepared = self._pool.submit(self._prepare, micro_step + 1)
        rows = self._in_flight[-1][layer] if self._in_flight else None
        if rows is None or rows.turn.micro_step != micro_step:
            raise RuntimeError(f"{name}: its forward {_OUT_OF_ORDER}")
        if micro_step == 0:
            self._expect_replayed(layer)
        self._next[layer] += 1
        return rows

    def backward_ran(self, micro_step: int) -> None:
        """Retires a micro-step after the backward of its first layer, which runs last."""
        assert self._in_flight[0][0].turn.micro_step == micro_step
        self._in_flight.popleft()

    def _prepare(self, micro_step: int) -> _Prepared:
        """Prepares a micro-step in the background while the previous one runs."""
        engine = self.engine
        engine.wait_for(micro_step)
        made: list[MicroBatchRows] = []
        of_tables: list[MicroBatchRows] = []
        tables = []
        for layer, moe in enumerate(self.moes):
            forward = engine.turns["forward", micro_step, layer]
            rows = MicroBatchRows(self, engine.layer_turn(moe.name, forward), forward)
            made.append(rows)
            of_tables.append(rows)
            tables.append(self._table_of(forward))
            if engine.has_backward:
                backward = engine.turns["backward", micro_step, layer]
                then, before = self._served(backward), self._served(forward)
                if (then != before).any():
                    of_rank = (experts[self._ranks.rank, self.homes :].tolist() for experts in (then, before))
                    of_tables.append(rows.computed_again(backward, *of_rank))
                    tables.append(self._table_of(backward))
        rows_of_rank = self._load.array[micro_step, :, self._ranks.rank].astype(np.int32)
        return _Prepared(made, of_tables, self._pinned(np.stack(tables)), self._pinned(rows_of_rank))

    def _served(self, turn: foremoe.RankTurn) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns the expert of each slot of all ranks, [ranks, slots]; −1 for slots without rows."""
        experts, tokens = self.engine.plan._slots_of_event(turn.event)
        return np.where(tokens[turn.layer] > 0, experts[turn.layer], -1)

    def _table_of(self, turn: foremoe.RankTurn) -> np.ndarray[Any, Any]:
        homes = self.homes if self.on_mismatch == HOME else 0
        return slot_table(turn, self.engine.plan._slots_of_event(turn.event)[0][turn.layer], homes)

    def _pinned(self, array: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._ranks.device.type == "cpu" else tensor.pin_memory()

    def _begin(self, prepared: _Prepared) -> None:
        tables = prepared.tables.to(self._ranks.device, non_blocking=True)
        planned = prepared.planned.to(self._ranks.device, non_blocking=True).unbind()
        for rows, table in zip(prepared.of_tables, tables.unbind(), strict=True):
            rows.table, rows.planned = table, planned[rows.turn.layer]
        if not self.engine.has_backward:
            self._in_flight.clear()
        self._in_flight.append(prepared.rows)

    def other_rows(self) -> list[list[int]]:
        """Returns each (micro-step, layer) where rows of any rank differed from the plan, none under "home".
        Collective; call once, before metrics().
        """
        own = torch.stack([torch.from_numpy(self.computed).to(self._ranks.device), self.deviates])
        computed, others = gathered(own, self._ranks.group, -1).cpu().unbind()
        self._of_ranks = computed.numpy()
        if self.on_mismatch == HOME:
            self._mismatched = {"foremoe/mismatched": float(others.sum()) / max(1, self._load.array.sum())}
            return []
        places: list[list[int]] = torch.nonzero(others.any(-1)).tolist()
        return places

    def metrics(self) -> dict[str, float]:
        return {
            **self._mismatched,
            **named_spread("rho_computed", self._of_ranks),
            "foremoe/copies": float(self.engine.guests.copies["peer"]),
            "foremoe/exposed_seconds": self.engine.guests.exposed_seconds,
        }

    def close(self, complete: bool) -> None:
        """Ends the step. complete: True waits for all transfers; False ends at once."""
        for hook in self._hooks:
            hook.remove()
        self._pool.close(failed=not complete)
        self.engine.close(complete)
        for of in self.guests:
            of.release()
        # Rows refer to this step. The reference cycle would keep its tensors alive until garbage collection.
        self._in_flight.clear()
        self._sums.clear()
        self._prepared = None


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A micro-step prepared in advance."""

    rows: list[MicroBatchRows]
    of_tables: list[MicroBatchRows]  # `rows`, and those of recomputations that differ
    tables: Tensor  # int32 [of_tables, 3, slots of all ranks], on the host
    planned: Tensor  # int32 [layers, experts], planned rows of this rank; on the host
