"""Measured waits for copies: on the host and, with fake CUDA events, on a stream."""

from __future__ import annotations

import time
import types
from typing import Any

import pytest
import torch

from foremoe._engine.waits import Waits


def test_on_a_cpu_the_host_wait_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", iter([10.0, 10.5, 20.0, 22.0]).__next__)
    waits = Waits(torch.device("cpu"))
    for _ in range(2):
        with waits.one():
            pass
    assert waits.seconds == 2.5


def test_on_cuda_the_idle_time_of_the_stream_is_measured_without_synchronizing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = types.SimpleNamespace(milliseconds=0.0)
    synchronised = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, of: Any) -> None:
            assert of is stream
            self.at = stream.milliseconds

        def synchronize(self) -> None:
            synchronised.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            assert end.at <= synchronised[-1]
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    waits = Waits(torch.device("cuda", 0))
    for waited in (250.0, 0.0, 500.0):
        stream.milliseconds += 1000  # other work
        with waits.one():
            stream.milliseconds += waited
    assert synchronised == []
    assert waits.seconds == 0.75
