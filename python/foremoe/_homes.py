"""Chooses the ranks that own the experts of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from . import _core
from ._core import Homes, Trace
from ._errors import InputError
from ._files import Path, expect


def read_homes(path: Path) -> Homes:
    """Reads a foremoe.homes/1 file. Raises InputError, with file, field and index, if the file contains no homes."""
    expect(str | os.PathLike, path=path)
    return _core._read_homes(path)


def choose_homes(
    traces: Trace | Sequence[Trace],
    *,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    tokens_per_rank: int | None = None,
    holdout: float | Trace | None = None,
    balance: float | None = None,
    sweeps: int | None = None,
    sample: int | None = None,
    seed: int | None = None,
    threads: int = 0,
) -> tuple[Homes, dict[str, Any]]:
    """Chooses homes by co-activation and load, once per run, as `foremoe homes` does.

    Args:
        traces: Recorded routes, one trace or several with the same shape.
        ranks: Ranks of the expert-parallel group. None: as recorded.
        ranks_per_node: Ranks that share one fast interconnect. None: as recorded; 8 if a trace is batched again.
        tokens_per_rank: See collect().
        holdout: Routes that judge the choice but that it does not see: a fraction of the groups of each trace (of the
            sequences, without groups), or a trace.
        balance: Load of a node above its share that costs nothing, as a fraction of the share. None: 0.2.
        sweeps: Exchanges to try, in multiples of the number of pairs of experts. None: 20.
        sample: Largest number of tokens per layer that the search uses. None: 131072.
        seed: Random seed. None: 0.
        threads: Number of threads; 0 for one per processor. The result does not depend on it.

    Returns:
        The homes, for the argument `homes` of plan() and others, and the report of `foremoe homes --json` without
        `out`.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`, and for invalid routes.
    """
    expect(Trace | Sequence, traces=traces)
    expect(Real | Trace | None, holdout=holdout)
    expect(Integral, threads=threads)
    given = [traces] if isinstance(traces, Trace) else list(traces)
    if not given:
        raise InputError("traces: is empty", field="traces")
    for i, trace in enumerate(given):
        expect(Trace, **{f"traces[{i}]": trace})
    other = holdout if isinstance(holdout, Trace) else None
    fraction = 0.0 if other is not None or holdout is None else float(holdout)  # type: ignore[arg-type]
    if holdout is not None and other is None and not 0 < fraction < 1:
        raise InputError(f"holdout: {fraction}, expected a fraction above 0 and below 1, or a trace", field="holdout")
    options = {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens_per_rank": tokens_per_rank,
        "balance": balance,
        "sweeps": sweeps,
        "sample": sample,
        "seed": seed,
    }
    return _core._choose_homes(given, fraction, other, options, threads)
