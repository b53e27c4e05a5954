"""Imports tokens per expert without source ranks: arrays, and dumps of SGLang's recorder and of vLLM's EPLB."""

from __future__ import annotations

import io
import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import numpy as np
import pytest

import foremoe

LAYERS, EXPERTS, RANKS = 5, 12, 4
COUNTS = np.random.default_rng(5).integers(0, 90, (3, LAYERS, EXPERTS)) * 2
COUNTS[:, :2] = 0
DENSE_AWAY = COUNTS[:, 2:]


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def totals(load: foremoe.Load) -> Any:
    """Tokens of each expert, after checking that every rank has an even part of them."""
    array = load.array
    assert (array.max(2) - array.min(2) <= 1).all()
    return array.sum(2)


@pytest.fixture
def imported(tmp_path: pathlib.Path) -> Any:
    def of(*contents: bytes | str | dict[str, Any], **options: Any) -> tuple[foremoe.Load, dict[str, Any]]:
        paths = []
        for i, content in enumerate(contents):
            paths.append(tmp_path / f"{i}.in")
            text = json.dumps(content) if isinstance(content, dict) else content
            paths[-1].write_bytes(text.encode() if isinstance(text, str) else text)
        load, report = foremoe.import_files(paths, **{"ranks": RANKS, "top_k": 2} | options)
        assert isinstance(load, foremoe.Load)
        return load, report

    return of


def test_every_file_of_plain_counts_gives_the_same_load(imported: Any) -> None:
    for content in (
        npy(COUNTS),
        npy(COUNTS.astype("f8")),
        npy(np.asfortranarray(COUNTS.astype("f4"))),
        npz(anything=COUNTS.astype("u8")),
        json.dumps(COUNTS.tolist()),
        json.dumps(COUNTS.astype(float).tolist()),
        json.dumps({"weight": COUNTS.tolist()}),
        "\n".join(json.dumps({"weight": step.tolist()}) for step in COUNTS),
    ):
        load, report = imported(content, counts=True)
        np.testing.assert_array_equal(totals(load), DENSE_AWAY)
        assert (load.top_k, load.num_ranks, report["layer_ids"]) == (2, RANKS, [2, 3, 4])
    shares, dropped = report["notes"]
    assert "each of 4 ranks sends an even part" in shares
    assert "dense layers have none, are dropped: 0, 1. foremoe maps needs --dense-layers 2" in dropped
    (step, _) = imported(npy(COUNTS[1]), counts=True)
    np.testing.assert_array_equal(totals(step), DENSE_AWAY[1:2])
    several, _ = imported(npy(COUNTS[0]), npy(COUNTS[1:]), counts=True)
    np.testing.assert_array_equal(totals(several), DENSE_AWAY)


def test_dumps_of_engines_are_detected(imported: Any) -> None:
    for content in (
        {"rank": 0, "logical_count": COUNTS.tolist()},
        {"logical_count": COUNTS.astype(float).tolist(), "average_utilization_rate_over_window": None},
        npz(other=[1], logical_count=COUNTS),
        {"global_expert_load_window": COUNTS.tolist()},
    ):
        load, report = imported(content)
        np.testing.assert_array_equal(totals(load), DENSE_AWAY)
        assert report["format"] == "counts"


def slots_of(counts: Any, redundant: int) -> tuple[Any, Any]:
    """Splits counts [layers, experts] over slots; some experts have two. Returns counts and the expert of each slot."""
    rng = np.random.default_rng(8)
    of = np.stack([rng.permutation([*range(EXPERTS), *rng.choice(EXPERTS, redundant, False)]) for _ in counts])
    out = np.zeros(of.shape, int)
    for layer, row in enumerate(counts):
        for expert, count in enumerate(row):
            first, *rest = np.flatnonzero(of[layer] == expert)
            out[layer, first] = count if not rest else count // 3
            if rest:
                out[layer, rest[0]] = count - count // 3
    return out, of


def test_counts_of_slots_are_added_to_their_experts(imported: Any) -> None:
    slots, of = slots_of(COUNTS[0], 4)
    for content in (
        {"expert_load_pass": slots.tolist(), "physical_to_logical_map": of.tolist()},
        npz(expert_load_window=slots[None], physical_to_logical_map=of),
        {"physical_count": slots.tolist(), "last_physical_to_logical_map": of.tolist()},
    ):
        np.testing.assert_array_equal(totals(imported(content)[0]), DENSE_AWAY[:1])
    load, _ = imported({"expert_load": COUNTS[0].tolist()}, experts=EXPERTS)
    np.testing.assert_array_equal(totals(load), DENSE_AWAY[:1])


def test_records_of_one_pass_are_added_over_ranks(imported: Any) -> None:
    _, of = slots_of(COUNTS[0], 4)
    rng = np.random.default_rng(3)
    of_rank = rng.integers(0, 50, (2, 3, LAYERS, EXPERTS + 4))  # [rank][pass][layer][slot]
    files = [
        {"records": [{"forward_pass_id": 70 + i, "rank": rank, "gatherer_key": "primary",
                      "global_physical_count": of_rank[rank, i].tolist()} for i in range(3)],
         "last_physical_to_logical_map": of.tolist()} for rank in range(2)
    ]  # fmt: skip
    expected = np.zeros((3, LAYERS, EXPERTS), int)
    for _, i, layer, slot in np.ndindex(of_rank.shape):
        expected[i, layer, of[layer, slot]] += of_rank[_, i, layer, slot]
    np.testing.assert_array_equal(totals(imported(*files)[0]), expected)


def test_records_of_tokens_are_counted(imported: Any) -> None:
    _, of = slots_of(COUNTS[0], 4)
    ids = np.random.default_rng(3).integers(0, EXPERTS + 4, (LAYERS, 20, 2))
    ids[:, -3:] = -1  # padding
    record = {"forward_pass_id": 0, "topk_ids_of_layer": ids.tolist(), "physical_count": None}
    load, _ = imported({"records": [record], "last_physical_to_logical_map": of.tolist()})
    expected = np.zeros((1, LAYERS, EXPERTS), int)
    for layer, token, k in np.ndindex(ids.shape):
        if ids[layer, token, k] >= 0:
            expected[0, layer, of[layer, ids[layer, token, k]]] += 1
    np.testing.assert_array_equal(totals(load), expected)


def test_steps_without_tokens_are_dropped(imported: Any) -> None:
    """SGLang's buffer of steps has room for more than were recorded."""
    load, report = imported({"logical_count": np.concatenate([COUNTS, COUNTS * 0]).tolist()})
    np.testing.assert_array_equal(totals(load), DENSE_AWAY)
    assert "3 steps without tokens are dropped" in report["notes"]


def changed(value: Any, *index: int) -> Any:
    array = COUNTS.astype(object)
    array[index] = value
    return array.tolist()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (changed(0.5, 1, 2, 3), {}, "0.in: logical_count[1, 2, 3]: is 0.5; expected a whole number from 0 to "),
        (changed(-1, 0, 2, 3), {}, "0.in: logical_count[0, 2, 3]: is -1; expected a whole number"),
        (changed(float("nan"), 2, 4, 0), {}, "0.in: logical_count[2, 4, 0]: is nan; expected"),
        (changed(float("inf"), 2, 4, 0), {}, "0.in: logical_count[2, 4, 0]: is inf; expected"),
        (changed(2**63 + 5, 2, 4, 0), {}, "0.in: logical_count[2, 4, 0]: is 9.2"),
        (changed(10**30, 2, 4, 0), {}, "0.in: logical_count[2, 4, 0]: is 1e+30"),
        (
            changed(2**40 + 1, 2, 4, 0),
            {},
            "logical_count[2, 4, 0]: is 1099511627777; expected a whole number from 0 to 1099",
        ),
        (changed(None, 2, 4, 0), {}, "0.in: logical_count[2, 4, 0]: is nan"),
        (changed("3", 2, 4, 0), {}, "0.in: logical_count: "),
        ([[1, 2], [3]], {}, "0.in: logical_count: should be numbers in lists of equal lengths"),
        ([1, 2], {}, "0.in: logical_count: is int64 [2]; expected numbers [steps, layers, experts]"),
        ([[[]]], {}, "0.in: logical_count: is float64 [1, 1, 0]; expected"),
        (COUNTS.tolist(), {"ranks": None}, "ranks: is missing: counts have no ranks, and the homes of experts"),
        (COUNTS.tolist(), {"ranks": 5}, "ranks: 5, which does not divide the 12 experts"),
        (COUNTS.tolist(), {"top_k": None}, "top_k: is missing: counts do not tell how many experts a token chooses"),
        (COUNTS.tolist(), {"top_k": 13}, "top_k: 13, but there are 12 experts"),
        (COUNTS.tolist(), {"experts": 16}, "0.in: logical_count: has 12 experts, but 16 were asked for"),
        ((COUNTS * 0).tolist(), {}, "0.in: logical_count: has no tokens"),
    ],
)
def test_refuses_what_is_no_count(imported: Any, content: Any, options: Any, message: str) -> None:
    with pytest.raises(foremoe.InputError) as caught:
        imported(json.dumps({"logical_count": content}), **options)
    assert message in str(caught.value).replace(os.fspath(pathlib.Path(caught.value.file).parent) + "/", "")


def test_refuses_wrong_maps_and_files(imported: Any) -> None:
    slots, of = slots_of(COUNTS[0], 4)
    beyond = of.copy()
    beyond[3, 1] = EXPERTS
    lost = of.copy()
    lost[3, 1] = -1
    slots[3, 1] = 7
    for content, options, message in (
        ({"expert_load": slots.tolist()}, {}, "expert_load: counts 16 slots, and there is no physical_to_logical_map"),
        ({"expert_load": slots.tolist(), "physical_to_logical_map": of[1:].tolist()}, {}, "is [5, 16], but"),
        ({"expert_load": slots.tolist(), "physical_to_logical_map": beyond.tolist()}, {"experts": 12}, "[3, 1]: is 12"),
        ({"expert_load": slots.tolist(), "physical_to_logical_map": lost.tolist()}, {}, "[3, 1]: is -1; there are"),
        (npy(COUNTS)[:-1], {"counts": True}, "is no readable .npy array"),
        (npy(np.array([{}], object)), {"counts": True}, "is no readable .npy array"),
        ({"a": [[1]], "b": [[1]]}, {"counts": True}, "has no counts: expected a key logical_count, "),
        ({"logical_count": [[1] * 12], "records": [3]}, {}, "records[0]: should be an object"),
        ({"logical_count": [[2] * 12]}, {"format": "json", "counts": True}, "counts: cannot be combined"),
    ):
        with pytest.raises(foremoe.InputError) as caught:
            imported(content, **options)
        assert message in str(caught.value)
    with pytest.raises(foremoe.InputError, match="has 5 layers of 12 experts, but the first counts have 4 of 12"):
        imported({"logical_count": COUNTS[:, 1:].tolist()}, {"logical_count": COUNTS.tolist()})


def test_an_array_of_counts_is_not_taken_for_routes(imported: Any) -> None:
    for array in (
        COUNTS[0],
        COUNTS.astype("f4"),
        np.arange(64).reshape(2, 4, 8) * 5000,
        np.arange(160, dtype="u1").reshape(2, 4, 20),
        COUNTS[0].astype("f8"),
    ):
        with pytest.raises(foremoe.InputError, match="If these are tokens per expert, give counts"):
            imported(npy(array), ranks=None, top_k=8)
    for content in (npz(load=COUNTS[0]), json.dumps(COUNTS.tolist()), json.dumps(COUNTS[0].astype(float).tolist())):
        with pytest.raises(foremoe.InputError, match="If these are tokens per expert, give counts"):
            imported(content, ranks=None, top_k=8)
    with pytest.raises(foremoe.InputError, match="ranks: applies only to counts without source ranks"):
        imported(npy([[[0, 1]]]))


def test_a_load_is_made_of_counts_in_memory() -> None:
    for counts in (COUNTS, COUNTS.astype("f4"), COUNTS.tolist(), COUNTS[:, ::-1][:, ::-1]):
        load = foremoe.Load.from_counts(counts, ranks=RANKS, top_k=2, ranks_per_node=2, name="mine")
        np.testing.assert_array_equal(totals(load), DENSE_AWAY)
        assert (load.top_k, load.ranks_per_node, load.name) == (2, 2, "mine")
        assert any("dropped: 0, 1" in remark for remark in load.remarks)
    assert foremoe.Load.from_counts(COUNTS[0], ranks=12, top_k=1).ranks_per_node == 8
    for wrong, message in (
        (COUNTS + 0.5, r"counts\[0, 0, 0\]: is 0.5"),
        (COUNTS[None], "counts: is int64"),
        ("x", "counts"),
    ):
        with pytest.raises(foremoe.InputError, match=message):
            foremoe.Load.from_counts(wrong, ranks=RANKS, top_k=2)
    with pytest.raises(foremoe.InputError, match="ranks"):
        foremoe.Load.from_counts(COUNTS, ranks=0, top_k=2)


def test_every_rank_sends_an_equal_part_up_to_one_token_per_expert() -> None:
    load = foremoe.Load.from_counts(np.ones((1, 12), int), ranks=4, top_k=1)
    np.testing.assert_array_equal(load.array.sum((0, 1, 3)), [3, 3, 3, 3])


def run(folder: pathlib.Path, *arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(foremoe.__file__).parents[1])}
    command = [sys.executable, "-m", "foremoe", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False, **streams)


def test_each_command_names_the_one_that_converts_a_dump_and_maps_places_it(tmp_path: pathlib.Path) -> None:
    """The size of DeepSeek-V3: 61 layers, the first three dense, and 256 experts; 32 redundant ones on 32 ranks."""
    counts = np.random.default_rng(1).zipf(1.4, (61, 256)).clip(max=10**6).astype(float) * 8
    counts[:3] = 0
    (tmp_path / "dump.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    advice = "foremoe import dump.json --ranks R --top-k K --out load.safetensors"
    for words in (["maps", "dump.json", "--to", "sglang", "--out", "m.json"], ["inspect", "dump.json"]):
        done = run(tmp_path, *words)
        assert done.returncode == 2
        assert done.stderr == f"foremoe {words[0]}: dump.json: is a counts file. Convert it with: {advice}\n"
    done = run(tmp_path, "import", "dump.json", "--out", "load.safetensors")
    assert done.stderr.startswith("foremoe import: --ranks: is missing")
    words = advice.replace("R ", "32 ").replace("K ", "8 ").split()[1:]
    done = run(tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a load, 1 micro-step × 58 layers, 256 experts on 32 ranks" in done.stdout
    assert "--dense-layers 3" in done.stdout
    done = run(tmp_path, "maps", "load.safetensors", "--to", "sglang", "--dense-layers", "3", "--out", "m.json")
    assert "288 replicas of 256 experts on 32 ranks in 58 MoE layers" in done.stdout
    rows = json.loads((tmp_path / "m.json").read_text())["physical_to_logical_map"]
    assert [len(row) for row in rows] == [288] * 61
    assert all(set(row) == set(range(256)) for row in rows)


def test_files_are_read_from_standard_input_and_pipes(tmp_path: pathlib.Path) -> None:
    text = json.dumps({"logical_count": COUNTS.tolist()})
    options = ["--ranks", "4", "--top-k", "2", "--out"]
    for i, path in enumerate(("-", "/dev/stdin")):
        done = run(tmp_path, "import", path, *options, f"{i}", input=text)
        assert (done.returncode, done.stderr) == (0, "")
        np.testing.assert_array_equal(totals(foremoe.read_load(tmp_path / f"{i}")), DENSE_AWAY)
    (tmp_path / "file.json").write_text(text)
    with (tmp_path / "file.json").open() as file:
        assert run(tmp_path, "import", "-", *options, "2", stdin=file).returncode == 0
    done = run(tmp_path, "import", "-", *options, "3", input="")
    assert done.stderr == "foremoe import: standard input: is empty\n"
    routes = json.dumps({"routed_experts": [[[0, 1]], [[2, 3]]]})
    assert run(tmp_path, "routes", "check", "-", input=routes).returncode == 0
    done = run(tmp_path, "inspect", "-", input=text)
    assert done.stderr == "foremoe inspect: -: standard input is not read here: give a file\n"


def test_a_damaged_archive_is_refused(imported: Any) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("logical_count.npy", b"\x93NUMPY\x01\x00\xff\xff")
    with pytest.raises(foremoe.InputError, match=r"logical_count\.npy: is no readable \.npy array"):
        imported(out.getvalue())
