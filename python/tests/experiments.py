"""Experiments that the tests of foremoe.reproduce read and carry out."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from foremoe import reproduce

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACE = ROOT / "data" / "rollout-math.safetensors"

PROSE = """
title = "A hot rank"
source = "nowhere"
about = "About."
reading = "Reading."
finding = "Finding."
"""

LISTS = (
    PROSE
    + """
columns = ["rho_mean", "straggler"]

[every_input]
routing = "w2"
ranks = 4
experts = 16
top_k = 2

[[input]]
label = "{layers} layers"
layers = [1, 3]

[every_system]
guest_slots = 1

[[system]]
label = "none"
policy = "vanilla"

[[system]]
label = "ours"
policy = "foremoe"
guest_slots = 2
stages = "BT"

[[published]]
input = "1 layers"
system = "ours"
column = "rho_mean"
value = 1.25

[[aim]]
column = "rho_mean"
at_most = 2
"""
)

# Workload w2 on 4 ranks: the hot rank has 2.5 times the mean in every micro-step. 100 tokens of a rank choose 2 experts
# each, so the mean is 200, the busiest rank has 500.
HOT_RANK = (
    PROSE
    + """
columns = ["rho_mean", "straggler", "waste", "from_2", "straggler_less", "copies"]

[[input]]
label = "w2"
routing = "w2"
ranks = 4
experts = 16
top_k = 2
layers = 1
micro_steps = 2
tokens_per_rank = 100

[[system]]
label = "none"
policy = "vanilla"

[[system]]
label = "ours"
policy = "foremoe"
guest_slots = 4
tolerance = 0

[[published]]
input = "w2"
system = "none"
column = "rho_mean"
value = 2.4

[[published]]
column = "copies"
value = "few"
note = "in words"

[[aim]]
column = "rho_mean"
system = "ours"
at_most = 1.0

[[aim]]
column = "straggler"
at_most = 250

[[aim]]
column = "rho_mean"
system = "ours"
relative_to = "none"
at_least = 0.4
at_most = 0.4
"""
)


def modelled(columns: list[str], systems: dict[str, dict[str, Any]], **of_input: Any) -> str:
    """An experiment of a modelled cluster. systems: keys of each, by label. of_input: other keys of its."""
    on = {
        "label": "grpo", "model": "Qwen3-30B-A3B", "cluster": "h100", "layers": 2, "micro_steps": 4, "ranks": 8,
        "tokens_per_rank": 1024, "seed": 3, **of_input,
    }  # fmt: skip
    tables = [("input", on), *(("system", {"label": label, **keys}) for label, keys in systems.items())]
    written = "".join(
        f"\n[[{name}]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for name, keys in tables
    )
    return f"{PROSE}columns = {json.dumps(columns)}\n{written}"


MODELLED = modelled(
    ["step_ms", "speedup", "ideal_speedup", "of_free"],
    {"none": {"policy": "vanilla"}, "ours": {"policy": "foremoe", "guest_slots": 2}},
)

SHAPE = """
[shape]
name = "tiny"
moe_layers = 4
experts = 16
top_k = 2
hidden = 64
intermediate = 32
vocabulary = 100
heads = 2
head_width = 32

"""


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def run(text: str) -> reproduce.Result:
    return reproduce.run_experiment(reproduce.parse_experiment(text, "hot-rank.toml"), threads=1)
