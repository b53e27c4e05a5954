"""How a Megatron-LM model is described to foremoe.evaluate(), which models the seconds of its steps."""

from __future__ import annotations

from typing import Any

from .experts import row_width


def cost_options(config: Any, depth: int) -> dict[str, Any]:
    """Returns the options of foremoe.evaluate() that describe a step. config: TransformerConfig.

    The modelled seconds are those of attention, router and MoE layers of a pipeline stage. They omit dense layers, the
    output head and transfers between pipeline stages, which plans do not change.
    """
    return {
        # DeepEP and HybridEP send a token once to each node. allgather sends every token to every rank, with any plan;
        # it is modelled as an all-to-all.
        "dispatch": "token" if config.moe_token_dispatcher_type == "flex" else "row",
        "bytes_per_parameter": config.params_dtype.itemsize,
        "keep_activations": config.recompute_granularity is None,
        "prefetch_depth": depth,
        "path": "peer",
    }


def shape_of(config: Any, layers: int) -> dict[str, Any]:
    """Returns the model description for foremoe.evaluate(). layers: Number of MoE layers of this pipeline stage.

    A modelled expert has three matrices. An expert without a gate has two, so it is modelled with two thirds of its
    width. The shared experts' width is converted to a number of experts, rounded up. With moe_latent_size, `hidden` is
    the width of rows and routed experts: the latent projections are left out, and attention's are too small.
    """
    hidden = row_width(config)
    width = int(config.moe_ffn_hidden_size or config.ffn_hidden_size)
    shared = int(getattr(config, "moe_shared_expert_intermediate_size", None) or 0)
    heads = int(config.num_attention_heads)
    groups = int(config.moe_router_num_groups or 1) if config.moe_router_group_topk else 1
    return {
        "name": "this model",
        "moe_layers": layers,
        "experts": int(config.num_moe_experts),
        "top_k": int(config.moe_router_topk),
        "expert_groups": groups,
        "groups_per_token": int(config.moe_router_group_topk or 1),
        "shared_experts": -(-shared * int(config.hidden_size) // (width * hidden)),
        "hidden": hidden,
        "intermediate": width if config.gated_linear_unit else max(1, 2 * width // 3),
        "vocabulary": 1,
        "heads": heads,
        "kv_heads": int(config.num_query_groups or heads),
        "head_width": int(config.kv_channels or config.hidden_size // heads),
    }
