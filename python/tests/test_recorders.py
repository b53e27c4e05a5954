"""Recorders join segments to sequences, traces and counts."""

from __future__ import annotations

import base64
import gc
import json
import pathlib
import re
import sys
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest
from served import SHAPE, draw_rows, expect_routes, flat, npy, sglang_body, span, vllm_body

import foremoe
from foremoe.recorders import Recorder, Segment, from_sglang, from_vllm

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "users" / "recorders.md"


@pytest.mark.parametrize(
    ("engine", "read", "start", "moe_layers"),
    [("vllm", from_vllm, "prompt_start", range(1, 4)), ("sglang", from_sglang, "start_len", range(4))],
)
def test_responses_of_real_servers_have_the_routes_of_transformers(
    engine: str, read: Any, start: str, moe_layers: range
) -> None:
    """Two turns each of vLLM 0.29.0 and SGLang 0.5.23 on a CPU. transformers' routes have ascending experts."""
    recorded = json.loads((DOCUMENT.parents[2] / "python/tests/responses.json").read_text())[engine]
    segments = []
    for turn in recorded["turns"]:
        segments += read(turn["response"], **{start: turn["start"]}, prompt_token_ids=turn["prompt"])
    recorder = Recorder(num_layers=4, num_experts=16, top_k=4, moe_layers=moe_layers)
    expected = np.frombuffer(base64.b64decode(recorded["routes"]), np.uint8).reshape(-1, len(moe_layers), 4)
    expect_routes(np.sort(recorder.add(0, segments)), expected)
    assert (recorder.report.rows_differing, recorder.report.unchecked) == (0, 0)


# Starts and turns.


def conversation(starts: list[int], ignore: bool = False) -> tuple[np.ndarray, list[Segment]]:
    """Returns rows of all tokens but the last, and segments of three turns that end at tokens 6, 11 and 15."""
    rows, ids = draw_rows(14), list(range(100, 115))
    segments = []
    for start, prompt, end in zip(starts, (4, 8, 13), (6, 11, 15), strict=True):
        own = rows[0 if ignore else start : end - 1]
        body = (
            sglang_body(own, prompt, ids[prompt:end]) if prompt == 8 else vllm_body(own, ids[:prompt], ids[prompt:end])
        )
        if prompt == 8:
            segments += from_sglang(body, start_len=start, prompt_token_ids=ids[:prompt])
        else:
            segments += from_vllm(body, prompt_start=start)
    return rows, segments


@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 5, 10], [0, 3, 10], [0, 5, 1]])
@pytest.mark.parametrize("ignore", [False, True])
def test_turns_are_joined_even_if_the_server_ignores_their_start(starts: list[int], ignore: bool) -> None:
    rows, segments = conversation(starts, ignore)
    recorder = Recorder(**SHAPE)
    expect_routes(recorder.add(0, segments), rows)
    assert recorder.report.starts_ignored == (sum(start > 0 for start in starts) if ignore else 0)
    assert (recorder.report.rows_differing, recorder.report.rows_missing, recorder.report.tokens) == (0, 0, 15)
    assert list(recorder.trace().prompt_lengths) == [4]


def test_the_first_route_is_kept_if_turns_route_a_row_differently() -> None:
    rows, segments = conversation([0, 0, 0])
    later = rows[:10].copy()
    later[2] = (later[2] + 1) % 8  # token 2, all three layers
    later[4, 1] = (later[4, 1] + 1) % 8
    segments[1] = from_sglang(sglang_body(later, 8, [1, 2, 3]))[0]
    recorder = Recorder(**SHAPE)
    expect_routes(recorder.add(0, segments), rows)
    assert recorder.report.rows_differing == 4


def test_a_missing_route_is_taken_from_a_later_turn() -> None:
    rows, segments = conversation([0, 0, 0])
    first = rows[:5].copy()
    first[3, 1] = 0  # SGLang writes zeros for rows that it did not compute
    segments[0] = from_sglang(sglang_body(first, 4, [1, 2]))[0]
    recorder = Recorder(**SHAPE)
    expect_routes(recorder.add(0, segments), rows)
    assert (recorder.report.rows_differing, recorder.report.rows_missing) == (0, 0)


def test_tokens_without_rows_in_any_turn_are_rejected_or_missing() -> None:
    rows, segments = conversation([0, 7, 10])  # the first turn ends with row 4
    with pytest.raises(foremoe.InputError, match=r"sequence 3: routed_experts: no segment has rows of tokens 5 to 6$"):
        Recorder(**SHAPE).add(3, segments)
    recorder = Recorder(**SHAPE, missing="mark")
    routes = recorder.add(0, segments)
    assert (routes[5:7] == 255).all() and recorder.report.rows_missing == 2 * 3
    known = np.r_[0:5, 7:14]
    np.testing.assert_array_equal(routes[known], rows[known])
    assert foremoe.collect(recorder.trace(), ranks=1).array.sum() == rows[known].size

    segments[1] = Segment(None, num_tokens=11, num_prompt_tokens=8, start=5)  # aborted
    with pytest.raises(foremoe.InputError, match="sequence 0, segment 1: routed_experts: is missing"):
        Recorder(**SHAPE).add(0, segments)
    assert (Recorder(**SHAPE, missing="mark").add(0, segments)[5:10] == 255).all()


def test_a_turn_that_does_not_continue_the_previous_one_is_rejected() -> None:
    _, segments = conversation([0, 5, 10])
    ids = np.array(segments[1].token_ids)
    ids[4] = 1
    other = Segment(segments[1].routed_experts, 11, 8, ids, start=5)
    with pytest.raises(foremoe.InputError, match=r"sequence 0, segment 1: token_ids\[4\]: 1, but 104") as raised:
        Recorder(**SHAPE).add(0, [segments[0], other, segments[2]])
    assert (raised.value.file, raised.value.field, raised.value.index) == ("sequence 0, segment 1", "token_ids", "[4]")
    choices = [
        *from_vllm(vllm_body(draw_rows(6), [1] * 4, [1] * 3)),
        *from_vllm(vllm_body(draw_rows(6), [1] * 4, [1] * 3)),
    ]
    with pytest.raises(foremoe.InputError, match="num_prompt_tokens: 4, but the segment before has 7"):
        Recorder(**SHAPE).add(0, choices)


def test_a_request_without_new_rows_needs_no_routes() -> None:
    rows = draw_rows(7)
    first = from_vllm(vllm_body(rows[:6], [1] * 4, [1] * 3))
    for nothing in (None, "", npy(rows[:0])):  # the response adds only the last token, which has no row
        last = from_vllm(vllm_body(nothing, [1] * 7, [1]), prompt_start=7)
        routes = Recorder(**SHAPE, missing="mark").add(0, first + last)
        np.testing.assert_array_equal(routes[:6], rows[:6])
        assert (routes[6:] == 255).all() and len(routes) == 8


def test_sequences_with_several_weight_versions_are_rejected_or_reported() -> None:
    rows = draw_rows(6)
    within = from_vllm(vllm_body(rows, [1] * 4, [1] * 3, weight_versions=[span("7", 0, 2), span("8", 2, 3)]))
    over = [from_sglang(sglang_body(rows[:n], 4, [1] * (n - 3), weight_version=v))[0] for n, v in ((3, "a"), (6, "b"))]
    over[1] = from_sglang(sglang_body(rows, 4, [1] * 3, weight_versions=[span("b", 0, 3)], weight_version="b"))[0]
    same = from_vllm(vllm_body(rows, [1] * 4, [1] * 3, weight_versions=[span("8", 0, 3)]))
    recorder = Recorder(**SHAPE, weight_versions="mark")
    for s, (segments, names) in enumerate([(within, "7, 8"), (over, "a, b")]):
        with pytest.raises(
            foremoe.InputError, match=f"sequence {s}: weight_versions: several versions generated it: {names}"
        ):
            Recorder(**SHAPE).add(s, segments)
        recorder.add(s, segments)
    recorder.add(2, same)
    Recorder(**SHAPE).add(0, same)
    assert recorder.report.mixed == [0, 1] and recorder.report.weight_versions[2] == ("8",)


# Rows without a route.


def test_rows_without_a_route_are_rejected_or_missing() -> None:
    rows = draw_rows(6, dtype=np.int16)
    rows[2, 1] = -1
    rows[4, 2] = 3  # this row now has expert 3 twice
    body = vllm_body(rows, [1] * 4, [1] * 3)
    with pytest.raises(foremoe.InputError, match=r"sequence 0: routed_experts\[2, 1\]: is no route$"):
        Recorder(**SHAPE).add(0, from_vllm(body))
    recorder = Recorder(**SHAPE, missing="mark")
    routes = recorder.add(0, from_vllm(body))
    assert recorder.report.rows_missing == 2
    assert sorted(map(tuple, np.argwhere((routes[:6] == 255).all(-1)))) == [(2, 1), (4, 2)]
    assert recorder.counts(np.array([0])).sum() == (6 * 3 - 2) * 2


@pytest.mark.parametrize("top_k", [1, 2])
def test_named_dense_layers_are_left_out(top_k: int) -> None:
    rows = draw_rows(6, layers=4, top_k=top_k)
    rows[:, [0, 2]] = 0  # SGLang writes zeros for dense layers
    body = sglang_body(rows, 4, [1] * 3)
    shape = {"num_layers": 4, "num_experts": 8, "top_k": top_k}
    if top_k == 2:
        with pytest.raises(foremoe.InputError, match=r"routed_experts\[0, 0\]: is no route; .* dense layer"):
            Recorder(**shape).add(0, from_sglang(body))
    recorder = Recorder(**shape, moe_layers=[1, 3])
    expect_routes(recorder.add(0, from_sglang(body)), rows[:, [1, 3]])
    assert list(recorder.trace().layer_ids) == [1, 3] and recorder.counts(np.array([0])).shape == (1, 2, 8)
    rows[5, 2] = range(1, top_k + 1)
    with pytest.raises(foremoe.InputError, match=r"segment 0: routed_experts\[5, 2\]: has a route"):
        Recorder(**shape, moe_layers=[1, 3]).add(0, from_sglang(sglang_body(rows, 4, [1] * 3)))


# Malformed input.

WHOLE = draw_rows(6)
TRUNCATED = base64.b64encode(base64.b64decode(npy(WHOLE))[:-1]).decode()


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (npy(WHOLE[:5]), "has 5 rows for 7 tokens; expected 6"),
        (npy(draw_rows(7)), "has 7 rows for 7 tokens"),
        (npy(WHOLE[:, :2]), "has 2 layers, but 3 were asked for"),
        (npy(draw_rows(6, top_k=3)), "has 3 experts per token, but 2 were asked for"),
        (npy(draw_rows(6, experts=9)), "[0, 0, 1]: expert 8 is out of range"),
        (npy(WHOLE.astype(np.float32)), "<f4 is not a little-endian integer type"),
        (npy(WHOLE.astype(">i4")), ">i4 is not a little-endian integer type"),
        (npy(WHOLE[0]), "has 2 axes"),
        (npy(WHOLE[:0]), "has no tokens"),
        (npy(WHOLE)[:-4], "bytes"),
        (TRUNCATED, "but there are 35 bytes"),
        (npy(WHOLE)[:-1], "base64"),
        ("no base64!", "base64"),
        ("", "has no tokens"),
        (flat(WHOLE.ravel()[:-1]), "140 bytes are no whole number of tokens"),
        ([*WHOLE.tolist()[:-1], [[1, 2]]], "has 1 layers instead of 3"),
        ([*WHOLE.tolist()[:-1], [[1, 2], [3], [4, 5]]], "should be a list of 2 experts"),
        ([*WHOLE.tolist()[:-1], [[1, 2], [3, 0.5], [4, 5]]], "[5, 1, 1]"),
        (WHOLE.astype(np.float32), "float32 [6, 3, 2]"),
        (WHOLE.ravel(), "uint8 [36]; expected integers [rows, layers, top_k]"),
        (5, "int64 []"),
        (None, "is missing"),
    ],
)
def test_malformed_routes_are_rejected_with_sequence_and_segment(routes: Any, words: str) -> None:
    recorder = Recorder(**SHAPE)
    with pytest.raises(foremoe.InputError) as raised:
        recorder.add(4, Segment(routes, 7, 4))
    assert words in str(raised.value)
    assert raised.value.file == "sequence 4, segment 0" and "routed_experts" in raised.value.field
    assert recorder.collector.num_sequences == 0 and recorder.report.tokens == 0


def test_sequence_numbers_must_be_unique_and_complete() -> None:
    recorder = Recorder(**SHAPE)
    recorder.add(1, Segment(npy(WHOLE)))
    with pytest.raises(foremoe.InputError, match="sequence 1: finished twice"):
        recorder.add(1, Segment(npy(WHOLE)))
    with pytest.raises(foremoe.InputError, match="sequence 0: has not finished"):
        recorder.trace()
    recorder.add(0, Segment(npy(WHOLE)))
    with pytest.raises(foremoe.InputError, match=r"micro_step\[1\]: 3, expected 0 to 2"):
        recorder.counts(np.array([0, 3]), num_micro_steps=3)
    assert recorder.trace().num_tokens == recorder.report.tokens == 14


# Counts.


def test_counts_match_the_routes_even_if_these_are_not_kept() -> None:
    recorder = Recorder(**SHAPE, keep_routes=False)
    rows = [draw_rows(4 + s, s) for s in range(6)]

    def add(numbers: range) -> None:
        for s in numbers:
            recorder.add(s, from_vllm(vllm_body(rows[s], [1] * 3, [1] * (2 + s))))

    threads = [threading.Thread(target=add, args=(range(first, 6, 2),)) for first in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    micro_step, rank = np.array([3, 0, 3, 1, 0, 3], np.int32), np.array([0, 1, 1, 0, 0, 0], np.int32)
    expected = np.zeros((5, 3, 2, 8), np.int64)  # micro-steps 2 and 4 are idle
    for s, own in enumerate(rows):
        for token in own:
            for layer, row in enumerate(token):
                for expert in row:
                    expected[micro_step[s], layer, rank[s], expert] += 1
    np.testing.assert_array_equal(recorder.counts(micro_step, num_micro_steps=5), expected.sum(2))
    np.testing.assert_array_equal(recorder.counts(micro_step), expected[:4].sum(2))
    np.testing.assert_array_equal(recorder.collector.load(micro_step, rank, ranks=2).array, expected[:4])
    assert recorder.report.tokens == recorder.collector.lengths().sum() == sum(len(own) + 1 for own in rows)
    assert Recorder(**SHAPE).counts(np.array([], np.int32), num_micro_steps=2).shape == (2, 3, 8)

    routes = weakref.ref(recorder.add(6, Segment(npy(WHOLE))))
    gc.collect()
    assert routes() is None


# The documented example.


class Server:
    """Fake of vLLM and SGLang that returns drawn routes and stores them in `rows` by token sequence."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], np.ndarray] = {}

    def post(self, url: str, json: dict[str, Any]) -> types.SimpleNamespace:
        prompt = json.get("prompt", json.get("input_ids"))
        generated = [len(prompt) + 1, len(prompt) + 2]
        every = draw_rows(64, prompt[0], layers=48, experts=128, top_k=8)[: len(prompt) + 1]  # by position
        self.rows[(*prompt, *generated)] = every
        if url.endswith("/v1/completions"):
            assert json["return_token_ids"] and json["return_weight_versions"]
            body = vllm_body(every, prompt, generated, weight_versions=[span("default", 0, 2)])
        else:
            assert url.endswith("/generate") and json["return_routed_experts"]
            body = sglang_body(every[json["routed_experts_start_len"] :], len(prompt), generated, weight_version="1")
        return types.SimpleNamespace(content=_dumped(body), json=lambda: body)


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def test_the_documented_code_works(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, sglang, counting = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    server = Server()
    monkeypatch.setitem(sys.modules, "requests", server)
    names: dict[str, Any] = {
        "prompts": [[7, 8, 9], [5, 6], [3, 1, 4, 1, 5]],
        "model": "m",
        "server": "http://localhost",
    }
    exec(vllm, names)
    counts = np.zeros((48, 128), np.int64)
    for rows in server.rows.values():
        for layer in range(48):
            counts[layer] += np.bincount(rows[:, layer].ravel(), minlength=128)
    np.testing.assert_array_equal(names["load"].array.sum((0, 2)), counts)
    assert foremoe.check(names["plan"], names["load"]) == [] and names["trace"].num_tokens == 3 + 2 + 5 + 3 * 2

    server.rows.clear()
    names["observations"] = [[[20, 21], []], [[30], [31, 32, 33], []], [[]]]
    exec(sglang, names)
    exec(counting, names)
    assert list(names["recorder"].collector.lengths()) == [3 + 2 + 2 + 2, 2 + 2 + 1 + 2 + 3 + 2, 5 + 2]
    last = [
        rows for ids, rows in server.rows.items() if not any(ids == other[: len(ids)] != other for other in server.rows)
    ]
    expected = sum(np.bincount(rows[:, 5].ravel(), minlength=128) for rows in last)
    np.testing.assert_array_equal(names["load"].array[:, 5].sum((0, 1)), expected)
    np.testing.assert_array_equal(names["counts"].sum(0)[5], expected)
