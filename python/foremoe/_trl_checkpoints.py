"""trl's GRPOTrainer whose model and checkpoints have all experts, while each rank trains its own."""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import torch
import trl
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

import foremoe
from foremoe._engine.together import refused_together

from .torch import ExpertParallel


class TrainerWithCheckpoints(trl.GRPOTrainer):  # type: ignore[misc]
    """Saves and loads whole models and optimizer states, also those saved by other numbers of ranks.

    Attributes:
        expert_parallel: Of the trained model.
    """

    expert_parallel: ExpertParallel
    optimizer: Any

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        self._whole = self.expert_parallel.checkpoints.whole_state_dict(self.model, cpu_offload=True, rank0_only=True)
        try:
            with refused_together():  # only rank 0 writes
                super().save_model(*arguments, **keywords)
        finally:
            del self._whole

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict=self._whole)  # older transformers call this on rank 0 only

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        widest = functools.reduce(torch.promote_types, (p.dtype for p in self.model.parameters()))
        with refused_together():
            whole = type(self.model).from_pretrained(resume_from_checkpoint, dtype=widest)
        self.expert_parallel.checkpoints.load_whole_state_dict(self.model, whole.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        whole = self.expert_parallel.checkpoints.whole_optimizer_state(
            self.optimizer, cpu_offload=True, rank0_only=True
        )
        optimizer, self.optimizer = self.optimizer, types.SimpleNamespace(state_dict=lambda: whole)
        try:
            with refused_together():
                super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        has_state = os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME))
        with refused_together() as given:
            given.expect_equal({f"resume_from_checkpoint[{OPTIMIZER_NAME}]": "a file" if has_state else "no file"})
        if not has_state:
            return
        whole, of_scheduler = (
            torch.load(os.path.join(checkpoint, name), map_location="cpu", mmap=True, weights_only=True)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        try:
            self.expert_parallel.checkpoints.load_whole_optimizer_state(self.optimizer, whole)
        except foremoe.InputError as error:
            raise foremoe.InputError(
                f"resume_from_checkpoint: {OPTIMIZER_NAME} was not written by this trainer: {error}",
                file=checkpoint,
                field="resume_from_checkpoint",
            ) from error
        self.lr_scheduler.load_state_dict(of_scheduler)
