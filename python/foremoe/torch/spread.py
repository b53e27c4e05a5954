"""The experts of a model, spread over the ranks of a group: each rank has its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import foremoe
from foremoe._engine.arguments import mark_spread, unmark_spread
from foremoe._engine.communication import gathered
from foremoe._engine.layers import Execute, ExpertLayer
from foremoe._engine.ranks import Ranks
from foremoe._engine.sharded import is_dtensor, local_weights

from .dispatch import dispatch_to
from .exchange import exchanged


class SpreadExperts:
    """Making it replaces the parameters of every layer by this rank's, E/R of each, ascending. Those that are DTensors
    lie on their ranks already, and stay."""

    def __init__(self, layers: list[ExpertLayer], ranks: Ranks) -> None:
        """layers: accepted by expect_layers()."""
        self.layers = layers
        self.ranks = ranks
        self.num_experts, self.top_k = layers[0].num_experts, layers[0].top_k
        weights = layers[0].weights().values()
        self.expert_bytes = sum(w.numel() // self.num_experts * w.element_size() for w in weights)
        self.is_sharded = is_dtensor(next(iter(weights)))  # by a framework, before
        if not self.is_sharded:
            for layer in layers:
                _replace(layer, {of: self._of_this_rank(w.detach()).clone() for of, w in layer.weights().items()})
        self.has_warned = False  # of rows without a route that are read
        self._spread = self.parameters()
        mark_spread(self._spread)

    def _of_this_rank(self, whole: Tensor) -> Tensor:
        """whole: [experts, …]."""
        return whole[self.ranks.rank * self.ranks.homes :][: self.ranks.homes]

    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's, of all layers."""
        return [weight for layer in self.layers for weight in layer.weights().values()]

    def expect_own(self) -> None:
        """Raises InputError where layers have other parameters than this rank's, which were put there."""
        for layer in [] if self.is_sharded else self.layers:
            for name, weight in layer.weights().items():
                if all(weight is not own for own in self._spread):
                    raise foremoe.InputError(
                        f"layers: the {name} of {layer.name} is no longer the parameter that was spread; "
                        "fully_shard(), load_state_dict(assign=True) or something else replaced it",
                        field="layers",
                    )

    def execute_by(self, execute: Callable[[int, Tensor, Tensor, Tensor], Tensor] | None) -> None:
        """From now on layers call this with their index, and what Execute takes; None: their own code."""

        def of(index: int) -> Execute | None:
            return None if execute is None else lambda *given: execute(index, *given)

        for i, layer in enumerate(self.layers):
            layer.execute_by(of(i))

    def at_homes(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> tuple[Tensor, int]:
        """Rows that no plan knows, at their experts' homes, with counts exchanged first.

        hidden: [tokens, hidden]; ids, gates: [tokens, top_k]. Returns [tokens, hidden], and the number of rows computed
        on this rank.
        """
        layer, homes, rows = self.layers[index], self.ranks.homes, self.ranks.rows
        to = dispatch_to(ids, slots=homes, own=homes, channel=rows)

        def compute(received: Tensor) -> Tensor:
            return layer.forward_rows(received, to.home_ends, local_weights(layer))

        return exchanged(hidden, gates, to, rows, compute), to.home_rows

    def gather(self) -> None:
        """Gives every layer its own forward back, and all of its experts if it came with all. Collective."""
        unmark_spread(self.parameters())
        if not self.is_sharded:
            for layer in self.layers:
                own = {name: weight.detach().contiguous() for name, weight in layer.weights().items()}
                _replace(layer, {name: gathered(w, self.ranks.group).flatten(0, 1) for name, w in own.items()})
        self.execute_by(None)


def _replace(layer: ExpertLayer, by: dict[str, Tensor]) -> None:
    """Puts other weights in the place of a layer's, trained as these are."""
    layer.set_weights(
        {of: torch.nn.Parameter(by[of], requires_grad=w.requires_grad) for of, w in layer.weights().items()}
    )
