"""Imports formats that Python programs write. Errors name the position in the file."""

from __future__ import annotations

import base64
import io
import json
import os
import pathlib
import resource
import struct
import subprocess
import sys
import zipfile
from typing import Any

import numpy as np
import pytest
from served import described, with_weights

import foremoe
from foremoe import _core
from foremoe._importing import decoder

Rows = list[list[list[int]]]
A: Rows = [[[4, 1]]]
B: Rows = [[[5, 6]], [[7, 8]]]


def npy(rows: Any, dtype: str = "u1") -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(rows, dtype))
    return out.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def flat(rows: Any) -> str:
    return text(np.array(rows, "<i4").tobytes())


def npz(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.fixture
def imported(tmp_path: pathlib.Path) -> Any:
    def of(*contents: str | bytes, **options: Any) -> tuple[Any, list[int], dict[str, Any]]:
        """Returns routes, with −1 in missing rows, the first token of each sequence, and the report."""
        paths = []
        for i, content in enumerate(contents):
            paths.append(tmp_path / f"{i}.in")
            paths[-1].write_bytes(content.encode() if isinstance(content, str) else content)
        trace, report = foremoe.import_files(paths, **options)
        assert isinstance(trace, foremoe.Trace)
        routes = trace.routed_experts.astype(int)
        routes[routes == np.iinfo(trace.routed_experts.dtype).max] = -1
        return routes.tolist(), trace.cu_seqlens.tolist(), report

    return of


def test_each_format_is_detected_and_read(imported: Any) -> None:
    lines = "\n\n".join([text(npy(A)), text(npy(B, "<u2")) + "\r\n"])
    envelope = f"nrlre1:int16:2x1x2:{text(np.array(B, '<i2').tobytes())}\nnrlre1:int8:1x1x2:{text(bytes([255, 255]))}"
    shape = {"layers": 1, "top_k": 2}
    for content, options, expected in [
        (npz({"z.npy": npy(A), "a.npy": npy(B, "<u2")}), {}, ("npz", [*A, *B], [0, 1, 3])),
        (npz({"z.npy": npy(A)}, zipfile.ZIP_STORED), {}, ("npz", A, [0, 1])),
        (npz({"tokens.npy": npy([40], "<i8"), "routed_experts.npy": npy(A)}), {}, ("npz", A, [0, 1])),
        (lines, {}, ("npy-base64", [*A, *B], [0, 1, 3])),
        (envelope, {}, ("nrlre1", [*B, [[-1, -1]]], [0, 2, 3])),
        (np.array(B, "<i4").tobytes(), shape, ("sglang", B, [0, 2])),
        (flat([*B, [[0, 0]]]), shape, ("sglang", [*B, [[-1, -1]]], [0, 3])),
        (json.dumps({"choices": [{"routed_experts": text(npy(A))}, {"routed_experts": text(npy(B))}]}), {},
         ("json", [*A, *B], [0, 1, 3])),
    ]:  # fmt: skip
        routes, begins, report = imported(content, **options)
        assert (report["format"], routes, begins) == expected


def test_fortran_order_and_several_formats_may_be_mixed(imported: Any) -> None:
    out = io.BytesIO()
    np.save(out, np.asfortranarray(np.array(B, "<i8")))
    routes, begins, report = imported(npy(A), npz({"a.npy": out.getvalue()}), json.dumps({"routed_experts": A}))
    assert (routes, begins) == ([*A, *B, *A], [0, 1, 3, 4])
    assert "the files are of several formats: npy, npz, json" in report["notes"]


def test_responses_of_each_server_are_read(imported: Any) -> None:
    shape = {"layers": 2, "top_k": 2}
    one, of_two = [[[1, 2], [0, 0]]], [[[1, 2], [-1, -1]]]
    for response in (
        {"text": "", "meta_info": {"routed_experts": flat(one)}},
        {"choices": [{"sgl_ext": {"routed_experts": flat(one)}}]},
        {"choices": [{}], "sglext": {"routed_experts": flat(one)}},
        {"outputs": [{"routed_experts": one}]},
        {"routed_experts": f"nrlre1:int8:1x2x2:{text(bytes([1, 2, 0, 0]))}"},
        {"text": "", "meta_info": {"routed_experts": flat(one), "expert_logits": "zczMPc3MTD4AAAAAAAAAAA=="}},
        {"choices": [{"token_ids": [7], "routed_experts": described(np.array(one, "u1"))}]},
    ):
        assert imported(json.dumps(response), **shape)[0] == of_two, response
    lines = json.dumps({"routed_experts": A}) + "\n" + json.dumps({"outputs": [{"routed_experts": B}]}) + "\n"
    assert imported(lines)[0] == [*A, *B]
    assert imported(json.dumps([{"routed_experts": B}, {"routed_experts": A}]))[0] == [*B, *A]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32"])
def test_objects_of_skyrl_and_prime_rl_are_read(imported: Any, dtype: str) -> None:
    rows = np.array([[[200, 1], [3, 0]], [[0, 2], [5, 6]]], dtype)
    skyrl = described(rows)
    prime_rl = described(with_weights(rows) if dtype == "int32" else rows, start=0)
    for value in (skyrl, prime_rl):
        routes, begins, report = imported(json.dumps({"choices": [{"routed_experts": value}] * 2}))
        assert (routes, begins, report["format"]) == ([*rows.tolist(), *rows.tolist()], [0, 2, 4], "json")
    if dtype == "uint8":
        del prime_rl["dtype"]  # older prime-rl
        assert imported(json.dumps({"choices": [{"routed_experts": prime_rl}]}))[0] == rows.tolist()


def test_rows_that_prime_rl_has_not_recorded_are_missing(imported: Any) -> None:
    packed = with_weights(np.array([[[2, 1], [0, 0]]]))
    packed[0, 1] = 0  # a dense layer
    assert imported(json.dumps({"routed_experts": described(packed, start=0)}))[0] == [[[2, 1], [-1, -1]]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": None}, "data: should be a string, not null"),
        ({"data": "AAA"}, "data: is not base64"),
        ({"data": "\ud800"}, "data: is not base64"),
        ({"data": "AAAA"}, "[2, 1, 4] of 4 bytes each was claimed, but there are 3 bytes"),
        ({"shape": [2, 1, 3]}, "[2, 1, 3] of 4 bytes each"),
        ({"shape": [2, 4]}, "shape: should be [tokens, layers, top_k], not [2, 4]"),
        ({"shape": [2, 1, -4]}, "shape: should be"),
        ({"shape": [2, True, 4]}, "shape: should be"),
        ({"shape": [2.0, 1, 4]}, "shape: should be"),
        ({"shape": "214"}, "shape: should be"),
        ({"shape": [0, 1, 4], "data": ""}, "has no tokens"),
        ({"shape": [10**30, 10**30, 10**30]}, "of 4 bytes each was claimed"),
        ({"shape": [2, 0, 4], "data": ""}, "routed_experts: "),
        ({"dtype": "float32"}, 'dtype "float32" is unknown'),
        ({"dtype": ["int32"]}, "dtype \"['int32']\" is unknown"),
        ({"shape": [8, 1, 1]}, "has rows of 1 int32; expected as many routing weights as experts"),
        ({"shape": [1, 1, 8]}, "routed_experts[0, 0, 4]: 2 are no bits of a routing weight"),
        ({"start": 5}, "start: is token 5: earlier rows are in other responses, which foremoe.recorders joins"),
        ({"start": "x"}, "start: is token 'x'"),
    ],
)
def test_damaged_objects_are_rejected_with_their_position(imported: Any, change: dict[str, Any], words: str) -> None:
    good = described(with_weights(np.array([[[4, 1]], [[2, 3]]])), start=0)
    with pytest.raises(foremoe.InputError) as raised:
        imported(json.dumps({"choices": [{"routed_experts": good | change}]}))
    assert "0.in: choices[0]: routed_experts" in str(raised.value)
    assert words in str(raised.value)


def test_vllm_0_21_puts_the_prompt_before_each_choice(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "in"
    prompt = [[[-1, -1]], [[1, 2]]]
    path.write_text(
        json.dumps({"prompt_routed_experts": prompt, "choices": [{"routed_experts": A}, {"routed_experts": []}]})
    )
    trace, report = foremoe.import_files(path)
    assert isinstance(trace, foremoe.Trace) and trace.prompt_lengths is not None
    assert (trace.cu_seqlens.tolist(), trace.prompt_lengths.tolist()) == ([0, 3, 5], [2, 2])
    assert report["rows_recorded_missing"] == 2
    path.write_text(json.dumps([{"prompt_routed_experts": A, "routed_experts": A}, {"routed_experts": A}]))
    assert foremoe.import_files(path)[0].prompt_lengths is None  # type: ignore[union-attr]


def test_last_tokens_without_a_row_are_counted_if_the_response_has_token_counts(imported: Any) -> None:
    choice = {"routed_experts": text(npy([*A, *B]))}  # of four tokens
    usage = {"usage": {"prompt_tokens": 1, "completion_tokens": 3}}
    for response, expected in [
        (usage | {"choices": [choice]}, 1),
        ({"prompt_token_ids": [9], "choices": [choice | {"token_ids": [9, 9, 9]}]}, 1),
        ({"prompt_token_ids": [9, 9], "token_ids": [9, 9]} | choice, 1),
        (usage | {"choices": [choice, choice]}, 0),
        (choice, 0),
        ({"token_ids": [1, 2, 3]} | choice, 0),
        ({"usage": {"prompt_tokens": 2**64 - 1, "completion_tokens": 3}, "choices": [choice]}, 0),
    ]:
        assert imported(json.dumps(response))[2]["last_tokens_without_route"] == expected, response


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (text(npy(A)) + "\n" + text(npy(A))[1:], {}, "0.in: line 2: is not base64"),
        ("nrlre1:int8:1x1x2:AAE=\nnrlre1:int8:1x1x2", {}, "0.in: line 2: should be nrlre1:"),
        ("nrlre1:int8:1x1x2:AAE=\nnrlre2:int8:1x1x2:AAE=", {}, '0.in: line 2: begins with "nrlre2"'),
        ("nrlre1:bfloat16:1x1x2:AAE=", {}, '0.in: line 1: dtype "bfloat16"'),
        ("nrlre1:int8:1x2:AAE=", {}, "0.in: line 1: shape"),
        ("nrlre1:int8:1x1x2x1:AAE=", {}, "0.in: line 1: shape"),
        ("nrlre1:int8:9999999x1x2:AAE=", {}, "0.in: line 1: [9999999, 1, 2] of 1 bytes"),
        ("nrlre1:int8:99999999999999999x99999999999999999x2:AAE=", {}, "of 1 bytes each was claimed, but there are 2"),
        ("nrlre1:int8:0x2x3:", {}, "0.in: line 1: has no tokens"),
        (text(npy(np.zeros((0, 2, 3)))), {}, "0.in: line 1: has no tokens"),
        ("AAAA", {"format": "sglang"}, "0.in: line 1: is a flat array of int32 without a header: give its layers"),
        (bytes(48), {"layers": 5, "top_k": 2}, "0.in: routed_experts: 48 bytes are no whole number of tokens"),
        (b"", {"format": "sglang", "layers": 1, "top_k": 2}, "0.in: routed_experts: has no tokens"),
        (npz({"text.npy": b"hello"}), {}, "0.in: text.npy: does not begin like an .npy file"),
        (npz({"good.npy": npy(A), "bad.npy": npy(A, "<f8")}), {}, "0.in: bad.npy: descr: <f8"),
        (b"PK\x03\x04 and nothing else", {}, "0.in: is no readable zip archive"),
        (b"PK\x05\x06" + bytes(18), {}, "0.in: holds no sequence"),
        ('{"choices": [{}]}', {}, "0.in: choices[0]: routed_experts: is missing"),
        ('{"choices": [{"routed_experts": 7}]}', {}, "choices[0]: routed_experts: should be a string, a list"),
        ('{"choices": 3}', {}, "0.in: choices: should be a list"),
        ('{"choices": [{}, {}], "sglext": {"routed_experts": "x"}}', {}, "sglext.routed_experts: belongs to the first"),
        ('{"prompt_routed_experts": 3, "routed_experts": []}', {}, "0.in: prompt_routed_experts: should be a list"),
        ('{"routed_experts": [[[1, 2]], [[1, 2], [3, 4]]]}', {}, "0.in: routed_experts[1]: has 2 layers instead of 1"),
        ('{"routed_experts": [[[1, 2]], [[1]]]}', {}, "0.in: routed_experts[1, 0]: should be a list of 2"),
        ('{"routed_experts": [[[1, 2.5]]]}', {}, "0.in: routed_experts[0, 0, 1]: should be an integer"),
        ('{"routed_experts": [[[1, true]]]}', {}, "0.in: routed_experts[0, 0, 1]: should be an integer"),
        ('{"routed_experts": [[[1, 18446744073709551615]]]}', {}, "[0, 0, 1]: should be an integer of 64"),
        ('{"routed_experts": []}', {}, "0.in: routed_experts: is empty"),
        ('{"routed_experts": "AAAA"}', {}, "give its layers and top_k"),
        ('{"routed_experts": [[[1, 2]]]}\n{"x": 1', {}, "0.in: line 2: is not JSON"),
        ('{"routed_experts": "' + "A" * 1000, {}, "0.in: is not JSON"),
        ("[1]", {}, "0.in: [0]: should be an object, not number"),
        ("[" * 100_000, {}, "0.in: nests too deeply"),
        ('{"prompt_routed_experts": [[[1, "x"]]], "routed_experts": []}', {}, "0.in: prompt_routed_experts[0, 0, 1]:"),
        ('{"prompt_routed_experts": [[[1, 2]]], "routed_experts": [[[3, null]]]}', {}, "in: routed_experts[0, 0, 1]:"),
        ('{"prompt_routed_experts": [[[1, 2]]], "routed_experts": [[[3]]]}', {}, "0.in: routed_experts[0, 0]:"),
        ('{"prompt_routed_experts": [[[1, 2]]], "routed_experts": [[[3, 9]]]}', {"experts": 8},
         "0.in: routed_experts[1, 0, 1]: expert 9 is out of range"),
    ],
)  # fmt: skip
def test_unreadable_input_is_rejected_with_its_position(
    imported: Any, content: str | bytes, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(foremoe.InputError) as raised:
        imported(content, **options, strict=True)
    assert words in str(raised.value)


GOOD = {"choices": [{"routed_experts": A}]}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"choices": [{"routed_experts": null, "finish_reason": "abort"}]}', "is missing (finish_reason abort)"),
        ('{"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}', "is missing (finish_reason abort)"),
        ('{"choices": [{"routed_experts": ""}]}', "is missing"),
        ('{"choices": [{"routed_experts": []}]}', "is empty"),
        ('{"choices": []}', "choices: is empty"),
        ('{"error": {"message": "out of memory", "code": 500}}', "is an error of the server: out of memory"),
        ('{"object": "error", "message": "aborted"}', "is an error of the server: aborted"),
        ("null", "should be an object, not null"),
        ('{"choices": [{"routed_exp', "is not JSON"),
        (json.dumps({"choices": [{"routed_experts": described(np.zeros((0, 1, 2), "u1"))}]}), "has no tokens"),
        (json.dumps({"choices": [{"routed_experts": A}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}),
         "has 1 rows for 4 tokens (by usage); expected 3 or 4"),
    ],
)  # fmt: skip
def test_one_bad_response_does_not_cost_a_rollout(
    imported: Any, bad: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps(GOOD), bad, json.dumps({"routed_experts": B})]
    routes, begins, report = imported("\n".join(lines))
    assert "1 of 3 samples were skipped" in caplog.text
    assert (routes, begins, report["samples_skipped"]) == ([*A, *B], [0, 1, 3], 1)
    assert report["skipped"][0]["sample"] == 1 and f"0.in: line 2: {words}" in report["skipped"][0]["problem"].replace(
        "choices[0]: routed_experts: ", "").replace("routed_experts: ", "")  # fmt: skip
    assert any(note.startswith("1 of 3 samples were skipped: sample 1 (") for note in report["notes"])
    if bad.startswith("{"):
        assert imported("\n".join([bad, *lines[::2]]))[2]["skipped"][0]["sample"] == 0
    if bad.startswith("{") and bad.endswith("}"):
        assert imported(json.dumps([GOOD, json.loads(bad)]))[2]["samples_skipped"] == 1
    with pytest.raises(foremoe.InputError, match="line 2"):
        imported("\n".join(lines), strict=True)
    with pytest.raises(foremoe.InputError, match="none of the 2 samples can be read"):
        imported(bad + "\n" + bad if bad.endswith("}") else "{}\n{}")


def test_bad_samples_of_other_formats_are_skipped(imported: Any) -> None:
    envelope = f"nrlre1:int8:1x1x2:{text(bytes([1, 2]))}"
    for content in (
        text(npy(A)) + "\n" + text(npy(A))[1:],
        envelope + "\nnrlre1:int8:9x1x2:AAE=",
        npz({"a.npy": npy(A), "b.npy": npy(A, "<f8")}),
    ):
        _, begins, report = imported(content)
        assert (begins, report["samples_skipped"], report["skipped"][0]["sample"]) == ([0, 1], 1, 1)


def test_a_file_without_any_routes_says_how_to_start_the_server(imported: Any) -> None:
    for content in ('{"choices": [{}]}', '{"choices": []}\n{"text": "", "meta_info": {}}'):
        with pytest.raises(foremoe.InputError, match=r"--enable-return-routed-experts.*return_routed_experts=true"):
            imported(content)


USAGE = {"prompt_tokens": 2, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("facts", "of_response", "expected"),
    [  # of three rows
        ({}, {"usage": USAGE}, None),
        ({"prompt_token_ids": [1] * 2, "token_ids": [1] * 9}, {}, "11 tokens (by prompt_token_ids and token_ids)"),
        ({"token_ids": [1] * 9}, {"prompt_token_ids": [1] * 2}, "11 tokens (by prompt_token_ids and token_ids)"),
        ({"message": {"prompt_token_ids": [1], "generation_token_ids": [1] * 4}}, {},
         "5 tokens (by prompt_token_ids and generation_token_ids)"),
        ({"tokens": [1] * 5}, {}, "5 tokens (by tokens)"),
        ({"tokens": ["a"] * 5}, {}, None),
        ({"meta_info": {"prompt_tokens": 1, "completion_tokens": 1}}, {}, "2 tokens (by meta_info)"),
        ({"prompt_token_ids": [1], "token_ids": [1]}, {"usage": USAGE}, None),  # a picture: fewer ids than rows
        ({}, {"usage": USAGE | {"completion_tokens": 9}}, "11 tokens (by usage)"),
        ({}, {"usage": {"prompt_tokens": True, "completion_tokens": 9}}, None),
        ({}, {"usage": USAGE | {"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 6}}},
         "11 tokens (by usage)"),
    ],
)  # fmt: skip
def test_rows_that_contradict_the_tokens_are_refused_and_found(
    imported: Any, tmp_path: pathlib.Path, facts: Any, of_response: Any, expected: str | None
) -> None:
    response = {"choices": [{"routed_experts": [*A, *B], **facts}], **of_response}
    if expected is None:
        assert imported(json.dumps(response))[1] == [0, 3]
    else:
        with pytest.raises(foremoe.InputError) as raised:
            imported(json.dumps(response))
        assert f"has 3 rows for {expected}" in str(raised.value)
    lines, _ = _core._check_route_files([str(tmp_path / "0.in")], {}, decoder({}))
    found = [line for line in lines if line.startswith("row-count")]
    assert len(found) == (expected is not None) and all(f"3 rows for {expected}: " in line for line in found)
    response["choices"].append({"routed_experts": [*A, *B]})  # counts of all choices
    if not facts and "usage" in of_response:
        assert imported(json.dumps(response))[1] == [0, 3, 6]


@pytest.mark.parametrize(
    ("facts", "of_response", "lacking"),
    [
        ({}, {"usage": USAGE | {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}}, 5),
        ({"meta_info": {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 4}}, {}, 4),
        ({"meta_info": {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 2}}, {}, 0),  # with all rows
    ],
)
def test_rows_of_a_cached_prefix_are_missing_first_rows(
    imported: Any, facts: Any, of_response: Any, lacking: int
) -> None:
    response = {"choices": [{"routed_experts": [*A, *B], **facts}], **of_response}
    routes, _, report = imported(json.dumps(response))
    assert (routes, report["rows_omitted"]) == ([[[-1, -1]]] * lacking + [*A, *B], lacking)


def test_the_start_of_prime_rl_is_first_rows_that_are_missing_if_counts_agree(imported: Any) -> None:
    rows = described(np.array(B, "u1"), start=5)
    counts = {"prompt_token_ids": [1] * 6, "token_ids": [1, 2]}
    assert imported(json.dumps({"choices": [{"routed_experts": rows, **counts}]}))[0] == [[[-1, -1]]] * 5 + B
    with pytest.raises(foremoe.InputError, match="start: is token 5"):
        imported(json.dumps({"choices": [{"routed_experts": rows, **counts, "token_ids": [1] * 4}]}))


def test_prefixes_are_filled_from_siblings_of_the_same_prompt(imported: Any) -> None:
    def response(prompt: list[int], rows: Any) -> str:
        choice = {"routed_experts": rows, "token_ids": [1] * (len(rows) + 1 - len(prompt)), "prompt_token_ids": prompt}
        return json.dumps({"choices": [choice]})

    none = [[[-1, -1]]] * 2
    lines = [response([1, 2], [*B, *A]), response([1, 2], [*none, *B]), response([1, 3], [*none, *A])]
    routes, _, report = imported("\n".join(lines), fill_prefixes=True)
    assert (routes, report["rows_filled"]) == ([*B, *A, *B, *B, *none, *A], 2)
    assert report["rows_missing"] == 2
    assert imported("\n".join(lines))[2]["rows_filled"] == 0


def test_archives_that_inflate_too_much_or_are_damaged_are_rejected(imported: Any) -> None:
    same = npy(np.tile([[[4, 1]]], (40 << 16, 1, 1)), "<i8")
    bomb = npz({"a.npy": same, "b.npy": same})
    assert len(bomb) < 1 << 20
    with pytest.raises(
        foremoe.InputError, match=r"more than 100 to one, which routes never are; if it is right, unpack"
    ):
        imported(bomb)
    with pytest.raises(foremoe.InputError, match=r"a\.npy: is neither stored nor deflated"):
        imported(npz({"a.npy": npy(A)}, zipfile.ZIP_BZIP2))
    small = npz({"a.npy": same})
    lying = small.replace(struct.pack("<I", len(same)), struct.pack("<I", 1000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(foremoe.InputError, match=r"a\.npy: is damaged"):
        imported(lying)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # KiB; the member has 40 MiB
    damaged = bytearray(npz({"a.npy": npy(A)}, zipfile.ZIP_STORED))
    damaged[damaged.index(b"NUMPY")] ^= 1
    with pytest.raises(foremoe.InputError, match=r"a\.npy: is damaged"):
        imported(bytes(damaged))


def test_truncated_and_corrupted_sources_are_read_or_rejected() -> None:
    """Any bytes are either decoded or raise InputError."""
    sources = {
        "npz": npz({"a.npy": npy(A)}),
        "npy-base64": text(npy(A)).encode(),
        "nrlre1": b"nrlre1:int16:1x1x2:" + base64.b64encode(bytes([1, 0, 2, 0])),
        "sglang": flat(A).encode(),
        "json": json.dumps({"prompt_routed_experts": A, "choices": [{"routed_experts": A, "token_ids": [1]}]}).encode(),
    }
    packed = described(with_weights(np.array(A)), start=0)
    for format, good in [*sources.items(), ("json", json.dumps({"routed_experts": packed}).encode())]:
        decode = decoder({"layers": 1, "top_k": 2})
        assert len(decode(format, "in", good)) == 1
        altered = [good[:cut] for cut in range(len(good))]
        altered += [
            good[:at] + c + good[at + 1 :] for at in range(len(good)) for c in (b"\0", b"\xff", b'"', b"9", b"}")
        ]
        for data in altered:
            try:
                decode(format, "in", data)
            except foremoe.InputError as error:
                assert str(error).startswith("in: ")


def run(*arguments: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(foremoe.__file__).parents[1])}
    command = [sys.executable, "-m", "foremoe", "import", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


def test_the_command_imports_files_and_its_errors_name_options_as_typed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a,b.json").write_text(json.dumps({"routed_experts": B}))
    (tmp_path / "flat").write_text(flat(B))
    done = run("a,b.json", "--experts", "9", "--model", "tiny", "--drop-empty-layers", "--out", "step", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step: a trace of 2 tokens in 1 sequence, 1 layer, top-2 of 9 experts, from json\n")
    trace = foremoe.read_trace(tmp_path / "step")
    assert (trace.routed_experts.tolist(), trace.model) == (B, "tiny")
    done = run(
        "flat", "flat", "--format", "sglang", "--layers", "1", "--top-k", "2", "--out", "x", "--json", folder=tmp_path
    )
    assert json.loads(done.stdout)["tokens"] == 4
    done = run("flat", "--format", "sglang", "--out", "new", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "foremoe import: flat: line 1: is a flat array of int32 without a header: give its --layers and --top-k\n"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("header", [b"{'descr': (\n", b"{'descr': T\x80 '<i4', 'shape': (1, 2, 3)}\n"])
def test_a_damaged_header_of_numpy_is_refused(header, tmp_path):
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    routes = base64.b64encode(content).decode()
    choice = {"token_ids": [1, 2], "prompt_token_ids": [3], "routed_experts": routes}
    (tmp_path / "response.json").write_text(json.dumps({"choices": [choice]}))
    with pytest.raises(foremoe.InputError, match=r"choices.*descr|choices.*header"):
        foremoe.import_files(tmp_path / "response.json")
