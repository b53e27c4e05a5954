"""attach(), and what it returns."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from foremoe.torch.groups import group_like

from .capacity import FIELD, Buffers, end_context, planned_slots
from .experts import GuestExperts, MoE
from .metrics import figures, named_spread
from .shadow import Shadow
from .shares import SharedPlan, Shares
from .step import Step
from .supported import expect_supported, expect_version, moe_layers

MODES = ("active", "shadow")
RESIDENCIES = ("static", "resident")
PHASES = ("recompute", "policy_update")
# Of foremoe.plan(), those that leave homes where they are and run micro-steps one after the other.
OPTIONS = {
    "prefer", "tolerance", "stages", "max_copies_per_rank", "max_copies_per_source", "min_tokens_per_guest", "seed",
}  # fmt: skip
_log = logging.getLogger("foremoe")


class Plan:
    """A phase that is being planned; Replicas.plan() makes it."""

    def __init__(
        self, load: foremoe.Load, running: foremoe.RunningPlan | SharedPlan, phase: str, buffers: Buffers
    ) -> None:
        self.load = load  # of the expert-parallel group
        self.phase = phase
        self._running = running
        self._buffers = buffers

    def begin(self) -> foremoe.Plan:
        """Waits until slots are final; the quotas of micro-step m are when wait_for(m) has returned."""
        return self._running.begin()

    def wait_for(self, micro_step: int) -> None:
        self._running.wait_for(micro_step)

    def finish(self) -> foremoe.Plan:
        """Waits until all of it is final."""
        return self._running.finish()

    def suggested_rank_capacity_factor(self) -> float:
        """The least moe_expert_rank_capacity_factor, a multiple of 0.001, with which the buffers of HybridEP and
        NCCL-EP hold all rows of the plan, in all its layers and micro-steps. Waits until all of it is final.

        Infinity where a rank that has no rows of its own in a micro-step computes those of others.
        """
        return self._buffers.factor(self.load, planned_slots(self.finish()))


def attach(
    model_chunks: Any,
    guest_slots: int = 1,
    residency: str = "resident",
    mode: str = "active",
    *,
    policy: str = "foremoe",
    depth: int = 2,
    ranks_per_node: int | None = None,
    threads: int = 1,
    **options: Any,
) -> Replicas:
    """Prepares a model of Megatron-LM for planned steps. Collective. The model stays as it is outside of step().

    model_chunks: a module, or a list of them, with or without Megatron's DistributedDataParallel; call it after that.
    guest_slots: copies of experts that a rank has room for in one layer; 0: nothing is copied, but sizes are known.
    residency: static or resident, as foremoe.plan() takes it.
    mode: active: step() executes plans. shadow: step() counts and plans what balancing would give, and changes nothing.
    policy, options: as foremoe.plan() takes them: prefer, tolerance, stages, max_copies_per_rank,
        max_copies_per_source, min_tokens_per_guest, seed.
    depth: turns (a layer of a pass) ahead of which copies start.
    ranks_per_node: of the expert-parallel group, that share a fast interconnect; None: 8, or all if fewer.
    threads: of each rank, for planning its share of the layers.

    Raises ImportError for another version of megatron-core, and InputError that names the argument, or the field of the
    configuration that cannot be served and what it must be.
    """
    expect_version()
    return Replicas(
        list(model_chunks) if isinstance(model_chunks, (list, tuple)) else [model_chunks],
        guest_slots=guest_slots,
        residency=residency,
        mode=mode,
        policy=policy,
        depth=depth,
        ranks_per_node=ranks_per_node,
        threads=threads,
        options=options,
    )


class Replicas:
    """Planned steps of a model of Megatron-LM; attach() makes it.

    plan = replicas.plan(counts)
    with replicas.step(plan):
        forward_backward_func(...)
    replicas.metrics()
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        *,
        guest_slots: int,
        residency: str,
        mode: str,
        policy: str,
        depth: int,
        ranks_per_node: int | None,
        threads: int,
        options: dict[str, Any],
    ) -> None:
        self._expect_arguments(guest_slots, residency, mode, options)
        layers = [moe_layers(chunk) for chunk in model_chunks]
        named = [found for of_chunk in layers for found in of_chunk]
        self.mode = mode
        self._chunks = list(model_chunks)
        self._layers = [layer for _, layer in named]
        self._metrics: dict[str, float] = {}
        self._running: Step | None = None
        self._failed = False
        self._detached = False
        self._shadow: Shadow | None = None
        if mode == "shadow" and not named:
            return  # a pipeline stage of dense layers: its steps run as they are
        expect_supported(model_chunks, named, mode)
        self._residency = residency
        self._guest_slots = guest_slots
        self._depth = depth
        self._planning = {"policy": policy, "threads": threads, "residency": residency, **options}
        config = self._layers[0].config
        self.buffers = Buffers.of(config)
        self.num_experts, self._top_k = int(config.num_moe_experts), int(config.moe_router_topk)
        self.group = self._layers[0].ep_group
        self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._ranks_per_node = ranks_per_node or min(8, self.num_ranks)
        self._device = next(self._layers[0].parameters()).device
        from megatron.core import parallel_state

        # Ranks whose gradients are reduced with those of this one.
        self._gradient_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for i, (name, layer) in enumerate(named):
            other = layer.config.num_moe_experts, layer.config.moe_router_topk, layer.ep_group
            if other != (self.num_experts, self._top_k, self.group):
                raise foremoe.InputError(
                    f"model_chunks: {name} has other experts, top-k or ranks than {named[0][0]}",
                    field="model_chunks",
                    index=f"[{i}]",
                )
        if self.num_ranks == 1:
            raise foremoe.InputError(
                "expert_model_parallel_size: 1; expected 2 or more, since copies go from rank to rank",
                field="expert_model_parallel_size",
            )
        if mode == "shadow":
            self._shadow = Shadow(self, [[layer for _, layer in of_chunk] for of_chunk in layers], config)
        else:
            self._prepare([name for name, _ in named])
        self._shares = Shares(self.group, {"guest_slots": guest_slots, **self._planning})

    @staticmethod
    def _expect_arguments(guest_slots: int, residency: str, mode: str, options: dict[str, Any]) -> None:
        if mode not in MODES:
            raise foremoe.InputError(f"mode: '{mode}', expected {' or '.join(MODES)}", field="mode")
        if residency not in RESIDENCIES and not (mode == "shadow" and residency == "shared"):
            raise foremoe.InputError(
                f"residency: '{residency}', expected {' or '.join(RESIDENCIES)}", field="residency"
            )
        if isinstance(guest_slots, bool) or not isinstance(guest_slots, int) or guest_slots < 0:
            raise foremoe.InputError(
                f"guest_slots: {guest_slots!r}, expected an integer from 0 on", field="guest_slots"
            )
        for name in sorted(set(options) - OPTIONS):
            raise foremoe.InputError(f"{name}: is none of {', '.join(sorted(OPTIONS))}", field=name)

    def _prepare(self, names: list[str]) -> None:
        """Guests and planned dispatchers of all layers."""
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from .dispatch import planned_dispatcher

        groups = get_default_pg_collection()
        if dist.get_process_group_ranks(groups.ep) != dist.get_process_group_ranks(self.group):
            raise foremoe.InputError(
                "model_chunks: were built with a pg_collection of their own; expected the groups of parallel_state",
                field="model_chunks",
            )
        self._moes = [MoE(layer, name) for layer, name in zip(self._layers, names, strict=True)]
        self._guests = [GuestExperts(moe, self._guest_slots, groups) for moe in self._moes if self._guest_slots]
        self._dispatchers = [planned_dispatcher(moe, i, self._guest_slots, groups) for i, moe in enumerate(self._moes)]
        config = self._layers[0].config
        if config.moe_token_dispatcher_type == "flex" and dist.get_rank() == 0:
            _log.warning(
                "moe_token_dispatcher_type 'flex' (%s) was never run on a GPU under a plan: compare losses and norms "
                "of gradients of a few steps with those of mode='shadow'",
                config.moe_flex_dispatcher_backend,
            )
        # Copies overlap with the exchange of rows.
        self._copy_group = group_like(self.group, dist.get_backend(self.group), self._device)

    def _expect_usable(self) -> None:
        if self._detached:
            raise RuntimeError("detached from the model")
        if self._failed:
            raise RuntimeError("a step failed: what it sent may still be on its way; attach anew with other groups")

    def plan(self, counts: Any, phase: str = "policy_update") -> Plan:
        """Plans a phase, in the background. Collective over the ranks whose gradients are reduced together.

        counts: integers [micro_steps, layers, experts], numpy or torch: how many of this rank's rows each expert will
            get, in each micro-step and MoE layer of this pipeline stage. All rows that the router routes count, padding
            too. All ranks have the same number of micro-steps.
        phase: policy_update, with forward and backward; recompute, forwards alone.

        Raises InputError, on all ranks, where the counts or phase of any rank cannot be.
        """
        self._expect_usable()
        if not self._layers:
            raise RuntimeError("this pipeline stage has no MoE layers: there is nothing to plan")
        refused: foremoe.InputError | None = None
        own = np.zeros((0, 0, 0), np.int64)
        try:
            if phase not in PHASES:
                raise foremoe.InputError(f"phase: '{phase}', expected {' or '.join(PHASES)}", field="phase")
            own = self._checked(counts)
        except foremoe.InputError as error:
            refused = error
        load = self.load_of(self._of_all_ranks(own, refused))
        return Plan(load, self.start_plan(load), phase, self.buffers)

    def load_of(self, counts: np.ndarray[Any, np.dtype[np.int64]]) -> foremoe.Load:
        """counts: int64 [micro_steps, layers, ranks, experts]."""
        return foremoe.Load.from_array(counts, top_k=self._top_k, ranks_per_node=self._ranks_per_node, name="counts")

    def start_plan(self, load: foremoe.Load, **more: Any) -> foremoe.RunningPlan | SharedPlan:
        """Collective over the expert-parallel group, whose ranks plan some of the layers each."""
        return self._shares.start_plan(load, **more)

    def _checked(self, counts: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        array = counts.detach().cpu().numpy() if isinstance(counts, torch.Tensor) else np.asarray(counts)
        expected = f"integers [micro_steps, {len(self._layers)}, {self.num_experts}]"
        if array.dtype.kind not in "iu" or array.ndim != 3 or array.shape[1:] != (len(self._layers), self.num_experts):
            raise foremoe.InputError(
                f"counts: is {array.dtype} {list(array.shape)}; expected {expected}", field="counts"
            )
        if not len(array):
            raise foremoe.InputError("counts: has no micro-step", field="counts")
        negative = np.argwhere(array < 0)
        if len(negative):
            place = negative[0].tolist()
            raise foremoe.InputError(
                f"counts{place}: {array[tuple(place)]} rows, expected 0 or more", field="counts", index=str(place)
            )
        return array.astype(np.int64)

    def _of_all_ranks(
        self, own: np.ndarray[Any, np.dtype[np.int64]], refused: foremoe.InputError | None
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [micro_steps, layers, ranks, experts]. Where one rank refuses its counts, all ranks end here."""
        shape = torch.tensor([len(own), -len(own), int(refused is not None)], device=self._device)
        dist.all_reduce(shape, dist.ReduceOp.MAX, group=self.group)
        most, least, any_refused = shape.tolist()
        elsewhere = self._any_replica(bool(any_refused) or most != -least)
        if refused is not None:
            raise refused
        if any_refused or (elsewhere and most == -least):
            raise foremoe.InputError("counts: another rank refused its own", field="counts")
        if most != -least:
            raise foremoe.InputError(
                f"counts: has {len(own)} micro-steps here, between {-least} and {most} on all ranks; expected as many",
                field="counts",
            )
        mine = torch.from_numpy(own).to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(parts, mine, group=self.group)
        return np.ascontiguousarray(torch.stack(parts, 2).cpu().numpy())

    @contextlib.contextmanager
    def step(self, plan: Plan | None = None) -> Iterator[None]:
        """The forwards and backwards of all micro-batches run inside.

        active: as planned. shadow: as they are; the plan may be None, since routes are counted as they come.

        Raises InputError where ranks have different plans, and RuntimeError for micro-batches that are not the plan's:
        more, fewer, in another order, or with rows for other experts. Then gradients are not to be used.
        """
        self._expect_usable()
        if self.mode == "shadow":
            with self._shadow.step() if self._shadow is not None else contextlib.nullcontext():
                yield
            return
        if not isinstance(plan, Plan):
            raise foremoe.InputError(f"plan: is {type(plan).__name__}; expected what plan() returns", field="plan")
        self._expect_same(plan)
        if self._running is not None:
            raise RuntimeError("another step is running")
        self._gather_parameters()
        self._failed = True  # until it has ended as planned
        step = self._running = Step(
            plan, self._moes, self._guests, copy_group=self._copy_group, rank=self.rank, depth=self._depth,
            device=self._device,
        )  # fmt: skip
        own = [layer.token_dispatcher for layer in self._layers]
        if self._guest_slots:
            end_context([*own, *self._dispatchers])
        for layer, dispatcher in zip(self._layers, self._dispatchers, strict=True):
            layer.token_dispatcher = dispatcher
            dispatcher.step = step
        complete = False
        try:
            yield
            complete = step.is_complete()
        except Exception as error:
            self._explain(step, error)
            raise
        finally:
            for layer, dispatcher in zip(self._layers, own, strict=True):
                layer.token_dispatcher = dispatcher
            for dispatcher in self._dispatchers:
                del dispatcher.step
            self._running = None
            step.close(complete)
            if self._guest_slots:
                end_context([*own, *self._dispatchers])
        if not complete:
            raise RuntimeError("the step was left before the last micro-step of its plan: do not use its gradients")
        self._measure(step, plan)

    def _expect_same(self, plan: Plan) -> None:
        """All ranks have this plan. Collective."""
        try:
            made = plan.begin()
        except Exception:
            self._any_replica(True)
            raise
        if (made.num_layers, made.num_experts, made.num_ranks) != (len(self._layers), self.num_experts, self.num_ranks):
            raise foremoe.InputError("plan: is for a model of another shape", field="plan")
        contiguous = np.arange(self.num_experts) * self.num_ranks // self.num_experts
        if made.residency == "free" or made.in_flight != 1 or bool((made.home != contiguous).any()):
            raise foremoe.InputError(
                f"policy: {made.policy} made a plan of residency {made.residency} whose homes may have moved: it "
                "cannot be executed here",
                field="policy",
            )
        trained = [moe.trained() for moe in self._moes]
        mixed = [moe.name for moe, of in zip(self._moes, trained, strict=True) if "mixed" in of]
        planning = sorted((name, value) for name, value in self._planning.items() if name != "threads")
        decides = [plan.load.digest, plan.phase, made.guest_slots, self._depth, planning, trained]
        digest = hashlib.sha256(repr(decides).encode())
        digest.update(np.ascontiguousarray(made.slot_expert).tobytes())
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(parts, mine, group=self.group)
        others = [rank for rank, part in enumerate(parts) if not torch.equal(part, mine)]
        config = self._layers[0].config
        given = getattr(config, FIELD, None) if config.moe_token_dispatcher_type == "flex" else None
        lacking = given is not None and self.buffers.are_too_small(plan.load, planned_slots(plan.finish()), given)
        refused = self._any_replica(bool(mixed or others or lacking))
        if mixed:
            raise foremoe.InputError(
                f"model_chunks: some experts of {mixed[0]} are frozen and others not; expected all alike",
                field="model_chunks",
            )
        if others:
            raise foremoe.InputError(
                f"plan: ranks {others} of the expert-parallel group have another one, or other arguments of attach(); "
                "expected the same of every rank",
                field="plan",
            )
        if lacking:
            raise foremoe.InputError(
                f"{FIELD}: {given}, with which rows of this plan have no room; expected "
                f"{plan.suggested_rank_capacity_factor()} or more",
                field=FIELD,
            )
        if refused:
            raise foremoe.InputError("plan: another expert-parallel group refused its own", field="plan")

    def _any_replica(self, flag: bool) -> bool:
        """Whether it is so on any rank whose gradients are reduced with those of this one. Collective over them."""
        found = torch.tensor([int(flag)], device=self._device)
        for group in (self.group, self._gradient_group):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return bool(found.item())

    def _gather_parameters(self) -> None:
        """Under overlap_param_gather a layer's weights are gathered shortly before it runs; copies start earlier."""
        for chunk in self._chunks:
            config = getattr(chunk, "ddp_config", None)
            if config is not None and config.use_distributed_optimizer and config.overlap_param_gather:
                for group in chunk.expert_parallel_bucket_groups:  # type: ignore[union-attr]
                    group.start_param_sync(force_sync=True)

    def _explain(self, step: Step, error: Exception) -> None:
        """Names the layer whose routes were not those of the plan, which may be why an exchange failed."""
        with contextlib.suppress(RuntimeError):  # the device may be what failed
            places = torch.nonzero(step.others).tolist()
            if places:
                error.add_note(_other_rows(places, self._moes))

    def _measure(self, step: Step, plan: Plan) -> None:
        """Collective."""
        own = torch.from_numpy(step.computed).to(self._device)
        of_ranks = torch.stack([own, step.others.long()])
        parts = [torch.empty_like(of_ranks) for _ in range(self.num_ranks)]
        dist.all_gather(parts, of_ranks, group=self.group)
        computed, others = torch.stack(parts, -1).cpu().unbind()
        places = torch.nonzero(others.any(-1)).tolist()
        failed = self._any_replica(bool(places))
        if places:
            raise RuntimeError(_other_rows(places, self._moes) + ": do not use its gradients")
        if failed:
            raise RuntimeError("rows in another expert-parallel group were not those of its plan: do not use gradients")
        self._failed = False
        self._metrics = {
            **figures(plan.load, plan.finish(), self.buffers),
            **named_spread("rho_computed", computed.numpy()),
            "foremoe/copies": float(step.engine.copies["peer"]),
            "foremoe/exposed_seconds": step.engine.exposed_seconds,
        }
        if self.rank == 0:
            _log.info("step: %s", ", ".join(f"{k.split('/')[1]} {v:.4g}" for k, v in self._metrics.items()))

    def metrics(self) -> dict[str, float]:
        """Of the last step that ended, or in shadow mode was evaluated; for a logger of metrics. Empty before.

        foremoe/rho_vanilla, rho_planned, rho_computed: the busiest rank's rows ÷ mean, with experts at home, as
        planned, and as computed (active mode alone): the mean over layers and micro-steps, and with `_max` the largest.
        foremoe/rank_capacity_factor_vanilla, rank_capacity_factor: the least moe_expert_rank_capacity_factor with which
        nothing is dropped, with experts at home and as planned; infinity where there is none.
        foremoe/copies: experts copied into this rank; in shadow mode, the mean of ranks. foremoe/exposed_seconds: that
        this rank waited for copies (active mode alone). foremoe/planning_seconds: that planning took.
        """
        return dict(self._shadow.metrics() if self._shadow is not None else self._metrics)

    def detach(self) -> None:
        """Ends it: the model is as it was before attach(). Not inside a step."""
        if self._detached:
            return
        if self._running is not None:
            raise RuntimeError("a step is running")
        if self._shadow is not None:
            self._shadow.close()
        elif self._layers and not self._failed:  # after a failure something may be on its way
            dist.destroy_process_group(self._copy_group)
        if self._layers:
            self._shares.close(self._failed)
        self._guests, self._dispatchers, self._moes = [], [], []
        self._detached = True


def _other_rows(places: list[list[int]], moes: Sequence[MoE]) -> str:
    micro_step, layer = places[0]
    return (
        f"the rows of {moes[layer].name} in micro-step {micro_step} were not those that counts told plan() "
        f"({len(places)} such places)"
    )
