"""Rows on their way to the ranks that compute them, and back; experts' guests on the way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layers import ExpertLayer


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, by split sizes that both sides know; gradients come back the same way.

    `before` and `after` are called in the backward pass, around its exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], recv: list[int], group: Any, before: Any, after: Any
    ) -> Tensor:
        ctx.of = send, recv, group, before, after
        return _exchange(rows, send, recv, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        send, recv, group, before, after = ctx.of
        if before is not None:
            before()
        result = _exchange(grads[0], recv, send, group)
        if after is not None:
            after()
        return result, None, None, None, None, None


def _exchange(rows: Tensor, send: list[int], recv: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(recv), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), recv, send, group=group)
    return out


def start_point_to_point(operations: list[Any]) -> list[Any]:
    """Starts point-to-point operations together; returns what to wait for, of each."""
    if not operations:
        return []
    works = dist.batch_isend_irecv(operations)
    return works if len(works) == len(operations) else [works[0]] * len(operations)  # one for all of them


class GuestRows(torch.autograd.Function):
    """Guests' experts on their rows.

    The graph of the layer's own function is kept, but not the weights in it: a buffer may be lent to another expert
    between forward and backward, and then holds the guest again elsewhere. `guests` says where a turn finds them, and
    takes their gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: ExpertLayer, offsets: Tensor, guests: Any) -> Tensor:
        weights: dict[str, Tensor] = guests.weights()
        kept = KeptWeights(weights, guests)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            inner = rows.detach().requires_grad_(rows.requires_grad)
            leaves = {
                name: weight.detach().requires_grad_(name in guests.trained()) for name, weight in weights.items()
            }
            out = layer.forward_rows(inner, offsets, leaves)
            if guests.are_lent:
                kept.expect_met(out, inner, guests.trained(), layer.name)
        ctx.of = inner, leaves, out, guests
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        inner, leaves, out, guests = ctx.of
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        inputs = [*([inner] if inner.requires_grad else []), *trained.values()]
        found = list(torch.autograd.grad(out, inputs, grads[0].contiguous()))
        of_rows = found.pop(0) if inner.requires_grad else None
        guests.add_gradients(dict(zip(trained, found, strict=True)))
        ctx.of = None
        return of_rows, None, None, None


class KeptWeights:
    """Replaces guests' weights among saved tensors by where in them the saved tensor lies."""

    def __init__(self, weights: dict[str, Tensor], guests: Any) -> None:
        """weights: by name [guest slots, …], where they lie now. guests.weights(): where they lie when it is asked."""
        self._guests = guests
        self._matrices = {name for name, weight in weights.items() if weight.dim() > 2}
        self._met: set[str] = set()
        self._of = {
            weight.untyped_storage().data_ptr(): (name, weight.storage_offset()) for name, weight in weights.items()
        }

    def pack(self, tensor: Tensor) -> Any:
        found = self._of.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        name, begin = found
        self._met.add(name)
        return name, tensor.size(), tensor.stride(), tensor.storage_offset() - begin

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        name, size, stride, offset = packed
        weight = self._guests.weights()[name]
        return weight.as_strided(size, stride, weight.storage_offset() + offset)  # type: ignore[no-any-return]

    def expect_met(self, out: Tensor, rows: Tensor, trained: set[str], layer: str) -> None:
        """Raises RuntimeError where `out` was computed from `rows` by a function that keeps a matrix of trained weights
        elsewhere than among its saved tensors: its backward would read another expert, when the buffer is lent.

        A vector may be added, whose backward needs no value. Where a matrix was converted, what is kept is the copy.
        """
        if not (torch.is_grad_enabled() and rows.requires_grad):
            return
        missing = (trained & self._matrices) - self._met
        if missing:
            missing -= self._copied(out, rows)
        if missing:
            raise RuntimeError(
                f"{layer}: autograd saved no tensor of the weights {', '.join(sorted(missing))}; expected its experts "
                "to keep them by save_for_backward(), since under residency shared other ones lie there in the backward"
            )

    def _copied(self, out: Tensor, rows: Tensor) -> set[str]:
        """The weights that were converted to another type, between rows and out."""
        found: set[str] = set()
        nodes: list[Any] = [out.grad_fn]
        seen = {None, rows.grad_fn}
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            if node.name() == "ToCopyBackward0":
                while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:  # through views
                    node = node.next_functions[0][0]
                leaf = getattr(node, "variable", None)
                if leaf is not None:
                    found.add(self._of.get(leaf.untyped_storage().data_ptr(), ("", 0))[0])
        return found
