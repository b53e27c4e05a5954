"""Row counts per expert: those of one rank, as passed to plan(), and those gathered from all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import foremoe
from foremoe._engine.communication import gathered, gathered_rows

MOST_ROWS = 2**31 - 1  # from one rank to one expert
Counts = np.ndarray[Any, np.dtype[np.int64]]


def checked_counts(counts: Any, layers: int, experts: int) -> Counts:
    """Returns counts as int64 [micro_steps, layers, experts]. Raises InputError for another shape, type or range."""
    array = counts.detach().cpu().numpy() if isinstance(counts, torch.Tensor) else np.asarray(counts)
    expected = f"integers [micro_steps, {layers}, {experts}]"
    if (
        array.dtype.kind not in "iu"
        or array.ndim != 3
        or array.shape[1] != layers
        or layers * array.shape[2] != layers * experts
    ):
        raise foremoe.InputError(f"counts: is {array.dtype} {list(array.shape)}; expected {expected}", field="counts")
    if not len(array):
        raise foremoe.InputError("counts: has no micro-step", field="counts")
    wrong = np.argwhere((array < 0) | (array > MOST_ROWS))
    if len(wrong):
        place = wrong[0].tolist()
        raise foremoe.InputError(
            f"counts{place}: {array[tuple(place)]} rows, expected 0 to {MOST_ROWS}", field="counts", index=str(place)
        )
    return array.astype(np.int64)


def gathered_counts(own: torch.Tensor, group: Any) -> Counts:
    """Gathers int64 [micro_steps, layers, ranks, experts]. Collective. own: int64 [micro_steps, layers, experts].

    Raises InputError, on all ranks of the group, if shapes differ between ranks or a dimension is 0.
    """
    shapes = gathered(torch.tensor(own.shape, device=own.device), group).tolist()
    if 0 in shapes[0] or any(shape != shapes[0] for shape in shapes):
        raise foremoe.InputError(
            f"counts: ranks have shapes {shapes} [micro-steps, layers, experts]; expected the same shape on all ranks. "
            "A rank with 0 has failed, or its chunks had unlike numbers of micro-batches",
            field="counts",
        )
    return gathered_rows(own, group, 2)
