"""Trainers that do what trainers do: experts are never overwritten, averaged with others, or left untrained in silence.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from refusals import refusal
from torch.nn.parallel import DistributedDataParallel
from training import (
    RANKS,
    draw_batches,
    draw_routes,
    loss_of,
    make_model,
    on_all_ranks,
    reference,
    spread,
    whole_gradients,
    worst_difference,
)


def prepare(model: Any) -> Any:
    return accelerate.Accelerator(cpu=True).prepare(model)


TRAINERS = {"DistributedDataParallel": DistributedDataParallel, "accelerate": prepare}


def step(ep: Any, model: Any, rank: int, seed: int, micro_steps: int = 2) -> None:
    batches = draw_batches(rank, micro_steps, seed)
    with ep.plan(draw_routes(rank, micro_steps, seed)) as phase:
        for m in phase.micro_steps:
            if m >= len(batches):
                phase.idle(m)
                continue
            with phase.micro_step(m):
                loss_of(model, batches[m]).backward()
        phase.drain()


def expected_gradients(seed: int) -> dict[str, Any]:
    batches = [draw_batches(r, 2, seed) for r in range(RANKS)]
    return reference(torch.float64, batches, [draw_routes(r, 2, seed) for r in range(RANKS)])[1]


def train_in(trainer: str, wrapper: str | None, rank: int) -> float:
    """The error of gradients where a trainer wraps the model after ep.wrap()."""
    model = make_model(torch.float64)
    ep = spread(model)
    ep.wrap(model, wrapper)
    step(ep, TRAINERS[trainer](model), rank, 3)
    return worst_difference(whole_gradients(ep, model), expected_gradients(3))[0]


def idle_in(trainer: str, wrapper: str | None, rank: int) -> str:
    """A trainer wraps the model after ep.wrap(), and rank 0 has a batch less than the others."""
    model = make_model(torch.float32)
    ep = spread(model)
    ep.wrap(model, wrapper)
    trained = TRAINERS[trainer](model)
    return refusal(lambda: step(ep, trained, rank, 3, micro_steps=1 if rank == 0 else 2))


def hold_experts(trainer: str, rank: int) -> dict[str, str]:
    """What is said where a trainer wraps the model without ep.wrap()."""
    model = make_model(torch.float32)
    ep = spread(model)
    trained = TRAINERS[trainer](model)
    (batch,) = draw_batches(rank, 1, 3)
    found = {"forward": refusal(lambda: trained(input_ids=batch, use_cache=False))}
    found["plan"] = refusal(lambda: ep.plan(draw_routes(rank, 1, 3)))
    model = make_model(torch.float32)
    ep = spread(model)
    unwritten = DistributedDataParallel(model, init_sync=False)
    with contextlib.suppress(RuntimeError), ep.plan(draw_routes(rank, 1, 3)) as phase, phase.micro_step(0):
        found["phase"] = refusal(lambda: loss_of(unwritten, batch))
    return found


def is_ddp_of_the_detached_model_whole() -> bool:
    model = make_model(torch.float32)
    ep = spread(model)
    ep.wrap(model, "own")
    ep.detach()
    return not DistributedDataParallel(model).parameters_to_ignore


def load_the_same_everywhere(rank: int) -> str:
    """Experts that somebody loads on purpose may be alike."""
    model = make_model(torch.float32)
    ep = spread(model)
    ep.load_whole_state_dict(model, {name: torch.ones_like(of) for name, of in ep.whole_state_dict(model).items()})
    return refusal(lambda: ep.plan(draw_routes(rank, 1, 3)))


def load_its_own_state(rank: int) -> dict[str, str]:
    """The model's own load_state_dict(), and of a part of it. It does not excuse what wrote other weights before."""
    model = make_model(torch.float32)
    ep = spread(model)
    found = {}

    def plan() -> None:
        ep.plan(draw_routes(rank, 1, 3))

    zeros = {name: torch.zeros_like(of) for name, of in model.state_dict().items()}
    model.load_state_dict(zeros)
    found["zeros"] = refusal(plan)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        own = {name: of + rank for name, of in experts.state_dict().items()}
        experts.load_state_dict(own)
    found["different"] = refusal(plan)
    for weight in ep.expert_parameters():
        dist.broadcast(weight.detach(), 0)
    state = {name: of for name, of in model.state_dict().items() if ".experts." not in name}
    model.load_state_dict(state, strict=False)
    found["others alone"] = refusal(plan)
    model = make_model(torch.float32)
    ep = spread(model)
    dist.broadcast(ep.expert_parameters()[1].detach(), 0)
    found["one weight"] = refusal(plan)
    return found


def optimize_what_was_replaced() -> dict[str, Any]:
    model = make_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = weakref.ref(model.model.layers[0].mlp.experts.down_proj)
    ep = spread(model)
    found: dict[str, Any] = {"stale": refusal(optimizer.step)}
    of_one_rank = torch.optim.SGD(model.parameters(), lr=0.1)
    found["fresh"] = refusal(of_one_rank.step)
    ep.detach()
    found["detached"] = refusal(optimizer.step)
    found["of one rank"] = refusal(of_one_rank.step)
    del optimizer
    gc.collect()
    found["leaks"] = old() is not None
    return found


def forget_wrap(rank: int) -> str:
    model = make_model(torch.float32)
    ep = spread(model)
    return refusal(lambda: step(ep, model, rank, 3))


def freeze(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def make_sparse(model: Any) -> None:
    model.model.embed_tokens.sparse = True


# What rank 2 alone does after wrap(), and how the error begins.
ODD_DENSE: dict[str, tuple[Callable[[Any], None], str]] = {
    "frozen": (freeze, "model[lm_head.weight]: frozen on rank 2, trained on ranks 0, 1, 3; expected the same"),
    "sparse": (
        make_sparse,
        "model[model.embed_tokens.weight]: trained, with a sparse gradient on rank 2, trained on ranks 0, 1, 3",
    ),
}


def train_other_dense(rank: int, change: Callable[[Any], None]) -> str:
    """One rank averages other parameters than the others."""
    model = make_model(torch.float32)
    ep = spread(model)
    ep.wrap(model)
    if rank == 2:
        change(model)
    return refusal(lambda: step(ep, model, rank, 3))


def change_dense_inside(rank: int, wrapper: str | None, change: Callable[[list[Any]], None]) -> str:
    """Other weights than experts that change between two micro-steps."""
    model = make_model(torch.float32)
    ep = spread(model)
    trained = ep.wrap(model, wrapper)
    dense = ep.dense_parameters()

    def run() -> None:
        batches = draw_batches(rank, 2, 5)
        with ep.plan(draw_routes(rank, 2, 5)) as phase:
            for m, batch in enumerate(batches):
                with phase.micro_step(m):
                    loss_of(trained, batch).backward()
                change(dense)
            phase.drain()

    return refusal(run)


@torch.no_grad()
def scale_by_hand(dense: list[Any]) -> None:
    for weight in dense:
        weight.mul_(0.9)


def step_an_optimizer(dense: list[Any]) -> None:
    torch.optim.SGD(dense, lr=0.1).step()


CHANGES = {"scaled": scale_by_hand, "stepped": step_an_optimizer}


def go_backward_afterwards(rank: int) -> float:
    """Losses that are kept, and their backward passes after micro_step()."""
    model = make_model(torch.float64)
    ep = spread(model)
    ep.wrap(model)
    batches = draw_batches(rank, 2, 3)
    with ep.plan(draw_routes(rank, 2, 3)) as phase:
        for m, batch in enumerate(batches):
            with phase.micro_step(m):
                loss = loss_of(model, batch)
            loss.backward()
        phase.drain()
    return worst_difference(whole_gradients(ep, model), expected_gradients(3))[0]


def work(rank: int) -> dict[str, Any]:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    found: dict[str, Any] = {}
    for trainer in TRAINERS:
        for wrapper in (None, "own"):
            found[f"{trainer}, {wrapper}"] = train_in(trainer, wrapper, rank)
            found[f"{trainer}, {wrapper}, idle"] = idle_in(trainer, wrapper, rank)
        found[f"{trainer}, held"] = hold_experts(trainer, rank)
    found["detached"] = is_ddp_of_the_detached_model_whole()
    found["loaded"] = load_the_same_everywhere(rank)
    found["loaded by the model"] = load_its_own_state(rank)
    found["optimizer"] = optimize_what_was_replaced()
    found["forgotten"] = forget_wrap(rank)
    for wrapper in (None, "ddp", "fsdp2"):
        for name, change in CHANGES.items():
            found[f"{name}, {wrapper}"] = change_dense_inside(rank, wrapper, change)
    for name, (change, _) in ODD_DENSE.items():
        found[f"one rank's {name}"] = train_other_dense(rank, change)
    found["afterwards"] = go_backward_afterwards(rank)
    return found


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    yield on_all_ranks(work)


@pytest.mark.parametrize("wrapper", [None, "own"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_that_wraps_the_model_after_ep_wrap_leaves_experts_alone(
    found: list[dict[str, Any]], trainer: str, wrapper: str | None
) -> None:
    for of in found:
        assert of[f"{trainer}, {wrapper}"] <= 1e-12


@pytest.mark.parametrize("wrapper", [None, "own"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_rank_with_fewer_batches_in_a_trainers_ddp_is_refused_by_all(
    found: list[dict[str, Any]], trainer: str, wrapper: str | None
) -> None:
    """Its idle() would never enter what DistributedDataParallel exchanges, and the others would wait for it."""
    for of in found:
        assert of[f"{trainer}, {wrapper}, idle"].startswith(
            "InputError: routes: 1 micro-steps on rank 0, 2 micro-steps on ranks 1, 2, 3; expected the same"
        )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_that_holds_experts_is_refused_before_any_backward(found: list[dict[str, Any]], trainer: str) -> None:
    for of in found:
        said = of[f"{trainer}, held"]
        assert said["forward"].startswith(
            "RuntimeError: DistributedDataParallel holds the experts of this rank, such as model.layers"
        )
        assert said["phase"] == said["forward"]
        assert 'ep.wrap(model, "own")' in said["forward"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_experts_that_were_written_over_others_are_refused_by_all_ranks(
    found: list[dict[str, Any]], trainer: str
) -> None:
    for of in found:
        assert of[f"{trainer}, held"]["plan"].startswith(
            "RuntimeError: ranks 0 and 1 have the same experts, but had different ones"
        )


def test_a_detached_model_is_averaged_whole(found: list[dict[str, Any]]) -> None:
    assert all(of["detached"] for of in found)


def test_experts_that_were_loaded_may_be_alike(found: list[dict[str, Any]]) -> None:
    assert all(of["loaded"] == "nothing" for of in found)


def test_the_models_own_state_may_be_alike(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["loaded by the model"]["zeros"] == of["loaded by the model"]["different"] == "nothing"
        for case in ("others alone", "one weight"):
            assert of["loaded by the model"][case].startswith("RuntimeError: ranks 0 and 1 have the same experts")


def test_an_optimizer_of_parameters_that_were_replaced_is_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        refused = "RuntimeError: the optimizer holds 6 parameters that are no longer the model's"
        assert of["optimizer"]["stale"].startswith(refused)
        assert of["optimizer"]["fresh"] == "nothing"
        assert of["optimizer"]["detached"].startswith(refused)
        assert of["optimizer"]["of one rank"].startswith(refused)
        assert not of["optimizer"]["leaks"]


def test_a_drain_without_wrap_is_refused(found: list[dict[str, Any]]) -> None:
    assert all(of["forgotten"].startswith("RuntimeError: ep.wrap(model) was never called") for of in found)


@pytest.mark.parametrize("wrapper", [None, "ddp", "fsdp2"])
def test_other_weights_that_change_inside_a_phase_are_refused(found: list[dict[str, Any]], wrapper: str | None) -> None:
    for of in found:
        assert "the weights model.embed_tokens.weight were changed inside a phase" in of[f"scaled, {wrapper}"]
        assert of[f"stepped, {wrapper}"] == (
            "RuntimeError: an optimizer of model.embed_tokens.weight stepped inside a phase, before drain()"
        )


@pytest.mark.parametrize("name", ODD_DENSE)
def test_all_ranks_refuse_to_average_what_one_has_otherwise(found: list[dict[str, Any]], name: str) -> None:
    for of in found:
        assert of[f"one rank's {name}"].startswith(f"InputError: {ODD_DENSE[name][1]}")


def test_a_backward_after_the_micro_step_is_as_good(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["afterwards"] <= 1e-12
