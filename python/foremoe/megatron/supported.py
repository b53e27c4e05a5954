"""Checks that foremoe.megatron supports the version and configuration of Megatron-LM. Refusals name the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import foremoe
from foremoe._engine.together import fact_of
from foremoe.supported import MEGATRON

from .adapters import router_of
from .experts import MoE

DISPATCHERS = ("allgather", "alltoall", "flex")
FLEX_BACKENDS = ("deepep", "hybridep", "ncclep")  # tested with stand-ins for their kernels, never on a GPU

# Fields of TransformerConfig: allowed values, and the reason. Fields that the Megatron version lacks are not checked.
_MUST_BE: dict[str, tuple[tuple[Any, ...], str]] = {
    "virtual_pipeline_model_parallel_size": (
        (None, 1),
        "a plan runs all layers of a micro-batch in one pass, but its chunks alternate with other micro-batches'; "
        "mode='shadow' serves it",
    ),
    "expert_tensor_parallel_size": ((None, 1), "an expert must lie on one rank"),
    "expert_gtp_weight_remat_size": ((None, 1), "a parameter is then a part of an expert"),
    "moe_expert_capacity_factor": ((None,), "rows are dropped by expert"),
    "moe_pad_expert_input_to_capacity": ((None, False), "rows are padded by expert"),
    "moe_router_padding_for_quantization": ((None, False), "rows are padded by expert"),
    "moe_router_padding_for_fp8": ((None, False), "rows are padded by expert"),
    "moe_latent_size": ((None,), "experts are then of another width than the layer"),
    "moe_shared_expert_overlap": ((None, False), "the dispatcher runs the shared experts then"),
    "moe_single_grouped_weight": ((None, False), "all experts of a rank are one parameter then"),
    "moe_single_grouped_bias": ((None, False), "all experts of a rank are one parameter then"),
    "moe_paged_stash": ((None, False), "activations of guests are not stashed"),
    "use_transformer_engine_op_fuser": ((None, False), "the experts' forward is replaced then"),
    "transformer_impl": ((None, "local", "transformer_engine"), "it is for inference"),
    "fp8": ((None, False), "guests would be quantised anew for each copy"),
    "quant_recipe": ((None,), "guests would not be quantised"),
    "fp4": ((None, False), "guests would be quantised anew for each copy"),
    "cuda_graph_impl": ((None, "none"), "a graph replays sizes that the plan changes"),
    "enable_cuda_graph": ((None, False), "a graph replays sizes that the plan changes"),
    "external_cuda_graph": ((None, False), "a graph replays sizes that the plan changes"),
    "overlap_moe_expert_parallel_comm": ((None, False), "passes of two micro-batches run at once"),
    "delay_wgrad_compute": ((None, False), "gradients of guests would come after they went home"),
    "overlap_dispatch_backward_with_experts_wgrad": ((None, False), "gradients of guests would come too late"),
    "fine_grained_activation_offloading": ((None, False), "activations of guests are not offloaded"),
    "cpu_offloading": ((None, False), "activations of guests are not offloaded"),
    "mtp_num_layers": ((None, 0), "these layers' routes are not replayed"),
}
_MUST_BE_IN_SHADOW = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "transformer_impl")


def expect_version() -> str:
    """Returns the version of megatron-core. Raises ImportError if it is missing or unsupported."""
    try:
        import megatron.core
    except ImportError as error:
        raise ImportError(
            f"foremoe.megatron needs megatron-core {MEGATRON.accepted} to attach to a model: {error}"
        ) from error
    version = str(megatron.core.__version__)
    MEGATRON.expect("foremoe.megatron", version)
    return version


def moe_layers(chunk: Any) -> list[tuple[str, Any]]:
    """Returns (name, layer) of a chunk's MoE layers, in its order. The chunk may be wrapped."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [(name, module) for name, module in chunk.named_modules() if isinstance(module, MoELayer)]


def facts_of(chunks: Sequence[Any], *, weights: bool) -> dict[str, str]:
    """Returns the facts, by name, that must be equal on all ranks of a pipeline stage. weights: Include experts'."""
    facts = {"model_chunks": str(len(chunks))}
    for i, chunk in enumerate(chunks):
        layers = moe_layers(chunk)
        facts[f"model_chunks[{i}]"] = f"{len(layers)} MoE layers"
        for name, layer in layers:
            config = layer.config
            facts[f"model_chunks[{i}].{name}"] = (
                f"top {config.moe_router_topk} of {config.num_moe_experts} experts, {config.hidden_size} wide, "
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
    for name, layer in layers:
        _expect_config(layer.config, name, mode)
        if mode == "active":
            if getattr(layer.config, "moe_router_fusion", False) and _has_replay(layer):
                raise foremoe.InputError(
                    f"moe_router_fusion: True of {name}; expected False, since a fused router ignores the routes of "
                    "router replay",
                    field="moe_router_fusion",
                )
            kind = layer.config.moe_token_dispatcher_type
            _expect_one_of("moe_token_dispatcher_type", kind, DISPATCHERS, name)
            if kind == "flex":
                backend = layer.config.moe_flex_dispatcher_backend
                _expect_one_of("moe_flex_dispatcher_backend", backend, FLEX_BACKENDS, name)
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
    return bool(replays) or getattr(router_of(layer), "router_replay", None) is not None


def replayed(layer: Any) -> Any:
    """Returns the experts that the router replays in a forward, integers [tokens, top_k]; None if it replays none."""
    own = getattr(router_of(layer), "router_replay", None)
    action = getattr(getattr(own, "router_replay_action", None), "value", "")
    return own.target_topk_idx if own is not None and action == "replay_forward" else None


def replay_problem(layer: Any) -> str:
    """Returns why the router replays nothing although it or another router was given routes; "" if no problem."""
    own = getattr(router_of(layer), "router_replay", None)
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


def _expect_one_of(field: str, value: Any, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise foremoe.InputError(
            f"{field}: '{value}' of {name}; expected {' or '.join(allowed)}, or mode='shadow'", field=field
        )


def _expect_config(config: Any, name: str, mode: str) -> None:
    for field, (allowed, reason) in _MUST_BE.items():
        if mode == "shadow" and field not in _MUST_BE_IN_SHADOW:
            continue
        value = getattr(config, field, None)
        if value not in allowed:
            expected = " or ".join(repr(a) for a in allowed if a is not None) or "None"
            raise foremoe.InputError(f"{field}: {value!r} of {name}; expected {expected}, since {reason}", field=field)


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
