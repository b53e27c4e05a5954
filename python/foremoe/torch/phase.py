"""One phase of a step under its plan: when it begins, which micro-step runs, how it ends.

A stage takes all gradients away when it is entered. Its end gives them back with its own added, or as they were if it
was not completed. What a layer does is told in micro_step.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import foremoe
from foremoe._engine.arguments import expect_executable
from foremoe._engine.guests import Guests
from foremoe._engine.host_path import HostPath
from foremoe._engine.turn_cursor import TurnCursor

from .figures import BesidePlan, figures_of
from .micro_step import MicroStep
from .routes import Routes

if TYPE_CHECKING:
    from .parallel import ExpertParallel


class Stage:
    """A planned phase. Enter it, run each micro-step inside micro_step(m), drain, leave.

    with ep.plan(routes) as stage:
        for m, batch in enumerate(micro_batches):
            with stage.micro_step(m):
                loss(model(**batch)).backward()
        stage.drain()
    """

    def __init__(
        self, ep: ExpertParallel, load: foremoe.Load, running: foremoe.RunningPlan, routes: Routes, *, phase: str
    ):
        self.ep = ep
        self.routes = routes
        self.phase = phase
        self.beside = BesidePlan(routes.num_unrouted, routes.on_mismatch)
        self.differs: list[Tensor | None] = [None] * len(ep.layers)  # bool []: other experts ran than were replayed
        self._load = load
        self._running = running
        self._plan: foremoe.Plan | None = None
        self._guests: Guests | None = None
        self._cursor: TurnCursor | None = None
        self._turns: foremoe.RankTurns | None = None
        self._current: MicroStep | None = None
        self._next = 0  # micro-step
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
    def cursor(self) -> TurnCursor:
        if self._cursor is None:
            raise RuntimeError("the stage has not been entered")
        return self._cursor

    @property
    def turns(self) -> foremoe.RankTurns:
        if self._turns is None:
            raise RuntimeError("the stage has not been entered")
        return self._turns

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
        ep = self.ep
        ep.enter(self)
        try:
            self._plan = self._running.begin()
            expect_executable(self._plan)
            turns = self._turns = foremoe.RankTurns(
                self._plan,
                self._load,
                rank=ep.rank,
                phase=self.phase,
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
            self._cursor = TurnCursor(self._guests)
        except BaseException as error:
            ep.leave()
            # All ranks refuse alike, and none has begun; what ends one rank alone does so when others have.
            ep.failed |= self._turns is not None and not isinstance(error, foremoe.InputError)
            raise
        if self.phase == "policy_update":
            self._grads = [(w, w.grad) for w in [*ep.expert_parameters(), *ep.dense_parameters()] if w.requires_grad]
            for weight, _ in self._grads:
                weight.grad = None
        for layer in ep.layers:
            layer.replayed_rows = layer.mismatched_rows = 0  # type: ignore[attr-defined]
        self._watch = register_optimizer_step_pre_hook(self._expect_no_step)
        return self

    def _expect_no_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuses a step of experts before the drain. Versions would not tell of all: foreach and fused ones write
        DTensors without a new version."""
        of = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        if not self._drained and any(id(weight) in of for weight in self.ep.expert_parameters()):
            raise RuntimeError("an optimizer of experts stepped inside a stage, before drain()")

    def _host_path(self, turns: foremoe.RankTurns) -> HostPath | None:
        """None where no node has copies by that path."""
        nodes = range(-(-self.ep.num_ranks // self.ep.ranks_per_node))
        if not any(turns.arena(node) for node in nodes):
            return None
        return HostPath(self.ep, turns, self._load.num_micro_steps)

    def __exit__(self, kind: object, *_: object) -> None:
        ep = self.ep
        ep.leave()
        self._watch.remove()
        complete = kind is None and self._drained and self._next == self._load.num_micro_steps
        if not complete:
            for weight, grad in self._grads:  # nothing half applied
                weight.grad = grad
            ep.failed = True  # copies may be on their way that nobody waits for
            self.guests.abandon()
            if kind is None:
                raise RuntimeError(
                    "the stage was left before its last micro-step, or without drain(): its gradients are given up"
                )
            return
        self.guests.finish()
        if self.phase == "recompute":
            self.beside.share(self.ep)
            self._expect_recorded_routes()

    @contextlib.contextmanager
    def micro_step(self, micro_step: int) -> Iterator[None]:
        """Forward and backward of this micro-step run inside: its routes are replayed, its plan executed.

        Micro-steps run in order, each once, on all ranks.
        """
        if micro_step >= self.routes.num_own and micro_step in self.micro_steps:
            raise RuntimeError(f"this rank has no batch in micro-step {micro_step}: run idle({micro_step})")
        with self._entered(micro_step):
            yield

    @contextlib.contextmanager
    def _entered(self, micro_step: int) -> Iterator[MicroStep]:
        if micro_step != self._next:
            raise RuntimeError(f"micro-step {micro_step} was entered, but {self._next} comes next")
        self.guests.expect_same_weights()
        self._next += 1
        at_homes = self.guests.agree(micro_step)
        self.beside.fallbacks += [(micro_step, layer) for layer in sorted(at_homes)]
        self._current = self._prepare(micro_step, at_homes)
        for layer, of in zip(self.ep.layers, self._current.layers, strict=True):
            layer.replay(of.recorded if of.slots is None else torch.full_like(of.recorded, -1))
        try:
            yield self._current
        finally:
            self._current = None
            for layer in self.ep.layers:
                layer.replay(None)

    def idle(self, micro_step: int) -> None:
        """Takes part in a micro-step in which this rank has no batch: it serves the rows of others."""
        if self.ep.needs_all_ranks:
            raise RuntimeError("what reduces the other gradients needs a batch of every rank in every micro-step")
        with self._entered(micro_step) as current:
            current.run_idle()

    def _prepare(self, micro_step: int, at_homes: set[int]) -> MicroStep:
        self._running.wait_for(micro_step)
        return MicroStep(self, micro_step, at_homes)

    def execute(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """One layer, forward: [tokens, hidden]; ids, which matter for rows without a route, and gates: [tokens, top_k].

        Rows without a route are dropped, or computed at homes.
        """
        if self._current is None:
            raise RuntimeError("a planned layer ran outside of micro_step()")
        return self._current.execute(index, hidden, ids, gates)

    def drain(self) -> None:
        """Brings the gradients of all guests home, and makes all gradients the mean over ranks. Collective, once."""
        if self.phase != "policy_update":
            return
        if self._drained or self._next != self._load.num_micro_steps or self.cursor.last + 1 != len(self._turns or ()):
            raise RuntimeError("drain() comes once, after the backward of the last micro-step")
        self.guests.expect_same_weights()
        self._expect_recorded_routes()
        self.guests.drain()
        self.beside.share(self.ep)
        experts = {id(weight) for weight in self.ep.expert_parameters()}
        reduced = {id(p) for p in self.ep.reduced_parameters()}
        for weight, before in self._grads:
            if id(weight) in experts or id(weight) in reduced:  # the wrapper has averaged all others
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                if id(weight) in reduced:
                    dist.all_reduce(weight.grad, group=self.ep.group)
                weight.grad /= self.ep.num_ranks
            if before is not None:
                weight.grad = before if weight.grad is None else weight.grad.add_(before)
        self._drained = True

    def _expect_recorded_routes(self) -> None:
        """Waits for the device, once a stage: no layer does."""
        for layer, differs in zip(self.ep.layers, self.differs, strict=True):
            if differs is not None and bool(differs):
                raise RuntimeError(
                    f"{layer.name}: it ran other experts than its routes say, although they were replayed; "
                    "under on_mismatch='home' its router may choose"
                )

    def figures(self) -> dict[str, Any]:
        """What the stage was worth, of this rank where ranks differ.

        rho_vanilla, rho_planned, rho_computed: busiest rank's rows ÷ mean, mean and max over layers and micro-steps:
        with experts at home; as planned; and as executed, which is at homes where layers fell back, and with the rows
        that were computed because they have no route, or another (those of other ranks from drain(), or the end of a
        recompute phase, on).
        copies: experts copied into this rank; host_copies: those of them that came by the host path. exposed_seconds:
        that it waited for them; on CUDA, that its stream did, by events, which was never run. fallbacks: layers of
        micro-steps that ran at homes, not as planned, because a rank lacked a guest; the same on all ranks. mismatch:
        share of tokens with a route whose router would have chosen other experts, or under on_mismatch="home" did.
        mismatched, under "home" alone: [micro_steps][layers], rows (tokens at one of their experts) that went home
        because their expert was not recorded; of all ranks from drain() on.
        """
        return figures_of(self)
