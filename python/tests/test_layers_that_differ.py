"""Layers that differ, rows of fewer experts and ids without weights, through import, load, figures and groups."""

import base64
import io
import json
import subprocess
import sys

import numpy as np
import pytest

import foremoe

MODEL = """name = "mix"
moe_layers = 2
experts = [8, 16]
top_k = [2, 4]
hidden = 2048
intermediate = 1024
vocabulary = 32000
[attention]
heads = 16
kv_heads = 4
key_width = 128
"""
UNIFORM = MODEL.replace("[8, 16]", "16").replace("[2, 4]", "4")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "mix.toml").write_text(MODEL)
    (tmp_path / "uniform.toml").write_text(UNIFORM)
    return str(tmp_path / "mix.toml")


def ints(*values):
    return np.array(values, "i4")


def even_counts(layers):
    """Even counts [steps, layers, experts] of layers with 8 and 16 experts, of 1,000 tokens."""
    counts = np.zeros((2, layers, 16), np.int64)
    counts[:, -2, :8] = 250
    counts[:, -1] = 250
    return counts


def rows(rng, tokens, layers, top_k, experts):
    return np.stack([[rng.permutation(experts)[:top_k] for _ in range(layers)] for _ in range(tokens)]).astype("i2")


def test_counts_take_the_layers_of_the_named_model(tmp_path, model):
    np.save(tmp_path / "counts.npy", even_counts(3))  # the first layer is dense
    load, _ = foremoe.import_files(tmp_path / "counts.npy", counts=True, ranks=8, model=model)
    assert load.experts_of_layer == [8, 16] and load.top_k_of_layer == [2, 4]
    vanilla = foremoe.simulate(load, ["vanilla"], cluster="h100", model=model, guest_slots=0)[0]
    assert vanilla["rho"]["max"] == 1
    assert vanilla["max_vio"] == pytest.approx(0) and vanilla["avg_vio"] == pytest.approx(0)

    np.save(tmp_path / "one.npy", even_counts(2)[:, 1:])
    with pytest.raises(foremoe.InputError, match=r"one.npy: has 1 layers with tokens, but mix \(model\) has 2"):
        foremoe.import_files(tmp_path / "one.npy", counts=True, ranks=8, model=model)


def test_a_model_and_a_load_must_agree_in_every_layer(model):
    counts = even_counts(2).reshape(2, 2, 1, 16)
    alike = foremoe.Load.from_array(counts, top_k=4)
    mixed = foremoe.Load.from_array(counts, top_k=4, experts_of_layer=[8, 16], top_k_of_layer=[2, 4])
    for load, other in ((alike, model), (mixed, model.replace("mix", "uniform"))):
        with pytest.raises(foremoe.InputError, match=r"experts and top-\d in MoE layer 0, but"):
            foremoe.simulate(load, ["vanilla"], cluster="h100", model=other, guest_slots=0)
    foremoe.simulate(mixed, ["vanilla"], cluster="h100", model=model, guest_slots=0)


def test_a_layer_whose_rows_begin_without_an_expert_is_not_empty(tmp_path):
    routes = rows(np.random.default_rng(0), 40, 3, 4, 8)
    routes[:, 1, 0] = -1
    np.save(tmp_path / "front.npy", routes)
    trace, report = foremoe.import_files(tmp_path / "front.npy", experts=8, drop_empty_layers=True)
    assert trace.num_layers == 3
    assert not any("no route" in note for note in report["notes"][:1])


def test_engines_take_no_map_of_layers_that_differ(tmp_path):
    load = foremoe.Load.from_array(even_counts(2).reshape(2, 2, 1, 16), top_k=4, experts_of_layer=[8, 16])
    load.save(tmp_path / "load.safetensors")
    command = [sys.executable, "-m", "foremoe", "maps", tmp_path / "load.safetensors", "--to", "sglang"]
    done = subprocess.run([*command, "--out", tmp_path / "map.json"], text=True, capture_output=True, check=False)
    assert done.returncode == 2 and "load.safetensors: experts_of_layer: differ by layer" in done.stderr


def test_a_group_without_sequences_is_planned():
    rng = np.random.default_rng(1)
    starts = np.arange(0, 61, 20)
    trace = foremoe.Trace.from_arrays(
        rows(rng, 60, 2, 2, 8), starts, num_experts=8, micro_step=ints(0, 0, 1), rank=ints(0, 1, 0), ranks=4
    )
    both = foremoe.compare(foremoe.collect(trace), ["vanilla"], ep=2)
    assert [group["max_rank_tokens"] > 0 for group in both[0]["groups"]] == [True, False]


def test_missing_rows_of_a_group_are_counted_in_its_own_sequences():
    rng = np.random.default_rng(2)
    routes, starts = rows(rng, 800, 2, 4, 16), np.arange(0, 801, 200)
    routes[:400, :, 3] = -1  # ranks 0 and 1: fewer experts
    for start in starts[2:-1]:  # ranks 2 and 3: cached prefixes
        routes[start : start + 100] = -1
    trace = foremoe.Trace.from_arrays(
        routes, starts, num_experts=16, micro_step=ints(0, 0, 0, 0), rank=ints(0, 1, 2, 3), ranks=4
    )
    load = foremoe.collect(trace)
    assert load.missing_rows == 400
    assert [group.missing_rows for group in load.groups(2)] == [0, 400]
    with pytest.raises(foremoe.InputError, match="is itself an expert-parallel group"):
        load.groups(2)[1].groups(1)


def test_cached_tokens_of_a_prompt_count_for_all_choices(tmp_path):
    rng = np.random.default_rng(3)

    def encoded(tokens):
        file = io.BytesIO()
        np.save(file, rows(rng, tokens, 2, 2, 8))
        return base64.b64encode(file.getvalue()).decode()

    choices = [{"token_ids": list(range(n)), "routed_experts": encoded(n + 1)} for n in (3, 4)]  # 6 + n − 1 − 4 rows
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 6, "completion_tokens": 7, "prompt_tokens_details": details}
    response = {"prompt_token_ids": list(range(6)), "choices": choices, "usage": usage}
    (tmp_path / "two.json").write_text(json.dumps(response))
    trace, report = foremoe.import_files(tmp_path / "two.json", experts=8)
    assert trace.num_sequences == 2 and report["rows_omitted"] == 2 * 4 * 2
    details["cached_tokens"] = 3
    (tmp_path / "two.json").write_text(json.dumps(response))
    with pytest.raises(foremoe.InputError, match="has 4 rows for 9 tokens"):
        foremoe.import_files(tmp_path / "two.json", experts=8)


def test_the_collector_counts_ids_without_weights_and_layers_that_differ():
    collector = foremoe.Collector(
        num_layers=2, num_experts=8, top_k=2, weightless_experts=4, experts_of_layer=[4, 8], top_k_of_layer=[1, 2]
    )
    collector.add(0, np.array([[[3, -1], [7, 11]]], "i2"))
    load = collector.load(micro_step=ints(0), rank=ints(0), ranks=1)
    assert load.array.sum(axis=(0, 2)).tolist() == [[0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]]
    assert load.experts_of_layer == [4, 8]
    with pytest.raises(foremoe.InputError, match="expert 4"):
        collector.add(1, np.array([[[4, -1], [7, 11]]], "i2"))
    with pytest.raises(foremoe.InputError, match="experts_of_layer"):
        foremoe.Collector(num_layers=2, num_experts=8, top_k=2, experts_of_layer=[4])


def test_an_entry_of_255_among_small_ids_asks_for_the_number_of_experts(tmp_path):
    routes = rows(np.random.default_rng(4), 20, 2, 3, 8).astype("u1")
    routes[:, :, 2] = 255
    np.save(tmp_path / "u8.npy", routes)
    with pytest.raises(foremoe.InputError, match="255 is the largest value of the type, and other ids end at 7"):
        foremoe.import_files(tmp_path / "u8.npy")
    trace, _ = foremoe.import_files(tmp_path / "u8.npy", experts=8)
    assert trace.top_k_of_layer == [2, 2]


def test_a_load_whose_tokens_contradict_it_is_refused():
    counts = np.ones((1, 1, 2, 8), "i8")  # 8 assignments of a rank

    def refusal(**known):
        with pytest.raises(foremoe.InputError) as error:
            foremoe.Load.from_array(counts, top_k=4, **known)
        return str(error.value)

    assert "tokens[0, 1]: 1, but layer 0 has 8 assignments at top-4" in refusal(tokens=np.array([[2, 1]]))
    assert "missing_rows: -5, but there are 4 rows" in refusal(tokens=np.array([[2, 2]]), missing_rows=-5)
    assert "missing_rows: 1, but there are 0 rows" in refusal(missing_rows=1)
    foremoe.Load.from_array(counts, top_k=4, tokens=np.array([[2, 2]]))
