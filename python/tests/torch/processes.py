"""How a rank of a test begins. It ends with the test that started it, and says where it hangs."""

import faulthandler
import functools
import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LONGEST = 1200
"""Seconds of a rank: several times what the longest takes on a busy machine; below pytest's faulthandler_timeout."""

IMPORTED_ONCE = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "megatron.core.models.gpt.gpt_layer_specs",
]
"""What most ranks import, and takes them seconds. Modules that are not installed are left out."""


@functools.cache
def rank_starter() -> Any:
    """A multiprocessing context, as get_context("spawn") returns it. Its processes are forked from one that has
    imported what most of them need, and has run nothing else."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


def run_ranks(ranks: int, work: Callable[..., None], *args: Any) -> None:
    """work(rank, *args), in a process of each rank. Raises what one of them raises; then the others are ended."""
    rank_starter()
    mp.start_processes(work, args, nprocs=ranks, start_method="forkserver")


def begin_rank(rank: int, ranks: int, folder: str) -> None:
    """Makes the gloo group of all ranks of a test. Called by each rank, in a process that it has for itself.

    A rank that waits in an exchange heeds no exception, and not the SIGINT that it is sent when the test's process
    dies. So it is killed then. After LONGEST seconds the calls of all its threads are printed, and it ends. It computes
    on one thread: ranks that have more than the machine together wait for each other's threads.
    """
    torch.set_num_threads(1)
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # by the function with which torch asks for SIGINT
    test = multiprocessing.parent_process()
    if test is None or not test.is_alive():  # it died before
        raise SystemExit(1)
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
