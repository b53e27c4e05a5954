"""Updates that are planned before they come.

Old log-probabilities are computed from the sequences of a whole step, and the updates that follow cut the same
sequences into mini-batches. From the second step on it is known how: so their rows are counted, and the first is
planned, while old log-probabilities are computed; each further one while the one before it runs. An update whose
rows turn out to be others, as where mini-batches are shuffled, is planned when it comes, and so are all after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
        self._begun: tuple[Counts, Plan] | None = None

    def recompute(self, replicas: Replicas, sequences: int, count: Callable[[range, dict[str, Any]], Counts]) -> None:
        """A step begins. Collective. count: rows of a mini-batch of these sequences, for these options."""
        self._of_a_step, self._updates = self._updates or self._of_a_step, 0
        self._expected.clear()
        self._begun = None
        if self._cut is None or self._is_wrong or sequences < self._cut.sequences:
            return
        size = self._cut.sequences
        ranges = [range(begin, begin + size) for begin in range(0, sequences - size + 1, size)]
        counts = [count(of, self._cut.options) for of in ranges[: self._of_a_step]]
        self._expected.extend(counts[i % len(counts)] for i in range(self._of_a_step))  # epochs
        self._begin(replicas)

    def update(self, replicas: Replicas, counts: Counts, cut: Cut) -> Plan:
        """The plan of the update that has come. Collective."""
        self._cut = cut
        self._updates += 1
        begun, self._begun = self._begun, None
        if begun is None:
            return replicas.plan(counts)
        if replicas._agreement.any(not np.array_equal(begun[0], counts)):
            self._is_wrong = True
            self._expected.clear()
            return replicas.plan(counts)
        self._begin(replicas)
        return begun[1]

    def _begin(self, replicas: Replicas) -> None:
        if self._expected:
            counts = self._expected.popleft()
            self._begun = counts, replicas.plan(counts)
