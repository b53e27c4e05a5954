"""Segments read from responses of vLLM and SGLang."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from served import SHAPE, described, draw_rows, expect_routes, flat, npy, sglang_body, vllm_body, with_weights

import foremoe
from foremoe.recorders import Recorder, Segment, from_sglang, from_vllm


@pytest.mark.parametrize(
    ("experts", "dtype", "held"),
    [
        (8, np.uint8, np.uint8),
        (8, np.int16, np.uint8),
        (8, np.int32, np.uint8),
        (255, np.uint8, np.uint8),
        (256, np.uint8, np.uint16),  # 255 is an expert, not a missing row
        (256, np.uint16, np.uint16),
        (512, np.uint16, np.uint16),
        (512, np.int32, np.uint16),
    ],
)
def test_routes_of_vllm_are_read_in_every_dtype(experts: int, dtype: type, held: type) -> None:
    rows = draw_rows(6, experts=experts, dtype=dtype)
    body = json.dumps(vllm_body(rows, [5, 6, 7, 8], [9, 10, 11])).encode()
    recorder = Recorder(num_layers=3, num_experts=experts, top_k=2)
    routes = recorder.add(0, from_vllm(body))
    assert routes.dtype == held
    expect_routes(routes, rows)
    trace = recorder.trace(model="tiny")
    np.testing.assert_array_equal(trace.routed_experts, routes)
    assert (trace.num_tokens, trace.num_experts, list(trace.prompt_lengths), trace.model) == (7, experts, [4], "tiny")
    counts = np.bincount(rows[:, 0].ravel(), minlength=experts)
    np.testing.assert_array_equal(foremoe.collect(trace, ranks=1).array[0, 0, 0], counts)


def test_all_response_formats_of_vllm_are_read() -> None:
    rows = [draw_rows(6, seed) for seed in range(2)]
    prompt, generated = [5, 6, 7, 8], [9, 10, 11]
    choices = [{"index": i, "token_ids": generated, "routed_experts": npy(rows[i])} for i in range(2)]
    outputs = [
        types.SimpleNamespace(
            token_ids=tuple(generated),
            routed_experts=rows[i],
            weight_versions=[types.SimpleNamespace(version="7", start=0, end=3)],
        )
        for i in range(2)
    ]
    request_output = types.SimpleNamespace(prompt_token_ids=prompt, outputs=outputs)
    client = types.SimpleNamespace(
        prompt_token_ids=prompt, choices=[types.SimpleNamespace(**choice) for choice in choices]
    )
    for segments in (
        from_vllm({"prompt_token_ids": prompt, "choices": choices}),  # chat completions
        from_vllm(json.dumps({"choices": choices}), prompt_token_ids=prompt),  # /inference/v1/generate
        from_vllm(client),
        from_vllm(request_output),
        from_vllm([vllm_body(rows[i], prompt, generated) for i in range(2)]),
    ):
        recorder = Recorder(**SHAPE)
        for s, segment in enumerate(segments):
            expect_routes(recorder.add(s, segment), rows[s])
            assert segment.token_ids is not None and list(segment.token_ids) == prompt + generated
        assert recorder.trace().num_sequences == 2 and recorder.report.unchecked == 0
    assert from_vllm(request_output)[1].weight_versions == ("7",)


def test_responses_of_skyrl_and_prime_rl_are_read() -> None:
    rows = draw_rows(8)
    prompt, generated = [5, 6, 7, 8], [9, 10, 11]
    for first in (described(rows[:6]), described(rows[:6], start=0), described(with_weights(rows[:6]), start=0)):
        choice = {"index": 0, "token_ids": generated, "routed_experts": first}
        (segment,) = from_vllm({"choices": [choice]}, prompt_token_ids=prompt)
        expect_routes(Recorder(**SHAPE).add(0, segment), rows[:6])
        later = {"token_ids": [12], "routed_experts": described(with_weights(rows[6:]), start=6)}
        for start in (0, 6):  # the response contains it
            turn = from_vllm({"choices": [later]}, prompt_start=start, prompt_token_ids=[*prompt, *generated, 20])
            expect_routes(Recorder(**SHAPE).add(0, [segment, *turn]), rows)
        with pytest.raises(
            foremoe.InputError, match=r"prompt_start: is 5, but the rows of choices\[0\] start at token 6"
        ):
            from_vllm({"choices": [later]}, prompt_start=5)
        later["routed_experts"]["start"] = "6"  # type: ignore[index]
        with pytest.raises(foremoe.InputError, match="start: is '6'; expected an integer from 0 on"):
            from_vllm({"choices": [later]}, prompt_token_ids=prompt)


def test_results_of_tensorrt_llm_are_read() -> None:
    """Its routes are a tensor, int16 [tokens - 1, layers with experts, top_k]."""

    class Tensor:
        def __init__(self, rows: np.ndarray) -> None:
            self.rows = rows

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.rows.astype(dtype or self.rows.dtype)

    rows = draw_rows(6, layers=2, dtype=np.int16)
    outputs = [types.SimpleNamespace(index=0, token_ids=[9, 10, 11], routed_experts=Tensor(rows))]
    result = types.SimpleNamespace(prompt_token_ids=[5, 6, 7, 8], outputs=outputs, request_id=3)
    recorder = Recorder(num_layers=2, num_experts=8, top_k=2)
    expect_routes(recorder.add(0, from_vllm([result])), rows)
    rows[2, 1] = -1
    with pytest.raises(foremoe.InputError, match=r"sequence 1: routed_experts\[2, 1\]: is no route"):
        recorder.add(1, from_vllm(result))
    outputs[0].routed_experts = Tensor(rows[:, 0])
    with pytest.raises(foremoe.InputError, match=r"routed_experts: is int16 \[6, 2\]; expected integers"):
        recorder.add(1, from_vllm(result))
    outputs[0].routed_experts = Tensor(rows[:5])
    with pytest.raises(foremoe.InputError, match="routed_experts: has 5 rows for 7 tokens; expected 6"):
        recorder.add(1, from_vllm(result))


def test_without_token_ids_the_number_of_tokens_is_used_if_known() -> None:
    body = vllm_body(draw_rows(6), [1] * 4, [1] * 3)
    del body["choices"][0]["prompt_token_ids"], body["choices"][0]["token_ids"]
    (segment,) = from_vllm(body)
    assert (segment.num_tokens, segment.num_prompt_tokens, segment.token_ids) == (7, 4, None)
    recorder = Recorder(**SHAPE)
    recorder.add(0, segment)
    del body["usage"]
    recorder.add(1, from_vllm(body))
    assert recorder.report.unchecked == 1
    two = {"choices": body["choices"] * 2, "usage": {"prompt_tokens": 4, "completion_tokens": 6}}  # both choices
    assert [segment.num_tokens for segment in from_vllm(two)] == [None, None]
    trace = recorder.trace()
    assert list(trace.cu_seqlens) == [0, 7, 14] and trace.prompt_lengths is None


def test_all_response_formats_of_sglang_are_read() -> None:
    rows = draw_rows(6)
    native = sglang_body(rows, 4, [9, 10, 11], weight_versions=["7", "7"])
    usage = {"prompt_tokens": 4, "completion_tokens": 3}
    metadata = {"weight_version": "7"}
    completion = {"choices": [{}], "usage": usage, "sglext": {"routed_experts": flat(rows)}, "metadata": metadata}
    chat = {"choices": [{"meta_info": native["meta_info"]}, {"meta_info": native["meta_info"]}]}
    nested = native | {"meta_info": native["meta_info"] | {"routed_experts": rows.tolist()}}
    array = native | {"meta_info": native["meta_info"] | {"routed_experts": rows.astype(np.int32)}}
    for response in (native, json.dumps(native), [native, native], completion, chat, nested, array):
        for segment in from_sglang(response):
            expect_routes(Recorder(**SHAPE).add(0, segment), rows)
            assert (segment.num_tokens, segment.num_prompt_tokens, segment.weight_versions) == (7, 4, ("7",))
    (segment,) = from_sglang(native, prompt_token_ids=[1, 2, 3, 4])
    assert segment.token_ids is not None and list(segment.token_ids) == [1, 2, 3, 4, 9, 10, 11]
    completion["choices"] = [{}, {}]
    with pytest.raises(foremoe.InputError, match="first of several choices"):
        from_sglang(completion)


WHOLE = draw_rows(6)
CHOICE = vllm_body(WHOLE, [1] * 4, [1] * 3)["choices"][0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: from_vllm(b"<html>"), "response: is not JSON"),
        (lambda: from_vllm("[" * 100_000), "response: nests too deeply"),
        (lambda: from_sglang('{"choices": ' * 100_000), "response: nests too deeply"),
        (lambda: from_vllm("\ud800"), "response: is not JSON"),
        (lambda: from_vllm({"object": "list"}), "response: has neither choices nor outputs"),
        (lambda: from_vllm({"error": {"message": "no such model"}}), "response: is an error: no such model"),
        (lambda: from_sglang({"error": "busy"}), "response: is an error: busy"),
        (lambda: from_vllm({"choices": {"0": CHOICE}}), "choices: is a dict; expected a list"),
        (
            lambda: from_vllm({"choices": [CHOICE | {"token_ids": 5}]}),
            "choices[0].token_ids: should be a list of token",
        ),
        (lambda: from_vllm({"choices": [CHOICE | {"token_ids": ["a"]}]}), "choices[0].token_ids"),
        (
            lambda: from_vllm({"choices": [CHOICE]}, prompt_token_ids=[1, 2]),
            "prompt_token_ids: are not those of choices[0]",
        ),
        (lambda: from_vllm({"choices": [CHOICE]}, prompt_start=5), "start: is token 5, but the prompt has 4"),
        (lambda: from_vllm({"choices": [CHOICE]}, prompt_start=-1), "start: is -1; expected an integer from 0 on"),
        (lambda: from_vllm({"choices": [{}]}, prompt_start=1), "start: is token 1, but the response does not tell"),
        (
            lambda: from_vllm({"choices": [CHOICE | {"weight_versions": [{}]}]}),
            "choices[0]: weight_versions[0]: has no",
        ),
        (lambda: from_vllm({"choices": [], "prompt_routed_experts": []}), "comes from vLLM before 0.22"),
        (lambda: from_sglang({"text": "…"}), "response: has neither meta_info nor choices"),
        (lambda: from_sglang(sglang_body(WHOLE, "4", [1])), "prompt_tokens: is '4'; expected an integer"),
        (lambda: Segment(None, 5, 6), "num_prompt_tokens: is 6, but there are 5 tokens"),
        (lambda: Segment(None, 0), "num_tokens: is 0"),
        (lambda: Segment(None, 5, token_ids=np.zeros(4, np.int64)), "token_ids: has 4 entries, but num_tokens is 5"),
        (lambda: Recorder(**SHAPE, missing="ignore"), 'missing: is \'ignore\'; expected "refuse" or "mark"'),
        (lambda: Recorder(**SHAPE, moe_layers=[1, 3]), "moe_layers: should be layers from 0 to 2, ascending"),
        (lambda: Recorder(**SHAPE, moe_layers=[2, 1]), "moe_layers"),
        (lambda: Recorder(num_layers=3, num_experts=8, top_k=9), "top_k"),
        (lambda: Recorder(**SHAPE).add(0, []), "sequence 0: segments: should be a Segment"),
        (lambda: Recorder(**SHAPE).add(0, [WHOLE]), "sequence 0: segments"),
        (lambda: Recorder(**SHAPE).add(0, Segment([{1}], 2)), "segment 0: routed_experts[0]: should be a list"),
        (lambda: Recorder(**SHAPE).trace(), "sequence: none was added"),
        (lambda: Recorder(**SHAPE, keep_routes=False).trace(), "keep_routes: is False"),
        (lambda: Recorder(**SHAPE).counts(np.zeros((1, 1))), "micro_step: is float64 [1, 1]"),
    ],
)
def test_malformed_responses_are_rejected_by_name(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(foremoe.InputError) as raised:
        call()
    assert words in str(raised.value)
