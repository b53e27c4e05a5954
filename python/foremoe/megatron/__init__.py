"""Planned steps for Megatron-LM, from token counts that are known in advance.

    replicas = foremoe.megatron.attach(model_chunks, guest_slots=1)
    plan = replicas.plan(counts)                   # int [micro_steps, layers, experts] of this rank; collective
    with replicas.step(plan):
        forward_backward_func(...)
    log(replicas.metrics())

Inside step() each MoE layer's dispatcher routes rows to slots instead of experts. Guest slots contain guests: copies of
other ranks' experts. Loss and gradients equal Megatron-LM's up to rounding. Nothing is registered in the model:
checkpoints, optimizer and weight sync see the same model as before. Outside of step() the model is unchanged.

counts_from_routes() counts the rows of one rank under tensor and context parallelism. permute_experts() moves experts
to other homes, before attach().

With mode="shadow" step() leaves execution unchanged: it counts rows and plans, and metrics() estimates the benefit.

No module of this package imports megatron-core before attach() is called. See foremoe.supported for versions.
"""

from .attach import attach
from .permuted import permute_experts
from .plan import Plan
from .replicas import Replicas
from .rows import Place, counts_from_routes, with_filler_routes

__all__ = ["Place", "Plan", "Replicas", "attach", "counts_from_routes", "permute_experts", "with_filler_routes"]
