"""Collects, imports and draws loads and traces. Options are those of the command line (foremoe.options)."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Unpack

from . import _core
from ._core import Load, Trace
from ._files import Path, expect
from ._importing import decoder
from .options import ImportOptions, SynthesisOptions, expect_options


def collect(
    trace: Trace,
    *,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    tokens_per_rank: int | None = None,
    threads: int = 0,
) -> Load:
    """Counts the tokens of a trace and returns its load. Also checks the routes.

    Args:
        trace: Routes that a rollout recorded.
        ranks: Ranks of the expert-parallel group. None: as recorded. A trace recorded for another number of ranks is
            batched again.
        ranks_per_node: Ranks that share one fast interconnect. None: as recorded; 8 if the trace is batched again.
        tokens_per_rank: Bound on a rank's tokens in one micro-step, if the trace is batched again. A token counts once,
            for any number of experts. None: 8192.
        threads: Number of threads; 0 for one per processor. The result does not depend on it.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`, and for invalid routes.
    """
    expect(Trace, trace=trace)
    expect(Integral, threads=threads)
    batching = {"ranks": ranks, "ranks_per_node": ranks_per_node, "tokens_per_rank": tokens_per_rank}
    load = _core._collect(trace, batching, threads)
    for remark in load.remarks:
        logging.getLogger("foremoe").warning(remark)
    return load


def pack(
    trace: Trace,
    ranks: int,
    tokens_per_rank: int,
    mini_batches: int = 1,
    effort: int = 0,
    *,
    threads: int = 0,
) -> Trace:
    """Chooses which sequences share a micro-step, and on which rank, as `foremoe pack` does.

    Keeps the experts of every micro-step close to the step's, so that guests chosen once per step serve all
    micro-steps, and balances the work of dense layers over ranks. See `foremoe pack --help-all`.

    Args:
        trace: Routes that a rollout recorded.
        ranks: Ranks of the expert-parallel group; must divide the experts.
        tokens_per_rank: Maximum tokens of a rank in one micro-step. A token counts once.
        mini_batches: Number of mini-batches: equal runs of recorded micro-steps, or of sequences if none are recorded.
            No sequence leaves its mini-batch.
        effort: Maximum number of sweeps that try to move and exchange every sequence; 0: until no change improves.
        threads: Number of threads; 0 for one per processor. The result does not depend on it.

    Returns:
        The trace with other `micro_step` and `rank`. It shares the routes, and sequences keep their order.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`, a sequence longer than tokens_per_rank,
            and for invalid routes.
    """
    expect(Trace, trace=trace)
    expect(Integral, threads=threads)
    options = {"ranks": ranks, "tokens_per_rank": tokens_per_rank, "mini_batches": mini_batches, "effort": effort}
    packed, remarks = _core._pack(trace, options, threads)
    for remark in remarks:
        logging.getLogger("foremoe").warning(remark)
    return packed


def import_files(paths: Path | Sequence[Path], **options: Unpack[ImportOptions]) -> tuple[Trace | Load, dict[str, Any]]:
    """Reads the routes that a rollout engine or trainer recorded, as `foremoe import` does.

    Samples that are aborted, damaged, or contradict their token counts are skipped, unless strict=True. The report
    lists them, and a warning is logged.

    Args:
        paths: A file, or several in the order of their sequences.
        **options: foremoe.options.ImportOptions.

    Returns:
        A trace, or a load of counts, and a report of what was read.

    Raises:
        InputError: for an invalid file, with file, field and index, or an invalid option.
    """
    expect(str | os.PathLike | Sequence, paths=paths)
    expect_options(ImportOptions, "import_files", options)
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    imported, report = _core._import_files([os.fspath(path) for path in paths], dict(options), decoder(options))
    if report["samples_skipped"]:
        logging.getLogger("foremoe").warning(next(note for note in report["notes"] if "samples were skipped" in note))
    return imported, report


def synthesize_load(**options: Unpack[SynthesisOptions]) -> Load:
    """Draws a load from a model of routing: grpo, zipf, dirichlet, or one of the stress workloads w0 to w7.

    The same options draw the same load.

    Args:
        **options: foremoe.options.SynthesisOptions.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`.
    """
    expect_options(SynthesisOptions, "synthesize_load", options)
    return _core._synthesize_load(dict(options))


def synthesize_trace(**options: Unpack[SynthesisOptions]) -> Trace:
    """Draws a trace from a model of routing, as synthesize_load() draws a load."""
    expect_options(SynthesisOptions, "synthesize_trace", options)
    return _core._synthesize_trace(dict(options))
