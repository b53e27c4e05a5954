"""End of a planned step: agreement of all ranks on its success, and explanation of errors."""

from __future__ import annotations

import contextlib

import torch

from foremoe._engine.session import Session
from foremoe._variable import HOME

from .step import Step


def end(step: Step | None, session: Session) -> str:
    """Ends a step whose body completed. Returns a deviation from the plan on any rank, or "". Collective.

    step: None on a pipeline stage without MoE layers.
    """
    complete = step is None or step.engine.is_complete()
    if session.any(not complete):
        if step is not None:
            step.close(False)
        which = "the step" if not complete else "the step of another rank"
        return f"{which} was left before the last micro-step of its plan"
    places = step.other_rows() if step is not None else []
    failed = session.any(bool(places))
    if step is not None:
        step.close(True)  # last, since it may fail: by now no rank waits for this one
        if places:
            return _named(places, step)
    return "rows in another expert-parallel group were not those of its plan" if failed else ""


def explain(step: Step, error: BaseException) -> None:
    """If a layer's routes differ from the plan, adds a note that names the layer to the error, as a possible cause."""
    if step.on_mismatch == HOME:
        return
    with contextlib.suppress(RuntimeError):  # the device may be what failed
        # The device may be blocked in an exchange that other ranks never join; reading `deviates` would then hang.
        device = step.deviates.device
        if device.type == "cuda" and not torch.cuda.current_stream(device).query():
            return
        places = torch.nonzero(step.deviates).tolist()
        if places:
            error.add_note(_named(places, step))


def _named(places: list[list[int]], step: Step) -> str:
    micro_step, layer = places[0]
    return (
        f"the rows of {step.moes[layer].name} in micro-step {micro_step} were not those that counts told plan() "
        f"({len(places)} such places)"
    )
