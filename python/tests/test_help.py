"""What `--help` of the package's own commands shows works as it is printed."""

from __future__ import annotations

import pathlib
import re

import pytest
from experiments import HOT_RANK, changed

import foremoe
import foremoe.report.command
import foremoe.reproduce.command
from foremoe.reproduce import experiment_file


def examples(verb: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Arguments of each example in the help, without the words that explain it."""
    assert getattr(foremoe, verb).command.main(["--help"]) == 0
    shown = re.search(r"Examples:\n(.*?)\n\n", capsys.readouterr().out, re.DOTALL)
    assert shown
    found = [re.sub("   .*", "", line.strip()).split() for line in shown[1].splitlines()]
    assert all(words[:2] == ["foremoe", verb] for words in found)
    return [words[2:] for words in found]


def test_every_example_of_report_makes_its_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = {"layers": 1, "micro_steps": 2, "ranks": 4, "tokens_per_rank": 32}  # experts and top_k as synth draws them
    foremoe.synthesize_load(**shape).save("step.load.safetensors")
    foremoe.synthesize_trace(**shape).save("step.trace.safetensors")
    shown = examples("report", capsys)
    assert len(shown) >= 3
    for arguments in shown:
        assert foremoe.report.command.main(arguments) == 0
        said = capsys.readouterr()
        assert said.out.startswith("page.html: Qwen3-30B-A3B on ") and said.err == ""
        pathlib.Path("page.html").unlink()


def test_every_example_of_reproduce_prints_something(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With experiments in place of the package's own, of the same names, which take longer."""
    monkeypatch.chdir(tmp_path)
    text = changed(HOT_RANK, "at_most = 250", "at_most = 300")
    pathlib.Path("mine.toml").write_text(text)
    (tmp_path / "own").mkdir()
    for name in foremoe.reproduce.experiment_names():
        (tmp_path / "own" / f"{name}.toml").write_text(text)
    monkeypatch.setattr(experiment_file, "FOLDER", tmp_path / "own")
    shown = examples("reproduce", capsys)
    assert len(shown) >= 4
    for arguments in shown:
        assert foremoe.reproduce.command.main(arguments) == 0
        said = capsys.readouterr()
        assert "A hot rank" in said.out and said.err == ""
