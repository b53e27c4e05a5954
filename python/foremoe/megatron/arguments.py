"""Checked arguments of attach() other than the model. All except threads must be equal on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

import foremoe
from foremoe._engine import arguments
from foremoe._variable import expect_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachArguments(arguments.PlanningArguments):
    """The arguments as passed to attach(). executed() returns the effective arguments."""

    mode: str
    on_mismatch: str

    def executed(self) -> AttachArguments:
        """Resolves mode static. Raises InputError, with the name of an invalid argument."""
        mode, residency = self.mode, self.residency
        expect_values({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        if mode == "static":
            mode, residency = "active", "static"
        read = dataclasses.replace(self, mode=mode, residency=residency)
        read.expect_known()
        return read


def expect_chunks(chunks: Sequence[Any]) -> None:
    """Raises InputError if the list is empty or contains anything but modules."""
    if not chunks:
        raise foremoe.InputError("model_chunks: there is none", field="model_chunks")
    for i, chunk in enumerate(chunks):
        if not isinstance(chunk, torch.nn.Module):
            raise foremoe.InputError(
                f"model_chunks[{i}]: is a {type(chunk).__name__}; expected a module",
                field="model_chunks",
                index=f"[{i}]",
            )
