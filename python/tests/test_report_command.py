"""The command `foremoe report`."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import commands
import numpy as np
import pytest
from reports import MODEL, shared_load, shared_report, without_plotly_script

import foremoe
from foremoe import _core
from foremoe.report import to_html


def main(arguments: list[str]) -> int:
    return commands.run("report", *arguments)


@pytest.fixture
def command_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Command line without --out, in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    shared_load().save("step.load.safetensors")
    return ["step.load.safetensors", "--cluster", "h100", "--model", MODEL, "--guest-slots", "1"]


def test_an_empty_load_is_reported_as_no_load(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = foremoe.Load.from_array(np.zeros((3, 2, 4, 128), np.int64), top_k=8)
    path = tmp_path / "none.load.safetensors"
    nothing.save(path)
    out = ["--out", str(tmp_path / "page.html")]
    assert main([str(path), "--cluster", "h100", "--model", MODEL, "--policy", "foremoe", *out]) == 0
    assert capsys.readouterr().out.endswith("Qwen3-30B-A3B on h100, no load\n")
    text = without_plotly_script((tmp_path / "page.html").read_text())
    assert "No load" in text and "<td>–</td>" in text
    assert "times the mean load" not in text and '<section id="load"' not in text


def test_a_plan_that_cannot_train_is_reported_as_recompute_only(
    command_line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = shared_report()
    html = to_html(report)
    assert [p.policy for p in report.planned if not p.can_train] == ["eplb"]
    assert "<td>free*</td>" in html and "free*: experts may be anywhere" in html
    for policy in ("eplb", "foremoe"):
        assert main([*command_line, "--policy", f"static,{policy}", "--residency", "free", "--out", "page.html"]) == 0
        assert ("in recompute alone" in capsys.readouterr().out) == (policy == "foremoe")  # static beats eplb
    text = without_plotly_script(pathlib.Path("page.html").read_text())
    summary = text[text.index('<p class="summary">') : text.index("</header>")]
    assert "ms (modelled) for recompute of Qwen3-30B-A3B" in summary and "It cannot train" in summary
    assert "training step" not in summary and "Speedup of recompute" in summary and "Speedup of a step" not in summary


def test_no_comparison_is_shown_if_only_vanilla_can_be_planned(
    command_line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command_line, "--policy", "eplb", "--in-flight", "2", "--out", "page.html"]) == 0
    said = capsys.readouterr().out
    assert "nothing could be planned but vanilla" in said and "as fast as" not in said
    text = without_plotly_script(pathlib.Path("page.html").read_text())
    assert "Nothing but vanilla could be planned" in text
    assert "as fast" not in text[text.index('<p class="summary">') : text.index("</header>")]
    assert "skipped: " in text


def test_the_command_summarizes_the_page_and_replaces_an_existing_one(
    command_line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = pathlib.Path("page.html")
    out.write_text("old")
    options = ["--policy", "vanilla", "--optimizer-shards", "64", "--memory-budget", "0.5", "--prefer", "links"]
    assert main([*command_line, *options, "--ranks-per-node", "4", "--out", "page.html"]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(
        r"page.html: Qwen3-30B-A3B on h100, vanilla in \d+\sms, [\d.]+ % of ideal, modelled\n", said.out
    )
    assert said.err == ""
    text = out.read_text()
    assert "nothing fits the budget of 0.5 GB; the least is" in text
    assert "<dt>data-parallel ranks that share optimizer state</dt><dd>64</dd>" in text
    assert "<dt>memory of a rank</dt><dd>80.0 GB</dd>" in text
    assert "<dt>memory budget</dt><dd>0.5 GB</dd>" in text
    assert sorted(p.name for p in pathlib.Path.cwd().iterdir()) == ["page.html", "step.load.safetensors"]


def test_node_size_defaults_to_that_of_the_cluster(command_line: list[str]) -> None:
    assert main([*command_line, "--policy", "vanilla", "--out", "page.html"]) == 0
    assert "128 experts on 4 ranks (1 node)" in pathlib.Path("page.html").read_text()
    assert main([*command_line, "--policy", "vanilla", "--ranks-per-node", "2", "--out", "page.html"]) == 0
    assert "128 experts on 4 ranks (2 nodes)" in pathlib.Path("page.html").read_text()


def test_a_wrong_plan_is_named_and_omitted_and_the_exit_code_is_1(
    command_line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = _core._evaluate

    def damaged(load: foremoe.Load, policy: str, options: dict[str, Any], **others: Any) -> Any:
        good = evaluate(load, policy, options, **others)
        if policy != "static":
            return good
        plan = SimpleNamespace(guest_slots=1, residency="static")
        figures = {"ok": False, "violations": [{"message": "rank 3 serves nothing"}]}
        return SimpleNamespace(policy=policy, skipped=None, figures=figures, plan=plan)

    monkeypatch.setattr(_core, "_evaluate", damaged)
    assert main([*command_line, "--policy", "static,eplb", "--out", "page.html"]) == 1
    reason = "its plan is WRONG: rank 3 serves nothing"
    assert capsys.readouterr().err == f"foremoe report: static, 1 guest slot, residency static: {reason}\n"
    text = without_plotly_script(pathlib.Path("page.html").read_text())
    assert f"skipped: {reason}" in text
    assert text.count("static</th>") == 1 + text.count('<th scope="row">static</th><td>1<')  # in the memory table


REFUSED = [
    (["--out", "nowhere/page.html"], "nowhere/page.html: cannot be written: No such file or directory"),
    (["--out", "."], ".: cannot be written: Is a directory"),
    (["--out", "step.load.safetensors"], "--out: is also an input"),
    (["--out", ""], "--out: is empty"),
    (["--out", "-"], "--out: '-', expected the name of a file"),
    ([], "--out is required"),
    (["--out", "page.html", "--guest-slots", "x"], "--guest-slots: 'x' is not a whole number"),
    (["--out", "page.html", "--guest-slots", ","], "--guest-slots requires a value: G,G,…"),
    (["--out", "page.html", "-G70000"], "--guest-slots: 70000 is not in 0 … 65536"),
    (["--out", "page.html", "--residency", "auto"], "--residency: 'auto', expected static"),
    (["--out", "page.html", "--policy", "nobody"], "--policy: 'nobody', expected one of vanilla"),
    (["--out", "page.html", "--model", "deepseek-v3"], "--model"),
    (["--out", "page.html", "--cluster", "nowhere"], "--cluster: 'nowhere' is neither a file nor one of"),
    (["--out", "page.html", "--ranks", "3"], "3"),
    (["--out", "page.html", "--threads", "many"], "--threads: 'many' is not a whole number"),
    (["--out", "page.html", "--threads", "5000"], "--threads: 5000 is not in 1 … 4096"),
    (["--out", "page.html", "--threads", "0"], "--threads: 0 is not in 1 … 4096"),
    (["--out", "page.html", "--align", "0"], "--align: 0 is not in 1"),
    (["--out", "page.html", "--rollout-seconds", "-1"], "--rollout-seconds: -1 is not in 0"),
    (["--out", "page.html", "--homes", "nowhere.plan"], "nowhere.plan"),
    (["--out", "page.html", "--homes", "not-\udcff-unicode"], "--homes: is not UTF-8 text"),
    (["--out", "page.html", "--seed", "1", "--seed", "2"], "--seed: At Most 1 required but received 2"),
    (["--out", "page.html", "--colour", "red"], "--colour"),
]


@pytest.mark.parametrize(("arguments", "saying"), REFUSED)
def test_invalid_arguments_are_rejected_in_one_line(
    command_line: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], saying: str
) -> None:
    names = set(arguments)
    kept = command_line[:5] if names & {"--guest-slots", "-G70000"} else command_line
    kept = [kept[0], *kept[3:]] if "--cluster" in names else kept
    kept = [*kept[:3], *kept[5:]] if "--model" in names else kept
    assert main([*kept, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("foremoe report: ")
    assert saying in said.err
    assert [p.name for p in pathlib.Path.cwd().iterdir()] == ["step.load.safetensors"]


def test_each_of_several_processes_is_rejected_but_may_print_help(
    command_line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert main([*command_line, "--out", "page.html"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("foremoe report: mpirun or srun has started 4 processes") and said.count("\n") == 1
    assert not pathlib.Path("page.html").exists()
    assert main(["--help"]) == 0


def test_without_plotly_the_error_names_the_package_to_install(
    command_line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main([*command_line, "--out", "page.html"]) == 2
    said = "foremoe report: plotly is not installed: pip install 'plotly>=6'\n"
    assert capsys.readouterr().err == said


def test_importing_the_command_does_not_import_plotly() -> None:
    program = "import sys, foremoe.report.command; sys.exit('plotly' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_program_passes_the_arguments_as_typed() -> None:
    words = commands.requested(
        "report", "x", "--cluster=h20", "-G", "1", "--guest-slots=2,4", "--keep-activations", "-op"
    )
    assert words[:3] == ["-m", "foremoe", "_report"]
    assert json.loads(words[3]) == {
        "input": "x", "cluster": "h20", "guest_slots": "1,2,4", "keep_activations": True, "out": "p",
    }  # fmt: skip


def test_help_all_has_every_option_and_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    short = capsys.readouterr().out
    assert main(["--help-all"]) == 0
    whole = capsys.readouterr().out
    assert "--cluster" in short and "--seed" not in short
    for table in ("input", "groups", "planning", "cost", "simulation"):
        for option in _core._option_tables()[table]:
            assert f"--{option['name'].replace('_', '-')}" in whole
    for policy in foremoe.policies():
        assert f"\n  {policy} " in whole
