"""The parameters that are no experts, and what averages and shards them: DistributedDataParallel, or FSDP2.

Neither sees an expert: experts are spread over the same ranks already, and their gradients come home at the drain.
FSDP2 is imported by who asks for it, since that takes a while.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

import foremoe

from .spread import SpreadExperts

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
        is_sharded = _is_sharded_by_fsdp2(model)
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
            return _wrap_in_ddp(model, experts, group)
        if wrapper == "fsdp2":
            _shard_by_fsdp2(model, experts, group)
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


def _wrap_in_ddp(model: torch.nn.Module, experts: list[torch.nn.Parameter], group: Any) -> torch.nn.Module:
    """A module that averages gradients in every backward."""
    ids = {id(weight) for weight in experts}
    ignored = [name for name, p in model.named_parameters() if id(p) in ids]
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return ddp(model, process_group=group)


def _shard_by_fsdp2(model: torch.nn.Module, experts: list[torch.nn.Parameter], group: Any) -> None:
    """Turns parameters into DTensors over the group, gathered a decoder layer at a time.

    Decoder layers are the entries of module lists that hold experts. What is in none of them is gathered with the root.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, experts[0].device.type)
    ignored = set(experts)
    for layer in _decoder_layers(model, ignored):
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)


def _decoder_layers(module: torch.nn.Module, experts: set[torch.nn.Parameter]) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList) and not experts.isdisjoint(child.parameters()):
            yield from child
        else:
            yield from _decoder_layers(child, experts)


def _is_sharded_by_fsdp2(model: torch.nn.Module) -> bool:
    """Whether fully_shard() was called on it, for which somebody must have imported it."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(model, module.FSDPModule)
