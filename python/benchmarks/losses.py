"""Losses of balanced and unbalanced training, which differ only in rounding. In the root of the repository:

PYTHONPATH=build/python OMP_NUM_THREADS=1 $(scripts/setup torch) python/benchmarks/losses.py

A tiny Qwen3-MoE learns to count with strides in four CPU processes. Three trainers start from the same weights and use
the same batches and recorded routes in every step. One is balanced (ForeMoE, one guest slot), one unbalanced (experts
at home), and one unbalanced with micro-steps in reverse order. The last trainer is the control: it shows how far two
runs diverge if only the order of sums differs.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from foremoe.hf import expert_layers, record
from foremoe.torch import ExpertParallel

RANKS, MICRO_STEPS, SEQUENCES, TOKENS, VOCABULARY = 4, 3, 3, 24, 128  # SEQUENCES per rank and micro-step
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 32,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
RUNS = {"unbalanced": ("vanilla", False), "balanced": ("foremoe", False), "reversed": ("vanilla", True)}


class Trainer:
    """A training run with its policy. `backwards` reverses the order of its micro-steps."""

    def __init__(self, policy: str, backwards: bool) -> None:
        torch.manual_seed(0)
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
        self.eager = copy.deepcopy(self.model).eval()  # unsharded, to record routes
        options: dict[str, Any] = {} if policy == "vanilla" else {"guest_slots": 1}
        self.eager.set_experts_implementation("eager")  # torch's grouped GEMM has no float64
        self.ep = ExpertParallel(expert_layers(self.model), policy=policy, **options)
        self.ep.wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.backwards = backwards

    @torch.no_grad()
    def routes(self, batches: list[Tensor]) -> list[Tensor]:
        """Return routes [micro_step][sequences, tokens, layers, top_k], recorded with this step's weights."""
        self.eager.load_state_dict(self.ep.whole_state_dict(self.model))
        found = []
        for ids in batches:
            with record(self.eager) as recorder:
                self.eager(input_ids=ids[:, :-1], use_cache=False)  # the last token's logits are unused
            found.append(recorder.routes(ids, torch.ones_like(ids)))
        return found

    def step(self, batches: list[Tensor], routes: list[Tensor]) -> tuple[float, dict[str, Any]]:
        order = range(MICRO_STEPS)[:: -1 if self.backwards else 1]
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        with self.ep.plan([routes[m] for m in order]) as phase:
            for m, ids in zip(phase.micro_steps, (batches[m] for m in order), strict=True):
                with phase.micro_step(m):
                    logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / MICRO_STEPS
                    loss.backward()
                total += loss.detach() / RANKS
            phase.drain()
        self.optimizer.step()
        dist.all_reduce(total)
        return float(total), phase.figures()


def batches_of(step: int, rank: int) -> list[Tensor]:
    """Draw sequences that count with a stride, which their first tokens determine."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    begin, stride = (torch.randint(1, VOCABULARY, (MICRO_STEPS, SEQUENCES, 1), generator=random) for _ in range(2))
    return list((begin + (stride % 4 + 1) * torch.arange(TOKENS)) % VOCABULARY)


def work(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    trainers = {name: Trainer(*run) for name, run in RUNS.items()}
    largest = {"balanced": 0.0, "reversed": 0.0}
    rho: dict[str, float] = dict.fromkeys(RUNS, 0)
    equal = 0
    if rank == 0:
        print(f"| {arguments.dtype}: step | unbalanced | balanced | balanced, difference | reversed, difference |")
        print("|---|---|---|---|---|")
    for step in range(arguments.steps):
        batches = batches_of(step, rank)
        routes = trainers["unbalanced"].routes(batches)
        losses = {}
        for name, trainer in trainers.items():
            losses[name], figures = trainer.step(batches, routes)
            rho[name] += figures["rho_planned"]["mean"] / arguments.steps
        apart = {name: abs(losses[name] / losses["unbalanced"] - 1) for name in largest}
        largest = {name: max(largest[name], apart[name]) for name in largest}
        equal += losses["balanced"] == losses["unbalanced"]
        if rank == 0 and (step in (0, 1, 3, 9, 29, 99) or (step + 1) % 100 == 0):
            cells = [losses["unbalanced"], losses["balanced"], *apart.values()]
            print(f"| {step + 1} | {cells[0]:.9f} | {cells[1]:.9f} | {cells[2]:.1e} | {cells[3]:.1e} |", flush=True)
    if rank == 0:
        told = " and ".join(f"{difference:.1e} ({name})" for name, difference in largest.items())
        print(f"\nlargest relative difference from unbalanced in {arguments.steps} steps: {told}")
        print(f"balanced is equal bit for bit in {equal} steps")
        print(f"ρ mean: unbalanced {rho['unbalanced']:.3f}, balanced {rho['balanced']:.3f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (arguments, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
