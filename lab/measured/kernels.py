#!/usr/bin/env python3
"""Measures kernels of one MoE layer on a GPU, and compares the cost model with them: lab/measured/README.md.

    python lab/measured/kernels.py measure FILE          needs a CUDA GPU, PyTorch 2.10 and the package foremoe
    python lab/measured/kernels.py check FILE [CLUSTER]  needs the package foremoe; CLUSTER: a name or a file

One rank runs at a time, so nothing is measured that crosses a link between GPUs. Experts are bf16 grouped GEMMs of
PyTorch (CUTLASS); reordering of rows and SwiGLU are separate kernels, as in transformers. Attention is PyTorch's
scaled_dot_product_attention. Weight gradients are bf16 and not accumulated. A time is the median of several runs
back to back, without the time in which the CPU launches kernels.
"""

from __future__ import annotations

import itertools
import json
import logging
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import foremoe

DATA = pathlib.Path(__file__).parents[2] / "data"
# The experts of one rank. Vocabulary and layers are irrelevant.
SHAPES = {
    "Qwen3-30B-A3B, EP 8": {"experts": 16, "hidden": 2048, "intermediate": 768, "heads": 32, "kv_heads": 4},
    "gpt-oss-20b, EP 8": {
        "experts": 4, "hidden": 2880, "intermediate": 2880, "heads": 64, "kv_heads": 8, "head_width": 64,
    },
    "DeepSeek-V3, EP 64": {"experts": 4, "hidden": 7168, "intermediate": 2048, "heads": 64, "kv_heads": 8},
}  # fmt: skip
ROWS_PER_EXPERT = (16, 64, 128, 136, 256, 512, 1024, 2048, 4096)
LENGTHS = (1024, 4096, 16384)
LOADS = {"load-q30-ep8-bursty": "Qwen3-30B-A3B, EP 8", "rollout-gptoss": "gpt-oss-20b, EP 8"}
ROWS_BESIDE_COPIES = (256, 2048)
LAYERS, MICRO_STEPS, GUEST_SLOTS = 2, 4, 2  # of a load
LEAST_ERROR, MOST_ERROR = -0.3, 1.0  # set after the results were known: they detect regressions
ALIGN = 8  # rows; grouped GEMMs need multiples of 16 bytes in the weights' gradient


def model_of(shape: str, experts: int = 0) -> dict[str, Any]:
    """The shape for foremoe.simulate(). experts: of all ranks, if not of one."""
    of = {"head_width": 128, **SHAPES[shape], "name": shape, "moe_layers": LAYERS, "top_k": 1, "vocabulary": 1}
    return of | ({"experts": experts} if experts else {})


def replica_rows(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Rows of each replica with vanilla EP and with ForeMoE, int64 [micro_steps, layers, ranks, slots]."""
    load = part_of(name)
    rows = {}
    for policy in ("vanilla", "foremoe"):
        plan = foremoe.plan(load, policy=policy, guest_slots=GUEST_SLOTS)
        first = {int(m): e for e, m in reversed(list(enumerate(plan.event_micro_step)))}
        rows[policy] = np.stack([plan.slot_tokens[first[m]] for m in range(load.num_micro_steps)])
    return rows


def part_of(name: str) -> foremoe.Load:
    """The first layers and micro-steps of a load. A row counts as a token of one expert."""
    path = DATA / f"{name}.safetensors"
    if name.startswith("load"):
        load = foremoe.read_load(path)
    else:
        load = foremoe.collect(foremoe.read_trace(path), ranks=8, tokens_per_rank=8192)
    counts = np.ascontiguousarray(load.array[:MICRO_STEPS, :LAYERS])
    return foremoe.Load.from_array(counts, top_k=1, ranks_per_node=8)


class Gpu:
    """Kernels of one layer, and their seconds."""

    def __init__(self, runs: int = 10) -> None:
        import torch

        self.torch, self.runs = torch, runs
        self.device = torch.device("cuda")
        self.random = torch.Generator(self.device).manual_seed(1)

    def draw(self, *shape: int, grad: bool = False) -> Any:
        drawn = self.torch.randn(shape, generator=self.random, device=self.device, dtype=self.torch.bfloat16)
        return drawn.mul_(shape[-1] ** -0.5).requires_grad_(grad)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median over runs. The GPU sleeps while the CPU launches all runs. Does not wait for other streams."""
        torch = self.torch
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.runs + 1)]
        for _ in range(2):
            work()
        torch.cuda._sleep(40_000_000)  # cycles, about 20 ms
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        marks[-1].synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3

    def passes(self, forward: Callable[[], Any], inputs: Iterable[Any]) -> list[float]:
        """Seconds of a forward, and of its backward with respect to inputs."""
        torch, inputs = self.torch, list(inputs)
        result = forward()
        gradient = torch.randn_like(result)
        with torch.no_grad():
            once = self.seconds(forward)
        return [once, self.seconds(lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))]

    def experts(self, shape: str, rows: Iterable[int]) -> list[float]:
        """Sorts rows by expert, runs the replicas' grouped GEMMs, and reorders the results. rows: [replica]."""
        torch, of = self.torch, SHAPES[shape]
        padded = [(n + ALIGN - 1) // ALIGN * ALIGN for n in map(int, rows) if n > 0]
        offsets = torch.tensor(padded, device=self.device).cumsum(0).to(torch.int32)
        x = self.draw(sum(padded), of["hidden"], grad=True)
        up = self.draw(len(padded), 2 * of["intermediate"], of["hidden"], grad=True)
        down = self.draw(len(padded), of["hidden"], of["intermediate"], grad=True)
        order = torch.randperm(len(x), generator=self.random, device=self.device)
        back = torch.argsort(order)
        permute = permutation(torch)

        def forward() -> Any:
            gated = torch.nn.functional.grouped_mm(permute(x, order, back), up.mT, offs=offsets)
            gate, linear = gated.chunk(2, -1)
            inside = torch.nn.functional.silu(gate) * linear
            return permute(torch.nn.functional.grouped_mm(inside, down.mT, offs=offsets), back, order)

        return self.passes(forward, (x, up, down))

    def dense(self, shape: str, length: int) -> dict[str, list[float]]:
        """Attention of one sequence, and its projections with two norms and residuals."""
        torch, of = self.torch, model_of(shape)
        heads, kv_heads, width, hidden = of["heads"], of["kv_heads"], of["head_width"], of["hidden"]
        functional = torch.nn.functional
        q, k, v = (self.draw(1, n, length, width, grad=True) for n in (heads, kv_heads, kv_heads))
        x, norm = self.draw(length, hidden, grad=True), self.draw(hidden, grad=True)
        into = self.draw((heads + 2 * kv_heads) * width, hidden, grad=True)
        out = self.draw(hidden, heads * width, grad=True)

        def scores() -> Any:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def projections() -> Any:
            first = functional.linear(functional.rms_norm(x, (hidden,), norm), into)[:, : heads * width]
            mixed = x + functional.linear(first, out)
            return mixed + functional.rms_norm(mixed, (hidden,), norm)

        return {"scores": self.passes(scores, (q, k, v)), "projections": self.passes(projections, (x, norm, into, out))}

    def memory(self) -> dict[str, float]:
        """Bytes per second of copies, and the time between two empty kernels."""
        torch, big = self.torch, 1 << 30
        here, there = (torch.empty(big, dtype=torch.uint8, device=self.device) for _ in range(2))
        pinned, one = torch.empty(big, dtype=torch.uint8).pin_memory(), self.draw(1)
        return {
            "device, bytes read and written per second": 2 * big / self.seconds(lambda: there.copy_(here)),
            "host to device, bytes per second": big / self.seconds(lambda: here.copy_(pinned, non_blocking=True)),
            "device to host, bytes per second": big / self.seconds(lambda: pinned.copy_(here, non_blocking=True)),
            "seconds per small kernel": self.seconds(lambda: [one.add_(1) for _ in range(100)]) / 100,
        }

    def overlap(self, shape: str, rows: int) -> dict[str, float]:
        """Seconds of GEMMs alone and beside copies of experts from the host, and bytes per second of those copies."""
        torch, of = self.torch, SHAPES[shape]
        size = 3 * of["hidden"] * of["intermediate"]
        x = self.draw(of["experts"] * rows, of["hidden"])
        up = self.draw(of["experts"], 2 * of["intermediate"], of["hidden"])
        offsets = torch.arange(1, of["experts"] + 1, device=self.device, dtype=torch.int32) * rows
        experts = [torch.empty(size, dtype=torch.bfloat16, device=self.device) for _ in range(8)]
        pinned = [torch.empty(size, dtype=torch.bfloat16).pin_memory() for _ in experts]
        side, marks = torch.cuda.Stream(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]

        def compute() -> None:
            for _ in range(10):
                torch.nn.functional.grouped_mm(x, up.mT, offs=offsets)

        alone = self.seconds(compute)
        torch.cuda.synchronize()
        times = int((alone * (self.runs + 4) + 0.04) * 55e9 / (2 * size) * 1.5)  # outlasts the sleep and all GEMMs
        with torch.cuda.stream(side):
            marks[0].record()
            for i in range(times):
                experts[i % 8].copy_(pinned[i % 8], non_blocking=True)
            marks[1].record()
        beside = self.seconds(compute)
        assert not marks[1].query(), "the copies ended before the GEMMs"
        marks[1].synchronize()
        return {
            "alone": alone, "beside": beside, "bytes per second": 2e3 * size * times / marks[0].elapsed_time(marks[1]),
        }  # fmt: skip


def permutation(torch: Any) -> Callable[[Any, Any, Any], Any]:
    """Returns a function (x, order, back) that reorders rows, and their gradients back."""

    class Permute(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, order: Any, back: Any) -> Any:
            ctx.save_for_backward(back)
            return x.index_select(0, order)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient.index_select(0, ctx.saved_tensors[0]), None, None

    of: Callable[[Any, Any, Any], Any] = Permute.apply
    return of


def measure(path: str) -> None:
    gpu = Gpu()
    torch = gpu.torch
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "memory": gpu.memory(),
        "experts": {}, "dense": {}, "overlap": {}, "loads": {},
    }  # fmt: skip
    for shape, of in SHAPES.items():
        found["experts"][shape] = {n: gpu.experts(shape, [n] * of["experts"]) for n in ROWS_PER_EXPERT}
        found["dense"][shape] = {n: gpu.dense(shape, n) for n in LENGTHS}
        found["overlap"][shape] = {n: gpu.overlap(shape, n) for n in ROWS_BESIDE_COPIES}
        torch.cuda.empty_cache()
    for name, shape in LOADS.items():
        found["loads"][name] = {
            policy: [[[gpu.experts(shape, rank) for rank in layer] for layer in of] for of in rows]
            for policy, rows in replica_rows(name).items()
        }
    rounded = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.4g}"))
    pathlib.Path(path).write_text(json.dumps(rounded) + "\n")


# Comparison with the cost model


def modelled(load: foremoe.Load, model: dict[str, Any], cluster: str, policy: str, **options: Any) -> dict[str, Any]:
    """Seconds of each part in the forward and the backward of a step: the busiest rank's, over layers."""
    (found,) = foremoe.simulate(
        load, [policy], cluster=cluster, model=model, keep_activations=True, guest_slots=GUEST_SLOTS, **options
    )
    forward, update = (phase["parts"] for phase in found["phases"])
    return {part: [forward[part], update[part] - forward[part]] for part in ("dense", "experts")}


def compared(found: dict[str, Any], cluster: str) -> Iterator[tuple[str, list[float], list[float], float]]:
    """Yields each quantity with its modelled and measured values in the two passes, and their factor for printing."""
    for shape, of in SHAPES.items():
        one = model_of(shape) | {"moe_layers": 1}
        for n, seconds in found["experts"][shape].items():
            load = foremoe.Load.from_array(np.full((1, 1, 1, of["experts"]), int(n)), top_k=1, ranks_per_node=1)
            experts = modelled(load, one, cluster, "vanilla")["experts"]
            yield f"{shape}: {int(n):,} rows per expert", experts, seconds, 1e3
        for n, parts in found["dense"][shape].items():
            counts = np.zeros((1, 1, 1, of["experts"]), np.int64)
            counts[..., 0] = int(n)
            load = foremoe.Load.from_array(counts, top_k=1, ranks_per_node=1)
            dense = modelled(load, one, cluster, "vanilla", sequence_tokens=int(n))["dense"]
            yield f"{shape}: attention, {int(n):,} tokens", dense, list(np.sum(list(parts.values()), 0)), 1e3
    for name, shape in LOADS.items():
        load = part_of(name)
        model = model_of(shape, load.num_experts)
        of_policy = {
            policy: (modelled(load, model, cluster, policy)["experts"], np.array(of).max(2).sum((0, 1)))
            for policy, of in found["loads"][name].items()
        }
        for policy, (model_says, measured) in of_policy.items():
            yield f"{name}: busiest rank, {policy}", model_says, list(measured), 1e3
        ratios = [np.divide(a, b) for a, b in zip(of_policy["vanilla"], of_policy["foremoe"], strict=True)]
        yield f"{name}: vanilla ÷ foremoe", list(ratios[0]), list(ratios[1]), 1.0


def check(path: str, cluster: str) -> int:
    found = json.loads(pathlib.Path(path).read_text())
    print(f"{found['device']}, torch {found['torch']}, and cluster {cluster}; milliseconds")
    print(f"{'':47}{'forward':^26}{'backward':^26}")
    print(f"{'':47}" + f"{'modelled':>9}{'measured':>9}{'error':>8}" * 2)
    outside = 0
    for name, model, measured, factor in compared(found, cluster):
        cells = ""
        for a, b in zip(model, measured, strict=True):
            outside += not LEAST_ERROR <= a / b - 1 <= MOST_ERROR
            cells += f"{factor * a:9.3f}{factor * b:9.3f}{a / b - 1:+8.1%}"
        print(f"{name:47}{cells}")
    for name, value in found["memory"].items():
        print(f"{name}: {value:.3g}")
    for shape, by_rows in found["overlap"].items():
        for n, of in by_rows.items():
            slower, rate = of["beside"] / of["alone"] - 1, of["bytes per second"]
            print(f"{shape}: GEMMs of {n} rows per expert beside copies at {rate:.3g} B/s: {slower:+.1%}")
    return int(outside > 0)


if __name__ == "__main__":
    logging.getLogger("foremoe").setLevel("ERROR")  # that a trace is batched again
    match sys.argv[1:]:
        case ["measure", file]:
            measure(file)
        case ["check", file, *of] if len(of) < 2:
            sys.exit(check(file, *of or ["h100"]))
        case _:
            sys.exit(__doc__)
