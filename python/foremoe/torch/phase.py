"""One phase of a step under its plan: its beginning, its micro-steps and its end.

A phase stores all gradients when it is entered. At its end, it restores them, with the gradients of the phase added, or
unchanged if the phase was not completed. micro_step.py runs the layers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import foremoe
from foremoe._engine.guests import Guests
from foremoe._engine.node_memory import NodeMemory
from foremoe._engine.planned_phase import PlannedPhase, slots_at_begin
from foremoe._engine.session import PHASE
from foremoe._engine.shares import SharedPlan
from foremoe._engine.together import digest_of
from foremoe._engine.votes import Votes

from .arguments import ExecutorArguments
from .dense import Dense
from .figures import PlanDeviations, figures_of
from .gradients import PhaseGradients
from .micro_step import MicroStep
from .relays import GatheredTokens
from .routes import Routes
from .spread import SpreadExperts, expect_no_hooks
from .unchanged import Unchanged

GIVEN_UP = "the gradients of this phase are given up"
_OUT_OF_ORDER = "ran out of order, or twice"


class Phase:
    """A planned phase. Enter it, run each micro-step inside micro_step(m), drain, and exit.

        with ep.plan(routes) as phase:
            for m, batch in enumerate(micro_batches):
                with phase.micro_step(m):
                    loss(model(**batch)).backward()
            phase.drain()

    Created by ExpertParallel.plan().
    """

    _unchanged: Unchanged  # once the phase has been entered

    def __init__(
        self,
        experts: SpreadExperts,
        dense: Dense,
        arguments: ExecutorArguments,
        load: foremoe.Load,
        running: SharedPlan,
        routes: Routes,
        *,
        phase: str,
        memory: NodeMemory,
        tokens: GatheredTokens | None,
    ):
        """memory: Node memory of the host path. tokens: Destinations of tokens; None if rows are dispatched by row."""
        self.routes = routes
        self.phase = phase
        self.beside = PlanDeviations(routes, experts)
        self._experts = experts
        self._dense = dense
        self._arguments = arguments
        self._load = load
        self._running = running
        self._memory = memory
        self._tokens = tokens
        self._inside = contextlib.ExitStack()
        self._planned: PlannedPhase | None = None
        self._session = experts.session
        self._left: MicroStep | None = None  # the last one, while its backward may still run
        self._next = 0  # micro-step
        self._gradients: PhaseGradients | None = None  # of a policy update
        self._drained = False

    @property
    def planned(self) -> PlannedPhase:
        if self._planned is None:
            raise RuntimeError("the phase has not been entered")
        return self._planned

    @property
    def plan(self) -> foremoe.Plan:
        """The plan. Available once the phase has been entered."""
        return self.planned.plan

    @property
    def guests(self) -> Guests:
        return self.planned.guests

    @property
    def micro_steps(self) -> range:
        """Micro-steps of all ranks. A rank with fewer batches runs idle() in the last micro-steps."""
        return range(self._load.num_micro_steps)

    def wait_for_plan(self) -> None:
        """Waits until all micro-steps are planned. micro_step() waits only for the plan of its own micro-step."""
        self._running.finish()

    def __enter__(self) -> Phase:
        if self._planned is not None:
            raise RuntimeError("a phase can be entered once")
        with contextlib.ExitStack() as inside:
            inside.enter_context(self._session.busy(PHASE))
            inside.enter_context(self._experts.executed_by(self._refuse_layer))
            self._session.watch()
            try:
                self._begin()
            except foremoe.InputError:  # all ranks raise it, before any copy
                self._session.settle()
                raise
            except BaseException as error:
                self._fail(error)
                raise
            inside.callback(self._unchanged.release)
            self._inside = inside.pop_all()
        return self

    def _refuse_layer(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        self._experts.expect_callable()
        raise RuntimeError("a planned layer ran outside of micro_step()")

    def _begin(self) -> None:
        planned = PlannedPhase(
            self._running,
            self._load,
            self._experts.ranks,
            phase=self.phase,
            expert_bytes=self._experts.expert_bytes,
            path=self._arguments.path,
            depth=self._arguments.depth,
            rows="order" if self._tokens is None else "token",
        )
        guests = digest_of(slots_at_begin(planned.plan))[:32]
        self._session.expect_call(f"entering a phase with guests {guests}")
        if self._tokens is not None:
            self._tokens.begin()
        planned.open(
            self._experts.layers, _OUT_OF_ORDER, memory=self._memory, host_timeout=self._arguments.host_timeout
        )
        self._planned = planned
        dense = self._dense.named_parameters()
        if self.phase == "policy_update":
            self._gradients = PhaseGradients(self._experts, self._dense)
        for layer in self._experts.layers:
            layer.replayed_rows = layer.mismatched_rows = 0  # type: ignore[attr-defined]
        self._unchanged = Unchanged(self._experts.parameters, dense, steps=self.phase == "recompute")

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        is_recompute = self.phase == "recompute"
        # An error after drain() does not discard gradients: all ranks have them.
        done = (error is None and self.planned.is_complete()) if is_recompute else self._drained
        with self._inside:
            if not (done and self._next == self._load.num_micro_steps):
                left = RuntimeError(f"the phase was left before its last micro-step, or without drain(): {GIVEN_UP}")
                self._fail(error or left)
                if error is None:
                    raise left
                return
            try:
                if is_recompute:
                    self.beside.share(self._experts.ranks)
                    self._expect_same_end()
                self.planned.close(complete=True)
                self._session.settle()
            except BaseException as own:
                self._fail(own)
                raise

    def _fail(self, error: BaseException) -> None:
        """Ends the phase on all ranks, and restores gradients unless they are complete."""
        try:
            self._session.fail(error, GIVEN_UP)
        finally:
            if self._gradients is not None and not self._drained:
                self._gradients.give_back()
            if self._planned is not None and self.planned.cursor.is_open:
                self._planned.close(complete=False)

    def _ending_all(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error of this rank ends the phase on all ranks. All ranks raise an error."""
        return self._session.ending_all(GIVEN_UP)

    @contextlib.contextmanager
    def micro_step(self, micro_step: int) -> Iterator[None]:
        """Inside, forward and backward of this micro-step replay its routes and execute its plan.

        Micro-steps run in order, each once, on all ranks. All ranks must also run the same forwards without gradients,
        such as those of a reference model, before or after the forward with gradients; these forwards also replay the
        routes. Under residency shared, in a recompute phase, and after the backward, their rows go to homes.

        A rank may omit the backward of a batch that does not affect the loss. A backward with zero gradients then runs
        when the next micro-step is entered, or in drain() (figure `skipped`). Under DistributedDataParallel, FSDP2 and
        reentrant checkpoints, run (0 * loss).backward().
        """
        if micro_step >= self.routes.num_own and micro_step in self.micro_steps:
            raise RuntimeError(f"this rank has no batch in micro-step {micro_step}: run idle({micro_step})")
        with self._running_micro_step(micro_step):
            yield

    def idle(self, micro_step: int) -> None:
        """Serves the rows of other ranks in a micro-step in which this rank has no batch."""
        if self._dense.needs_all_ranks:
            raise RuntimeError("DDP and FSDP2 need a batch of every rank in every micro-step: idle() cannot be used")
        with self._running_micro_step(micro_step) as current:
            current.run_idle()

    @contextlib.contextmanager
    def _running_micro_step(self, micro_step: int) -> Iterator[MicroStep]:
        if micro_step != self._next:
            raise RuntimeError(f"micro-step {micro_step} was entered, but {self._next} comes next")
        with self._ending_all():
            self._finish_micro_step()
            self._unchanged.expect()
            if self._gradients is not None:
                self._gradients.expect_accumulated()
            self._next += 1
            self._session.pass_call(f"micro_step({micro_step})")
            at_homes = self.guests.agree(micro_step)
            self.beside.fallbacks += [(micro_step, layer) for layer in sorted(at_homes)]
            current = self._prepare(micro_step, at_homes)
            with self._replaying(current):
                yield current
            self._dense.note_backward()
            self._left = current
            if self._gradients is None:  # no backward may follow
                self._finish_micro_step()

    @contextlib.contextmanager
    def _replaying(self, current: MicroStep) -> Iterator[None]:
        """Inside, layers run this micro-step."""
        for layer, of in zip(self._experts.layers, current.layers, strict=True):
            layer.replay(of.recorded if of.slots is None else torch.full_like(of.recorded, -1))
        try:
            with self._experts.executed_by(current.execute):
                yield
        finally:
            for layer in self._experts.layers:
                layer.replay(None)

    def _finish_micro_step(self) -> None:
        """Ends the last micro-step, whose backward may run until the next one is entered or drain() is called."""
        left, self._left = self._left, None
        if left is not None:
            with self._replaying(left):  # a checkpoint runs layers again
                left.finish(self._dense.needs_all_ranks)

    def _prepare(self, micro_step: int, at_homes: set[int]) -> MicroStep:
        self.planned.wait_for(micro_step)
        tokens = None if self._tokens is None else self._tokens.take(micro_step)
        return MicroStep(
            self.planned, self._experts, self.routes, self.beside, micro_step, at_homes, tokens,
            self._dense.note_forward,
        )  # fmt: skip

    def drain(self) -> None:
        """Sends the gradients of all guests home, and averages all gradients over ranks. Collective, once per phase.

        Does nothing in a recompute phase. Raises InputError on all ranks if ranks train different parameters or one has
        sparse gradients.
        """
        if self.phase == "recompute":
            return
        if self._gradients is None:
            raise RuntimeError("the phase has not been entered")
        with self._ending_all():
            self._finish_micro_step()
        if self._drained or self._next != self._load.num_micro_steps or not self.planned.is_complete():
            raise RuntimeError(
                "drain() comes once, after the backward of the last micro-step: "
                f"{self._next} of {self._load.num_micro_steps} micro-steps have run"
            )
        self._dense.expect_averaged()
        with self._ending_all():
            self._unchanged.expect()
            self._gradients.expect_accumulated()
            self._gradients.expect_trained()
            expect_no_hooks(self._experts.layers)
            self._session.expect_call("drain()")
            self._expect_same_end()
            self._gradients.finish(self.guests)
            self.beside.share(self._experts.ranks)
        self._unchanged.release()
        self._drained = True

    def _expect_same_end(self) -> None:
        """Checks a phase on all ranks. Collective. Waits for the device, once per phase; layers never wait.

        Raises:
            RuntimeError: if a layer of this rank ran other experts than its routes.
            InputError: if one of another rank did, if routes of any rank belong to other rows, or if ranks have other
                plans or would average different parameters.
        """
        ranks, plan = self._experts.ranks, self.plan
        late = [plan.slot_expert] if plan.residency == "shared" else []  # final only with the quotas
        quotas = {"quotas of the plan": digest_of(plan.slot_tokens, *late)[:8]}
        averaged = self._dense.averaged() if self.phase == "policy_update" else {}
        others = self._other_experts()
        if ranks.replicas is None:
            Votes([ranks.rows], ranks.device).expect_equal(averaged | quotas, others)
        else:
            Votes([ranks.everyone], ranks.device).expect_equal(averaged, others)
            Votes([ranks.rows], ranks.device).expect_equal(quotas)
        if refusal := self.beside.refusal(ranks):
            raise foremoe.InputError(
                f"routes: {refusal}. Give each micro-step the routes of its own rows, of this rank and of these "
                "layers; on_mismatch='replay' replays any",
                field="routes",
            )
        if float(self.beside.read) and not self._experts.has_warned and ranks.rank == 0:
            self._experts.has_warned = True
            logging.getLogger("foremoe").warning(
                "routes: the loss reads rows that have no route, to which experts added nothing (figures dropped and "
                "dropped_read): such as a prefix from the rollout's cache, or the last token of a sequence under a "
                "reward model; unrouted='home' computes them"
            )

    def _other_experts(self) -> RuntimeError | None:
        """Returns the error for the first layer of this rank that ran other experts than its routes."""
        for layer, differs in zip(self._experts.layers, self.beside.differs, strict=True):
            if differs is not None and bool(differs):
                why = "although they were replayed" if getattr(layer, "is_replayed", True) else "by token ids"
                return RuntimeError(
                    f"{layer.name}: it ran other experts than its routes say, {why}; under on_mismatch='home' its "
                    "router may choose"
                )
        return None

    def figures(self) -> dict[str, Any]:
        """Returns statistics of balance and copies. Values that differ between ranks are those of this rank.

        - rho_vanilla, rho_planned, rho_computed: busiest rank's rows ÷ mean (mean and max over layers and micro-steps)
          with experts at home; as planned; and as executed, including fallbacks and unplanned rows (no route, or
          another expert than recorded). Unplanned rows of other ranks are included after drain() or a recompute phase.
        - max_vio, avg_vio: maximum of d = load ÷ mean − 1 over a layer's experts, and the mean of its absolute
          values; means over layers and micro-steps. Plans do not change them.
        - most_rows: rows that the busiest rank computed in a layer of a micro-step, counted like rho_computed.
        - guest_weight_bytes: memory of this rank's guests; guest_gradient_bytes: the most that sums of their gradients
          occupied.
        - copies: experts copied into this rank; host_copies: those by the host path.
        - exposed_seconds: time that this rank waited for copies; on CUDA, time that its stream waited, measured by
          events.
        - fallbacks: layers of micro-steps that ran at homes because a rank lacked a guest; equal on all ranks.
        - mismatch: share of tokens with a route for which the router would have chosen other experts, or did under
          on_mismatch="home".
        - dropped: share of rows without a route, to which experts add nothing; 0 under unrouted="home". dropped_read:
          share of dropped rows that the loss reads, according to gradients (of all ranks after drain()).
        - skipped: micro-steps whose backward this rank omitted.
        - mismatched, only under "home": [micro_steps][layers], rows (tokens at one of their experts) served at home
          because their expert was not recorded; of all ranks after drain().
        """
        return figures_of(self.plan, self.guests, self.routes, self.beside, self._experts)
