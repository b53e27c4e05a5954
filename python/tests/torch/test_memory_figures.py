"""Rows and bytes of guests in training are those that foremoe.fit() reports before the step."""

from __future__ import annotations

import pytest
import torch
from processes import gather
from training import EXPERTS, LAYERS, TOP_K, begin, run_phase

import foremoe

MODEL = {
    "moe_layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "hidden": 32, "intermediate": 16, "heads": 2,
    "head_width": 16, "vocabulary": 64,
}  # fmt: skip
DEPTH = 2


@pytest.mark.parametrize("guest_slots", [0, 1, 2])
@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
def test_rows_and_bytes_equal_those_of_fit(rank: int, residency: str, guest_slots: int) -> None:
    planning = {"guest_slots": guest_slots, "residency": residency}
    ep, _, trained = begin(dtype=torch.float32, depth=DEPTH, **planning)
    phase = run_phase(ep, trained, micro_steps=3)
    figures = phase.figures()
    load = foremoe.Load.from_array(phase.routes.counts, top_k=TOP_K, ranks_per_node=ep.num_ranks)
    found = foremoe.fit(
        load,
        cluster="h100",
        model=MODEL,
        bytes_per_parameter=4,
        prefetch_depth=DEPTH,
        **planning,  # type: ignore[arg-type]
    )["planned"]
    assert figures["most_rows"] == found["most_rows"]["rows"]
    weights, gradients = (max(gather(figures[f"guest_{name}_bytes"])) for name in ("weight", "gradient"))
    assert weights == pytest.approx(found["memory"]["guest_weights"], rel=0.02)
    assert gradients == pytest.approx(found["memory"]["guest_gradients"], rel=0.02)
    assert (weights > 0) == (guest_slots > 0)
