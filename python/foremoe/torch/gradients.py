"""Gradients of a phase, which begin with none and end as the mean over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from foremoe._engine.guests import Guests
from foremoe._engine.sharded import local

from .dense import Dense
from .spread import SpreadExperts


class PhaseGradients:
    """Takes the gradients of parameters away when it is made. They come back with those of the phase added (finish), or
    as they were (give_back)."""

    def __init__(self, experts: SpreadExperts, dense: Dense, parameters: Iterable[torch.nn.Parameter]) -> None:
        """parameters: all of both; those that are frozen are left alone."""
        self._experts, self._dense = experts, dense
        self._before = [(weight, weight.grad) for weight in parameters if weight.requires_grad]
        for weight, _ in self._before:
            weight.grad = None

    def give_back(self) -> None:
        """Nothing is half applied."""
        for weight, grad in self._before:
            weight.grad = grad

    @torch.no_grad()
    def finish(self, guests: Guests) -> None:
        """Brings those of guests home, and averages all that no wrapper has averaged. Collective."""
        guests.bring_home(*range(len(self._experts.layers)))
        for i, layer in enumerate(self._experts.layers):
            weights = layer.weights()
            for (home, name), gradient in guests.take_home(i).items():
                weight = weights[name]
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                local(weight.grad)[home] += gradient
        for weight in self._experts.parameters():
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weight.grad /= self._experts.ranks.num_ranks
        self._dense.average()
        for weight, before in self._before:
            if before is not None:
                weight.grad = before if weight.grad is None else weight.grad.add_(before)
