"""Rows and memory of one planned layer, dispatched by row and by token. In the root of the repository:

PYTHONPATH=build/python OMP_NUM_THREADS=1 $(scripts/setup torch) python/benchmarks/by_token.py

Eight gloo processes run a forward and a backward of one layer with 64 experts, 8 per token, and two guests per rank, on
2,048 tokens of 512 numbers each. Rows are means per token of a rank, for one dispatch. Memory is that of the busiest
rank, in sizes of its hidden states (tokens · hidden): the most that tensors of the layer take at a time, without
weights, guests, and buffers of the transport; and the tables of sizes and orders.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._tools.mem_tracker import MemTracker

from foremoe.torch import exchange, micro_step
from foremoe.torch.doctor.layers import Net, Sizes, draw_routes

RANKS = 8
SIZES = Sizes(layers=1, experts=64, top_k=8, hidden=512, intermediate=64, tokens=2048, micro_steps=2)
HIDDEN_BYTES = SIZES.tokens * SIZES.hidden * 4


class Counted:
    """Counts the rows that a rank sends, and the bytes of its tables."""

    def __init__(self, rank: int, ranks_per_node: int) -> None:
        self.rows = [0, 0]  # to other nodes, to other ranks of this node
        self.table_bytes = 0
        self._rank, self._node = rank, ranks_per_node
        self._send_rows, self._to_device = exchange._exchange, micro_step.to_device

    def send_rows(self, rows: Any, send: list[int], recv: list[int], channel: Any) -> Any:
        for target, size in zip(dist.get_process_group_ranks(channel.group), send, strict=True):
            if target != self._rank:
                self.rows[target // self._node == self._rank // self._node] += size
        return self._send_rows(rows, send, recv, channel)

    def to_device(self, tables: Any, device: torch.device) -> Any:
        self.table_bytes = sum(table.nbytes for of in tables for table in of.values())
        return self._to_device(tables, device)


def measure(rank: int, ranks_per_node: int, dispatch: str) -> None:
    """Measures the last micro-step of a phase. Rank 0 prints a line."""
    net = Net(SIZES, torch.device("cpu"))
    ep = net.spread(dispatch=dispatch, ranks_per_node=ranks_per_node)
    counted = Counted(rank, ranks_per_node)
    hidden = torch.randn(SIZES.tokens, SIZES.hidden)
    with (
        mock.patch.object(exchange, "_exchange", counted.send_rows),
        mock.patch.object(micro_step, "to_device", counted.to_device),
        ep.plan(draw_routes(SIZES, rank, RANKS), on_mismatch="replay") as phase,
    ):
        for m in phase.micro_steps:
            with phase.micro_step(m):
                counted.rows = [0, 0]
                tracker = MemTracker()
                with tracker:
                    out = net(hidden)
                    sent = list(counted.rows)
                    out.sum().backward()
                    del out
                peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        phase.drain()
    ep.detach()
    rows = torch.tensor(sent, dtype=torch.float64) / 2 / SIZES.tokens / RANKS  # dispatch and combine
    memory = torch.tensor([peak, counted.table_bytes], dtype=torch.float64) / HIDDEN_BYTES
    dist.all_reduce(rows)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    if rank == 0:
        print(
            f"{RANKS // ranks_per_node} × {ranks_per_node}  {dispatch:5}  rows to other nodes {rows[0]:.3f}, within "
            f"nodes {rows[1]:.3f}  memory: layer {memory[0]:.1f}, tables {memory[1]:.3f}",
            flush=True,
        )


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    for ranks_per_node in (4, 2):
        for dispatch in ("row", "token"):
            measure(rank, ranks_per_node, dispatch)
            gc.collect()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
