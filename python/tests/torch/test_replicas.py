"""Several replicas of the expert-parallel group: gradients and optimizer steps are those of one process.

There are two replicas of four ranks; and twice two replicas of two, of which each two know nothing of the others, as
under tensor parallelism.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import tempfile
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import begin_rank, gather, run_ranks
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
# [group][replica][rank], in the default group
LAYOUTS: dict[str, list[list[list[int]]]] = {
    "2 x 4": [[[0, 2, 4, 6], [1, 3, 5, 7]]],
    "2 x 2": [[[0, 1], [2, 3]], [[4, 6], [5, 7]]],
}


def micro_steps_of(replica: int, place: int, wrapper: str | bool | None) -> int:
    """Replicas plan for themselves: they may have other numbers of micro-steps."""
    return 2 if wrapper is not None or (replica, place) == (0, 0) else 1


class Place:
    """This rank's in a layout."""

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


@functools.cache
def place_in(layout: str) -> Place:
    return Place(layout, dist.get_rank())


@functools.cache
def folder() -> str:
    """A folder of all ranks."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    return folders[0]


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


@functools.cache
def eager(layout: str, wrapper: bool | None) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Of one process with all experts and all batches of a group: gradients of the first step, norms, and weights after
    all. The first rank of the group computes them."""
    place = place_in(layout)
    found: list[Any] = [None] * WORLD
    own = _eager(layout, place.which, wrapper) if (place.replica, place.rank) == (0, 0) else None
    dist.all_gather_object(found, (place.which, own))
    return next(of for which, of in found if which == place.which and of is not None)


def _eager(layout: str, which: int, wrapper: bool | None) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
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


@pytest.mark.parametrize(("layout", "wrapper"), [("2 x 4", None), *(("2 x 2", wrapper) for wrapper in WRAPPERS)])
def test_five_steps_of_replicas_are_those_of_one_process_and_equal_to_the_last_bit(
    rank: int, layout: str, wrapper: str | None
) -> None:
    """The last two resume from files in a new process group order. One rank of all replicas saves."""
    place = place_in(layout)
    gradients, norms, weights = eager(layout, wrapper and True)
    assert worst_difference(make_model(torch.float64, place.which).state_dict(), weights)[0] > 1e-3
    of = Trainer(place, wrapper)
    of.gradients(100)
    assert worst_difference(whole_gradients(of.ep, of.model), gradients)[0] <= 1e-12
    found = [of.step(100 + i) for i in range(3)]
    state = {
        "model": of.ep.whole_state_dict(of.trained, rank0_only=True),
        "optimizer": of.ep.whole_optimizer_state(of.optimizer, rank0_only=True),
    }
    saves = (place.replica, place.rank) == (0, 0)
    assert [len(part) > 0 for part in state.values()] == [saves, saves]
    file = f"{folder()}/{place.size} {place.which} {wrapper}.pt"
    if saves:
        torch.save(state, file)
    dist.barrier()
    again = Trainer(place, None if wrapper == "ddp" else wrapper)
    state = torch.load(file)
    again.ep.load_whole_state_dict(again.model, state["model"])
    again.ep.load_whole_optimizer_state(again.optimizer, state["optimizer"])
    again.wrapper = wrapper
    found += [again.step(100 + i) for i in range(3, STEPS)]
    assert found == pytest.approx(norms, rel=1e-12)
    own = again.ep.whole_state_dict(again.trained)
    assert worst_difference(own, weights)[0] <= 1e-12
    digest = hashlib.sha256(b"".join(of.numpy().tobytes() for of in own.values())).digest()
    assert len({of for which, of in gather((place.which, digest)) if which == place.which}) == 1


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_gradients_without_a_phase_are_means_over_replicas_too(rank: int, wrapper: str) -> None:
    place = place_in("2 x 2")
    of = Trainer(place, wrapper)
    loss_of(of.trained, draw_batches(10 * place.replica + place.rank, 1, 7)[0]).backward()
    model = make_eager_model(place.which)
    for i in (0, 1, 10, 11):
        (loss_of(model, draw_batches(i, 1, 7)[0]) / 4).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert worst_difference(whole_gradients(of.ep, of.model), expected)[0] <= 1e-12


def test_files_are_those_of_one_replica_and_complete_on_all_ranks(rank: int) -> None:
    place = place_in("2 x 2")
    of = Trainer(place, None)
    of.ep.save_pretrained(of.model, f"{folder()}/saved {place.which}")
    loaded = type(of.model).from_pretrained(f"{folder()}/saved {place.which}", dtype=torch.float64).state_dict()
    whole = make_model(torch.float64, place.which).state_dict()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_replicas_whose_experts_differ_are_refused(rank: int) -> None:
    place = place_in("2 x 2")
    of = Trainer(place, None)
    with torch.no_grad():
        of.ep.expert_parameters()[1].mul_(1 + 1e-6 * place.replica)
    said = refusal(lambda: of.ep.plan(draw_routes(place.rank, 1, 3)))
    assert said.startswith("InputError: experts[1]: ") and "Replicas hold other experts" in said


def test_replicas_that_make_no_grid_or_have_other_arguments_are_refused(rank: int) -> None:
    place, model = place_in("2 x 2"), make_model(torch.float32)

    def said(replicas: Any, **options: Any) -> str:
        return refusal(lambda: spread(model, place.group, replicate_group=replicas, **options))

    assert "replicate_group: not given, but group has 2 of the 8 processes" in said(...)
    assert "or None where there are no such ranks" in said(...)
    for replicas in (place.group, place_in("2 x 4").replicas if place.which == 0 else None):
        words = said(replicas)
        assert words.startswith("InputError: replicate_group: ranks ["), words
        assert "expected one rank of each replica of the group" in words
    assert said(place.replicas, depth=2 + place.replica).startswith("InputError: depth: ")


def fail(rank: int, folder: str) -> None:
    """Rank 0 fails in its backward, and those of the other replica wait for it in drain()."""
    begin_rank(rank, WORLD, folder)
    of = Trainer(Place("2 x 2", rank), None)
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
        assert words == "ValueError: planted"
        time.sleep(PATIENCE)  # its end would end the connections that others wait for
    elif rank < 4:
        assert time.monotonic() < since + PATIENCE and "rank 0 failed: ValueError: planted" in words
    else:
        assert words == "nothing"


def test_a_rank_that_fails_ends_all_replicas(tmp_path: pathlib.Path) -> None:
    """In processes of its own, which end."""
    run_ranks(WORLD, fail, str(tmp_path))
