"""Megatron-LM (megatron-core 0.16 to 0.19): steps whose MoE layers run as planned from counts that are known before.

    replicas = foremoe.megatron.attach(model_chunks, guest_slots=1)
    plan = replicas.plan(counts)                   # int [micro_steps, layers, experts] of this rank; collective
    with replicas.step(plan):
        forward_backward_func(...)
    log(replicas.metrics())

Inside step() each MoE layer's dispatcher is one with slots in the place of experts, and beside the experts there are
guests: copies of other ranks' experts. Loss and gradients are Megatron-LM's own. Nothing is registered in the model:
checkpoints, optimizer and weight sync see what they saw before, and outside of step() the model is untouched.

With mode="shadow" nothing runs otherwise: step() counts and plans, and metrics() says what balancing would give.

No module here imports megatron-core before attach() is called.
"""

from .attach import attach
from .plan import Plan
from .replicas import Replicas

__all__ = ["Plan", "Replicas", "attach"]
