"""The parameters that are no experts: which ones they are, and who averages their gradients."""

from __future__ import annotations

from typing import Any

import torch

import foremoe

from .spread import SpreadExperts
from .wrappers import is_sharded_by_fsdp2, shard_by_fsdp2, wrap_in_ddp

WRAPPERS = (None, "ddp", "fsdp2")


class Dense:
    """All trained parameters of a model but its experts."""

    def __init__(self, experts: SpreadExperts) -> None:
        self.needs_all_ranks = experts.is_sharded  # in every micro-step
        self._experts = experts
        self._model: Any = None  # from wrap() on
        self._averages = False  # drain() does it
        self._fsdp2 = experts.is_sharded  # who shards experts shards the other weights by FSDP2

    def wrap(self, model: torch.nn.Module, wrapper: str | None) -> torch.nn.Module:
        """As ExpertParallel.wrap()."""
        if wrapper not in WRAPPERS:
            raise foremoe.InputError(f"wrapper: '{wrapper}', expected None, ddp or fsdp2", field="wrapper")
        is_sharded = is_sharded_by_fsdp2(model)
        if is_sharded and wrapper is not None:
            raise foremoe.InputError(
                f"wrapper: '{wrapper}', but FSDP2 shards the model already; expected None", field="wrapper"
            )
        self._model = model
        self._fsdp2 = is_sharded or wrapper == "fsdp2"
        self.needs_all_ranks = is_sharded or wrapper is not None
        self._averages = not self.needs_all_ranks
        experts, group = self._experts.parameters(), self._experts.ranks.group
        if wrapper == "ddp":
            return wrap_in_ddp(model, experts, group)
        if wrapper == "fsdp2":
            shard_by_fsdp2(model, experts, group)
        return model

    def parameters(self) -> list[torch.nn.Parameter]:
        """Under FSDP2 this rank's shards. Call it outside of forward and backward."""
        if self._model is None:
            return []
        if self._fsdp2:
            self._model.reshard()  # a forward without a backward leaves whole parameters at the root
        experts = {id(weight) for weight in self._experts.parameters()}
        return [p for p in self._model.parameters() if id(p) not in experts and p.requires_grad]

    def reduced(self) -> list[torch.nn.Parameter]:
        """Those whose gradients drain() averages."""
        return self.parameters() if self._averages else []
