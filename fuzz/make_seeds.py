#!/usr/bin/env python3
"""Write small, well-formed inputs for every fuzz target: fuzz/make_seeds.py DIRECTORY

Writes DIRECTORY/<target>/<name> for every fuzz/<target>.cpp, using only the standard library. Inputs of importers start with three
bytes of options (fuzzed_import.h).
"""

import hashlib
import json
import shutil
import struct
import sys
from pathlib import Path

SIZES = {"U8": "B", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "I64": "q"}


def safetensors(tensors, metadata):
    """Return a safetensors file. tensors: {name: (dtype, shape, flat values)}"""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, values) in tensors.items():
        packed = struct.pack(f"<{len(values)}{SIZES[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def trace(dtype, sentinel, batching):
    """Return a trace: 3 sequences of 2 tokens, 2 layers, top-2 of 4 experts. The last tokens have no route."""
    routes = []
    for token in range(6):
        for layer in range(2):
            routes += [sentinel] * 2 if token % 2 else [(token + layer) % 4, (token + layer + 1) % 4]
    tensors = {
        "routed_experts": (dtype, [6, 2, 2], routes),
        "cu_seqlens": ("I64", [4], [0, 2, 4, 6]),
    }
    metadata = {"format": "foremoe.trace/1", "num_experts": "4", "top_k": "2", "layer_ids": "[0, 5]", "model": "m", "origin": "o"}
    if batching:
        tensors |= {"prompt_lengths": ("I32", [3], [1, 1, 0]), "group_ids": ("I32", [3], [0, 0, 1])}
        tensors |= {"micro_step": ("I32", [3], [0, 1, 1]), "rank": ("I32", [3], [0, 0, 1])}
        metadata |= {"ranks": "2", "ranks_per_node": "2"}
    return safetensors(tensors, metadata)


LOAD = [5, 1, 0, 2, 3, 3, 1, 1, 0, 0, 7, 1, 2, 2, 2, 2]  # 2 micro-steps, 1 layer, 2 ranks, 4 experts; also in plan_fuzz.cpp


def load(dtype):
    return safetensors({"load": (dtype, [2, 1, 2, 4], LOAD)},
                       {"format": "foremoe.load/1", "num_experts": "4", "top_k": "2", "ranks_per_node": "2", "name": "tiny"})


def plan(in_flight, residency):
    """Return a plan for LOAD with 1 guest slot. Expert 0 is a guest of rank 1 in the second micro-step."""
    order = [(0, 0), (1, 0)] if in_flight == 1 else [(0, 0), (1, 0), (0, 1), (1, 1)]
    experts, tokens = [], []
    for micro_step, _ in order:
        experts += [0, 1, -1, 2, 3, 0 if micro_step else -1]
        tokens += [1, 2, 0, 9, 3, 1] if micro_step else [8, 4, 0, 1, 3, 0]
    tensors = {
        "slot_expert": ("I16", [len(order), 1, 2, 3], experts),
        "slot_tokens": ("U32", [len(order), 1, 2, 3], tokens),
        "event_micro_step": ("I32", [len(order)], [m for m, _ in order]),
        "event_pass": ("U8", [len(order)], [p for _, p in order]),
        "home": ("I32", [1, 4], [0, 0, 1, 1]),
        "max_load": ("I64", [2, 1], [12, 13]),
        "lower_bound": ("I64", [2, 1], [8, 8]),
    }
    options = {"guest-slots": 1, "residency": residency, "in-flight": in_flight, "max-copies-per-rank": 1}
    return safetensors(tensors, {
        "format": "foremoe.plan/1", "policy": "foremoe", "residency": residency, "guest_slots": "1", "ranks_per_node": "2",
        "in_flight": str(in_flight), "options": json.dumps(options), "load_digest": hashlib.sha256(struct.pack("<16q", *LOAD)).hexdigest()})


def homes():
    """Return the homes of 1 layer with 4 experts on 2 ranks."""
    return safetensors({"home": ("I32", [1, 4], [0, 1, 1, 0])},
                       {"format": "foremoe.homes/1", "ranks": "2", "ranks_per_node": "2", "origin": "tiny"})


def npy(descr, shape, values):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    code = {"|u1": "B", "<u2": "H", "<i2": "h", "<i4": "i"}[descr]
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack(f"<{len(values)}{code}", *values)


def imports():
    routes = [0, 1, 2, 3, 1, 2, 3, 0]  # 2 tokens, 2 layers, top-2
    array = npy("|u1", (2, 2, 2), routes)
    arrays = {"npy": b"\x00\x00\x20" + array, "detected": b"\x01\x00\x20" + array}
    rows = [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]
    calls = [{"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0, "num_tokens": 2, "topk": 2,
              "top_indices": [row[layer] for row in rows]} for layer in range(2)]
    counts = [{"iter": 0, "block": "decoder", "layer": layer, "tpe": [[1, 2, 1, 0], [0, 2, 2, 0]]} for layer in range(2)]
    lines = lambda objects: "".join(json.dumps(o) + "\n" for o in objects).encode()
    megatron = {
        "megatron-trace": b"\x00\x00\x20" + lines(calls),
        "megatron-counts": b"\x01\x00\x22" + lines(counts),
        "detected": b"\x02\x00\x20" + lines(calls),
    }
    return arrays, megatron


CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [],
}


def main():
    root = Path(sys.argv[1])
    data = Path(__file__).resolve().parent.parent / "data"
    arrays, megatron = imports()
    seeds = {
        "trace_fuzz": {"u8": trace("U8", 255, True), "i16": trace("I16", -1, False)},
        "load_fuzz": {"u16": load("U16"), "i64": load("I64")},
        "plan_fuzz": {"resident": plan(1, "resident"), "in-flight": plan(2, "resident"), "shared": plan(1, "shared")},
        "import_npy_fuzz": arrays,
        "import_megatron_fuzz": megatron,
        "homes_fuzz": {"two-ranks": homes()},
        "config_fuzz": {"qwen3": json.dumps(CONFIG).encode()},
        "model_fuzz": {name: (data / "models" / f"{name}.toml").read_bytes() for name in ("Mixtral-8x7B", "DeepSeek-V3")},
        "cluster_fuzz": {
            "h100": (data / "clusters" / "h100.toml").read_bytes(),
            "based": b'name = "ours"\nbase = "h100"\nranks_per_node = 4\n',
            "not-ascii": '# é\nname = "é"  # é\nbase = "h100"\n'.encode(),
        },
    }
    for target, inputs in seeds.items():
        shutil.rmtree(root / target, ignore_errors=True)  # removes seeds with former names
        (root / target).mkdir(parents=True, exist_ok=True)
        for name, content in inputs.items():
            (root / target / name).write_bytes(content)


if __name__ == "__main__":
    main()
