"""How long a call takes: what benchmarks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(call: Callable[[], object], runs: int) -> float:
    """Of one call, after one that warms it up."""
    call()
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
