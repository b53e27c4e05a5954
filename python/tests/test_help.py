"""Examples in `--help` of the package's commands run as printed."""

from __future__ import annotations

import pathlib
import re

import commands
import pytest

import foremoe


def examples(verb: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Returns the arguments of each example in the help, without its explanation."""
    assert commands.run(verb, "--help") == 0
    shown = re.search(r"Examples:\n(.*?)\n\n", capsys.readouterr().out, re.DOTALL)
    assert shown
    found = [re.sub("   .*", "", line.strip()).split() for line in shown[1].splitlines()]
    assert all(words[:2] == ["foremoe", verb] for words in found)
    return [words[2:] for words in found]


def test_every_example_of_report_makes_its_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = {"layers": 1, "micro_steps": 2, "ranks": 4, "tokens_per_rank": 32}  # synth sets experts and top_k
    foremoe.synthesize_load(**shape).save("step.load.safetensors")
    foremoe.synthesize_trace(**shape).save("step.trace.safetensors")
    shown = examples("report", capsys)
    assert len(shown) >= 3
    for arguments in shown:
        assert commands.run("report", *arguments) == 0
        said = capsys.readouterr()
        assert said.out.startswith("page.html: Qwen3-30B-A3B on ") and said.err == ""
        pathlib.Path("page.html").unlink()
