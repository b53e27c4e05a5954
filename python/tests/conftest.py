"""Inputs shared by all tests. Skips tests in torch/ that lack a package, and runs them on several ranks."""

from __future__ import annotations

import importlib
import inspect
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import foremoe

# Packages that test files in torch/ need, by prefix of the file name; the first match applies. Tests are skipped if a
# package is missing or too old. torch.nn stands for PyTorch, since `torch` alone may be the tests' own folder.
NEEDS = {
    "test_megatron_capacity": ["torch.nn"],
    "test_megatron": ["torch.nn", "megatron.core"],
    "test_verl_engine": ["torch.nn", "megatron.core", "verl"],
    "test_trl": ["torch.nn", "transformers", "trl"],
    "test_native": ["torch.nn", "transformers>=5.23"],
    "test_plot": ["matplotlib"],
    "test_import_torch": ["torch.nn"],
    "test_kept_weights": ["torch.nn"],
    "test_exchange": ["torch.nn"],
    "test_vllm_policy": ["torch.nn"],
    "test_parallel": ["torch.nn"],
    "test_relays": ["torch.nn"],
    "test_processes": ["torch.nn"],
    "test_waits": ["torch.nn"],
    "test_doctor": ["torch.nn"],
    "test_fake_cuda_megatron": ["torch.nn", "megatron.core"],
    "test_fake_cuda": ["torch.nn"],
    "test_": ["torch.nn", "transformers"],
}
DATA = pathlib.Path(__file__).resolve().parents[2] / "data"


def draw_load(
    seed: int = 0, *, micro_steps: int = 3, layers: int = 2, ranks: int = 4, experts: int = 16
) -> foremoe.Load:
    """Draws skewed counts, in which some experts have no tokens."""
    random = np.random.default_rng(seed)
    popularity = random.dirichlet(np.full(experts, 0.3), (micro_steps, layers, 1))
    counts = random.poisson(200 * np.broadcast_to(popularity, (micro_steps, layers, ranks, experts)))
    return foremoe.Load.from_array(counts.astype(np.int64), top_k=1, ranks_per_node=2)


def draw_routes(
    seed: int = 0, *, tokens: int = 40, layers: int = 2, top_k: int = 2, experts: int = 8
) -> npt.NDArray[np.uint8]:
    """Draws routes, uint8 [tokens, layers, top_k], of distinct experts. About a tenth of the tokens have no route."""
    random = np.random.default_rng(seed)
    routes = random.random((tokens, layers, experts)).argsort(-1)[..., :top_k].astype(np.uint8)
    routes[random.random(tokens) < 0.1] = 255
    return np.ascontiguousarray(routes)


def expect_refused(call: Callable[[], Any], field: str, words: str = "") -> None:
    """Asserts that `call` raises an InputError for `field` whose message contains `words`."""
    with pytest.raises(foremoe.InputError) as raised:
        call()
    assert raised.value.field == field, raised.value
    assert words in str(raised.value)


@pytest.fixture
def load() -> foremoe.Load:
    return draw_load()


@pytest.fixture
def data() -> pathlib.Path:
    return DATA


class _Needing(pytest.Module):
    def collect(self) -> Iterable[Any]:
        for need in next(needs for begin, needs in NEEDS.items() if self.path.name.startswith(begin)):
            name, _, least = need.partition(">=")
            pytest.importorskip(name, least or None)
        return super().collect()


def pytest_pycollect_makemodule(module_path: pathlib.Path, parent: Any) -> pytest.Module:
    kind = _Needing if module_path.parent.name == "torch" else pytest.Module
    made: pytest.Module = kind.from_parent(parent, path=module_path)
    return made


@pytest.fixture(scope="session")
def _started() -> Iterator[list[Any]]:
    """The running group of rank processes, if any."""
    started: list[Any] = []
    yield started
    for ranks in started:
        ranks.stop()


@pytest.fixture(scope="module")
def rank(request: pytest.FixtureRequest, _started: list[Any]) -> Any:
    """Runs the test on every rank and passes it the rank. See torch/processes.py."""
    processes = importlib.import_module("processes")
    prepare = "megatron_training" if request.module.__name__.startswith("test_megatron") else "processes"
    kind = prepare, getattr(request.module, "WORLD", processes.RANKS)
    if not _started or _started[0].kind != kind:
        for ranks in _started:
            ranks.stop()
        _started[:] = [processes.Ranks(*kind)]
    return _started[0]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if "rank" not in arguments:
        return None
    arguments.pop("rank").run(pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    return True
