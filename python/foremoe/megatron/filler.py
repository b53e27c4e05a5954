"""Predictable routes for rows that a trainer's mask leaves to the routers, and that do not affect its loss.

They get all experts in turn (with_filler_routes()), so that plans know all rows. The statistics of an expert bias leave
them out, as they leave out all rows that are not replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foremoe._errors import refuse

from .lora import router_of
from .rehearsal import Call, Routes, rehearse
from .rows import with_filler_routes

if TYPE_CHECKING:
    from .schedule import Schedule


class Filler:
    """Routes of the rows that a trainer does not replay."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}  # of filler, by id of a RouterReplay: int64 [experts]

    def fill(self, replay: Any, schedule: Schedule) -> None:
        """Gives filler routes to all rows that RouterReplay.set_target_indices() would leave to the router."""
        own = replay.set_target_indices

        @functools.wraps(own)
        def set_target_indices(self_: Any, routes: Tensor, replay_mask: Tensor | None = None) -> None:
            layers = schedule.replicas.layers if schedule.replicas is not None else []
            if replay_mask is None or not layers:
                own(self_, routes, *([] if replay_mask is None else [replay_mask]))
                return
            experts, is_replayed = layers[0].config.num_moe_experts, replay_mask.bool().reshape(-1)
            first = int(layers[0].local_expert_indices[0])
            filled = with_filler_routes(routes, is_replayed, num_experts=experts, first=first)
            rows = filled[~is_replayed].flatten().bincount(minlength=experts)
            self._rows[id(self_)] = rows + self._rows.get(id(self_), 0)
            own(self_, filled, torch.ones_like(replay_mask))  # with a mask, the router checks the number of rows

        replay.set_target_indices = set_target_indices

    def routes(self, call: Call, layers: Sequence[Any]) -> Routes | None:
        """Rehearses, and subtracts the rows of filler from the statistics of an expert bias before they are counted."""
        if layers and getattr(layers[0].config, "experimental_attention_variant", None) == "dsv4_hybrid":
            refuse("experimental_attention_variant", "is 'dsv4_hybrid', whose rows are split otherwise over ranks")
        self._rows.clear()
        found = rehearse(call, layers)
        for layer in layers if found is not None and not call.forward_only else []:
            router = router_of(layer)
            rows = self._rows.get(id(router.router_replay))
            if rows is not None and getattr(router, "enable_expert_bias", False):
                router.local_tokens_per_expert -= rows
        return found
