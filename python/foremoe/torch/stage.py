"""One phase of a step under its plan: what a rank does in each layer of each micro-step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe.balance import imbalance, planned_rows

from .exchange import AllToAll, GuestRows
from .guests import Guests
from .host_path import HostPath
from .sharded import local_weights

if TYPE_CHECKING:
    from .parallel import ExpertParallel


@dataclass
class _LayerTurn:
    """One layer of one micro-step: sizes and orders, on the device before the layer runs."""

    layer: int
    forward: int  # turn
    backward: int  # turn; −1 in a phase without
    send: list[int]
    recv: list[int]
    order: Tensor  # int64 [rows sent], entry of routes
    to_slots: Tensor  # int64 [rows received]
    home_rows: int
    home_ends: Tensor  # int32 [homes]
    guest_ends: Tensor  # int32 [guest slots]
    unrouted: Tensor | None  # int64 [rows], this rank's without a route that are computed; None where no rank has any
    ran: bool = False  # a second forward is the recomputation of a checkpoint


class _TurnGuests:
    """The guests of one layer as one forward and its backward see them."""

    def __init__(self, stage: Stage, of: _LayerTurn) -> None:
        self._stage = stage
        self._of = of
        self.turn = of.backward if of.ran else of.forward

    def weights(self) -> dict[str, Tensor]:
        return self._stage.guests.weights(self._of.layer, self.turn)

    def trained(self) -> set[str]:
        return self._stage.guests.trained(self._of.layer)

    def add_gradients(self, gradients: dict[str, Tensor]) -> None:
        self._stage.guests.add_gradients(self._of.layer, gradients)


class Stage:
    """A planned phase. Enter it, run each micro-step inside micro_step(m), drain, leave.

    with ep.plan(routes) as stage:
        for m, batch in enumerate(micro_batches):
            with stage.micro_step(m):
                loss(model(**batch)).backward()
        stage.drain()
    """

    def __init__(
        self,
        ep: ExpertParallel,
        load: foremoe.Load,
        running: foremoe.RunningPlan,
        routes: list[Tensor],
        *,
        phase: str,
        unrouted: np.ndarray[Any, np.dtype[np.int64]],
    ):
        """unrouted: rows without a route that are computed at homes, int64 [micro_steps, layers, ranks]."""
        self._ep = ep
        self._load = load
        self._running = running
        self._routes = routes  # of this rank's micro-steps, int32 [tokens, layers, top_k]
        self._phase = phase
        self._unrouted = unrouted
        # Rows computed for them on each rank; until they are shared, on this one.
        self._unrouted_computed = np.zeros_like(unrouted)
        self._plan: foremoe.Plan | None = None
        self._guests: Guests | None = None
        self._turns: foremoe.RankTurns | None = None
        self._current: list[_LayerTurn] | None = None
        self._next = 0  # micro-step
        self._last = -1  # turn that ran
        self._fallbacks: list[tuple[int, int]] = []  # (micro-step, layer) that ran at homes
        self._grads: list[tuple[torch.nn.Parameter, Tensor | None]] = []
        self._drained = phase == "recompute"

    @property
    def plan(self) -> foremoe.Plan:
        """The plan; from entering on."""
        if self._plan is None:
            raise RuntimeError("the stage has not been entered")
        return self._plan

    @property
    def guests(self) -> Guests:
        if self._guests is None:
            raise RuntimeError("the stage has not been entered")
        return self._guests

    @property
    def micro_steps(self) -> range:
        """Of all ranks: a rank with fewer batches runs idle() in the last ones."""
        return range(self._load.num_micro_steps)

    def wait_for_plan(self) -> None:
        """Until all micro-steps are planned. micro_step() waits for its own alone."""
        self._running.finish()

    def __enter__(self) -> Stage:
        if self._guests is not None:
            raise RuntimeError("a stage can be entered once")
        ep = self._ep
        ep.enter(self)
        try:
            self._plan = self._running.begin()
            ep.expect_executable(self._plan)
            turns = self._turns = foremoe.RankTurns(
                self._plan,
                self._load,
                rank=ep.rank,
                phase=self._phase,
                expert_bytes=ep.expert_bytes,
                path=ep.path,
                depth=ep.depth,
            )
            self._guests = Guests(
                ep.layers,
                turns,
                ep.copy_group,
                guest_slots=self._plan.guest_slots,
                shared=self._plan.residency == "shared",
                host=lambda: self._host_path(turns),
            )
        except BaseException as error:
            ep.leave()
            # All ranks refuse alike, and none has begun; what ends one rank alone does so when others have.
            ep.failed |= self._turns is not None and not isinstance(error, foremoe.InputError)
            raise
        if self._phase == "policy_update":
            self._grads = [(w, w.grad) for w in [*ep.expert_parameters(), *ep.dense_parameters()] if w.requires_grad]
            for weight, _ in self._grads:
                weight.grad = None
        for layer in ep.layers:
            layer.replayed_rows = layer.mismatched_rows = 0  # type: ignore[attr-defined]
        return self

    def _host_path(self, turns: foremoe.RankTurns) -> HostPath | None:
        """None where no node has copies by that path."""
        nodes = range(-(-self._ep.num_ranks // self._ep.ranks_per_node))
        if not any(turns.arena(node) for node in nodes):
            return None
        return HostPath(self._ep, turns, self._load.num_micro_steps)

    def __exit__(self, kind: object, *_: object) -> None:
        ep = self._ep
        ep.leave()
        complete = kind is None and self._drained and self._next == self._load.num_micro_steps
        if not complete:
            for weight, grad in self._grads:  # nothing half applied
                weight.grad = grad
        if not complete:
            ep.failed = True  # copies may be on their way that nobody waits for
            self.guests.abandon()
            if kind is None:
                raise RuntimeError(
                    "the stage was left before its last micro-step, or without drain(): its gradients are given up"
                )
            return
        self.guests.finish()
        if self._phase == "recompute":
            self._share_unrouted()

    @contextlib.contextmanager
    def micro_step(self, micro_step: int) -> Iterator[None]:
        """Forward and backward of this micro-step run inside: its routes are replayed, its plan executed.

        Micro-steps run in order, each once, on all ranks.
        """
        if micro_step >= len(self._routes) and micro_step in self.micro_steps:
            raise RuntimeError(f"this rank has no batch in micro-step {micro_step}: run idle({micro_step})")
        with self._entered(micro_step):
            yield

    @contextlib.contextmanager
    def _entered(self, micro_step: int) -> Iterator[None]:
        if micro_step != self._next:
            raise RuntimeError(f"micro-step {micro_step} was entered, but {self._next} comes next")
        self.guests.expect_same_weights()
        self._next += 1
        at_homes = self.guests.agree(micro_step)
        self._fallbacks += [(micro_step, layer) for layer in sorted(at_homes)]
        self._current = self._prepare(micro_step, at_homes)
        routes = self._routes_of(micro_step)
        for i, layer in enumerate(self._ep.layers):
            layer.replay(routes[:, i].long().to(self._ep.device))
        try:
            yield
        finally:
            self._current = None
            for layer in self._ep.layers:
                layer.replay(None)

    def idle(self, micro_step: int) -> None:
        """Takes part in a micro-step in which this rank has no batch: it serves the rows of others."""
        if self._ep.needs_all_ranks:
            raise RuntimeError("what reduces the other gradients needs a batch of every rank in every micro-step")
        with self._entered(micro_step):
            outputs = []
            for i, layer in enumerate(self._ep.layers):
                weight = next(iter(local_weights(layer).values()))
                hidden = weight.new_zeros(0, layer.hidden_size).requires_grad_(torch.is_grad_enabled())
                none = hidden.new_zeros(0, layer.top_k)
                outputs.append(self.execute(i, hidden, none.long(), none))
            if self._phase == "policy_update":
                for out in reversed(outputs):
                    out.sum().backward()  # type: ignore[no-untyped-call]

    def _routes_of(self, micro_step: int) -> Tensor:
        if micro_step < len(self._routes):
            return self._routes[micro_step]
        layers = self._ep.layers
        return torch.empty(0, len(layers), layers[0].top_k, dtype=torch.int32)

    def _prepare(self, micro_step: int, at_homes: set[int]) -> list[_LayerTurn]:
        """at_homes: layers that run without their guests."""
        if self._turns is None:
            raise RuntimeError("the stage has not been entered")
        self._running.wait_for(micro_step)
        routes = self._routes_of(micro_step)
        backward = self._phase == "policy_update"
        prepared = []
        for i in range(len(self._ep.layers)):
            place = "forward", micro_step, i
            turn = self._turns.at_homes(*place) if i in at_homes else self._turns[place]
            order = turn.row_order(np.ascontiguousarray(routes[:, i].numpy()))
            own = self._ep.own
            home_rows = int(turn.slot_offsets[own])
            prepared.append(
                _LayerTurn(
                    layer=i,
                    forward=turn.index,
                    backward=self._turns["backward", micro_step, i].index if backward else -1,
                    send=turn.send.tolist(),
                    recv=turn.recv.tolist(),
                    order=self._upload(order.astype(np.int64)),
                    to_slots=self._upload(turn.to_slots.astype(np.int64)),
                    home_rows=home_rows,
                    home_ends=self._upload(turn.slot_offsets[1 : own + 1].astype(np.int32)),
                    guest_ends=self._upload((turn.slot_offsets[own + 1 :] - home_rows).astype(np.int32)),
                    unrouted=self._unrouted_rows(micro_step, i),
                )
            )
        return prepared

    def _unrouted_rows(self, micro_step: int, layer: int) -> Tensor | None:
        of_ranks = self._unrouted[micro_step, layer]
        if not of_ranks.any():
            return None
        rows = (self._routes_of(micro_step)[:, layer, 0] < 0).numpy().nonzero()[0]
        return self._upload(rows[: of_ranks[self._ep.rank]])  # all of them, or none where this rank drops its own

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._ep.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._ep.device, non_blocking=True)

    def execute(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """One layer, forward: [tokens, hidden]; ids, which matter for rows without a route, and gates: [tokens, top_k].

        Rows without a route are dropped, or computed at homes.
        """
        if self._current is None:
            raise RuntimeError("a planned layer ran outside of micro_step()")
        of = self._current[index]
        layer, group, guests = self._ep.layers[index], self._ep.group, self.guests
        routes = self._routes_of(self._next - 1)
        if hidden.shape[0] != len(routes) or gates.shape != (len(routes), layer.top_k):
            raise RuntimeError(f"{layer.name}: {hidden.shape[0]} rows ran, but there are routes of {len(routes)}")
        self._expect_turn(of)
        mine = _TurnGuests(self, of)
        # Guests of a recomputation are still in place. Layers after it have their backward before its own: copies into
        # their buffers must not start yet.
        ready = min(mine.turn, self._last + 1)
        guests.begin(ready)

        def before() -> None:
            if of.backward != self._last + 1:
                raise RuntimeError(f"{layer.name}: its backward ran out of order, or twice: run it inside micro_step()")
            mine.turn = of.backward
            guests.begin(of.backward)
            guests.wait(of.backward)

        def after() -> None:
            guests.end(of.backward, index)
            self._last = of.backward

        if torch.is_grad_enabled() and of.backward >= 0 and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # the exchanges of the backward pass take place all the same
        token = of.order // layer.top_k
        # The dispatch is the last of the layer's backward, the combine the first.
        received = AllToAll.apply(hidden[token], of.send, of.recv, group, None, after)[of.to_slots]
        guests.wait(ready)
        parts = [layer.forward_rows(received[: of.home_rows], of.home_ends, local_weights(layer))]
        if len(of.to_slots) > of.home_rows:
            guest_rows = received[of.home_rows :]
            if torch.is_grad_enabled():
                parts.append(GuestRows.apply(guest_rows, layer, of.guest_ends, mine))
            else:
                parts.append(layer.forward_rows(guest_rows, of.guest_ends, mine.weights()))
        if not of.ran:
            of.ran, self._last = True, of.forward
        computed = torch.cat(parts) if len(parts) > 1 else parts[0]
        back = torch.empty_like(computed).index_copy(0, of.to_slots, computed)
        returned = AllToAll.apply(back, of.recv, of.send, group, before, None)
        weighted = returned * gates.reshape(-1)[of.order, None].to(returned.dtype)
        out = torch.zeros_like(hidden).index_add(0, token, weighted.to(hidden.dtype))
        if of.unrouted is None:
            return out
        # Autograd runs what came last first: these exchanges, then those of the plan, on all ranks alike.
        rows = of.unrouted
        of_unrouted, computed_here = self._ep.execute_at_homes(index, hidden[rows], ids[rows], gates[rows])
        self._unrouted_computed[self._next - 1, index, self._ep.rank] = computed_here
        return out.index_add(0, rows, of_unrouted)

    def _expect_turn(self, of: _LayerTurn) -> None:
        """Guests are where they are for one forward and one backward, in the order of the plan."""
        name = self._ep.layers[of.layer].name
        if not of.ran:
            if of.forward != self._last + 1:
                raise RuntimeError(f"{name}: its forward ran out of order")
            return
        if torch._C._current_graph_task_id() < 0:
            raise RuntimeError(f"{name}: its forward ran twice in one micro-step")
        # A checkpoint is computed again.
        if self.plan.residency == "shared" and of.backward != self._last + 1:
            raise RuntimeError(f"{name}: under residency shared a checkpoint may hold one MoE layer, not several")
        place = self._next - 1, of.layer
        rows = self._load.array[place].sum(-1) + self._unrouted[place]
        if bool((rows == 0).any()):
            raise RuntimeError(f"{name}: checkpointing needs rows of every rank in every micro-step, and one is idle")

    def drain(self) -> None:
        """Brings the gradients of all guests home, and makes all gradients the mean over ranks. Collective, once."""
        if self._phase != "policy_update":
            return
        if self._drained or self._next != self._load.num_micro_steps or self._last + 1 != len(self._turns or ()):
            raise RuntimeError("drain() comes once, after the backward of the last micro-step")
        self.guests.expect_same_weights()
        self.guests.drain()
        self._share_unrouted()
        experts = {id(weight) for weight in self._ep.expert_parameters()}
        reduced = {id(p) for p in self._ep.reduced_parameters()}
        for weight, before in self._grads:
            if id(weight) in experts or id(weight) in reduced:  # the wrapper has averaged all others
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                if id(weight) in reduced:
                    dist.all_reduce(weight.grad, group=self._ep.group)
                weight.grad /= self._ep.num_ranks
            if before is not None:
                weight.grad = before if weight.grad is None else weight.grad.add_(before)
        self._drained = True

    def _share_unrouted(self) -> None:
        """Tells all ranks what each computed for rows without a route. Collective."""
        if self._unrouted.any():
            computed = torch.from_numpy(self._unrouted_computed).to(self._ep.device)
            dist.all_reduce(computed, group=self._ep.group)
            self._unrouted_computed = computed.cpu().numpy()

    def figures(self) -> dict[str, Any]:
        """What the stage was worth, of this rank where ranks differ.

        rho_vanilla, rho_planned, rho_computed: busiest rank's rows ÷ mean, mean and max over layers and micro-steps:
        with experts at home; as planned; and as executed, which is at homes where layers fell back, and with the rows
        without a route that were computed (those of other ranks from drain(), or the end of a recompute phase, on).
        copies: experts copied into this rank; host_copies: those of them that came by the host path. exposed_seconds:
        that it waited for them. fallbacks: layers of micro-steps that ran at homes, not as planned, because a rank
        lacked a guest; the same on all ranks. mismatch: share of rows with a route whose router would have chosen other
        experts.
        """
        experts = self._load.array.sum(2)  # [micro_steps, layers, experts]
        at_homes = experts.reshape(*experts.shape[:2], self._ep.num_ranks, -1).sum(-1)
        planned = planned_rows(self.plan)
        computed = planned + self._unrouted_computed
        for place in self._fallbacks:
            computed[place] += at_homes[place] - planned[place]
        rows = sum(int(getattr(layer, "replayed_rows", 0)) for layer in self._ep.layers)
        mismatched = sum(int(getattr(layer, "mismatched_rows", 0)) for layer in self._ep.layers)
        return {
            "rho_vanilla": _spread(at_homes),
            "rho_planned": _spread(planned),
            "rho_computed": _spread(computed),
            "copies": sum(self.guests.copies.values()),
            "host_copies": self.guests.copies["host"],
            "fallbacks": len(self._fallbacks),
            "exposed_seconds": self.guests.exposed_seconds,
            "mismatch": mismatched / rows if rows else 0.0,
        }


def _spread(rows: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float]:
    """ρ: mean and max over layers and micro-steps, without those that have no rows; 1 where none has."""
    rho = imbalance(rows)
    rho = rho[rho > 0]
    return {"mean": float(rho.mean()), "max": float(rho.max())} if rho.size else {"mean": 1.0, "max": 1.0}
