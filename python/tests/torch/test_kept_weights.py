"""Guests whose buffers are lent to other experts between forward and backward, in one process."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from foremoe.torch.exchange import GuestRows

ROWS, WIDTH = 5, 4


class Saves(torch.autograd.Function):
    """rows @ weight, as autograd's own."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.save_for_backward(rows, weight)
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight = ctx.saved_tensors
        return grads[0] @ weight.T, rows.T @ grads[0]


class Hides(Saves):
    """Keeps its weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.rows, ctx.weight = rows, weight
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.weight.T, ctx.rows.T @ grads[0]


def gradients(multiply: Any, *, lent: bool, dtype: Any = torch.float64, rows_of: Any = torch.float64) -> list[Any]:
    """Of rows and weights where the buffers are lent in between, or are not, or there are none."""
    random = torch.Generator().manual_seed(3)
    weights = {
        "up": torch.randn(1, WIDTH, WIDTH, dtype=dtype, generator=random),
        "bias": torch.randn(1, WIDTH, dtype=dtype, generator=random),
        "down": torch.randn(1, WIDTH, WIDTH, dtype=dtype, generator=random),
    }
    rows = torch.randn(ROWS, WIDTH, dtype=rows_of, generator=random).requires_grad_()

    def forward_rows(rows: Any, offsets: Any, weights: dict[str, Any]) -> Any:
        hidden = torch.tanh(multiply(rows, weights["up"][0]) + weights["bias"][0])
        return multiply(hidden, weights["down"][0])

    found: dict[str, Any] = {}
    places = [weights]
    guests = types.SimpleNamespace(
        weights=lambda: places[-1], trained=lambda: set(weights), are_lent=lent, add_gradients=found.update
    )
    layer: Any = types.SimpleNamespace(name="moe.0", forward_rows=forward_rows)
    out = GuestRows.apply(rows, layer, None, guests)
    if lent:
        places.append({name: weight.clone() for name, weight in weights.items()})
        for weight in weights.values():
            weight.fill_(torch.nan)
    out.square().sum().backward()
    return [rows.grad, *(found[name] for name in weights)]


def in_another_type(rows: Any, weight: Any) -> Any:
    return rows @ weight.to(rows.dtype)


@pytest.mark.parametrize("multiply", [torch.matmul, Saves.apply])
def test_a_backward_reads_the_guests_where_they_lie_then(multiply: Any) -> None:
    for lent, kept in zip(gradients(multiply, lent=True), gradients(multiply, lent=False), strict=True):
        assert torch.equal(lent, kept)


def test_a_copy_of_weights_is_kept_as_any_tensor() -> None:
    types_of = {"dtype": torch.float32, "rows_of": torch.float64}
    lent, kept = (gradients(in_another_type, lent=lent, **types_of) for lent in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(lent, kept, strict=True))


def test_weights_that_are_hidden_from_autograd_are_refused_where_buffers_are_lent() -> None:
    with pytest.raises(RuntimeError, match=r"moe\.0: autograd saved no tensor of the weights down, up; expected"):
        gradients(Hides.apply, lent=True)
    with pytest.raises(RuntimeError, match=r"of the weights up; expected"):  # of one matrix, though the other is copied
        gradients(lambda rows, w: Hides.apply(rows, w) if rows.is_leaf else in_another_type(rows, w.float()), lent=True)
    expected = gradients(torch.matmul, lent=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(Hides.apply, lent=False), expected, strict=True))
