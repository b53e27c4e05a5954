"""Small experiments for the tests of the kit."""

from __future__ import annotations

from typing import Any

from kit import Aim, Column, Input, Published, System, drawn
from kit.columns import COLUMNS
from kit.experiment import Experiment
from kit.run import Result, run_experiment

STRAGGLER = Column("straggler", "straggler", 0, "above the mean", lambda m: m.pairs["straggler"])
# The hot rank of workload w2 has 2.5 times the mean load in every micro-step. 100 tokens of each of 4 ranks choose 2
# experts, so the mean is 200 tokens, and the busiest rank has 500.
SHAPE = {"ranks": 4, "experts": 16, "top_k": 2, "layers": 1, "tokens_per_rank": 100}
W2 = drawn("w2", routing="w2", micro_steps=2, **SHAPE)
NONE = System("none", "vanilla")
OURS = System("ours", "foremoe", guest_slots=4, tolerance=0)


def experiment(
    columns: list[str | Column], systems: list[System], inputs: list[Input], *, result: str = "", **keywords: Any
) -> Experiment:
    found = [COLUMNS[c] if isinstance(c, str) else c for c in columns]
    return Experiment("small", "A title", "nowhere", "About.", "Assumed.", result, inputs, systems, found, **keywords)


def hot_rank(**keywords: Any) -> Experiment:
    given: dict[str, Any] = {
        "published": [Published("rho_mean", 2.4, "w2", "none"), Published("copies", "few", note="in words")],
        "aims": [
            Aim("rho_mean", system="ours", at_most=1.0),
            Aim("straggler", at_most=250),
            Aim("rho_mean", system="ours", relative_to="none", at_least=0.4, at_most=0.4),
        ],
    }
    return experiment(["rho_mean", STRAGGLER, "straggler_less", "copies"], [NONE, OURS], [W2], **given | keywords)


def modelled(label: str = "grpo", **options: Any) -> Input:
    given = {
        "model": "Qwen3-30B-A3B", "cluster": "h100", "layers": 2, "micro_steps": 4, "ranks": 8, "tokens_per_rank": 1024,
        "seed": 3, "guest_slots": 2,
    }  # fmt: skip
    return drawn(label, **given | options)


def run(columns: list[str | Column], systems: list[System], inputs: list[Input], **keywords: Any) -> Result:
    return run_experiment(experiment(columns, systems, inputs, **keywords), threads=1)


def figures(result: Result, on: int = 0) -> dict[str, dict[str, float]]:
    """Figures of one input, by system and heading."""
    names = [heading.name for heading in result.experiment.headings]
    labels = [system.label for system in result.experiment.systems]
    return {label: dict(zip(names, c.figures, strict=True)) for label, c in zip(labels, result.cells[on], strict=True)}
