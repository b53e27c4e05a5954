"""Refuses torch.compile, under which planned layers cannot run.

A layer's exchanges differ in every micro-step, and autograd hooks rely on the order of turns. Dynamo would trace a
layer, break its graph inside the layer, and run parts of it again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

import foremoe

_REFUSED = "model: torch.compile() cannot run planned layers; expected that only modules without experts are compiled"


def expect_not_compiled(model: torch.nn.Module, experts: Iterable[torch.nn.Parameter]) -> None:
    """Raises InputError if a module that contains one of these experts is compiled."""
    ids = {id(weight) for weight in experts}
    for module in model.modules():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules
        if is_compiled and any(id(p) in ids for p in module.parameters()):
            raise foremoe.InputError(_REFUSED, field="model")


def expect_not_compiling() -> None:
    """Raises InputError if torch.compile runs the caller."""
    if torch.compiler.is_compiling():
        # Dynamo would retry a frame that raises, without compiling it, and this check would then pass.
        torch._dynamo.graph_break(msg=_REFUSED)
        raise foremoe.InputError(_REFUSED, field="model")
