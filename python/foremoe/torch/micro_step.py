"""One micro-step of a stage on this rank: what its layers exchange and compute.

Sizes and orders of all layers are on the device before the first of them runs, so that no layer waits for the device.
A layer's forward is a turn, and so is its backward. Guests are where they are for one of each, in the order of the
plan: another order is refused. What a checkpoint computes again is no turn of its own; it finds the guests in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foremoe._engine.sharded import local_weights

from .dispatch import Dispatch, chosen_slots, dispatch_to, planned_slots
from .exchange import AllToAll, GuestRows

if TYPE_CHECKING:
    from .phase import Stage


@dataclass
class LayerTurn:
    """One layer. What is on the device is there before the layer runs."""

    layer: int
    forward: int  # turn
    backward: int  # turn; −1 in a phase without
    planned: Dispatch
    recorded: Tensor  # int64 [tokens, top_k], −1 in rows without a route
    slots: Tensor | None  # int64 [tokens, top_k], as planned_slots() has it; None where routes are replayed
    unrouted: Tensor | None  # int64 [rows], this rank's without a route that are computed; None where no rank has any
    ran: bool = False  # a second forward is the recomputation of a checkpoint


class TurnGuests:
    """The guests of one layer as one forward and its backward see them."""

    def __init__(self, stage: Stage, of: LayerTurn) -> None:
        self._stage = stage
        self._of = of
        self.turn = of.backward if of.ran else of.forward

    def weights(self) -> dict[str, Tensor]:
        return self._stage.guests.weights(self._of.layer, self.turn)

    def trained(self) -> set[str]:
        return self._stage.guests.trained(self._of.layer)

    def add_gradients(self, gradients: dict[str, Tensor]) -> None:
        self._stage.guests.add_gradients(self._of.layer, gradients)


class MicroStep:
    """Prepared when it is made; execute() runs its layers."""

    def __init__(self, stage: Stage, number: int, at_homes: set[int]) -> None:
        """at_homes: layers that run without their guests."""
        self._stage = stage
        self._number = number
        self._rows = len(stage.routes.own[number])
        self.layers = [self._prepare(layer, layer in at_homes) for layer in range(len(stage.ep.layers))]

    def _prepare(self, layer: int, at_home: bool) -> LayerTurn:
        stage, own = self._stage, self._stage.ep.own
        place = "forward", self._number, layer
        turn = stage.turns.at_homes(*place) if at_home else stage.turns[place]
        routes = np.ascontiguousarray(stage.routes.own[self._number][:, layer].numpy())
        order = turn.row_order(routes)
        home_rows = int(turn.slot_offsets[own])
        slots = None
        if stage.routes.on_mismatch == "home":
            slots = self._upload(planned_slots(turn, order, routes, stage.plan.slot_expert[turn.event, layer]))
        has_unrouted = stage.routes.num_unrouted[self._number, layer].any()
        return LayerTurn(
            layer=layer,
            forward=turn.index,
            backward=stage.turns["backward", self._number, layer].index if stage.phase == "policy_update" else -1,
            planned=Dispatch(
                send=turn.send.tolist(),
                recv=turn.recv.tolist(),
                order=self._upload(torch.from_numpy(order.astype(np.int64))),
                to_slots=self._upload(torch.from_numpy(turn.to_slots.astype(np.int64))),
                home_rows=home_rows,
                home_ends=self._upload(torch.from_numpy(turn.slot_offsets[1 : own + 1].astype(np.int32))),
                guest_ends=self._upload(torch.from_numpy((turn.slot_offsets[own + 1 :] - home_rows).astype(np.int32))),
            ),
            recorded=self._upload(torch.from_numpy(routes).long()),
            slots=slots,
            unrouted=self._upload(stage.routes.unrouted[self._number][layer]) if has_unrouted else None,
        )

    def _upload(self, tensor: Tensor) -> Tensor:
        device = self._stage.ep.device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def execute(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """One layer, forward: [tokens, hidden]; ids and gates: [tokens, top_k].

        Rows without a route are dropped, or computed at homes; under on_mismatch="home" so are rows whose expert was
        not recorded.
        """
        stage, of = self._stage, self.layers[index]
        layer, group = stage.ep.layers[index], stage.ep.group
        if hidden.shape[0] != self._rows or not ids.shape == gates.shape == (self._rows, layer.top_k):
            raise RuntimeError(f"{layer.name}: {hidden.shape[0]} rows ran, but there are routes of {self._rows}")
        if of.ran:
            self._expect_recomputable(of)
        mine = TurnGuests(stage, of)
        stage.cursor.begin_forward(of, f"{layer.name}: its forward ran out of order")

        def before() -> None:
            stage.cursor.begin_backward(
                of, f"{layer.name}: its backward ran out of order, or twice: run it inside micro_step()"
            )
            mine.turn = of.backward

        def after() -> None:
            stage.cursor.end_backward(of)

        if torch.is_grad_enabled() and of.backward >= 0 and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # the exchanges of the backward pass take place all the same
        to = self._dispatch(of, ids)
        token = to.order // layer.top_k
        # The dispatch is the last of the layer's backward, the combine the first.
        received = AllToAll.apply(hidden[token], to.send, to.recv, group, None, after)[to.to_slots]
        stage.cursor.wait(of)
        parts = [layer.forward_rows(received[: to.home_rows], to.home_ends, local_weights(layer))]
        if len(to.to_slots) > to.home_rows:
            guest_rows = received[to.home_rows :]
            if torch.is_grad_enabled():
                parts.append(GuestRows.apply(guest_rows, layer, to.guest_ends, mine))
            else:
                parts.append(layer.forward_rows(guest_rows, to.guest_ends, mine.weights()))
        stage.cursor.end_forward(of)
        computed = torch.cat(parts) if len(parts) > 1 else parts[0]
        back = torch.empty_like(computed).index_copy(0, to.to_slots, computed)
        returned = AllToAll.apply(back, to.recv, to.send, group, before, None)
        weighted = returned * gates.reshape(-1)[to.order, None].to(returned.dtype)
        out = torch.zeros_like(hidden).index_add(0, token, weighted.to(hidden.dtype))
        if of.unrouted is None or of.slots is not None:
            return out
        # Autograd runs what came last first: these exchanges, then those of the plan, on all ranks alike.
        rows = of.unrouted
        of_unrouted, computed_here = stage.ep.execute_at_homes(index, hidden[rows], ids[rows], gates[rows])
        stage.beside.unplanned[self._number, index, stage.ep.rank] = computed_here
        return out.index_add(0, rows, of_unrouted)

    def _dispatch(self, of: LayerTurn, ids: Tensor) -> Dispatch:
        """Where rows go. Where routes are replayed, ids that are none of them are noted: the stage's end refuses them.

        Collective where they are not.
        """
        stage, ep, routed = self._stage, self._stage.ep, of.recorded >= 0
        if of.slots is None:
            found, before = ((ids != of.recorded) & routed).any(), stage.differs[of.layer]
            stage.differs[of.layer] = found if before is None else before | found
            return of.planned
        # What a checkpoint computes again goes where it went, even if rounding has changed the router's scores.
        ep.layers[of.layer].replay(ids)
        slots, as_recorded = chosen_slots(of.slots, of.recorded, ids, own=ep.own, slots=stage.plan.num_slots)
        if stage.routes.drop:
            slots = slots.where(routed, -1)
        to = dispatch_to(slots, slots=stage.plan.num_slots, own=ep.own, group=ep.group)
        place = self._number, of.layer, ep.rank
        elsewhere = routed & ~as_recorded
        stage.beside.unplanned[place] = len(to.to_slots) - len(of.planned.to_slots)
        stage.beside.mismatched[place] = int(elsewhere.sum())
        stage.beside.mismatched_tokens[place] = int(elsewhere.any(-1).sum())
        return to

    def _expect_recomputable(self, of: LayerTurn) -> None:
        """Refuses a second forward that is none of a checkpoint, or whose guests, or whose partners, are gone."""
        stage = self._stage
        name = stage.ep.layers[of.layer].name
        if torch._C._current_graph_task_id() < 0:
            raise RuntimeError(f"{name}: its forward ran twice in one micro-step")
        if stage.plan.residency == "shared" and of.backward != stage.cursor.last + 1:
            raise RuntimeError(f"{name}: under residency shared a checkpoint may hold one MoE layer, not several")
        place = self._number, of.layer
        rows = stage.routes.counts[place].sum(-1) + stage.routes.num_unrouted[place]
        if bool((rows == 0).any()):
            raise RuntimeError(f"{name}: checkpointing needs rows of every rank in every micro-step, and one is idle")

    def run_idle(self) -> None:
        """All layers on no rows of this rank's own, forward and backward: it serves the rows of others."""
        outputs = []
        for i, layer in enumerate(self._stage.ep.layers):
            weight = next(iter(local_weights(layer).values()))
            hidden = weight.new_zeros(0, layer.hidden_size).requires_grad_(torch.is_grad_enabled())
            none = hidden.new_zeros(0, layer.top_k)
            outputs.append(self.execute(i, hidden, none.long(), none))
        if self._stage.phase == "policy_update":
            for out in reversed(outputs):
                out.sum().backward()  # type: ignore[no-untyped-call]
