"""Computation of received rows in home and guest slots, in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from foremoe.torch.dispatch import Dispatch
from foremoe.torch.exchange import computed_in_slots

HOMES, GUESTS, HIDDEN = 2, 2, 4
ENDS = torch.tensor([3, 5, 6, 9], dtype=torch.int32)  # end of each slot's rows
HOME_ROWS = int(ENDS[HOMES - 1])


class RecordPasses(torch.autograd.Function):
    """Identity that records each forward and backward in `events`."""

    @staticmethod
    def forward(ctx: Any, x: Any, events: list[str], who: str) -> Any:
        ctx.of = events, who
        events.append(who)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        events, who = ctx.of
        events.append(who)
        return grads[0], None, None


class Layer:
    def __init__(self, events: list[str]) -> None:
        self.matrix = torch.nn.Parameter(torch.randn(HOMES, HIDDEN, HIDDEN))
        self._events = events

    def weights(self) -> dict[str, Any]:
        return {"matrix": self.matrix}

    def forward_rows(self, rows: Any, offsets: Any, weights: dict[str, Any]) -> Any:
        who = "homes" if weights["matrix"] is self.matrix else "guests"
        parts = rows.tensor_split(offsets[:-1].long())
        out = torch.cat([part @ matrix for part, matrix in zip(parts, weights["matrix"], strict=True)])
        return RecordPasses.apply(out.tanh(), self._events, who)


class Guests:
    """A fake LayerTurn with the members that GuestRows uses."""

    def __init__(self, events: list[str]) -> None:
        self.matrix = torch.randn(GUESTS, HIDDEN, HIDDEN)
        self.gradients: dict[str, Any] = {}
        self._events = events

    def weights(self) -> dict[str, Any]:
        return {"matrix": self.matrix}

    def trained(self) -> set[str]:
        return {"matrix"}

    def wait_for_guests(self) -> None:
        self._events.append("wait")

    def add_gradients(self, gradients: dict[str, Any]) -> None:
        self.gradients = gradients


def dispatch(rows: int) -> Dispatch:
    any_order = torch.arange(rows)
    return Dispatch(
        send=[rows], recv=[rows], order=any_order, to_slots=any_order, home_rows=HOME_ROWS,
        home_ends=ENDS[:HOMES], guest_ends=ENDS[HOMES:] - HOME_ROWS,
    )  # fmt: skip


@pytest.mark.parametrize("kept", [True, False])
def test_home_slots_run_before_the_wait_for_guests_in_both_passes(kept: bool) -> None:
    torch.manual_seed(0)
    events: list[str] = []
    layer, guests = Layer(events), Guests(events)
    rows = torch.randn(int(ENDS[-1]), HIDDEN, requires_grad=True)
    with contextlib.nullcontext() if kept else torch.no_grad():
        out = computed_in_slots(rows, dispatch(len(rows)), layer, guests)
    assert events == ["homes", "wait", "guests"]
    whole = torch.cat([layer.matrix, guests.matrix]).detach().requires_grad_()
    own_rows = rows.detach().requires_grad_()
    parts = own_rows.tensor_split(ENDS[:-1].long())
    expected = torch.cat([part @ matrix for part, matrix in zip(parts, whole, strict=True)]).tanh()
    torch.testing.assert_close(out, expected)
    if not kept:
        assert not out.requires_grad
        return
    events.clear()
    out.square().sum().backward()
    assert events == ["homes", "wait", "guests"]
    expected.square().sum().backward()
    torch.testing.assert_close(rows.grad, own_rows.grad)
    torch.testing.assert_close(torch.cat([layer.matrix.grad, guests.gradients["matrix"]]), whole.grad)


def test_a_rank_without_rows_for_guests_does_not_wait() -> None:
    events: list[str] = []
    layer = Layer(events)
    out = computed_in_slots(torch.randn(HOME_ROWS, HIDDEN), dispatch(HOME_ROWS), layer, Guests(events))
    assert events == ["homes"]
    assert out.shape == (HOME_ROWS, HIDDEN)
