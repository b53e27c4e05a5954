"""Trainers never silently overwrite experts, average them with other experts, or leave them untrained."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from refusals import refusal
from torch.nn.parallel import DistributedDataParallel
from training import (
    begin,
    draw_batches,
    draw_routes,
    expected_gradients,
    gradient_error,
    loss_of,
    make_model,
    run_phase,
    spread,
)

F32 = torch.float32


def prepare(model: Any) -> Any:
    return accelerate.Accelerator(cpu=True).prepare(model)


of_trainers = pytest.mark.parametrize("wrap", [DistributedDataParallel, prepare])
of_wrappers = pytest.mark.parametrize("wrapper", [None, "own"])


@of_wrappers
@of_trainers
def test_wrapping_the_model_after_ep_wrap_does_not_average_experts(
    rank: int, wrap: Callable[[Any], Any], wrapper: str | None
) -> None:
    ep, model, _ = begin(wrapper)
    run_phase(ep, wrap(model))
    assert gradient_error(ep, model, expected_gradients()) <= 1e-12


@of_wrappers
@of_trainers
def test_fewer_batches_on_one_rank_are_rejected_under_the_trainers_ddp(
    rank: int, wrap: Callable[[Any], Any], wrapper: str | None
) -> None:
    """The rank's idle() would never join DistributedDataParallel's all-reduce, so the other ranks would hang."""
    ep, model, _ = begin(wrapper, F32)
    trained = wrap(model)
    assert refusal(lambda: run_phase(ep, trained, micro_steps=1 if rank == 0 else 2)).startswith(
        "InputError: routes: 1 micro-steps on rank 0, 2 micro-steps on ranks 1, 2, 3; expected the same"
    )


@of_trainers
def test_a_wrapper_that_includes_experts_is_rejected_before_any_backward(rank: int, wrap: Callable[[Any], Any]) -> None:
    """Without ep.wrap(), DistributedDataParallel also overwrites the other ranks' experts with rank 0's."""
    model = make_model(F32)
    ep = spread(model)
    trained = wrap(model)
    (batch,) = draw_batches(rank, 1, 3)
    said = refusal(lambda: trained(input_ids=batch, use_cache=False))
    assert said.startswith("RuntimeError: DistributedDataParallel holds the experts of this rank, such as model.layers")
    assert 'ep.wrap(model, "own")' in said
    written = refusal(lambda: ep.plan(draw_routes(rank, 1, 3)))
    assert written.startswith("RuntimeError: ranks 0 and 1 have the same experts, but had different ones")
    model = make_model(F32)
    ep = spread(model)
    unwritten = DistributedDataParallel(model, init_sync=False)
    with contextlib.suppress(RuntimeError), ep.plan(draw_routes(rank, 1, 3)) as phase, phase.micro_step(0):
        assert refusal(lambda: loss_of(unwritten, batch)) == said


def test_ddp_averages_all_parameters_of_a_detached_model(rank: int) -> None:
    ep, model, _ = begin("own", F32)
    ep.detach()
    assert not DistributedDataParallel(model).parameters_to_ignore


def test_ranks_may_have_equal_experts_only_after_loading_them(rank: int) -> None:
    """Loads experts by load_whole_state_dict(), and by load_state_dict() of the model and of a submodule. Loading other
    weights does not permit equal experts."""

    def said(ep: Any) -> str:
        return refusal(lambda: ep.plan(draw_routes(rank, 1, 3)))

    same = "RuntimeError: ranks 0 and 1 have the same experts"
    model = make_model(F32)
    ep = spread(model)
    ep.load_whole_state_dict(model, {name: torch.ones_like(of) for name, of in ep.whole_state_dict(model).items()})
    assert said(ep) == "nothing"
    model.load_state_dict({name: torch.zeros_like(of) for name, of in model.state_dict().items()})
    assert said(ep) == "nothing"
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.load_state_dict({name: of + rank for name, of in experts.state_dict().items()})
    assert said(ep) == "nothing"
    for weight in ep.expert_parameters():
        dist.broadcast(weight.detach(), 0)
    state = {name: of for name, of in model.state_dict().items() if ".experts." not in name}
    model.load_state_dict(state, strict=False)
    assert said(ep).startswith(same)
    ep = spread(make_model(F32))
    dist.broadcast(ep.expert_parameters()[1].detach(), 0)
    assert said(ep).startswith(same)


def test_an_optimizer_of_replaced_parameters_is_rejected(rank: int) -> None:
    refused = "RuntimeError: the optimizer holds 6 parameters that are no longer the model's"
    model = make_model(F32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = weakref.ref(model.model.layers[0].mlp.experts.down_proj)
    ep = spread(model)
    assert refusal(optimizer.step).startswith(refused)
    of_one_rank = torch.optim.SGD(model.parameters(), lr=0.1)
    assert refusal(of_one_rank.step) == "nothing"
    ep.detach()
    assert refusal(optimizer.step).startswith(refused)
    assert refusal(of_one_rank.step).startswith(refused)
    del optimizer
    gc.collect()
    assert old() is None


def test_drain_without_wrap_is_rejected(rank: int) -> None:
    model = make_model(F32)
    ep = spread(model)
    assert refusal(lambda: run_phase(ep, model)).startswith("RuntimeError: ep.wrap(model) was never called")


def freeze(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def make_sparse(model: Any) -> None:
    model.model.embed_tokens.sparse = True


@pytest.mark.parametrize(("change", "words"), [
    (freeze, "lm_head.weight]: frozen on rank 2, trained on ranks 0, 1, 3; expected the same"),
    (make_sparse, "model.embed_tokens.weight]: trained, with a sparse gradient on rank 2, trained on ranks 0, 1, 3"),
])  # fmt: skip
def test_all_ranks_reject_dense_parameters_that_differ_on_one_rank(
    rank: int, change: Callable[[Any], None], words: str
) -> None:
    ep, model, trained = begin(dtype=F32)
    if rank == 2:
        change(model)
    assert refusal(lambda: run_phase(ep, trained)).startswith(f"InputError: model[{words}")


@torch.no_grad()
def scale_by_hand(dense: list[Any]) -> None:
    for weight in dense:
        weight.mul_(0.9)


def step_an_optimizer(dense: list[Any]) -> None:
    torch.optim.SGD(dense, lr=0.1).step()


@pytest.mark.parametrize("wrapper", [None, "ddp", "fsdp2"])
@pytest.mark.parametrize(("change", "words"), [
    (scale_by_hand, "the weights model.embed_tokens.weight were changed inside a phase"),
    (step_an_optimizer, "an optimizer of model.embed_tokens.weight stepped inside a phase, before drain()"),
])  # fmt: skip
def test_dense_weights_changed_inside_a_phase_are_rejected(
    rank: int, change: Callable[[list[Any]], None], words: str, wrapper: str | None
) -> None:
    ep, _, trained = begin(wrapper, F32)
    dense = ep.dense_parameters()
    assert words in refusal(lambda: run_phase(ep, trained, between=lambda m: change(dense) if m else None))


def test_a_backward_after_its_micro_step_gives_the_same_gradients(rank: int) -> None:
    ep, model, trained = begin()
    kept: list[Any] = []
    run_phase(ep, trained, backward=kept.append, between=lambda m: kept.pop().backward() if m else None)
    assert gradient_error(ep, model, expected_gradients()) <= 1e-12
