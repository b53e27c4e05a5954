"""The loads of the FEPLB experiments at EP 2, 4 and 8, with the paper's expert of 72 MiB."""

from __future__ import annotations

from typing import Any

from kit import Input, drawn

GLM = {
    "name": "GLM-5, one expert of 72 MiB", "moe_layers": 18, "experts": 128, "top_k": 8, "shared_experts": 1,
    "hidden": 6144, "intermediate": 2048, "vocabulary": 151552, "heads": 64, "kv_heads": 8, "head_width": 128,
}  # fmt: skip


def inputs_of(**options: Any) -> list[Input]:
    """Returns the inputs. options: further options of drawn()."""
    step = {
        "model": GLM, "layers": 6, "micro_steps": 16, "sequences_per_rank": 1, "tokens_per_rank": 4096,
        "layout": "shuffled", "group_size": 1, "step_spread": 0.57, "group_spread": 0.5, "guest_slots": 4, **options,
    }  # fmt: skip
    return [drawn(f"EP {ranks}", ranks=ranks, **step) for ranks in (2, 4, 8)]
