"""Rank processes of the tests: if one fails, the others end, and none outlives the test that started it."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from processes import Ranks, begin_rank, run_ranks

RANKS = 2


def fail(rank: int, folder: str) -> None:
    begin_rank(rank, RANKS, folder)
    if rank == 1:
        raise KeyError("of rank 1")
    dist.barrier()


def test_a_rank_that_raises_ends_the_others(tmp_path: pathlib.Path) -> None:
    begin = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="KeyError: 'of rank 1'"):
        run_ranks(RANKS, fail, str(tmp_path))
    assert time.monotonic() - begin < 60


def fail_a_test(rank: int, number: int) -> None:
    if rank == 1:
        assert number == 1
    dist.barrier()


def test_a_failure_on_a_rank_is_reported_and_the_next_test_gets_new_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("processes.GRACE", 2)
    ranks = Ranks("processes")
    with pytest.raises(pytest.fail.Exception) as failed:
        ranks.run("test_processes", "fail_a_test", {"number": 7})
    words = str(failed.value)
    assert "rank 0: still waited after 2 s" in words and "rank 1: Traceback" in words and "number = 7" in words
    ranks.run("test_processes", "fail_a_test", {"number": 1})
    ranks.stop()


def hang(rank: int, folder: str) -> None:
    """Rank 0 sleeps, and rank 1 waits for it in a barrier."""
    begin_rank(rank, RANKS, folder)
    pathlib.Path(folder, f"{rank}.process").write_text(str(os.getpid()))
    if rank == 1:
        dist.barrier()
    time.sleep(600)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_die_with_a_test_that_is_killed(tmp_path: pathlib.Path) -> None:
    script = (
        f"import processes, test_processes as tests; processes.IMPORTED_ONCE = ['torch']; "
        f"processes.run_ranks({RANKS}, tests.hang, {str(tmp_path)!r})"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=pathlib.Path(__file__).parent) as test:
        files = [tmp_path / f"{rank}.process" for rank in range(RANKS)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        test.send_signal(signal.SIGKILL)
    ranks = [int(file.read_text()) for file in files]
    wait_until(lambda: not any(is_running(rank) for rank in ranks))


def hang_shortly(rank: int, folder: str) -> None:
    import processes

    processes.LONGEST = 1
    hang(rank, folder)


def test_a_rank_that_hangs_prints_its_stacks(tmp_path: pathlib.Path) -> None:
    script = (
        f"import processes, test_processes as tests; processes.IMPORTED_ONCE = ['torch']; "
        f"processes.run_ranks({RANKS}, tests.hang_shortly, {str(tmp_path)!r})"
    )
    here = pathlib.Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "test_processes.py" in done.stderr and "in hang\n" in done.stderr
