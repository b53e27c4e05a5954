"""Compares numbers of parameters with those of transformers' models, built without memory on the meta device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import foremoe

# ForeMoE counts no norms, no biases (0.035 % of gpt-oss) and no other vectors.
TOLERANCE = 1e-3

# What the families' default configurations must be completed with, to be small or to be MoE models.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "deepseek_v32": {},
    "deepseek_v3": {"num_hidden_layers": 5},
    "deepseek_v4": {"num_hidden_layers": 8},
    "dots1": {
        "num_experts_per_tok": 6, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 16,
        "n_shared_experts": 2,
    },
    "exaone_moe": {},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
    },
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2, "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "llama4_text": {"num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    "nemotron_h": {"moe_latent_size": 512, "n_routed_experts": 16, "moe_shared_expert_intermediate_size": 1000},
    "qwen2_moe": {"shared_expert_intermediate_size": 1000, "mlp_only_layers": [1], "num_hidden_layers": 8},
    "qwen3_moe": {"tie_word_embeddings": True, "decoder_sparse_step": 2, "num_hidden_layers": 8},
}  # fmt: skip
DEFAULT = [
    "afmoe", "axk1", "cohere2_moe", "ernie4_5_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v3", "jamba", "kimi_linear",
    "laguna", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl", "mistral4", "mixtral",
    "olmoe", "phimoe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_vl_moe", "solar_open",
]  # fmt: skip


def build(config: transformers.PreTrainedConfig) -> PreTrainedModel:
    kinds = AutoModelForImageTextToText, AutoModelForCausalLM
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    with torch.device("meta"):
        return kind.from_config(config)


def in_experts(model: PreTrainedModel) -> int:
    """Number of parameters in routed experts without biases."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if re.search(r"\.experts\.", name) and not name.endswith("bias"))


@pytest.mark.parametrize("model_type", [*CHANGES, *DEFAULT])
def test_counts_the_parameters_of_transformers_models(model_type: str, tmp_path: Path) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = CONFIG_MAPPING[model_type](**CHANGES.get(model_type, {}))
    model = build(config)
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())

    ours = foremoe.model_parameters(str(path))
    assert ours["experts"] == in_experts(model)
    assert ours["total"] == pytest.approx(sum(p.numel() for p in model.parameters()), rel=TOLERANCE)
    assert ours["total"] == ours["experts"] + ours["other"]
    assert ours["other"] < ours["active"] < ours["total"]


# transformers allocates gate and up projections for experts without weights, too, which nothing reads.
def test_counts_no_weights_of_experts_without_weights(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["longcat_flash"]()
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    total = sum(p.numel() for p in build(config).parameters())
    unread = config.num_layers * config.zero_expert_num * 2 * config.hidden_size * config.expert_ffn_hidden_size
    assert foremoe.model_parameters(str(path))["total"] == pytest.approx(total - unread, rel=TOLERANCE)
