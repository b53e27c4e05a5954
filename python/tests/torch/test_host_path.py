"""Faults of the host path: all ranks serve the affected layers at home, and gradients stay exact."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import matrix
import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import RANKS, begin_rank, gather, rank_starter
from refusals import refusal
from training import LAYERS, MICRO_STEPS, Spoil, begin, draw_routes, make_model, run_phase, run_step, spread

import foremoe
from foremoe._core import HostArena
from foremoe._engine import arena, node_memory
from foremoe._engine.arena import NodeArena
from foremoe._engine.host_path import HostPath
from foremoe.torch import ExpertParallel

LONG = 60.0  # seconds, far above host_timeout: a phase that waited this long would have no fallbacks


def names_in_shared_memory(processes: set[int] | None = None) -> list[str]:
    """Names of shared-memory files created by these processes, by default by this one."""
    makers = processes or {os.getpid()}
    return [f.name for f in pathlib.Path("/dev/shm").glob("foremoe-*") if int(f.name.split("-")[3]) in makers]


def after_publishing(change: Callable[[Any], None]) -> Spoil:
    """Calls change(arena) on each rank after all experts are published and before any is read."""

    @contextlib.contextmanager
    def spoil(ep: Any, phase: Any) -> Iterator[None]:
        make = NodeArena.__init__

        def changed(self: Any, *of: Any, **more: Any) -> None:
            make(self, *of, **more)
            for future in self._publishing:
                future.result()
            dist.barrier(ep.ranks.agreement.group)
            change(self)
            dist.barrier(ep.ranks.agreement.group)

        with mock.patch.object(NodeArena, "__init__", changed):
            yield

    return spoil


def flip_a_bit(arena: Any) -> None:
    """Flips a bit in the first expert of the first node's arena."""
    if arena._ranks.rank == 0:
        arena._places.segments(next(iter(arena._places._of)))[-1][5] ^= 1


def publish_stale_weights(arena: Any) -> None:
    """Replaces the first expert by weights of the previous phase's version."""
    places = arena._places
    if arena._ranks.rank == 0:
        zeros = [np.zeros_like(segment) for segment in places.segments(next(iter(places._of)))]
        places._arena.publish(0, places._version - 1, zeros)


@contextlib.contextmanager
def stale(ep: Any, phase: Any) -> Iterator[None]:
    ep._memory._version = 4
    with after_publishing(publish_stale_weights)(ep, phase):
        yield


@contextlib.contextmanager
def publish_nothing(ep: Any, phase: Any) -> Iterator[None]:
    with mock.patch.object(NodeArena, "_publish", lambda self, *_: self._writers.submit(lambda: None)):
        yield


@contextlib.contextmanager
def publish_late(ep: Any, phase: Any) -> Iterator[None]:
    """Publishes experts after the ranks have agreed on micro-steps 0 and 1 without them."""
    publish, agree = NodeArena._publish, HostPath.agree
    late: list[Any] = []

    def keep(self: Any, expert: Any, weights: Any) -> Any:
        late.append((self, expert, weights))
        return self._writers.submit(lambda: None)

    def agree_then_publish(self: Any, micro_step: int) -> Any:
        at_homes = agree(self, micro_step)
        if micro_step == 0:
            self._check.result()  # the check of micro-step 1 finds no experts
            dist.barrier(ep.ranks.agreement.group)
            for of in late:
                publish(*of).result()
            dist.barrier(ep.ranks.agreement.group)
        return at_homes

    with mock.patch.object(NodeArena, "_publish", keep), mock.patch.object(HostPath, "agree", agree_then_publish):
        yield


@contextlib.contextmanager
def set_at_close() -> Iterator[threading.Event]:
    """Yields an event that is set when a rank closes its host path."""
    close, ended = HostPath.close, threading.Event()

    def end_then_close(self: Any, complete: bool) -> None:
        ended.set()
        close(self, complete)

    with mock.patch.object(HostPath, "close", end_then_close):
        yield ended


@contextlib.contextmanager
def delay_receives(ep: Any, phase: Any) -> Iterator[None]:
    """Delays receives from owners on other nodes until the phase ends."""
    start = arena.start_point_to_point

    class Held:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            ended.wait(LONG)
            self._work.wait()

    def held(operations: list[Any]) -> list[Any]:
        works = zip(start(operations), operations, strict=True)
        return [Held(work) if operation.op is dist.irecv else work for work, operation in works]

    with set_at_close() as ended, mock.patch.object(arena, "start_point_to_point", held):
        yield


@contextlib.contextmanager
def delay_writes(ep: Any, phase: Any) -> Iterator[None]:
    """Delays all writes into the arena until the phase ends."""
    write = NodeArena._write

    def held(self: Any, *of: Any) -> None:
        ended.wait(LONG)
        write(self, *of)

    with set_at_close() as ended, mock.patch.object(NodeArena, "_write", held):
        yield


FAULTS = {
    "damaged": after_publishing(flip_a_bit),
    "stale": stale,
    "never": publish_nothing,
    "late": publish_late,
    "link": delay_receives,
    "writing": delay_writes,
}


results: dict[tuple[str, str], dict[str, Any]] = {}


def run(rank: int, fault: str, how: str) -> dict[str, Any]:
    """Runs a step in which some guests do not arrive. Cached per fault and mode."""
    if (fault, how) not in results:
        options: dict[str, Any] = {"checkpointing": True} if how == "checkpointing" else {"residency": how}
        of_fault = {"host_timeout": 0.3, "spoil": FAULTS[fault]} if fault else {}
        results[fault, how] = run_step(rank, torch.float64, path="host", **options, **of_fault)
    return results[fault, how]


@pytest.mark.parametrize("how", ["static", "resident", "shared", "checkpointing"])
@pytest.mark.parametrize("fault", FAULTS)
def test_layers_with_a_missing_guest_are_served_at_home(rank: int, fault: str, how: str) -> None:
    result = run(rank, fault, how)
    assert gather(result["fallbacks"]) == RANKS * [result["fallbacks"]], "ranks disagree"
    assert 0 < result["fallbacks"] <= MICRO_STEPS * LAYERS
    assert result["rho_computed"] > result["rho_planned"]


def test_a_late_guest_serves_from_its_arrival_on(rank: int) -> None:
    never, late, whole = (gather(run(rank, fault, "static"))[0] for fault in ("never", "late", ""))
    assert never["fallbacks"] == MICRO_STEPS * late["fallbacks"] // 2, "micro-steps 0 and 1"
    assert never["copies"] == 0
    assert never["fallbacks"] == MICRO_STEPS * LAYERS and never["rho_computed"] == pytest.approx(never["rho_vanilla"])
    assert whole["rho_computed"] == whole["rho_planned"] < late["rho_computed"] < never["rho_computed"]
    assert late["copies"] == whole["copies"]


def test_no_rank_waits_for_a_slow_link_or_a_slow_writer(rank: int) -> None:
    link, writing = (run(rank, fault, "static") for fault in ("link", "writing"))
    assert 0 < link["fallbacks"] <= writing["fallbacks"] == MICRO_STEPS * LAYERS
    assert sum(gather(writing["copies"])) == 0


def test_a_shared_memory_error_is_raised_on_all_ranks_and_the_peer_path_still_works(rank: int) -> None:
    """One node has too little shared memory."""

    def too_little(experts: Any, segment_bytes: Any) -> Any:
        raise foremoe.InputError("too little memory")

    class Refuses:
        create = staticmethod(too_little if rank == 2 else HostArena.create)
        open = staticmethod(HostArena.open)

    ep, _, trained = begin(dtype=torch.float32, path="host", ranks_per_node=2)
    with mock.patch.object(node_memory, "HostArena", Refuses):
        said = refusal(lambda: run_phase(ep, trained, 5, 1))
    assert said.startswith("InputError: path: rank 2 cannot share memory") and "too little memory" in said
    ep.arguments = dataclasses.replace(ep.arguments, path="peer")
    assert sum(gather(run_phase(ep, trained, 5, 1).figures()["copies"])) > 0


def test_shared_memory_is_unlinked_while_in_use_and_after_an_error(rank: int) -> None:
    ep = spread(make_model(torch.float32), path="host", ranks_per_node=2)
    with contextlib.suppress(KeyError), ep.plan(draw_routes(rank, 1, 5)):
        dist.barrier()
        assert ep._memory.num_bytes > 0
        assert not names_in_shared_memory()
        raise KeyError
    assert not names_in_shared_memory()


def train_and_fail(rank: int, folder: str, fails: str) -> None:
    begin_rank(rank, matrix.RANKS, folder)
    layer = matrix.Layer()
    ep = ExpertParallel([layer], path="host")
    gradient, weights = torch.ones_like(layer.matrix), layer.matrix.detach().clone()
    layer.matrix.grad = gradient
    agree = HostPath.agree

    def agree_then_fail(self: Any, micro_step: int) -> Any:
        at_homes = agree(self, micro_step)
        if fails == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if fails == "damaged":  # after the checksum was verified
            for expert in self._arena._places._of:
                self._arena._places.segments(expert)[0][0] ^= 1 << rank
            dist.barrier()
        return at_homes

    routes = matrix.routes_of(rank)
    try:
        with mock.patch.object(HostPath, "agree", agree_then_fail), ep.plan(routes) as phase, phase.micro_step(0):
            rows = len(routes[0])
            layer.execute(torch.ones(rows, matrix.HIDDEN), layer.ids, torch.ones(rows, 1)).sum().backward()
    except RuntimeError as error:
        same = layer.matrix.grad is gradient and bool((gradient == 1).all()) and torch.equal(layer.matrix, weights)
        pathlib.Path(folder, f"{rank}").write_text(f"{'as before' if same else 'changed'}: {error}")


@pytest.mark.parametrize("fails", ["damaged", "killed"])
def test_a_failure_after_the_agreement_ends_all_ranks_and_applies_no_gradients(fails: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            rank_starter().Process(target=train_and_fail, args=(rank, folder, fails)) for rank in range(matrix.RANKS)
        ]
        for process in processes:
            process.start()
        started = {int(process.pid or 0) for process in processes}
        for process in processes:
            process.join(200)
        alive = [process.is_alive() for process in processes]
        for process in processes:
            process.kill()
        assert not any(alive)
        said = {int(path.name): path.read_text() for path in pathlib.Path(folder).glob("[0-9]")}
        left = names_in_shared_memory(started)
    # Only rank 1 has a guest.
    assert sorted(said) == ([0, 1] if fails == "damaged" else [0])
    assert all(of.startswith("as before: ") for of in said.values()), said
    assert fails == "killed" or "was damaged in the node's arena after it had been checked" in said[1]
    assert not left
