"""Traces, loads, the collector and importers."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import subprocess
import threading
import weakref
from typing import Any

import commands
import numpy as np
import pytest
from conftest import draw_load, draw_routes

import foremoe

CU_SEQLENS = np.array([0, 10, 25, 40], np.int64)


def trace_of(routes: np.ndarray, **kwargs: object) -> foremoe.Trace:
    return foremoe.Trace.from_arrays(routes, CU_SEQLENS, num_experts=8, **kwargs)


def counts_by_hand(routes: np.ndarray, micro_step: list[int], rank: list[int], ranks: int) -> np.ndarray:
    counts = np.zeros((max(micro_step) + 1, routes.shape[1], ranks, 8), np.int64)
    for s, (m, r) in enumerate(zip(micro_step, rank, strict=True)):
        for token in range(CU_SEQLENS[s], CU_SEQLENS[s + 1]):
            for layer in range(routes.shape[1]):
                for expert in routes[token, layer]:
                    if expert != 255:
                        counts[m, layer, r, expert] += 1
    return counts


def test_a_trace_exposes_its_arrays_without_a_copy() -> None:
    routes = draw_routes()
    trace = trace_of(routes)
    assert np.shares_memory(trace.routed_experts, routes)
    assert not trace.routed_experts.flags.writeable
    assert (trace.num_tokens, trace.num_layers, trace.top_k, trace.num_sequences) == (40, 2, 2, 3)
    assert trace.rank is None and trace.prompt_lengths is None
    expected = routes.copy()
    del routes
    gc.collect()
    view = trace.routed_experts
    del trace
    gc.collect()
    np.testing.assert_array_equal(view, expected)


def test_collect_counts_routes_by_micro_step_and_rank() -> None:
    routes = draw_routes()
    batching = {"micro_step": np.array([0, 1, 0], np.int32), "rank": np.array([1, 0, 0], np.int32)}
    load = foremoe.collect(trace_of(routes, **batching))
    np.testing.assert_array_equal(load.array, counts_by_hand(routes, [0, 1, 0], [1, 0, 0], 2))
    assert load.top_k == 2
    again = foremoe.collect(trace_of(routes), ranks=4, tokens_per_rank=16)
    micro_step, rank = again.batching
    np.testing.assert_array_equal(again.array, counts_by_hand(routes, list(micro_step), list(rank), 4))


def draw_rollout() -> foremoe.Trace:
    """Draws a trace with 4 recorded micro-steps of 4 ranks."""
    return foremoe.synthesize_trace(
        layers=2, experts=16, top_k=2, micro_steps=4, ranks=4, tokens_per_rank=256, sequences_per_rank=4
    )


def test_a_load_owns_its_routes_so_that_their_buffer_can_be_reused() -> None:
    routes = np.zeros((8000, 1, 2), np.int32)
    routes[:, 0] = np.arange(8000)[:, None] % 7 + [0, 1]
    model = {"moe_layers": 1, "experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128, "vocabulary": 100}
    model |= {"heads": 2, "kv_heads": 2, "head_width": 16}
    options: dict[str, Any] = {"cluster": "h100", "model": {"name": "small", **model}, "dispatch": "token"}
    trace = foremoe.Trace.from_arrays(
        routes,
        np.arange(0, 8001, 1000, dtype=np.int64),
        num_experts=8,
        micro_step=np.zeros(8, np.int32),
        rank=np.arange(8, dtype=np.int32),
        ranks_per_node=2,
    )
    load = foremoe.collect(trace)
    expected = foremoe.simulate(load, "vanilla", **options)
    kept = weakref.ref(routes)
    del trace
    routes[-1000:] = [0, 1]  # the next rollout
    again = foremoe.simulate(load, "vanilla", **options)
    assert [one["node_link_rows"] for one in again] == [one["node_link_rows"] for one in expected]
    assert [one["step_seconds"] for one in again] == [one["step_seconds"] for one in expected]
    del routes
    gc.collect()
    assert kept() is None


def test_routes_that_another_thread_changes_are_counted_or_refused() -> None:
    routes = np.tile(np.arange(4, dtype=np.int32), (500, 8, 1))
    trace = foremoe.Trace.from_arrays(routes, np.array([0, 500], np.int64), num_experts=32)
    done = False

    def change() -> None:
        while not done:
            routes[250, 7, 3] = 0x70000000
            routes[250, 7, 3] = 3

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            with contextlib.suppress(foremoe.InputError):
                assert foremoe.collect(trace, ranks=1).array.sum() == routes.size
    finally:
        done = True
        thread.join()


def test_pack_gives_the_batching_of_the_command(tmp_path: pathlib.Path) -> None:
    rollout = draw_rollout()
    packed = foremoe.pack(rollout, 8, 200, mini_batches=2, effort=3)
    rollout.save(tmp_path / "in")
    options = ["--ranks", "8", "--tokens-per-rank", "200", "--mini-batches", "2", "--effort", "3"]
    given, out, ours = (tmp_path / name for name in ("in", "out", "ours"))
    assert commands.run("pack", str(given), *options, "--out", str(out)) == 0
    packed.save(ours)
    assert ours.read_bytes() == out.read_bytes()
    assert np.shares_memory(packed.routed_experts, rollout.routed_experts)
    assert foremoe.collect(packed).num_ranks == 8


def test_pack_names_the_wrong_argument() -> None:
    rollout = draw_rollout()
    for arguments, field in [
        ((0, 1024), "ranks"),
        ((8, "many"), "tokens_per_rank"),
        ((8, 1024, 1000), "mini_batches"),
        ((8, 1024, 1, -1), "effort"),
    ]:
        with pytest.raises(foremoe.InputError) as raised:
            foremoe.pack(rollout, *arguments)
        assert raised.value.field == field
    with pytest.raises(foremoe.InputError, match="cu_seqlens") as raised:
        foremoe.pack(rollout, 8, 1)
    assert raised.value.index == "[0]"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32])
def test_all_dtypes_of_routes_give_the_same_counts(dtype: type) -> None:
    routes = draw_routes()
    wide = routes.astype(dtype)
    wide[routes == 255] = np.iinfo(dtype).max if np.dtype(dtype).kind == "u" else -1
    expected = foremoe.collect(trace_of(routes), ranks=2)
    np.testing.assert_array_equal(foremoe.collect(trace_of(wide), ranks=2).array, expected.array)


def test_the_collector_gives_the_counts_of_collect() -> None:
    routes = draw_routes()
    collector = foremoe.Collector(num_layers=2, num_experts=8, top_k=2)
    for s in (2, 0, 1):
        collector.add(s, routes[CU_SEQLENS[s] : CU_SEQLENS[s + 1]])
    assert collector.num_sequences == 3
    np.testing.assert_array_equal(collector.lengths(), np.diff(CU_SEQLENS))
    micro_step, rank = foremoe.batch(collector.lengths(), ranks=2, tokens_per_rank=25)
    load = collector.load(micro_step, rank, ranks=2)
    np.testing.assert_array_equal(load.array, counts_by_hand(routes, list(micro_step), list(rank), 2))


def test_recorded_batching_is_kept_for_its_own_number_of_ranks(caplog: pytest.LogCaptureFixture) -> None:
    routes = draw_routes()
    batching = {"micro_step": np.array([0, 1, 0], np.int32), "rank": np.array([1, 0, 0], np.int32)}
    kept = foremoe.collect(trace_of(routes, **batching, ranks=4), ranks=4)
    np.testing.assert_array_equal(kept.array, counts_by_hand(routes, [0, 1, 0], [1, 0, 0], 4))
    (remark,) = kept.remarks
    assert remark in caplog.text
    caplog.clear()
    foremoe.pack(trace_of(routes), ranks=4, tokens_per_rank=100)
    assert remark in caplog.text
    assert remark == "trace: 15 % of the rows (12 of 80) have no route and do not count"
    anew = foremoe.collect(trace_of(routes, **batching), ranks=4)
    assert "batched" in anew.remarks[0]


def test_plans_of_a_trace_batched_here_are_verified_from_their_files(tmp_path: pathlib.Path) -> None:
    trace = trace_of(draw_routes())
    load = foremoe.collect(trace, ranks=2, tokens_per_rank=20)
    assert load.remarks[0].startswith("trace: no batching recorded")
    trace.save(tmp_path / "trace")
    plans = foremoe.plan(load), foremoe.start_plan(load).finish(), foremoe.evaluate(load).plan
    program = pathlib.Path(foremoe.__file__).with_name("bin") / "foremoe"
    for plan in plans:
        plan.save(tmp_path / "plan")
        verified = subprocess.run([program, "verify", tmp_path / "trace", tmp_path / "plan"], capture_output=True)
        assert verified.returncode == 0, verified


def test_the_collector_rejects_routes_of_another_shape() -> None:
    collector = foremoe.Collector(num_layers=2, num_experts=8, top_k=2)
    for wrong in (draw_routes(layers=4), draw_routes(top_k=4, layers=1)):
        with pytest.raises(foremoe.InputError, match=r"expected \[tokens, 2, 2\]") as raised:
            collector.add(0, wrong)
        assert raised.value.field == "routes"
    assert collector.num_sequences == 0


def test_saved_files_can_be_read_back(tmp_path: pathlib.Path) -> None:
    assert list(trace_of(draw_routes()).layer_ids) == [0, 1]
    layer_ids = np.array([1, 3], np.int32)
    trace = trace_of(draw_routes(), group_ids=np.array([3, 3, 4], np.int32), layer_ids=layer_ids, model="tiny")
    trace.save(tmp_path / "trace.safetensors")
    again = foremoe.read_trace(tmp_path / "trace.safetensors")
    np.testing.assert_array_equal(again.routed_experts, trace.routed_experts)
    np.testing.assert_array_equal(again.group_ids, [3, 3, 4])
    assert again.model == "tiny" and list(again.layer_ids) == [1, 3]
    load = draw_load()
    load.save(tmp_path / "load.safetensors")
    np.testing.assert_array_equal(foremoe.read_load(tmp_path / "load.safetensors").array, load.array)


def test_layers_may_differ_and_ids_may_have_no_weights(tmp_path: pathlib.Path) -> None:
    routes = np.array([[[0, 5, 3], [7, -1, 2]], [[4, 9, 8], [-1, -1, -1]]], "i2")
    trace = foremoe.Trace.from_arrays(
        routes,
        np.array([0, 2], "i8"),
        num_experts=8,
        weightless_experts=2,
        experts_of_layer=[6, 8],
        top_k_of_layer=[3, 2],
    )
    load = foremoe.collect(trace, ranks=2)
    expected = np.zeros((2, 8), "i8")
    expected[0, [0, 3, 4, 5]] = 1
    expected[1, [2, 7]] = 1
    assert np.array_equal(load.array.sum((0, 2)), expected)
    assert load.tokens is not None and load.tokens.sum() == 2
    assert load.missing_rows == 1
    assert (load.experts_of_layer, load.top_k_of_layer) == ([6, 8], [3, 2])

    load.save(tmp_path / "load.safetensors")
    same = foremoe.read_load(tmp_path / "load.safetensors")
    assert (same.experts_of_layer, same.top_k_of_layer, same.missing_rows) == ([6, 8], [3, 2], 1)
    assert same.tokens is not None and np.array_equal(same.tokens, load.tokens)
    assert foremoe.check(foremoe.plan(load, guest_slots=1), load) == []


def test_a_load_refuses_tokens_of_absent_experts() -> None:
    array = np.ones((1, 2, 2, 4), "i8")
    with pytest.raises(foremoe.InputError, match=r"array\[0, 1, 0, 2\]: 1 tokens, but this layer has only 2 experts"):
        foremoe.Load.from_array(array, experts_of_layer=[4, 2])
    with pytest.raises(foremoe.InputError, match=r"tokens\[0, 1\]: -1"):
        foremoe.Load.from_array(array, tokens=np.array([[4, -1]], "i8"))


def test_a_load_folds_to_fewer_ranks(load: foremoe.Load) -> None:
    micro_steps, layers, ranks, experts = load.array.shape
    folded = load.array.reshape(micro_steps, layers, 2, ranks // 2, experts).sum(3)
    np.testing.assert_array_equal(load.fold(2).array, folded)


def test_recorded_files_are_imported(tmp_path: pathlib.Path) -> None:
    routes = draw_routes()
    paths = []
    for s in range(3):
        paths.append(tmp_path / f"{s}.npy")
        np.save(paths[-1], routes[CU_SEQLENS[s] : CU_SEQLENS[s + 1]])
    trace, report = foremoe.import_files(paths, experts=8)
    assert isinstance(trace, foremoe.Trace)
    np.testing.assert_array_equal(trace.routed_experts, routes)
    assert report["format"] == "npy"
    assert report["rows"] == 80


def test_the_bundled_rollout_collects_to_the_same_counts_as_numpy(data: pathlib.Path) -> None:
    trace = foremoe.read_trace(data / "rollout-math.safetensors")
    load = foremoe.collect(trace, ranks=8)
    routes = trace.routed_experts
    missing = (routes == np.iinfo(routes.dtype).max).all(-1)
    assert load.array.sum() == (~missing).sum() * trace.top_k
    for layer in range(trace.num_layers):
        counts = np.bincount(routes[:, layer][~missing[:, layer]].ravel(), minlength=trace.num_experts)
        np.testing.assert_array_equal(load.array[:, layer].sum((0, 1)), counts)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"routed_experts": draw_routes().astype(np.float32)}, "routed_experts", "float32 [40, 2, 2]"),
        ({"routed_experts": draw_routes().astype(np.int64)}, "routed_experts", "int64"),
        ({"routed_experts": draw_routes()[:, ::-1]}, "routed_experts", "not C-contiguous"),
        ({"routed_experts": np.asfortranarray(draw_routes())}, "routed_experts", "not C-contiguous"),
        ({"routed_experts": draw_routes()[:, 0]}, "routed_experts", "[tokens, layers, top_k]"),
        ({"num_experts": 1}, "num_experts", "expected 2 to 255"),
        ({"num_experts": 300}, "num_experts", "expected 2 to 255"),
        ({"cu_seqlens": np.array([0, 10, 40], np.int32)}, "cu_seqlens", "int32 [3]; expected int64"),
        ({"cu_seqlens": np.array([0, 50, 40], np.int64)}, "cu_seqlens", "less than"),
        ({"cu_seqlens": np.array([0, 39], np.int64)}, "cu_seqlens", "40 tokens"),
        ({"cu_seqlens": np.array([], np.int64)}, "cu_seqlens", "entries"),
        ({"rank": np.array([0, 1, 0], np.int32)}, "micro_step", "go together"),
        ({"group_ids": np.array([0, 1], np.int32)}, "group_ids", "2 entries, expected 3"),
        ({"prompt_lengths": np.array([0, 99, 0], np.int32)}, "prompt_lengths", "99"),
        ({"layer_ids": np.array([1], np.int32)}, "layer_ids", "has 1 entries, expected 2"),
        ({"layer_ids": np.array([1, -1], np.int32)}, "layer_ids", "-1, expected 0 or more"),
    ],
)
def test_invalid_arrays_are_rejected_by_name(change: dict[str, object], field: str, words: str) -> None:
    arguments = {"routed_experts": draw_routes(), "cu_seqlens": CU_SEQLENS, "num_experts": 8} | change
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.Trace.from_arrays(**arguments)  # type: ignore[arg-type]
    assert raised.value.field == field
    assert words in str(raised.value)


def test_an_invalid_route_is_named_when_it_is_counted() -> None:
    routes = draw_routes()
    routes[11, 1] = [5, 5]
    with pytest.raises(foremoe.InputError, match="11, 1") as raised:
        foremoe.collect(trace_of(routes), ranks=2)
    assert (raised.value.field, raised.value.file) == ("routed_experts", "")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 2, 2, 4), np.int32), "int32 [2, 2, 2, 4]; expected int64 [micro_steps, layers, ranks, experts]"),
        (np.zeros((2, 2, 4), np.int64), "expected C-contiguous [micro_steps, layers, ranks, experts]"),
        (np.zeros((2, 2, 4, 2), np.int64).transpose(0, 1, 3, 2), "not C-contiguous"),
        (np.zeros((0, 2, 2, 4), np.int64), "empty"),
        (np.full((1, 1, 2, 4), -1, np.int64), "array[0, 0, 0, 0]: -1 tokens, expected 0 or more"),
        (np.zeros((1, 1, 3, 4), np.int64), "3 ranks must divide 4 experts"),
    ],
)
def test_invalid_loads_are_rejected_by_name(array: np.ndarray, words: str) -> None:
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.Load.from_array(array)
    assert words in str(raised.value)


def test_errors_in_files_name_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"12345")
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.read_load(path)
    assert raised.value.file == str(path)
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.collect(trace_of(draw_routes()), ranks=0)
    assert raised.value.field == "ranks"


def test_routes_without_rows_become_int32_and_rows_without_entries_are_rejected() -> None:
    routes, counts = foremoe._core._count_routes(np.zeros((0, 3, 2), np.int64), 8)
    assert (routes.dtype, routes.shape, counts.shape) == (np.int32, (0, 3, 2), (3, 8))
    for shape in ((5, 0, 2), (5, 3, 0)):
        with pytest.raises(foremoe.InputError, match=r"routes: is int64 \[5, "):
            foremoe._core._count_routes(np.zeros(shape, np.int64), 8)
