"""What measure.py runs and how it looks at it: layers of experts, clocks between exchanges, copies on a slow link."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foremoe._engine.layers import Execute, grouped_linear


class Experts(torch.nn.Module):
    """One MoE layer of gated experts whose routes are always replayed; an ExpertLayer."""

    def __init__(self, name: str, sizes: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.name, self.num_experts, self.top_k, self.hidden_size = name, sizes.experts, sizes.top_k, sizes.hidden
        options: dict[str, Any] = {"device": device, "dtype": getattr(torch, sizes.dtype)}

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.02 * torch.randn(*shape, **options))

        self.gate_up = parameter(sizes.experts, sizes.hidden, 2 * sizes.intermediate)
        self.down = parameter(sizes.experts, sizes.intermediate, sizes.hidden)
        self.router = torch.nn.Linear(sizes.hidden, sizes.experts, bias=False, **options)
        self._ids: Tensor | None = None
        self._execute: Execute | None = None

    def weights(self) -> dict[str, torch.nn.Parameter]:
        return {"gate_up": self.gate_up, "down": self.down}

    def set_weights(self, weights: dict[str, torch.nn.Parameter]) -> None:
        self.gate_up, self.down = weights["gate_up"], weights["down"]

    def forward_rows(self, rows: Tensor, offsets: Tensor, weights: dict[str, Tensor]) -> Tensor:
        gate, up = grouped_linear(rows, weights["gate_up"], offsets).chunk(2, -1)
        return grouped_linear(torch.nn.functional.silu(gate) * up, weights["down"], offsets)

    def execute_by(self, execute: Execute | None) -> None:
        self._execute = execute

    def replay(self, ids: Tensor | None) -> None:
        self._ids = ids

    def forward(self, hidden: Tensor) -> Tensor:
        assert self._ids is not None and self._execute is not None
        gates = torch.softmax(self.router(hidden), -1).gather(-1, self._ids)
        return hidden + self._execute(hidden, self._ids, gates)


class OwnExperts:
    """One rank's experts as transformers' expert parallelism calls them."""

    def __init__(self, layer: Experts, own: int) -> None:
        self.layer, self.num_experts = layer, own

    def forward(self, rows: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        expert, order = ids[:, 0].sort(stable=True)
        ends = torch.bincount(expert, minlength=self.num_experts).cumsum(0).to(torch.int32)
        computed = self.layer.forward_rows(rows[order], ends, dict(self.layer.weights()))
        return torch.empty_like(computed).index_copy(0, order, computed * gates[order])


class Stretches:
    """Seconds between exchanges of rows on this rank, while it counts."""

    def __init__(self, group: Any, clock: Callable[[], float]) -> None:
        self._group, self._clock = group, clock
        self._begin = 0.0
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        exchange = dist.all_to_all_single

        def counted(*arguments: Any, **keywords: Any) -> Any:
            if keywords.get("group") is not self._group:
                return exchange(*arguments, **keywords)
            self._end()
            try:
                return exchange(*arguments, **keywords)
            finally:
                self._begin = self._clock()

        self.seconds = []
        self._begin = self._clock()
        dist.all_to_all_single = counted
        try:
            yield
        finally:
            dist.all_to_all_single = exchange
            self._end()

    def _end(self) -> None:
        self.seconds.append(self._clock() - self._begin)


def least_seconds(run: Callable[[], object], group: Any, device: torch.device, runs: int) -> float:
    """Of so many runs after a first one, from the moment when all ranks begin until all have ended. Collective."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)
        return time.perf_counter()

    seconds = []
    for _ in range(runs + 1):
        begin = now()
        run()
        seconds.append(now() - begin)
    return min(seconds[1:])


class _DelayedCopy:
    """A copy of an expert whose link takes so long, whatever the machine's own took."""

    def __init__(self, work: Any, arrives: float) -> None:
        self._work, self._arrives = work, arrives

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._arrives - time.perf_counter()))


@contextlib.contextmanager
def delayed_copies(seconds: float) -> Iterator[None]:
    start = dist.batch_isend_irecv

    def delayed(operations: list[Any]) -> list[Any]:
        arrives = time.perf_counter() + seconds
        return [_DelayedCopy(work, arrives) for work in start(operations)]

    dist.batch_isend_irecv = delayed  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = start
