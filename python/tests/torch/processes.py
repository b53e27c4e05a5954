"""Rank processes of the tests. They end with the test run, and a rank that hangs prints the stacks of its threads."""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LONGEST = 1200
"""Seconds after which a rank is considered hung: several times the longest test on a busy machine, and below pytest's
faulthandler_timeout."""

IMPORTED_ONCE = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "megatron.core.models.gpt.gpt_layer_specs",
]
"""Modules that most ranks import, which takes seconds. Modules that are not installed are left out."""


@functools.cache
def rank_starter() -> Any:
    """Return a multiprocessing context whose processes are forked from a server that imported IMPORTED_ONCE."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


def run_ranks(ranks: int, work: Callable[..., None], *args: Any) -> None:
    """Run work(rank, *args) in one process per rank, and raise what one of them raises, after killing the others."""
    rank_starter()
    mp.start_processes(work, args, nprocs=ranks, start_method="forkserver")


def begin_rank(rank: int, ranks: int, folder: str) -> None:
    """Make the gloo group of a test's ranks. Called by each rank.

    A rank that waits in an exchange handles neither exceptions nor signals, so it is killed when the test's process
    dies. After LONGEST seconds it prints the stacks of its threads and exits. Each rank computes on one thread, since
    ranks with more threads than cores wait for each other.
    """
    torch.set_num_threads(1)
    gc.freeze()  # a collection neither visits nor copies what the server imported
    test = multiprocessing.parent_process()  # this process's own parent is the server that forked it
    assert test is not None

    def die_with_the_test() -> None:
        test.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_with_the_test, name="waits for the end of the test", daemon=True).start()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
