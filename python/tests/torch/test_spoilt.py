"""Injected faults change the results, so the comparisons of test_equal.py would detect them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from processes import gather
from refusals import refusal
from training import run_step

from foremoe._engine.guests import Guests


@contextlib.contextmanager
def drop_guests_gradients(ep: Any, phase: Any) -> Iterator[None]:
    add = Guests.add_gradients

    def nothing(self: Any, layer: int, gradients: dict[str, Any]) -> None:
        add(self, layer, {name: torch.zeros_like(gradient) for name, gradient in gradients.items()})

    with mock.patch.object(Guests, "add_gradients", nothing):
        yield


@contextlib.contextmanager
def drop_copies(ep: Any, phase: Any) -> Iterator[None]:
    """Overwrites guest slots after their weights have arrived."""
    wait = Guests.wait

    def overwritten(self: Any, turn: int) -> None:
        wait(self, turn)
        for buffers in self._buffers:
            for buffer in buffers.values():
                buffer.fill_(0.1)

    with mock.patch.object(Guests, "wait", overwritten):
        yield


@contextlib.contextmanager
def rotate_rows(ep: Any, phase: Any) -> Iterator[None]:
    prepare = phase._prepare

    def rolled(micro_step: int, at_homes: set[int]) -> Any:
        prepared = prepare(micro_step, at_homes)
        for of in prepared.layers:
            of.planned = dataclasses.replace(of.planned, to_slots=of.planned.to_slots.roll(1))
        return prepared

    with mock.patch.object(phase, "_prepare", rolled):
        yield


@contextlib.contextmanager
def replay_nothing(ep: Any, phase: Any) -> Iterator[None]:
    for layer in ep.layers:
        layer.replay = lambda ids: None
    yield


@contextlib.contextmanager
def swap_micro_steps(ep: Any, phase: Any) -> Iterator[None]:
    """Replays the routes of one micro-step under the plan of another."""
    for i, layer in enumerate(ep.layers):
        own = [routes[:, i].long() for routes in phase.routes.own]

        def swapped(ids: Any, replay: Any = layer.replay, own: Any = own) -> None:
            replay(None if ids is None else next(own[m - 1] for m, of in enumerate(own) if of.equal(ids.long())))

        layer.replay = swapped
    yield


by_each_path = pytest.mark.parametrize("path", ["peer", "host"])


@by_each_path
@pytest.mark.parametrize("spoil", [drop_guests_gradients, drop_copies, rotate_rows])
def test_faults_in_a_step_change_its_results(rank: int, spoil: Any, path: str) -> None:
    result = run_step(rank, torch.float64, spoil=spoil, path=path, may_differ=True)
    assert max(gather(result["difference"])) > 1e-3


@by_each_path
@pytest.mark.parametrize("spoil", [replay_nothing, swap_micro_steps])
def test_experts_that_differ_from_the_recorded_routes_are_rejected(rank: int, spoil: Any, path: str) -> None:
    said = refusal(lambda: run_step(rank, torch.float64, spoil=spoil, path=path))
    assert said.startswith("RuntimeError: model.layers.0.mlp: it ran other experts than its routes say"), said
