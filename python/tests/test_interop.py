"""With the safetensors package, reads files that the command wrote. Checks names, shapes, dtypes, metadata and sums."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

ROLLOUT = Path(__file__).resolve().parents[2] / "data" / "rollout-math.safetensors"


def read(path, kind):
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        assert metadata["format"] == kind, (path, metadata)
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def expect(tensors, name, dtypes, shape):
    tensor = tensors[name]
    assert str(tensor.dtype) in dtypes.split(), (name, tensor.dtype)
    assert tensor.shape == tuple(shape), (name, tensor.shape, shape)
    return tensor


def check_trace(path):
    tensors, metadata = read(path, "foremoe.trace/1")
    routes = tensors["routed_experts"]
    experts, top_k = int(metadata["num_experts"]), int(metadata["top_k"])
    expect(
        tensors,
        "routed_experts",
        "uint8 uint16 int16 int32",
        (len(routes), len(json.loads(metadata["layer_ids"])), top_k),
    )
    offsets = expect(tensors, "cu_seqlens", "int64", tensors["cu_seqlens"].shape)
    assert offsets[0] == 0 and offsets[-1] == len(routes) and (np.diff(offsets) >= 0).all()
    sentinel = -1 if np.issubdtype(routes.dtype, np.signedinteger) else np.iinfo(routes.dtype).max
    missing = (routes == sentinel).all(axis=2)
    assert (missing | ((routes >= 0) & (routes < experts)).all(axis=2)).all()
    ids = np.sort(routes.astype(np.int64), axis=2)
    assert (missing | (np.diff(ids, axis=2) > 0).all(axis=2)).all(), "a row repeats an expert"


def check_load(path):
    """Counts the load of the rollout with numpy, asserts that the file has the same counts, and returns them."""
    tensors, metadata = read(path, "foremoe.load/1")
    rollout, described = read(ROLLOUT, "foremoe.trace/1")
    routes, step, rank = rollout["routed_experts"], rollout["micro_step"], rollout["rank"]
    experts = int(described["num_experts"])
    assert int(metadata["num_experts"]) == experts and metadata["top_k"] == described["top_k"]
    shape = (step.max() + 1, routes.shape[1], rank.max() + 1, experts)
    load = expect(tensors, "load", "uint16 uint32 int32 int64", shape)

    counted = np.zeros(shape, np.int64)
    sequence = np.repeat(np.arange(len(step)), np.diff(rollout["cu_seqlens"]))
    token, layer, k = np.nonzero(routes != 255)
    where = (step[sequence[token]], layer, rank[sequence[token]], routes[token, layer, k])
    np.add.at(counted, where, 1)
    assert (load == counted).all(), "the counts differ from numpy's"
    return counted


def check_plan(path, load, guest_slots):
    tensors, metadata = read(path, "foremoe.plan/1")
    steps, layers, ranks, experts = load.shape
    shape = (steps, layers, ranks, experts // ranks + guest_slots)
    holds = expect(tensors, "slot_expert", "int16 int32", shape)
    quota = expect(tensors, "slot_tokens", "uint32 int64", shape)
    expect(tensors, "event_micro_step", "int32", (steps,))
    expect(tensors, "event_pass", "uint8", (steps,))
    home = expect(tensors, "home", "int32", (layers, experts))
    assert (home == np.arange(experts) // (experts // ranks)).all(), "homes are contiguous unless told otherwise"
    assert metadata["residency"] == "resident" and metadata["policy"] == "foremoe" and metadata["in_flight"] == "1"
    assert int(metadata["guest_slots"]) == guest_slots
    assert isinstance(json.loads(metadata["options"]), dict)
    assert metadata["load_digest"] == hashlib.sha256(load.astype("<i8").tobytes()).hexdigest()

    served = np.zeros((steps, layers, experts), np.int64)
    step, layer, rank, slot = np.nonzero(holds >= 0)
    np.add.at(served, (step, layer, holds[step, layer, rank, slot]), quota[step, layer, rank, slot])
    assert (served == load.sum(axis=2)).all(), "quotas do not sum to the load"
    assert (tensors["max_load"] == quota.sum(axis=3).max(axis=2)).all()


def test_safetensors_reads_our_trace_load_and_plan(tmp_path):
    def foremoe(*arguments):
        command = [sys.executable, "-m", "foremoe", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    trace, load, plan = (tmp_path / f"{kind}.safetensors" for kind in ("trace", "load", "plan"))
    foremoe("synth", "--kind", "trace", "--shape", "Mixtral-8x7B", "--ranks", "4", "--micro-steps", "2",
            "--tokens-per-rank", "256", "--out", trace)  # fmt: skip
    foremoe("collect", ROLLOUT, "--out", load)
    foremoe("plan", ROLLOUT, "--guest-slots", "1", "--out", plan)
    check_trace(trace)
    check_plan(plan, check_load(load), guest_slots=1)
