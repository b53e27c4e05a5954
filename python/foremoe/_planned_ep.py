"""Expert parallelism for transformers ≥ 5.23 that exchanges rows according to a plan.

from_pretrained(..., distributed_config=DistributedConfig(ep_implementation="foremoe", ...)) creates one for the experts
of each layer, before it loads this rank's part of them. implementation_of() creates one for experts that were loaded
with transformers' own "auto" or "all_to_all", whose rows it exchanges in the same way while no plan is executed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.distributed.expert_parallel import AllToAllEP, EpDispatchExpertsParallel, EPImplementationInterface

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


def implementation_of(experts: torch.nn.Module, model: torch.nn.Module) -> PlannedEP | None:
    """Returns the implementation that executes these experts. Replaces transformers' own.

    Returns None for experts that transformers' expert parallelism does not execute: sharded or wrapped by others.
    """
    meshes: Any = next((of._mesh_manager for of in model.modules() if getattr(of, "_mesh_manager", None)), None)
    if experts not in _OF and meshes is not None and _is_executed_by_transformers(experts):
        replaced = vars(experts).pop("forward")  # PlannedEP calls the class's
        try:
            EpDispatchExpertsParallel().install_forward(  # type: ignore[no-untyped-call]
                experts, meshes.get_mesh("ep"), tp_mesh=meshes.get_mesh("tp"), ep_implementation="foremoe"
            )
        except BaseException:
            experts.forward = replaced
            raise
    reference = _OF.get(experts)
    return reference() if reference is not None else None


def _is_executed_by_transformers(experts: torch.nn.Module) -> bool:
    """Returns whether the last to replace the experts' forward was transformers' dispatch, and not, say, a hook."""
    forward = vars(experts).get("forward")
    of = (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", ""))
    return of == (EpDispatchExpertsParallel.__module__, "EpDispatchExpertsParallel.install_forward.<locals>.ep_forward")


EPImplementationInterface.register("foremoe", PlannedEP)
