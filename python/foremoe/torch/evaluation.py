"""Forwards without a plan. Ranks may run different numbers of forwards, as in generate()."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from foremoe._engine.communication import gathered

_DONE, _FAILED = -1, -2


class Evaluation:
    """Before each layer, ranks agree on its index. A rank that has finished serves the rows of the others."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ended = False

    def expect_layer(self, layer: int) -> None:
        """Agrees on the layer to run. Collective. Raises RuntimeError if ranks run different layers."""
        self._agree(layer)

    def serve(self, run: Callable[[int], Any]) -> None:
        """Runs layers without rows of this rank until all ranks are done. run: Runs a layer, by its index."""
        while (layer := self._agree(_DONE)) >= 0:
            run(layer)

    def fail(self) -> None:
        """Ends the evaluation on all ranks, unless a rank has already ended it."""
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # this rank raises its own error
                self._agree(_FAILED)

    def _agree(self, own: int) -> int:
        """Returns the layer that the other ranks run; negative when all are done."""
        said: list[int] = gathered(torch.tensor(own, device=self._device), self._group).tolist()
        running = {layer: rank for rank, layer in enumerate(said) if layer >= 0}
        self._ended = _FAILED in said or len(running) > 1
        if _FAILED in said:
            raise RuntimeError(f"rank {said.index(_FAILED)} failed inside evaluate()")
        if len(running) > 1:
            places = ", ".join(f"MoE layer {layer} on rank {rank}" for layer, rank in sorted(running.items()))
            raise RuntimeError(f"ranks run different layers at the same time: {places}; expected whole forwards")
        return max(said)
