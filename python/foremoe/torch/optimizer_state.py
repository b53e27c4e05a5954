"""Complete optimizer state of a spread model, by parameter names, for resuming on another number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import foremoe
from foremoe._engine.sharded import is_dtensor
from foremoe._engine.together import refused_together

from .saving import distributed, entries_of, expect_shape, unwrapped, whole_copy
from .shards import ExpertShards, hook_optimizer

_BY_PARAMETER = {"params", "param_names"}  # keys of a parameter group that are not options


def _refuse(argument: str, problem: str) -> foremoe.InputError:
    return foremoe.InputError(f"{argument}: {problem}", field=argument)


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, Tensor]]]:
    """Returns the names and parameters of each optimizer group."""
    names = {id(p): name for name, p in unwrapped(model).named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in names:
                raise _refuse(
                    "optimizer",
                    f"parameter {j} of its group {i} is not one of the model's; it was made before ExpertParallel, or "
                    "for another model",
                )
    return [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _BY_PARAMETER}


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _words(value: Any) -> str:
    """Returns a scalar as text, without its device."""
    return str(value.item() if isinstance(value, Tensor) and value.dim() == 0 else value)


def _description(
    optimizer: torch.optim.Optimizer, named: list[list[tuple[str, Tensor]]], state: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Returns the facts that must be equal on all ranks. state: By parameter name."""
    equal: dict[str, str] = {}
    for i, (group, of) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        equal |= {f"{key} of group {i}": _words(value) for key, value in _options(group).items()}
        equal[f"parameters of group {i}"] = " ".join(name for name, _ in of)
    for name, of_one in state.items():
        for key, value in of_one.items():
            equal[f"{key} of {name}"] = _words(value) if _is_scalar(value) else str(value.dtype)
    return equal


def whole_optimizer_state(
    shards: ExpertShards,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    cpu_offload: bool = False,
    rank0_only: bool = False,
) -> dict[str, Any]:
    with refused_together(shards.everyone) as given:
        given.expect_equal({"rank0_only": repr(rank0_only)})
        named = _named(model, optimizer)
        hook_optimizer(optimizer)
        with shards.by_position():
            saved = optimizer.state_dict()
        numbers = itertools.chain.from_iterable(group["params"] for group in saved["param_groups"])
        names = dict(zip(numbers, (name for of in named for name, _ in of), strict=True))
        state = {name: saved["state"][number] for number, name in names.items() if number in saved["state"]}
        given.expect_equal({f"optimizer[{what}]": of for what, of in _description(optimizer, named, state).items()})
    found: dict[str, dict[str, Any]] = {}
    for name, of_one in state.items():
        for key, value in sorted(of_one.items()):  # the same order on all ranks
            kept = whole_copy(shards, value, cpu_offload)
            if not rank0_only or shards.keeps:
                found.setdefault(name, {})[key] = kept
    if rank0_only and not shards.keeps:
        return {}
    groups = [
        {**_options(group), "params": [name for name, _ in of]}
        for group, of in zip(optimizer.param_groups, named, strict=True)
    ]
    return {"state": found, "param_groups": groups}


def load_whole_optimizer_state(
    shards: ExpertShards, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    named = _named(model, optimizer)
    hook_optimizer(optimizer)
    entries = entries_of(shards, model)
    groups = _saved_groups(state)
    names = dict.fromkeys(name for of in named for name, _ in of)
    for name in [*names, *groups]:
        if name not in groups or name not in names:
            raise _refuse("state", f"{name} is not in the {'state' if name not in groups else 'optimizer'}")
    with shards.by_position():
        numbered = optimizer.state_dict()["param_groups"]  # refers to parameters by number
    own: dict[int, dict[str, Any]] = {}
    for group, of in zip(numbered, named, strict=True):
        for (name, p), number in zip(of, group["params"], strict=True):
            if _options(groups[name]) != _options(groups[of[0][0]]):
                raise _refuse("state", f"{of[0][0]} and {name} have different options, but are in one group now")
            if name in state["state"]:
                own[number] = {
                    key: _part(f"{key} of {name}", value, p, entries[name])
                    for key, value in state["state"][name].items()
                }
        if of:
            group |= _options(groups[of[0][0]])
    optimizer.load_state_dict({"state": own, "param_groups": numbered})


def _saved_groups(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the saved parameter group of each parameter."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise _refuse("state", "expected what whole_optimizer_state() returned")
    groups = {name: group for group in state["param_groups"] for name in group["params"]}
    if not all(isinstance(name, str) for name in groups):
        raise _refuse("state", "its parameters have numbers, as in one rank's state_dict(); expected names")
    return groups


def _part(name: str, value: Any, weight: Tensor, entry: Any) -> Any:
    """Returns the value for load_state_dict(): sharded if the model's state_dict() entry is sharded, else whole."""
    if _is_scalar(value):
        return value.clone() if isinstance(value, Tensor) else value
    expect_shape(name, value, entry)
    return distributed(value, weight) if is_dtensor(entry) else value.clone()  # the optimizer writes into it
