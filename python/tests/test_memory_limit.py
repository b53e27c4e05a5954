"""Input that needs more memory than is allowed raises InputError with the amount, before it is allocated."""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import foremoe
from foremoe import _decoding


@pytest.fixture
def limited() -> Iterator[None]:
    foremoe.limit_memory(1)
    yield
    foremoe.limit_memory(None)


@pytest.mark.usefixtures("limited")
def test_loads_that_need_too_much_memory_are_refused() -> None:
    with pytest.raises(foremoe.InputError, match=r"load: needs 4503599.6 GB of memory"):
        foremoe.synthesize_load(layers=512, experts=32768, ranks=32768, micro_steps=1024)
    routes = np.zeros((65536, 64, 1), np.uint8)
    trace = foremoe.Trace.from_arrays(routes, np.arange(65537), num_experts=255)
    with pytest.raises(foremoe.InputError, match=r"load: needs 8.6 GB .* available or allowed \(max_memory\)"):
        foremoe.collect(trace, ranks=255, tokens_per_rank=1)
    with pytest.raises(foremoe.InputError, match=r"load: needs 34\.4 GB"):
        foremoe.Load.from_counts(np.ones((1, 65536), np.int64), ranks=65536, top_k=1)


@pytest.mark.usefixtures("limited")
def test_archives_that_inflate_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_decoding, "MOST_DEFLATION", 2**40)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("routed_experts.npy", bytes(1000))
    data = bytearray(archive.getvalue())
    claimed = data.index(b"PK\x01\x02") + 24  # the size in the directory
    data[claimed : claimed + 4] = (2**32 - 2).to_bytes(4, "little")
    with pytest.raises(foremoe.InputError, match=r"routes\.npz: needs 4\.3 GB of memory"):
        list(_decoding.read_members("routes.npz", bytes(data)))


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("options", [{}, {"counts": True, "ranks": 1, "top_k": 1}])
def test_json_whose_lists_need_too_much_memory_is_refused(tmp_path: pathlib.Path, options: Any) -> None:
    path = tmp_path / "responses.json"
    path.write_bytes(b"[" * 40_000_000)  # 2.2 GB of lists
    with pytest.raises(foremoe.InputError, match=r"responses\.json: needs 2\.2 GB of memory"):
        foremoe.import_files(path, **options)


@pytest.mark.parametrize("invalid", [0, -1, float("nan"), float("inf")])
def test_invalid_limits_are_refused(invalid: float) -> None:
    with pytest.raises(foremoe.InputError, match="max_memory: must be a number above 0"):
        foremoe.limit_memory(invalid)


def test_no_limit_raises_that_of_the_system() -> None:
    program = """
import resource, foremoe
given = 3_000_000_000
resource.setrlimit(resource.RLIMIT_DATA, (given, resource.getrlimit(resource.RLIMIT_DATA)[1]))
for gigabytes in (1000, None, 1, None):
    foremoe.limit_memory(gigabytes)
    print(resource.getrlimit(resource.RLIMIT_DATA)[0] - given)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    once, again, lower, last = map(int, ended.stdout.split())
    assert once == again == last == 0 > lower
