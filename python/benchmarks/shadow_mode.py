"""Cost of shadow mode to the training thread per MoE layer, as in lab/performance.md. In the repository's root:

PYTHONPATH=build/python $(scripts/setup torch) python/benchmarks/shadow_mode.py [--tokens N] [--layers N]

Two gloo processes run the forward of Megatron-LM's routers, alternately without ForeMoE and in shadow mode inside
step(). The benchmark prints the calling thread's CPU time per layer: median, minimum and maximum over rounds. It uses
few tokens, so that the device, here the CPU itself, has almost nothing to sum. The time of the sum for a training batch
is printed separately, because on a GPU the thread does not compute the sum.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
import timeit
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "torch"))

import megatron_on_cpu
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, EXPERTS, TOP_K, HIDDEN = 2, 128, 8, 64


def make_layers(count: int) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=count, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_ffn_hidden_size=8, expert_model_parallel_size=RANKS, moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True, add_bias_linear=False, moe_router_load_balancing_type="none",
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    build = build_module if isinstance(spec, ModuleSpec) else lambda spec, **options: spec(**options)
    return torch.nn.ModuleList(build(spec, config=config, layer_number=i + 1) for i in range(count))


def microseconds(layers: Any, x: Any, micro_batches: int) -> float:
    """Return this thread's CPU time per router call."""
    begin = time.thread_time()
    for _ in range(micro_batches):
        for layer in layers:
            layer.router(x)
    return (time.thread_time() - begin) / micro_batches / len(layers) * 1e6


@torch.no_grad()
def measure(rank: int, arguments: Any, folder: str) -> None:
    torch.set_num_threads(1)
    megatron_on_cpu.apply()
    from megatron.core import parallel_state

    import foremoe.megatron

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    layers = make_layers(arguments.layers)
    x = torch.randn(8, 1, HIDDEN)
    found: dict[str, list[float]] = {"a router": [], "and in shadow mode": [], "more": []}
    for i in range(arguments.rounds + 1):  # the first round warms up
        own = microseconds(layers, x, arguments.micro_batches)
        replicas = foremoe.megatron.attach(layers, mode="shadow")
        with replicas.step():
            counted = microseconds(layers, x, arguments.micro_batches)
        replicas.detach()
        if i:
            for name, value in zip(found, (own, counted, counted - own), strict=True):
                found[name].append(value)
    routed = torch.rand(arguments.tokens, EXPERTS).argsort(-1) < TOP_K
    rows = torch.empty(EXPERTS, dtype=torch.int32)
    found[f"to sum {arguments.tokens} tokens"] = [
        timeit.timeit(lambda: torch.sum(routed, 0, dtype=torch.int32, out=rows), number=50) / 50 * 1e6
        for _ in range(arguments.rounds)
    ]
    if rank == 0:
        print(f"µs per layer; {arguments.layers} layers, {EXPERTS} experts, {arguments.micro_batches} micro-batches")
        for name, of in found.items():
            print(f"  {name:20} {statistics.median(of):7.1f}  ({min(of):.1f} … {max(of):.1f})")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank in a micro-batch")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--micro-batches", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (arguments, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
