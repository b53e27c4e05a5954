"""A close look at one layer of one micro-step: which, and what some ranks did meanwhile in the modelled recompute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import Evaluation
from .facts import Span, Window

# Far enough for residents to have settled, and few enough to be simulated again in no time.
MOST_LAYERS = 8
MOST_MICRO_STEPS = 8
MOST_RANKS = 8

# Lanes of the trace, by tid.
KINDS = ("dense", "experts", "dispatch", "waiting for copies", "copies from the host", "copies from peers", "planning")
DISPATCH = KINDS.index("dispatch")
COPIES = (KINDS.index("copies from the host"), KINDS.index("copies from peers"))


@dataclass(frozen=True)
class WindowChoice:
    """Where to look; ranks ascend."""

    layer: int
    micro_step: int
    ranks: list[int]

    @property
    def turn(self) -> str:
        """How the names of its spans end."""
        return f"micro-step {self.micro_step}, layer {self.layer}"


@dataclass(frozen=True)
class _TraceSpan:
    name: str
    lane: int
    begin: float  # seconds
    end: float


def choose_window(loads: npt.NDArray[np.int64], rho: npt.NDArray[np.float64]) -> WindowChoice:
    """The least balanced of the first layers and micro-steps, and ranks from the most to the least loaded.

    loads: [micro_steps, layers, ranks]. rho: [micro_steps, layers].
    """
    first = rho[:MOST_MICRO_STEPS, :MOST_LAYERS].T
    layer, micro_step = (int(i) for i in np.unravel_index(first.argmax(), first.shape))
    by_load = np.argsort(-loads[micro_step, layer], kind="stable")
    shown = min(MOST_RANKS, len(by_load))
    chosen = [by_load[i * (len(by_load) - 1) // max(1, shown - 1)] for i in range(shown)]
    return WindowChoice(layer, micro_step, sorted(map(int, chosen)))


def window_of(evaluation: Evaluation, choice: WindowChoice) -> Window:
    """What the ranks did from the first to the last moment at which any of them worked on the layer."""
    spans: dict[int, list[_TraceSpan]] = {}
    for event in evaluation.timeline(choice.micro_step + 1, choice.layer + 1):
        if event["ph"] == "X":
            spans.setdefault(event["pid"], []).append(_span_of(event))
    worked = [s for of_rank in spans.values() for s in of_rank if _belongs(s, choice)]
    begin, end = min((s.begin for s in worked), default=0.0), max((s.end for s in worked), default=0.0)
    lanes = {r: _lane(sorted(spans.get(r, []), key=lambda s: s.begin), choice, begin, end) for r in choice.ranks}
    return Window(evaluation.policy, f"{choice.turn}, forward", end - begin, lanes)


def _span_of(event: Mapping[str, Any]) -> _TraceSpan:
    begin = 1e-6 * event["ts"]
    return _TraceSpan(event["name"], event["tid"], begin, begin + 1e-6 * event["dur"])


def _belongs(span: _TraceSpan, choice: WindowChoice) -> bool:
    return span.lane not in COPIES and span.name.endswith(choice.turn)


def _lane(spans: list[_TraceSpan], choice: WindowChoice, begin: float, end: float) -> list[Span]:
    """One rank's work, what it waited for in between, then the copies that travelled meanwhile."""
    lane: list[Span] = []
    exchanges = 0
    until = begin
    for span in spans:
        if not _belongs(span, choice) or span.end <= span.begin:
            continue
        if span.begin - until > 1e-9:
            lane.append(Span("waiting", "waiting for others", until - begin, span.begin - begin))
        kind = "combine" if span.lane == DISPATCH and exchanges else KINDS[span.lane]
        exchanges += span.lane == DISPATCH
        lane.append(Span(kind, kind, span.begin - begin, span.end - begin))
        until = max(until, span.begin, span.end)
    if end - until > 1e-9:
        lane.append(Span("waiting", "waiting for others", until - begin, end - begin))
    for span in spans:
        if span.lane in COPIES and span.end > begin and span.begin < end:
            inside = max(0.0, span.begin - begin), min(span.end, end) - begin
            lane.append(Span(KINDS[span.lane], span.name, *inside, beneath=True))
    return lane
