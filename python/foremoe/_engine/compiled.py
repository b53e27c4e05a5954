"""torch.compile: planned layers cannot run under it, and refuse it by name.

What a layer exchanges is another thing in every micro-step, and autograd's hooks keep the order of turns. Dynamo would
trace a layer, break its graph inside it, and run parts of it again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

import foremoe

_REFUSED = "model: torch.compile() cannot run planned layers; expected that only modules without experts are compiled"


def expect_not_compiled(model: torch.nn.Module, experts: Iterable[torch.nn.Parameter]) -> None:
    """Raises InputError where a module that holds one of these experts is compiled."""
    ids = {id(weight) for weight in experts}
    for module in model.modules():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules
        if is_compiled and any(id(p) in ids for p in module.parameters()):
            raise foremoe.InputError(_REFUSED, field="model")


def expect_not_compiling() -> None:
    """Raises InputError where torch.compile runs the caller."""
    if torch.compiler.is_compiling():
        # Dynamo would try a frame that raises again without compiling it, where nothing is left to see.
        torch._dynamo.graph_break(msg=_REFUSED)
        raise foremoe.InputError(_REFUSED, field="model")
