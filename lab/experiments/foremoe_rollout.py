"""Rollout from training: a step's counts place the next rollout's experts.

Our own question, asked by no paper.

A trainer knows how often each expert was chosen in step *t*. Inference engines place replicas by a window of their own
past. The table compares what each knows before rollout *t + 1*, or during it.

We assume: Eight steps of 16 micro-steps, each of which stands for one sixteenth of the rollout, in the same order.
Popularity drifts: with *drift 1*, the last step has a completely different popularity, and each step moves a seventh of
the tokens. One replica per rank is redundant, and each replica serves an equal part of its expert's tokens, as engines
route. Figures are means over the rollouts of steps 2 to 8. *EPLB, last window* knows the last four micro-steps of the
former rollout, and *training* all sixteen: their sum with *EPLB*, each of them with *foremoe.eplb*. Both place once,
before the rollout, when engines receive new weights anyway. *Every window* places again after every four micro-steps,
by these; EPLB then moves weights while the rollout runs, which is not charged. *Known rollout* places once by the
rollout itself, which nobody can know. Placements are global. Three draws, two layers.

Result: All counts of the training step are worth more than the engine's last window. With drift 0.2, the rollout's
busiest rank falls from {8 ranks, drift 0.2 | EPLB, last window | rho | 3} to {8 ranks, drift 0.2 | EPLB, training | rho
| 3} times the mean on 8 ranks, and from {64 ranks, drift 0.2 | EPLB, last window | rho | 3} to {64 ranks, drift 0.2 |
EPLB, training | rho | 3} on 64; foremoe.eplb reaches {8 ranks, drift 0.2 | foremoe.eplb, training | rho | 3} and {64
ranks, drift 0.2 | foremoe.eplb, training | rho | 3}. Placing anew in every window is about as good over the whole rollout, at
the cost of moving weights while it runs, but its parts are less even: {64 ranks, drift 0.2 | EPLB, every window |
rho_parts | 3} against {64 ranks, drift 0.2 | foremoe.eplb, training | rho_parts | 3} on 64 ranks. Groups of prompts differ
from window to window.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foremoe import InputError, _core
from foremoe.eplb import rebalance_experts
from kit import Case, Column, Measured, System, drawn, like

WINDOW = 4  # micro-steps
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Served(Measured):
    """rho: busiest rank ÷ mean of the whole rollout, and of each micro-step; means over rollouts and layers."""

    rho: tuple[float, float]


class Placing(System):
    """Places replicas for each step but the first. by: "eplb" or "foremoe".

    knows: "window": the last micro-steps of the former step. "former": the former step. "windows": in each window, the
    window before. "this": the step itself. "nothing": experts stay at home.
    """

    def __init__(self, label: str, by: str, knows: str) -> None:
        super().__init__(label, "vanilla", columns={"rho", "rho_parts"})
        if by not in ("eplb", "foremoe") or knows not in ("window", "former", "windows", "this", "nothing"):
            raise InputError(f"{label}: no '{by}' that knows '{knows}'")
        self.by, self.knows = by, knows

    def measure(self, case: Case) -> dict[str, Measured]:
        steps = case.load.array.reshape(case.on.steps, -1, *case.load.array.shape[1:])
        rho = []
        for former, step in itertools.pairwise(steps):
            served = np.concatenate([self.served(case, *part) for part in self.parts(former, step)])
            both = (of.max(-1) / of.mean(-1) for of in (served.sum(0), served))
            rho.append([float(of.mean()) for of in both])
        made = self.planned(case, case.load)
        whole, parts = np.mean(rho, 0)
        return {"": Served(made, case.load, case.on, made, (float(whole), float(parts)))}

    def parts(self, former: Counts, step: Counts) -> Iterator[tuple[Counts, Counts]]:
        """Yields what is known and what is served, [micro_steps, layers, ranks, experts] each."""
        if self.knows != "windows":
            yield {"window": former[-WINDOW:], "former": former}.get(self.knows, step), step
            return
        both = np.concatenate([former[-WINDOW:], step])
        for begin in range(0, len(step), WINDOW):
            yield both[begin : begin + WINDOW], step[begin : begin + WINDOW]

    def served(self, case: Case, known: Counts, counts: Counts) -> NDArray[np.float64]:
        """Tokens of each rank, [micro_steps, layers, ranks]."""
        ranks, experts = counts.shape[2:]
        if self.knows == "nothing":
            return counts.sum(2).reshape(*counts.shape[:2], ranks, -1).sum(-1).astype(float)
        if self.by == "eplb":
            options = {"guest_slots": case.on.guest_slots}
            former = like(case.load, known)
            made = _core._evaluate(
                like(case.load, counts), "eplb", options, {}, previous_load=former, threads=case.threads
            )
            return made.plan.slot_tokens.sum(-1).astype(float)  # one event per micro-step
        slots = experts + case.on.guest_slots * ranks
        nodes = -(-ranks // case.load.ranks_per_node)
        placed, _, replicas = rebalance_experts(known.sum(2), slots, 1, nodes, ranks)
        parts = counts.sum(2) / replicas
        of_slot = np.take_along_axis(parts, np.broadcast_to(placed, (len(parts), *placed.shape)), 2)
        loads: NDArray[Any] = of_slot.reshape(*parts.shape[:2], ranks, -1).sum(-1)
        return loads


EVERY = dict(
    model="Qwen3-30B-A3B", layers=2, micro_steps=128, steps=8, sequences_per_rank=1, tokens_per_rank=4096,
    group_size=16, step_spread=0.6, group_spread=1.0, draws=3,
)
inputs = [
    drawn(f"{ranks} ranks, drift {drift}", ranks=ranks, drift=drift, **EVERY)
    for ranks in (8, 64)
    for drift in (0, 0.2, 1)
]
systems = [
    Placing("homes", "eplb", "nothing"),
    Placing("EPLB, last window", "eplb", "window"),
    Placing("EPLB, every window", "eplb", "windows"),
    Placing("EPLB, training", "eplb", "former"),
    Placing("foremoe.eplb, last window", "foremoe", "window"),
    Placing("foremoe.eplb, every window", "foremoe", "windows"),
    Placing("foremoe.eplb, training", "foremoe", "former"),
    Placing("foremoe.eplb, known rollout", "foremoe", "this"),
]
columns = [
    Column("rho", "ρ of the rollout", 4, "busiest rank ÷ mean rank of the whole rollout", lambda m: m.rho[0]),
    Column("rho_parts", "ρ of its parts", 4, "the same of each sixteenth, the mean", lambda m: m.rho[1]),
]
