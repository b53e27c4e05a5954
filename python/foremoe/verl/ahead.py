"""Updates that are planned before they come.

Old log-probabilities are computed from the sequences of a whole step, and the updates that follow cut the same
sequences into mini-batches. From the second step on it is known how: so their rows are counted, and the first is
planned, while old log-probabilities are computed; each further one while the one before it runs. An update whose
rows turn out to be others, as where mini-batches are shuffled, is planned when it comes, and so are all after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foremoe.megatron import Plan, Replicas

Counts = npt.NDArray[np.int64]  # [micro_steps, layers, experts], rows of this rank


@dataclass(frozen=True)
class Cut:
    """How an update's mini-batches were cut."""

    sequences: int  # of this rank in a mini-batch
    options: dict[str, Any]  # of prepare_micro_batches


class Ahead:
    """The updates that are expected after old log-probabilities were computed."""

    def __init__(self) -> None:
        self._cut: Cut | None = None
        self._is_wrong = False  # an update came that was not the expected one
        self._updates = 0  # since old log-probabilities were computed
        self._of_a_step = 0  # updates of the step before
        self._expected: deque[Counts] = deque()
        self._begun: Plan | None = None

    def recompute(
        self, replicas: Replicas, sequences: int, count: Callable[[Sequence[range], dict[str, Any]], list[Counts]]
    ) -> None:
        """A step begins. Collective. count: rows of mini-batches of these sequences, for these options."""
        self._of_a_step, self._updates = self._updates or self._of_a_step, 0
        self._expected.clear()
        self._begun = None
        cut, updates = self._cut, self._of_a_step
        # All ranks decide alike: verl gives each as many sequences, and cuts mini-batches of as many. It asserts
        # both (chunk_tensordict, make_iterator). All else counts collective calls, or is what these returned.
        if cut is None or self._is_wrong or sequences < cut.sequences:
            return
        size = cut.sequences
        parts = [range(begin, begin + size) for begin in range(0, sequences - size + 1, size)][:updates]

        def first() -> Counts:
            counts = count(parts, cut.options)
            self._expected.extend(counts[i % len(counts)] for i in range(updates))  # epochs
            return self._expected.popleft()

        self._begun = replicas.plan(first)

    def update(self, replicas: Replicas, count: Callable[[], Counts], cut: Cut) -> Plan:
        """The plan of the update that has come. Collective. count: its rows."""
        self._cut = cut
        self._updates += 1
        begun, self._begun = self._begun, None
        plan = replicas.plan(count, begun=begun)
        if plan is not begun:
            self._is_wrong |= begun is not None
            self._expected.clear()
        elif self._expected:
            self._begun = replicas.plan(self._expected.popleft())
        return plan
