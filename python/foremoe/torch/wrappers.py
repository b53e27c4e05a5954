"""DistributedDataParallel and FSDP2 for the parameters that are not experts.

Neither wrapper sees experts, which are already spread over the same ranks; drain() averages experts' gradients. FSDP2
is imported only if used, since its import is slow.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from foremoe._engine.ranks import Ranks

# Models wrapped in DistributedDataParallel since watch_ddp(). Ranks may delete the wrapper at different times.
_IN_DDP: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def hide_from_ddp(model: torch.nn.Module, experts: list[torch.nn.Parameter]) -> None:
    """Hides experts from every DistributedDataParallel that wraps this model from now on."""
    _ignore_in_ddp(model, _ignored_in_ddp(model) | _names_in_ddp(model, experts))


def show_to_ddp(model: torch.nn.Module, experts: list[torch.nn.Parameter]) -> None:
    """Undoes hide_from_ddp()."""
    _ignore_in_ddp(model, _ignored_in_ddp(model) - _names_in_ddp(model, experts))


def _ignored_in_ddp(model: torch.nn.Module) -> set[str]:
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def _ignore_in_ddp(model: torch.nn.Module, names: set[str]) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, sorted(names))  # type: ignore[no-untyped-call]


def _names_in_ddp(model: torch.nn.Module, experts: list[torch.nn.Parameter]) -> set[str]:
    ids = {id(weight) for weight in experts}
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
    return names | {f".{name}" for name in names if "." not in name}  # as DDP names parameters of the model itself


@functools.cache
def watch_ddp() -> None:
    """Records every DistributedDataParallel that is created from now on, for is_in_ddp()."""

    def note(module: torch.nn.Module, _: str, child: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            _IN_DDP.add(child)

    torch.nn.modules.module.register_module_module_registration_hook(note)


def forget_ddp(model: torch.nn.Module) -> None:
    """Forgets recorded DistributedDataParallels that hold this model."""
    for of in [of for of in list(_IN_DDP) if any(module is model for module in of.modules())]:
        _IN_DDP.discard(of)


def is_in_ddp(model: torch.nn.Module) -> bool:
    """Returns whether the model, or one that contains it, was wrapped in DistributedDataParallel."""
    return any(module is model for of in list(_IN_DDP) for module in of.modules())


def active_ddp() -> Any:
    """Returns the DistributedDataParallel whose forward runs, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def is_in_no_sync(model: torch.nn.Module) -> bool:
    """Returns whether FSDP2's set_requires_gradient_sync(False) or set_requires_all_reduce(False) is in effect for any
    part of the model."""
    groups = [of for module in fsdp2_modules(model) for of in _parameter_groups(module)]
    return any(not (of.reduce_grads and of.all_reduce_grads) for of in groups)


def _parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12
        groups = [state._fsdp_param_group]
    return [of for of in groups if of is not None]


def shard_by_fsdp2(model: torch.nn.Module, experts: list[torch.nn.Parameter], ranks: Ranks) -> None:
    """Turns parameters into DTensors over the group, one copy per replica, gathered per decoder layer.

    Decoder layers are the entries of module lists that contain experts. Other parameters are gathered with the root.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device = experts[0].device.type
    if ranks.replicas is None:
        mesh = DeviceMesh.from_group(ranks.group, device)
    else:
        groups = [ranks.replicas.group, ranks.group]
        mesh = DeviceMesh.from_group(groups, device, ranks.grid, mesh_dim_names=("replicas", "shards"))
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


def fsdp2_modules(model: torch.nn.Module) -> list[Any]:
    """Returns the parts of the model on which fully_shard() was called. Does not import FSDP2."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [of for of in model.modules() if isinstance(of, module.FSDPModule)] if module is not None else []


def reshard(model: torch.nn.Module) -> None:
    """Releases whole parameters, which a forward without backward leaves in each outermost module of FSDP2."""
    for module in fsdp2_modules(model):
        module.reshard()
