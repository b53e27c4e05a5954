"""The interpreter ends at random moments while a daemon thread is inside a call of the package."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

PROGRAM = """
import threading, time
import numpy as np
import foremoe
from foremoe import _core

load = foremoe.synthesize_load(layers=4, micro_steps=64, ranks=32, experts=128, top_k=8, tokens_per_rank=256)
routes = np.argsort(np.random.default_rng(0).random((4000, 4, 128)), -1)[..., :8].astype(np.int32)
plan = foremoe.plan(load, guest_slots=1, threads=1)


def collect():
    collector = _core.Collector(num_layers=4, num_experts=128, top_k=8)
    collector.add(0, routes)


calls = {
    "plan": lambda: foremoe.plan(load, guest_slots=1, threads=1),
    "callback": lambda: foremoe.plan(load, guest_slots=1, threads=1, on_micro_step=lambda m: None),
    "start_plan": lambda: foremoe.start_plan(load, guest_slots=1, threads=1).finish(),
    "growing": lambda: _core._GrowingPlan(load).wait_for(0),
    "simulate": lambda: foremoe.simulate(load, "static", cluster="h100", model="qwen3-30b-a3b", threads=1),
    "turns": lambda: _core.RankTurns(plan, load, rank=0),
    "collect": collect,
    "digest": lambda: load.digest,
}


def work():
    while True:
        calls[KIND]()


threading.Thread(target=work, daemon=True).start()
time.sleep(SECONDS)
"""

KINDS = ("plan", "callback", "start_plan", "growing", "simulate", "turns", "collect", "digest")
ENDS = 4  # of each kind; 25 ends were run once


@pytest.mark.parametrize("kind", KINDS)
def test_process_ends_without_a_signal(kind: str) -> None:
    random.seed(kind)
    for _ in range(ENDS):
        program = f"KIND = {kind!r}\nSECONDS = {random.uniform(0.05, 0.4)}\n{PROGRAM}"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, "")
