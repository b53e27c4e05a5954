"""The order of a rank's turns, and the start and end of copies for each turn.

A turn is a pass of one layer in one micro-step. Turns run in the order of the plan: when a turn begins, all earlier
turns have run, so its guests are in place. A recomputation by a checkpoint is not a turn. A recomputation reads the
guests of the layer's backward turn, before that turn. Backward turns of other layers may run in between.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import foremoe

from .guests import Guests


@dataclasses.dataclass
class TurnCursor:
    """Position of a rank in its sequence of turns."""

    guests: Guests
    out_of_order: str  # text of the error for a pass out of order
    last: int = -1
    is_open: bool = True  # until the phase ends


class LayerTurn:
    """One layer of one micro-step: its forward turn, its recomputations, and its backward turn."""

    def __init__(
        self, cursor: TurnCursor, name: str, turn: foremoe.RankTurn, backward: int, refuses_again: str
    ) -> None:
        """
        Args:
            name: Name of the layer.
            turn: Forward turn.
            backward: Backward turn; −1 in a phase without backwards.
            refuses_again: Why no checkpoint may recompute the layer, or "".
        """
        self.layer, self.micro_step = turn.layer, turn.micro_step
        self.forward, self.backward = turn.index, backward
        self.ran = False  # whether its forward ran
        self.has_graph = False  # a forward ran with gradients
        self._cursor = cursor
        self._name = name
        self._refuses_again = refuses_again

    @property
    def _reads(self) -> int:
        """Turn whose guests are read now."""
        return self.backward if self.ran else self.forward

    def weights(self) -> dict[str, Tensor]:
        """Returns the guests' weights in their present buffers, by name [guest slots, …]."""
        return self._cursor.guests.weights(self.layer, self._reads)

    def trained(self) -> set[str]:
        """Returns the names of weights that have gradients."""
        return self._cursor.guests.trained(self.layer)

    def add_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Adds gradients of the guests, by name [guest slots, …]."""
        self._cursor.guests.add_gradients(self.layer, gradients)

    @property
    def keeps_guests(self) -> bool:
        """Whether a second forward that is not a recomputation finds the guests in place."""
        return not self._cursor.guests.are_lent and self._cursor.last < self.backward

    def begin_forward(self) -> None:
        """Begins the copies of a forward or of a recomputation. Raises RuntimeError if another turn is next."""
        guests, following = self._cursor.guests, self._cursor.last + 1
        if torch._C._current_graph_task_id() < 0:
            if self.ran:
                self._expect_repeatable()
            self.has_graph |= torch.is_grad_enabled()
        if not self.ran:
            self._expect_next("forward", self.forward)
            guests.begin(self.forward)
            return
        if torch._C._current_graph_task_id() < 0:
            return
        self._expect_recomputable()
        guests.begin(min(self.backward, following))
        if self.backward > following:
            guests.begin_ahead(self.backward)

    def wait_for_guests(self) -> None:
        """Waits for the guests of this pass.

        Called just before the guests are read, so that copies overlap with the experts at home. Also called at the end
        of the pass, since a later turn may read guests that this turn did not.
        """
        self._cursor.guests.wait(self._reads)

    def end_forward(self) -> None:
        self.wait_for_guests()
        if not self.ran:
            self.ran = True
            self._end(self.forward)

    def begin_backward(self) -> None:
        """Begins the copies of a backward. Raises RuntimeError if another turn is next."""
        self._expect_next("backward", self.backward)
        self._cursor.guests.begin(self.backward)

    def end_backward(self) -> None:
        self.wait_for_guests()
        self._end(self.backward)

    @torch.no_grad()
    def _end(self, turn: int) -> None:
        self._cursor.guests.end(turn, self.layer)
        self._cursor.last = turn

    def _expect_next(self, which: str, turn: int) -> None:
        if not self._cursor.is_open:
            raise RuntimeError(f"{self._name}: its {which} ran after its phase had ended")
        if turn != self._cursor.last + 1:
            raise RuntimeError(f"{self._name}: its {which} of micro-step {self.micro_step} {self._cursor.out_of_order}")

    def _expect_repeatable(self) -> None:
        """Raises RuntimeError for a second forward whose backward could not run, or in which a rank would be idle."""
        refused = self._refuses_again
        if torch.is_grad_enabled() and self.backward >= 0 and (self.has_graph or self._cursor.last >= self.backward):
            refused = (
                f"its forward ran twice in one micro-step ({self.micro_step}) with gradients; expected one with "
                "gradients, and all others under torch.no_grad()"
            )
        if refused:
            raise RuntimeError(f"{self._name}: {refused}")

    def _expect_recomputable(self) -> None:
        """Raises RuntimeError if a recomputation would lack its guests, or if a rank would be idle in it."""
        refused = self._refuses_again
        if self._cursor.guests.are_lent and self.backward != self._cursor.last + 1:
            refused = "under residency shared a checkpoint may hold one MoE layer, not several"
        if refused:
            raise RuntimeError(f"{self._name}: {refused}")
