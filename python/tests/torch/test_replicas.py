"""Several replicas of the expert-parallel group produce the gradients and optimizer steps of one process.

Eight processes, spawned once, run all checks: two replicas of four ranks, then two independent pairs of replicas of two
ranks each, as under tensor parallelism.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import LATER, begin_rank, results_of
from refusals import refusal
from training import (
    draw_batches,
    draw_routes,
    loss_of,
    make_eager_model,
    make_model,
    reference,
    spread,
    whole_gradients,
    worst_difference,
)

WORLD = 8
STEPS = 5
MAX_NORM = 0.5
PATIENCE = 8.0  # seconds
WRAPPERS = (None, "ddp", "fsdp2")
# ranks in the default group, by [group][replica][rank]
LAYOUTS: dict[str, list[list[list[int]]]] = {
    "2 x 4": [[[0, 2, 4, 6], [1, 3, 5, 7]]],
    "2 x 2": [[[0, 1], [2, 3]], [[4, 6], [5, 7]]],
}


def micro_steps_of(replica: int, place: int, wrapper: str | bool | None) -> int:
    """Return a rank's number of micro-steps. The number may differ between replicas, which plan independently."""
    return 2 if wrapper is not None or (replica, place) == (0, 0) else 1


class Place:
    """This rank's process groups and indices in a layout."""

    def __init__(self, layout: str, rank: int) -> None:
        for which, replicas in enumerate(LAYOUTS[layout]):
            for replica, ranks in enumerate(replicas):
                group = dist.new_group(ranks)
                if rank in ranks:
                    self.group, self.which, self.replica, self.rank = group, which, replica, ranks.index(rank)
        for replicas in LAYOUTS[layout]:
            for same in zip(*replicas, strict=True):
                group = dist.new_group(list(same))
                if rank in same:
                    self.replicas = group
        self.size = len(LAYOUTS[layout][0][0])


def make_optimizer(groups: list[Any]) -> Any:
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-2, eps=1e-3, foreach=True)


class Trainer:
    def __init__(self, place: Place, wrapper: str | None) -> None:
        self.place, self.wrapper = place, wrapper
        self.model = make_model(torch.float64, place.which)
        self.ep = spread(self.model, place.group, replicate_group=place.replicas, ranks_per_node=1)
        self.trained = self.ep.wrap(self.model, wrapper)
        dense = self.ep.dense_parameters()
        shards = [p for p in dense if hasattr(p, "to_local")]
        whole = [p for p in dense if not hasattr(p, "to_local")]
        self.optimizer = make_optimizer([shards, whole, self.ep.expert_parameters()])

    def gradients(self, seed: int) -> None:
        place, self.norm = self.place, None
        of = 10 * place.replica + place.rank
        micro_steps = micro_steps_of(place.replica, place.rank, self.wrapper)
        batches = draw_batches(of, micro_steps, seed)
        with self.ep.plan(draw_routes(of, micro_steps, seed)) as phase:
            for m in phase.micro_steps:
                if m >= len(batches):
                    phase.idle(m)
                    continue
                with phase.micro_step(m):
                    loss_of(self.trained, batches[m]).backward()
            phase.drain()

    def step(self, seed: int) -> float:
        self.optimizer.zero_grad()
        self.gradients(seed)
        norm = float(self.ep.clip_grad_norm_(MAX_NORM))
        self.optimizer.step()
        return norm


def train(place: Place, wrapper: str | None, folder: str) -> dict[str, Any]:
    """Train for five steps. The last two run in a new trainer that resumes from a saved file."""
    of = Trainer(place, wrapper)
    of.gradients(100)
    found: dict[str, Any] = {"gradients": whole_gradients(of.ep, of.model)}
    found["norms"] = [of.step(100 + i) for i in range(3)]
    state = {
        "model": of.ep.whole_state_dict(of.trained, rank0_only=True),
        "optimizer": of.ep.whole_optimizer_state(of.optimizer, rank0_only=True),
    }
    found["holds the state"] = [len(part) > 0 for part in state.values()]
    file = f"{folder}/{place.size} {place.which} {wrapper}.pt"
    if state["model"]:
        torch.save(state, file)
    dist.barrier()
    again = Trainer(place, None if wrapper == "ddp" else wrapper)
    state = torch.load(file)
    again.ep.load_whole_state_dict(again.model, state["model"])
    again.ep.load_whole_optimizer_state(again.optimizer, state["optimizer"])
    again.wrapper = wrapper
    found["norms"] += [again.step(100 + i) for i in range(3, STEPS)]
    found["weights"] = again.ep.whole_state_dict(again.trained)
    return found


def train_without_phase(place: Place, wrapper: str) -> dict[str, Any]:
    of = Trainer(place, wrapper)
    loss_of(of.trained, draw_batches(10 * place.replica + place.rank, 1, 7)[0]).backward()
    return whole_gradients(of.ep, of.model)


def save(place: Place, rank: int, folder: str) -> list[Any]:
    """Save a model. Its files contain one replica's experts and are complete on all ranks when the call returns."""
    of = Trainer(place, None)
    of.ep.save_pretrained(of.model, f"{folder}/saved {place.which}")
    loaded = type(of.model).from_pretrained(f"{folder}/saved {place.which}", dtype=torch.float64).state_dict()
    whole = make_model(torch.float64, place.which).state_dict()
    return [all(torch.equal(loaded[name], whole[name]) for name in whole)]


def drift(place: Place) -> str:
    """Change the experts of replica 1 and return the refusal."""
    of = Trainer(place, None)
    with torch.no_grad():
        of.ep.expert_parameters()[1].mul_(1 + 1e-6 * place.replica)
    return refusal(lambda: of.ep.plan(draw_routes(place.rank, 1, 3)))


def fail(place: Place, rank: int) -> str:
    """Fail on rank 0 before its backward, while the other replica's ranks wait for it in drain()."""
    of = Trainer(place, None)
    (batch,) = draw_batches(rank, 1, 3)

    def run() -> None:
        with of.ep.plan(draw_routes(rank, 1, 3)) as phase:
            with phase.micro_step(0):
                loss = loss_of(of.trained, batch)
                if rank == 0:
                    raise ValueError("planted")
                loss.backward()
            phase.drain()

    since = time.monotonic()
    words = refusal(run)
    if rank == 0:
        time.sleep(PATIENCE)  # the exit of this process would close connections that other ranks wait on
    return words if time.monotonic() < since + PATIENCE or rank == 0 else f"too late: {words}"


def work(rank: int, folder: str) -> None:
    begin_rank(rank, WORLD, folder)
    torch.use_deterministic_algorithms(True)
    places = {layout: Place(layout, rank) for layout in LAYOUTS}
    found: dict[str, Any] = {"places": {name: (of.which, of.replica, of.rank) for name, of in places.items()}}
    for layout, wrapper in CASES:
        found[f"{layout}, {wrapper}"] = train(places[layout], wrapper, folder)
    place = places["2 x 2"]
    for wrapper in ("ddp", "fsdp2"):
        found[f"without a phase, {wrapper}"] = train_without_phase(place, wrapper)
    found["saved"] = save(place, rank, folder)
    found["drift"] = drift(place)
    model = make_model(torch.float32)
    found["not given"] = refusal(lambda: spread(model, place.group, replicate_group=...))
    found["the group itself"] = refusal(lambda: spread(model, place.group, replicate_group=place.group))
    found["other places"] = refusal(
        lambda: spread(model, place.group, replicate_group=places["2 x 4"].replicas if place.which == 0 else None)
    )
    found["one replica has other options"] = refusal(
        lambda: spread(model, place.group, replicate_group=place.replicas, depth=2 + place.replica)
    )
    found["fails"] = fail(place, rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


CASES = [("2 x 4", None), *(("2 x 2", wrapper) for wrapper in WRAPPERS)]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return results_of(WORLD, work)


@functools.cache
def eager(layout: str, which: int, wrapper: bool | None) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Train one process with all experts and batches. Return the first step's gradients, norms and final weights."""
    model = make_model(torch.float64, which)
    optimizer = make_optimizer([list(model.parameters())])
    of_all = [(r, i, micro_steps_of(r, i, wrapper)) for r, ranks in enumerate(LAYOUTS[layout][which])
              for i in range(len(ranks))]  # fmt: skip
    first, norms = {}, []
    for seed in range(100, 100 + STEPS):
        batches, routes = ([draw(10 * r + i, m, seed) for r, i, m in of_all] for draw in (draw_batches, draw_routes))
        _, gradients = reference(torch.float64, batches, routes, state=model.state_dict(), model_seed=which)
        first = first or {name: of.clone() for name, of in gradients.items()}
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return first, norms, model.state_dict()


@pytest.mark.parametrize(("layout", "wrapper"), CASES)
def test_five_steps_of_replicas_match_one_process(
    found: list[dict[str, Any]], layout: str, wrapper: str | None
) -> None:
    for which in range(len(LAYOUTS[layout])):
        gradients, norms, weights = eager(layout, which, wrapper and True)
        begun = make_model(torch.float64, which).state_dict()
        assert worst_difference(begun, weights)[0] > 1e-3
        for of in found:
            if of["places"][layout][0] == which:
                own = of[f"{layout}, {wrapper}"]
                assert worst_difference(own["gradients"], gradients)[0] <= 1e-12
                assert own["norms"] == pytest.approx(norms, rel=LATER)
                assert worst_difference(own["weights"], weights)[0] <= LATER


@pytest.mark.parametrize(("layout", "wrapper"), CASES)
def test_replicas_stay_bit_equal(found: list[dict[str, Any]], layout: str, wrapper: str | None) -> None:
    first: dict[int, dict[str, Any]] = {}
    for of in found:
        own = of[f"{layout}, {wrapper}"]["weights"]
        other = first.setdefault(of["places"][layout][0], own)
        assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_gradients_without_a_phase_are_averaged_over_replicas(found: list[dict[str, Any]], wrapper: str) -> None:
    for which in range(2):
        model = make_eager_model(which)
        for of in (0, 1, 10, 11):
            (loss_of(model, draw_batches(of, 1, 7)[0]) / 4).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        for of_rank in found:
            if of_rank["places"]["2 x 2"][0] == which:
                assert worst_difference(of_rank[f"without a phase, {wrapper}"], expected)[0] <= 1e-12


def test_only_one_rank_of_all_replicas_saves(found: list[dict[str, Any]]) -> None:
    for of in found:
        for layout, wrapper in CASES:
            holds = of["places"][layout][1:] == (0, 0)
            assert of[f"{layout}, {wrapper}"]["holds the state"] == [holds, holds]
        assert of["saved"] == [True]


def test_replicas_whose_experts_differ_are_rejected(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["drift"].startswith("InputError: experts[1]: ")
        assert "Replicas hold other experts" in of["drift"]


def test_a_group_of_some_processes_requires_a_replicate_group(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "replicate_group: not given, but group has 2 of the 8 processes" in of["not given"]
        assert "or None where there are no such ranks" in of["not given"]


def test_replicate_groups_that_form_no_grid_are_rejected(found: list[dict[str, Any]]) -> None:
    for of in found:
        for case in ("the group itself", "other places"):
            assert of[case].startswith("InputError: replicate_group: ranks ["), of[case]
            assert "expected one rank of each replica of the group" in of[case]


def test_replicas_must_have_the_same_arguments(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["one replica has other options"].startswith("InputError: depth: ")


def test_a_failing_rank_ends_all_replicas_of_its_group_only(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        if rank == 0:
            assert of["fails"] == "ValueError: planted"
        elif rank < 4:
            assert "rank 0 failed: ValueError: planted" in of["fails"]
        else:
            assert of["fails"] == "nothing"
