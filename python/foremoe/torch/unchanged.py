"""Guards weights against changes during a phase, since guests are copies of weights and would keep the old values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from foremoe._engine.sharded import Written


class Unchanged:
    """Records the state of weights, and makes step() of their optimizers raise until release().

    Versions do not show every step: foreach and fused optimizers write DTensors without a new version.
    """

    def __init__(
        self,
        experts: Callable[[], Sequence[torch.nn.Parameter]],
        others: Mapping[str, torch.nn.Parameter],
        *,
        steps: bool,
    ) -> None:
        """experts: Returns the layers' present experts. others: By name. steps: Whether optimizers may step."""
        self._experts = experts
        weights = [*(("experts", weight) for weight in experts()), *others.items()]
        self._weights = [(name, weight, Written(weight)) for name, weight in weights]
        self._trained = [weight.requires_grad for _, weight in weights]
        self._hook = None if steps else register_optimizer_step_pre_hook(self._expect_no_step)

    def expect(self) -> None:
        """Raises RuntimeError if a weight was written or frozen, or an expert's weight was replaced."""
        for name, _, was_written in self._weights:
            if was_written():
                raise RuntimeError(f"the weights {name} were changed inside a phase, before drain()")
        for (name, weight, _), trained in zip(self._weights, self._trained, strict=True):
            if weight.requires_grad != trained:
                raise RuntimeError(f"the weights {name} were frozen or unfrozen inside a phase, before drain()")
        for now, (name, weight, _) in zip(self._experts(), self._weights, strict=False):  # experts come first
            if now is not weight:
                raise RuntimeError(f"the weights {name} were replaced inside a phase, before drain()")

    def _expect_no_step(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for name, weight, _ in self._weights:
            if id(weight) in stepped:
                raise RuntimeError(f"an optimizer of {name} stepped inside a phase, before drain()")

    def release(self) -> None:
        """Allows optimizers to step again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
