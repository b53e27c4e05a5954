"""Guests whose buffers are lent to other experts between forward and backward, in a single process."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import foremoe
from foremoe._engine.lent import try_lending_layer, try_lending_layers
from foremoe.torch.exchange import GuestRows

ROWS, WIDTH = 5, 4


class Saves(torch.autograd.Function):
    """rows @ weight. Saves both operands, as autograd's own matmul does."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.save_for_backward(rows, weight)
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight = ctx.saved_tensors
        return grads[0] @ weight.T, rows.T @ grads[0]


class Hides(Saves):
    """Stores its weight outside autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.rows, ctx.weight = rows, weight
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.weight.T, ctx.rows.T @ grads[0]


class Casts(torch.autograd.Function):
    """Saves a float32 copy of the weight instead of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        copied = weight.float()
        ctx.save_for_backward(rows, copied)
        return rows @ copied.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight = ctx.saved_tensors
        return grads[0] @ weight.to(rows.dtype).T, rows.T @ grads[0]


def in_a_checkpoint(rows: Any, weight: Any) -> Any:
    """Multiply in a checkpoint. The recomputation reads the weight that the buffer then holds."""
    return torch.utils.checkpoint.checkpoint(lambda rows: rows @ weight, rows, use_reentrant=False)


GOOD = {
    "matmul": torch.matmul,
    "saves": Saves.apply,
    "in another type": lambda rows, w: (rows.float() @ w.float()).to(rows.dtype),
    "contiguous": lambda rows, w: rows @ w.t().contiguous().t(),
    "gathered": lambda rows, w: torch.bmm(rows[:, None], w[None][torch.zeros(len(rows), dtype=torch.long)])[:, 0],
    "twice": lambda rows, w: rows @ torch.cat([w, w], 1)[:, :WIDTH],
    "saves a copy": Casts.apply,
    "scaled": lambda rows, w: rows @ (w * 0.5 + 1),
}
BAD = {"hides": Hides.apply, "in a checkpoint": in_a_checkpoint}


class Experts:
    """The part of ExpertLayer that try_lending_layer() uses."""

    name, hidden_size = "moe.0", WIDTH

    def __init__(self, multiply: Any, frozen: str = "") -> None:
        random = torch.Generator().manual_seed(3)
        shapes = {"up": (2, WIDTH, WIDTH), "bias": (2, WIDTH), "down": (2, WIDTH, WIDTH)}
        self._weights = {
            name: torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=random), name != frozen)
            for name, shape in shapes.items()
        }
        self._multiply = multiply

    def weights(self) -> dict[str, Any]:
        return self._weights

    def forward_rows(self, rows: Any, offsets: Any, weights: dict[str, Any]) -> Any:
        hidden = torch.tanh(self._multiply(rows, weights["up"][0]) + weights["bias"][0])
        return self._multiply(hidden, weights["down"][0])


def gradients(multiply: Any, *, lent: bool) -> list[Any]:
    """Return gradients of rows and weights. If `lent`, other experts use the buffers before the backward."""
    layer: Any = Experts(multiply)
    weights = {name: weight.detach()[:1].clone() for name, weight in layer.weights().items()}
    rows = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).requires_grad_()
    found: dict[str, Any] = {}
    places = [weights]
    guests = types.SimpleNamespace(
        weights=lambda: places[-1],
        trained=lambda: set(weights),
        add_gradients=found.update,
        wait_for_guests=lambda: None,
    )
    out = GuestRows.apply(rows, layer, None, guests, lambda: None)
    if lent:
        places.append({name: weight.clone() for name, weight in weights.items()})
        for weight in weights.values():
            weight.fill_(7)
    out.square().sum().backward()
    return [rows.grad, *(found[name] for name in weights)]


@pytest.mark.parametrize("case", GOOD)
def test_a_backward_reads_guests_from_their_current_buffers(case: str) -> None:
    for lent, kept in zip(gradients(GOOD[case], lent=True), gradients(GOOD[case], lent=False), strict=True):
        assert torch.equal(lent, kept)
    for frozen in ("", "up", "bias"):
        try_lending_layer(Experts(GOOD[case], frozen))


@pytest.mark.parametrize("case", BAD)
def test_experts_that_would_read_overwritten_buffers_are_rejected(case: str) -> None:
    lent, kept = (gradients(BAD[case], lent=lent) for lent in (True, False))
    assert not torch.equal(lent[0], kept[0])
    for frozen in ("", "up", "bias"):
        with pytest.raises(
            foremoe.InputError, match=r"residency: shared, but in the backward the experts of moe\.0 read"
        ):
            try_lending_layer(Experts(BAD[case], frozen))
    with pytest.raises(foremoe.InputError):  # only the first product is bad
        try_lending_layer(Experts(lambda rows, w: BAD[case](rows, w) if rows.is_leaf else rows @ w))


def test_experts_with_nan_weights_are_accepted() -> None:
    layer = Experts(torch.matmul)
    with torch.no_grad():
        layer.weights()["up"].fill_(torch.nan)
    try_lending_layer(layer)


def test_lending_is_tried_on_one_layer_of_each_class() -> None:
    class Counted(Experts):
        tried = 0

        def forward_rows(self, rows: Any, offsets: Any, weights: dict[str, Any]) -> Any:
            Counted.tried += 1
            return super().forward_rows(rows, offsets, weights)

    class Other(Experts):
        pass

    try_lending_layers([Counted(torch.matmul) for _ in range(3)])
    assert Counted.tried == 2  # with the same and with other weights in the buffers
    with pytest.raises(foremoe.InputError, match="residency: shared"):
        try_lending_layers([Counted(torch.matmul), Other(Hides.apply)])
