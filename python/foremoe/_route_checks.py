"""Checks captured routes, as `foremoe routes check` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from ._core import Trace
from ._decoding import distinct_labels
from ._errors import InputError
from ._importing import decoder


@dataclass(frozen=True)
class RouteFinding:
    """A fault of captured routes at its first place, with cause and remedy. None: not one place."""

    check: str
    layer: int | None
    sequence: int | None
    token: int | None
    """Index in the sequence."""
    count: int
    cause: str
    remedy: str


def check_routes(
    routes: Any,
    *,
    cu_seqlens: Any = None,
    attention_mask: Any = None,
    lengths: Sequence[int] | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    layers: int | None = None,
    dense_layers: int = 0,
    weight_versions: Sequence[Any] | None = None,
) -> list[RouteFinding]:
    """Finds damage in captured routes before they are replayed. `foremoe routes check --help-all` lists the checks.

    Args:
        routes: A trace, or integers (numpy or torch) [tokens, layers, top_k] or, padded, [sequences, tokens, layers,
            top_k]. −1 in rows without a route.
        cu_seqlens: Integers [sequences + 1], first token of each sequence. None: one sequence, or those of `routes`.
        attention_mask: Integers or bools, one per token, 0 for padding, which must have no route.
        lengths: Tokens of each sequence. The last one may have no row.
        num_experts: Experts per layer. None: the trace's, or the largest id + 1.
        top_k: Expected experts per token.
        layers: Expected layers with experts.
        dense_layers: Layers of the model without experts.
        weight_versions: Version of the weights that sampled each sequence, or a list of several; None: unknown.

    Returns:
        One finding per kind of fault; an empty list if nothing was found.

    Raises:
        InputError: for a wrong dtype or shape, with the argument as field.
    """
    trace = routes if isinstance(routes, Trace) else _trace_of(_array(routes), cu_seqlens, num_experts)
    found = _core._check_trace(
        trace,
        experts=num_experts or 0,
        layers=layers or 0,
        dense_layers=dense_layers,
        top_k=top_k or 0,
        lengths=[] if lengths is None else [int(length) for length in lengths],
        attention_mask=[] if attention_mask is None else (_array(attention_mask).ravel() != 0).astype("u1").tolist(),
        weight_versions=[_distinct(of) for of in ([] if weight_versions is None else weight_versions)],
    )
    return [RouteFinding(**of) for of in found["findings"]]


def _distinct(versions: Any) -> tuple[str, ...]:
    several = versions if isinstance(versions, list | tuple) else [] if versions is None else [versions]
    return distinct_labels(several)


def _array(values: Any) -> Any:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _trace_of(routes: Any, cu_seqlens: Any, num_experts: int | None) -> Trace:
    if routes.dtype.kind not in "iu" or routes.ndim not in (3, 4):
        problem = f"has {routes.dtype} and shape {list(routes.shape)}; expected integers [tokens, layers, top_k]"
        raise InputError(f"routes: {problem}", field="routes")
    if routes.ndim == 4:
        cu_seqlens = np.arange(routes.shape[0] + 1) * routes.shape[1]
        routes = routes.reshape(-1, *routes.shape[2:])
    if cu_seqlens is None:
        cu_seqlens = [0, len(routes)]
    if routes.dtype.kind == "u":  # the largest value marks rows without a route, and may be an expert
        most = np.iinfo(routes.dtype).max
        marks = routes == most
        if num_experts is None or num_experts > most:
            marks = marks & (marks.all(-1, keepdims=True) & (routes.shape[2] > 1 or num_experts is None))
        routes = np.where(marks, -1, routes.astype("i8"))
    if routes.size and (routes.max() >= 2**31 or routes.min() < -(2**31)):
        raise InputError("routes: an expert id exceeds 32 bits", field="routes")
    experts = num_experts or max(int(routes.max(initial=0)) + 1, routes.shape[2])
    return Trace.from_arrays(
        np.ascontiguousarray(routes, "i4"), np.asarray(_array(cu_seqlens), "i8"), num_experts=experts
    )


def main(arguments: Sequence[str]) -> int:
    """Continues `foremoe routes check`. arguments: A JSON request, then the files."""
    from ._command_line import FOUND_WRONG, OK, printable, reporting

    request, *files = arguments
    asked = json.loads(request)

    def run() -> int:
        lines, as_json = _core._check_route_files(files, asked["options"], decoder(asked["options"]))
        print(as_json if asked["json"] else "\n".join(map(printable, lines)))
        return OK if json.loads(as_json)["ok"] else FOUND_WRONG

    names = [option["name"] for option in _core._option_tables()["import"]]
    return reporting("foremoe routes", {name: f"--{name.replace('_', '-')}" for name in names}, run)
