"""Shared memory of a node's ranks: the copies that readers accept, and the memory's lifetime."""

from __future__ import annotations

import dataclasses
import gc
import mmap
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import gather
from training import begin, expected_gradients, gradient_error, make_model, run_phase, spread

import foremoe
from foremoe._core import HostArena
from foremoe._engine.node_memory import NodeMemory

EXPERT_BYTES = [64, 6]
PLACES = 2


def segments(value: int) -> list[np.ndarray]:
    return [np.full(size, value, np.uint8) for size in EXPERT_BYTES]


def test_a_reader_copies_only_the_published_version_of_an_expert() -> None:
    arena = HostArena.create(PLACES, EXPERT_BYTES)
    reader = HostArena.open(arena.name, PLACES, EXPERT_BYTES)
    arena.remove_name()
    place, to = 1, segments(0)
    assert reader.version(place) == 0
    assert not reader.copy(place, 7, to)
    arena.publish(place, 7, segments(5))
    assert reader.version(place) == 7
    assert reader.is_intact(place, 7)
    assert reader.copy(place, 7, to)
    assert all((a == b).all() for a, b in zip(to, segments(5), strict=True))
    assert not reader.is_intact(place, 8)  # from another phase
    assert not reader.copy(place, 8, to)
    arena.segments(place)[1][3] ^= 1
    assert not reader.is_intact(place, 7)
    assert not reader.copy(place, 7, to)


def test_invalid_arguments_of_an_arena_are_rejected_by_name() -> None:
    arena = HostArena.create(PLACES, EXPERT_BYTES)
    for call, field in [
        (lambda: HostArena.create(0, EXPERT_BYTES), "places"),
        (lambda: HostArena.create(PLACES, [7]), "segment_bytes"),
        (lambda: arena.version(PLACES), "place"),
        (lambda: arena.version(-1), "place"),
        (lambda: arena.publish(0, 0, segments(1)), "version"),
        (lambda: arena.publish(0, 1, segments(1)[:1]), "segments"),
        (lambda: arena.copy(0, 1, segments(1)[::-1]), "segments"),
    ]:
        with pytest.raises(foremoe.InputError) as raised:
            call()
        assert raised.value.field == field
    with pytest.raises(TypeError):
        arena.copy(0, 1, [s.astype(np.int32) for s in segments(1)])  # a converted temporary would receive the copy
    with pytest.raises(foremoe.InputError, match="there is no such shared memory"):
        HostArena.open("/foremoe-none", PLACES, EXPERT_BYTES)
    with pytest.raises(foremoe.InputError, match="not an arena of these"):
        HostArena.open(arena.name, PLACES - 1, EXPERT_BYTES)


class Driver:
    """A fake CUDA runtime that records pinned memory as (address, bytes), and unpinned addresses."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.let_go: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.let_go.append(address)
        return 0


def test_phases_share_memory_until_one_needs_more(rank: int) -> None:
    """The first two phases need the same memory, and the last needs more."""
    ep, model, trained = begin(path="host", ranks_per_node=2)
    held = []
    for seed, micro_steps in ((5, 1), (5, 1), (6, 1), (7, 4)):
        model.zero_grad()
        phase = run_phase(ep, trained, seed, micro_steps)
        assert gradient_error(ep, model, expected_gradients(seed, micro_steps)) <= 1e-12
        held.append(ep._memory.num_bytes)
        assert sum(gather(phase.figures()["host_copies"])) > 0
    first, second, third, last = held
    assert 0 < first == second <= third < last
    ep.detach()
    assert ep._memory.num_bytes == 0


def test_memory_is_pinned_when_allocated_and_unpinned_once(rank: int) -> None:
    """Creates NodeMemory for device "cuda", with a fake CUDA runtime."""
    model = make_model(torch.float32)
    ep = spread(model, path="host", ranks_per_node=2)
    driver, waits = Driver(), []
    memory = NodeMemory(dataclasses.replace(ep.ranks, device=torch.device("cuda")))
    with (
        mock.patch.object(torch.cuda, "cudart", lambda: driver),
        mock.patch.object(torch.cuda, "check_error", lambda code: None),
        mock.patch.object(torch.cuda, "synchronize", lambda device: waits.append(len(driver.let_go))),
    ):
        for experts in ([(0, 1), (0, 3)], [(1, 2)], [(0, 1), (1, 2)], [(0, 0), (0, 1), (0, 2), (0, 3)]):
            places = memory.take_places(experts, [8192, 6])
            # Experts that an earlier phase published do not count for this phase.
            assert not any(places.is_published(expert) or places.is_intact(expert) for expert in experts)
            dist.barrier(ep.ranks.agreement.group)
            if rank == ep.ranks.node * ep.ranks.ranks_per_node:
                for expert in experts:
                    places.publish(expert, [np.full(size, 1, np.uint8) for size in (8192, 6)])
            dist.barrier(ep.ranks.agreement.group)
            assert all(places.is_intact(expert) for expert in experts)
        (start, size), last = driver.pinned[-1], places.segments((0, 3))[-1]
        assert (len(driver.pinned), len(driver.let_go)) == (2, 1), "four phases; the last needs more places"
        assert start <= places.segments((0, 0))[0].ctypes.data
        assert last.ctypes.data + last.nbytes <= start + size
        assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        with pytest.raises(RuntimeError, match="ranks \\[3\\] share other experts than the first rank of their node"):
            memory.take_places([(0, 2)] if rank == 3 else [(0, 1)], [8192, 6])
        memory.release()
        memory.release()
        assert [address for address, _ in driver.pinned] == driver.let_go
        assert waits == [0, 1], "the device reads it until then"
        places = memory.take_places([(0, 1)], [8192, 6])
        dist.barrier(ep.ranks.agreement.group)
        memory.abandon()
        memory.release()
        gc.collect()
        assert len(driver.pinned) == len(driver.let_go) + 1 and waits == [0, 1], "abandoned memory stays pinned"
        assert places.segments((0, 1))[0].nbytes == 8192
