"""GRPO on a tiny Qwen3-MoE in four CPU processes: routes recorded in generation, replayed in training, balanced.

    python examples/grpo.py                        25 steps, half a minute
    python examples/grpo.py --steps 5 --compare    unbalanced too, on the same completions
    python examples/grpo.py --plot grpo.png

The model learns to answer in even tokens. Needs pip install '.[hf]' (and matplotlib for --plot).
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from foremoe.hf import expert_layers, record
from foremoe.torch import ExpertParallel

RANKS, MICRO_STEPS = 4, 2
VOCABULARY, PAD, EOS = 128, 0, 1
PROMPTS, GROUP, PROMPT, COMPLETION = 2, 4, 12, 24  # per rank and step; tokens
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 32,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 2,
}  # fmt: skip


@dataclass
class Rollout:
    """What one rank generated, one row per sequence."""

    ids: torch.Tensor  # [sequences, tokens]
    mask: torch.Tensor  # [sequences, tokens]
    completion: torch.Tensor  # [sequences, tokens − 1], 1 where the loss counts
    advantage: torch.Tensor  # [sequences]
    routes: torch.Tensor  # [sequences, tokens, layers, top_k]
    reward: float

    def part(self, m: int) -> slice:
        size = len(self.ids) // MICRO_STEPS
        return slice(m * size, (m + 1) * size)


@torch.no_grad()
def roll_out(model: Any, seed: int) -> Rollout:
    torch.manual_seed(seed)
    length = torch.randint(4, PROMPT + 1, (PROMPTS,)).repeat_interleave(GROUP)
    prompt = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT)).repeat_interleave(GROUP, 0)
    mask = (torch.arange(PROMPT) >= PROMPT - length[:, None]).long()
    with record(model) as recorder:
        ids = model.generate(
            input_ids=prompt * mask,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=True, max_new_tokens=COMPLETION, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=2
            ),
        )
    answer = ids[:, PROMPT:]
    alive = torch.cat([torch.ones(len(ids), 1), (answer != EOS).cumprod(1)[:, :-1].float()], 1)
    mask = torch.cat([mask, alive.long()], 1)
    reward = ((answer % 2 == 0) * alive).sum(1) / alive.sum(1)
    group = reward.view(-1, GROUP)
    advantage = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)
    completion = mask.clone()
    completion[:, :PROMPT] = 0
    return Rollout(
        ids, mask, completion[:, 1:].float(), advantage.reshape(-1), recorder.routes(ids, mask), float(reward.mean())
    )


def log_probabilities(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]


class Trainer:
    """A policy with its experts spread over the ranks, and an unsharded copy of it that generates."""

    def __init__(self, policy: str) -> None:
        torch.manual_seed(0)
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
        self.generator = copy.deepcopy(self.model).eval()
        self.ep = ExpertParallel(expert_layers(self.model), guest_slots=1, policy=policy)
        self.ep.wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def publish(self) -> None:
        """Brings the generator's weights up to date."""
        self.generator.load_state_dict(self.ep.whole_state_dict(self.model))

    def train(self, rollout: Rollout) -> tuple[float, dict[str, Any]]:
        """One step: recompute of the old log-probabilities, then the update, both under a plan."""
        routes = [rollout.routes[rollout.part(m)] for m in range(MICRO_STEPS)]
        tokens = rollout.completion.sum()
        dist.all_reduce(tokens)
        old = []
        with self.ep.plan(routes, phase="recompute") as phase, torch.no_grad():
            for m in phase.micro_steps:
                part = rollout.part(m)
                with phase.micro_step(m):
                    old.append(log_probabilities(self.model, rollout.ids[part], rollout.mask[part]))
        self.optimizer.zero_grad()
        total = torch.zeros(())
        with self.ep.plan(routes) as phase:
            for m in phase.micro_steps:
                part = rollout.part(m)
                with phase.micro_step(m):
                    new = log_probabilities(self.model, rollout.ids[part], rollout.mask[part])
                    ratio = (new - old[m]).exp()
                    advantage = rollout.advantage[part, None]
                    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    # Gradients are averaged over ranks; the loss is a mean over the tokens of all of them.
                    loss = -(gain * rollout.completion[part]).sum() / tokens * RANKS
                    loss.backward()
                total += loss.detach() / RANKS
            phase.drain()
        self.ep.clip_grad_norm_(1.0)
        self.optimizer.step()
        dist.all_reduce(total)
        return float(total), phase.figures()


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def work(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    trainer = Trainer("foremoe")
    unbalanced = Trainer("vanilla") if arguments.compare else None
    history = []
    for step in range(arguments.steps):
        trainer.publish()
        rollout = roll_out(trainer.generator, 1000 * step + rank)
        loss, figures = trainer.train(rollout)
        reward = sum_over_ranks(rollout.reward) / RANKS
        copies = int(sum_over_ranks(figures["copies"]))
        exposed = sum_over_ranks(figures["exposed_seconds"]) / RANKS
        line = (
            f"step {step:2}  reward {reward:.3f}  loss {loss:+.5f}  ρ {figures['rho_vanilla']['mean']:.3f} → "
            f"{figures['rho_planned']['mean']:.3f}  copies {copies:3}  exposed {1e3 * exposed:6.1f} ms  "
            f"mismatch {figures['mismatch']:.4f}"
        )
        if unbalanced is not None:
            other, _ = unbalanced.train(rollout)
            line += f"  unbalanced loss {other:+.5f}"
        history.append((reward, figures["rho_vanilla"]["mean"], figures["rho_planned"]["mean"]))
        if rank == 0:
            print(line, flush=True)
    if rank == 0 and arguments.plot:
        plot(history, arguments.plot)
    dist.destroy_process_group()


def plot(history: list[tuple[float, float, float]], path: str) -> None:
    import matplotlib.pyplot as plt

    rewards, before, after = zip(*history, strict=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(rewards, color="#2a6f97")
    left.set(xlabel="step", ylabel="reward", title="The task is learned", ylim=(0, 1))
    right.plot(before, color="#bc4749", label="experts at home")
    right.plot(after, color="#386641", label="planned")
    right.set(xlabel="step", ylabel="busiest rank ÷ mean (ρ)", title="The ranks are level", ylim=(0.95, None))
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--compare", action="store_true", help="train unbalanced too, on the same completions")
    parser.add_argument("--plot", metavar="FILE", help="write reward and imbalance of every step as a picture")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (arguments, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
