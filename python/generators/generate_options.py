#!/usr/bin/env python3
"""Writes what of the Python package follows from the C++ declarations, with the package installed beside this Python:

    python/generators/generate_options.py           writes it
    python/generators/generate_options.py --check   says what differs; exit 1

python/foremoe/options.py    TypedDicts of the tables of options: the keywords of all functions that plan or draw
python/foremoe/planning.py   signature and docstring of plan(), which spells its keywords out
"""

import argparse
import ast
import importlib
import importlib.util
import pathlib
import re
import subprocess
import sys
import textwrap
import types
from typing import NamedTuple

# The extension module without the package around it, which needs what is written here.
FOUND = importlib.util.find_spec("foremoe")
sys.modules["foremoe"] = types.ModuleType("foremoe")
sys.modules["foremoe"].__path__ = [str(pathlib.Path(FOUND.origin).parent)]
_core = importlib.import_module("foremoe._core")

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "foremoe"
TABLES = _core._option_tables()

OPTIONS = '''"""Options as values: what `**options` of the package's functions can be.

    options: foremoe.options.EvaluateOptions = {"guest_slots": 2, "cluster": "h100", "model": "qwen3-30b-a3b"}
    foremoe.evaluate(load, "foremoe", **options)

They are the options of the command line. Annotated[int, 1, "…"] is an int whose default is 1, and what it means.

Written by python/generators/generate_options.py from the tables of options: do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from ._core import Load, Plan

Homes = npt.NDArray[np.int32] | Plan | None

# fmt: off
'''


class Keyword(NamedTuple):
    name: str
    type: str
    default: str
    help: str


def in_python(text: str) -> str:
    """Names options as keywords: --memory-budget is memory_budget."""
    text = text.replace(", see --help-all", "")
    text = re.sub(r"--([a-z][a-z-]*)", lambda m: m[1].replace("-", "_"), text)
    return text.replace("`", "")


def keyword(option: dict) -> Keyword:
    kind, initial, words = option["type"], option["default"], option["words"]
    literal = f"Literal[{', '.join(repr(word) for word in words)}]".replace("'", '"')
    base = {"integer": "int", "number": "float", "flag": "bool", "text": "str", "word": literal}[kind]
    if words and kind != "word":
        base += f" | {literal}"
    if kind == "flag":
        default = "False"
    elif kind == "integer" and re.fullmatch(r"-?\d+", initial):
        default = initial
    elif kind == "number" and re.fullmatch(r"-?[\d.]+", initial):
        default = initial if "." in initial else initial + ".0"
    elif initial and (kind in ("word", "text") or initial in words) and " " not in initial and initial != "detected":
        default = f'"{initial}"'
    else:
        default, base = "None", base + " | None"
    text = in_python(option["help"]).rstrip(".") + "."
    if default == "None" and initial:
        text += f" None: {in_python(initial)}."
    if option["range"]:
        text += f" {option['range']}."
    return Keyword(option["name"], base, default, text)


# Options that only Python has.
BESIDE = """\
policy_options: Mapping[str, float | str] | None = None
    Options that one policy alone has, such as dyn of feplb, for those that have it; InputError lists them.
homes: Homes = None
    Before planning: None for contiguous ones, int32 [layers, experts], or a plan's.
previous: Plan | None = None
    Plan of the former step, for a warm start.
previous_load: Load | None = None
    Load of the former step, for policies that predict.
threads: int = 0
    0: as many as processors. The result does not depend on it.
align: int = 128
    Tokens: rho_padded rounds each replica up to a multiple of it.
layers: slice | range | None = None
    Plan these layers of the load alone; Plan.join() puts parts together.
on_micro_step: Callable[[int], object] | None = None
    Called with 0, 1, … when the plan of that micro-step is final, from another thread. What it raises ends planning.
"""
KEYWORDS = {table: {o["name"]: keyword(o) for o in options} for table, options in TABLES.items()}
KEYWORDS["beside"] = {k[0]: Keyword(*k) for k in re.findall(r"(\w+): (.*) = (\w+)\n    (.*)\n", BESIDE)}
MODEL = KEYWORDS["cost"]["model"]
KEYWORDS["cost"]["model"] = MODEL._replace(
    type="str | Mapping[str, Any] | None", help=f"{MODEL.help} Or a dict of its shape: {', '.join(KEYWORDS['shape'])}."
)
FORMER = "beside.homes beside.previous beside.previous_load beside.threads"
HIDDEN = "planning.max_copies_per_rank"  # hidden wants a cluster, and auto of planning.residency a simulation
PATH = "simulation.path"  # a report's own path is that of its page
TAIL = "simulation.rollout_tail_seconds"  # a plan that is there was not measured
# Name, what it extends, who takes it, and its own options. A table's name stands for all that no other class names.
CLASSES = [
    ("PlannerOptions", "", "every function that plans", f"planner {FORMER}"),
    ("PolicyOptions", "PlannerOptions", "those with one number of slots", "planner.guest_slots beside.policy_options"),
    ("PlanOptions", "PolicyOptions", "plan(), start_plan()", "planner.residency planner.max_copies_per_rank"),
    ("ModelOptions", "", "every function that models time", "cost beside.align"),
    ("PhaseOptions", "ModelOptions", "those that simulate", "simulation"),
    ("CompareOptions", "PolicyOptions, ModelOptions", "compare()", f"planner.residency {HIDDEN} cost.cluster"),
    ("SimulateOptions", "PolicyOptions, PhaseOptions", "simulate()", f"planning.residency {HIDDEN} {TAIL} {PATH}"),
    ("EvaluateOptions", "SimulateOptions", "evaluate()", "cost.cluster"),
    (
        "EvaluatePlanOptions",
        "PhaseOptions",
        "evaluate_plan()",
        f"beside.policy_options beside.homes beside.threads cost.cluster {PATH}",
    ),
    ("ReportOptions", "PlannerOptions, PhaseOptions", "write_report()", f"planner.residency {HIDDEN} {TAIL}"),
    ("CollectOptions", "", "collect()", "input.ranks input.ranks_per_node input.tokens_per_rank beside.threads"),
    ("ImportOptions", "", "import_files()", "import"),
    ("SynthesisOptions", "", "synthesize_load(), synthesize_trace()", "synthesis"),
]
NAMED = " ".join(names for *_, names in CLASSES).split()


def picked(names: str) -> list[Keyword]:
    found = []
    for table, _, option in (name.partition(".") for name in names.split()):
        found += [k for n, k in KEYWORDS[table].items() if n == option or not (option or f"{table}.{n}" in NAMED)]
    return found


OF_PLAN = [
    *KEYWORDS["planner"].values(),
    *picked(f"beside.policy_options {FORMER} beside.layers beside.on_micro_step"),
]


def described(keywords: list[Keyword]) -> list[str]:
    return [textwrap.fill(f"{k.name}: {k.help}", 116, subsequent_indent="    ") for k in keywords]


def field(k: Keyword) -> str:
    """On one line where it fits; else the help on lines of its own, which ruff would spread over more."""
    line = f'    {k.name}: Annotated[{k.type}, {k.default}, "{k.help}"]'
    text = ' "\n'.join(f'        "{part}' for part in textwrap.wrap(k.help, 108)) + '"'
    return line if len(line) <= 120 else f"    {k.name}: Annotated[{k.type}, {k.default},\n{text}]"


def typed_dict(name: str, bases: str, takers: str, names: str) -> str:
    fields = "\n".join(field(k) for k in picked(names))
    return f'class {name}({bases or "TypedDict"}, total=False):\n    """Options of {takers}."""\n\n{fields}\n'


def head_of_plan() -> str:
    """Its signature and docstring."""
    parameters = ", ".join(f"{k.name}: {k.type} = {k.default}" for k in OF_PLAN)
    docs = [
        "Plans a step: what sits in every slot and how many tokens it serves. Ctrl-C ends it.",
        "",
        "Raises PolicySkipped where the policy is not defined for the load.",
        "",
        "load: What is planned.",
        "policy: Who plans: a key of foremoe.policies().",
        *described(OF_PLAN),
    ]
    body = textwrap.indent("\n".join(['"""' + docs[0], *docs[1:], '"""']), "    ")
    return f'def plan(load: Load, policy: str = "foremoe", *, {parameters}) -> Plan:\n{body}\n'


def with_plan(source: str) -> str:
    """planning.py, with the head of plan() written anew."""
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "plan")
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: function.lineno - 1], head_of_plan(), *lines[function.body[0].end_lineno :]])


def laid_out(text: str, name: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--no-cache", "--stdin-filename", PACKAGE / name, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    written = {
        "options.py": "\n\n".join([OPTIONS, *(typed_dict(*one) for one in CLASSES)]),
        "planning.py": with_plan((PACKAGE / "planning.py").read_text()),
    }
    differ = []
    for name, text in written.items():
        path, text = PACKAGE / name, laid_out(text, name)
        if path.exists() and path.read_text() == text:
            continue
        differ.append(name)
        if not check:
            path.write_text(text)
    if check and differ:
        sys.exit(
            f"{pathlib.Path(__file__).name}: {', '.join(differ)} not as the declarations say; run it without --check"
        )


if __name__ == "__main__":
    main()
