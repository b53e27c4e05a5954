"""Seconds that a step would take on a modelled cluster, for shadow mode: by foremoe.evaluate_plan()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import foremoe


class Modelled:
    """Says what planned steps would take: attention, router and MoE layers of a pipeline stage, forward and backward.
    Dense layers, output head and what crosses pipeline stages are left out; plans do not change them."""

    def __init__(
        self, cluster: str, model: str | Mapping[str, Any] | None, config: Any, depth: int, threads: int
    ) -> None:
        """cluster, model: as foremoe.evaluate() takes them; None: shape_of() of the TransformerConfig, config."""
        self._config = config
        self._model = model
        self._options: dict[str, Any] = {
            "cluster": cluster,
            # DeepEP and HybridEP send a token once to each node. allgather sends every token to every rank, which no
            # plan changes; what is modelled of it is an all-to-all.
            "dispatch": "token" if config.moe_token_dispatcher_type == "flex" else "row",
            "bytes_per_parameter": config.params_dtype.itemsize,
            "keep_activations": config.recompute_granularity is None,
            "prefetch_depth": depth,
            "path": "peer",
            "threads": threads,
        }

    def expect_known(self, plan: foremoe.Plan, nothing: foremoe.Load) -> None:
        """Raises InputError of what seconds() would refuse. nothing: a load without rows, of the layers and experts."""
        try:
            self.seconds(plan, nothing)
        except foremoe.InputError as error:
            if error.field:
                raise
            raise foremoe.InputError(f"cluster: {error}", field="cluster") from error

    def seconds(self, plan: foremoe.Plan, load: foremoe.Load) -> float:
        """Of the policy update."""
        model = shape_of(self._config, load.num_layers) if self._model is None else self._model
        of = foremoe.evaluate_plan(plan, load, phase="policy_update", model=model, **self._options).figures
        if not of["ok"]:
            raise RuntimeError(f"the plan is wrong: {of['violations'][0]['message']}")
        (update,) = of["phases"]
        return float(update["seconds"])


def shape_of(config: Any, layers: int) -> dict[str, Any]:
    """What foremoe.evaluate() asks of a model, from a TransformerConfig and the number of its MoE layers here.

    A modelled expert has three matrices; one without a gate has two, as if its width were two thirds of it. Shared
    experts are counted in experts, rounded up.
    """
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
        "shared_experts": -(-shared // width),
        "hidden": int(config.hidden_size),
        "intermediate": width if config.gated_linear_unit else max(1, 2 * width // 3),
        "vocabulary": 1,
        "heads": heads,
        "kv_heads": int(config.num_query_groups or heads),
        "head_width": int(config.kv_channels or config.hidden_size // heads),
    }
