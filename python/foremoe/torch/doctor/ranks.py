"""Runs checks on ranks in separate processes. Always returns: a rank that raises, dies or hangs fails its check."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from .hardware import Hardware

PASSED, FAILED, CANNOT_RUN = "passed", "failed", "cannot run here"
GROUP_TIMEOUT = 20.0
"""Seconds after which a rank gives up an exchange in the default group."""
START_LIMIT = 100.0
"""Seconds within which ranks must import torch and form a group."""
MOST_TEXT = 300
MOST_CALLS = 6  # of a rank that hangs
_CALL = re.compile(r'File ".*?([^/"]+)", line (\d+) in (.*)')  # as faulthandler prints it


class Failure(Exception):
    """Raised on a rank whose check has found an error."""


class CannotRun(Exception):
    """Raised on all ranks if this machine lacks a requirement of the check."""


@dataclass(frozen=True)
class Outcome:
    """Status, detail and figures of a check. Equal on all ranks that found no problem."""

    status: str
    detail: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankReport:
    """Result of a check on one rank."""

    rank: int
    ended: str  # returned, cannot run, raised, died or hung
    seconds: float
    value: Outcome | None = None  # if it returned
    text: str = ""  # otherwise: the error, the exit code, or how long it hung


def judge_all(reports: Sequence[RankReport]) -> Outcome:
    """Returns the outcome of rank 0 if every rank returned one."""
    if all(report.ended == "cannot run" for report in reports):
        return Outcome(CANNOT_RUN, reports[0].text)
    problems = _problems_of(reports)
    if problems:
        return Outcome(FAILED, problems)
    assert reports[0].value is not None
    return reports[0].value


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    run: Callable[[Hardware], Outcome]
    """Runs on every rank, collectively. Is sent there by pickle. Raises Failure, or any other error."""
    refusal: str = ""
    """Why it cannot run on this hardware; empty if it can."""
    judge: Callable[[Sequence[RankReport]], Outcome] = judge_all
    limit: float = 45.0  # seconds
    grace: float = 5.0  # further seconds for the other ranks after one has raised or died
    ends_ranks: bool = False  # whether later checks need new ranks


def examine(
    hardware: Hardware,
    checks: Sequence[Check],
    *,
    limit: float = 120.0,
    prepare: Callable[[], None] | None = None,
) -> Iterator[tuple[Check, Outcome, float]]:
    """Runs checks in order, and yields each with its outcome and seconds as soon as they are known.

    Args:
        hardware: The hardware to run on.
        checks: The checks.
        limit: Seconds for all checks. Checks that would begin later are reported as not run.
        prepare: Called on every rank before its first check.
    """
    deadline = time.monotonic() + limit
    ranks: _Ranks | None = None
    try:
        for check in checks:
            begin = time.monotonic()
            refusal = check.refusal or (f"not run: the limit of {limit:.0f} s was over" if begin >= deadline else "")
            if refusal:
                yield check, Outcome(CANNOT_RUN, refusal), 0.0
                continue
            if ranks is None:
                ranks = _Ranks(hardware, prepare)
                reports = ranks.collect(max(1.0, min(START_LIMIT, deadline - begin)), 1.0)
                if problems := _problems_of(reports):
                    ranks.end()
                    ranks = None
                    yield check, Outcome(FAILED, f"ranks did not start: {problems}"), time.monotonic() - begin
                    continue
            ranks.send(functools.partial(check.run, hardware))
            reports = ranks.collect(max(1.0, min(check.limit, deadline - time.monotonic())), check.grace)
            if check.ends_ranks or any(report.ended != "returned" for report in reports):
                ranks.end()
                ranks = None
            yield check, check.judge(reports), time.monotonic() - begin
    finally:
        if ranks is not None:
            ranks.end()


def _problems_of(reports: Sequence[RankReport]) -> str:
    """Returns errors with their ranks, the first cause first; "" if all ranks returned."""
    failed = sorted((r for r in reports if r.ended != "returned"), key=lambda r: (r.ended == "hung", r.seconds))
    if len(failed) == len(reports) and len({report.text for report in failed}) == 1:
        return f"all ranks: {failed[0].text}"
    return "; ".join(f"rank {report.rank}: {report.text}" for report in failed)


class _Ranks:
    """Processes with one default process group that run the functions they receive, one after the other."""

    def __init__(self, hardware: Hardware, prepare: Callable[[], None] | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="foremoe-doctor-", ignore_cleanup_errors=True)
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(hardware.ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, hardware, rank, self._folder.name, prepare), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def send(self, function: Callable[[], Any]) -> None:
        for connection in self._connections:
            try:
                connection.send(function)
            except (BrokenPipeError, ConnectionError):  # the rank's report says that it died
                continue

    def collect(self, limit: float, grace: float) -> list[RankReport]:
        """Returns one report per rank, and kills ranks that have not ended within the limit."""
        begin = time.monotonic()
        deadline = begin + limit
        reports: dict[int, RankReport] = {}
        while len(reports) < len(self._processes) and time.monotonic() < deadline:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in reports}
            for ready in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting[ready]  # type: ignore[index]
                reports[rank] = report = self._report_of(rank, time.monotonic() - begin)
                if report.ended != "returned":
                    deadline = min(deadline, time.monotonic() + grace)
        for rank, process in enumerate(self._processes):
            if rank not in reports:
                seconds = time.monotonic() - begin
                where = self._place_of(rank)
                reports[rank] = RankReport(rank, "hung", seconds, text=f"had not ended after {seconds:.0f} s{where}")
                process.kill()
        return [reports[rank] for rank in range(len(self._processes))]

    def _report_of(self, rank: int, seconds: float) -> RankReport:
        try:
            ended, value, text = self._connections[rank].recv()
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(5.0)
            code = process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited: {code}"
            lines = [line for line in _lines_of(self._folder.name, rank) if not line.startswith("frame #")]
            last = f"; its last line: {lines[-1][:MOST_TEXT]}" if lines else ""
            return RankReport(rank, "died", seconds, text=how + last)
        return RankReport(rank, ended, seconds, value, text)

    def _place_of(self, rank: int) -> str:
        """Returns where a rank waits: ", in " and its innermost calls, as its main thread prints them on a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
        lines = _lines_of(self._folder.name, rank)
        begins = [i for i, line in enumerate(lines) if line.endswith("(most recent call first):")]
        calls = [_CALL.match(line) for line in lines[begins[-1] + 1 :]] if begins else []
        of = [f"{call[1]}:{call[2]} {call[3]}" for call in calls if call]
        return f", in {' < '.join(of[:MOST_CALLS])}" if of else ""

    def end(self) -> None:
        """Ends all processes; kills those that do not end by themselves."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(2.0)
            process.kill()
            process.join()
        self._folder.cleanup()


def _log_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}.log")


def _lines_of(folder: str, rank: int) -> list[str]:
    """Returns the lines that a rank has printed, without empty ones."""
    with open(_log_of(folder, rank), "a+", errors="replace") as log:
        log.seek(0)
        return [line.strip() for line in log if line.strip()]


def _serve(
    connection: Connection, hardware: Hardware, rank: int, folder: str, prepare: Callable[[], None] | None
) -> None:
    """Runs one rank: reports that it has begun, then runs received functions until the connection is closed."""
    with open(_log_of(folder, rank), "w") as log:  # output of libraries is not part of the table
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=2)  # prints the calls of all threads, those of the main thread last
    try:
        connection.send(_attempt(lambda: _begin(hardware, rank, folder, prepare)))
        while True:
            connection.send(_attempt(connection.recv()))
    except (EOFError, ConnectionError):
        os._exit(0)  # groups with a failed rank may never shut down cleanly


def _begin(hardware: Hardware, rank: int, folder: str, prepare: Callable[[], None] | None) -> None:
    device = hardware.device_of(rank)
    options: dict[str, Any] = {"device_id": device} if hardware.backend == "nccl" else {}
    if hardware.shares_gpu:
        # NCCL refuses ranks of one host that share a GPU, and connects ranks of different hosts by sockets.
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    if device.type == "cuda":
        # After a timeout, torch's watchdog waits four times this long (default: a minute) and ends the process.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        # Before that it imports modules to print calls. It hangs if a thread that waits for the device has the GIL.
        os.environ.setdefault("TORCH_INCLUDE_STACK_TRACE", "0")
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    method, timeout = f"file://{folder}/rendezvous", datetime.timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(
        hardware.backend, init_method=method, rank=rank, world_size=hardware.ranks, timeout=timeout, **options
    )
    dist.all_reduce(torch.zeros(1, device=device))  # creates connections; NCCL raises here if it cannot
    if prepare is not None:
        prepare()


def _attempt(function: Callable[[], Any]) -> tuple[str, Any, str]:
    """Returns how the function ended, its value, and its error."""
    try:
        return "returned", function(), ""
    except CannotRun as reason:
        return "cannot run", None, str(reason)
    except Failure as problem:
        return "raised", None, str(problem)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return "raised", None, f"{type(error).__name__}: {lines[0] if lines else ''}"[:MOST_TEXT]
