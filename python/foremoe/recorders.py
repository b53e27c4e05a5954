"""Recorders: the routes that a rollout server returns with its responses become a Trace, or counts.

    from foremoe.recorders import Recorder, from_sglang, from_vllm

    recorder = Recorder(num_layers=48, num_experts=128, top_k=8)
    recorder.add(0, from_vllm(body))                          # a request is a sequence,
    recorder.add(1, from_sglang(first) + from_sglang(second, start_len=held))    # or the turns of a conversation are
    load = foremoe.collect(recorder.trace(), ranks=8)

from_vllm() and from_sglang() find routes, tokens and weight versions in a response. A Recorder checks them, joins the
segments of a sequence and counts. Routes are read by the importers behind foremoe.import_files(). No server is
imported.

Written from the sources of vLLM 0.33 and SGLang 0.5.23. Neither was run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _core
from ._core import Collector, Trace
from .importing import SourcePlace, decode_routes, refuse
from .segments import Segment, from_sglang, from_vllm

__all__ = ["Recorder", "Report", "Segment", "from_sglang", "from_vllm"]

Routes = npt.NDArray[np.integer[Any]]


@dataclass
class Report:
    """What a Recorder has read, summed over its sequences."""

    tokens: int = 0
    rows_missing: int = 0  # (token, layer) pairs without a route, less those of last tokens
    rows_differing: int = 0  # (token, layer) pairs that a later segment routes otherwise; the first segment's are kept
    starts_ignored: int = 0  # segments with all rows, though only those from a later token on were asked for
    unchecked: int = 0  # segments whose number of tokens is unknown
    weight_versions: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by sequence, as far as known

    @property
    def mixed(self) -> list[int]:
        """Sequences that weights of several versions generated, ascending."""
        return sorted(s for s, versions in self.weight_versions.items() if len(versions) > 1)


class Recorder:
    """Joins the segments of sequences as they finish, from any thread, and counts their routes.

    num_layers: layers that the server records; vLLM and SGLang record dense ones too. num_experts, top_k: of a layer.
    moe_layers: the layers to keep, ascending; None for all. The others must be without a route.
    missing: what becomes of tokens without a row and of rows without a route, save the last token's. "refuse" refuses
        the sequence, "mark" leaves missing rows.
    weight_versions: what becomes of a sequence that weights of several versions generated. "refuse" refuses it, "mark"
        names it in the report.
    keep_routes: for trace(). If False, what stays of a sequence are its counts.

    report: what was read so far. collector: the foremoe.Collector that counts.

    Raises InputError for arguments that cannot be.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        moe_layers: Sequence[int] | None = None,
        missing: Literal["refuse", "mark"] = "refuse",
        weight_versions: Literal["refuse", "mark"] = "refuse",
        keep_routes: bool = True,
    ) -> None:
        for name, answer in (("missing", missing), ("weight_versions", weight_versions)):
            if answer not in ("refuse", "mark"):
                refuse(name, f'is {answer!r}; expected "refuse" or "mark"')
        layers = range(num_layers)
        self._kept = list(layers if moe_layers is None else moe_layers)
        self._dense = sorted(set(layers) - set(self._kept))
        if self._kept != sorted(set(layers) - set(self._dense)):
            refuse("moe_layers", f"should be layers from 0 to {num_layers - 1}, ascending")
        self.collector = Collector(num_layers=len(self._kept), num_experts=num_experts, top_k=top_k)
        self.report = Report()
        self._recorded = {"experts": num_experts, "layers": num_layers, "top_k": top_k}
        self._row_shape = (len(self._kept), top_k)
        # As importers choose: the narrowest unsigned type whose largest value, of missing rows, is no expert.
        self._dtype: type[np.unsignedinteger[Any]] = np.uint8 if num_experts <= 0xFF else np.uint16
        self._missing, self._several_versions, self._keep_routes = missing, weight_versions, keep_routes
        self._lock = threading.Lock()
        self._routes: dict[int, Routes] = {}
        self._prompts: dict[int, int] = {}  # tokens of the first segment's prompt; −1: unknown

    def add(self, sequence: int, segments: Segment | Sequence[Segment]) -> Routes:
        """One finished sequence, number 0, 1, …: a segment, or several in order, such as the turns of a conversation.

        A segment's prompt begins with all tokens of the segments before it. Where several have a route of a token, the
        first one's is kept: under it the next token was sampled.

        Returns uint8 or uint16 [tokens, layers, top_k]; a missing row, such as the last token's, has the type's largest
        value everywhere. Raises InputError with sequence and segment for what does not fit; then nothing is kept.
        """
        name = f"sequence {sequence}"
        segments = [segments] if isinstance(segments, Segment) else list(segments)
        if not segments or not all(isinstance(segment, Segment) for segment in segments):
            refuse("segments", "should be a Segment, or a list of them", file=name)
        versions = tuple(dict.fromkeys(version for segment in segments for version in segment.weight_versions))
        if len(versions) > 1 and self._several_versions == "refuse":
            refuse("weight_versions", f"several generated it: {', '.join(versions)}", file=name)

        own = Report(weight_versions={sequence: versions})
        routes = self._join(name, segments, own)
        self.collector.add(sequence, routes)
        with self._lock:
            for figure in ("tokens", "rows_missing", "rows_differing", "starts_ignored", "unchecked"):
                setattr(self.report, figure, getattr(self.report, figure) + getattr(own, figure))
            self.report.weight_versions |= own.weight_versions
            prompt = segments[0].num_prompt_tokens
            self._prompts[sequence] = -1 if prompt is None else prompt
            if self._keep_routes:
                self._routes[sequence] = routes
        return routes

    def trace(
        self,
        *,
        group_ids: npt.NDArray[np.int32] | None = None,
        micro_step: npt.NDArray[np.int32] | None = None,
        rank: npt.NDArray[np.int32] | None = None,
        ranks: int | None = None,
        ranks_per_node: int | None = None,
        model: str = "",
    ) -> Trace:
        """All sequences, by number, when none is being added. Arguments are those of Trace.from_arrays().

        Its routes are a copy. Raises InputError where a number is missing, and where routes were not kept.
        """
        if not self._keep_routes:
            refuse("keep_routes", "is False: there are counts() and collector.load(), but no trace")
        lengths = self.collector.lengths()
        if len(lengths) == 0:
            refuse("sequence", "none was added")
        with self._lock:
            routes = [self._routes[s] for s in range(len(lengths))]
            prompts = np.array([self._prompts[s] for s in range(len(lengths))], np.int32)
        return Trace.from_arrays(
            np.concatenate(routes),
            np.concatenate([[0], np.cumsum(lengths)]),
            num_experts=self._recorded["experts"],
            prompt_lengths=prompts if (prompts >= 0).all() else None,
            group_ids=group_ids,
            layer_ids=np.array(self._kept, np.int32),
            micro_step=micro_step,
            rank=rank,
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            model=model,
        )

    def counts(self, micro_step: npt.NDArray[Any], *, num_micro_steps: int | None = None) -> npt.NDArray[np.int64]:
        """int64 [micro_steps, layers, experts], tokens, of one rank that runs sequence s in micro_step[s].

        micro_step: integers [sequences]. num_micro_steps: of the step; None for the largest + 1. collector.load() makes
        the load of several ranks. Raises InputError for entries out of range.
        """
        micro_step = np.asarray(micro_step)
        if micro_step.ndim != 1 or (len(micro_step) > 0 and micro_step.dtype.kind not in "iu"):
            refuse("micro_step", f"is {micro_step.dtype} {list(micro_step.shape)}; expected integers [sequences]")
        end = int(micro_step.max(initial=-1)) + 1 if num_micro_steps is None else num_micro_steps
        for s in np.flatnonzero((micro_step < 0) | (micro_step >= end))[:1]:
            refuse("micro_step", f"{micro_step[s]}, expected 0 to {end - 1}", index=f"[{s}]")
        counts = np.zeros((end, self._row_shape[0], self._recorded["experts"]), np.int64)
        steps, number = np.unique(micro_step, return_inverse=True)
        if len(micro_step) > 0 or self.collector.num_sequences > 0:
            load = self.collector.load(number.astype(np.int32), np.zeros(len(number), np.int32), ranks=1)
            counts[steps] = load.array[:, :, 0]
        return counts

    def _join(self, name: str, segments: Sequence[Segment], report: Report) -> Routes:
        read = self._read(name, segments)
        begins, num_tokens = [], []
        for i, (segment, rows) in enumerate(zip(segments, read, strict=True)):
            begin, tokens = self._place(f"{name}, segment {i}", segment, len(rows))
            report.starts_ignored += begin < segment.start
            report.unchecked += segment.num_tokens is None
            begins.append(begin)
            num_tokens.append(tokens)
        self._expect_continued(name, segments, num_tokens)

        routes = np.full((num_tokens[-1], *self._row_shape), np.iinfo(self._dtype).max, self._dtype)
        known = np.zeros(len(routes), bool)
        for begin, rows in zip(begins, read, strict=True):
            there = routes[begin : begin + len(rows)]
            new = _is_missing(there)
            report.rows_differing += int((~new & ~_is_missing(rows) & (there != rows).any(-1)).sum())
            there[new] = rows[new]
            known[begin : begin + len(rows)] = True
        report.tokens = len(routes)
        missing = _is_missing(routes[:-1])
        report.rows_missing = int(missing.sum())
        if self._missing == "refuse":
            self._expect_routed(name, known[:-1], missing)
        return routes

    def _read(self, name: str, segments: Sequence[Segment]) -> list[Routes]:
        """Of each segment the rows [rows, kept layers, top_k] that the response has."""
        sources = {}
        for i, segment in enumerate(segments):
            file = f"{name}, segment {i}"
            if segment.num_tokens is not None and segment.num_tokens - 1 == segment.start:
                continue  # it asked for none
            if segment.routed_experts is not None:
                sources[i] = decode_routes(segment.routed_experts, SourcePlace(file, "routed_experts"), self._recorded)
            elif self._missing == "refuse":
                refuse("routed_experts", "is missing: does the server record, and did the request finish?", file=file)
        read: list[Routes] = [np.empty((0, *self._row_shape), self._dtype) for _ in segments]
        if sources:
            trace = _core._import_sequences(list(sources.values()), self._recorded)
            for i, begin, end in zip(sources, trace.cu_seqlens[:-1], trace.cu_seqlens[1:], strict=True):
                read[i] = self._without_dense(sources[i].file, trace.routed_experts[begin:end])
        return read

    def _without_dense(self, file: str, rows: Routes) -> Routes:
        if not self._dense:
            return rows
        dense = rows[:, self._dense]
        routed = ~_is_missing(dense)
        if self._recorded["top_k"] == 1:
            routed &= dense[..., 0] != 0  # the zeros of a dense layer are a route there
        for token, layer in np.argwhere(routed)[:1]:
            index = f"[{token}, {self._dense[layer]}]"
            refuse("routed_experts", "has a route, but `moe_layers` leaves out its layer", file=file, index=index)
        return rows[:, self._kept]

    def _place(self, file: str, segment: Segment, num_rows: int) -> tuple[int, int]:
        """The first token that the rows are of, and the number of tokens."""
        if segment.num_tokens is None:
            if num_rows == 0:
                refuse("num_tokens", "is unknown, and there are no rows to tell it", file=file)
            return 0, num_rows + 1
        tokens, start = segment.num_tokens, segment.start
        if num_rows == tokens - 1 - start or segment.routed_experts is None:
            return start, tokens
        if num_rows != tokens - 1:
            expected = f"{tokens - 1 - start}" + (f", from token {start} on, or {tokens - 1}" if start > 0 else "")
            refuse("routed_experts", f"has {num_rows} rows for {tokens} tokens; expected {expected}", file=file)
        return 0, tokens

    def _expect_continued(self, name: str, segments: Sequence[Segment], num_tokens: Sequence[int]) -> None:
        """Raises InputError unless each prompt begins with the tokens of the segments before, as far as known."""
        before: npt.NDArray[np.int64] = np.empty(0, np.int64)
        for i, segment in enumerate(segments):
            file = f"{name}, segment {i}"
            prompt = num_tokens[i] if segment.num_prompt_tokens is None else segment.num_prompt_tokens
            if i > 0 and prompt < num_tokens[i - 1]:
                problem = (
                    f"{prompt}, but the segment before has {num_tokens[i - 1]} tokens, which must be in this prompt"
                )
                refuse("num_prompt_tokens", problem, file=file)
            if segment.token_ids is None:
                continue
            for t in np.flatnonzero(segment.token_ids[: len(before)] != before)[:1]:
                problem = f"{segment.token_ids[t]}, but {before[t]} in a segment before: it is another sequence"
                refuse("token_ids", problem, file=file, index=f"[{t}]")
            before = segment.token_ids

    def _expect_routed(self, name: str, known: npt.NDArray[np.bool_], missing: npt.NDArray[np.bool_]) -> None:
        """Raises InputError for the first token without a row, and for the first row without a route."""
        for token in np.flatnonzero(~known)[:1]:
            end = token + int(np.argmax(np.append(known[token:], True)))
            refuse("routed_experts", f"no segment has rows of tokens {token} to {end - 1}", file=name)
        for token, layer in np.argwhere(missing)[:1]:
            dense = "; is it of a dense layer? see `moe_layers`" if missing[:, layer].all() else ""
            index = f"[{token}, {self._kept[layer]}]"
            refuse("routed_experts", f"is no route{dense}", file=name, index=index)


def _is_missing(routes: Routes) -> npt.NDArray[np.bool_]:
    """bool [tokens, layers]; importers fill a missing row with the largest value."""
    missing: npt.NDArray[np.bool_] = routes[..., 0] == np.iinfo(routes.dtype).max
    return missing
