"""How long a step's plan takes: by one process, and by ranks that plan some of the layers each. In the root:

PYTHONPATH=build/python OMP_NUM_THREADS=1 $(scripts/setup torch) python/benchmarks/shares.py

The load has the shape of Qwen3-30B-A3B on 64 ranks, 32 micro-steps, drawn as `foremoe synth` draws it; "bursty" is with
one sequence per rank and groups that differ. Shares are planned one after the other; then a process for each of them
takes part in the gather of the real parts, and joins them. A tiny plan shows what sharing costs where it gains nothing.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import foremoe
from foremoe._engine.communication import gathered_bytes
from foremoe._engine.shares import layers_of

SHARES, RUNS = 8, 5
SHAPE: dict[str, Any] = {"shape": "Qwen3-30B-A3B", "ranks": 64, "micro_steps": 32}
BURSTY: dict[str, Any] = {"sequences_per_rank": 1, "tokens_per_rank": 4096, "group_size": 8, "group_spread": 1}
TINY: dict[str, Any] = {"layers": 4, "experts": 16, "top_k": 2, "ranks": SHARES, "micro_steps": 4}


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def gather(rank: int, folder: str, shape: dict[str, Any], planning: dict[str, Any]) -> None:
    """Median over runs of one gather and join, by rank 0."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SHARES)
    load = foremoe.synthesize_load(**shape)
    layers = layers_of(rank, SHARES, load.num_layers)
    part = foremoe.plan(load, layers=layers, threads=1, **planning) if layers else None
    of_runs = []
    for _ in range(RUNS):
        dist.barrier()
        begin = time.perf_counter()
        parts = [pickle.loads(of) for of in gathered_bytes(pickle.dumps(part), dist.group.WORLD)]
        foremoe.Plan.join([part for part in parts if part is not None])
        of_runs.append(time.perf_counter() - begin)
    if rank == 0:
        print(f"{'':24}gather and join {statistics.median(of_runs):7.4f} s by the clock", flush=True)
    dist.destroy_process_group()


def measure(name: str, shape: dict[str, Any], planning: dict[str, Any]) -> None:
    load = foremoe.synthesize_load(**shape)
    print(f"{name:24}", end="")
    for threads in (1, 2):
        clock, processor = seconds(lambda: foremoe.plan(load, threads=threads, **planning))  # noqa: B023
        print(f"{threads} thread{'s'[: threads - 1]:1} {clock:7.3f} s ({processor:.3f} s of processors)  ", end="")
    shares = [layers_of(share, SHARES, load.num_layers) for share in range(SHARES)]
    of_shares = [seconds(lambda: foremoe.plan(load, layers=of, threads=1, **planning)) for of in shares if of]  # noqa: B023
    slowest = max(of_shares)
    print(f"slowest of {len(of_shares)} shares {slowest[0]:.4f} s ({slowest[1]:.4f} s)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(gather, (folder, shape, planning), nprocs=SHARES)


def main() -> None:
    for residency in ("resident", "static"):
        measure(residency, SHAPE, {"residency": residency})
        measure(f"{residency}, bursty", SHAPE | BURSTY, {"residency": residency})
    measure("shared", SHAPE, {"residency": "shared"})
    measure("shared, first block", SHAPE | {"micro_steps": 1}, {"residency": "shared"})
    measure("tiny", TINY, {})


if __name__ == "__main__":
    main()
