"""Checks that foremoe.megatron supports a model. foremoe.supported has the rules for its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import foremoe
from foremoe._engine.together import fact_of
from foremoe.supported import CONFIGURATION, MEGATRON, expect, relevant

from .experts import MoE, row_width
from .lora import replay_of


def expect_version(mode: str) -> str:
    """Returns the version of megatron-core. Raises ImportError if it is missing or unsupported in this mode."""
    try:
        import megatron.core
    except ImportError as error:
        raise ImportError(
            f"foremoe.megatron needs megatron-core {MEGATRON.accepted} to attach to a model: {error}"
        ) from error
    version = str(megatron.core.__version__)
    MEGATRON.expect("foremoe.megatron", version, mode)
    return version


def moe_layers(chunk: Any) -> list[tuple[str, Any]]:
    """Returns (name, layer) of a chunk's MoE layers, in its order. The chunk may be wrapped.

    Leaves out layers for multi-token prediction: rollouts record no routes for them, so Megatron's own dispatcher runs
    them. They run after the other layers of a micro-batch, and their backward before those.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    modules = dict(chunk.named_modules())
    apart = tuple(f"{name}." for name, module in modules.items() if isinstance(module, MultiTokenPredictionLayer))
    return [(name, of) for name, of in modules.items() if isinstance(of, MoELayer) and not name.startswith(apart)]


def facts_of(chunks: Sequence[Any], *, weights: bool) -> dict[str, str]:
    """Returns the facts, by name, that must be equal on all ranks of a pipeline stage. weights: Include experts'."""
    facts = {"model_chunks": str(len(chunks))}
    for i, chunk in enumerate(chunks):
        layers = moe_layers(chunk)
        facts[f"model_chunks[{i}]"] = f"{len(layers)} MoE layers"
        for name, layer in layers:
            config = layer.config
            facts[f"model_chunks[{i}].{name}"] = (
                f"top {config.moe_router_topk} of {config.num_moe_experts} experts, {row_width(config)} wide, "
                f"dispatched by {config.moe_token_dispatcher_type}"
            )
            for of, weight in layer.experts.named_parameters() if weights else ():
                facts[f"model_chunks[{i}].{name}.{of}"] = fact_of(weight)
    return facts


def expect_supported(chunks: Sequence[Any], layers: list[tuple[str, Any]], mode: str, stages: int) -> None:
    """Raises InputError with the unsupported field, its value and the values it may have.

    stages: Number of pipeline stages. If there are several, this one may have no MoE layer.
    """
    if not layers and mode == "active" and stages == 1:
        raise foremoe.InputError("model_chunks: have no MoELayer", field="model_chunks")
    if layers and mode == "active":
        from megatron.core import parallel_state

        if (size := parallel_state.get_expert_tensor_parallel_world_size()) != 1:
            raise foremoe.InputError(
                f"expert_tensor_parallel_size: {size} in parallel_state; expected 1, since an expert must lie on one "
                "rank; pass 1 to initialize_model_parallel(), for which None means tensor_model_parallel_size",
                field="expert_tensor_parallel_size",
            )
    for name, layer in layers:
        values = {rule.field: getattr(layer.config, rule.field, None) for rule in CONFIGURATION}
        if not _has_replay(layer):
            del values["moe_router_fusion"]
        expect(relevant(values), mode, of=name)
    if mode == "active":
        for i, chunk in enumerate(chunks):
            for module in chunk.modules():
                if type(module).__name__ in (
                    "FullyShardedDataParallel",
                    "MegatronFSDP",
                    "TorchFullyShardedDataParallel",
                ):
                    raise foremoe.InputError(
                        f"model_chunks[{i}]: is sharded by {type(module).__name__}; expected Megatron's "
                        "DistributedDataParallel, or none",
                        field="model_chunks",
                        index=f"[{i}]",
                    )


def _has_replay(layer: Any) -> bool:
    replays = getattr(layer.config, "moe_enable_routing_replay", False)
    return bool(replays) or replay_of(layer) is not None


def replayed(layer: Any) -> Any:
    """Returns the experts that the router replays in a forward, integers [tokens, top_k]; None if it replays none."""
    own = replay_of(layer)
    action = getattr(getattr(own, "router_replay_action", None), "value", "")
    return own.target_topk_idx if own is not None and action == "replay_forward" else None


def replay_problem(layer: Any) -> str:
    """Returns why the router replays nothing although it or another router was given routes; "" if no problem."""
    own = replay_of(layer)
    if own is None or own.router_replay_action is not None:
        return ""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    registered = RouterReplay.global_router_replay_instances
    if own.target_topk_idx is None and all(of.router_replay_action is None for of in registered):
        return ""
    return (
        f"its RouterReplay has no router_replay_action, but routes were given to it or to others of the "
        f"{len(registered)} that are registered; expected one for each router of the model, which a model that was "
        "built twice has not"
    )


def expect_equal(layers: list[tuple[str, Any]]) -> None:
    """Raises InputError unless layers have equal numbers of experts, top-k and ranks, and there are several ranks."""
    for i, (name, layer) in enumerate(layers):
        first = layers[0][1]
        if layer.ep_group != first.ep_group or any(
            getattr(layer.config, field) != getattr(first.config, field)
            for field in ("num_moe_experts", "moe_router_topk")
        ):
            raise foremoe.InputError(
                f"model_chunks: {name} has other experts, top-k or ranks than {layers[0][0]}",
                field="model_chunks",
                index=f"[{i}]",
            )
    if layers[0][1].ep_group.size() == 1:
        raise foremoe.InputError(
            "expert_model_parallel_size: 1; expected 2 or more, since copies go from rank to rank",
            field="expert_model_parallel_size",
        )


def expect_lendable(chunks: Sequence[Any], moes: Sequence[MoE]) -> None:
    """Raises InputError if layers cannot share guest buffers, as residency shared requires."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    for moe in moes:
        if moe.shapes() != moes[0].shapes():
            raise foremoe.InputError(
                f"residency: shared, but experts of {moe.name} are of other shapes or types than those of "
                f"{moes[0].name}; expected all alike, since layers lend each other their slots",
                field="residency",
            )
    for block in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerBlock)):
        config = block.config
        if (config.recompute_granularity, config.recompute_method) != ("full", "uniform"):
            continue  # its checkpoints hold at most one layer
        for begin in range(0, len(block.layers), config.recompute_num_layers):
            checkpointed = block.layers[begin : begin + config.recompute_num_layers]
            if len(moe_layers(checkpointed)) > 1:
                raise foremoe.InputError(
                    f"recompute_num_layers: {config.recompute_num_layers}, so that a checkpoint holds several MoE "
                    "layers; expected 1 under residency shared",
                    field="recompute_num_layers",
                )
