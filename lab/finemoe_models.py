"""The five models of FineMoE's table 2, each on one group of 8 GPUs."""

from __future__ import annotations

from typing import Any

from kit import Input, drawn

# Preset, guest slots, and a GPU's share of the global batch: sequences per micro-batch, their tokens, micro-batches.
MODELS = {
    "GPT 32×1.3B": ("GPT-32x1.3B", 4, 4, 2048, 16),
    "GPT 16×3.2B": ("GPT-16x3.2B", 2, 2, 2048, 32),
    "GPT 8×6.7B": ("GPT-8x6.7B", 1, 2, 2048, 32),
    "Mixtral 16×2B": ("Mixtral-16x2B", 2, 2, 4096, 16),
    "Mixtral 8×7B": ("Mixtral-8x7B", 1, 1, 4096, 32),
}


def inputs_of(routes: str = "", **options: Any) -> list[Input]:
    """routes: suffix of the labels. options: further options of drawn()."""
    return [
        drawn(
            label + routes, model=model, guest_slots=slots, sequences_per_rank=sequences,
            tokens_per_rank=sequences * tokens, sequence_tokens=tokens, micro_steps=micro_batches, cluster="h100",
            dispatch=("token", "row"), ranks=8, optimizer_shards=2, former_step=True, **options,
        )
        for label, (model, slots, sequences, tokens, micro_batches) in MODELS.items()
    ]  # fmt: skip
