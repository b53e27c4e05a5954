"""The order in which a rank takes its turns: which comes next, when copies for it begin, and who waits for them.

A turn is a pass of one layer in one micro-step. The plan's order is the only one: guests are where a turn expects them
because all turns before it have run. What a checkpoint computes again is no turn of its own. It reads the guests of the
backward turn that it belongs to, before that turn, and other layers' backward turns may lie in between.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .guests import Guests


class Passes(Protocol):
    """The two turns of one layer in one micro-step."""

    layer: int
    forward: int  # turn
    backward: int  # turn; −1 in a phase without
    ran: bool  # its forward: the next one is the recomputation of a checkpoint


class TurnCursor:
    """Knows the last turn that ran."""

    def __init__(self, guests: Guests) -> None:
        self.last = -1
        self._guests = guests

    def begin_forward(self, of: Passes, refusal: str) -> None:
        """Begins the copies of a forward or of a recomputation. Raises RuntimeError where another turn is next."""
        if of.ran:
            self._guests.begin(min(of.backward, self.last + 1))
            if of.backward > self.last + 1:
                self._guests.begin_ahead(of.backward)
            return
        if of.forward != self.last + 1:
            raise RuntimeError(refusal)
        self._guests.begin(of.forward)

    def wait(self, of: Passes) -> None:
        """Until the guests of the forward that runs are there."""
        self._guests.wait(of.backward if of.ran else of.forward)

    @torch.no_grad()
    def end_forward(self, of: Passes) -> None:
        if of.ran:
            return
        of.ran = True
        self._guests.end(of.forward, of.layer)
        self.last = of.forward

    def begin_backward(self, of: Passes, refusal: str) -> None:
        """Until the guests of a backward turn are there. Raises RuntimeError where another turn is next."""
        if of.backward != self.last + 1:
            raise RuntimeError(refusal)
        self._guests.begin(of.backward)
        self._guests.wait(of.backward)

    def end_backward(self, of: Passes) -> None:
        self._guests.end(of.backward, of.layer)
        self.last = of.backward
