"""What ForeMoE supports: versions, and configurations of trainers.

python -m foremoe.supported             # prints the table of versions of docs/users/supported.md

foremoe.supported.check() takes the configuration of a launch file, and returns what keeps it from running.
"""

from .check import Verdict, check
from .rules import CONFIGURATION, RULES, TRAINER, Reason, Rule, expect, relevant
from .versions import (
    FRAMEWORKS,
    MEGATRON,
    PYTHON,
    TITLES,
    TORCH,
    TRANSFORMERS,
    TRANSFORMERS_LOADING_PARTS,
    TRL,
    VERL,
    VLLM,
    VLLM_OF_TRL,
    Framework,
    table,
)

__all__ = [
    "CONFIGURATION", "FRAMEWORKS", "MEGATRON", "PYTHON", "RULES", "TITLES", "TORCH", "TRAINER", "TRANSFORMERS",
    "TRANSFORMERS_LOADING_PARTS", "TRL", "VERL", "VLLM", "VLLM_OF_TRL", "Framework", "Reason", "Rule", "Verdict",
    "check", "expect", "relevant", "table",
]  # fmt: skip
