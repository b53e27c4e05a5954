"""How a rank of a test begins. It ends with the test that started it, and says where it hangs."""

import faulthandler
import multiprocessing
import signal

import torch.distributed as dist
import torch.multiprocessing as mp

LONGEST = 1200
"""Seconds of a rank: several times what the longest takes on a busy machine; below pytest's faulthandler_timeout."""


def begin_rank(rank: int, ranks: int, folder: str) -> None:
    """Makes the gloo group of all ranks of a test. Called by each rank, in a process that it has for itself.

    A rank that waits in an exchange heeds no exception, and not the SIGINT that mp.spawn sends when the test's process
    dies. So it is killed then. After LONGEST seconds the calls of all its threads are printed, and it ends.
    """
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # by the function with which mp.spawn asks for SIGINT
    test = multiprocessing.parent_process()
    if test is None or not test.is_alive():  # it died before
        raise SystemExit(1)
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
