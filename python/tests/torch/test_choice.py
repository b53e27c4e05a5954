"""The choice of a run's plans by modelled seconds, and phases that no plan makes faster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from processes import gather
from refusals import refusal
from test_shares import draw, make_shares, saved, watched
from training import LAYERS, begin, expected_gradients, gradient_error, run_phase

import foremoe
from foremoe import _core
from foremoe._engine import choice as choice_module
from foremoe._engine.arguments import PlanningArguments
from foremoe._engine.choice import Choice, cluster_named, known_choice

# A model whose experts compute for so long that balance pays, and one whose copies cost more than balance gains.
SLOW = {"moe_layers": 6, "experts": 16, "top_k": 2, "hidden": 4096, "intermediate": 64, "vocabulary": 1, "heads": 1, "head_width": 8}
COPIES_COST = SLOW | {"hidden": 8, "intermediate": 1 << 16}


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("foremoe")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield records
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_a_cluster_is_detected_by_the_devices_name() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100", "NVIDIA H200": "h200", "NVIDIA H20": "h20",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GB200": "gb200", "NVIDIA B200": None, "NVIDIA A10": None,
        "NVIDIA H20Z": None, "Tesla V100-SXM2-16GB": None, "": None,
    }  # fmt: skip
    assert {name: cluster_named(name) for name in names} == names
