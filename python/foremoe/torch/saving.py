"""Whole models from spread ones and back: for files, for the rollout model, and for another number of ranks."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe._engine.alike import refused_together, shortened
from foremoe._engine.ranks import Ranks
from foremoe._engine.sharded import is_dtensor

from .one_rank import ONE_RANK_OF
from .wrappers import fsdp2_modules, reshard


class ExpertParts:
    """Parameters of which each rank of a group holds E/R experts, ascending; or DTensors, which know their ranks."""

    def __init__(self, experts: Sequence[torch.nn.Parameter], ranks: Ranks) -> None:
        self.experts = list(experts)
        self.group = ranks.group
        self.rank = ranks.rank
        self.ranks = ranks.num_ranks
        self.keeps = dist.get_rank() == ranks.grid[0][0]  # what rank0_only asks for; the first of all replicas
        self._of_all = ranks
        self._ids = {id(weight) for weight in experts}

    @property
    def everyone(self) -> Any:
        """The group of the ranks of all replicas of these experts."""
        return self._of_all.trainers

    def is_part(self, weight: Tensor) -> bool:
        """Whether it is an expert parameter that holds this rank's experts alone."""
        return id(weight) in self._ids and not is_dtensor(weight)

    def whole_shape(self, weight: Tensor) -> tuple[int, ...]:
        return (len(weight) * self.ranks, *weight.shape[1:]) if self.is_part(weight) else tuple(weight.shape)

    @torch.no_grad()
    def whole(self, tensor: Tensor, weight: Tensor, rank0_only: bool = False) -> Tensor:
        """The experts of all ranks, or all of a DTensor; other tensors are returned as they are. Collective.

        tensor: the weight, or optimizer state of its shape. rank0_only: other ranks get an empty tensor.
        """
        if is_dtensor(tensor):
            found = tensor.full_tensor()
        elif self.is_part(weight):
            found = self._gathered(tensor.detach().contiguous(), rank0_only)
        else:
            found = tensor.detach()
        return found.new_empty(0) if rank0_only and not self.keeps else found

    def _gathered(self, part: Tensor, rank0_only: bool) -> Tensor:
        if rank0_only and self.rank > 0:
            dist.gather(part, group=self.group, group_dst=0)
            return part
        whole = part.new_empty(self.ranks * len(part), *part.shape[1:])
        if rank0_only:
            dist.gather(part, list(whole.chunk(self.ranks)), group=self.group, group_dst=0)
        else:
            dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole

    @torch.no_grad()
    def part(self, whole: Tensor, weight: Tensor) -> Tensor:
        """What this rank holds of a whole tensor, as it holds the weight. Not collective."""
        if is_dtensor(weight):
            from torch.distributed.tensor import distribute_tensor

            placed = whole.to(weight.device)
            return distribute_tensor(placed, weight.device_mesh, weight.placements, src_data_rank=None)
        if self.is_part(weight):
            return whole.narrow(0, self.rank * len(weight), len(weight))
        return whole


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, with the parameters that its optimizer knows."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    reshard(model)
    return model


def _entries_of(parts: ExpertParts, model: torch.nn.Module) -> dict[str, Any]:
    """The model's own state_dict() with the parameters themselves, so that experts and tied weights are recognised.

    Raises InputError for a model without these experts.
    """
    entries = {name: value for name, value in model.state_dict(keep_vars=True).items() if name != ONE_RANK_OF}
    held = {id(value) for value in entries.values()}
    missing = sum(id(weight) not in held for weight in parts.experts)
    if missing:
        raise foremoe.InputError(
            f"model: it lacks {missing} of the {len(parts.experts)} expert parameters that are spread", field="model"
        )
    return entries


def whole_entries(
    parts: ExpertParts, model: torch.nn.Module, rank0_only: bool = False
) -> Iterator[tuple[list[str], Any]]:
    """The names and the value of each entry of the unspread model's state_dict(); tied weights have several names.

    Collective: all ranks take all entries, in this order. One entry is whole at a time, unless the caller keeps them.
    """
    with refused_together(parts.everyone) as given:
        given.expect_alike({"rank0_only": repr(rank0_only)})
        if not isinstance(model, torch.nn.Module):
            raise foremoe.InputError(f"model: is a {type(model).__name__}, expected a torch.nn.Module", field="model")
        entries = _entries_of(parts, unwrapped(model))
        given.expect_alike({"order of the model's entries": shortened(" ".join(entries))})
    names: dict[int, list[str]] = {}
    for name, value in entries.items():
        names.setdefault(id(value), []).append(name)
    for of in names.values():
        value = entries[of[0]]
        yield of, parts.whole(value, value, rank0_only) if isinstance(value, Tensor) else value


def whole_state_dict(
    parts: ExpertParts, model: torch.nn.Module, *, cpu_offload: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    found = {}
    for names, value in whole_entries(parts, model, rank0_only):
        if not rank0_only or parts.keeps:
            kept = value.cpu() if cpu_offload and isinstance(value, Tensor) else value
            found.update(dict.fromkeys(names, kept))
    return {name: found[name] for name in unwrapped(model).state_dict() if name in found}


def load_whole_state_dict(parts: ExpertParts, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    model = unwrapped(model)
    entries = _entries_of(parts, model)
    for name in [*entries, *state]:
        if name not in state or name not in entries:
            problem = "is missing" if name not in state else "is not an entry of the unspread model's state_dict()"
            raise foremoe.InputError(f"state: {name} {problem}", field="state", index=f"[{name}]")
    own = {}
    for name, value in entries.items():
        own[name] = state[name]
        if isinstance(value, Tensor):
            expect_shape(name, state[name], parts.whole_shape(value))
            own[name] = parts.part(state[name], value)
    model.load_state_dict(own)


def expect_shape(name: str, given: Any, expected: tuple[int, ...]) -> None:
    """Raises InputError for an entry of `state` that is no tensor of this shape."""
    found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
    if found != expected:
        raise foremoe.InputError(f"state: {name} is {found}, expected {expected}", field="state", index=f"[{name}]")


def save_pretrained(parts: ExpertParts, model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    model = unwrapped(model)
    with refused_together(group=parts.everyone):
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
    if any(map(is_dtensor, parts.experts)):  # loaded in parts by transformers, which gathers such models itself
        save(model, folder, **options)
        return
    state = whole_state_dict(parts, model, cpu_offload=True, rank0_only=True)
    with refused_together(group=parts.everyone):
        if parts.keeps:
            with _as_unspread(parts, model):
                model.save_pretrained(folder, state_dict=state, **options)  # type: ignore[operator]


@contextlib.contextmanager
def _as_unspread(parts: ExpertParts, model: torch.nn.Module) -> Iterator[None]:
    """The model has the class, the number of parameters and the methods of the unspread one inside."""
    kept, kind = dict(vars(model)), type(model)
    num_parameters = sum(math.prod(parts.whole_shape(p)) for p in model.parameters())
    vars(model).pop("save_pretrained", None)
    vars(model)["num_parameters"] = lambda *_: num_parameters  # which the index of several files has
    vars(model)["should_save_on_this_rank"] = bool  # transformers lets rank 0 of the default group write alone
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
