"""Checks of captured routes: damaged captures are found and named, clean ones raise no alarm."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from served import sglang_body, span, vllm_body
from test_importing import flat, npy, npz, text

import foremoe

DATA = pathlib.Path(__file__).parents[2] / "data"
ROLLOUTS = ["rollout-math", "rollout-math-full", "rollout-mixed", "rollout-gptoss"]
LENGTHS = [456, 456, 338]

Routes = Any  # int32 [1250, 8, 8], of three sequences; −1 in rows without a route
Damage = Callable[[Routes], Any]  # modifies the routes, or returns others, and expectations


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "foremoe", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def captured() -> tuple[Routes, Any]:
    trace = foremoe.read_trace(DATA / "rollout-math-full.safetensors")
    chosen = [3, 4, 5]
    cu = trace.cu_seqlens
    routes = np.concatenate([trace.routed_experts[cu[s] : cu[s + 1]] for s in chosen]).astype(np.int32)
    routes[routes == 255] = -1
    return routes, np.cumsum([0, *(cu[s + 1] - cu[s] for s in chosen)])


def put(at: Any, values: Any) -> Damage:
    def damage(routes: Routes) -> None:
        routes[at] = values

    return damage


def copied(to: Any, source: Any) -> Damage:
    def damage(routes: Routes) -> None:
        routes[to] = routes[source].copy()

    return damage


def expecting(**expected: Any) -> Damage:
    return lambda routes: (routes, expected)


def shifted(routes: Routes) -> Any:
    """Layer 0 is dense and was recorded as zeros; the last layer did not fit."""
    return np.concatenate([np.zeros_like(routes[:, :1]), routes[:, :-1]], 1), {"layers": 8}


def with_dense(values: Any, **expected: Any) -> Damage:
    """Records a layer before the others."""
    return lambda routes: (np.concatenate([np.zeros_like(routes[:, :1]) + values, routes], 1), expected)


DAMAGES: list[tuple[str, str, Damage]] = [
    ("one id too large", "expert-range", put((500, 3, 0), 128)),
    ("physical slots", "expert-range", lambda r: (np.where(r >= 64, r + 64, r), {})),
    ("one negative id", "expert-range", put((7, 0, 2), -7)),
    ("an expert twice", "duplicate-experts", copied((9, 4, 1), (9, 4, 0))),
    ("a shorter row", "top-k-differs", put((30, 2, 7), -1)),
    ("another k", "top-k-differs", lambda r: (r[:, :, :7], {"top_k": 8})),
    ("zeros in the middle", "padding", put(slice(100, 110), 0)),
    ("zeros at the end", "padding", put(slice(440, 456), 0)),
    ("filler 0, 1, …", "padding", put(slice(440, 455), np.arange(8))),
    ("filler of the first layer", "padding", lambda r: put(slice(0, 5), r[:5, :1])(r)),
    ("padding with routes", "padding", lambda r: (r, {"attention_mask": np.arange(len(r)) >= 10})),
    ("a cached prefix", "prefix-missing", put(slice(456, 520), -1)),
    ("one layer missing in a chunk", "missing-rows", put((slice(64, 128), 5), -1)),
    ("a chunk missing", "missing-rows", put(slice(64, 128), -1)),
    ("the previous row again", "repeated-rows", copied(300, 299)),
    ("every second row again", "repeated-rows", copied(slice(201, 301, 2), slice(200, 300, 2))),
    ("another sequence's block", "repeated-sequence", copied(slice(0, 456), slice(456, 912))),
    ("a layer that stays", "constant-rows", lambda r: put((slice(0, 455), 3), r[0, 3])(r)),
    ("a layer twice", "equal-layers", copied((slice(None), 4), (slice(None), 3))),
    ("a layer twice in one sequence", "equal-layers", copied((slice(0, 456), 4), (slice(0, 456), 3))),
    ("a layer twice in another order", "equal-layers", lambda r: put((slice(None), 4), r[:, 3, ::-1])(r)),
    ("a layer not recorded", "empty-layer", put((slice(None), 6), 0)),
    ("layers shifted by a dense one", "layer-shift", shifted),
    ("dense layers counted", "layer-shift", expecting(layers=7, dense_layers=1)),
    ("a stage not recorded", "layer-shift", lambda r: (r[:, :4], {"layers": 8})),
    ("a dense layer before the others", "layer-shift", with_dense(0, layers=8)),
    ("a dense layer without routes", "layer-shift", with_dense(-1, layers=8)),
    ("a dense layer of the first experts", "layer-shift", with_dense(np.arange(8), layers=8)),
    ("one of two dense layers", "layer-shift", with_dense(0, layers=8, dense_layers=2)),
    ("a layer of MTP", "mtp-layers", expecting(layers=7)),
    ("a layer of MTP after dense ones", "mtp-layers", with_dense(0, layers=7, dense_layers=1)),
    ("a layer of MTP, dense ones left out", "mtp-layers", expecting(layers=7, dense_layers=3)),
    ("nothing recorded", "missing-rows", put(slice(None), -1)),
    ("an aborted request before the whole", "repeated-block", lambda r: (np.concatenate([r[:30], r]), {"cu": 30})),
    ("a short aborted request", "repeated-block", lambda r: (np.concatenate([r[:9], r]), {"cu": 9})),
    ("a shared expert", "top-k-differs", put((..., 7), 127)),
    ("a fused shared expert", "expert-range", put((..., 7), 128)),
    ("rows missing at the end", "row-count", expecting(lengths=[456, 456, 400])),
    ("too many rows", "row-count", expecting(lengths=[456, 400, 338])),
    ("weights updated in a step", "weight-versions", expecting(weight_versions=[7, 7, 8])),
]  # fmt: skip


@pytest.mark.parametrize(("check", "damage"), [of[1:] for of in DAMAGES], ids=[of[0] for of in DAMAGES])
def test_damage_is_found_and_named(check: str, damage: Damage) -> None:
    routes, cu_seqlens = captured()
    routes, expected = damage(routes) or (routes, {})
    cu_seqlens[1:] += expected.pop("cu", 0)
    found = foremoe.check_routes(routes, cu_seqlens=cu_seqlens, num_experts=128, **expected)
    found_checks = [of.check for of in found]
    assert found_checks == [check] if check in ("layer-shift", "mtp-layers", "equal-layers") else check in found_checks
    assert all(of.cause and of.remedy and of.count > 0 for of in found)


@pytest.mark.parametrize("order", ["by weight", "ascending"])
@pytest.mark.parametrize("name", ROLLOUTS)
def test_recorded_rollouts_raise_no_alarm(name: str, order: str) -> None:
    trace = foremoe.read_trace(DATA / f"{name}.safetensors")
    shape = {"lengths": np.diff(trace.cu_seqlens), "layers": trace.num_layers, "top_k": trace.top_k}
    if order == "ascending":
        routes = np.sort(np.where(trace.routed_experts == 255, -1, trace.routed_experts.astype("i4")), -1)
        trace = foremoe.Trace.from_arrays(
            routes, trace.cu_seqlens, num_experts=trace.num_experts, prompt_lengths=trace.prompt_lengths
        )
    assert foremoe.check_routes(trace, **shape) == []


def test_turns_that_begin_with_earlier_ones_raise_no_alarm_and_reused_buffers_do() -> None:
    routes, _ = captured()
    both = np.concatenate([routes[:300], routes[:440]])

    def checks(prompts: list[int] | None) -> list[str]:
        lengths = None if prompts is None else np.array(prompts, np.int32)
        trace = foremoe.Trace.from_arrays(both, np.array([0, 300, 740]), num_experts=128, prompt_lengths=lengths)
        return [of.check for of in foremoe.check_routes(trace)]

    assert checks([200, 320]) == checks(None) == []
    assert checks([200, 200]) == ["repeated-sequence"]


def test_top_1_captures_that_stay_are_found() -> None:
    routes = np.random.default_rng(0).integers(0, 128, (900, 24, 1)).astype(np.int32)
    assert foremoe.check_routes(routes, num_experts=128) == []
    routes[10] = routes[9]
    routes[200:800, 7] = 5
    assert [of.check for of in foremoe.check_routes(routes, num_experts=128)] == ["repeated-rows", "constant-rows"]


def test_the_largest_value_of_an_unsigned_type_may_be_an_expert() -> None:
    routes = np.stack([np.random.default_rng(t).permutation(256)[:8] for t in range(320)]).reshape(80, 4, 8)
    assert (routes == 255).any()
    for dtype in ("u1", "u2", "i2", "i4"):
        assert foremoe.check_routes(routes.astype(dtype), num_experts=256) == []
        missing = routes.astype(dtype)
        missing[:5] = np.iinfo(dtype).max if dtype[0] == "u" else -1
        assert [of.check for of in foremoe.check_routes(missing, num_experts=256)] == ["prefix-missing"]
    assert "top-k-differs" in [of.check for of in foremoe.check_routes(routes.astype("u1"), num_experts=255)]
    top_1 = np.arange(320, dtype="u2").reshape(80, 4, 1).astype("u1")
    assert foremoe.check_routes(top_1, num_experts=256) == []


def test_layers_of_one_constant_have_no_routes_with_top_1() -> None:
    routes = np.random.default_rng(0).integers(0, 128, (300, 6, 1)).astype(np.int32)
    routes[:, 0::2] = 0
    (found,) = foremoe.check_routes(routes, num_experts=128)
    assert (found.check, found.layer, found.count) == ("empty-layer", 2, 2)
    assert "hash" in found.cause
    assert foremoe.check_routes(routes[:15], num_experts=128) == []


def test_skipped_samples_are_found_and_sequences_keep_their_numbers(tmp_path: pathlib.Path) -> None:
    routes, _ = captured()
    bad = routes[456:911].copy()
    bad[9, 4, 1] = bad[9, 4, 0]
    responses = [vllm_body(of, [1] * 30, [1] * (len(of) - 29)) for of in (routes[:455], bad)]
    path = tmp_path / "responses.jsonl"
    path.write_text("\n".join(map(json.dumps, [responses[0], {"choices": []}, responses[1]])))
    done = command("routes", "check", path, "--experts", 128, "--json", "--lengths", "456,1,456")
    skipped, twice = json.loads(done.stdout)["findings"]
    ((sample, problem),) = [of.values() for of in json.loads(done.stdout)["skipped"]]
    assert sample == 1 and problem.endswith("line 2: choices: is empty") and problem == skipped["cause"]
    assert (done.returncode, skipped["check"], skipped["sequence"]) == (1, "skipped-sample", 1), done.stderr
    assert (twice["check"], twice["sequence"], twice["token"]) == ("duplicate-experts", 2, 9)
    assert command("routes", "check", path, "--experts", 128, "--strict").returncode == 2


def test_filler_is_found_beside_a_dense_layer() -> None:
    routes, _ = captured()
    routes = np.concatenate([np.zeros_like(routes[:440, :1]), routes[:440]], 1)
    routes[100, 1:] = routes[100, 1]
    assert [of.check for of in foremoe.check_routes(routes, num_experts=128)] == ["padding"]


def test_ascending_captures_that_stay_are_found() -> None:
    routes, cu_seqlens = captured()
    routes.sort(-1)
    routes[100:109] = routes[100]
    routes[:455, 5] = routes[0, 5]
    found = foremoe.check_routes(routes, cu_seqlens=cu_seqlens, num_experts=128)
    assert [of.check for of in found] == ["repeated-rows", "constant-rows"]


@pytest.mark.parametrize("routing", ["grpo", "zipf", "dirichlet"])
@pytest.mark.parametrize("shape", [{"experts": 8, "top_k": 2}, {"experts": 32, "top_k": 4}, {}])
def test_drawn_routes_raise_no_alarm(routing: str, shape: dict[str, Any]) -> None:
    trace = foremoe.synthesize_trace(routing=routing, layers=4, ranks=4, micro_steps=2, tokens_per_rank=512, **shape)
    assert foremoe.check_routes(trace) == []


def test_places_are_those_of_the_sequence_and_tensors_are_accepted() -> None:
    routes, cu_seqlens = captured()
    routes[500, 3, 0] = 128
    (found,) = foremoe.check_routes(routes, cu_seqlens=cu_seqlens, num_experts=128)
    assert (found.layer, found.sequence, found.token, found.count) == (3, 1, 44, 1)
    padded = routes[:912].reshape(2, 456, 8, 8)
    assert foremoe.check_routes(padded, num_experts=128) == [found]
    with pytest.raises(foremoe.InputError, match="routes: has float64"):
        foremoe.check_routes(routes * 1.0)
    with pytest.raises(foremoe.InputError, match="lengths"):
        foremoe.check_routes(routes, lengths=[1, 2])


def test_the_command_reads_payloads_and_traces(tmp_path: pathlib.Path) -> None:
    routes, _ = captured()
    clean, damaged, archive = tmp_path / "clean.npy", tmp_path / "damaged.npy", tmp_path / "damaged.npz"
    np.save(clean, routes[:456])
    routes[9, 4, 1] = routes[9, 4, 0]
    np.save(damaged, routes[:456])
    np.savez(archive, routed_experts=routes[:456])
    assert command("routes", "check", clean, "--experts", 128).returncode == 0
    assert command("routes", "check", DATA / "rollout-math.safetensors").returncode == 0
    (tmp_path / "none.npy").write_bytes(npy(np.full_like(routes[:40], -1)))
    done = command("routes", "check", tmp_path / "none.npy", "--experts", 128)
    assert (done.returncode, done.stdout.split(":")[:2]) == (1, ["missing-rows", " no row has a route"]), done.stderr
    for path in (damaged, archive):
        done = command("routes", "check", path, "--experts", 128, "--json")
        assert done.returncode == 1, done.stderr
        (found,) = json.loads(done.stdout)["findings"]
        assert (found["check"], found["layer"], found["token"]) == ("duplicate-experts", 4, 9)


def test_the_command_notes_leading_layers_without_routes(tmp_path: pathlib.Path) -> None:
    """vLLM and SGLang record dense layers as zeros, so that they are a fault only if the model is known."""
    routes = np.concatenate([np.zeros_like(captured()[0][:456, :1]), captured()[0][:456]], 1)
    np.save(tmp_path / "dense.npy", routes)
    done = command("routes", "check", tmp_path / "dense.npy", "--experts", 128, "--json")
    assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, [])
    (remark,) = json.loads(done.stdout)["remarks"]
    assert remark.startswith("no token has a route in the first of 9 layers: ")
    done = command("routes", "check", tmp_path / "dense.npy", "--experts", 128, "--drop-empty-layers")
    assert (done.returncode, done.stdout) == (0, "no fault was found\n")


def test_payloads_of_each_server_raise_no_alarm(tmp_path: pathlib.Path) -> None:
    routes, _ = captured()
    rows = routes[:455]
    buffer = np.concatenate([rows, np.zeros_like(rows[:1])])  # SGLang: zeros for the last token and in dense layers
    dense = np.concatenate([np.zeros_like(buffer[:, :1]), buffer], 1)
    envelope = f"nrlre1:int16:455x8x8:{text(rows.astype('<i2').tobytes())}"
    for content, options in [
        (npz({"a.npy": npy(rows), "b.npy": npy(routes[456:911])}), []),
        (text(npy(rows)), []),
        (envelope, []),
        (json.dumps({"choices": [{"routed_experts": text(npy(rows))}]}), ["--lengths", 456]),
        (json.dumps({"meta_info": {"routed_experts": flat(buffer)}}), ["--layers", 8, "--top-k", 8]),
        (json.dumps({"meta_info": {"routed_experts": flat(dense)}}), ["--layers", 9, "--top-k", 8]),
        (flat(dense), ["--layers", 9, "--top-k", 8, "--drop-empty-layers"]),
    ]:
        path = tmp_path / "payload"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        done = command("routes", "check", path, "--experts", 128, *options)
        assert (done.returncode, done.stdout.split("\n")[0]) == (0, "no fault was found"), done.stderr


def test_weight_versions_in_payloads_are_compared(tmp_path: pathlib.Path) -> None:
    routes, _ = captured()
    sequences = [routes[begin : begin + 40] for begin in (300, 756, 1200)]
    prompt, new = [1] * 30, [1] * 11
    spans = [[span("7", 0, 11)], [span("7", 0, 4), span("8", 4, 11)], [span("8", 0, 11)]]
    vllm = [vllm_body(of, prompt, new, weight_versions=v) for of, v in zip(sequences, spans, strict=True)]
    sglang = [sglang_body(of, 30, new, weight_version=v) for of, v in zip(sequences, ("a", "a", "\ud800"), strict=True)]
    path = tmp_path / "responses.jsonl"

    def found(responses: list[dict[str, Any]], *options: Any) -> list[tuple[int, int, str]]:
        path.write_text("\n".join(map(json.dumps, responses)))
        done = command("routes", "check", path, "--experts", 128, "--layers", 8, "--top-k", 8, "--json", *options)
        assert done.returncode in (0, 1), done.stderr
        findings = json.loads(done.stdout)["findings"]
        assert {of["check"] for of in findings} <= {"weight-versions"}
        return [(of["sequence"], of["count"], of["cause"]) for of in findings]

    assert found(vllm[:1]) == found(sglang[:2]) == found([vllm[0], sglang_body(sequences[1], 30, new)]) == []
    assert found(vllm) == [(1, 2, "sampled with weights 7 and 8, but sequence 0 with 7")]
    assert found(vllm[1:2]) == [(0, 1, "sampled with weights 7 and 8")]
    assert found(sglang) == [(2, 1, "sampled with weights ?, but sequence 0 with a")]
    assert found(vllm, "--weight-versions", "7,7,7") == []
    vllm[1]["choices"][0]["weight_versions"] = [{"start": 0}]
    path.write_text(json.dumps(vllm[1]))
    done = command("routes", "check", path)
    assert done.returncode == 2 and "choices[0]: weight_versions[0]: has no version" in done.stderr
