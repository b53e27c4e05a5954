"""Measures planned phases on this machine, on layers with experts alone and routes drawn from a model of routing.

    python -m foremoe.torch.measure --ranks 4                 CPU processes, gloo
    torchrun --nproc-per-node 8 -m foremoe.torch.measure      one process a GPU, NCCL: written for, never run

Unbalanced and planned steps run alternately, by the same executor; the medians are told.

critical path    seconds of computing on the slowest rank, summed over the stretches between exchanges of rows: what a
                 step takes where every rank has a processor of its own. On CPU it is processor time, on CUDA the
                 wall clock, which has the exchanges in it.
predicted        rows of the busiest rank, summed over layers and micro-steps: unbalanced ÷ planned
exposed          of the planned step's wall clock, what ranks waited for copies of experts

With --native the same layers also run by AllToAllEP of transformers, which exchanges counts in every layer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import foremoe
from foremoe.balance import planned_rows

from ._measured import Experts, OwnExperts, Stretches, delayed_copies, least_seconds
from .parallel import ExpertParallel


class Measurement:
    """One rank of it."""

    def __init__(self, sizes: argparse.Namespace, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        self.cuda = device.type == "cuda"
        torch.manual_seed(0)
        self.layers = [Experts(f"layer {i}", sizes, self.device) for i in range(sizes.layers)]
        self.ep = ExpertParallel(
            self.layers, guest_slots=sizes.guest_slots, residency=sizes.residency, depth=sizes.prefetch_depth
        )
        self.ep.wrap(torch.nn.Module(), "own")  # there are no other parameters
        self.routes = self._routes()
        self.synchronisations = 0

    def _routes(self) -> list[Tensor]:
        """Of this rank's micro-steps, [rows, layers, top_k]."""
        s = self.sizes
        trace = foremoe.synthesize_trace(
            layers=s.layers,
            experts=s.experts,
            top_k=s.top_k,
            micro_steps=s.micro_steps,
            ranks=self.ep.num_ranks,
            tokens_per_rank=s.tokens,
            step_spread=s.step_spread,
            group_spread=s.group_spread,
        )
        assert trace.micro_step is not None and trace.rank is not None
        routes = []
        for m in range(s.micro_steps):
            mine = np.flatnonzero((trace.micro_step == m) & (trace.rank == self.ep.rank))
            parts = [trace.routed_experts[trace.cu_seqlens[i] : trace.cu_seqlens[i + 1]] for i in mine]
            routes.append(torch.from_numpy(np.concatenate(parts).astype(np.int32)))
        return routes

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self, policy: str) -> dict[str, Any]:
        """One policy update; what it took, the same on all ranks."""
        ep = self.ep
        ep.arguments = dataclasses.replace(ep.arguments, policy=policy)
        inputs = self._inputs()
        stretches = Stretches(ep.ranks.rows.group, self._now if self.cuda else time.thread_time)
        with ep.plan(self.routes) as phase:
            phase.wait_for_plan()
            dist.barrier(ep.group)
            begin = self._now()
            with stretches.count(), self._counted_synchronisations():
                for m, hidden in enumerate(inputs):
                    with phase.micro_step(m):
                        self._run_micro_step(hidden)
            phase.drain()
            dist.barrier(ep.group)
            wall = self._now() - begin
        slowest = torch.tensor(stretches.seconds, dtype=torch.float64, device=self.device)
        exposed = torch.tensor(phase.figures()["exposed_seconds"], dtype=torch.float64, device=self.device)
        for figure in (slowest, exposed):
            dist.all_reduce(figure, dist.ReduceOp.MAX, group=ep.group)
        copies = torch.tensor(phase.figures()["copies"], device=self.device)
        dist.all_reduce(copies, group=ep.group)
        return {
            "wall": wall,
            "critical": float(slowest.sum()),
            "exposed": float(exposed),
            "busiest_rows": float(planned_rows(phase.plan).max(-1).sum()),
            "rho": phase.figures()["rho_planned"]["mean"],
            "copies": int(copies),
        }

    def native_seconds(self) -> float:
        """The median step by AllToAllEP of transformers, in the place of the executor."""
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.expert_parallel import AllToAllEP

        ep = self.ep
        mesh = init_device_mesh(self.device.type, (ep.num_ranks, 1), mesh_dim_names=("ep", "tp"))
        planned = [layer._execute for layer in self.layers]
        for layer in self.layers:
            layer.execute_by(AllToAllEP(OwnExperts(layer, ep.ranks.homes), mesh["ep"], mesh["tp"]))  # type: ignore[arg-type]
        seconds = []
        for _ in range(self.sizes.runs + 1):
            inputs = self._inputs()
            dist.barrier(ep.group)
            begin = self._now()
            for routes, hidden in zip(self.routes, inputs, strict=True):
                for i, layer in enumerate(self.layers):
                    layer.replay(routes[:, i].long().to(self.device))
                self._run_micro_step(hidden)
            dist.barrier(ep.group)
            seconds.append(self._now() - begin)
        for layer, execute in zip(self.layers, planned, strict=True):
            layer.replay(None)
            layer.execute_by(execute)
        return statistics.median(seconds[1:])

    def _inputs(self) -> list[Tensor]:
        """Of each micro-step, with gradients of the step before let go."""
        for layer in self.layers:
            layer.zero_grad()
        options: dict[str, Any] = {"device": self.device, "dtype": self.layers[0].gate_up.dtype}
        return [torch.randn(len(r), self.sizes.hidden, **options) for r in self.routes]

    def _run_micro_step(self, hidden: Tensor) -> None:
        for layer in self.layers:
            hidden = layer(hidden)
        hidden.square().mean().backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _counted_synchronisations(self) -> Iterator[None]:
        """Waits of the host for the device, where CUDA tells of them. _now() has one per exchange of its own."""
        if not self.cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.synchronisations = sum("synchroniz" in str(w.message) for w in found)

    def medians(self, policies: tuple[str, ...], runs: int) -> dict[str, dict[str, float]]:
        """By policy; runs alternate."""
        found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
        for _ in range(runs + 1):
            for policy in policies:
                found[policy].append(self.step(policy))
        return {
            policy: {key: statistics.median(run[key] for run in of[1:]) for key in of[0]}  # the first one warms up
            for policy, of in found.items()
        }

    def copy_bandwidth(self) -> float:
        """Bytes a second of one expert from rank 0 to the last, alone; 0 with one rank."""
        ep, last = self.ep, self.ep.num_ranks - 1
        if last == 0:
            return 0.0
        expert = torch.zeros(ep.experts.expert_bytes, dtype=torch.uint8, device=self.device)

        def send() -> None:
            if ep.rank == 0:
                dist.send(expert, group_dst=last, group=ep.ranks.copies.group)
            elif ep.rank == last:
                dist.recv(expert, group_src=0, group=ep.ranks.copies.group)

        return ep.experts.expert_bytes / least_seconds(send, ep.group, self.device, self.sizes.runs)

    def run(self) -> dict[str, Any]:
        s = self.sizes
        medians = self.medians(("vanilla", s.policy), s.runs)
        before, after = medians["vanilla"], medians[s.policy]
        predicted = before["busiest_rows"] / after["busiest_rows"]
        measured = before["critical"] / after["critical"]
        layer_seconds = after["wall"] / (3 * s.layers * s.micro_steps)  # a backward is two forwards' work
        with delayed_copies(layer_seconds):
            delayed = self.medians((s.policy,), s.runs)[s.policy]
        return {
            "device": torch.cuda.get_device_name() if self.cuda else "CPU",
            "ranks": self.ep.num_ranks,
            "medians": medians,
            "predicted_speedup": predicted,
            "critical_path_speedup": measured,
            "off_prediction": measured / predicted - 1,
            "wall_speedup": before["wall"] / after["wall"],
            "exposed_share": after["exposed"] / after["wall"],
            "delay_seconds": layer_seconds,
            "exposed_share_delayed": delayed["exposed"] / delayed["wall"],
            "expert_bytes": self.ep.experts.expert_bytes,
            "copy_bytes_per_second": self.copy_bandwidth(),
            "synchronisations_per_step": self.synchronisations if self.cuda else None,
            "native_seconds": self.native_seconds() if s.native else None,
        }


def _print(found: dict[str, Any], policy: str) -> None:
    print(f"{found['ranks']} ranks, {found['device']}, an expert of {found['expert_bytes'] / 1e6:.2f} MB")
    print(f"{'':10} {'ρ':>6} {'critical path s':>16} {'step s':>8} {'copies':>7} {'exposed s':>10}")
    for name, of in found["medians"].items():
        print(
            f"{name:10} {of['rho']:6.3f} {of['critical']:16.3f} {of['wall']:8.3f} {of['copies']:7.0f}"
            f" {of['exposed']:10.4f}"
        )
    print(
        f"critical path: {found['critical_path_speedup']:.3f}×, predicted {found['predicted_speedup']:.3f}×"
        f" ({100 * found['off_prediction']:+.1f} %); step on this machine: {found['wall_speedup']:.3f}×"
    )
    if found["native_seconds"] is not None:
        seconds = found["native_seconds"]
        print(f"step by AllToAllEP of transformers: {seconds:.3f} s, {seconds / found['medians'][policy]['wall']:.3f}×")
    print(f"exposed: {100 * found['exposed_share']:.1f} % of the step of {policy}")
    print(
        f"exposed with copies that take as long as a layer ({1e3 * found['delay_seconds']:.1f} ms):"
        f" {100 * found['exposed_share_delayed']:.1f} %"
    )
    print(f"one copy alone: {found['copy_bytes_per_second'] / 1e9:.2f} GB/s")
    if found["synchronisations_per_step"] is None:
        print("host synchronisations: not measured without CUDA; the package's tests count them")
    else:
        print(f"host synchronisations in a step: {found['synchronisations_per_step']}")


def _measure(sizes: argparse.Namespace) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found = Measurement(sizes, device).run()
    if dist.get_rank() == 0:
        if sizes.json:
            print(json.dumps(found))
        else:
            _print(found, sizes.policy)
    dist.barrier()
    dist.destroy_process_group()


def _spawned(rank: int, sizes: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=sizes.ranks)
    _measure(sizes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foremoe.torch.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    counts = {
        "ranks": (4, "CPU processes, where torchrun did not start this one"),
        "layers": (4, "MoE layers"),
        "experts": (32, "experts of a layer"),
        "top-k": (4, "experts of a token"),
        "hidden": (128, "width of a token"),
        "intermediate": (256, "width inside an expert"),
        "tokens": (512, "of a rank in a micro-step"),
        "micro-steps": (4, "of the step"),
        "guest-slots": (1, "per rank and layer"),
        "prefetch-depth": (2, "turns ahead of which copies start"),
        "runs": (5, "of each policy"),
    }
    for name, (default, what) in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--residency", choices=("static", "resident", "shared"), default="resident")
    parser.add_argument("--policy", default="foremoe", help="beside vanilla (default foremoe)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--step-spread", type=float, default=0.7, metavar="X", help="how skewed the step is")
    parser.add_argument("--group-spread", type=float, default=0.5, metavar="X", help="how much groups differ")
    parser.add_argument("--native", action="store_true", help="also by AllToAllEP of transformers (5.23 or newer)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    return parser.parse_args()


def main() -> None:
    sizes = _arguments()
    if "RANK" in os.environ:  # of torchrun
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        _measure(sizes)
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_spawned, (sizes, f"{folder}/rendezvous"), nprocs=sizes.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
