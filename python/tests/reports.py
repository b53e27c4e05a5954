"""Load and report shared by the tests of foremoe.report."""

from __future__ import annotations

import functools
from typing import Any

import foremoe
from foremoe.report import page
from foremoe.report.facts import Report
from foremoe.report.gather import Request, gather_report

MODEL = "qwen3-30b-a3b"


def draw(ranks: int = 4, **more: Any) -> foremoe.Load:
    shape = {"micro_steps": 3, "layers": 2, "experts": 128, "top_k": 8, "tokens_per_rank": 128}
    return foremoe.synthesize_load(ranks=ranks, ranks_per_node=2, **{**shape, **more})


@functools.cache
def shared_load() -> foremoe.Load:
    return draw()


@functools.cache
def shared_report() -> Report:
    options = {"cluster": "h100", "model": MODEL, "rollout_seconds": 2, "memory_budget": 80, "residency": "resident"}
    policies = ("static", "eplb", "finemoe-symmetric", "foremoe")
    return gather_report(shared_load(), Request(policies, (1, 2), options))


def without_plotly_script(html: str) -> str:
    """Returns the page without Plotly's script."""
    return html.replace(page.plotly_script(), "")
