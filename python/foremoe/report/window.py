"""Activities of some ranks during one layer of one micro-step of the modelled recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._core import Evaluation
from .facts import Span, Window

# Enough for resident guests to settle, and few enough to be simulated again quickly.
MOST_LAYERS = 8
MOST_MICRO_STEPS = 8
MOST_RANKS = 8

# Lanes of Evaluation.timeline(), by tid.
KINDS = ("dense", "experts", "dispatch", "waiting for copies", "copies from the host", "copies from peers", "planning")


@dataclass(frozen=True)
class WindowChoice:
    """A layer, a micro-step and ranks in ascending order."""

    layer: int
    micro_step: int
    ranks: list[int]


def choose_window(loads: npt.NDArray[np.int64], rho: npt.NDArray[np.float64]) -> WindowChoice:
    """Choose the least balanced of the first layers and micro-steps, and up to 8 ranks spread over the order of load.

    Args:
        loads: Rows of each rank, [micro_steps, layers, ranks].
        rho: Imbalance, [micro_steps, layers].
    """
    first = rho[:MOST_MICRO_STEPS, :MOST_LAYERS].T
    layer, micro_step = (int(i) for i in np.unravel_index(first.argmax(), first.shape))
    by_load = np.argsort(-loads[micro_step, layer], kind="stable")
    shown = min(MOST_RANKS, len(by_load))
    chosen = [by_load[i * (len(by_load) - 1) // max(1, shown - 1)] for i in range(shown)]
    return WindowChoice(layer, micro_step, sorted(map(int, chosen)))


def window_of(evaluation: Evaluation, choice: WindowChoice) -> Window:
    """Return the activities of the chosen ranks while any rank works on the layer."""
    turn = f"micro-step {choice.micro_step}, layer {choice.layer}"  # the turn's span names end with this
    spans: dict[int, list[Span]] = {}
    for event in evaluation.timeline(choice.micro_step + 1, choice.layer + 1):
        if event["ph"] == "X":
            kind, begin = KINDS[event["tid"]], 1e-6 * event["ts"]
            span = Span(kind, event["name"], begin, begin + 1e-6 * event["dur"], kind.startswith("copies"))
            if span.beneath or span.name.endswith(turn):
                spans.setdefault(event["pid"], []).append(span)
    worked = [span for of_rank in spans.values() for span in of_rank if not span.beneath]
    begin, end = min((s.begin for s in worked), default=0.0), max((s.end for s in worked), default=0.0)
    lanes = {r: _lane(sorted(spans.get(r, []), key=lambda s: s.begin), begin, end) for r in choice.ranks}
    return Window(evaluation.policy, f"{turn}, forward", end - begin, lanes)


def _lane(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """Return one rank's work and waits from `begin` to `end`, then the copies in transit during this time."""
    lane: list[Span] = []
    exchanged = False
    until = begin

    def wait_until(time: float) -> None:
        if time - until > 1e-9:
            lane.append(Span("waiting", "waiting for others", until - begin, time - begin))

    for span in spans:
        if span.beneath or span.end <= span.begin:
            continue
        wait_until(span.begin)
        kind = "combine" if span.kind == "dispatch" and exchanged else span.kind
        exchanged |= span.kind == "dispatch"
        lane.append(Span(kind, kind, span.begin - begin, span.end - begin))
        until = max(until, span.end)
    wait_until(end)
    for span in spans:
        if span.beneath and span.end > begin and span.begin < end:
            inside = max(0.0, span.begin - begin), min(span.end, end) - begin
            lane.append(Span(span.kind, span.name, *inside, beneath=True))
    return lane
