"""Whole checkpoints of a spread model: the state of the unspread model and of its optimizer, whatever the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import foremoe
from foremoe._engine.session import Session
from foremoe._engine.together import refused_together

from . import optimizer_state
from .saving import agreed_entries, as_unspread, distributed, entries_of, expect_shape, unwrapped, whole_copy
from .shards import ExpertShards


class Checkpoints:
    """Saves and loads whole states. Created by ExpertParallel, whose attribute `checkpoints` it is."""

    def __init__(
        self,
        session: Session,
        shards: ExpertShards,
        trained_model: Callable[[], torch.nn.Module | None],
        loaded: Callable[[], None],
    ) -> None:
        """
        Args:
            trained_model: Returns the model that the optimizer trains; None if it is unknown.
            loaded: Called after experts were loaded.
        """
        self._session = session
        self._shards = shards
        self._trained_model = trained_model
        self._loaded = loaded

    def whole_state_dict(
        self, model: torch.nn.Module, *, cpu_offload: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Returns the state_dict() of the unspread model. Collective.

        The result has the experts of all ranks, whole tensors in place of DTensors, buffers and tied weights. Names are
        those of the model inside DistributedDataParallel. `model` may be a copy. Experts are gathered one parameter at
        a time. Entries share no memory with the model.

        Args:
            model: The model whose experts are spread, or what wrap() returned.
            cpu_offload: Moves each entry to the CPU when it is whole.
            rank0_only: Returns the entries on the first rank of all replicas; the other ranks get an empty dict.
        """
        self._session.expect_call("whole_state_dict()")
        return self._whole_state(model, cpu_offload, rank0_only)

    def _whole_state(self, model: torch.nn.Module, cpu_offload: bool, rank0_only: bool) -> dict[str, Any]:
        state = {}
        for names, value in agreed_entries(self._shards, model, rank0_only=rank0_only):
            kept = whole_copy(self._shards, value, cpu_offload)
            if not rank0_only or self._shards.keeps:
                state.update(dict.fromkeys(names, kept))
        return {name: state[name] for name in unwrapped(model).state_dict() if name in state}

    def whole_entries(self, model: torch.nn.Module) -> Iterator[tuple[list[str], Any]]:
        """Yields names and value of each entry of whole_state_dict(model). Tied weights have several names.

        Collective: all ranks iterate over all entries. Only one entry is whole at a time, unless the caller stores
        entries. Values that are not experts may share the model's memory.
        """
        self._session.expect_call("whole_entries()")
        return ((names, self._shards.whole(value)) for names, value in agreed_entries(self._shards, model))

    def load_whole_state_dict(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Loads this rank's part of a whole_state_dict(), which may come from another number of ranks. Not collective.

        Raises InputError with the first entry that is missing, unexpected or of another shape.
        """
        entries = entries_of(self._shards, model)
        for name in [*entries, *state]:
            if name not in state or name not in entries:
                problem = "is missing" if name not in state else "is not an entry of the unspread model's state_dict()"
                raise foremoe.InputError(f"state: {name} {problem}", field="state", index=f"[{name}]")
        own = dict(state)
        for name, value in entries.items():
            if isinstance(value, Tensor):
                expect_shape(name, state[name], value)
                if not self._shards.holds(value) or self._shards.came_sharded:  # else each rank takes its experts
                    own[name] = distributed(state[name], value)
        unwrapped(model).load_state_dict(own)
        self._loaded()

    def save_pretrained(self, model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
        """Writes the files of save_pretrained() of the unspread transformers model. Collective; rank 0 writes.

        When it returns on any rank, the files are complete. If rank 0 cannot write, all ranks raise.

        Args:
            model: The model whose experts are spread, or what wrap() returned.
            folder: Folder for the files, as from_pretrained() expects them.
            options: Options of the model's own save_pretrained(), such as max_shard_size.
        """
        self._session.expect_call("save_pretrained()")
        model = unwrapped(model)
        with refused_together(self._shards.everyone):
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
                    raise foremoe.InputError(f"{name}: is not an option of ep.checkpoints.save_pretrained", field=name)
        if self._shards.came_sharded:  # loaded in parts by transformers, which gathers such models itself
            save(model, folder, **options)
            return
        state = self._whole_state(model, cpu_offload=True, rank0_only=True)
        with refused_together(self._shards.everyone):
            if self._shards.keeps:
                with as_unspread(self._shards, model):
                    model.save_pretrained(folder, state_dict=state, **options)  # type: ignore[operator]

    def whole_optimizer_state(
        self, optimizer: torch.optim.Optimizer, *, cpu_offload: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Returns the optimizer's state with the experts of all ranks, by parameter name. Collective.

        {"state": {name: {key: value}}, "param_groups": [{"params": [names], option: value}]}, the format of
        torch.distributed.checkpoint.state_dict. Its set_optimizer_state_dict() loads it for an unspread model.

        Args:
            optimizer: Optimizer of the spread model. Its state must be scalars and tensors of the parameters' shapes.
            cpu_offload: Moves each tensor to the CPU once it is gathered.
            rank0_only: Returns the state on the first rank of all replicas; the other ranks get an empty dict.

        Raises InputError, on all ranks, for other state, and for scalars that differ between ranks.
        """
        self._session.expect_call("whole_optimizer_state()")
        return optimizer_state.whole_optimizer_state(
            self._shards, self._of_optimizer(), optimizer, cpu_offload=cpu_offload, rank0_only=rank0_only
        )

    def load_whole_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Loads this rank's part of a whole_optimizer_state(), which may come from another number of ranks.

        Not collective, unless homes were given: state_dict() of the optimizer is then.
        Parameter groups may differ if groups that are joined have the same options. Raises InputError otherwise.
        """
        optimizer_state.load_whole_optimizer_state(self._shards, self._of_optimizer(), optimizer, state)

    def _of_optimizer(self) -> torch.nn.Module:
        model = self._trained_model()
        if model is None:
            raise foremoe.InputError("model: unknown; call ep.wrap(model) first", field="model")
        return model
