"""Conversion between spread and whole models, for files, rollout models and other numbers of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import foremoe
from foremoe._engine.sharded import is_dtensor, local
from foremoe._engine.together import refused_together

from .shards import ExpertShards
from .wrappers import fsdp2_modules, reshard


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside DistributedDataParallel, whose parameters the optimizer has. Frees whole weights that
    FSDP2 has gathered."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    reshard(model)
    return model


def entries_of(shards: ExpertShards, model: torch.nn.Module) -> dict[str, Any]:
    """Returns the model's state_dict() with the parameters themselves, so that tied weights are recognised.

    Raises InputError for a model without these experts.
    """
    model = unwrapped(model)
    shards.add(model)
    with shards.by_position():
        entries: dict[str, Any] = model.state_dict(keep_vars=True)
    missing = shards.num_weights - sum(map(shards.holds, entries.values()))
    if missing > 0:
        raise foremoe.InputError(
            f"model: it lacks {missing} of the {shards.num_weights} expert parameters that are spread", field="model"
        )
    return entries


def agreed_entries(shards: ExpertShards, model: torch.nn.Module, **alike: bool) -> Iterator[tuple[list[str], Any]]:
    """Returns entries in the same order on all ranks, with names. alike: Options, equal on all ranks. Collective."""
    with refused_together(shards.everyone) as given:
        given.expect_equal({name: repr(value) for name, value in alike.items()})
        if not isinstance(model, torch.nn.Module):
            raise foremoe.InputError(f"model: is a {type(model).__name__}, expected a torch.nn.Module", field="model")
        entries = entries_of(shards, model)
        given.expect_equal({"order of the model's entries": " ".join(entries)})
    names: dict[int, list[str]] = {}
    for name, value in entries.items():
        names.setdefault(id(value), []).append(name)
    return ((of, entries[of[0]]) for of in names.values())


def whole_copy(shards: ExpertShards, value: Any, cpu_offload: bool) -> Any:
    """Returns a copy of the result of shards.whole(), on the CPU if cpu_offload."""
    found = shards.whole(value)
    if not isinstance(value, Tensor):
        return found
    shares = local(value).data_ptr() == found.data_ptr()
    return found.to("cpu" if cpu_offload else found.device, copy=shares)


def distributed(value: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor, sharded if `like` is a DTensor. Not collective."""
    if not is_dtensor(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def expect_shape(name: str, given: Any, like: Tensor) -> None:
    """Raises InputError for an entry of `state` that is not a whole tensor of this shape."""
    found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
    if found != tuple(like.shape) or is_dtensor(given):
        parts = " in parts" if is_dtensor(given) else ""
        raise foremoe.InputError(
            f"state: {name} is {found}{parts}, expected {tuple(like.shape)}", field="state", index=f"[{name}]"
        )


@contextlib.contextmanager
def as_unspread(shards: ExpertShards, model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model has the class, number of parameters and methods of the unspread model."""
    kept, kind = dict(vars(model)), type(model)
    num_parameters = sum(p.numel() * (shards.num_ranks if shards.holds(p) else 1) for p in model.parameters())
    vars(model).pop("save_pretrained", None)
    vars(model)["num_parameters"] = lambda *_: num_parameters  # the index of several files contains it
    vars(model)["should_save_on_this_rank"] = bool  # transformers lets only rank 0 of the default group write
    if model in fsdp2_modules(model):
        model.__class__ = kind.__mro__[2]  # [FSDP2's own, FSDPModule, the model's]: names of weights depend on it
    try:
        yield
    finally:
        model.__class__ = kind
        for name in ("save_pretrained", "num_parameters", "should_save_on_this_rank"):
            vars(model).pop(name, None)
            if name in kept:
                vars(model)[name] = kept[name]
