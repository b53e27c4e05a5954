"""Expert parallelism for transformers ≥ 5.23 that exchanges rows according to a plan.

from_pretrained(..., distributed_config=DistributedConfig(ep_implementation="foremoe", ...)) creates one for the experts
of each layer, before it loads this rank's part of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

import foremoe

from ._engine.layers import Execute

# Keys and values are weak: an implementation refers to its experts, and the experts' forward to the implementation.
_OF: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[PlannedEP]] = weakref.WeakKeyDictionary()


class PlannedEP(AllToAllEP):
    """Executes the experts by `execute`, or by transformers' own exchange while `execute` is None.

    Raises InputError if tensor parallelism is used or if the expert-parallel group does not include all processes.
    """

    execute: Execute | None = None

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        if tp_mesh.size() > 1:
            raise foremoe.InputError(f"tp_size: {tp_mesh.size()}; expected 1 for 'foremoe'", field="tp_size")
        if ep_mesh.size() != dist.get_world_size():
            raise foremoe.InputError(
                f"ep_size: {ep_mesh.size()}; expected {dist.get_world_size()}, all processes, for 'foremoe'",
                field="ep_size",
            )
        super().__init__(experts, ep_mesh, tp_mesh)
        _OF[experts] = weakref.ref(self)

    def __call__(self, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        execute = self.execute or super().__call__
        return execute(hidden, ids, gates)


def implementation_of(experts: torch.nn.Module) -> PlannedEP | None:
    """Returns the implementation that "foremoe" created for these experts."""
    reference = _OF.get(experts)
    return reference() if reference is not None else None


EPImplementationInterface.register("foremoe", PlannedEP)
