"""Loads and traces: collected, imported, drawn.

Keywords are the options of the command line, with the same defaults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

from . import _core
from ._core import Load, Trace
from ._keywords import given, remark, split, takes
from .files import Path, expect
from .options import CollectOptions, ImportOptions, SynthesisOptions


@takes(CollectOptions)
def collect(trace: Trace, **options: Unpack[CollectOptions]) -> Load:
    """Counts the tokens of a trace: its load. The routes are checked on the way.

    trace: What a rollout recorded.
    """
    expect(Trace, trace=trace)
    batching, _ = split(options)
    load = _core._collect(trace, batching, options.get("threads", 0))
    remark(load.remarks)
    return load


@takes(ImportOptions)
def import_files(paths: Path | Sequence[Path], **options: Unpack[ImportOptions]) -> tuple[Trace | Load, dict[str, Any]]:
    """Reads the routes that a rollout engine or trainer recorded, as `foremoe import` does: a trace, or a load of
    counts, and a report of what was read.

    paths: A file, or several in the order of their sequences.
    """
    expect(str | os.PathLike | Sequence, paths=paths)
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    return _core._import_files([os.fspath(path) for path in paths], dict(options))


@takes(SynthesisOptions)
def synthesize_load(**options: Unpack[SynthesisOptions]) -> Load:
    """Draws a load from a model of routing: grpo, zipf, dirichlet, or one of the stress workloads w0 to w7. The same
    keywords draw the same.
    """
    remark(_core._unused_of_synthesis(dict(options), given(synthesize_load, options)))
    return _core._synthesize_load(dict(options))


@takes(SynthesisOptions)
def synthesize_trace(**options: Unpack[SynthesisOptions]) -> Trace:
    """Draws a trace from a model of routing, as synthesize_load() draws a load."""
    remark(_core._unused_of_synthesis(dict(options), given(synthesize_trace, options)))
    return _core._synthesize_trace(dict(options))
