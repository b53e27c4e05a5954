"""The experts of a model, spread over the ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import foremoe
from foremoe._engine.arguments import mark_spread, unmark_spread
from foremoe._engine.communication import gathered
from foremoe._engine.layers import Execute, ExpertLayer
from foremoe._engine.ranks import Ranks
from foremoe._engine.session import Session
from foremoe._engine.sharded import is_dtensor, local_weights, version_of

from .dispatch import dispatch_to
from .exchange import exchanged


class Accumulated:
    """The gradient that autograd sums for a weight, and whether other code has written it."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self._weight = weight
        self._grad: Tensor | None = None
        self._version = 0
        self._written = False
        self.has_summed = False
        if weight.grad is not None:
            self._grad, self._version = weight.grad, version_of(weight.grad)
        self.release = weight.register_post_accumulate_grad_hook(self._note).remove  # type: ignore[no-untyped-call]

    def _note(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.has_summed = True
        self._written = self._was_written(weight.grad, added=1)
        self._grad, self._version = weight.grad, version_of(weight.grad)

    def _was_written(self, now: Tensor | None, added: int = 0) -> bool:
        if self._grad is None or self._written:
            return self._written
        return now is not self._grad or version_of(now) != self._version + added

    def is_written(self) -> bool:
        return self._was_written(self._weight.grad)


ExecuteLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Runs a layer, by its index, on the arguments of Execute."""


@dataclass(frozen=True)
class HomePass:
    """Hooks of a layer's forward at homes.

    Attributes:
        word: int64 []. All nonzero words must be equal.
        refuse: Called on all ranks if nonzero words differ.
        before_backward: Called when the backward begins.
        of_gradients: Applied in the backward to gradients of experts.
    """

    word: Tensor
    refuse: Callable[[], None]
    before_backward: Callable[[], None]
    of_gradients: Callable[[Tensor], Tensor]


class SpreadExperts:
    """The experts of a model on this rank. The constructor replaces the parameters of every layer by those at home on
    this rank, E/R of each, ascending. DTensors are already on their ranks and are not changed."""

    def __init__(self, layers: list[ExpertLayer], ranks: Ranks, session: Session) -> None:
        """layers: Layers that expect_layers() accepts."""
        self.layers = layers
        self.session = session
        self.ranks = ranks
        self.num_experts, self.top_k = layers[0].num_experts, layers[0].top_k
        weights = layers[0].weights().values()
        self.expert_bytes = sum(w.numel() // self.num_experts * w.element_size() for w in weights)
        self.is_sharded = is_dtensor(next(iter(weights)))  # by a framework, before this constructor
        if not self.is_sharded:
            for i, layer in enumerate(layers):
                own = torch.from_numpy(ranks.table.of_rank(i, ranks.rank)).to(ranks.device)
                _replace(layer, {of: w.detach().index_select(0, own) for of, w in layer.weights().items()})
        self._positions = torch.from_numpy(ranks.table.position).to(ranks.device)  # [layers, experts]
        self.begin_home_pass: Callable[[int], HomePass]  # called with the layer's index
        self.expect_callable: Callable[[], None]  # called before a layer runs; raises if it must not run
        self._execute: ExecuteLayer | None = None
        self.has_warned = False  # about dropped rows that are read
        self._spread = self.parameters()
        self._own = {id(weight) for weight in self._spread}
        mark_spread(self._spread)

    def positions(self, index: int, ids: Tensor) -> Tensor:
        """Returns the positions of a layer's experts (see HomeTable). Negative ids stay negative."""
        if self.ranks.table.is_contiguous:
            return ids
        return torch.where(ids < 0, ids, self._positions[index][ids.clamp(min=0)])

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns this rank's parameters of all layers."""
        return [weight for layer in self.layers for weight in layer.weights().values()]

    def expect_own(self, layers: Iterable[ExpertLayer] | None = None) -> None:
        """Raises InputError if layers (None: any) no longer have the parameters of this rank."""
        for layer in () if self.is_sharded else layers or self.layers:
            for name, weight in layer.weights().items():
                if id(weight) not in self._own:
                    raise foremoe.InputError(
                        f"layers: the {name} of {layer.name} is no longer the parameter that was spread; "
                        "fully_shard(), load_state_dict(assign=True) or something else replaced it",
                        field="layers",
                    )

    def execute_by(self, execute: ExecuteLayer | None) -> None:
        """Installs a function on the layers; None: they run their own code."""
        self._execute = execute

        def of(index: int) -> Execute | None:
            if execute is None:
                return None
            return lambda *given: execute(index, *given)  # deepcopy() of a layer would copy the contents of a partial

        for i, layer in enumerate(self.layers):
            layer.execute_by(of(i))

    @contextlib.contextmanager
    def executed_by(self, execute: ExecuteLayer) -> Iterator[None]:
        """Layers run this function until exit, or until gather() if that is called before."""
        before = self._execute
        self.execute_by(execute)
        try:
            yield
        finally:
            if self._execute is execute:
                self.execute_by(before)

    def at_homes(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> tuple[Tensor, int]:
        """Computes unplanned rows at their experts' homes, after an exchange of counts.

        hidden: [tokens, hidden]. ids, gates: [tokens, top_k]. Returns [tokens, hidden] and the number of rows computed
        on this rank.
        """
        layer, homes, rows = self.layers[index], self.ranks.homes, self.ranks.rows
        self.expect_own([layer])
        begun = self.begin_home_pass(index)
        to = dispatch_to(self.positions(index, ids), slots=homes, own=homes, channel=rows, word=begun.word)
        if len({word for word in to.words if word}) > 1:
            begun.refuse()

        def compute(received: Tensor) -> Tensor:
            weights = local_weights(layer)
            if torch.is_grad_enabled():
                weights = {name: _WithGradient.apply(weight, begun.of_gradients) for name, weight in weights.items()}
            return layer.forward_rows(received, to.home_ends, weights)

        return exchanged(hidden, gates, to, rows, compute, before=begun.before_backward), to.home_rows

    def gather(self) -> None:
        """Restores every layer's own forward, and all of its experts unless they came as DTensors. Collective."""
        unmark_spread(self.parameters())
        if not self.is_sharded:
            for i, layer in enumerate(self.layers):
                own = {name: weight.detach().contiguous() for name, weight in layer.weights().items()}
                whole = {name: gathered(w, self.ranks.group).flatten(0, 1) for name, w in own.items()}
                if not self.ranks.table.is_contiguous:
                    whole = {name: w.index_select(0, self._positions[i]) for name, w in whole.items()}
                _replace(layer, whole)
        self.execute_by(None)


def expect_no_hooks(layers: list[ExpertLayer]) -> None:
    """Raises InputError for hooks on gradients of experts, except those of a phase."""
    for layer in layers:
        for name, weight in layer.weights().items():
            after = (weight._post_accumulate_grad_hooks or {}).values()
            others = [hook for hook in after if not isinstance(getattr(hook, "__self__", None), Accumulated)]
            if weight._backward_hooks or others:
                raise foremoe.InputError(
                    f"layers: the {name} of {layer.name} has a hook on its gradient, which would see this rank's share "
                    "alone, without those of guests; change the gradient after drain(), or freeze by requires_grad_()",
                    field="layers",
                )


class _WithGradient(torch.autograd.Function):
    """The identity, with a function applied to its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, of_gradient: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.of_gradient = of_gradient
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.of_gradient(grads[0]), None


def _replace(layer: ExpertLayer, by: dict[str, Tensor]) -> None:
    """Replaces a layer's weights, keeping requires_grad."""
    layer.set_weights(
        {of: torch.nn.Parameter(by[of], requires_grad=w.requires_grad) for of, w in layer.weights().items()}
    )
