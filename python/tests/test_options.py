"""Python options have the names, types and defaults of the C++ tables. Unknown options are rejected by name."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import foremoe
from foremoe import options
from foremoe.report import write_report

TABLES = foremoe._core._option_tables()
ARGUMENTS = {"homes", "previous", "previous_load", "threads", "policy_options"}
# TypedDict, its C++ option tables, the options that it adds to the tables, and the options that it omits.
DECLARED: list[tuple[type, list[str], set[str], set[str]]] = [
    (options.StartPlanOptions, ["planner"], ARGUMENTS, set()),
    (options.EvaluateOptions, ["planning", "simulation", "cost"], {"align"} | ARGUMENTS, set()),
    (options.ModelOptions, ["cost"], {"align"}, {"cluster"}),
    (options.SimulationOptions, ["simulation", "cost"], {"align"}, {"cluster", "path"}),
    (options.ImportOptions, ["import"], set(), set()),
    (options.SynthesisOptions, ["synthesis"], set(), set()),
]
TAKERS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (foremoe.plan, (None,)),
    (foremoe.start_plan, (None,)),
    (foremoe.compare, (None,)),
    (foremoe.evaluate, (None,)),
    (foremoe.import_files, ("x",)),
    (foremoe.synthesize_load, ()),
    (foremoe.synthesize_trace, ()),
]


@pytest.mark.parametrize(("of", "tables", "beside", "without"), DECLARED, ids=lambda of: getattr(of, "__name__", ""))
def test_options_have_the_names_types_and_defaults_of_the_command_line(
    of: type, tables: list[str], beside: set[str], without: set[str]
) -> None:
    table = {o["name"]: o for name in tables for o in TABLES[name] if o["name"] not in without}
    hints = get_type_hints(of, include_extras=True)
    assert hints.keys() - beside == table.keys()
    for name, option in table.items():
        declared, default = hints[name].__origin__, hints[name].__metadata__[0]
        kinds = get_args(declared) if get_origin(declared) in (types.UnionType, Union) else (declared,)
        words = {word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}
        classes = {"integer": int, "number": float, "flag": bool, "text": str}
        assert option["type"] == "word" or classes[option["type"]] in kinds, name
        if option["type"] != "text":
            assert words == set(option["words"]), name
        if default is None:
            assert type(None) in kinds and not re.fullmatch(r"[\d.]+", option["default"]), name
        elif default is False:
            assert option["value"] == "", name
        else:
            assert option["default"] == (default if isinstance(default, str) else f"{default:g}"), name


@pytest.mark.parametrize(("taker", "arguments"), TAKERS, ids=lambda of: getattr(of, "__name__", ""))
def test_an_unknown_option_is_a_type_error_that_names_the_nearest(
    load: foremoe.Load, taker: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    name = (
        "micro_steps"
        if taker.__name__.startswith("synth")
        else "pipeline_stages"
        if arguments == ("x",)
        else "in_flight"
    )
    given = (load,) if arguments == (None,) else arguments
    with pytest.raises(TypeError, match=f"{taker.__name__}.*'{name}x'.*'{name}'"):
        taker(*given, **{name + "x": 1})


def test_functions_with_their_own_arguments_reject_unknown_options(load: foremoe.Load, tmp_path: pathlib.Path) -> None:
    plan = foremoe.plan(load)
    for call, name in [
        (lambda: foremoe.simulate(load, cluster="h100", in_flightx=1), "in_flight"),  # type: ignore[call-arg]
        (lambda: foremoe.evaluate_plan(plan, load, guest_slots=1), "guest_slots"),  # type: ignore[call-arg]
        (lambda: write_report(load, tmp_path / "p", cluster="h100", seedx=1), "seed"),  # type: ignore[call-arg]
        (lambda: foremoe.compare(load, rollout_seconds=1), "rollout_seconds"),  # type: ignore[call-arg]
    ]:
        with pytest.raises(TypeError, match=name):
            call()  # type: ignore[no-untyped-call]


def test_the_same_options_can_be_passed_to_several_functions(load: foremoe.Load) -> None:
    shared: options.StartPlanOptions = {"guest_slots": 2, "in_flight": 2, "seed": 3}
    made = foremoe.plan(load, **shared)
    for again in (foremoe.start_plan(load, **shared).finish(), foremoe.evaluate(load, **shared).plan):
        assert np.array_equal(again.slot_expert, made.slot_expert)
        assert np.array_equal(again.slot_tokens, made.slot_tokens)


RIGHT = """
import foremoe
from foremoe.options import EvaluateOptions

load = foremoe.synthesize_load(experts=8, micro_steps=2)
foremoe.compare(load, "all", guest_slots=2, residency="shared", max_copies_per_rank="hidden")
options: EvaluateOptions = {"cluster": "h100", "residency": "auto"}
foremoe.evaluate(load, "foremoe", **options)
foremoe.simulate(load, cluster="h100", policy_options={"dyn": 1})
"""
WRONG = {
    "foremoe.compare(load, guest_slotz=2)": "guest_slotz",
    'foremoe.compare(load, residency="auto")': "residency",
    'foremoe.start_plan(load, max_copies_per_rank="hidden")': "max_copies_per_rank",
    'foremoe.start_plan(load, guest_slots="2")': "guest_slots",
    'foremoe.start_plan(load, cluster="h100")': "cluster",
    "foremoe.simulate(load)": "cluster",
    "foremoe.evaluate_plan(foremoe.plan(load), load, seed=1)": "seed",
    "foremoe.synthesize_load(layout=3)": "layout",
}


def test_mypy_accepts_known_options_and_rejects_others_by_name(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    source = tmp_path / "user.py"
    source.write_text(RIGHT + "\n".join(WRONG))
    first = RIGHT.count("\n") + 1
    options = ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path)]
    packages = pathlib.Path(foremoe.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(source)],
        capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": str(packages), "PATH": ""},
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert done.returncode == 1 and all("user.py" in line for line in errors), errors
    assert not [line for line in errors if int(line.split(":")[1]) < first], errors
    for number, (call, name) in enumerate(WRONG.items(), first):
        assert any(line.split(":")[1] == str(number) and name in line for line in errors), (call, errors)
