"""A step that is spoilt is seen: what test_equal.py compares would differ if the executor did something else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from training import on_all_ranks, run_step

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
    """Guest slots hold something else than the weights that came."""
    wait = Guests.wait

    def overwritten(self: Any, turn: int) -> None:
        wait(self, turn)
        for buffers in self._buffers:
            for buffer in buffers.values():
                buffer.fill_(0.1)

    with mock.patch.object(Guests, "wait", overwritten):
        yield


@contextlib.contextmanager
def turn_rows(ep: Any, phase: Any) -> Iterator[None]:
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
    """The routes of one micro-step are replayed under the plan of another."""
    for i, layer in enumerate(ep.layers):
        own = [routes[:, i].long() for routes in phase.routes.own]

        def swapped(ids: Any, replay: Any = layer.replay, own: Any = own) -> None:
            replay(None if ids is None else next(own[m - 1] for m, of in enumerate(own) if of.equal(ids.long())))

        layer.replay = swapped
    yield


SPOILT = [drop_guests_gradients, drop_copies, turn_rows]
REFUSED = [replay_nothing, swap_micro_steps]


def work(rank: int) -> dict[str, Any]:
    found = {}
    for path in ("peer", "host"):
        for spoil in SPOILT:
            result = run_step(rank, torch.float64, spoil=spoil, path=path)
            found[f"{spoil.__name__}, {path}"] = result["difference"]
        for spoil in REFUSED:
            try:
                run_step(rank, torch.float64, spoil=spoil, path=path)
            except RuntimeError as error:
                found[f"{spoil.__name__}, {path}"] = str(error)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


@pytest.mark.parametrize("path", ["peer", "host"])
@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_step_that_is_spoilt_is_seen(found: list[dict[str, Any]], spoil: Any, path: str) -> None:
    assert max(of[f"{spoil.__name__}, {path}"] for of in found) > 1e-3


@pytest.mark.parametrize("path", ["peer", "host"])
@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_other_experts_than_recorded_are_refused(found: list[dict[str, Any]], spoil: Any, path: str) -> None:
    for of in found:
        said = of[f"{spoil.__name__}, {path}"]
        assert said.startswith("model.layers.0.mlp: it ran other experts than its routes say"), said
