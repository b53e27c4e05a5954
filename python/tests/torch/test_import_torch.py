"""Imports rollouts that slime and miles save. The files are written by torch, which the importer does not use."""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import time
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

import foremoe
from foremoe import _route_checks
from foremoe._importing import decoder

ROUTES = np.array([[[4, 1], [0, 0]], [[5, 6], [7, 3]]], np.int32)  # [tokens − 1, layers, top_k]


def sample(routes: Any, **more: Any) -> dict[str, Any]:
    """Sample.to_dict() of miles."""
    return {
        "index": 0,
        "prompt": [{"role": "user", "content": "…"}],
        "tokens": [7, 8, 9],
        "response_length": 2,
        "rollout_log_probs": [-0.5, -0.5],
        "multimodal_train_inputs": {"pixel_values": torch.zeros(2, 2)},
        "rollout_routed_experts": routes,
        "metadata": {"when": collections.Counter("a"), "where": pathlib.PurePosixPath("x")},
    } | more


def saved(*samples: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save({"rollout_id": 3, "metadata": {}, "samples": list(samples)}, out)
    return out.getvalue()


def archive(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in members.items():
            file.writestr("x/" + name.replace("_", "."), data)
    return out.getvalue()


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "0.pt"


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_arrays_tensors_and_lists_are_read(path: pathlib.Path, dtype: str) -> None:
    rows = ROUTES.astype(dtype)
    both = torch.from_numpy(np.concatenate([rows[::-1], rows]))
    values = [rows, np.asfortranarray(rows), rows.tolist(), torch.from_numpy(rows), both[2:]]
    path.write_bytes(saved(*(sample(value) for value in values)))
    trace, report = foremoe.import_files(path)
    assert isinstance(trace, foremoe.Trace) and trace.prompt_lengths is not None
    routes = trace.routed_experts.astype(int)
    routes[routes == np.iinfo(trace.routed_experts.dtype).max] = -1
    expected = np.where([[[False], [True]], [[False], [False]]], -1, ROUTES)  # a dense layer's zeros
    np.testing.assert_array_equal(routes, np.concatenate([expected] * len(values)))
    assert (report["format"], report["last_tokens_without_route"]) == ("torch", len(values))
    assert trace.prompt_lengths.tolist() == [1] * len(values)
    path.write_bytes(saved(sample(rows, response_length=0)))  # the last token of the prompt has no row
    assert foremoe.import_files(path)[0].prompt_lengths.tolist() == [2]  # type: ignore[union-attr]


def test_weight_versions_of_samples_are_checked(path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(saved(sample(ROUTES, weight_versions=["3", "3"]), sample(ROUTES, weight_versions=[3, 4])))
    assert _route_checks.main(['{"options": {}, "json": false}', str(path)]) == 1
    assert (
        "weight-versions at sequence 1: sampled with weights 3 and 4, but sequence 0 with 3" in capfd.readouterr().out
    )


def test_lengths_that_do_not_fit_the_rows_are_unknown(path: pathlib.Path) -> None:
    path.write_bytes(saved(sample(ROUTES, tokens=[7, 8, 9, 9, 9])))  # such as a picture, of fewer tokens than rows
    trace, report = foremoe.import_files(path)
    assert isinstance(trace, foremoe.Trace) and trace.prompt_lengths is None
    assert report["last_tokens_without_route"] == 0


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder


def test_a_file_cannot_run_code(path: pathlib.Path) -> None:
    attack = Attack(path.parent / "made")
    path.write_bytes(saved(sample(ROUTES, metadata=attack, reward=attack)))
    assert foremoe.import_files(path)[0].num_sequences == 1
    path.write_bytes(saved(sample(attack)))
    with pytest.raises(foremoe.InputError, match=r"samples\[0\]: rollout_routed_experts: is neither an array nor"):
        foremoe.import_files(path)
    assert not attack.folder.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (saved(sample(ROUTES), sample(None)), "samples[1]: rollout_routed_experts: is missing: was the rollout"),
        (saved(sample(ROUTES), {"tokens": []}), "samples[1]: rollout_routed_experts: is missing"),
        (saved(sample(ROUTES), sample(None, status="aborted")), "is missing (status aborted): was the rollout"),
        (saved(sample(ROUTES, tokens=[7] * 9, multimodal_train_inputs=None)), "has 2 rows for 9 tokens (by tokens)"),
        (saved(sample(ROUTES[0])), "is int32 [2, 2]; expected integers [rows, layers, top_k]"),
        (saved(sample(ROUTES[:0])), "samples[0]: rollout_routed_experts: has no tokens"),
        (saved(sample(ROUTES.astype(np.float32))), "is float32 [2, 2, 2]; expected integers [rows, layers, top_k]"),
        (saved(sample(ROUTES.astype(object))), "is an array of dtype |O8; expected integers"),
        (saved(sample(ROUTES.astype(">i4"))), "is an array of dtype >i4; expected integers"),
        (saved(sample(torch.ones(2, 1, 2))), "is float32 [2, 1, 2]; expected integers [rows"),
        (saved(sample(torch.ones(2, 2, dtype=torch.int32))), "is int32 [2, 2]; expected integers [rows"),
        (saved(sample(torch.from_numpy(ROUTES).transpose(0, 1))), "is a tensor of strides (2, 4, 1); expected a"),
        (saved(sample([[[1, 2]], [[1]]])), "rollout_routed_experts[1, 0]: should be a list of 2 experts"),
        (saved(sample("AAAA")), "is neither an array nor a tensor nor a list"),
        (saved(sample(-ROUTES)), "rollout_routed_experts[0, 0, 0]: expert -4"),
        (archive(data_pkl=pickle.dumps([1])), "samples: is no list: slime and miles save rollouts with"),
        (archive(data_pkl=pickle.dumps({"samples": []})), "holds no sequence"),
        (archive(data_pkl=b"\x80\x02}q"), "x/data.pkl: is damaged: "),
        (archive(data_pkl=b""), "x/data.pkl: is damaged: "),
    ],
)  # fmt: skip
def test_damaged_rollouts_are_rejected_with_their_position(path: pathlib.Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.import_files(path, strict=True)
    assert f"{path}: " in str(raised.value) and words in str(raised.value)


def test_pickles_with_any_byte_altered_are_read_or_rejected() -> None:
    with zipfile.ZipFile(io.BytesIO(saved(sample(ROUTES, metadata={}), sample(torch.from_numpy(ROUTES))))) as good:
        members = {name: good.read(name) for name in good.namelist() if not name.startswith("archive/.")}
    pickled = members["archive/data.pkl"]
    decode = decoder({})
    for at in range(len(pickled)):
        for byte in (b"\xff", b"R", b"."):
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w") as file:
                for name, data in members.items():
                    altered = pickled[:at] + byte + pickled[at + 1 :] if data is pickled else data
                    file.writestr(name, altered)
            try:
                decode("torch", "in", out.getvalue())
            except foremoe.InputError as error:
                assert str(error).startswith("in: ")


def opcodes(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


GLOBAL = {name: f"c{module}\n{name}\n".encode() for module, name in [("numpy", "dtype"), ("_codecs", "encode")]}
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
LONG = b"\x80\x02" + opcodes("a" * 2**20) + b"q\x01"


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", "samples: is no list"),
        (LONG + GLOBAL["encode"] + b"q\x02(" + b"h\x02h\x01X\x06\0\0\0latin1\x86R" * 3000 + b"t.", "more bytes"),
        (LONG + GLOBAL["dtype"] + b"h\x01\x85R" + b"(K\x03h\x01tb" * 3000 + b".", "samples: is no list"),
        (b"\x80\x02](K\1K\1eq\x010](" + b"h\x01" * 3000 + b"eq\x020](" + b"h\x02" * 10**5 + b"e.", "expands to"),
        (b"\x80\x02}" + opcodes("samples") + b"]q\x01h\x01as.", "contains itself"),
        (b"\x80\x02}" + opcodes("samples") + b"](}q\1" + b"h\1" * 10**5 + b"es.", r"\[1\]: is samples.0. again"),
        (b"\x80\x02N" + b"\x85" * 200_000 + b".", "nests deeper than 64"),
        (b"\x80\x02}K\1" + b"2\x86" * 45 + b"K\1s.", "has a tuple as a key"),
        (b"\x80\x02}K\1" + b"\x85" * 300_000 + b"K\1s.", "has a tuple as a key"),
        (b"\x80\x02N(K\1K\1" + b"2\x86" * 45 + b"tQ.", "has a tuple instead of a name"),
        (b"\x80\x02" + GLOBAL["dtype"] + b"K\1\x85R(K\1K\1" + b"2\x86" * 45 + b"tb.", "instead of a name"),
        (b"\x80\x02\x8b\xa0\x0f\0\0" + b"\x7f" * 4000 + b".", "is damaged: has opcode 139"),
    ],
    ids=["memo", "encode", "dtype", "laughs", "itself", "twice", "deep", "key", "deep key", "id", "name", "long"],
)  # fmt: skip
def test_small_pickles_take_little_time_and_memory(pickled: bytes, words: str) -> None:
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(foremoe.InputError, match=words):
        decoder({})("torch", "in", archive(data_pkl=pickled))
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()
    assert time.process_time() - began < 10


def test_routes_that_samples_share_are_limited() -> None:
    shared = sample(torch.zeros(2**12, 2, 2, dtype=torch.int64))
    problems = [decoded[10] for decoded in decoder({})("torch", "in", saved(*[dict(shared) for _ in range(40)]))]
    assert problems[0] == "" and "is shared" in problems[-1]


def test_a_file_does_not_change_how_the_next_is_read(path: pathlib.Path) -> None:
    path.write_bytes(saved(sample(torch.from_numpy(ROUTES))))
    hostile = TENSOR + b"N}" + opcodes("__new__") + GLOBAL["dtype"] + b"s\x86b0"
    content = b"\x80\x02" + hostile + b"}."
    with pytest.raises(foremoe.InputError):
        decoder({})("torch", "in", archive(data_pkl=content))
    assert foremoe.import_files(path)[0].num_sequences == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_dumps_of_counts_are_read(path: pathlib.Path, dtype: torch.dtype) -> None:
    """As SGLang's recorder saves them, in modes stat and per_pass."""
    counts = torch.arange(2 * 3 * 8).reshape(2, 3, 8)
    of = torch.stack([torch.randperm(8) for _ in range(3)])
    slots = torch.gather(counts, 2, of.expand(2, 3, 8))
    records = [{"forward_pass_id": i, "rank": 0, "global_physical_count": slots[i].to(dtype)} for i in range(2)]
    for dump, asked in (
        ({"rank": 0, "logical_count": counts.to(dtype), "average_utilization_rate_over_window": None}, {}),
        ({"records": records, "last_physical_to_logical_map": of}, {}),
        (counts.to(dtype), {"counts": True}),
        ({"anything": counts.to(dtype)[:, :, :]}, {"counts": True}),
        ({"logical_count": counts.numpy()}, {}),
    ):
        torch.save(dump, path)
        load, report = foremoe.import_files(path, ranks=4, top_k=2, **asked)
        assert isinstance(load, foremoe.Load)
        np.testing.assert_array_equal(load.array.sum(2), counts.numpy())
        assert report["format"] == "counts"
    torch.save({"logical_count": counts.bfloat16()}, path)
    with pytest.raises(
        foremoe.InputError, match="logical_count: is a tensor in a BFloat16Storage; expected integers, "
    ):
        foremoe.import_files(path, ranks=4, top_k=2)


def test_a_load_is_made_of_tensors() -> None:
    counts = torch.arange(3 * 8).reshape(3, 8)
    for dtype in (torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        load = foremoe.Load.from_counts(counts.to(dtype).requires_grad_(dtype.is_floating_point), ranks=2, top_k=2)
        np.testing.assert_array_equal(load.array.sum(2)[0], counts.numpy())
