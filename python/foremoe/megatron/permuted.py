"""Homes of a Megatron-LM model. Megatron-LM owns experts in contiguous blocks, so other homes renumber the experts.

permute_experts() moves experts, and the entries of routers that belong to them, to new numbers: positions, as HomeTable
defines them. The model computes the same function. A buffer in each router records the expert at each position, so that
checkpoints contain it. Megatron-LM, plans and metrics then number experts by position; Replicas renumbers counts and
routes that number experts as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import foremoe
from foremoe._engine.homes import HomeTable, exchanged
from foremoe._engine.together import digest_of, refused_together
from foremoe.options import AnyHomes

from .arguments import expect_chunks
from .experts import expert_parameters
from .lora import adapted, router_of
from .supported import moe_layers

BUFFER = "foremoe_expert_of_position"
"""Name of the routers' buffer, int64 [experts]: the expert at each position."""


def permute_experts(model_chunks: Any, homes: AnyHomes = None) -> None:
    """Moves the experts of a Megatron-LM model to their homes, and records the permutation in the model.

    Moves weights of experts between the ranks of each expert-parallel group, and permutes the entries of routers: rows
    of weights, biases, expert biases and counts. Call it after loading a checkpoint, before attach(), and before the
    optimizer is created; otherwise call the optimizer's reload_model_params(). The optimizer's state must be empty.
    Checkpoints that are saved afterwards contain the permutation. To load such a checkpoint, first call
    permute_experts(model_chunks) without homes: it adds the buffers that loading fills.

    Collective over all ranks of the default process group.

    Args:
        model_chunks: A module or a list of modules.
        homes: Rank that owns each expert; see foremoe.plan(). Layers are the MoE layers of this pipeline stage, without
            those for multi-token prediction. None: moves nothing.

    Raises:
        InputError: on all ranks, for homes that do not fit or differ between ranks; for a model whose experts were
            permuted before; and for routers that choose groups of experts, which a permutation would change.
    """
    with refused_together() as given:
        from megatron.core import parallel_state

        chunks = list(model_chunks) if isinstance(model_chunks, (list, tuple)) else [model_chunks]
        expect_chunks(chunks)
        named = [found for chunk in chunks for found in moe_layers(chunk)]
        table = table_of([layer for _, layer in named], homes)
        of_experts = [expert_parameters(layer.experts, name) for name, layer in named]
        for name, layer in named:
            if not is_identity(order_of(layer)):
                raise foremoe.InputError(f"model_chunks: experts of {name} were permuted before", field="model_chunks")
            if [*adapted(layer.experts), *adapted(layer.router)]:
                raise foremoe.InputError(
                    f"model_chunks: {name} has adapters; expected permute_experts() before they are added",
                    field="model_chunks",
                )
            if getattr(layer.config, "moe_router_num_groups", None) and table is not None and not table.is_contiguous:
                raise foremoe.InputError(
                    f"moe_router_num_groups: {layer.config.moe_router_num_groups} of {name}; expected None, since a "
                    "permutation would change the groups",
                    field="moe_router_num_groups",
                )
        digest = "none" if table is None else table.digest
        given.expect_equal({"homes": digest}, f"pipeline stage {parallel_state.get_pipeline_model_parallel_rank()}")
    for i, (_, layer) in enumerate(named):
        assert table is not None
        order = torch.from_numpy(table.order[i].copy())
        if not table.is_contiguous:
            _permute(layer, of_experts[i], order, table, i)
        layer.router.register_buffer(BUFFER, order.to(layer.router.weight.device))


@torch.no_grad()
def _permute(
    layer: Any, of_experts: dict[str, list[torch.nn.Parameter]], order: torch.Tensor, table: HomeTable, index: int
) -> None:
    for own in of_experts.values():
        part = torch.stack([p.detach() for p in own])
        moved = exchanged(part, table, index, layer.ep_group, to_blocks=False)
        for parameter, weight in zip(own, moved, strict=True):
            parameter.copy_(weight)
    for of in (*layer.router.parameters(recurse=False), *layer.router.buffers(recurse=False)):
        if of.dim() and len(of) == len(order):  # weight, bias, expert_bias, tokens per expert
            of.copy_(of[order.to(of.device)])


def table_of(layers: Sequence[Any], homes: AnyHomes) -> HomeTable | None:
    """Returns the table of homes of these MoE layers; None if there are none. Raises InputError if they do not fit."""
    if not layers:
        return None
    config, ranks = layers[0].config, dist.get_world_size(layers[0].ep_group)
    shape = 1, len(layers), ranks, int(config.num_moe_experts)
    return HomeTable.of(homes, foremoe.Load.from_array(np.zeros(shape, np.int64), top_k=int(config.moe_router_topk)))


def order_of(layer: Any) -> npt.NDArray[np.int64]:
    """Returns the expert at each position of a layer, int64 [experts], as recorded in it; without a record, its own."""
    order = getattr(router_of(layer), BUFFER, None)
    return np.arange(int(layer.config.num_moe_experts)) if order is None else order.cpu().numpy()


def is_identity(order: npt.NDArray[np.int64]) -> bool:
    return bool((order == np.arange(len(order))).all())


class Renumbering:
    """Numbers of experts before and after permute_experts(). Keeps all numbers if no homes are given."""

    def __init__(self, layers: Sequence[Any], names: Sequence[str], homes: AnyHomes) -> None:
        """Raises InputError unless the layers are permuted by the given homes."""
        self._table = None if homes is None else table_of(layers, homes)
        orders: Any = () if self._table is None else self._table.order
        for layer, name, expected in zip(layers, names, orders, strict=False):
            order = order_of(layer)
            if not np.array_equal(order, expected):
                found = "no permutation" if is_identity(order) else "the permutation of other homes"
                raise foremoe.InputError(
                    f"homes: given, but {name} has {found}; load a checkpoint that was saved after "
                    "permute_experts(model_chunks, homes)",
                    field="homes",
                )

    @property
    def digest(self) -> str:
        return "None" if self._table is None else digest_of(self._table.home)

    def counts(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns counts by position. counts: int64 [micro_steps, layers, experts]."""
        return counts if self._table is None else np.take_along_axis(counts, self._table.order[None], 2)

    def routes(self, routes: torch.Tensor) -> torch.Tensor:
        """Returns routes by position; negative entries stay. routes: integers [..., layers, top_k]."""
        if self._table is None:
            return routes
        layers = len(self._table.home)
        if routes.dim() < 2 or routes.shape[-2] != layers:
            raise foremoe.InputError(
                f"routes: is {list(routes.shape)}; expected [..., {layers}, top_k]", field="routes"
            )
        most = self._table.home.shape[1]
        if bool((routes >= most).any()):
            raise foremoe.InputError(f"routes: has expert {int(routes.max())}, but there are {most}", field="routes")
        positions = torch.from_numpy(self._table.position).to(routes.device)
        layer = torch.arange(layers, device=routes.device)[:, None]
        return positions[layer, routes.long().clamp(min=0)].to(routes.dtype).where(routes >= 0, routes)
