"""Progress of `foremoe report` and `lab/run`: one line on a terminal, with the time left; nothing in a pipe.

Each activity waits until the terminal shows it, so that no test depends on speed. tests/progress_test.py tests the
program.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import pathlib
import pty
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import commands
import pytest
from reports import MODEL, shared_load

from foremoe import _command_line
from foremoe.report import command

LAB_RUN = pathlib.Path(__file__).resolve().parents[2] / "lab" / "run"
SECONDS = 60  # a limit for what takes 10 ms
REMOVED = r"\r\x1b\[K$"


class Terminal:
    """A pseudo-terminal. stream: writes to it."""

    def __init__(self) -> None:
        self._screen, theirs = pty.openpty()
        self.stream = open(theirs, "w", encoding="utf-8")  # noqa: SIM115
        self._shown = b""

    def read_until(self, pattern: str) -> None:
        """Reads up to the pattern. Fails after a minute."""
        end = time.monotonic() + SECONDS
        while not (found := re.search(pattern.encode(), self._shown)):
            assert time.monotonic() < end, f"{pattern} is not in {self._shown[-200:]!r}"
            if select.select([self._screen], [], [], 1)[0]:
                self._shown += os.read(self._screen, 4096)
        self._shown = self._shown[found.end() :]

    def close(self) -> None:
        self.stream.close()
        os.close(self._screen)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal whose line is rewritten often."""
    try:
        of = Terminal()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal is available: {error}")
    monkeypatch.setattr(_command_line, "REFRESH_SECONDS", 0.01)
    yield of
    of.close()


def expect_each_shown(
    monkeypatch: pytest.MonkeyPatch, terminal: Terminal, module: Any, name: str, total: int
) -> list[str]:
    """Makes the function `name` wait after each call of its `progress` until the terminal shows the activity, the
    number done of `total`, and the time left. Returns the list of activities, which the function fills."""
    run, seen = getattr(module, name), list[str]()

    def waiting(progress: Callable[[str], None]) -> Callable[[str], None]:
        def announce(what: str) -> None:
            progress(what)
            state = rf"{len(seen)} of {total} done, about \d+ s left" if seen else r"\d+ s"
            terminal.read_until(rf"\r{re.escape(what)} … {state}\x1b\[K")
            seen.append(what)

        return announce

    def with_waits(*inputs: Any, progress: Callable[[str], None], **options: Any) -> Any:
        return run(*inputs, progress=waiting(progress), **options)

    monkeypatch.setattr(module, name, with_waits)
    return seen


def test_a_report_shows_each_evaluation_with_the_time_left_and_removes_the_line(
    terminal: Terminal, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shared_load().save("step")
    seen = expect_each_shown(monkeypatch, terminal, command, "gather_report", total=9)
    options = ["--cluster", "h100", "--model", MODEL, "--policy", "foremoe", "--guest-slots", "1", "--out", "page.html"]
    with contextlib.redirect_stderr(terminal.stream):
        assert commands.run("report", "step", *options) == 0
    # foremoe: itself, four ablations, three residencies
    assert seen == ["evaluating vanilla", *["evaluating foremoe"] * 8]
    terminal.read_until(REMOVED)


def lab_run() -> Any:
    loader = importlib.machinery.SourceFileLoader("lab_run", str(LAB_RUN))
    spec = importlib.util.spec_from_loader("lab_run", loader)
    assert spec
    program = importlib.util.module_from_spec(spec)
    loader.exec_module(program)
    return program


def test_lab_run_shows_each_system_with_the_time_left_and_removes_the_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lab_run()
    experiment = program.experiment_named("feplb-dyn")
    total = len(experiment.inputs) * len(experiment.systems)
    seen = expect_each_shown(monkeypatch, terminal, program, "run_experiment", total)
    monkeypatch.setattr(sys, "argv", ["lab/run", "feplb-dyn"])
    with contextlib.redirect_stderr(terminal.stream):
        assert program.main() == 0
    assert len(seen) == total > 1
    assert seen[0] == "feplb-dyn: before on EP 2, seed 1"
    terminal.read_until(REMOVED)


@pytest.mark.parametrize("parts", [0, 2])
def test_nothing_is_shown_in_a_pipe(
    parts: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_command_line, "REFRESH_SECONDS", 0)
    with _command_line.activity(parts) as progress:
        for what in ("reading", "planning"):
            progress(what)
    assert capfd.readouterr() == ("", "")


def test_the_time_left_assumes_equally_long_parts() -> None:
    for done, parts, seconds, text in (
        (0, 12, 5, ""),  # nothing is known yet
        (3, 0, 5, ""),
        (3, 12, 10, "3 of 12 done, about 30 s left"),
        (1, 41, 5, "1 of 41 done, about 3 min left"),
        (1, 3, 3600, "1 of 3 done, about 2.0 h left"),
        (12, 12, 60, "12 of 12 done, about 0 s left"),
    ):
        assert _command_line.progress_text(done, parts, seconds) == text
