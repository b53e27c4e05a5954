"""Replicas, the object that attach() returns: it plans steps and executes them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from foremoe._engine.arguments import expect_executable, expect_phase, plan_empty_load
from foremoe._engine.choice import cluster_of, known_choice
from foremoe._engine.failures import Channel, Failures, LostConnection
from foremoe._engine.groups import expect_backend, make_groups
from foremoe._engine.homes import HomeTable
from foremoe._engine.planned_phase import slots_at_begin
from foremoe._engine.ranks import Ranks
from foremoe._engine.session import STEP, UNUSABLE, Session
from foremoe._engine.shares import Shares
from foremoe._engine.together import Given, digest_of
from foremoe._engine.votes import Votes
from foremoe._errors import refuse
from foremoe._variable import HOME, REFUSE
from foremoe.options import AnyHomes

from .arguments import AttachArguments, expect_chunks
from .capacity import FIELD, Buffers, end_context, planned_slots
from .counts import checked_counts, gathered_counts
from .ending import end, explain
from .experts import GuestExperts, MoE, gather_parameters
from .metrics import figures
from .permuted import Renumbering
from .plan import EmptyPlan, PipelineStage, Plan
from .seconds import cost_options, shape_of
from .shadow import Shadow
from .step import Step
from .supported import expect_equal, expect_lendable, expect_supported, facts_of, moe_layers

_log = logging.getLogger("foremoe")


class Replicas:
    """Planned steps of a Megatron-LM model.

        plan = replicas.plan(counts)
        with replicas.step(plan):
            forward_backward_func(...)
        replicas.metrics()

    Created by attach().
    """

    def __init__(
        self, model_chunks: Sequence[torch.nn.Module], arguments: AttachArguments, homes: AnyHomes = None
    ) -> None:
        """arguments: Result of AttachArguments.executed(). homes: See attach()."""
        expect_chunks(model_chunks)
        from megatron.core import parallel_state

        layers = [moe_layers(chunk) for chunk in model_chunks]
        named = [found for of_chunk in layers for found in of_chunk]
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.mode = arguments.mode
        self._arguments = arguments
        expect_supported(model_chunks, named, self.mode, stages)
        self._numbers = Renumbering([layer for _, layer in named], [name for name, _ in named], homes)
        self._chunks = list(model_chunks)
        self._of_chunks = [[layer for _, layer in of_chunk] for of_chunk in layers]
        self._layers = [layer for _, layer in named]
        self._device = next(p for chunk in model_chunks for p in chunk.parameters()).device
        self._metrics: dict[str, float] = {}
        self._shadow: Shadow | None = None
        self._moes: list[MoE] = []
        self._guests: list[GuestExperts] = []
        self._dispatchers: list[Any] = []
        self._guest_slots = 0
        if not named:
            return
        expect_equal(named)
        config, group = self._layers[0].config, self._layers[0].ep_group
        num_experts = int(config.num_moe_experts)
        table = HomeTable.contiguous(len(named), num_experts, dist.get_world_size(group))
        # Number of forwards that have run on this pipeline stage when its first backward begins.
        in_flight = int(stages - parallel_state.get_pipeline_model_parallel_rank())
        self._stage = PipelineStage(
            arguments=arguments,
            ranks=Ranks.of(group, table, arguments.ranks_per_node, self._device),
            num_layers=len(named),
            num_experts=num_experts,
            top_k=int(config.moe_router_topk),
            in_flight=in_flight,
            buffers=Buffers.of(config),
        )
        nothing = self._stage.nothing()
        plan = plan_empty_load(nothing, arguments, table, in_flight=in_flight, executes=self.mode == "active")
        self._guest_slots, self._residency = plan.guest_slots, plan.residency  # some policies choose their own
        self._choice = known_choice(
            arguments, [shape_of(config, len(named))], plan, nothing, cluster=cluster_of(self._device),
            rank=self._ranks.rank, executes=self.mode == "active", **cost_options(config, arguments.depth),
        )  # fmt: skip
        if self.mode == "active":
            expect_backend(self._ranks.group, self._device, "model_chunks")
            self._prepare([name for name, _ in named])

    @property
    def layers(self) -> list[Any]:
        """The planned MoE layers of this pipeline stage."""
        return list(self._layers)

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 on a pipeline stage without MoE layers."""
        return self._stage.num_experts if self._layers else 0

    @property
    def is_flex(self) -> bool:
        """Whether the planned layers dispatch by `flex`."""
        return bool(self._layers) and self._layers[0].config.moe_token_dispatcher_type == "flex"

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank that trains the model. Collective over these ranks."""
        return self._session.any(flag)

    @property
    def _ranks(self) -> Ranks:
        return self._stage.ranks

    def check_agreement(self, given: Given) -> None:
        """Registers the facts that must be equal on all ranks of this pipeline stage."""
        from megatron.core import parallel_state

        if self._layers:
            given.expect_same_group(dist.get_process_group_ranks(self._ranks.group))
        facts = facts_of(self._chunks, weights=self.mode == "active") | {"homes": self._numbers.digest}
        facts["detected cluster"] = str(cluster_of(self._device))
        given.expect_equal(facts, f"pipeline stage {parallel_state.get_pipeline_model_parallel_rank()}")

    def make_groups(self) -> None:
        """Creates process groups and the objects that use them. Collective over the default group. Call once, first."""
        from megatron.core import parallel_state

        # Votes use separate groups, since a failed rank votes without waiting for others. Groups of replicas and of
        # pipeline and tensor parallel ranks reach all ranks with fewer connections than one global group needs.
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        stages = parallel_state.get_model_parallel_group()
        wanted = [(group, "gloo") for group in (replicas, stages) if dist.get_world_size(group) > 1]
        agree = len(wanted)
        if self._layers:
            group = self._ranks.group
            wanted.append((group, "gloo"))
            # A separate group lets copies overlap with the exchange of rows.
            wanted.append((group, "gloo" if self.mode == "shadow" else group._get_backend(self._device).name()))
        made, name = make_groups(wanted, self._device)
        own = [Channel(group, is_own=True) for group in made]
        active = self.mode == "active" and bool(self._layers)
        # A failure closes none of these: the other ranks learn of it in the next vote.
        channels = [Channel(self._ranks.group), Channel(made[-1])] if active else []
        every = list(range(dist.get_world_size()))
        failures = Failures(name, every, dist.get_rank(), channels, self._device)
        planning = self._arguments.planning()
        channel, choice = (own[agree], self._choice if active else None) if self._layers else (None, None)
        shares = Shares(channel, planning, choice, failures.expect_none)
        if active:
            self._stage = dataclasses.replace(self._stage, ranks=dataclasses.replace(self._ranks, copies=channels[1]))
        self._session = Session(shares, failures, own, votes=Votes(own[:agree]))
        if self._layers and self.mode == "shadow":
            self._shadow = Shadow(self._stage, self._of_chunks, self._choice, made[-1])

    def _prepare(self, names: list[str]) -> None:
        """Creates the guests and planned dispatchers of all layers."""
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from .dispatch import planned_dispatcher

        groups = get_default_pg_collection()
        if dist.get_process_group_ranks(groups.ep) != dist.get_process_group_ranks(self._ranks.group):
            raise foremoe.InputError(
                "model_chunks: were built with a pg_collection of their own; expected the groups of parallel_state",
                field="model_chunks",
            )
        config = self._layers[0].config
        self._expect_mismatch_handled(self._arguments.on_mismatch)
        self._moes = [MoE(layer, name) for layer, name in zip(self._layers, names, strict=True)]
        if self._residency == "shared":
            expect_lendable(self._chunks, self._moes)
        self._guests = [GuestExperts(moe, self._guest_slots, groups) for moe in self._moes if self._guest_slots]
        if self._residency == "shared":
            tried = set()
            for guests in self._guests:
                if guests.kind not in tried:
                    guests.try_lending()
                tried.add(guests.kind)
        self._dispatchers = [planned_dispatcher(moe, i, self._guest_slots, groups) for i, moe in enumerate(self._moes)]
        if config.moe_token_dispatcher_type == "flex" and dist.get_rank() == 0:
            _log.warning(
                "moe_token_dispatcher_type 'flex' (%s) was never run on a GPU under a plan: compare losses and norms "
                "of gradients of a few steps with those of mode='shadow'",
                config.moe_flex_dispatcher_backend,
            )

    def _expect_mismatch_handled(self, on_mismatch: str) -> None:
        """Raises InputError unless the layers' dispatcher can handle rows that the plan does not have."""
        if on_mismatch not in (REFUSE, HOME):
            refuse("on_mismatch", f"{on_mismatch!r}; expected {REFUSE!r} or {HOME!r}")
        if on_mismatch == HOME and self.is_flex:
            refuse("on_mismatch", "'home' needs moe_token_dispatcher_type alltoall or allgather, not flex")

    def plan(
        self,
        counts: Any,
        phase: str = "policy_update",
        begun: Plan | None = None,
    ) -> Plan:
        """Plans a phase in the background. Collective over all ranks that train the model.

        Args:
            counts: Integers [micro_steps, layers, experts], numpy or torch: this rank's rows for each expert, in each
                micro-step and MoE layer of this pipeline stage, without layers for multi-token prediction. If homes
                were given to attach(), experts have their numbers before permute_experts(). Include all rows that the
                router routes, even padding.
                All ranks have the same number of micro-steps; in a pipeline stage without MoE layers, layers is 0.
                May also be a function without arguments that returns such counts. If computing the counts may fail on
                a single rank, do it in this function: plan() raises its error, and no other rank waits.
            phase: policy_update (forward and backward) or recompute (forward only).
            begun: The result of an earlier call, on all ranks or on none. plan() returns it again if it was created
                for this phase and, on all ranks, for these counts.

        Raises:
            InputError: on all ranks if a rank's arguments are invalid, or if ranks differ in phase, number of
                micro-steps or whether `begun` is given. A rank whose function raised an error raises that error.
        """
        self._session.expect_idle("plan()")
        refused: Exception | None = None
        own = np.zeros((0, 0, 0), np.int64)
        is_other = False
        try:
            expect_phase(phase)
            made = counts() if callable(counts) else counts
            own = checked_counts(made, len(self._layers), self.num_experts)
            own = self._numbers.counts(own)
            if begun is not None and self._layers:
                is_other = phase != begun.phase or not np.array_equal(own, begun.load.array[:, :, self._ranks.rank])
        except Exception as error:
            refused = error
        given = "not given" if begun is None else "given"
        alike = {"phase": phase, "begun": given, "counts": f"{len(own)} micro-steps"}
        self._session.agree(alike, refused)
        if begun is not None and not self._session.any(is_other):
            return begun
        if not self._layers:
            return EmptyPlan()
        counts_of_all = gathered_counts(torch.from_numpy(own).to(self._device), self._ranks.group)
        return self._stage.start(counts_of_all, self._session.shares, phase)

    def renumbered(self, routes: torch.Tensor) -> torch.Tensor:
        """Returns routes for Megatron-LM's router replay, with experts numbered as permute_experts() did.

        routes: Integers [..., layers, top_k] with the numbers before, of this pipeline stage's MoE layers; negative
        entries stay. Without homes, attach() changes no numbers.
        """
        return self._numbers.routes(routes)

    @contextlib.contextmanager
    def step(self, plan: Plan | None = None, on_mismatch: str | None = None) -> Iterator[None]:
        """Executes a plan. Run all forwards and backwards of its step inside. Collective over all training ranks.

        on_mismatch: As for attach(), for this step; equal on all ranks. None: that of attach().

        In shadow mode execution is unchanged; plan may be None, since shadow mode counts the step's own routes.

        Raises InputError if ranks have different plans, and RuntimeError if micro-batches deviate from the plan: in
        number, in order or in the experts of their rows. Do not use the gradients after such an error. An error inside
        ends the step at once on this rank, and on every other rank after its micro-batches.
        """
        self._session.expect_idle("step()")
        if self.mode == "shadow":
            with (
                self._session.busy(STEP),
                self._shadow.step() if self._shadow is not None else contextlib.nullcontext(),
            ):
                yield
            return
        arguments = dataclasses.replace(self._arguments, on_mismatch=on_mismatch or self._arguments.on_mismatch)
        self._expect_same(plan, arguments.on_mismatch)
        step: Step | None = None
        with self._session.busy(STEP):
            self._session.watch()
            try:
                if plan is not None and self._layers:
                    gather_parameters(self._chunks)
                    step = Step(plan, self._moes, self._guests, self._ranks, arguments)
                with self._dispatching(step):
                    yield
                wrong = end(step, self._session)
                self._session.settle()
            except BaseException as error:
                try:
                    self._session.fail(error, UNUSABLE)
                finally:
                    if step is not None:
                        explain(step, error)
                        step.close(False)
                raise
        if wrong:
            refusal = RuntimeError(f"{wrong}; {UNUSABLE}")
            self._session.fail(refusal, UNUSABLE)
            raise refusal
        if step is not None and plan is not None:
            self._metrics = figures(plan.load, plan.finish(), self._stage.buffers) | step.metrics()
            if self._ranks.rank == 0:
                _log.info("step: %s", ", ".join(f"{k.split('/')[1]} {v:.4g}" for k, v in self._metrics.items()))

    @contextlib.contextmanager
    def _dispatching(self, step: Step | None) -> Iterator[None]:
        """Installs the planned dispatchers in the layers, and restores Megatron's dispatchers on exit."""
        own = [layer.token_dispatcher for layer in self._layers]
        if self._guest_slots:
            end_context([*own, *self._dispatchers])
        for layer, dispatcher in zip(self._layers, self._dispatchers, strict=True):
            layer.token_dispatcher = dispatcher
            dispatcher.step = step
        try:
            yield
        finally:
            for layer, dispatcher in zip(self._layers, own, strict=True):
                layer.token_dispatcher = dispatcher
            for dispatcher in self._dispatchers:
                dispatcher.forget()
            if self._guest_slots:
                end_context([*own, *self._dispatchers])

    def _expect_same(self, plan: Plan | None, on_mismatch: str) -> None:
        """Raises InputError, on all ranks, if any rank's plan is not executable or differs in its group. Collective."""
        refused: Exception | None = None
        alike: dict[str, str] = {}
        try:
            self._expect_mismatch_handled(on_mismatch)
            if not isinstance(plan, Plan) or isinstance(plan, EmptyPlan) == bool(self._layers):
                raise foremoe.InputError(f"plan: is {type(plan).__name__}; expected what plan() returns", field="plan")
            if self._layers:
                made = self._executable(plan)
                digest = digest_of(plan.load.digest, plan.phase, made.guest_slots, slots_at_begin(made))
                alike = {"plan": digest, "on_mismatch": on_mismatch}
        except LostConnection as error:  # while the plan was made
            self._session.fail(error, UNUSABLE)
            raise
        except Exception as error:
            refused = error
        self._session.agree({}, refused)
        if self._layers:
            alike["trained experts"] = digest_of([moe.trained() for moe in self._moes])
            try:
                Votes([Channel(self._ranks.group)], self._device).expect_equal(alike)
            except foremoe.InputError as error:
                refused = error
        self._session.agree({}, refused)  # ranks of other groups refuse too

    def _executable(self, plan: Plan) -> foremoe.Plan:
        """Waits until the plan may begin. Raises InputError if this rank cannot execute it."""
        made = plan.running.begin()
        shape = made.num_layers, made.num_experts, made.num_ranks, made.guest_slots, made.residency
        # Guests under static and resident are alike; those under shared are prepared.
        is_chosen = self._arguments.residency == "auto" and made.residency != "shared"
        residency = made.residency if is_chosen else self._residency
        own = len(self._layers), self._stage.num_experts, self._ranks.num_ranks, self._guest_slots, residency
        if shape != own:
            what = "layers, experts, ranks, guest slots and residency"
            raise foremoe.InputError(f"plan: has {shape} {what}; not {own}", field="plan")
        expect_executable(made, self._ranks.table, plan.in_flight)
        for moe in self._moes:
            if "mixed" in moe.trained():
                raise foremoe.InputError(
                    f"model_chunks: some experts of {moe.name} are frozen and others not; expected all alike",
                    field="model_chunks",
                )
        config = self._layers[0].config
        given = getattr(config, FIELD, None) if config.moe_token_dispatcher_type == "flex" else None
        if given is not None and self._stage.buffers.are_too_small(plan.load, planned_slots(plan.finish()), given):
            raise foremoe.InputError(
                f"{FIELD}: {given}, but this plan has rows without room then; expected "
                f"{plan.suggested_rank_capacity_factor()} or more",
                field=FIELD,
            )
        return made

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the last step that ended, or that shadow mode has evaluated. Empty before the first.

        foremoe/rho_vanilla, rho_planned, rho_computed: ρ (busiest rank's rows ÷ mean) with experts at home, as planned,
        and as computed (active mode only). Mean over layers and micro-steps; with suffix `_max`, the maximum.
        foremoe/max_vio, avg_vio: Maximum of d = load ÷ mean − 1 over a layer's experts, and the mean of its
        absolute values. Mean over layers and micro-steps. Plans do not change them.
        foremoe/rank_capacity_factor_vanilla, rank_capacity_factor: The smallest moe_expert_rank_capacity_factor that
        drops no rows, with experts at home and as planned; infinity if no factor suffices.
        foremoe/copies: Experts copied into this rank; in shadow mode, the mean over ranks. foremoe/exposed_seconds:
        Time that this rank waited for copies (active mode only); on CUDA, time that its stream waited, from events that
        are read after the step (untested on CUDA). foremoe/planning_seconds: Wall time of planning.
        foremoe/modelled_seconds_vanilla, modelled_seconds: Forward and backward of this pipeline stage's attention and
        MoE layers on the modelled cluster, with experts at home and as planned (shadow mode only).
        """
        return dict(self._shadow.metrics() if self._shadow is not None else self._metrics)

    def wait(self) -> None:
        """Waits until shadow mode has evaluated all steps: no exchange of this rank is left in the background."""
        if self._shadow is not None:
            self._shadow.wait()

    def detach(self) -> None:
        """Restores the model to its state before attach(). Raises RuntimeError inside a step."""
        if self._session.is_closed:
            return
        self._session.expect_ended()
        if self._shadow is not None:
            self._shadow.close()
        self._session.close()
        self._guests, self._dispatchers, self._moes = [], [], []
