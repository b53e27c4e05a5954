"""Whole checkpoints of a spread model: the state of the unspread model and of its optimizer, whatever the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import foremoe
from foremoe._engine.session import Session

from . import optimizer_state, saving
from .shards import ExpertShards


class Checkpoints:
    """Saves and loads whole states. Attribute `checkpoints` of ExpertParallel."""

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
        return saving.whole_state_dict(self._shards, model, cpu_offload=cpu_offload, rank0_only=rank0_only)

    def whole_entries(self, model: torch.nn.Module) -> Iterator[tuple[list[str], Any]]:
        """Yields names and value of each entry of whole_state_dict(model). Tied weights have several names.

        Collective: all ranks iterate over all entries. Values that are not experts may share the model's memory.
        """
        self._session.expect_call("whole_entries()")
        return saving.whole_entries(self._shards, model)

    def load_whole_state_dict(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Loads this rank's part of a whole_state_dict(), which may come from another number of ranks.

        Raises InputError with the first entry that is missing, unexpected or of another shape.
        """
        saving.load_whole_state_dict(self._shards, model, state)
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
        saving.save_pretrained(self._shards, model, folder, **options)

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

        Parameter groups may differ if groups that are joined have the same options. Raises InputError otherwise.
        """
        optimizer_state.load_whole_optimizer_state(self._shards, self._of_optimizer(), optimizer, state)

    def _of_optimizer(self) -> torch.nn.Module:
        model = self._trained_model()
        if model is None:
            raise foremoe.InputError("model: unknown; call ep.wrap(model) first", field="model")
        return model
