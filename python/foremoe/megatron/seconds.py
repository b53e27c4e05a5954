"""Modelled duration of a step on a cluster, for shadow mode, computed by foremoe.evaluate_plan()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import foremoe

from .experts import row_width


class Modelled:
    """Models the duration of planned steps: attention, router and MoE layers of a pipeline stage, forward and backward.
    Omits dense layers, the output head and transfers between pipeline stages, which plans do not change."""

    def __init__(
        self, cluster: str, model: str | Mapping[str, Any] | None, config: Any, depth: int, threads: int
    ) -> None:
        """cluster, model: See foremoe.evaluate(). model None: shape_of(config). config: TransformerConfig."""
        self._config = config
        self._model = model
        self._options: dict[str, Any] = {
            "cluster": cluster,
            # DeepEP and HybridEP send a token once to each node. allgather sends every token to every rank, with any
            # plan; it is modelled as an all-to-all.
            "dispatch": "token" if config.moe_token_dispatcher_type == "flex" else "row",
            "bytes_per_parameter": config.params_dtype.itemsize,
            "keep_activations": config.recompute_granularity is None,
            "prefetch_depth": depth,
            "path": "peer",
            "threads": threads,
        }

    def expect_known(self, plan: foremoe.Plan, nothing: foremoe.Load) -> None:
        """Raises InputError if seconds() would. nothing: Load without rows, for the stage's layers and experts."""
        try:
            self.seconds(plan, nothing)
        except foremoe.InputError as error:
            if error.field:
                raise
            raise foremoe.InputError(f"cluster: {error}", field="cluster") from error

    def seconds(self, plan: foremoe.Plan, load: foremoe.Load) -> float:
        """Returns the modelled seconds of the policy update."""
        model = shape_of(self._config, load.num_layers) if self._model is None else self._model
        of = foremoe.evaluate_plan(plan, load, phase="policy_update", model=model, **self._options).figures
        if not of["ok"]:
            raise RuntimeError(f"the plan is wrong: {of['violations'][0]['message']}")
        (update,) = of["phases"]
        return float(update["seconds"])


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
