"""foremoe.layout() returns what the command prints, also with the tokens of a trace."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import commands
import pytest

import foremoe

ON: Any = {"cluster": "h100", "model": "qwen3-30b-a3b"}


def test_the_result_is_that_of_the_command(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "step.trace.safetensors"
    trace = foremoe.synthesize_trace(
        shape="qwen3-30b-a3b", layers=1, ranks=4, ranks_per_node=4, micro_steps=2, tokens_per_rank=128
    )
    trace.save(str(path))
    load = foremoe.collect(foremoe.read_trace(str(path)))
    command = [commands.PROGRAM, "layout", str(path), "--gpus", "4", "--cluster", "h100", "--model", ON["model"],
               "--memory-budget", "1000", "--json"]  # fmt: skip
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = foremoe.layout(load, gpus=4, memory_budget=1000, **ON)
    for one in (found, printed):
        one["remarks"] = [remark for remark in one["remarks"] if "synthetic" not in remark]  # Load has no origin
    assert found == printed
    assert found == foremoe.layout(load, threads=1, memory_budget=1000, **ON) | {"remarks": found["remarks"]}


def test_invalid_arguments_are_refused(load: foremoe.Load) -> None:
    for field, arguments in (("gpus", {"gpus": 1024}), ("memory_budget", {"memory_budget": -1})):
        with pytest.raises(foremoe.InputError) as error:
            foremoe.layout(load, **ON | arguments)
        assert error.value.field == field
    with pytest.raises(TypeError, match="memory_budget"):
        foremoe.layout(load, **ON, memory_budgett=1)
