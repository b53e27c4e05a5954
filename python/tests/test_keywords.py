"""Options as values: shown, typed, refused by name."""

from __future__ import annotations

import inspect
import pathlib
import pydoc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import foremoe
from foremoe import _keywords, options
from foremoe.report import write_report

TAKERS: list[tuple[Callable[..., Any], type]] = [
    (foremoe.plan, options.PlanOptions),
    (foremoe.start_plan, options.PlanOptions),
    (foremoe.compare, options.CompareOptions),
    (foremoe.simulate, options.SimulateOptions),
    (foremoe.evaluate, options.EvaluateOptions),
    (foremoe.evaluate_plan, options.EvaluatePlanOptions),
    (write_report, options.ReportOptions),
    (foremoe.collect, options.CollectOptions),
    (foremoe.import_files, options.ImportOptions),
    (foremoe.synthesize_load, options.SynthesisOptions),
    (foremoe.synthesize_trace, options.SynthesisOptions),
]
NAMES = [taker.__name__ for taker, _ in TAKERS]


@pytest.mark.parametrize(("taker", "of"), TAKERS, ids=NAMES)
def test_the_signature_has_every_option_with_its_default(taker: Callable[..., Any], of: type) -> None:
    parameters = inspect.signature(taker).parameters
    assert of.__annotations__.keys() <= parameters.keys()
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in of.__annotations__:
        assert parameters[name].default is not inspect.Parameter.empty, name


@pytest.mark.parametrize(("taker", "of"), TAKERS, ids=NAMES)
def test_help_describes_every_option(taker: Callable[..., Any], of: type) -> None:
    text = pydoc.render_doc(taker)
    for name in of.__annotations__:
        assert f"    {name}: " in text, name


@pytest.mark.parametrize(("taker", "of"), TAKERS, ids=NAMES)
def test_a_misspelled_option_is_a_type_error_that_names_the_nearest(taker: Callable[..., Any], of: type) -> None:
    name = max(of.__annotations__, key=len)
    with pytest.raises(TypeError, match=f"{taker.__name__}.*'{name}x'.*'{name}'"):
        taker(**{name + "x": 1})


def test_the_defaults_are_those_of_the_command_line() -> None:
    for table, taker in [("planner", foremoe.plan), ("simulation", foremoe.simulate), ("cost", foremoe.evaluate)]:
        parameters = inspect.signature(taker).parameters
        for option in foremoe._core._option_tables()[table]:
            default = parameters[option["name"]].default
            if default not in (None, False):
                shown = default if isinstance(default, str) else f"{default:g}"
                assert option["default"] == shown, option["name"]


def test_given_are_the_options_that_differ_from_the_defaults() -> None:
    def given(**values: object) -> set[str]:
        return _keywords.given(foremoe.evaluate, values)

    assert given() == set()
    assert given(guest_slots=1, residency="resident", tolerance=None, rollout_seconds=0) == set()
    assert given(guest_slots=2, residency="resident", tolerance=0.0) == {"guest_slots", "tolerance"}
    assert _keywords.given(foremoe.plan, {"seed": 1}) == {"seed"}
    assert _keywords.given(foremoe.synthesize_load, {"seed": 1}) == set(), "another function, another default"


def test_options_are_a_value_that_several_functions_take(load: foremoe.Load) -> None:
    shared: options.PlanOptions = {"guest_slots": 2, "in_flight": 2, "seed": 3}
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
    'foremoe.start_plan(load, guest_slots="2")': "guest_slots",
    'foremoe.start_plan(load, cluster="h100")': "cluster",
    "foremoe.simulate(load)": "cluster",
    "foremoe.evaluate_plan(foremoe.plan(load), load, rollout_tail_seconds=1)": "rollout_tail_seconds",
    "foremoe.synthesize_load(layout=3)": "layout",
}


def test_mypy_accepts_options_and_refuses_others_by_name(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    source = tmp_path / "user.py"
    source.write_text(RIGHT + "\n".join(WRONG))
    first = RIGHT.count("\n") + 1
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--cache-dir",
        str(tmp_path),
        str(source),
    ]
    packages = pathlib.Path(foremoe.__file__).parents[1]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": str(packages), "PATH": ""}
    )
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert done.returncode == 1 and all(line.startswith(str(source)) or "user.py" in line for line in errors), errors
    assert not [line for line in errors if int(line.split(":")[1]) < first], errors
    for number, (call, name) in enumerate(WRONG.items(), first):
        assert any(line.split(":")[1] == str(number) and name in line for line in errors), (call, errors)
