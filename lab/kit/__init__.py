"""Building blocks of the experiments in lab/experiments."""

from .arranged import Arranged
from .columns import FIRST, Column, measured_here, modelled, paired, percent_less, ratio
from .experiment import Aim, Experiment, Published
from .inputs import Case, Drawn, Input, drawn, like, recorded
from .measured import Gathering, Measured
from .systems import Skipped, System, accepted

__all__ = [
    "FIRST", "Aim", "Arranged", "Case", "Column", "Drawn", "Experiment", "Gathering", "Input", "Measured", "Published",
    "Skipped", "System", "accepted", "drawn", "like", "measured_here", "modelled", "paired", "percent_less", "ratio",
    "recorded",
]  # fmt: skip
