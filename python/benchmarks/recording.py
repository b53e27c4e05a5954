"""Cost of route recording per layer call, when generating one token for eight sequences. In the repository's root:

PYTHONPATH=build/python $(scripts/setup torch) python/benchmarks/recording.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from foremoe.hf import record

CALLS, RUNS = 1000, 9


class Block(torch.nn.Module):
    """An MoE block that record() recognizes, with experts that do nothing."""

    class Experts(torch.nn.Module):
        is_transposed = False

        def forward(self, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            return hidden

    def __init__(self) -> None:
        super().__init__()
        self.experts = self.Experts()


def microseconds(model: Block, *arguments: Any) -> float:
    """Return the mean microseconds per call of the experts."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        model.experts(*arguments)
    return 1e6 * (time.perf_counter() - begin) / CALLS


def main() -> None:
    torch.set_num_threads(1)
    model = Block()
    arguments = torch.zeros(8, 64), torch.zeros(8, 8, dtype=torch.int64), torch.zeros(8, 8)
    more = []
    for _ in range(RUNS):
        bare = microseconds(model, *arguments)
        with record(model):
            more.append(microseconds(model, *arguments) - bare)
    print(f"recording, one call of one layer: {statistics.median(more):.1f} µs")


if __name__ == "__main__":
    main()
