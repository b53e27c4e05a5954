"""One micro-step of a phase on this rank: the exchanges and computations of its layers.

Sizes and orders of all layers are on the device before the first layer runs, so that no layer waits for the device. A
layer's forward is a turn, and so is its backward. Guests are in place for one forward and one backward, in the order of
the plan; any other order is refused. A recomputation by a checkpoint is not a turn and finds the guests in place. A
second forward of the micro-step, such as that of a reference model under torch.no_grad(), also finds them, unless the
guest slots already serve other layers. In that case, its rows go to their experts' homes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import foremoe
from foremoe._engine.layer_turn import LayerTurn
from foremoe._engine.planned_phase import PlannedPhase
from foremoe._engine.sharded import local_weights

from .by_token import TokenDispatch, exchanged_by_token
from .dispatch import Dispatch, chosen_slots, dispatch_to
from .exchange import computed_in_slots, exchanged
from .figures import PlanDeviations
from .relays import TokenRows
from .routes import Routes
from .spread import SpreadExperts
from .tables import to_device


@dataclass
class LayerRows:
    """Destinations of the rows of one layer. Device tensors are complete before the layer runs."""

    turn: LayerTurn
    planned: Dispatch | TokenDispatch
    recorded: Tensor  # int64 [tokens, top_k], −1 in rows without a route
    slots: Tensor | None  # int64 [tokens, top_k], from RankTurn.slots(); None if routes are replayed
    unrouted: Tensor | None  # int64 [rows], this rank's computed rows without a route; None if no rank has any
    sampled: Tensor | None  # int64 [rows], rows whose routes are compared with the router's choice
    dropped: Tensor | None  # int64 [rows], this rank's rows without a route that are not computed; None if none
    end: Any = None  # (gradient edge, shape, type) of the output of the forward that has gradients
    at_homes: Dispatch | None = None  # of a second forward that finds no guests


class MicroStep:
    """A prepared micro-step; execute() runs its layers."""

    def __init__(
        self,
        planned: PlannedPhase,
        experts: SpreadExperts,
        routes: Routes,
        beside: PlanDeviations,
        number: int,
        at_homes: set[int],
        tokens: list[TokenRows] | None,
        note_forward: Callable[[], None],
    ) -> None:
        """
        Args:
            at_homes: Layers that run without their guests, and are dispatched by row.
            tokens: Destinations of tokens, by layer; None if all layers are dispatched by row.
            note_forward: Called before a layer runs.
        """
        self._planned = planned
        self._experts = experts
        self._routes = routes
        self._beside = beside
        self._number = number
        self._note_forward = note_forward
        self._rows = len(routes.own[number])
        self._is_over = False
        self._next_layer = 0  # of the running forward
        places = [("forward", number, layer) for layer in range(len(experts.layers))]
        turns = [planned.turns.at_homes(*at) if at[-1] in at_homes else planned.turns[at] for at in places]
        rows = [None if tokens is None or layer in at_homes else tokens[layer] for layer in range(len(turns))]
        tables = to_device([self._tables(*of) for of in zip(turns, rows, strict=True)], experts.ranks.device)
        self.layers = [self._prepare(*of) for of in zip(turns, tables, rows, strict=True)]

    def _tables(self, turn: foremoe.RankTurn, tokens: TokenRows | None = None) -> dict[str, Tensor]:
        """Returns host tensors by their names in LayerRows and Dispatch or TokenRows."""
        routes, homes = self._routes, self._experts.ranks.homes
        recorded = np.ascontiguousarray(routes.own[self._number][:, turn.layer].numpy())
        ends = turn.slot_offsets[1:].astype(np.int32)
        tables = {
            "recorded": torch.from_numpy(recorded).long(),
            "home_ends": torch.from_numpy(ends[:homes]),
            "guest_ends": torch.from_numpy(ends[homes:] - ends[homes - 1]),
        }
        if tokens is not None:
            tables |= tokens.tables
        else:
            tables["order"] = torch.from_numpy(turn.row_order(recorded).astype(np.int64))
            tables["to_slots"] = torch.from_numpy(turn.to_slots.astype(np.int64))
        if routes.on_mismatch == "home":
            tables["slots"] = torch.from_numpy(turn.slots(recorded).astype(np.int64))
        if routes.num_unrouted[self._number, turn.layer].any():
            tables["unrouted"] = routes.unrouted[self._number][turn.layer]
        if self._beside.sample is not None:
            tables["sampled"] = self._beside.sample.rows[self._number]
        if routes.drop and (recorded[:, 0] < 0).any():
            tables["dropped"] = torch.from_numpy(np.flatnonzero(recorded[:, 0] < 0))
        return tables

    def _prepare(self, turn: foremoe.RankTurn, tables: dict[str, Tensor], tokens: TokenRows | None) -> LayerRows:
        routes, layer = self._routes, turn.layer
        rows = routes.counts[self._number, layer].sum(-1) + routes.num_unrouted[self._number, layer]  # [rank]
        return LayerRows(
            turn=self._planned.layer_turn(
                self._experts.layers[layer].name,
                turn,
                ""
                if rows.all()
                else "a checkpoint or a second forward needs rows of every rank in every micro-step, and one is idle",
            ),
            planned=self._dispatch_by_row(turn, tables)
            if tokens is None
            else tokens.on(tables, **self._slot_rows(turn, tables)),
            recorded=tables["recorded"],
            slots=tables.get("slots"),
            unrouted=tables.get("unrouted"),
            sampled=tables.get("sampled"),
            dropped=tables.get("dropped"),
        )

    def _slot_rows(self, turn: foremoe.RankTurn, tables: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the attributes of SlotRows."""
        home_rows = int(turn.slot_offsets[self._experts.ranks.homes])
        return {"home_rows": home_rows, **{name: tables[name] for name in ("home_ends", "guest_ends")}}

    def _dispatch_by_row(self, turn: foremoe.RankTurn, tables: dict[str, Tensor]) -> Dispatch:
        return Dispatch(
            **self._slot_rows(turn, tables),
            send=turn.send.tolist(),
            recv=turn.recv.tolist(),
            order=tables["order"],
            to_slots=tables["to_slots"],
        )

    def execute(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Runs the forward of one layer. hidden: [tokens, hidden]. ids, gates: [tokens, top_k].

        Rows without a route are dropped or computed at homes; under on_mismatch="home" rows of experts that were not
        recorded are also computed at homes.
        """
        self._experts.expect_callable()
        self._note_forward()
        of, layer, ranks = self.layers[index], self._experts.layers[index], self._experts.ranks
        if hidden.shape[0] != self._rows or not ids.shape == gates.shape == (self._rows, layer.top_k):
            raise RuntimeError(f"{layer.name}: {hidden.shape[0]} rows ran, but there are routes of {self._rows}")
        turn = of.turn
        recomputes = torch._C._current_graph_task_id() >= 0
        repeats = turn.ran and not recomputes
        if not recomputes:
            self._expect_next(index, repeats)
        had_graph = turn.has_graph
        turn.begin_forward()
        if torch.is_grad_enabled() and turn.backward >= 0 and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # so that the backward pass runs its exchanges
        chosen = getattr(layer, "own_choice", None)
        if self._beside.sample is not None and of.sampled is not None and chosen is not None:
            self._beside.sample.note(self._number, index, of.sampled, chosen)
        to = self._dispatch(of, ids)
        if repeats:
            to = self._repeated(of, had_graph)

        def compute(rows: Tensor) -> Tensor:
            computed = computed_in_slots(rows, to, layer, turn)
            turn.end_forward()
            return computed

        around: Any = {"before": turn.begin_backward, "after": turn.end_backward}
        if isinstance(to, TokenDispatch):
            dtype = next(iter(local_weights(layer).values())).dtype
            out = exchanged_by_token(hidden, gates, to, ranks, compute, dtype=dtype, **around)
        else:
            out = exchanged(hidden, gates, to, ranks.rows, compute, **around)
        if of.unrouted is not None and of.slots is None:
            # Autograd runs in reverse order: these exchanges first, then the plan's, on all ranks.
            rows = of.unrouted
            of_unrouted, computed_here = self._experts.at_homes(index, hidden[rows], ids[rows], gates[rows])
            self._beside.unplanned[self._number, index, ranks.rank] = computed_here
            out = out.index_add(0, rows, of_unrouted)
        if out.requires_grad and turn.backward >= 0:
            self._watch_backward(index, out)
            if torch._C._current_graph_task_id() < 0:
                of.end = torch.autograd.graph.get_gradient_edge(out), out.shape, out.dtype
        return out

    def _expect_next(self, index: int, repeats: bool) -> None:
        """Announces a further forward. All ranks must run it.

        Raises RuntimeError if a forward begins before the last one has ended, for example if it is retried: other ranks
        would exchange rows of other layers.
        """
        session, last = self._experts.session, len(self.layers)
        if index == 0 and 0 < self._next_layer < last:
            raise RuntimeError(
                f"a forward of micro-step {self._number} began, but the one before it ended after layer "
                f"{self._next_layer - 1} of {last}"
            )
        if index == 0 and repeats:
            call = f"another forward of micro-step {self._number}"
            if self._experts.ranks.device.type == "cpu":  # gloo aborts where exchanges differ
                session.expect_call(call)
            else:
                session.pass_call(call)  # never waits for the device
        self._next_layer = index + 1

    def _watch_backward(self, index: int, out: Tensor) -> None:
        """Checks when a layer's backward begins: raises RuntimeError after the end of this micro-step, and counts
        dropped rows whose gradient is not 0."""
        # LayerRows.end refers to the hook, so a strong reference would keep the graph and the phase for ever: the
        # garbage collector does not see hooks.
        this = weakref.ref(self)
        where = f"{self._experts.layers[index].name}: its backward ran after the end of micro-step {self._number}"

        def begin(gradient: Tensor) -> None:
            running = this()
            if running is None or running._is_over:
                raise RuntimeError(f"{where}; run it before the next one")
            dropped = running.layers[index].dropped
            if dropped is not None:
                running._beside.read += (gradient.index_select(0, dropped) != 0).any(-1).sum()

        out.register_hook(begin)  # type: ignore[no-untyped-call]

    def _repeated(self, of: LayerRows, had_graph: bool) -> Dispatch | TokenDispatch:
        """Returns the destinations of a second forward. had_graph: Whether an earlier forward had gradients."""
        name = self._experts.layers[of.turn.layer].name
        if of.slots is not None:
            raise RuntimeError(
                f"{name}: its forward ran twice in one micro-step ({self._number}) under on_mismatch='home', where the "
                "second would replay what the router chose in the first; run the others between micro-steps, in "
                "ep.unplanned()"
            )
        if of.turn.keeps_guests:
            return of.planned
        if of.at_homes is None:
            turn = self._planned.turns.at_homes("forward", self._number, of.turn.layer)
            (tables,) = to_device([self._tables(turn)], self._experts.ranks.device)
            of.at_homes = self._dispatch_by_row(turn, tables)
        if not had_graph:
            of.planned = of.at_homes  # used by recomputations
        return of.at_homes

    def _dispatch(self, of: LayerRows, ids: Tensor) -> Dispatch | TokenDispatch:
        """Returns the destinations of rows. Replayed routes that differ from ids are recorded for the end of the phase.

        Collective unless routes are replayed.
        """
        beside, ranks, layer, routed = self._beside, self._experts.ranks, of.turn.layer, of.recorded >= 0
        if of.slots is None:
            found, before = ((ids != of.recorded) & routed).any(), beside.differs[layer]
            beside.differs[layer] = found if before is None else before | found
            return of.planned
        # Recomputed rows go to the same slots, even if rounding changes the router's scores.
        self._experts.layers[layer].replay(ids)
        num_slots = self._planned.plan.num_slots
        positions = self._experts.positions(layer, ids)
        slots, as_recorded = chosen_slots(of.slots, of.recorded, ids, positions, own=ranks.homes, slots=num_slots)
        if self._routes.drop:
            slots = slots.where(routed, -1)
        to = dispatch_to(slots, slots=num_slots, own=ranks.homes, channel=ranks.rows)
        assert isinstance(of.planned, Dispatch)
        place = self._number, layer, ranks.rank
        elsewhere = routed & ~as_recorded
        beside.unplanned[place] = len(to.to_slots) - len(of.planned.to_slots)
        beside.mismatched[place] = int(elsewhere.sum())
        beside.mismatched_tokens[place] = int(elsewhere.any(-1).sum())
        return to

    def finish(self, needs_all_ranks: bool) -> None:
        """Runs an omitted backward with zero gradients, since other ranks have rows here.

        Raises RuntimeError if it cannot.
        """
        for layer, of in zip(self._experts.layers, self.layers, strict=True):
            if not of.turn.ran:
                raise RuntimeError(
                    f"{layer.name}: micro-step {self._number} ended without its forward, in which other ranks need "
                    "this one; where a batch counts for nothing, leave out its backward alone"
                )
        if not self._planned.lacks_backward(self._number):
            self._is_over = True
            return
        ends = [of.end for of in self.layers if of.end is not None]
        if needs_all_ranks or len(ends) < len(self.layers):
            why = (
                "DistributedDataParallel and FSDP2 need it on every rank"
                if needs_all_ranks
                else "its forward ran without gradients, or in a reentrant checkpoint"
            )
            raise RuntimeError(
                f"micro-step {self._number} ended without its backward, but {why}; where a batch counts for nothing, "
                "run (0 * loss).backward()"
            )
        self._beside.skipped += 1
        device = self._experts.ranks.device
        torch.autograd.backward(
            [edge for edge, *_ in ends], [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype in ends]
        )
        self._is_over = True

    def run_idle(self) -> None:
        """Runs all layers forward and backward without rows of this rank, which serves the rows of other ranks."""
        self._note_forward = lambda: None  # no wrapper of the model runs
        outputs = []
        for i, layer in enumerate(self._experts.layers):
            weight = next(iter(local_weights(layer).values()))
            hidden = weight.new_zeros(0, layer.hidden_size).requires_grad_(torch.is_grad_enabled())
            none = hidden.new_zeros(0, layer.top_k)
            outputs.append(self.execute(i, hidden, none.long(), none))
        if self._planned.has_backward:
            for out in reversed(outputs):
                out.sum().backward()  # type: ignore[no-untyped-call]
