"""Small inputs that all tests share."""

from __future__ import annotations

import pathlib

import numpy as np
import numpy.typing as npt
import pytest

import foremoe

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"


def draw_load(
    seed: int = 0, *, micro_steps: int = 3, layers: int = 2, ranks: int = 4, experts: int = 16
) -> foremoe.Load:
    """Skewed counts, with experts that nobody chose."""
    random = np.random.default_rng(seed)
    popularity = random.dirichlet(np.full(experts, 0.3), (micro_steps, layers, 1))
    counts = random.poisson(200 * np.broadcast_to(popularity, (micro_steps, layers, ranks, experts)))
    return foremoe.Load.from_array(counts.astype(np.int64), top_k=1, ranks_per_node=2)


def draw_routes(
    seed: int = 0, *, tokens: int = 40, layers: int = 2, top_k: int = 2, experts: int = 8
) -> npt.NDArray[np.uint8]:
    """uint8 [tokens, layers, top_k], distinct in a row; a tenth of the tokens has no route."""
    random = np.random.default_rng(seed)
    routes = random.random((tokens, layers, experts)).argsort(-1)[..., :top_k].astype(np.uint8)
    routes[random.random(tokens) < 0.1] = 255
    return np.ascontiguousarray(routes)


@pytest.fixture
def load() -> foremoe.Load:
    return draw_load()


@pytest.fixture
def data() -> pathlib.Path:
    return DATA
