"""Rank processes for tests. They end with the test run, and a rank that hangs prints the stacks of its threads.

A test with a parameter `rank` runs in four processes, or in the number given by its module's WORLD. Tests share these
processes; see Ranks.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4
DEVICE = torch.device("cuda:0" if os.environ.get("FOREMOE_TEST_DEVICE") == "cuda" else "cpu")
"""Device of the tests' models: cpu, or cuda, where all ranks share the first GPU."""

GRACE = 60
"""Seconds that the other ranks have to finish a test that failed on one rank. They may be waiting for that rank."""

TESTS_PER_START = 100
"""Tests after which rank processes are replaced. Each gloo group that a test leaves keeps a thread that polls."""

LONGEST = 1200
"""Seconds after which a rank is considered hung: several times the longest test on a busy machine, and below pytest's
faulthandler_timeout."""

LATER = 1e-6
"""Relative tolerance of models in float64 after their first step: their routers and norms compute in float32, which may
round values that differ in the last bit of float64 to different ones. Whether it does depends on the processor."""

IMPORTED_ONCE = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "megatron.core.models.gpt.gpt_layer_specs",
]
"""Modules that most ranks import, which takes seconds. Modules that are not installed are left out."""


@functools.cache
def rank_starter() -> Any:
    """Return a multiprocessing context whose processes are forked from a server that imported IMPORTED_ONCE.

    On a GPU processes are spawned: an import may initialise CUDA, which does not survive a fork.
    """
    if DEVICE.type == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


def run_ranks(ranks: int, work: Callable[..., None], *args: Any) -> None:
    """Run work(rank, *args) in one process per rank. If a rank raises, kill the others and raise its error."""
    mp.start_processes(work, args, nprocs=ranks, start_method=rank_starter().get_start_method())


def results_of(ranks: int, work: Callable[..., None], *args: Any) -> list[Any]:
    """Run work(rank, *args, folder) in one process per rank. Return what each saved as folder/RANK.pt, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, work, *args, folder)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


def begin_rank(rank: int, ranks: int, folder: str) -> None:
    """Create the group of a test's ranks: gloo's on the CPU, NCCL's on a GPU. Called by each rank.

    A rank that waits in a collective handles neither exceptions nor signals, so it is killed when the test's process
    dies. After LONGEST seconds it prints the stacks of its threads and exits. Each rank computes on one thread, because
    ranks with more threads in total than cores wait for each other.
    """
    torch.set_num_threads(1)
    gc.freeze()  # the collector neither visits nor copies the server's objects
    test = multiprocessing.parent_process()  # getppid() is the fork server instead
    assert test is not None

    def die_with_the_test() -> None:
        test.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_with_the_test, name="waits for the end of the test", daemon=True).start()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
        TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    faulthandler.enable()  # a rank that aborts prints the stacks of its threads
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    backend = "gloo"
    if DEVICE.type == "cuda":
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # NCCL refuses ranks of one host that share a GPU
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only then
        torch.cuda.set_device(DEVICE)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)


def prepare_rank() -> None:
    torch.use_deterministic_algorithms(True, warn_only=DEVICE.type == "cuda")


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _explain(error: BaseException) -> str:
    """Return the traceback and the local variables of the frame that raised."""
    text = "".join(traceback.format_exception(error))
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return text + "".join(
        f"  {name} = {' '.join(repr(value).split())[:300]}\n" for name, value in frame.f_locals.items()
    )


def _serve(rank: int, ranks: int, prepare: str, folder: str, pipe: Any) -> None:
    """Run the tests received from the pipe until it closes. Answer None, or (is_skipped, message)."""
    importlib.import_module(prepare).prepare_rank()
    begin_rank(rank, ranks, folder)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # destroying groups that a test broke could hang
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        try:
            getattr(importlib.import_module(module), name)(rank=rank, **arguments)
            pipe.send(None)
        except pytest.skip.Exception as skipped:
            pipe.send((True, str(skipped)))
        except BaseException as error:
            pipe.send((False, _explain(error)))


class Ranks:
    """Processes with a gloo group, started for the first test and restarted if some rank did not finish a test.

    Each process first calls prepare_rank() of the module `prepare`.
    """

    def __init__(self, prepare: str, ranks: int = RANKS) -> None:
        self.kind = prepare, ranks
        self._pipes: list[Any] = []
        self._tests = 0  # of the running processes

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        ends = [multiprocessing.Pipe() for _ in range(self.kind[1])]
        self._pipes = [own for own, _ in ends]
        self._processes = [
            rank_starter().Process(target=_serve, args=(rank, self.kind[1], self.kind[0], self._folder.name, other))
            for rank, (_, other) in enumerate(ends)
        ]
        for process, (_, other) in zip(self._processes, ends, strict=True):
            process.start()
            other.close()

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        """Call function `name` of `module` on each rank, and raise the errors of the ranks."""
        if self._tests == TESTS_PER_START:
            self.stop()
        if not self._pipes:
            self._start()
            self._tests = 0
        self._tests += 1
        for pipe in self._pipes:
            pipe.send((module, name, arguments))
        failed: dict[int, str] = {}
        skipped = ""
        running = list(self._pipes)
        while running and (ready := multiprocessing.connection.wait(running, GRACE if failed else None)):
            for pipe in ready:
                running.remove(pipe)
                try:
                    said = pipe.recv()
                except EOFError:
                    said = False, "the process died"
                if said is not None and said[0]:
                    skipped = said[1]
                elif said is not None:
                    failed[self._pipes.index(pipe)] = said[1]
        if running or any("the process died" in words for words in failed.values()):
            failed |= {self._pipes.index(pipe): f"still waited after {GRACE} s" for pipe in running}
            self.stop()
        if failed:
            pytest.fail("\n".join(f"rank {rank}: {words}" for rank, words in sorted(failed.items())), pytrace=False)
        if skipped:
            pytest.skip(skipped)

    def stop(self) -> None:
        for process in self._processes if self._pipes else []:
            process.kill()
            process.join()
        self._pipes = []
