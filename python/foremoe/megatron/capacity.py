"""Buffer capacity that Megatron-LM's flex dispatcher needs for all rows of a plan.

HybridEP and NCCL-EP give every rank a buffer for a fixed number of rows, in each layer of each micro-batch:

    int(tokens of the rank · top_k · moe_expert_rank_capacity_factor)      (MoEFlexTokenDispatcher's managers, 0.19)

HybridEP drops rows beyond this number; NCCL-EP ends the process. From 0.20 on, buffers of NCCL-EP have no limit unless
the factor is set, which then needs use_transformer_engine_op_fuser. Without a plan the required factor is not known in
advance. NCCL-EP sizes buffers by the tokens of the process's first micro-batch, rounded up to 64. No later micro-batch
may have more tokens, so rows that fit by the formula above also fit in NCCL-EP's buffers. Both kernels round sizes up
to their alignment, which only adds room. An option of HybridEP pads all ranks to the largest number of tokens. If GEMMs
need it, each slot's rows are padded.
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
_STEP = 1000  # factors are multiples of 0.001, so that logs print them exactly and never round them down


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Rules by which a configuration sizes the buffers.

    align: The rows of each slot are padded to a multiple of this; 1: no padding.
    padded_ranks: Every rank's buffer is sized by the rank with the most tokens.
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
        if quantised or (fused and backend == "ncclep"):  # HybridEP pads slots only for quantisation
            from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

            align = max(1, get_align_size_for_quantization(config))
        padded = backend == "hybridep" and bool(getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False))
        return cls(align, padded)

    def factor(self, load: foremoe.Load, rows_of_slots: _Rows) -> float:
        """Returns the smallest factor, a multiple of 0.001 and at least 1, with which all rows fit in the buffers.

        rows_of_slots: [micro_steps, layers, ranks, slots]. Returns infinity if a rank without rows of its own computes
        rows of other ranks: its buffer is empty at any factor.
        """
        own, rows = self._sizes(load, rows_of_slots)
        if bool(((own == 0) & (rows > 0)).any()):
            return math.inf
        # In integers: the smallest n with n · own ≥ 1000 · rows for all ranks.
        n = int((-(-_STEP * rows // np.maximum(own, 1))).max(initial=_STEP))
        while _are_too_small(own, rows, n / _STEP):  # floating point may round n / 1000 down
            n += 1
        return n / _STEP

    def are_too_small(self, load: foremoe.Load, rows_of_slots: _Rows, factor: float) -> bool:
        """Returns whether rows exceed the buffers at this factor. rows_of_slots: see factor()."""
        return _are_too_small(*self._sizes(load, rows_of_slots), factor)

    def _sizes(self, load: foremoe.Load, rows_of_slots: _Rows) -> tuple[_Rows, _Rows]:
        """Returns tokens · top_k, which sizes a buffer, and the rows of its rank; both [micro_steps, layers, ranks]."""
        own = load.array.sum(-1)
        if self.padded_ranks:
            own = np.broadcast_to(own.max(-1, keepdims=True), own.shape)
        return own, (-(-rows_of_slots // self.align) * self.align).sum(-1)


def _are_too_small(own: _Rows, rows: _Rows, factor: float) -> bool:
    return bool(((own * factor).astype(np.int64) < rows).any())


def planned_slots(plan: foremoe.Plan) -> _Rows:
    """Returns the planned rows of each slot, [micro_steps, layers, ranks, slots]."""
    rows = np.zeros((plan.num_micro_steps, *plan.slot_tokens.shape[1:]), np.int64)
    rows[plan.event_micro_step] = plan.slot_tokens  # forward and backward have equal rows
    return rows


def home_slots(load: foremoe.Load) -> _Rows:
    """Returns the rows of each home slot without a plan, [micro_steps, layers, ranks, own experts]."""
    experts = load.array.sum(2)
    of_ranks: _Rows = experts.reshape(*experts.shape[:2], load.num_ranks, -1)
    return of_ranks


def end_context(dispatchers: Iterable[Any]) -> None:
    """Ends the process's NCCL-EP context if a dispatcher uses it; the next dispatch creates it again.

    A context supports one number of experts. Planned dispatchers have more experts than Megatron's own. Never run.
    """
    managers: list[Any] = [getattr(dispatcher, "_comm_manager", None) for dispatcher in dispatchers]
    of_nccl = [manager for manager in managers if hasattr(manager, "_bootstrapped")]
    if of_nccl:
        from megatron.core.transformer.moe.fused_a2a import nccl_ep_finalize

        torch.cuda.synchronize()  # waits for kernels that use the context
        nccl_ep_finalize()
    for manager in of_nccl:
        manager._bootstrapped = False
