"""foremoe.eplb against DeepSeek's eplb.py: busiest GPU of the next window, and CPU time. In the root of the repository:

PYTHONPATH=build/python $(scripts/setup torch) python/benchmarks/eplb.py EPLB.PY [LOAD|TRACE …]

EPLB.PY is the file of https://github.com/deepseek-ai/EPLB. Without inputs, the bundled load tables and the routes of
gpt-oss-20b are used (traces: 8 GPUs, 1,024 tokens each). Every window of --window micro-steps that another one follows
is placed. The columns are means over layers and windows:
  busiest   the busiest GPU of the next window ÷ the mean GPU, with eplb.py
  sums      foremoe.eplb with the sum of the window, relative to eplb.py
  windows   foremoe.eplb with the window's micro-steps, relative to eplb.py
  faster    CPU time of eplb.py ÷ that of foremoe.eplb, for sums and windows, one thread
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import foremoe
from foremoe.eplb import rebalance_experts

INPUTS = [*sorted(pathlib.Path("data").glob("load-*.safetensors")), pathlib.Path("data/rollout-gptoss.safetensors")]


def counts_of(path: pathlib.Path) -> tuple[NDArray[np.int64], int]:
    """Returns the counts [micro_steps, layers, experts], and the number of GPUs."""
    try:
        load = foremoe.read_load(path)
    except foremoe.InputError:
        load = foremoe.collect(foremoe.read_trace(path), ranks=8, tokens_per_rank=1024)
    return load.array.sum(2), load.num_ranks


def busiest(experts: NDArray[np.int64], tokens: NDArray[np.int64], num_gpus: int) -> float:
    """Returns the busiest GPU ÷ the mean GPU, the mean over layers. tokens: [layers, experts]."""
    layer = np.arange(len(tokens))[:, None]
    replicas = np.zeros(tokens.shape)
    np.add.at(replicas, (layer, experts), 1)
    gpu = (tokens / replicas)[layer, experts].reshape(len(tokens), num_gpus, -1).sum(-1)
    return float((gpu.max(1) / gpu.mean(1)).mean())


def cpu_seconds(call: Callable[[], object], runs: int) -> float:
    """Returns the least CPU time of several calls."""
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("eplb", type=pathlib.Path)
    parser.add_argument("inputs", nargs="*", type=pathlib.Path, default=INPUTS)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--guest-slots", type=int, default=1, help="replicas per GPU beyond those of all experts")
    given = parser.parse_args()
    spec = importlib.util.spec_from_file_location("eplb", given.eplb)
    assert spec is not None
    assert spec.loader is not None
    reference: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    torch.set_num_threads(1)

    print(f"{'':24} busiest     sums  windows   faster: sums  windows")
    relative = []
    for path in given.inputs:
        counts, gpus = counts_of(path)
        arguments = counts.shape[2] + given.guest_slots * gpus, 1, 1, gpus
        rows = []
        for begin in range(len(counts) - 2 * given.window + 1):
            window, following = (
                counts[begin : begin + given.window],
                counts[begin + given.window :][: given.window].sum(0),
            )
            summed = torch.from_numpy(window.sum(0))
            placed = [reference.rebalance_experts(summed, *arguments)[0].numpy()]
            placed += [rebalance_experts(weight, *arguments)[0] for weight in (window.sum(0), window)]
            rows.append([busiest(experts, following, gpus) for experts in placed])
        if not rows:
            print(f"{path.stem:24} has fewer than {2 * given.window} micro-steps")
            continue
        mean = np.mean(rows, 0)
        relative.append(mean[1:] / mean[0])
        slow = cpu_seconds(lambda weight=summed, a=arguments: reference.rebalance_experts(weight, *a), 3)  # type: ignore[misc]
        fast = [
            cpu_seconds(lambda weight=of, a=arguments: rebalance_experts(weight, *a), 20)  # type: ignore[misc]
            for of in (window.sum(0), window)
        ]
        print(
            f"{path.stem:24} {mean[0]:7.3f} {relative[-1][0]:8.4f} {relative[-1][1]:8.4f}"
            f" {slow / fast[0]:13.0f}× {slow / fast[1]:7.0f}×"
        )
    print(f"{'mean':24} {'':7} {np.mean(relative, 0)[0]:8.4f} {np.mean(relative, 0)[1]:8.4f}")
    print(f"{'largest':24} {'':7} {np.max(relative, 0)[0]:8.4f} {np.max(relative, 0)[1]:8.4f}")


if __name__ == "__main__":
    main()
