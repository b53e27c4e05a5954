"""Experiments read, carried out, judged and told; and the command `foremoe reproduce`."""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

import foremoe
from foremoe import _command_line, reproduce
from foremoe.reproduce import command, experiment_file
from foremoe.reproduce.columns import COLUMNS
from foremoe.reproduce.text import aligned

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACE = ROOT / "data" / "rollout-math.safetensors"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(pathlib.Path(foremoe.__file__).parents[1])}  # whatever the folder

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

MODELLED = (
    PROSE
    + """
columns = ["step_ms", "speedup", "ideal_speedup", "of_free"]

[[input]]
label = "grpo"
model = "Qwen3-30B-A3B"
cluster = "h100"
layers = 2
micro_steps = 4
ranks = 8
tokens_per_rank = 1024
seed = 3

[[system]]
label = "none"
policy = "vanilla"

[[system]]
label = "ours"
policy = "foremoe"
guest_slots = 2
"""
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


@pytest.fixture(scope="module")
def hot_rank() -> reproduce.Result:
    return run(HOT_RANK)


def test_a_list_makes_one_input_of_each_value_and_common_keys_hold_for_all() -> None:
    experiment = reproduce.parse_experiment(LISTS, "folder/mine.toml")
    assert experiment.name == "mine"
    assert [one.label for one in experiment.inputs] == ["1 layers", "3 layers"]
    assert [one.load["layers"] for one in experiment.inputs] == [1, 3]
    assert [one.load["ranks"] for one in experiment.inputs] == [4, 4]


def test_a_table_says_otherwise_than_what_all_have_in_common() -> None:
    none, ours = reproduce.parse_experiment(LISTS, "mine.toml").systems
    assert none.options == {"guest_slots": 1}
    assert ours.options == {"guest_slots": 2, "stages": "BT"}


def test_what_all_have_in_common_holds_for_those_that_can_use_it() -> None:
    text = changed(LISTS, 'routing = "w2"', "step_spread = 0.5")
    text = changed(text, "[every_system]", '[[input]]\nlabel = "zipf"\nrouting = "zipf"\nskew = 2\n[every_system]')
    text = changed(text, "[every_system]", f'[[input]]\nlabel = "file"\nfile = "{TRACE}"\n[every_system]\ndyn = 2')
    text = changed(text, "[[published]]", '[[system]]\nlabel = "FEPLB"\npolicy = "feplb"\n[[published]]')
    experiment = reproduce.parse_experiment(text, "mine.toml")
    assert ["step_spread" in one.load for one in experiment.inputs] == [True, True, False, False]
    assert experiment.inputs[3].load == {"ranks": 4}
    assert [system.own for system in experiment.systems] == [{}, {}, {"dyn": 2}]


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ('title = "A hot rank"', "", "title", "is missing"),
        ('title = "A hot rank"', "title = 3", "title", "expected a text"),
        ('finding = "Finding."', "across = 1", "across", "expected true or false"),
        ("ranks = 4", "ranks = 0", "input[0].ranks", "0 is not in 1"),
        ("ranks = 4", "ranks = true", "input[0].ranks", "cannot be"),
        ("ranks = 4", "ranks = 7", "input[0].ranks", "16 experts"),
        ("ranks = 4", "rank = 4", "every_input.rank", "no such key"),
        ("layers = [1, 3]", "layer = [1, 3]", "input[0].layer", "no such key"),
        ("layers = [1, 3]", "layers = [1, 0]", "input[1].layers", "0 is not in 1"),
        ("layers = [1, 3]", "layers = [1, 3]\nseed = [1, 2]", "input[0].seed", "one list"),
        ("layers = [1, 3]", "layers = []", "input", "is missing"),
        ("layers = [1, 3]", "skew = 2", "input[0].skew", "none of use here"),
        ("layers = [1, 3]", "sequence_tokens = 2", "input[0].sequence_tokens", "none of use here"),
        ("layers = [1, 3]", "steps = 5", "input[0].steps", "5 does not divide 32"),
        ("layers = [1, 3]", "steps = true", "input[0].steps", "expected an integer"),
        ("layers = [1, 3]", 'cluster = "h100"', "input[0].model", "is missing beside cluster"),
        ("layers = [1, 3]", 'cluster = "b300"\nmodel = "tiny"', "input[0].cluster", "gb200"),
        ("layers = [1, 3]", 'cluster = "h100"\nmodel = "tinier"', "input[0].model", "'tinier'"),
        ("layers = [1, 3]", 'cluster = "h100"\nmodel = "tiny"\nlayers = 5', "input[0].layers", "tiny has 4 MoE layers"),
        (
            "layers = [1, 3]",
            'cluster = "h100"\nmodel = "Mixtral-8x7B"',
            "input[0].experts",
            "16, but Mixtral-8x7B has 8",
        ),
        ("[[input]]", "[input]", "input", "[[input]]"),
        ('routing = "w2"', 'routing = "w9"', "input[0].routing", "zipf"),
        ("hidden = 64", "hiden = 64", "shape.hiden", "is no option"),
        ("hidden = 64", "hidden = 0", "shape.hidden", "0 is not in 1"),
        ('name = "tiny"', "", "shape.name", "is missing"),
        ('stages = "BT"', 'stages = "BX"', "system[1].stages", "'BX'"),
        ('policy = "foremoe"', 'policy = "nobody"', "system[1].policy", "vanilla"),
        ('policy = "foremoe"', 'polcy = "foremoe"', "system[1].policy", "is missing"),
        ('policy = "foremoe"', 'policy = "foremoe"\ndyn = 2', "system[1].dyn", "none of use here"),
        ('policy = "foremoe"', 'policy = "feplb"\ndyn = "two"', "system[1].dyn", "'two' is not a whole number"),
        ('policy = "foremoe"', 'policy = "foremoe"\nresidency = "auto"', "system", "'ours' needs cluster and model"),
        ("guest_slots = 2", 'guest_slots = "two"', "system[1].guest_slots", "'two' is not a whole number"),
        ("guest_slots = 2", 'path = "up"', "system[1].path", "peer"),
        ("at_most = 2", "", "aim[0].at_least", "at_most"),
        ("at_most = 2", "at_most = nan", "aim[0].at_most", "expected a number"),
        ("value = 1.25", "", "published[0].value", "is missing"),
        ("value = 1.25", "value = true", "published[0].value", "a number or a text"),
        ('system = "ours"', 'system = "yours"', "published[0].system", "no system 'yours'"),
        ('input = "1 layers"', 'input = "2 layers"', "published[0].input", "no input '2 layers'"),
        ("at_most = 2", 'at_most = 2\nrelative_to = "yours"', "aim[0].relative_to", "no system 'yours'"),
        ('"straggler"]', '"stragler"]', "columns", "straggler_less"),
        ('"straggler"]', "3]", "columns[1]", "expected a text"),
        ('"straggler"]', '"speedup"]', "columns", "'speedup' needs cluster and model of input '1 layers'"),
        ('label = "ours"', 'label = "none"', "system", "'none' twice"),
        ('label = "{layers} layers"', 'label = "layers"', "input", "'layers' twice"),
        ('title = "A hot rank"', "title = ", "", "line 2"),
        ('title = "A hot rank"', 'title = "A hot rank"\nabuot = ""', "abuot", "no such key"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_and_index(old: str, new: str, field: str, words: str) -> None:
    text = changed(changed(LISTS, "[every_input]", SHAPE + "[every_input]"), old, new)
    with pytest.raises(foremoe.InputError, match=r"^mine\.toml") as caught:
        reproduce.parse_experiment(text, "mine.toml")
    assert (caught.value.file, caught.value.field) == ("mine.toml", field)
    assert f"mine.toml: {field}" in str(caught.value)
    assert words in str(caught.value).removeprefix(f"mine.toml: {field}")


@pytest.mark.parametrize(
    "key",
    [
        "layers = 1",
        "micro_steps = 2",
        "seed = 1",
        'routing = "grpo"',
        "steps = 1",
        "former_step = true",
        'model = "Mixtral-8x7B"',
        "step_spread = 1",
    ],
)
def test_an_input_from_a_file_has_no_keys_of_one_that_is_drawn(key: str) -> None:
    text = f'{PROSE}columns = ["rho_mean"]\n[[input]]\nlabel = "file"\nfile = "{TRACE}"\nranks = 4\n'
    text += '[[system]]\nlabel = "none"\npolicy = "vanilla"\n'
    reproduce.parse_experiment(text, "mine.toml")
    with pytest.raises(foremoe.InputError, match=rf"input\[0\]\.{key.split()[0]}: no such key, or none of use here"):
        reproduce.parse_experiment(changed(text, "ranks = 4", key), "mine.toml")


def test_keys_are_those_of_the_tables_of_options() -> None:
    for keys in experiment_file._ROUTING.values():
        assert keys < experiment_file._DRAWN
    assert experiment_file._BATCHED < experiment_file._DRAWN


def test_a_model_that_is_no_preset_has_the_sizes_of_its_shape() -> None:
    text = changed(
        LISTS, "experts = 16\ntop_k = 2\n", 'cluster = "h100"\nmodel = "tiny"\nrecompute_activations = false\n'
    )
    text = changed(text, '"straggler"]', '"step_ms"]')
    one, three = reproduce.parse_experiment(changed(text, "[every_input]", SHAPE + "[every_input]"), "mine.toml").inputs
    assert (one.load["experts"], one.load["top_k"], three.load["layers"]) == (16, 2, 3)
    assert one.cost is not None
    assert one.cost["keep_activations"] and one.cost["model"]["hidden"] == 64


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(foremoe.InputError) as caught:
        reproduce.read_experiment("nothing-like-this")
    for name in reproduce.experiment_names():
        assert name in str(caught.value)


def test_every_experiment_of_the_package_can_be_read() -> None:
    assert set(reproduce.experiment_names()) == {path.stem for path in (ROOT / "reproduce").glob("*.toml")}
    for name in reproduce.experiment_names():
        experiment = reproduce.read_experiment(name)
        assert (experiment.name, experiment.argument) == (name, name)
        assert experiment.finding, f"{name}: what came out is not told"


def test_a_package_without_its_experiments_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(experiment_file, "FOLDER", tmp_path / "experiments")
    with pytest.raises(foremoe.InputError, match="pip install"):
        reproduce.read_experiment("ultraep-table")


def test_a_hot_rank_has_the_figures_that_its_definition_says(hot_rank: reproduce.Result) -> None:
    ((none, ours),) = hot_rank.cells
    assert none.figures == (2.5, 300, 60, 100, 0, 0)
    assert ours.figures[:2] == (1, 0)
    assert ours.figures[4] == 100
    assert ours.figures[5] > 0


def test_aims_are_judged_by_the_figure_closest_to_missing_them(hot_rank: reproduce.Result) -> None:
    balanced, straggler, relative = hot_rank.judged()
    assert balanced.met
    assert (straggler.met, straggler.worst, straggler.figures) == (False, 300, 2)
    assert relative.met and relative.worst == 0.4


def test_a_table_shows_our_figure_beside_the_published_one(hot_rank: reproduce.Result) -> None:
    head, none, ours = reproduce.text.to_rows(hot_rank)
    columns = ["ρ mean", "published", "straggler", "waste, %", "ρ ≥ 2, %", "straggler, % less", "copies"]
    assert head == ["input", "system", *columns]
    assert none == ["w2", "none", "2.5000", "2.4", "300", "60.0", "100.0", "0.0", "0.0"]
    assert ours[3] == "–"


def test_a_table_across_has_a_column_per_system() -> None:
    result = run(
        "across = true\n" + changed(HOT_RANK, '"straggler", "waste", "from_2", "straggler_less"', '"straggler"')
    )
    head, row = reproduce.text.to_rows(result)
    assert head == ["ρ mean / straggler / copies", "none", "ours"]
    assert row[:2] == ["w2", "2.5000 [2.4] / 300 / 0.0"]


def test_a_section_holds_what_the_file_says_and_whether_aims_are_met(hot_rank: reproduce.Result) -> None:
    text = reproduce.to_markdown(hot_rank)
    for words in (
        "## hot-rank: A hot rank\n\n*nowhere.* About.\n\n**What we assumed.** Reading.\n\n",
        "\n\n    foremoe reproduce hot-rank.toml\n\n|",
        "| w2 | none | 2.5000 | 2.4 | 300 |",
        "\n|---|---|",
        "\n\n– in a *published* column: not published to us. Exact: ρ mean;",
        "\n- Published: copies few (in words)\n",
        "\n- Aim: ρ mean of ours ≤ 1: met, it is 1.0000\n",
        "\n- Aim: straggler ≤ 250: missed, the worst is 300\n",
        "\n- Aim: ρ mean of ours ÷ that of none ≥ 0.4, ≤ 0.4: met, it is 0.400\n",
        "\n\n**What came out.** Finding.\n\n",
    ):
        assert words in text


def test_an_input_whose_file_is_missing_is_skipped_and_not_made_up() -> None:
    drawn = HOT_RANK[HOT_RANK.index('routing = "w2"') : HOT_RANK.index("[[system]]")]
    result = run(changed(HOT_RANK, drawn, 'file = "no/such/file.safetensors"\n'))
    assert all("no/such/file.safetensors" in cell.skipped and not cell.figures for cell in result.cells[0])
    assert not result.judged()[0].met
    assert "nothing to judge by" in reproduce.to_markdown(result)
    row = "| w2 | none | skipped: no file no/such/file.safetensors here | | | | | | |\n"
    assert row in reproduce.to_markdown(result)
    assert "skipped" in reproduce.to_json(result)["rows"][0]


def test_a_system_that_cannot_plan_is_skipped_and_without_the_first_nothing_is_compared() -> None:
    text = changed(HOT_RANK, 'policy = "vanilla"', 'policy = "finemoe-symmetric"\nguest_slots = 3')
    none, ours = run(text).cells[0]
    assert none.skipped and not ours.skipped
    columns = reproduce.parse_experiment(text, "mine.toml").columns
    assert any(column.is_relative for column in columns) and not all(column.is_relative for column in columns)
    for column, figure in zip(columns, ours.figures, strict=True):
        assert math.isnan(figure) == column.is_relative, column.name
    assert reproduce.to_json(run(text))["rows"][1]["straggler_less"] is None


def test_a_load_that_cannot_be_drawn_is_named_with_its_input() -> None:
    with pytest.raises(foremoe.InputError, match=r"hot-rank.toml: input 'w2': ranks: must be at least 2"):
        run(changed(HOT_RANK, "ranks = 4", "ranks = 1"))


def test_a_former_step_has_the_same_popularities_and_other_tokens() -> None:
    text = changed(HOT_RANK, 'routing = "w2"', "former_step = true\nseed = 5")
    experiment = reproduce.parse_experiment(text, "mine.toml")
    load, former = reproduce.run._load_of(experiment.inputs[0], 1)
    assert former is not None
    assert load.array.shape == former.array.shape == (2, 1, 4, 16)
    assert (load.array != former.array).any()
    both = foremoe.synthesize_load(**{**experiment.inputs[0].load, "micro_steps": 4})
    assert (both.array[:2] == former.array).all() and (both.array[2:] == load.array).all()


def test_a_recorded_rollout_is_batched_for_the_ranks_that_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    text = f'{PROSE}columns = ["rho_mean", "hottest"]\n[[input]]\nlabel = "file"\nfile = "{TRACE}"\nranks = 4\n'
    (cell,) = run(text + '[[system]]\nlabel = "none"\npolicy = "vanilla"\n').cells[0]
    assert not caplog.records  # nothing was done that the experiment did not ask for
    load = foremoe.collect(foremoe.read_trace(TRACE), ranks=4)
    assert cell.figures[0] == foremoe.compare(load, "vanilla")[0]["rho"]["mean"]
    assert cell.figures[1] == foremoe._core._load_stability(load, 1)["hottest"]


def test_simulate_and_reproduce_agree_on_seconds() -> None:
    none, ours = run(MODELLED).cells[0]
    load = foremoe.synthesize_load(
        shape="Qwen3-30B-A3B", layers=2, micro_steps=4, ranks=8, tokens_per_rank=1024, seed=3
    )
    simulated = foremoe.simulate(load, ["vanilla", "foremoe"], cluster="h100", model="Qwen3-30B-A3B", guest_slots=2)
    assert [none.figures[0], ours.figures[0]] == [1e3 * s["step_seconds"] for s in simulated]
    assert ours.figures[1] == simulated[1]["speedup_over_vanilla"]
    assert ours.figures[2] > ours.figures[1] > none.figures[1] == 1
    assert none.figures[3] == 100 > ours.figures[3]


def test_every_column_has_a_figure() -> None:
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    text = changed(MODELLED, '["step_ms", "speedup", "ideal_speedup", "of_free"]', f"[{names}]")
    _, ours = run(changed(text, "micro_steps = 4", "micro_steps = 4\nsteps = 2")).cells[0]
    assert all(map(math.isfinite, ours.figures))


def test_columns_that_do_not_fit_follow_in_further_blocks() -> None:
    rows = [["", "ρ", "long title"], ["first", "1", "2"], ["second", "skipped: why"]]
    assert aligned(rows) == "          ρ  long title\n  first   1           2\n  second  skipped: why\n"
    assert aligned(rows, 1) == aligned(rows, 12)  # a block has one column beside the first
    assert aligned(rows, 12) == (
        "          ρ\n  first   1\n  second  skipped: why\n\n          long title\n  first            2\n  second\n"
    )


def test_a_terminal_is_told_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if "ours on w2 … " in text:
                told.set()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with _command_line.activity() as progress:
        progress("ours on w2")
        assert told.wait(60)
    assert terminal.getvalue().endswith("\r\x1b[K")


def foremoe_reproduce(*arguments: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "foremoe", "reproduce", *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)


def test_the_command_prints_tables_sections_and_json(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.toml").write_text(changed(HOT_RANK, '"copies"]', '"copies", "plan_us"]'))

    def succeed(*arguments: str) -> str:
        done = foremoe_reproduce(*arguments, folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    result = json.loads(succeed("mine.toml", "--json"))
    assert list(result) == ["name", "title", "source", "secondary", "columns", "rows", "published", "aims"]
    assert result["columns"]["plan_us"] == "measured here"
    assert (result["rows"][0]["system"], result["rows"][0]["rho_mean"]) == ("none", 2.5)
    assert [aim["met"] for aim in result["aims"]] == [True, False, True]
    assert "mine: A hot rank\nnowhere\n\n  input  system  ρ mean  published" in succeed("mine.toml", "--threads", "1")
    markdown = succeed("mine.toml", "--markdown")
    (line,) = [line for line in markdown.splitlines() if line.startswith("    foremoe ")]
    assert line.split() == ["foremoe", "reproduce", "mine.toml"]
    assert "    foremoe reproduce feplb-straggler\n" in succeed("feplb-straggler", "--markdown")
    short, whole = succeed("--help"), succeed("--help-all")
    assert all(f"  {name} " in whole for name in COLUMNS) and "\n  rho_mean " not in short
    assert all("foremoe reproduce all --json" in text for text in (short, whole))


def test_the_list_has_every_experiment_with_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == reproduce.experiment_names()
    assert command.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(one["name"] in text and one["title"] in text for one in listed)


def test_exact_and_modelled_figures_do_not_depend_on_threads(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for threads in ("1", "2"):
        command.main(["feplb-straggler", "--json", "--threads", threads])
        rows.append(json.loads(capsys.readouterr().out)["rows"])
    assert rows[0] == rows[1] and len(rows[0]) == 15


def test_what_cannot_be_is_one_line_and_exit_code_2(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    (tmp_path / "mine.toml").write_text(changed(HOT_RANK, 'policy = "vanilla"', 'polcy = "vanilla"'))
    for arguments, words in (
        ([], "NAME: is missing"),
        (["no-such-experiment"], "'no-such-experiment' is no experiment"),
        (["missing.toml"], "missing.toml: cannot be read"),
        (["bytes.toml"], "bytes.toml: cannot be read"),
        (["folder.toml"], "folder.toml: is a folder"),
        (["mine.toml"], "mine.toml: system[0].policy: is missing"),
        (["all", "--json", "--markdown"], "--markdown: cannot be used beside --json"),
        (["all", "--jsn"], "--jsn (see foremoe reproduce --help)"),
        (["all", "--threads", "x"], "--threads: 'x' is not a whole number"),
        (["all", "--threads", "0"], "--threads: 0 is not in 1 … 4096"),
    ):
        assert command.main(arguments) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        assert error.startswith("foremoe reproduce: ") and words in error
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "foremoe", "reproduce", "--list"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (2, "foremoe reproduce: standard output cannot be written\n")
    done = foremoe_reproduce("missing.toml", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "foremoe reproduce: missing.toml: cannot be read\n"


def test_ctrl_c_ends_with_130_and_without_a_traceback(tmp_path: pathlib.Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "foremoe", "reproduce", "all", "--markdown", "--threads", "1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # also under nohup
    )
    assert running.stdout is not None and running.stdout.readline()
    running.send_signal(signal.SIGINT)
    _, error = running.communicate()
    assert (running.returncode, error) == (130, b"")


def test_the_page_of_results_tells_every_experiment_and_no_other() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "results"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
