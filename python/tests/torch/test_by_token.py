"""Dispatch by token on two nodes of two ranks: results, bytes between nodes, collectives and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from counting import Counter
from processes import RANKS, gather
from refusals import refusal
from test_equal import error_of
from training import (
    EXPERTS,
    LAYERS,
    TOP_K,
    begin,
    draw_batches,
    draw_routes,
    make_model,
    recompute,
    reference,
    run_phase,
    run_step,
    spread,
    whole_gradients,
)

import foremoe
from foremoe.torch.by_token import TokenDispatch

F32, F64 = torch.float32, torch.float64
CASES: dict[str, dict[str, Any]] = {
    "one rank per node": {"ranks_per_node": 1},
    "no guests": {"guest_slots": 0},
    "ddp": {"wrapper": "ddp"},
    "fsdp2": {"wrapper": "fsdp2"},
    "rows without a route at homes": {"unrouted": "home"},
    "routers choose": {"wrong": 0.2},
    "float32": {"dtype": F32},
}
for residency in ("static", "resident", "shared"):
    for path in ("peer", "host"):
        key, of = f"{residency}, {path}", {"residency": residency, "path": path}
        CASES[f"{key}, uneven"] = {**of, "uneven": True, "guest_slots": 2}
        CASES[f"{key}, checkpointing"] = {**of, "checkpointing": True}
        if residency != "shared":
            CASES[f"{key}, whole checkpoint"] = {**of, "checkpointing": "whole"}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_one_eager_process(rank: int, case: str) -> None:
    result = run_step(rank, **{"dtype": F64, "seed": 1, "dispatch": "token", **CASES[case]})
    assert result["fallbacks"] == 0
    assert (sum(gather(result["copies"])) > 0) == (case != "no guests")
