"""The parameters that are no experts: which ones they are, and who averages their gradients."""

from __future__ import annotations

import operator
from typing import Any

import torch

import foremoe
from foremoe._engine.alike import fact_of, refused_together, shortened
from foremoe._engine.compiled import expect_not_compiled
from foremoe._engine.sharded import is_dtensor

from .buckets import average_in_buckets
from .own_experts import refuse_optimizers_of
from .spread import SpreadExperts
from .wrappers import fsdp2_modules, hide_from_ddp, is_in_ddp, reshard, shard_by_fsdp2, show_to_ddp, watch_ddp

WRAPPERS = (None, "ddp", "fsdp2", "own")


class Dense:
    """All trained parameters of a model but its experts."""

    def __init__(self, experts: SpreadExperts) -> None:
        self._experts = experts
        self.model: Any = None  # from wrap() on
        self._averages = False  # average() does it
        self.is_sharded = experts.is_sharded  # by FSDP2, as by who shards experts

    @property
    def needs_all_ranks(self) -> bool:
        """Whether every rank needs a batch in every micro-step. Also the trainer may have made a
        DistributedDataParallel, which a rank without a batch would leave waiting."""
        return self.is_sharded or (self.model is not None and is_in_ddp(self.model))

    def wrap(self, model: torch.nn.Module, wrapper: str | None) -> torch.nn.Module:
        """As ExpertParallel.wrap(). Collective over the group."""
        experts, group = self._experts.parameters(), self._experts.ranks.group
        with refused_together(group) as given:
            given.expect_alike({"wrapper": repr(wrapper)})
            given.expect_alike({f"model[{name}]": fact_of(p) for name, p in model.named_parameters()})
            given.expect_alike({"order of the model's parameters": shortened(" ".join(dict(model.named_parameters())))})
            if wrapper not in WRAPPERS:
                raise foremoe.InputError(f"wrapper: '{wrapper}', expected None, ddp, fsdp2 or own", field="wrapper")
            expect_not_compiled(model, experts)
            is_sharded = bool(fsdp2_modules(model))
            if is_sharded and wrapper in ("ddp", "fsdp2"):
                raise foremoe.InputError(
                    f"wrapper: '{wrapper}', but FSDP2 shards the model already; expected None or own", field="wrapper"
                )
        self.model = model
        self.is_sharded = is_sharded or wrapper == "fsdp2"
        self._averages = wrapper is None
        watch_ddp()
        hide_from_ddp(model, experts)
        if wrapper == "ddp":
            return torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        if wrapper == "fsdp2":
            before = list(model.parameters())
            shard_by_fsdp2(model, experts, group)
            sharded = {id(p) for p in model.parameters()}
            refuse_optimizers_of(p for p in before if id(p) not in sharded)
        return model

    def unwrap(self) -> None:
        """Shows the experts to a DistributedDataParallel that is made from now on."""
        if self.model is not None:
            show_to_ddp(self.model, self._experts.parameters())

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained, by name; under "fsdp2" this rank's shards. Not inside of forward or backward."""
        return {name: p for name, p in self._all() if p.requires_grad}

    def _all(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Also those that are frozen."""
        if self.model is None:
            return []
        if self.is_sharded:
            reshard(self.model)
        experts = {id(weight) for weight in self._experts.parameters()}
        return [(name, p) for name, p in self.model.named_parameters() if id(p) not in experts]

    def expect_averaged(self) -> None:
        """Raises RuntimeError where nobody was asked to average these gradients."""
        if self.model is None and self._experts.ranks.num_ranks > 1:
            raise RuntimeError(
                "ep.wrap(model) was never called: nobody averages the gradients of parameters that are no experts. "
                'Call it before training, or ep.wrap(model, "own") if the trainer averages them itself'
            )

    def averaged(self) -> dict[str, str]:
        """How the parameters take part in average(), by names for messages; the same on all ranks, or they would wait
        for each other in it."""
        if not self._averages:
            return {}
        return {f"model[{name}]": _part(p) for name, p in self._whole()}

    def average(self) -> None:
        """Replaces gradients by their means over ranks, unless a wrapper or the trainer does. Collective.

        A parameter without a gradient counts as zeros.
        """
        if not self._averages:
            return
        gradients = []
        for _, p in self._whole():
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                gradients.append(p.grad)
        average_in_buckets(gradients, self._experts.ranks.rows.group)

    def _whole(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those that are no shards, whose gradients FSDP2 averages; in the same order on all ranks."""
        whole = [(name, p) for name, p in self._all() if not (self.is_sharded and is_dtensor(p))]
        return sorted(whole, key=operator.itemgetter(0))


def _part(p: torch.nn.Parameter) -> str:
    if not p.requires_grad:
        return "frozen"
    return "trained, with a sparse gradient" if p.grad is not None and p.grad.is_sparse else "trained"
