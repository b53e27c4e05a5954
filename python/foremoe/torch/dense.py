"""The parameters that are not experts, and the averaging of their gradients."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe._engine.compiled import expect_not_compiled
from foremoe._engine.sharded import is_dtensor
from foremoe._engine.together import Given, fact_of, refused_together, shortened

from .buckets import average_in_buckets
from .own_experts import refuse_optimizers_of
from .samples import digests_of, number_of_samples, samples_of
from .spread import HomePass, SpreadExperts
from .wrappers import (
    active_ddp,
    forget_ddp,
    fsdp2_modules,
    hide_from_ddp,
    is_in_ddp,
    is_in_no_sync,
    reshard,
    shard_by_fsdp2,
    show_to_ddp,
    watch_ddp,
)

WRAPPERS = (None, "ddp", "fsdp2", "own")
_NEVER = (
    "ep.wrap(model) was never called: nobody averages the gradients of parameters that are no experts. Call it before "
    'training, or ep.wrap(model, "own") if the trainer averages them itself'
)
_OUTSIDE = (
    "a backward outside of a phase: ep.wrap(model) averages gradients in drain() alone, so nothing would average those "
    'of parameters that are no experts. Call ep.wrap(model, "ddp") or "fsdp2", or "own" if the trainer averages them; '
    "or run an auxiliary loss inside of the phase, in ep.unplanned()"
)
_NO_SYNC = (
    "the last micro-step ran inside no_sync() of DistributedDataParallel, or after set_requires_gradient_sync(False) "
    "of FSDP2, which then averages no gradients of this phase; run the last micro-step with gradient synchronization, "
    "and accumulate inside one phase"
)
_AT_FIRST = (
    "Load or initialize the same weights on all ranks, or broadcast those of rank 0; if other code shards a parameter, "
    "name it in ep.wrap(model, sharded=[...])"
)
_DRIFT = (
    "Ranks have trained apart. Likely causes: torch.nn.utils.clip_grad_norm_() or accelerate's, whose norm has this "
    "rank's experts alone (call ep.clip_grad_norm_(), under transformers' Trainer in on_pre_optimizer_step with "
    "max_grad_norm=0); a GradScaler that skipped a step on one rank (use "
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler); another module was trained than the one that "
    f"wrap() or the trainer returned; or the weights differed from the start. {_AT_FIRST}"
)


class Dense:
    """All trained parameters of a model except its experts."""

    def __init__(self, experts: SpreadExperts) -> None:
        self._experts = experts
        self.model: Any = None  # from wrap() on
        self._wrapper: str | None = "own"
        self._wrapped: Any = None  # what wrap() returned
        self.sharded: set[str] = set()  # names of parameters that other code shards
        self._compared: dict[str, torch.nn.Parameter] = {}  # must be the same on all ranks
        self._beside: dict[str, torch.nn.Parameter] = {}  # those of _compared that only the experts' optimizer holds
        self._averaged_by_drain: list[torch.nn.Parameter] = []
        self._ddp: Any = None  # DistributedDataParallel in which the last layer ran
        self._in_no_sync = False  # whether the last layer ran in no_sync()
        self._has_drained = False
        self.drains = False  # a phase has begun whose drain() will average gradients
        self.is_sharded = experts.is_sharded  # whether FSDP2 shards these parameters or the experts
        experts.begin_home_pass = self._begin_home_pass

    @property
    def needs_all_ranks(self) -> bool:
        """Whether FSDP2 or any DistributedDataParallel, also a trainer's, needs a batch per rank and micro-step."""
        return self.is_sharded or (self.model is not None and is_in_ddp(self.model))

    def wrap(self, model: torch.nn.Module, wrapper: str | None, sharded: Iterable[str]) -> torch.nn.Module:
        """See ExpertParallel.wrap(). Collective over all replicas."""
        experts, group = self._experts.parameters(), self._experts.ranks.trainers
        with refused_together(group) as given:
            given.expect_equal({"wrapper": repr(wrapper)})
            given.expect_equal({f"model[{name}]": fact_of(p) for name, p in model.named_parameters()})
            given.expect_equal({"order of the model's parameters": shortened(" ".join(dict(model.named_parameters())))})
            if wrapper not in WRAPPERS:
                raise foremoe.InputError(f"wrapper: '{wrapper}', expected None, ddp, fsdp2 or own", field="wrapper")
            expect_not_compiled(model, experts)
            self._expect_whole_model(model)
            named = self._sharded_names(model, sharded)
            is_sharded = bool(fsdp2_modules(model))
            self._expect_wrappable(model, wrapper, named, is_sharded)
            if wrapper in (None, "fsdp2"):  # DistributedDataParallel broadcasts from rank 0 instead
                given.expect_equal(digests_of(_unsharded(self._dense_of(model), named)), hint=_AT_FIRST)
        self.model, self.sharded = model, named
        self.is_sharded = is_sharded or wrapper == "fsdp2"
        self._wrapper, self._wrapped = wrapper, model
        self._averaged_by_drain = [p for _, p in self._whole()] if wrapper is None else []
        self._compared = _unsharded(self._all(), named)
        watch_ddp()
        hide_from_ddp(model, experts)
        if wrapper == "ddp":
            self._wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        if wrapper == "fsdp2":
            before = list(model.parameters())
            shard_by_fsdp2(model, experts, self._experts.ranks)
            after = {id(p) for p in model.parameters()}
            refuse_optimizers_of(p for p in before if id(p) not in after)
            self._compared = {}
        return self._wrapped  # type: ignore[no-any-return]

    def _expect_wrappable(
        self, model: torch.nn.Module, wrapper: str | None, sharded: set[str], is_sharded: bool
    ) -> None:
        """Raises InputError for a wrapper that would average gradients of different parameters or parts.

        sharded: Names of parameters that differ between ranks. is_sharded: Whether FSDP2 shards the model.
        """
        if sharded and wrapper in ("ddp", "fsdp2"):
            raise foremoe.InputError(
                f"sharded: wrapper '{wrapper}' would give all ranks the same {min(sharded)}; expected None or own",
                field="sharded",
            )
        if is_sharded and wrapper in ("ddp", "fsdp2"):
            raise foremoe.InputError(
                f"wrapper: '{wrapper}', but FSDP2 shards the model already; expected None or own", field="wrapper"
            )
        parts = [name for name, p in self._dense_of(model) if is_dtensor(p) and name not in sharded]
        if parts and not is_sharded and wrapper != "own":
            raise foremoe.InputError(
                f"model: {parts[0]} is a DTensor that FSDP2 does not gather, as under tensor parallelism, so "
                'gradients are of different parts; expected tensors, or wrapper "own" if the trainer averages them',
                field="model",
            )

    def _expect_whole_model(self, model: torch.nn.Module) -> None:
        """Raises InputError if this model lacks trained parameters of the model with the spread layers."""
        known = getattr(self._experts.layers[0], "model", None)
        held = {id(p) for p in model.parameters()}
        for name, p in known.named_parameters() if known is not None else ():
            if p.requires_grad and id(p) not in held:
                raise foremoe.InputError(
                    f"model: it is a part of the model whose experts are spread, and lacks {name}, whose gradient "
                    "would not be averaged; expected the whole model",
                    field="model",
                )

    @staticmethod
    def _sharded_names(model: torch.nn.Module, patterns: Iterable[str]) -> set[str]:
        names = list(dict(model.named_parameters()))
        found: set[str] = set()
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise foremoe.InputError(f"sharded: '{pattern}' is the name of no parameter", field="sharded")
            found.update(matching)
        return found

    def unwrap(self) -> None:
        """Stops hiding the experts from DistributedDataParallel, and forgets earlier wrappers."""
        if self.model is not None:
            show_to_ddp(self.model, self._experts.parameters())
            forget_ddp(self.model)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns trained parameters by name; under "fsdp2" this rank's shards. Invalid in forward and backward."""
        return {name: p for name, p in self._all() if p.requires_grad}

    def _all(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns trained and frozen parameters."""
        if self.model is None:
            return []
        reshard(self.model)
        return self._dense_of(self.model)

    def _dense_of(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        experts = {id(weight) for weight in self._experts.parameters()}
        return [(name, p) for name, p in model.named_parameters() if id(p) not in experts]

    def trained_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Records an optimizer that trains experts. Its other parameters must also be equal on all ranks."""
        known = {id(p) for p in self.model.parameters()} if self.model is not None else set()
        known |= {id(p) for p in self._experts.parameters()}
        held = [p for of in optimizer.param_groups for p in of["params"]]
        others = [(f"optimizer's parameter {i}", p) for i, p in enumerate(held) if id(p) not in known]
        self._beside = {} if self.model is None else _unsharded(others, set())

    def add_facts(self, given: Given) -> None:
        """Requires some elements of each parameter to be equal on all ranks. Waits for the device."""
        self._compared = _unsharded(self._all(), self.sharded) | self._beside
        given.expect_equal(samples_of(self._compared), hint=_DRIFT if self._has_drained else _AT_FIRST)

    def note_forward(self) -> None:
        """Called in each forward of a layer. Ignores recomputations, which run outside of the wrapper."""
        ddp = active_ddp()
        if torch._C._current_graph_task_id() < 0 and (ddp is not None or torch.is_grad_enabled()):
            self._ddp = ddp
            syncs = self._wrapper is None or ddp is None or ddp.require_backward_grad_sync  # None: drain() averages
            self._in_no_sync = not syncs

    def note_backward(self) -> None:
        """Called after a micro-step."""
        self._in_no_sync |= self.model is not None and is_in_no_sync(self.model)

    def expect_averaged(self) -> None:
        """Raises RuntimeError if nothing has averaged, or will average, gradients of the last micro-step."""
        if problem := self._never_averaged() or (_NO_SYNC if self._in_no_sync else ""):
            raise RuntimeError(problem)
        self._has_drained = True

    def _never_averaged(self) -> str:
        """Returns why nothing averages the gradients of the last forward; "" if something does."""
        ranks, ddp = self._experts.ranks, self._ddp
        if ranks.num_trainers == 1:
            return ""
        if self.model is None:
            return _NEVER
        if self._wrapper == "ddp" and ddp is not self._wrapped:
            return (
                'the module that ep.wrap(model, "ddp") returned did not run, so nothing averaged gradients of '
                "parameters that are no experts; train the one that it returned"
            )
        if ddp is None:
            return ""
        trainers = sorted(rank for group in ranks.grid for rank in group)
        of_ddp = dist.get_process_group_ranks(ddp.process_group)
        if not set(trainers) <= set(of_ddp):
            return (
                f"DistributedDataParallel averages over ranks {of_ddp}, but the experts of this model are trained by "
                f"ranks {trainers}; expected a process_group of all of these"
            )
        return ""

    def _begin_home_pass(self, layer: int) -> HomePass:
        """Begins a forward at homes. Outside of a phase, gradients of experts become means over all ranks, and the
        first layer's exchange of counts also compares all other weights between ranks."""
        self.note_forward()
        word = torch.zeros((), dtype=torch.int64, device=self._experts.ranks.device)
        if layer == 0 and torch.is_grad_enabled() and not self.drains and torch._C._current_graph_task_id() < 0:
            word = number_of_samples(self._compared, word)
        problem = self._never_averaged()
        if not problem and self._ddp is None and any(p.requires_grad for p in self._averaged_by_drain):
            problem = _OUTSIDE if self._experts.ranks.num_trainers > 1 else ""

        def expect_averaged() -> None:
            if problem and not self.drains:
                raise RuntimeError(problem)

        def mean(gradient: Tensor) -> Tensor:
            if self.drains:
                return gradient
            ranks = self._experts.ranks
            gradient = gradient / ranks.num_trainers  # not in place: it may also be another weight's
            if ranks.replicas is not None:
                dist.all_reduce(gradient, group=ranks.replicas.group)
            return gradient

        return HomePass(word, self._refuse_drift, expect_averaged, mean)

    def _refuse_drift(self) -> None:
        """Raises InputError with the first weight that differs. Collective."""
        with refused_together(self._experts.ranks.group) as given:
            given.expect_equal(samples_of(self._compared), hint=_DRIFT)

    def averaged(self) -> dict[str, str]:
        """Returns the role of each parameter in average(), by name. Ranks with different values would wait for each
        other in average()."""
        if self._wrapper is not None:
            return {}
        return {f"model[{name}]": _part(p) for name, p in self._whole()}

    def average(self) -> None:
        """Replaces gradients by their means over ranks, unless a wrapper or the trainer averages them. Collective.

        A missing gradient counts as zeros. If it is missing on all ranks, it stays missing.
        """
        if self._wrapper is not None:
            return
        trained = [p for _, p in self._whole() if p.requires_grad]
        if not trained:
            return
        has = torch.tensor([p.grad is not None for p in trained], dtype=trained[0].dtype, device=trained[0].device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        average_in_buckets([has, *gradients], self._experts.ranks.everyone.group)
        for p, gradient, on_any in zip(trained, gradients, has.tolist(), strict=True):
            p.grad = gradient if on_any else None

    def _whole(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns the parameters that neither FSDP2 nor other code shards, in the same order on all ranks."""
        whole = [(name, p) for name, p in self._all() if not (self.is_sharded and is_dtensor(p))]
        return sorted(((name, p) for name, p in whole if name not in self.sharded), key=operator.itemgetter(0))


def _unsharded(named: Iterable[tuple[str, torch.nn.Parameter]], sharded: set[str]) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that must be equal on all ranks, by name. sharded: Names of the others."""
    return {f"weights[{name}]": p for name, p in named if name not in sharded and not is_dtensor(p)}


def _part(p: torch.nn.Parameter) -> str:
    if not p.requires_grad:
        return "frozen"
    return "trained, with a sparse gradient" if p.grad is not None and p.grad.is_sparse else "trained"
