"""Runs a function on ranks in processes of their own, and always returns: each rank has a time limit.

A rank that raises, dies or hangs cannot take the others or the caller with it. Ranks that outlive their limit are
killed, and so are all ranks at the end.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from .hardware import Hardware

GROUP_TIMEOUT = 20.0
"""Seconds after which a rank gives up an exchange in the default group."""
MOST_TEXT = 300

Prepare = Callable[[], None]


class Failure(Exception):
    """Raised on a rank that has found something wrong. `str()` says what."""


class CannotRun(Exception):
    """Raised on all ranks where this machine lacks what is tested. `str()` says what it lacks."""


@dataclass(frozen=True)
class Report:
    """What became of a function on one rank."""

    rank: int
    ended: str  # returned, cannot run, raised, died or hung
    seconds: float
    value: Any = None  # what the function returned
    text: str = ""  # otherwise: the error, the exit code, or how long it hung


class Ranks:
    """Processes with one default process group, which run one function after the other."""

    def __init__(self, hardware: Hardware, prepare: Prepare | None = None) -> None:
        """Starts them. `start()` waits until they have met.

        Args:
            hardware: how many ranks there are, and on which devices.
            prepare: called on every rank before anything else; it travels there by pickle.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="foremoe-doctor-", ignore_cleanup_errors=True)
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(hardware.ranks):
            here, there = context.Pipe()
            arguments = (there, hardware, rank, self._folder.name, prepare)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def start(self, limit: float) -> list[Report]:
        """Waits until all ranks have met; returns how each of them did."""
        return self._collect(limit, 1.0)

    def run(self, function: Callable[[], Any], limit: float, grace: float) -> list[Report]:
        """Runs a function on every rank.

        Args:
            function: travels to the ranks by pickle, and what it returns travels back.
            limit: seconds until a rank that has not returned is reported as hung, and killed.
            grace: seconds that the others have when one has raised or died, if that is sooner.

        Returns:
            One report per rank. Ranks of which not all have returned are of no further use.
        """
        for connection in self._connections:
            try:
                connection.send(function)
            except (BrokenPipeError, ConnectionError):  # its report says that it died
                continue
        return self._collect(limit, grace)

    def _collect(self, limit: float, grace: float) -> list[Report]:
        begin = time.monotonic()
        deadline = begin + limit
        reports: dict[int, Report] = {}
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
                reports[rank] = Report(rank, "hung", seconds, text=f"had not ended after {seconds:.0f} s")
                process.kill()
        return [reports[rank] for rank in range(len(self._processes))]

    def _report_of(self, rank: int, seconds: float) -> Report:
        try:
            ended, value, text = self._connections[rank].recv()
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(5.0)
            code = process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited: {code}"
            return Report(rank, "died", seconds, text=f"{how}{self._last_words(rank)}")
        return Report(rank, ended, seconds, value, text)

    def _last_words(self, rank: int) -> str:
        """The last line that a rank printed."""
        try:
            with open(_log_of(self._folder.name, rank), errors="replace") as file:
                lines = [line.strip() for line in file if line.strip()]
        except OSError:
            return ""
        return f"; its last line: {lines[-1][:MOST_TEXT]}" if lines else ""

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


def _serve(connection: Connection, hardware: Hardware, rank: int, folder: str, prepare: Prepare | None) -> None:
    """One rank: reports that it has begun, then runs what it is sent until the caller closes the connection."""
    with open(_log_of(folder, rank), "w") as log:  # what libraries print is not part of the table
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        connection.send(_attempt(lambda: _begin(hardware, rank, folder, prepare)))
        while True:
            connection.send(_attempt(connection.recv()))
    except (EOFError, ConnectionError):
        sys.stdout.flush()
        os._exit(0)  # groups of which a rank has failed may never end in order


def _begin(hardware: Hardware, rank: int, folder: str, prepare: Prepare | None) -> None:
    device = hardware.device_of(rank)
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if hardware.backend == "nccl":
            options["device_id"] = device
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        hardware.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=hardware.ranks,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
        **options,
    )
    dist.all_reduce(torch.zeros(1, device=device))  # makes connections; an NCCL that cannot do so says it here
    if prepare is not None:
        prepare()


def _attempt(function: Callable[[], Any]) -> tuple[str, Any, str]:
    """How a function ended, what it returned, and its error."""
    try:
        return "returned", function(), ""
    except CannotRun as reason:
        return "cannot run", None, str(reason)
    except Failure as problem:
        return "raised", None, str(problem)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return "raised", None, f"{type(error).__name__}: {lines[0] if lines else ''}"[:MOST_TEXT]
