"""The choice of a run's plans by modelled seconds, and phases that no plan makes faster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from processes import gather
from refusals import refusal
from test_shares import draw, make_shares, saved, watched
from training import LAYERS, begin, expected_gradients, gradient_error, run_phase

import foremoe
from foremoe import _core
from foremoe._engine.arguments import PlanningArguments
from foremoe._engine.choice import Choice, cluster_named, known_choice
from foremoe.torch.descriptions import descriptions_of

MODEL = {
    "moe_layers": 6, "experts": 16, "top_k": 2, "hidden": 4096, "intermediate": 4096, "vocabulary": 1, "heads": 32,
    "head_width": 128,
}  # fmt: skip
COST = {"cluster": "h100", "model": MODEL, "dispatch": "row", "path": "peer"}


def messages(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records]


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("foremoe")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield records
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_a_cluster_is_detected_by_the_devices_name() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100", "NVIDIA H200": "h200", "NVIDIA H20": "h20",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GB200": "gb200", "NVIDIA B200": None, "NVIDIA A10": None,
        "NVIDIA H20Z": None, "Tesla V100-SXM2-16GB": None, "": None,
    }  # fmt: skip
    assert {name: cluster_named(name) for name in names} == names


def arguments(**given: Any) -> PlanningArguments:
    return PlanningArguments(
        **{"guest_slots": 1, "residency": None, "policy": "foremoe", "depth": 2, "ranks_per_node": 2, "threads": 1}
        | {"options": {}} | given
    )  # fmt: skip


def many(seed: int = 1, tokens: int = 1 << 15) -> foremoe.Load:
    """Return a load whose balance is worth its copies. draw() returns one whose balance is not."""
    return foremoe.synthesize_load(
        layers=6, experts=16, top_k=2, ranks=4, ranks_per_node=2, micro_steps=4, tokens_per_rank=tokens,
        sequences_per_rank=1, group_spread=1, seed=seed,
    )  # fmt: skip


def shares_of(rank: int, given: PlanningArguments, **options: Any) -> Any:
    shares = make_shares(**given.planning(), **options)
    shares._choice = Choice(given, COST, rank)
    return shares


def own_options(plan: foremoe.Plan) -> dict[str, Any]:
    names = "residency", "prefer", "copy-price", "free-copies"
    return {name.replace("-", "_"): plan.options[name] for name in names if name in plan.options}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("residency", [None, "auto"])
def test_one_rank_chooses_and_the_plans_options_reproduce_its_plans(
    rank: int, residency: str | None, small: bool
) -> None:
    """Ranks choose from different loads here, so that equal choices show that one rank's is used."""
    shares = shares_of(rank, arguments(residency=residency))
    own = shares._choice.make
    shares._choice.make = lambda load, planning: own(many(tokens=(32 - rank) << 10), planning)
    with watched() if not small else contextlib.nullcontext(), logged() as records:
        first, second = (shares.start_plan(load).finish() for load in (many(), many(2)))
    chosen = gather(own_options(first))
    assert chosen == [own_options(second)] * 4
    expected = own(many(), shares._planning)
    assert chosen[0] == expected and expected["prefer"] in ("time", "links", "balance")
    assert residency == "auto" or (expected["residency"], expected["prefer"]) == ("resident", "time")
    for plan, load in ((first, many()), (second, many(2))):
        assert saved(plan) == saved(foremoe.plan(load, **chosen[0]))
    said = [text for text in messages(records) if "plans of this run" in text]
    assert gather(len(said)) == [1, 0, 0, 0]
    if rank == 0:
        assert "no plan" in said[0] and f"residency='{chosen[0]['residency']}'" in said[0]
    shares.close()


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("phase", ["policy_update", "recompute"])
def test_a_phase_that_no_plan_makes_faster_runs_without_one(rank: int, small: bool, phase: str) -> None:
    shares, few = shares_of(rank, arguments()), draw(6)
    with watched() if not small else contextlib.nullcontext(), logged() as records:
        planned, without, again = (shares.start_plan(load, phase) for load in (many(), few, many()))
        plans = [of.finish() for of in (planned, without, again)]
    chosen = own_options(plans[0])
    assert saved(plans[0]) == saved(plans[2]) == saved(foremoe.plan(many(), **chosen))
    assert saved(plans[1]) == saved(foremoe.plan(few, residency=chosen["residency"], stages="none"))
    homes = plans[1].slot_tokens[..., :4]
    assert plans[1].guest_slots == 1 and homes.sum() == few.array.sum(), "all rows are at home"
    for of, load, pays in ((planned, many(), True), (without, few, False)):
        seconds = of.seconds()
        assert gather(seconds) == [seconds] * 4 and (seconds[0] < seconds[1]) == pays
        vanilla = foremoe.plan(load, "vanilla", guest_slots=1)
        alone = foremoe.evaluate_plan(vanilla, load, phase=phase, **COST).figures["phases"][0]
        assert seconds[1] == pytest.approx(alone["seconds"], rel=1e-6)
    said = [text for text in messages(records) if text.endswith("it has none")]
    assert gather(len(said)) == [1, 0, 0, 0]
    shares.close()


def test_planning_time_counts_against_a_plan(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = shares_of(rank, arguments())
    assert shares.start_plan(many()).finish().options["stages"] == "BLPT"
    monkeypatch.setattr(_core, "_estimated_planning_seconds", lambda plan, load: 9.0)
    assert shares.start_plan(many()).finish().options["stages"] == ""
    shares.close()


FIXED: list[dict[str, Any]] = [
    {"residency": "resident"},
    {"residency": "shared"},
    {"options": {"prefer": "balance"}},
    {"policy": "static", "residency": "static"},
]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("given", FIXED, ids=str)
def test_a_fixed_choice_is_executed_with_one_warning(rank: int, given: dict[str, Any], small: bool) -> None:
    fixed, loads = arguments(**given), [many(), draw(6), draw(6, seed=9)]
    shares = shares_of(rank, fixed)
    with watched() if not small else contextlib.nullcontext(), logged() as records:
        plans = [shares.start_plan(load).finish() for load in loads]
    for plan, load in zip(plans, loads, strict=True):
        assert saved(plan) == saved(foremoe.plan(load, **fixed.planning()))
    warned = [record for record in records if record.levelno == logging.WARNING]
    assert gather(len(warned)) == [1, 0, 0, 0] and len(records) == len(warned)
    shares.close()


def test_no_plan_at_all_can_be_chosen_and_is_kept(rank: int) -> None:
    shares = shares_of(rank, arguments(residency="auto"))
    for load in (draw(6), many()):
        plan = shares.start_plan(load).finish()
        assert saved(plan) == saved(foremoe.plan(load, residency="resident", stages="none"))
    shares.close()


def test_an_error_of_the_choice_is_raised_on_all_ranks(rank: int) -> None:
    shares = shares_of(rank, arguments())
    shares._choice._cost = COST | {"model": MODEL | {"experts": 8}}
    said = refusal(shares.start_plan(many()).finish)
    assert gather(said) == [said] * 4 and said.startswith("InputError: model")
    shares.close()


def test_nothing_changes_under_an_unknown_cluster(rank: int) -> None:
    nothing = foremoe.Load.from_array(np.zeros((1, 6, 4, 16), np.int64), top_k=2, ranks_per_node=2, name="counts")
    plan = foremoe.plan(nothing)

    def choice(cluster: str | None = None, models: Any = (MODEL,), **given: Any) -> Choice | None:
        return known_choice(arguments(**given), models, plan, nothing, cluster=cluster, rank=rank)

    assert choice() is None
    assert choice("h100", [{"name": "x"}]) is None, "a detected cluster without a description of the model"
    assert choice("h100", [{"name": "x"}, MODEL]) is not None
    assert choice("h100", guest_slots=1, residency="auto") is not None
    said = refusal(lambda: choice(residency="auto"))
    assert said == "InputError: residency: auto needs a known cluster: give cluster=NAME or FILE"
    assert choice(model={"name": "x"}) is None, "a model is not read without a cluster"
    assert "model" in refusal(lambda: known_choice(
        arguments(cluster="h100", model={"name": "x"}), [MODEL], plan, nothing, cluster=None, rank=rank
    ))  # fmt: skip
    ep, _, trained = begin()
    with logged() as records:
        phase = run_phase(ep, trained)
    assert saved(phase.plan) == saved(foremoe.plan(phase._load, guest_slots=1)) and not records
    ep.detach()


@pytest.mark.parametrize("residency", [None, "auto"])
def test_phases_without_a_plan_have_the_gradients_of_one_process(rank: int, residency: str | None) -> None:
    ep, model, trained = begin(cluster="h100", residency=residency)
    for phase in (run_phase(ep, trained, previous=None) for _ in range(2)):
        assert phase.plan.residency == "resident" and phase.plan.guest_slots == 1
        assert phase.figures()["copies"] == 0 and phase.plan.options["stages"] == ""
        own = phase.plan.slot_tokens[..., : 16 // 4].sum()
        assert own == phase._load.array.sum()
        assert gradient_error(ep, model, expected_gradients()) < 1e-10
        model.zero_grad()
    ep.detach()


def test_the_model_of_spread_layers_is_described_by_their_configuration(rank: int) -> None:
    ep, model, _ = begin(cluster="h100")
    cost = ep._session.shares._choice._cost
    assert (cost["model"]["model_type"], cost["model"]["hidden_size"]) == ("qwen3_moe", 32)
    assert (cost["dispatch"], cost["bytes_per_parameter"], cost["prefetch_depth"]) == ("row", 8, 2)
    model.config.model_type = "unknown"
    described = descriptions_of(ep.layers)
    assert described[1]["hidden"] == 32 and described[1]["moe_layers"] == LAYERS and described[1]["intermediate"] == 16
    ep.detach()
