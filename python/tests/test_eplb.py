"""foremoe.eplb has EPLB's interface: its maps are valid, and no GPU is busier in the window that it knows."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from conftest import expect_refused
from numpy.typing import NDArray

from foremoe.eplb import keep_slots, maps_of, place, rebalance_experts

SHAPE = {"num_replicas": 24, "num_groups": 4, "num_nodes": 2, "num_gpus": 4}  # of 16 experts


def draw(seed: int, *shape: int) -> NDArray[np.int64]:
    """Draws skewed counts."""
    return np.random.default_rng(seed).pareto(1.2, shape).__mul__(1000).astype(np.int64)


def busiest(experts: NDArray[np.int64], weight: NDArray[Any], num_gpus: int) -> NDArray[np.float64]:
    """Returns the tokens of the busiest GPU of each layer, counted replica by replica."""
    result = []
    for row, tokens in zip(experts.tolist(), weight.tolist(), strict=True):
        per_gpu = len(row) // num_gpus
        parts = [tokens[e] / row.count(e) for e in row]
        result.append(max(sum(parts[g : g + per_gpu]) for g in range(0, len(row), per_gpu)))
    return np.array(result)


def expect_valid(maps: tuple[NDArray[np.int64], ...], num_experts: int, num_replicas: int) -> None:
    """Asserts that the three maps agree, and that every expert has a replica."""
    experts, listed, count = maps
    assert all(of.dtype == np.int64 and of.flags.c_contiguous for of in maps)
    assert experts.shape == (len(count), num_replicas)
    assert listed.shape == (len(count), num_experts, count.max())
    for layer in range(len(count)):
        for e in range(num_experts):
            replicas = [i for i in range(num_replicas) if experts[layer, i] == e]
            assert replicas
            assert count[layer, e] == len(replicas)
            assert [i for i in listed[layer, e] if i >= 0] == replicas
            assert (listed[layer, e, len(replicas) :] == -1).all()


def test_maps_have_the_reference_s_shapes_and_no_busier_gpu(data: pathlib.Path) -> None:
    cases = json.loads((data / "eplb-golden.json").read_text(encoding="utf-8"))["cases"]
    lower = 0
    for case in cases:
        shape = {key: case[key] for key in SHAPE}
        weight = np.array(case["weight"])
        maps = rebalance_experts(weight, **shape)
        expect_valid(maps, weight.shape[1], case["num_replicas"])
        ours = busiest(maps[0], weight, case["num_gpus"])
        reference = busiest(np.array(case["physical_to_logical_map"]), weight, case["num_gpus"])
        assert (ours <= reference * 1.001).all(), case["name"]
        lower += int((ours < reference * 0.97).sum())
    assert lower > 0


@pytest.mark.parametrize("num_groups", [1, 4])
def test_maps_agree_and_groups_stay_on_a_node(num_groups: int) -> None:
    for seed, windows in enumerate([1, 2, 5]):
        maps = rebalance_experts(draw(seed, windows, 3, 16), **SHAPE | {"num_groups": num_groups})
        expect_valid(maps, 16, 24)
        if num_groups == 4:
            node = np.arange(24) // 12
            for layer in maps[0]:
                assert all(len({*node[layer // 4 == group]}) == 1 for group in range(4))


def test_one_window_may_lack_its_axis_and_have_any_type_of_numbers() -> None:
    weight = draw(3, 2, 16)
    expected = rebalance_experts(weight, **SHAPE)
    for same in (weight[None], weight.astype(np.float32), weight.tolist(), weight.astype(np.uint32), weight / 4096):
        for ours, theirs in zip(rebalance_experts(same, **SHAPE), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def repeated(experts: NDArray[np.int64], num_gpus: int) -> int:
    """Returns the number of GPUs that have an expert twice."""
    return sum(len({*gpu}) < len(gpu) for layer in experts for gpu in layer.reshape(num_gpus, -1).tolist())


@pytest.mark.parametrize(("groups", "nodes", "gpus"), [(8, 4, 32), (8, 9, 72), (1, 1, 32)])
def test_a_gpu_has_no_expert_twice_in_layers_like_those_of_deepseek_v3(groups: int, nodes: int, gpus: int) -> None:
    """Of 256 experts, with 288 replicas; loads as skewed as recorded ones, where EPLB puts replicas together."""
    weight = np.random.default_rng(7).lognormal(0, 0.9, (40, 256)).__mul__(1e5).astype(np.int64)
    shape = {"num_replicas": 288, "num_groups": groups, "num_nodes": nodes, "num_gpus": gpus}
    maps = rebalance_experts(weight, **shape)
    expect_valid(maps, 256, 288)
    assert repeated(maps[0], gpus) == 0
    if groups % nodes == 0:
        node = np.arange(288) * nodes // 288
        for layer in maps[0]:
            assert all(len({*node[layer // (256 // groups) == group]}) == 1 for group in range(groups))


def test_a_gpu_has_no_two_replicas_of_an_expert_if_asked() -> None:
    weight = draw(4, 3, 20, 16)
    apart = place(weight, **SHAPE | {"num_groups": 1}, distinct=True)
    expect_valid(maps_of(apart, 16), 16, 24)
    assert all(len({*gpu}) == 6 for layer in apart for gpu in layer.reshape(4, 6))


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"weight": np.full((1, 16), -1)}, "weight", r"weight[0, 0]: must be finite and at least 0"),
        ({"weight": np.full((2, 3, 16), np.nan)}, "weight", r"weight[0, 0]"),
        ({"weight": np.ones(16)}, "weight", "float64 [16]"),
        ({"weight": np.ones((0, 16))}, "weight", "float64 [0, 16]"),
        ({"weight": np.full((1, 16), "x")}, "weight", "expected integers or floats"),
        ({"num_gpus": 0}, "num_gpus", "num_gpus: 0"),
        ({"num_nodes": 2.0}, "num_nodes", "is a float"),
        ({"num_replicas": 12}, "num_replicas", "16 experts do not fit into 12 slots"),
        ({"num_replicas": 26}, "num_replicas", "26 replicas cannot be spread evenly over 4 ranks"),
        ({"num_groups": 6}, "num_replicas", "16 experts cannot be spread evenly over 6 groups"),
    ],
)
def test_rejects(changed: dict[str, Any], field: str, words: str) -> None:
    arguments = {"weight": draw(0, 1, 16), **SHAPE} | changed
    expect_refused(lambda: rebalance_experts(**arguments), field, words)


def test_experts_that_stay_on_a_gpu_keep_their_slots() -> None:
    former = np.array([[0, 1, 2, 3, 4, 0], [5, 5, 1, 0, 2, 3]])
    new = np.array([[2, 0, 5, 4, 3, 3], [1, 5, 4, 3, 2, 0]])
    expected = np.array([[0, 5, 2, 3, 4, 3], [5, 4, 1, 0, 2, 3]])
    np.testing.assert_array_equal(keep_slots(new, former, 2), expected)


def test_slots_of_drawn_maps_are_kept_like_slot_by_slot() -> None:
    random = np.random.default_rng(6)
    former, new = random.integers(0, 6, (2, 30, 12))
    kept = keep_slots(new, former, 3)
    for old_row, new_row, kept_row in zip(former.reshape(-1, 4), new.reshape(-1, 4), kept.reshape(-1, 4), strict=True):
        assert sorted(new_row) == sorted(kept_row)
        stay = sum(min(list(old_row).count(e), list(new_row).count(e)) for e in {*new_row})
        assert (old_row == kept_row).sum() >= stay
