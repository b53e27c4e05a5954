"""Models that are named, found by a load's shape, or read from a config.json."""

import json

import pytest

import foremoe

CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def seconds(load, **options):
    return foremoe.simulate(load, ["vanilla"], cluster="h100", guest_slots=0, **options)[0]["step_seconds"]


def test_a_load_of_all_layers_is_of_the_preset_with_as_many():
    def load(layers):
        return foremoe.synthesize_load(
            layers=layers, experts=256, top_k=8, ranks=8, micro_steps=1, tokens_per_rank=64, seed=1
        )

    whole, part = load(40), load(2)
    assert seconds(whole) == seconds(whole, model="Qwen3.5-35B-A3B") != seconds(whole, model="DeepSeek-V3")
    assert seconds(part) == seconds(part, model="DeepSeek-V3")


def test_routes_are_drawn_for_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    load = foremoe.synthesize_load(shape=str(path), ranks=4, micro_steps=1, tokens_per_rank=64)
    assert (load.num_layers, load.num_experts, load.top_k) == (4, 16, 2)
    assert seconds(load, model=str(path)) > 0
    with pytest.raises(foremoe.InputError, match="shape: 'qwen3-30b' is neither a file nor one of") as error:
        foremoe.synthesize_load(shape="qwen3-30b")
    assert error.value.field == "shape"
