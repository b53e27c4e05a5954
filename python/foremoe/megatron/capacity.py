"""How large Megatron-LM's flex dispatcher must make the buffers of a rank, for all rows of a plan to have room.

HybridEP and NCCL-EP give every rank room for a fixed number of rows, in each layer of each micro-batch:

    int(tokens of the rank · top_k · moe_expert_rank_capacity_factor)      (MoEFlexTokenDispatcher's managers, 0.19)

HybridEP drops the rows beyond, NCCL-EP ends the process. Without a plan nobody knows the factor before. NCCL-EP takes
the tokens of the process's first micro-batch, rounded up to 64, and no later one may have more: so what has room by the
line above has room there. Both then round up to their alignment, which only adds room. HybridEP may pad the tokens of
all ranks to those of the rank with the most, when told to. Where GEMMs need it, the rows of each slot are padded too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import foremoe

FIELD = "moe_expert_rank_capacity_factor"
_Rows = npt.NDArray[np.int64]
_STEP = 1000  # a factor has three decimals: what is read from a log is not less than what was meant


@dataclasses.dataclass(frozen=True)
class Buffers:
    """How a configuration sizes them.

    align: rows to a multiple of which those of each slot are padded; 1 for none.
    padded_ranks: every rank has as much room as the rank with the most tokens.
    """

    align: int = 1
    padded_ranks: bool = False

    @classmethod
    def of(cls, config: Any) -> Buffers:
        """config: TransformerConfig."""
        backend = getattr(config, "moe_flex_dispatcher_backend", None)
        quantised = bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))
        fused = bool(getattr(config, "use_transformer_engine_op_fuser", False))
        align = 1
        if quantised or (fused and backend == "ncclep"):  # HybridEP pads slots for quantisation alone
            from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

            align = max(1, get_align_size_for_quantization(config))
        padded = backend == "hybridep" and bool(getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False))
        return cls(align, padded)

    def factor(self, load: foremoe.Load, rows_of_slots: _Rows) -> float:
        """The least factor, a multiple of 0.001, with which all rows have room; at least 1.

        rows_of_slots: [micro_steps, layers, ranks, slots]. Returns infinity where a rank with no rows of its own
        computes those of others: it has no room at any factor.
        """
        own, rows = self._sizes(load, rows_of_slots)
        if bool(((own == 0) & (rows > 0)).any()):
            return math.inf
        # In integers: the least n with n · own ≥ 1000 · rows everywhere.
        n = int((-(-_STEP * rows // np.maximum(own, 1))).max(initial=_STEP))
        while _are_too_small(own, rows, n / _STEP):  # n / 1000 may be a hair less than it says
            n += 1
        return n / _STEP

    def are_too_small(self, load: foremoe.Load, rows_of_slots: _Rows, factor: float) -> bool:
        """Whether some rows have no room with this factor. rows_of_slots: as factor() takes them."""
        return _are_too_small(*self._sizes(load, rows_of_slots), factor)

    def _sizes(self, load: foremoe.Load, rows_of_slots: _Rows) -> tuple[_Rows, _Rows]:
        """[micro_steps, layers, ranks]: the tokens · top_k that each rank's room is sized by, and the rows it gets."""
        own = load.array.sum(-1)
        if self.padded_ranks:
            own = np.broadcast_to(own.max(-1, keepdims=True), own.shape)
        return own, (-(-rows_of_slots // self.align) * self.align).sum(-1)


def _are_too_small(own: _Rows, rows: _Rows, factor: float) -> bool:
    return bool(((own * factor).astype(np.int64) < rows).any())


def planned_slots(plan: foremoe.Plan) -> _Rows:
    """Rows of each slot, [micro_steps, layers, ranks, slots]."""
    rows = np.zeros((plan.num_micro_steps, *plan.slot_tokens.shape[1:]), np.int64)
    rows[plan.event_micro_step] = plan.slot_tokens  # equal in both passes
    return rows


def home_slots(load: foremoe.Load) -> _Rows:
    """The same without a plan: [micro_steps, layers, ranks, own experts]."""
    experts = load.array.sum(2)
    of_ranks: _Rows = experts.reshape(*experts.shape[:2], load.num_ranks, -1)
    return of_ranks


def end_context(dispatchers: Iterable[Any]) -> None:
    """Ends NCCL-EP's context, of which a process has one, if a dispatcher uses it; the next dispatch makes it anew.

    It is made for one number of experts, and Megatron's own dispatchers have fewer than planned ones. Never run.
    """
    managers: list[Any] = [getattr(dispatcher, "_comm_manager", None) for dispatcher in dispatchers]
    of_nccl = [manager for manager in managers if hasattr(manager, "_bootstrapped")]
    if of_nccl:
        from megatron.core.transformer.moe.fused_a2a import nccl_ep_finalize

        torch.cuda.synchronize()  # what uses it
        nccl_ep_finalize()
    for manager in of_nccl:
        manager._bootstrapped = False
