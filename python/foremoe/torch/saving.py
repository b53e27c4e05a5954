"""Conversion between spread and whole models, for files, rollout models and other numbers of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import foremoe
from foremoe._engine.sharded import is_dtensor, local
from foremoe._engine.together import refused_together, shortened

from .shards import ExpertShards
from .wrappers import fsdp2_modules, reshard


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside DistributedDataParallel. The optimizer has the parameters of this inner model."""
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


def _agreed_entries(shards: ExpertShards, model: torch.nn.Module, **alike: bool) -> Iterator[tuple[list[str], Any]]:
    """Returns entries in the same order on all ranks, with names. alike: Options, equal on all ranks. Collective."""
    with refused_together(shards.everyone) as given:
        given.expect_equal({name: repr(value) for name, value in alike.items()})
        if not isinstance(model, torch.nn.Module):
            raise foremoe.InputError(f"model: is a {type(model).__name__}, expected a torch.nn.Module", field="model")
        entries = entries_of(shards, model)
        given.expect_equal({"order of the model's entries": shortened(" ".join(entries))})
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


def whole_entries(shards: ExpertShards, model: torch.nn.Module) -> Iterator[tuple[list[str], Any]]:
    """Yields the names and the value of each entry of the unspread model's state_dict().

    Tied weights have several names. Collective: all ranks iterate over all entries in this order. Only one entry is
    whole at a time, unless the caller stores entries.
    """
    return ((names, shards.whole(value)) for names, value in _agreed_entries(shards, model))


def whole_state_dict(
    shards: ExpertShards, model: torch.nn.Module, *, cpu_offload: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    state = {}
    for names, value in _agreed_entries(shards, model, rank0_only=rank0_only):
        kept = whole_copy(shards, value, cpu_offload)
        if not rank0_only or shards.keeps:
            state.update(dict.fromkeys(names, kept))
    return {name: state[name] for name in unwrapped(model).state_dict() if name in state}


def load_whole_state_dict(shards: ExpertShards, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    entries = entries_of(shards, model)
    for name in [*entries, *state]:
        if name not in state or name not in entries:
            problem = "is missing" if name not in state else "is not an entry of the unspread model's state_dict()"
            raise foremoe.InputError(f"state: {name} {problem}", field="state", index=f"[{name}]")
    own = dict(state)
    for name, value in entries.items():
        if isinstance(value, Tensor):
            expect_shape(name, state[name], value)
            takes_whole = shards.holds(value) and not shards.came_sharded  # each rank takes its experts when loading
            own[name] = state[name] if takes_whole else distributed(state[name], value)
    unwrapped(model).load_state_dict(own)


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


def save_pretrained(
    shards: ExpertShards, model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any
) -> None:
    model = unwrapped(model)
    with refused_together(group=shards.everyone):
        save = getattr(type(model), "save_pretrained", None)
        if save is None:
            raise foremoe.InputError(
                f"model: {type(model).__name__} has no save_pretrained(); write whole_state_dict(model) instead",
                field="model",
            )
        if os.path.exists(folder) and not os.path.isdir(folder):  # transformers would log it and write nothing
            raise foremoe.InputError(f"folder: {os.fspath(folder)} is not a folder", field="folder")
        for name in ("state_dict", "is_main_process", "distributed_checkpoint"):
            if name in options:
                raise foremoe.InputError(f"{name}: is not an option of ExpertParallel.save_pretrained", field=name)
    if shards.came_sharded:  # loaded in parts by transformers, which gathers such models itself
        save(model, folder, **options)
        return
    state = whole_state_dict(shards, model, cpu_offload=True, rank0_only=True)
    with refused_together(group=shards.everyone):
        if shards.keeps:
            with _as_unspread(shards, model):
                model.save_pretrained(folder, state_dict=state, **options)  # type: ignore[operator]


@contextlib.contextmanager
def _as_unspread(shards: ExpertShards, model: torch.nn.Module) -> Iterator[None]:
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
