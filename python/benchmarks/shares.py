"""Time to plan a step in one process, and in ranks that each plan some layers. In the root of the repository:

PYTHONPATH=build/python OMP_NUM_THREADS=1 $(scripts/setup torch) python/benchmarks/shares.py

The load has the shape of Qwen3-30B-A3B on 64 ranks with 32 micro-steps and is drawn as by `foremoe synth`. "bursty" has
one sequence per rank and groups with different routing. Shares are planned one after the other. Then one process per
share gathers the real parts and joins them. A tiny plan shows the cost of sharing without its gain.
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
    """Return wall time and CPU time of a call."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def gather(rank: int, folder: str, shape: dict[str, Any], planning: dict[str, Any]) -> None:
    """Gather and join the parts. Rank 0 prints the median time over runs."""
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
