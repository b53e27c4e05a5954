"""How spread layers are described to foremoe.evaluate(), which models the seconds of their steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from foremoe._engine.layers import ExpertLayer


def descriptions_of(layers: Sequence[ExpertLayer]) -> list[dict[str, Any]]:
    """Returns descriptions of the model, the best first: the transformers configuration of the layers' model, if they
    have one, and the shape of the layers, with attention heads of width 128."""
    config = getattr(getattr(layers[0], "model", None), "config", None)
    to_json: Any = getattr(config, "to_json_string", None)
    described = [json.loads(to_json(use_diff=False))] if to_json is not None else []
    first = layers[0]
    size = sum(weight[0].numel() for weight in first.weights().values())  # of an expert
    shape = {
        "name": "these layers",
        "moe_layers": len(layers),
        "experts": first.num_experts,
        "top_k": first.top_k,
        "hidden": first.hidden_size,
        "intermediate": max(1, size // (3 * first.hidden_size)),
        "vocabulary": 1,
        "heads": max(1, first.hidden_size // 128),
        "head_width": 128,
    }
    return [*described, shape]
