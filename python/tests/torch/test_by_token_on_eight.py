"""Dispatch by token on eight ranks, as two nodes of four and as four nodes of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_by_token import expect_simulated_rows
from training import run_step

WORLD = 8
CASES: dict[str, dict[str, Any]] = {
    "static": {"residency": "static"},
    "resident, host": {"residency": "resident", "path": "host", "guest_slots": 2},
    "shared, uneven": {"residency": "shared", "uneven": True},
    "checkpointing": {"checkpointing": True},
}


@pytest.mark.parametrize("ranks_per_node", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_one_eager_process(rank: int, case: str, ranks_per_node: int) -> None:
    options = {"seed": 1, "dispatch": "token", "ranks_per_node": ranks_per_node, **CASES[case]}
    assert run_step(rank, torch.float64, **options)["fallbacks"] == 0


@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_as_many_rows_cross_nodes_as_the_simulator_counts(rank: int, ranks_per_node: int) -> None:
    expect_simulated_rows(rank, ranks_per_node, guest_slots=2)
