"""How a planned step ends: what all ranks agree upon then, and what may explain an error."""

from __future__ import annotations

import contextlib

import torch

from foremoe._engine.together import Agreement

from .step import Step


def end(step: Step | None, agreement: Agreement) -> str:
    """Ends a step that ran to its end. What was not as planned on any rank; every rank hears of it. Collective.

    step: None on a pipeline stage without MoE layers.
    """
    complete = step is None or step.engine.is_complete()
    if agreement.any(not complete):
        if step is not None:
            step.close(False)
        which = "the step" if not complete else "the step of another rank"
        return f"{which} was left before the last micro-step of its plan"
    places = step.other_rows() if step is not None else []
    failed = agreement.any(bool(places))
    if step is not None:
        step.close(True)  # when no rank waits for this one any more: it may fail
        if places:
            return _named(places, step)
    return "rows in another expert-parallel group were not those of its plan" if failed else ""


def explain(step: Step, error: BaseException) -> None:
    """Names the layer whose routes were not those of the plan, which may be why an exchange failed."""
    with contextlib.suppress(RuntimeError):  # the device may be what failed
        # An exchange that nobody joins keeps the device from ever coming to what was counted.
        device = step.others.device
        if device.type == "cuda" and not torch.cuda.current_stream(device).query():
            return
        places = torch.nonzero(step.others).tolist()
        if places:
            error.add_note(_named(places, step))


def _named(places: list[list[int]], step: Step) -> str:
    micro_step, layer = places[0]
    return (
        f"the rows of {step.moes[layer].name} in micro-step {micro_step} were not those that counts told plan() "
        f"({len(places)} such places)"
    )
