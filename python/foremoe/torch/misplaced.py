"""Tests whether the routes of a phase belong to its rows.

Each rank records the experts that its routers would have chosen for a sample of rows. When the phase ends, it compares
them with the recorded experts of these rows, of neighbouring rows, of other micro-steps and of other layers.

Agreement is (a − c) ÷ (u − c). a: number of recorded experts that the router would also choose, summed over rows and
layers. c: mean of a over all permutations of the rows. u: largest a that the experts' counts allow. Routes of other
rows have an expected agreement of 0. Its standard error s is the standard deviation of a over all permutations ÷ (u −
c) (Hoeffding's combinatorial statistic). Routes chosen by older weights had 0.33 or more in toy models, after 20 steps
of AdamW at a learning rate of 0.01, when the router would still choose 28 to 55 % of the recorded experts.

Routes are refused if the agreement of all ranks, of one rank or of one of its micro-steps is below a limit: the larger
of FOREIGN and 3 s, but at most STALE − 3 s. If the limit is below LEAST, there are too few rows to judge. So routes
with an agreement of STALE are refused in about 0.13 % of the judged pools, and routes with a higher agreement less
often. In 180 toy runs, with 64 to 384 rows in 2 to 4 layers, 0 % of correct and 99 % of shuffled routes were refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLE = 64
"""Most rows sampled per micro-step."""
LEAST, FOREIGN, STALE, ERRORS = 0.03, 0.1, 0.3, 3.0
CLEARLY, CERTAIN = 0.3, 5.0
"""Routes of another place must agree better by this fraction of u − c, and by this number of standard errors."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Ids = np.ndarray[Any, np.dtype[np.int32]]
Where = tuple[str, int, int]  # kind of place, and its two numbers: see _WORDS

_WORDS = {
    "rows": "rows {1:+d} beside them",
    "micro-steps": "micro-step {1}, in micro-step {0}",
    "layers": "layer {1}, in layer {0}",
}
_KINDS = ["", *_WORDS]


class Sample:
    """Routers' own choices for a sample of rows of each micro-step. note() does not wait for the device."""

    def __init__(self, recorded: Sequence[Tensor], num_experts: int, device: torch.device) -> None:
        """recorded: Per micro-step, integers [rows, layers, top_k], negative in rows without a route."""
        self._recorded = [of.numpy() for of in recorded]
        self._num_experts = num_experts
        self.rows = [torch.from_numpy(_sample_rows(of, m)) for m, of in enumerate(self._recorded)]
        _, layers, top_k = recorded[0].shape
        self._chosen = torch.full((len(recorded), layers, SAMPLE, top_k), -1, dtype=torch.int32, device=device)

    def note(self, micro_step: int, layer: int, rows: Tensor, chosen: Tensor) -> None:
        """Records the router's choices. rows: Sampled rows, on the device. chosen: Its choices, [tokens, top_k]."""
        self._chosen[micro_step, layer, : len(rows)] = chosen.index_select(0, rows).to(torch.int32)

    def numbers(self) -> Numbers:
        """Returns this rank's row for judge(), of equal length on all ranks. Waits for the device."""
        chosen = self._chosen.cpu().numpy()
        found = np.zeros((len(chosen), 4))
        best: tuple[float, Where] = (0.0, ("", 0, 0))
        layers = _Differences()
        for m, (recorded, rows) in enumerate(zip(self._recorded, self.rows, strict=True)):
            own, at = chosen[m, :, : len(rows)].swapaxes(0, 1), rows.numpy()  # [rows, layers, top_k]
            if not len(at) or (own < 0).all():
                continue
            picked = _one_hot(own, self._num_experts)
            here = _one_hot(recorded[at], self._num_experts)
            found[m] = _moments(picked, here)
            layers.add(*_of_layers(picked, here))
            beside = [
                (("rows", 0, by), np.flatnonzero((at + by >= 0) & (at + by < len(recorded))), recorded, by)
                for by in (-1, 1)
            ]
            others = [
                (("micro-steps", m, other), np.arange(len(at)), of, 0)
                for other, of in enumerate(self._recorded)
                if other != m and len(of) == len(recorded)
            ]
            for where, of, table, by in (*beside, *others):
                there = _one_hot(table[at[of] + by], self._num_experts)
                own_sum, other_sum = _excess(picked[of], here[of]), _excess(picked[of], there)
                best = max(best, (_gain(other_sum - own_sum, found[m]), where), key=lambda of: of[0])
        best = max(best, layers.best(found.sum(0)), key=lambda of: of[0])
        _, (kind, a, b) = best
        return np.concatenate([[_KINDS.index(kind), a, b], found.ravel()])


def judge(numbers: Numbers) -> str:
    """Returns why routes do not belong to their rows, or "". numbers: Results of numbers(), [rank, …]."""
    moments = numbers[:, 3:].reshape(len(numbers), -1, 4)
    for rank, (kind, a, b) in enumerate(numbers[:, :3].astype(int).tolist()):
        if kind:
            return (
                f"on rank {rank} routers would choose the experts that are recorded for "
                f"{_WORDS[_KINDS[kind]].format(a, b)}, rather than those of their own rows"
            )
    places = [("", moments.sum((0, 1)))]
    places += [(f" of rank {rank}", of.sum(0)) for rank, of in enumerate(moments)]
    places += [(f" of micro-step {m} of rank {r}", of) for r, ranks in enumerate(moments) for m, of in enumerate(ranks)]
    for where, of in places:
        agreement, limit = _agreement(of)
        if limit >= LEAST and agreement < limit:
            return (
                f"recorded experts{where} agree with what routers would choose no better than in any other order of "
                f"rows (agreement {agreement:.3f}, expected {limit:.3f} or more)"
            )
    return ""


def _agreement(moments: Numbers) -> tuple[float, float]:
    """Returns the agreement and its limit; the limit is below LEAST if rows are too few or too alike to judge."""
    found, mean, most, variance = moments.tolist()
    if most - mean <= 0.05 * most:
        return 0.0, 0.0
    error = ERRORS * variance**0.5 / (most - mean)
    return (found - mean) / (most - mean), min(max(error, FOREIGN), STALE - error)


def _sample_rows(recorded: Ids, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draws up to SAMPLE rows with a route, ascending."""
    rows = np.flatnonzero((recorded[:, :, 0] >= 0).any(1))
    if len(rows) > SAMPLE:
        rows = np.sort(np.random.default_rng(seed).choice(rows, SAMPLE, replace=False))
    return rows.astype(np.int64)


def _one_hot(ids: Ids, num_experts: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns float32 [rows, layers, experts] for ids [rows, layers, top_k]; negative ids add nothing."""
    table = np.zeros((*ids.shape[:2], num_experts + 1), np.float32)
    np.put_along_axis(table, np.where(ids < 0, num_experts, ids), 1, 2)
    return table[:, :, :-1]


def _moments(picked: Any, here: Any) -> list[float]:
    """Returns a, c, u of one micro-step, and the variance of a over all permutations of its rows."""
    rows = len(picked)
    of_pairs = picked.reshape(rows, -1) @ here.reshape(rows, -1).T  # [row that runs, row that is recorded]
    centred = of_pairs - of_pairs.mean(0) - of_pairs.mean(1, keepdims=True) + of_pairs.mean()
    most = np.minimum(picked.sum(0), here.sum(0)).sum()
    variance = np.square(centred, dtype=np.float64).sum() / max(rows - 1, 1)
    return [float(of) for of in (np.trace(of_pairs), of_pairs.mean() * rows, most, variance)]


def _excess(picked: Any, there: Any) -> Numbers:
    """Returns float64 [rows]: experts of `there` that were picked, minus their mean over all rows of `there`."""
    found: Numbers = (picked * (there - there.mean(0))).sum((1, 2)).astype(np.float64)
    return found


def _gain(differences: Numbers, moments: Numbers) -> float:
    """Returns by how many standard errors another place agrees better; 0 if not significant."""
    error = max(float(differences.std()) * len(differences) ** 0.5, 1e-9)
    gain = float(differences.sum())
    return gain / error if gain > max(CLEARLY * (moments[2] - moments[1]), CERTAIN * error) else 0.0


def _of_layers(picked: Any, here: Any) -> tuple[Any, Any, int]:
    """Returns sums and sums of squares, over rows, of each layer's gain with other layers' routes, and their number."""
    centred = here - here.mean(0)
    of_pairs = np.einsum("rle,rme->rlm", picked, centred, optimize=True)  # [rows, layer, layer that is recorded]
    differences = of_pairs - np.einsum("rll->rl", of_pairs)[:, :, None]
    return differences.sum(0, dtype=np.float64), np.square(differences).sum(0, dtype=np.float64), len(picked)


class _Differences:
    """Accumulates _of_layers() over micro-steps."""

    def __init__(self) -> None:
        self._sums: Any = 0.0
        self._squares: Any = 0.0
        self._rows = 0

    def add(self, sums: Any, squares: Any, rows: int) -> None:
        self._sums, self._squares, self._rows = self._sums + sums, self._squares + squares, self._rows + rows

    def best(self, moments: Numbers) -> tuple[float, Where]:
        """Returns the most significant gain and its place. moments: Sums over all layers and micro-steps."""
        if not self._rows:
            return 0.0, ("", 0, 0)
        layers = len(self._sums)
        error = np.sqrt(np.maximum(self._squares - self._sums**2 / self._rows, 1e-18))
        clear = self._sums > np.maximum(CLEARLY * (moments[2] - moments[1]) / layers, CERTAIN * error)
        gains = np.where(clear, self._sums / error, 0.0)
        layer, other = np.unravel_index(gains.argmax(), gains.shape)
        return (float(gains[layer, other]), ("layers", int(layer), int(other))) if gains.any() else (0.0, ("", 0, 0))
