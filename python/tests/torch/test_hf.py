"""Route recording, route replay and expert execution for every model family that foremoe.hf supports."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize
import transformers

import foremoe
from foremoe.hf import expert_layers, record
from foremoe.torch import ExpertParallel

EXPERTS, TOP_K = 16, 4
BASE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": TOP_K}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
GROUPED = {
    "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {
    "n_group": 4, "topk_group": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": MOE | {"num_experts": EXPERTS, "head_dim": 16},
    "Qwen2Moe": MOE | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 16},
    "Mixtral": LOCAL,
    "Olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    "DeepseekV3": MOE | GROUPED | LATENT,
    "DeepseekV2": MOE | GROUPED | LATENT | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "Glm4Moe": MOE | GROUPED | {"head_dim": 16},
    "GptOss": LOCAL | {"head_dim": 16},
    "GraniteMoe": LOCAL,
    "Ernie4_5_Moe": {
        "moe_intermediate_size": 16,
        "moe_k": TOP_K,
        "moe_num_experts": EXPERTS,
        "moe_num_shared_experts": 1,
    },
    "MiniMax": LOCAL | {"head_dim": 16},
    "Dots1": MOE | GROUPED,
    "Gemma4": {
        "moe_intermediate_size": 16,
        "top_k_experts": TOP_K,
        "num_experts": EXPERTS,
        "enable_moe_block": True,
        "head_dim": 16,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
    },
}
# The first layer looks its experts up by token id.
HASHED = {
    "DeepseekV4": MOE | {
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 16,
        "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 16, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk": 8, "sliding_window": 16, "hc_mult": 2, "layer_types": ["sliding_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe"],
    },
}  # fmt: skip
# Families whose routers do not choose experts by a single top-k.
NOT_REPLAYABLE: dict[str, dict[str, Any]] = {
    "Phimoe": LOCAL,
    "Zaya": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "router_hidden_size": 16, "head_dim": 16},
}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    config_of = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_of(**BASE | (FAMILIES | HASHED | NOT_REPLAYABLE)[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def recorded(model: Any, ids: Any) -> tuple[Any, Any]:
    """Return the logits and the routes of all rows, [batch, tokens, layers, top_k]."""
    calls: list[Any] = []
    hooks = [
        layer.experts.register_forward_pre_hook(lambda _, arguments: calls.append(arguments[1].detach()))
        for layer in expert_layers(model)
    ]
    logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack([call.view(*ids.shape, -1) for call in calls], 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_replays_routes_with_its_own_gates(family: str) -> None:
    model = make_model(family)
    ids = torch.randint(3, 97, (3, 10))
    expected, own = recorded(model, ids)
    layers = expert_layers(model)
    assert own.shape == (3, 10, len(layers), TOP_K)

    def replay(routes: Any) -> tuple[Any, Any]:
        for i, layer in enumerate(layers):
            layer.replay(routes[:, :, i].reshape(-1, TOP_K))
        found = recorded(model, ids)
        for layer in layers:
            layer.replay(None)
        return found

    logits, _ = replay(own)
    assert torch.equal(logits, expected)
    logits, _ = replay(own.flip(-1))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    other = (own + 1) % EXPERTS
    logits, taken = replay(other)
    assert torch.equal(taken.sort(-1).values, other.sort(-1).values)
    logits.square().mean().backward()
    gradient = next(layers[0].router.parameters()).grad
    assert gradient is not None and gradient.abs().max() > 0
    assert sum(int(layer.mismatched_rows) for layer in layers) == 30 * len(layers), "one of three replays had others"

    other[1, 4:] = -1  # no route: the router chooses
    for layer in layers:
        layer.replayed_rows = layer.mismatched_rows = 0
    _, taken = replay(other)
    assert torch.equal(taken.sort(-1).values[other >= 0], other.sort(-1).values[other >= 0])
    assert [int(layer.replayed_rows) for layer in layers] == [24] * len(layers), "rows that have a route"
    assert [int(layer.mismatched_rows) for layer in layers] == [24] * len(layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_rows_matches_the_experts_of_the_model_family(family: str) -> None:
    model = make_model(family)
    layer = expert_layers(model)[0]
    rows = torch.randn(40, layer.hidden_size)
    expert = torch.randint(0, EXPERTS, (40,)).sort().values
    ends = torch.bincount(expert, minlength=EXPERTS).cumsum(0).to(torch.int32)
    layer.execute_by(None)
    layer.experts.config._experts_implementation = "eager"
    expected = layer.experts(rows, expert[:, None], torch.ones(40, 1))
    found = layer.forward_rows(rows, ends, dict(layer.weights()))
    torch.testing.assert_close(found, expected.view_as(found), rtol=1e-4, atol=1e-4)


def test_experts_compute_in_the_dtype_of_their_weights() -> None:
    layer = expert_layers(make_model("Qwen3Moe"))[0]
    weights = {name: weight.bfloat16() for name, weight in layer.weights().items()}
    rows = torch.randn(EXPERTS, layer.hidden_size)
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32)
    found = layer.forward_rows(rows, ends, weights)
    assert torch.equal(found, layer.forward_rows(rows.bfloat16(), ends, weights))


def test_routes_of_generate_are_recorded_and_replay_without_mismatch() -> None:
    model = make_model("Qwen3Moe")
    prompt = torch.randint(3, 97, (4, 6))
    prompt[0, :2] = 0
    mask = (prompt != 0).long()
    with record(model) as recorder, torch.no_grad():
        out = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=96)
    full = torch.cat([mask, torch.ones(4, out.shape[1] - 6, dtype=torch.long)], 1)
    routes = recorder.routes(out, full)
    assert routes.shape == (4, out.shape[1], 2, TOP_K)
    assert (routes[:, -1] == -1).all() and (routes[0, :2] == -1).all()
    assert (routes[1:, :-1] >= 0).all()

    layers = expert_layers(model)
    for i, layer in enumerate(layers):
        layer.replay(routes[:, :, i].reshape(-1, TOP_K).long())
    positions = (full.cumsum(1) - 1).clamp(min=0)
    model(out, attention_mask=full, position_ids=positions, use_cache=False)
    assert [int(layer.mismatched_rows) for layer in layers] == [0, 0]

    with pytest.raises(foremoe.InputError, match="attention_mask"):
        recorder.routes(out, mask)
    with pytest.raises(foremoe.InputError, match=r"^out: no rows ran .*returns each row once"):
        recorder.routes(out, full)


def test_routes_of_a_plain_forward_are_those_of_the_router_logits() -> None:
    model = make_model("Qwen3Moe")
    ids, mask = torch.randint(3, 97, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, :3] = mask[2, 5:] = 0  # padding on either side
    with record(model) as recorder:
        out = model(ids, attention_mask=mask, output_router_logits=True)
        out.logits.sum().backward()
    routes = recorder.routes(ids, mask)
    expected = torch.stack([of.topk(TOP_K, -1).indices.view(3, 7, TOP_K) for of in out.router_logits], 2)
    present = mask.bool()
    assert torch.equal(routes[present].sort(-1).values.long(), expected[present].sort(-1).values)
    assert (routes[~present] == -1).all()


def test_routes_of_several_plain_forwards_are_read_one_after_the_other() -> None:
    model = make_model("Qwen3Moe")
    batches = [torch.randint(3, 97, shape) for shape in ((3, 7), (2, 5))]
    found = []
    with record(model) as recorder, torch.no_grad():
        for ids in batches:
            model(ids)
            found.append(recorder.routes(ids, torch.ones_like(ids)))
        for ids in batches:
            model(ids)
            with pytest.raises(foremoe.InputError, match=r"rows ran in . forwards, .* or all 6 in one forward"):
                recorder.routes(ids[:, :3][:2], torch.ones(2, 3))
    for ids, routes in zip(batches, found, strict=True):
        with record(model) as recorder, torch.no_grad():
            model(ids)
        assert torch.equal(routes, recorder.routes(ids, torch.ones_like(ids)))


def test_models_without_experts_and_unknown_routers_are_rejected() -> None:
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE))
    with pytest.raises(foremoe.InputError, match="no experts"):
        expert_layers(dense)
    with pytest.raises(foremoe.InputError, match="no experts"), record(dense):
        pass
    model = make_model("Qwen3Moe")
    layer = expert_layers(model)[0]
    layer.router.forward = lambda hidden: (hidden, hidden[:, :TOP_K], torch.zeros(hidden.shape[0], TOP_K).long())
    layer.replay(torch.zeros(10, TOP_K).long())
    with pytest.raises(RuntimeError, match="cannot be replayed"):
        model(torch.randint(3, 97, (1, 10)), use_cache=False)


@pytest.mark.parametrize("forward", [
    lambda hidden: (hidden, hidden[:, :TOP_K], torch.zeros(hidden.shape[0], TOP_K).long()),
    lambda hidden, unknown: (hidden, unknown["key"], torch.topk(hidden[:, :EXPERTS], TOP_K)),
])  # fmt: skip
def test_expert_layers_rejects_a_router_that_it_cannot_test(forward: Any) -> None:
    model = make_model("Qwen3Moe")
    model.model.layers[1].mlp.gate.forward = forward
    with pytest.raises(foremoe.InputError, match=r"model.layers.1.mlp has a router, Qwen3MoeTopKRouter, whose choice"):
        expert_layers(model)


@pytest.mark.parametrize("family", NOT_REPLAYABLE)
def test_expert_layers_rejects_routers_that_cannot_be_replayed(family: str) -> None:
    with pytest.raises(foremoe.InputError, match=f"has a router, {family}.*Router, whose choice cannot be replayed"):
        expert_layers(make_model(family))


def test_a_hash_router_keeps_its_table_and_other_layers_replay() -> None:
    model = make_model("DeepseekV4")
    model.model.layers[0].mlp.gate.tid2eid.copy_(torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(97)]))
    ids = torch.randint(3, 97, (2, 6))
    layers = expert_layers(model)
    assert [layer.is_replayed for layer in layers] == [False, True]
    _, own = recorded(model, ids)
    other = (own + 1) % EXPERTS
    for i, layer in enumerate(layers):
        layer.replay(other[:, :, i].reshape(-1, TOP_K))
    _, found = recorded(model, ids)
    assert torch.equal(found[:, :, 0], own[:, :, 0])
    assert torch.equal(found[:, :, 1].sort(-1).values, other[:, :, 1].sort(-1).values)


def test_testing_a_router_has_no_side_effects() -> None:
    """Leaves parameters, buffers and the random state unchanged, even if the router adds noise in training."""
    model = make_model("DeepseekV3").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    layers = expert_layers(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in layers[0].router.parameters())


class Adapter(torch.nn.Module):
    """Wraps the experts like peft's ParamWrapper, which parametrizes their weights while they run."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = experts


class AddUpdate(torch.nn.Module):
    """A parametrization that adds an adapter's update to a weight."""

    def forward(self, weight: Any) -> Any:
        return weight + 1


def test_adapters_on_experts_are_rejected_by_name() -> None:
    model = make_model("Qwen3Moe")
    block = model.model.layers[1].mlp
    block.experts = Adapter(Adapter(block.experts))
    with pytest.raises(foremoe.InputError, match=r"the experts of model\.layers\.1\.mlp have adapters"):
        expert_layers(model)
    block.experts = block.experts.base_layer.base_layer
    torch.nn.utils.parametrize.register_parametrization(block.experts, "down_proj", AddUpdate())
    with pytest.raises(foremoe.InputError, match=r"the experts of model\.layers\.1\.mlp have adapters"):
        expert_layers(model)


def test_adapters_added_later_are_rejected_when_the_experts_run() -> None:
    model = make_model("Qwen3Moe")
    layers = expert_layers(model)
    for layer in layers:
        layer.execute_by(lambda hidden, ids, gates: hidden)
    model(torch.zeros(1, 4, dtype=torch.long))
    torch.nn.utils.parametrize.register_parametrization(layers[0].experts, "down_proj", AddUpdate())
    with pytest.raises(foremoe.InputError, match="model: experts have adapters"):
        model(torch.zeros(1, 4, dtype=torch.long))


def test_parts_of_experts_that_look_like_whole_ones_are_rejected() -> None:
    """transformers 5.0 keeps a rank's part of each expert as a plain tensor. Its loading cannot run here."""
    model = make_model("Qwen3Moe")
    model._tp_size = 1
    assert len(expert_layers(model)) == 2
    model._tp_size = 2
    with pytest.raises(foremoe.InputError, match="tp_size: 2; expected 1: Qwen3MoeForCausalLM is tensor-parallel"):
        expert_layers(torch.nn.Sequential(model))


def test_routes_that_a_router_has_masked_are_not_recorded() -> None:
    """As under enable_expert_parallel of transformers 5.0 to 5.22."""
    model = make_model("Qwen3Moe")
    model._ep_plan = {"model.layers.*.mlp.gate": "ep_router"}
    with record(model):
        model(torch.zeros(1, 4, dtype=torch.long))
    model.config.distributed_config = types.SimpleNamespace(enable_expert_parallel=True)
    with pytest.raises(foremoe.InputError, match="ep_plan: under ep_router"), record(model):
        pass


def test_a_compiled_model_is_rejected_by_name() -> None:
    model = make_model("Qwen3Moe")
    with pytest.raises(foremoe.InputError, match=r"model: torch\.compile\(\) cannot run planned layers"):
        expert_layers(torch.compile(model))
    model.model.layers[0].compile()
    with pytest.raises(foremoe.InputError, match=r"model: torch\.compile\(\) cannot run planned layers"):
        expert_layers(model)
    other = make_model("Qwen3Moe")
    other.lm_head.compile()
    assert len(expert_layers(other)) == 2


def test_a_model_compiled_later_is_rejected_when_it_is_wrapped_or_runs() -> None:
    model, ids = make_model("Qwen3Moe"), torch.zeros(1, 4, dtype=torch.long)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ep = ExpertParallel(expert_layers(model))
        model(ids)
        compiled = torch.compile(model, backend="eager")
        for act in (lambda: ep.wrap(compiled), lambda: compiled(ids)):
            with pytest.raises(foremoe.InputError, match=r"model: torch\.compile\(\) cannot run planned layers"):
                act()
        ep.detach()
    finally:
        dist.destroy_process_group()


def test_replaying_routes_for_a_different_number_of_rows_raises() -> None:
    model = make_model("Qwen3Moe")
    expert_layers(model)[0].replay(torch.zeros(7, TOP_K).long())
    with pytest.raises(RuntimeError, match="10 rows ran, but there are routes of 7"):
        model(torch.randint(3, 97, (1, 10)), use_cache=False)
