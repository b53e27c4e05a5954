"""Experiments of papers done again, our figures beside the published ones: `foremoe reproduce`.

from foremoe import reproduce

result = reproduce.run_experiment(reproduce.read_experiment("feplb-straggler"))
print(reproduce.to_markdown(result))
"""

from .experiment import Aim, Experiment, Input, Published, System
from .experiment_file import experiment_names, parse_experiment, read_experiment
from .run import Cell, JudgedAim, Result, run_experiment
from .text import to_json, to_markdown, to_text

__all__ = [
    "Aim",
    "Cell",
    "Experiment",
    "Input",
    "JudgedAim",
    "Published",
    "Result",
    "System",
    "experiment_names",
    "parse_experiment",
    "read_experiment",
    "run_experiment",
    "to_json",
    "to_markdown",
    "to_text",
]
