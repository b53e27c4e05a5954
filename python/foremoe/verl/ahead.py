"""Plans updates in advance.

verl computes old log-probabilities from all sequences of a step. The updates that follow divide the same sequences into
mini-batches, as in the previous step. So, from the second step on, the rows of all updates are counted, and the first
update is planned, while old log-probabilities are computed. Each further update is planned during the previous one. If
an update's rows differ from the prediction (shuffled mini-batches), it and all later updates are planned when they run.
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
class MiniBatchSplit:
    """Division of an update's sequences into mini-batches."""

    sequences: int  # of this rank, per mini-batch
    options: dict[str, Any]  # for prepare_micro_batches


class UpdatePlanner:
    """Updates predicted after the computation of old log-probabilities."""

    def __init__(self) -> None:
        self._cut: MiniBatchSplit | None = None
        self._is_wrong = False  # an update differed from its prediction
        self._updates = 0  # since old log-probabilities were computed
        self._of_a_step = 0  # number of updates of the previous step
        self._expected: deque[Counts] = deque()
        self._begun: Plan | None = None

    def recompute(
        self, replicas: Replicas, sequences: int, count: Callable[[Sequence[range], dict[str, Any]], list[Counts]]
    ) -> None:
        """Begins a step. Collective. count: Returns rows of mini-batches, given their sequences and options."""
        self._of_a_step, self._updates = self._updates or self._of_a_step, 0
        self._expected.clear()
        self._begun = None
        cut, updates = self._cut, self._of_a_step
        # All ranks take the same branch: verl asserts that ranks have equally many sequences (chunk_tensordict) and
        # equal mini-batches (make_iterator). The other variables count collective calls or hold their results.
        if cut is None or self._is_wrong or sequences < cut.sequences:
            return
        size = cut.sequences
        parts = [range(begin, begin + size) for begin in range(0, sequences - size + 1, size)][:updates]

        def first() -> Counts:
            counts = count(parts, cut.options)
            self._expected.extend(counts[i % len(counts)] for i in range(updates))  # epochs repeat them
            return self._expected.popleft()

        self._begun = replicas.plan(first)

    def update(self, replicas: Replicas, count: Callable[[], Counts], cut: MiniBatchSplit) -> Plan:
        """Returns the plan of the current update. Collective. count: Returns its rows."""
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
