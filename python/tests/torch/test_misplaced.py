"""Routes of other rows, rows without a route that the loss reads, and calls that only some ranks make."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
from processes import RANKS
from refusals import refusal
from training import EXPERTS, draw_batches, draw_routes, loss_of, make_model, wrong_routes

from foremoe.hf import expert_layers
from foremoe.torch import ExpertParallel
from foremoe.torch.misplaced import Sample, judge

F64 = torch.float64
MICRO_STEPS, SEED = 2, 9


def recorded(rank: int) -> list[Any]:
    """Return the routers' choices. The last token of a sequence has no route."""
    batches = draw_batches(rank, MICRO_STEPS, SEED)
    return wrong_routes(F64, batches, draw_routes(rank, MICRO_STEPS, SEED), 0.0, rank)


def in_rows(change: Any) -> Any:
    """Permute the rows that have a route by change: (int64 [rows], generator) → int64 [rows]."""

    def changed(rank: int) -> list[Any]:
        found, random = recorded(rank), torch.Generator().manual_seed(rank)
        for of in found:
            rows = of[:, :-1].flatten(0, 1)
            of[:, :-1] = rows[change(torch.arange(len(rows)), random)].view_as(of[:, :-1])
        return found

    return changed


def shuffled(rows: Any, random: Any) -> Any:
    return rows[torch.randperm(len(rows), generator=random)]


OTHER_ROWS: dict[str, tuple[Any, str]] = {
    "another rank": (lambda rank: recorded((rank + 1) % RANKS), "no better than in any other order of rows"),
    "one rank shuffles": (
        lambda rank: (in_rows(shuffled) if rank == 2 else recorded)(rank),
        "recorded experts of rank 2 agree with what routers would choose no better",
    ),
    "shuffled": (in_rows(shuffled), "recorded experts agree with what routers would choose no better"),
    "transposed": (
        in_rows(lambda rows, _: rows.view(2, -1).T.reshape(-1)),
        "recorded experts agree with what routers would choose no better",
    ),
    "shifted": (in_rows(lambda rows, _: rows.roll(1)), "that are recorded for rows +1 beside them"),
    "other micro-step": (
        lambda rank: recorded(rank)[::-1],
        "routers would choose the experts that are recorded for micro-step",
    ),
    "layers reversed": (
        lambda rank: [of.flip(2) for of in recorded(rank)],
        "that are recorded for layer 2, in layer 0",
    ),
    "layers shifted": (
        lambda rank: [of.roll(1, 2) for of in recorded(rank)],
        "that are recorded for layer 1, in layer 0",
    ),
}


def run(
    rank: int,
    routes: list[Any],
    *,
    noise: float = 0.0,
    every_row: bool = False,
    phase: str = "policy_update",
    **options: Any,
) -> dict[str, Any]:
    """Return a phase's figures. `noise` is added to the routers' weights after their choices were recorded."""
    model = make_model(F64)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in expert_layers(model):
            weight = layer.router.weight
            weight += noise * weight.std() * torch.randn(weight.shape, dtype=weight.dtype, generator=random)
    ep = ExpertParallel(expert_layers(model))
    ep.wrap(model)
    with ep.plan(routes, phase, **options) as planned:
        for m, batch in enumerate(draw_batches(rank, MICRO_STEPS, SEED)):
            with planned.micro_step(m), torch.set_grad_enabled(phase == "policy_update"):
                loss = loss_of(model, batch, every_row)
                if phase == "policy_update":
                    loss.backward()
        planned.drain()
    figures = planned.figures()
    ep.detach()
    return {name: figures[name] for name in ("mismatch", "dropped", "dropped_read")}


class MessageCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def without_prefix(rank: int) -> list[Any]:
    found = recorded(rank)
    for of in found:
        of[0, : 3 + rank] = -1
    return found


ALONE: dict[str, tuple[Any, Any, str]] = {
    # Rank 1's call, the other ranks' simultaneous call, and the expected message.
    "state": (
        lambda ep, model: ep.whole_state_dict(model),
        lambda ep, model: replan(ep),
        "whole_state_dict() on rank 1, plan() on",
    ),
    "clip": (
        lambda ep, model: ep.clip_grad_norm_(1.0),
        lambda ep, model: replan(ep),
        "clip_grad_norm_() on rank 1, plan() on",
    ),
    "forward": (
        lambda ep, model: model(draw_batches(1, 1, 1)[0]),
        lambda ep, model: ep.clip_grad_norm_(1.0),
        "a forward without a plan on rank 1, clip_grad_norm_() on",
    ),
    "in a phase": (
        lambda ep, model: ep.whole_state_dict(model),
        lambda ep, model: (model(draw_batches(0, MICRO_STEPS, SEED)[0]), None)[1],
        "whole_state_dict() on ",
    ),
}


def replan(ep: Any) -> Any:
    return ep.plan(recorded(ep.rank))


@pytest.mark.parametrize("case", ALONE)
def test_a_call_that_one_rank_makes_alone_is_named_on_all_ranks(rank: int, case: str) -> None:
    odd, others, words = ALONE[case]
    model = make_model(F64)
    ep = ExpertParallel(expert_layers(model))
    ep.wrap(model)

    def call() -> None:
        if case != "in a phase":
            (odd if rank == 1 else others)(ep, model)
            return
        with ep.plan(recorded(rank)) as phase:
            if rank == 1:
                odd(ep, model)
            with phase.micro_step(0):
                others(ep, model)

    since = time.monotonic()
    said = refusal(call)
    assert time.monotonic() - since < 60
    assert "ranks make different collective calls" in said and words in said and "died" not in said, said


@pytest.mark.parametrize("case", OTHER_ROWS)
def test_routes_of_other_rows_end_the_phase_on_all_ranks(rank: int, case: str) -> None:
    routes, words = OTHER_ROWS[case]
    said = refusal(lambda: run(rank, routes(rank)))
    assert said.startswith("InputError: routes: ") and words in said, said


def test_routes_of_other_rows_end_a_recompute_phase_unless_mismatches_are_replayed(rank: int) -> None:
    others = OTHER_ROWS["shuffled"][0](rank)
    said = refusal(lambda: run(rank, others, phase="recompute"))
    assert "no better than in any other order of rows" in said
    run(rank, others, on_mismatch="replay")


def test_routes_of_earlier_weights_are_accepted(rank: int) -> None:
    assert run(rank, recorded(rank))["mismatch"] == 0
    assert run(rank, recorded(rank), noise=1.0)["mismatch"] > 0.6


def test_constant_routes_are_rejected_when_they_are_read(rank: int) -> None:
    constant = [torch.arange(of.shape[-1]).expand_as(of).clone() for of in recorded(rank)]
    said = refusal(lambda: run(rank, constant if rank == 1 else recorded(rank)))
    told = "" if rank == 1 else "rank 1 refused: "
    assert f"{told}routes[0]: all rows have the same experts in every layer" in said
    assert "routes[0]" in refusal(lambda: run(rank, [torch.zeros_like(of) for of in recorded(rank)]))


def test_rows_without_a_route_that_the_loss_reads_are_counted_and_cause_a_warning(rank: int) -> None:
    heard = MessageCollector()
    logging.getLogger("foremoe").addHandler(heard)

    def figures(routes: list[Any], *, warns: bool, **options: Any) -> tuple[float, float]:
        heard.words.clear()
        found = run(rank, routes, **options)
        assert len(heard.words) == (warns and rank == 0)
        assert all("unrouted='home'" in words for words in heard.words)
        return found["dropped"], found["dropped_read"]

    prefix = sum(3 + of for of in range(RANKS)) / (RANKS * 24)
    assert figures(recorded(rank), warns=False) == (1 / 12, 0)
    expected = pytest.approx(1 / 12 + prefix), pytest.approx(prefix / (1 / 12 + prefix))
    assert figures(without_prefix(rank), warns=True) == expected
    assert figures(recorded(rank), warns=True, every_row=True)[1] == 1
    assert figures(without_prefix(rank), warns=False, unrouted="home", every_row=True) == (0, 0)


def draw_samples(seed: int, kept: float) -> Any:
    """Draw Sample.numbers() of two ranks, for 2 micro-steps of 16 rows, 2 layers, top 2 of 8 experts. A fraction `kept`
    of the routes equals the router's choice; the rest are redrawn by popularity. Equal tokens choose equal experts."""
    random = np.random.default_rng(seed)
    popularity = random.random((2, 8)) ** 2 + 0.05
    numbers = []

    def draw() -> Any:
        return np.stack([random.choice(8, 2, replace=False, p=of / of.sum()) for of in popularity])

    of_token = [draw() for _ in range(64)]
    for _ in range(2):
        own = [np.stack([of_token[t] for t in random.integers(0, 64, 16)]) for _ in range(2)]
        routes = [np.array([r if random.random() < kept else draw() for r in of]) for of in own]
        sample = Sample([torch.from_numpy(of).int() for of in routes], 8, torch.device("cpu"))
        for m, of in enumerate(own):
            for layer in range(2):
                sample.note(m, layer, sample.rows[m], torch.from_numpy(of[:, layer]))
        numbers.append(sample.numbers())
    return np.stack(numbers)


def test_samples_of_matching_routes_are_rarely_rejected_and_most_others_are() -> None:
    """Each sample has 16 rows per micro-step, like the other tests."""
    samples = 300
    assert sum(bool(judge(draw_samples(seed, 0.4))) for seed in range(samples)) <= 0.01 * samples
    assert sum(bool(judge(draw_samples(seed, 0.0))) for seed in range(samples)) >= 0.7 * samples


def test_each_micro_step_of_a_large_sample_is_judged_separately() -> None:
    random = np.random.default_rng(1)
    own = [np.argsort(random.random((500, 3, EXPERTS)))[..., :2] for _ in range(2)]
    routes = [own[0], own[1][random.permutation(500)]]
    sample = Sample([torch.from_numpy(of).int() for of in routes], EXPERTS, torch.device("cpu"))
    for m, of in enumerate(own):
        for layer in range(3):
            sample.note(m, layer, sample.rows[m], torch.from_numpy(of[:, layer]))
    said = judge(sample.numbers()[None])
    assert said.startswith("recorded experts of micro-step 1 of rank 0 agree with what routers would choose no better")
