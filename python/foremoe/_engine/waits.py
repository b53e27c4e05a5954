"""Seconds that a rank waited for copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Waits:
    """Sums waits. On CUDA, the host only makes the stream wait. Events before and after each wait measure its duration
    and are read later. The measured values have not been checked on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_host = 0.0
        self._of_stream: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Measures its body, in which the host waits or makes the current stream wait."""
        if self._device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._of_host += time.perf_counter() - begin
            return
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record(stream)
        yield
        after.record(stream)
        self._of_stream.append((before, after))

    @property
    def seconds(self) -> float:
        """Returns the sum. On CUDA, waits for the stream, so call it after the step."""
        for _, after in self._of_stream:  # events may be on several streams
            after.synchronize()
        of_stream: float = sum(before.elapsed_time(after) for before, after in self._of_stream)
        return self._of_host + of_stream / 1e3
