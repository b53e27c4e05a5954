"""Ranks end at random moments inside planned steps, while threads of the executor work or wait for the other rank."""

from __future__ import annotations

import pathlib
import subprocess
import sys

PROGRAM = """
import os, random, signal, sys, time
import torch
import torch.distributed as dist
from foremoe._engine import arena, failures, shares
from foremoe.torch.doctor.layers import TOKEN, Net, Sizes, draw_inputs, draw_routes

SIZES = Sizes(micro_steps=4)
ROUTES = [draw_routes(SIZES, rank, 2) for rank in range(2)]
HOST = {"path": "host", "ranks_per_node": 1}
KINDS = {"host": HOST, "shared": {"residency": "shared"}, "host, left open": HOST, "token": TOKEN}
shares.SMALLEST = 0  # ranks plan together
failures.PATIENCE_SECONDS = 1.0
start = arena.start_point_to_point
opened = []


def stall(likely):  # rank 1 until it ends, so that threads of rank 0 wait for it
    if dist.get_rank() == 1 and signal.getitimer(signal.ITIMER_REAL)[0] and random.random() < likely:
        time.sleep(60)


def start_late(operations):
    stall(0.5)
    return start(operations)


def end(*_):
    raise SystemExit(0)


def train(rank, kind, folder, phases, seconds):  # ends after so many phases and seconds
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    arena.start_point_to_point = start_late
    net = Net(SIZES, torch.device("cpu"))
    ep = net.spread(**KINDS[kind])
    signal.signal(signal.SIGALRM, end)
    for i in range(1000):
        begin = time.monotonic()
        phase = ep.plan(ROUTES[rank])
        if kind.endswith("left open"):  # by a trainer that ends without leaving its phase
            opened.append(phase.__enter__())
        with phase if phase not in opened else open(os.devnull):
            for m, hidden in enumerate(draw_inputs(SIZES, rank)):
                stall(0.05)
                with phase.micro_step(m):
                    net(hidden.float()).square().mean().backward()
            phase.drain()
        if phase in opened:
            opened.pop().__exit__(None, None, None)
        if i == 1:
            signal.setitimer(signal.ITIMER_REAL, phases * (time.monotonic() - begin) + seconds)


for i in range(ENDS):
    random.seed(i)
    kind = list(KINDS)[i % len(KINDS)]
    phases, seconds = random.uniform(0.01, 2), random.uniform(0, 0.8)
    ranks = {}
    for rank in range(2):
        if not (process := os.fork()):
            random.seed(f"{i} {rank}")
            try:
                train(rank, kind, f"{FOLDER}/{i}", phases, rank * seconds)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        ranks[process] = rank
    deadline = time.monotonic() + LIMIT
    while ranks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            print(f"{kind}, end {i}: rank {ranks.pop(process)} exited: {os.waitstatus_to_exitcode(status)}", flush=True)
        elif time.monotonic() > deadline:
            for process in ranks:
                os.kill(process, signal.SIGKILL)
        else:
            time.sleep(0.01)
"""

ENDS = 4  # one of each kind
LIMIT = 20.0
"""Seconds in which a rank must end: below the timeouts of gloo and of the host path, far above what a busy machine
needs."""


def test_ranks_end_without_a_signal_and_without_a_timeout(tmp_path: pathlib.Path) -> None:
    given = {"ENDS": ENDS, "LIMIT": LIMIT, "FOLDER": str(tmp_path)}
    program = "".join(f"{name} = {value!r}\n" for name, value in given.items()) + PROGRAM
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60 + ENDS * LIMIT
    )
    exits = [line.rsplit(" ", 1)[1] for line in ended.stdout.splitlines()]
    assert len(exits) == 2 * ENDS, ended.stderr
    # 1: the rank lost its connection to the rank that had ended
    assert set(exits) <= {"0", "1"}, f"{ended.stdout}\n{ended.stderr[-3000:]}"
