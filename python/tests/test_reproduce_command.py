"""The command `foremoe reproduce`."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
from experiments import HOT_RANK, ROOT, changed

import foremoe
from foremoe import _command_line, reproduce
from foremoe.reproduce import command
from foremoe.reproduce.columns import COLUMNS

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(pathlib.Path(foremoe.__file__).parents[1])}  # whatever the folder


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
    text = changed(HOT_RANK, '"copies"]', '"copies", "all_plan_us"]')
    (tmp_path / "mine.toml").write_text(changed(text, "at_most = 250", "at_most = 300"))

    def succeed(*arguments: str) -> str:
        done = foremoe_reproduce(*arguments, folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    result = json.loads(succeed("mine.toml", "--json"))
    assert list(result) == ["name", "title", "source", "secondary", "columns", "rows", "published", "aims"]
    assert result["columns"]["all_plan_us"] == "measured here"
    assert (result["rows"][0]["system"], result["rows"][0]["rho_mean"]) == ("none", 2.5)
    assert [aim["met"] for aim in result["aims"]] == [True, True, True]
    assert "mine: A hot rank\nnowhere\n\n  input  system  ρ mean  published" in succeed("mine.toml", "--threads", "1")
    markdown = succeed("mine.toml", "--markdown")
    (line,) = [line for line in markdown.splitlines() if line.startswith("    foremoe ")]
    assert line.split() == ["foremoe", "reproduce", "mine.toml"]
    assert "    foremoe reproduce feplb-straggler\n" in succeed("feplb-straggler", "--markdown")
    short, whole = succeed("--help"), succeed("--help-all")
    assert all(f"  {name} " in whole for name in COLUMNS) and "\n  rho_mean " not in short
    assert all(
        "foremoe reproduce all --json" in text and "1 where an aim is not met" in text for text in (short, whole)
    )


def test_what_was_not_met_or_skipped_is_told_at_the_end_and_by_the_exit_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    skipped = '[[system]]\nlabel = "odd"\npolicy = "finemoe-symmetric"\nguest_slots = 3\n[[published]]'
    missed = "foremoe reproduce: mine: aims not met: 1 of 3"
    met = changed(changed(HOT_RANK, "at_most = 250", "at_most = 300"), "[[published]]", skipped)
    never = changed(met, 'system = "ours"\nat_most', 'system = "odd"\nat_most')
    for text, code, told in (
        (HOT_RANK, 1, f"{missed}\n"),
        (met, 0, "foremoe reproduce: mine: systems skipped, over all inputs: 1 of 3\n"),
        (never, 1, f"{missed}; systems skipped, over all inputs: 1 of 3\n"),
    ):
        pathlib.Path("mine.toml").write_text(text)
        for form in ([], ["--json"], ["--markdown"]):
            assert command.main(["mine.toml", *form]) == code
            assert capsys.readouterr().err == told


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
    assert rows[0] == rows[1] and len(rows[0]) == 21


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
        (["mine.toml"], "mine.toml: system[0].polcy: no such key"),
        (["all", "--json", "--markdown"], "--markdown: cannot be used beside --json"),
        (["all", "--jsn"], "--jsn (see foremoe reproduce --help)"),
        (["all", "--threads", "x"], "--threads: 'x' is not a whole number"),
        (["all", "--threads", "0"], "--threads: 0 is not in 1 … 4096"),
    ):
        assert command.main(arguments) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        assert error.startswith("foremoe reproduce: ") and words in error
    done = foremoe_reproduce("missing.toml", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "foremoe reproduce: missing.toml: cannot be read\n"


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", [("reproduce", "--list"), ("reproduce", "--help"), ("report", "--help")])
def test_a_full_disk_behind_stdout_is_one_line_and_exit_code_2(arguments: tuple[str, str], buffered: bool) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONUNBUFFERED"}
    if not buffered:
        environment["PYTHONUNBUFFERED"] = "1"
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "foremoe", *arguments]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, f"foremoe {arguments[0]}: standard output cannot be written\n")


@pytest.mark.parametrize("arguments", [("reproduce", "--list"), ("reproduce", "--help"), ("report", "--help")])
def test_a_closed_stdout_is_one_line_and_exit_code_2(arguments: tuple[str, str]) -> None:
    words = [sys.executable, "-m", "foremoe", *arguments]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (2, f"foremoe {arguments[0]}: standard output cannot be written\n")


def test_a_closed_stderr_costs_nothing_but_the_message() -> None:
    words = [sys.executable, "-m", "foremoe", "reproduce", "no such experiment\x1b"]
    done = subprocess.run(words, env=ENVIRONMENT, preexec_fn=lambda: os.close(2), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, b"")
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 2 and b"\\x1b" in done.stderr and b"\x1b" not in done.stderr


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
    check = [sys.executable, str(ROOT / "lab" / "write_results"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
