"""User code around the documented loop either trains correctly or is refused by name on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import RANKS, gather
from refusals import ODD, refusal
from training import LAYERS, begin, draw_batches, draw_routes, loss_of, make_model, run_phase, spread

from foremoe.hf import expert_layers
from foremoe.torch import ExpertParallel


def test_parameters_that_other_code_shards_keep_their_gradients(rank: int) -> None:
    """Each rank has a different part of the head."""

    def with_head(wrapper: str | None) -> tuple[Any, Any, Any]:
        model = make_model(torch.float64)
        model.head = torch.nn.Linear(4, 1, bias=False).double()
        torch.nn.init.constant_(model.head.weight, 1 + rank)
        ep = spread(model)
        return ep, model, ep.wrap(model, wrapper, sharded=["head.*"])

    for wrapper in ("ddp", "fsdp2"):
        said = refusal(lambda wrapper=wrapper: with_head(wrapper))
        assert said.startswith(f"InputError: sharded: wrapper '{wrapper}' would give all ranks the same head")
    ep, model, trained = with_head(None)
    weight = model.head.weight
    run_phase(ep, trained, backward=lambda loss: (loss + 10 * (1 + rank) * weight.sum()).backward())
    assert float(weight.grad[0, 0]) == 2 * 10 * (1 + rank), "of two micro-steps, and not averaged"
    for p in model.parameters():
        if p is not weight:
            p.grad = None
    norm = sum(4 * (20.0 * (1 + of)) ** 2 for of in range(RANKS)) ** 0.5
    assert float(ep.clip_grad_norm_(1e9)) == pytest.approx(norm)
    ep.detach()


def test_an_unwrapped_head_that_differs_between_ranks_is_rejected_after_a_step(rank: int) -> None:
    """The experts' optimizer also trains a value head that is not part of the wrapped model."""
    ep, model, trained = begin()
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 1, bias=False).double()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    run_phase(ep, trained)
    head.weight.grad = torch.full_like(head.weight, 1.0 + rank)
    optimizer.step()
    optimizer.zero_grad()
    assert refusal(lambda: run_phase(ep, trained)).startswith("InputError: weights[optimizer's parameter ")


def adafactor() -> None:
    ep, model, trained = begin()
    run_phase(ep, trained)
    torch.optim.Adafactor(model.parameters()).step()


def shared_experts() -> None:
    model = make_model(torch.float64)
    model.model.layers[2].mlp.experts = model.model.layers[0].mlp.experts
    ExpertParallel(expert_layers(model))


def no_sync() -> None:
    """drain() averages gradients, so it does not matter that DistributedDataParallel did not."""
    ep, model, _ = begin()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    with ddp.no_sync():
        run_phase(ep, ddp)


def unequal_fsdp2() -> None:
    ep, model, trained = begin("fsdp2")
    model.set_requires_all_reduce(False)
    run_phase(ep, trained)


@pytest.mark.parametrize(("mistake", "words"), [
    (adafactor, "InputError: optimizer: row_var is "),
    (shared_experts, "InputError: layers[2]: shares a parameter of its experts with a layer before it"),
    (unequal_fsdp2, "RuntimeError: the last micro-step ran inside no_sync()"),
    (no_sync, "nothing"),
])  # fmt: skip
def test_unsupported_training_code_is_rejected_on_all_ranks_and_no_sync_is_accepted(
    rank: int, mistake: Callable[[], None], words: str
) -> None:
    assert refusal(mistake).startswith(words)


@pytest.mark.parametrize("kind", ["inputs", "grad"])
def test_a_backward_that_leaves_out_experts_is_rejected(rank: int, kind: str) -> None:
    ep, _, trained = begin()
    dense = ep.dense_parameters()

    def backward(loss: Any) -> None:
        if kind == "inputs":
            loss.backward(inputs=dense)
        else:
            torch.autograd.grad(loss, dense)

    said = refusal(lambda: run_phase(ep, trained, backward=backward))
    assert said.startswith("RuntimeError: no backward of this phase reached this rank's experts")


def test_replaced_experts_are_rejected_outside_a_phase(rank: int) -> None:
    _ep, model, trained = begin("own")
    (batch,) = draw_batches(rank, 1, 3)
    loss_of(trained, batch)
    model.load_state_dict(model.state_dict(), assign=True)
    assert "is no longer the parameter that was spread" in refusal(lambda: loss_of(trained, batch))


def fail_in_second_layer(model: Any, rank: int) -> Any:
    """Make the second layer's forward fail on rank ODD until the returned handle is removed."""

    def fail(*_: Any) -> None:
        if rank == ODD:
            raise ValueError("planted")

    return model.model.layers[1].self_attn.register_forward_pre_hook(fail)


def retry_forward(rank: int) -> None:
    ep, model, trained = begin()
    (batch,) = draw_batches(rank, 1, 3)
    with ep.plan(draw_routes(rank, 1, 3)) as phase, phase.micro_step(0):
        handle = fail_in_second_layer(model, rank)
        try:
            loss_of(trained, batch)
        except ValueError:
            handle.remove()
            loss_of(trained, batch).backward()


def fail_unplanned(rank: int) -> None:
    ep, model, trained = begin()
    (batch,) = draw_batches(rank, 1, 3)
    with ep.plan(draw_routes(rank, 1, 3)) as phase:
        handle = fail_in_second_layer(model, rank)
        try:
            with ep.unplanned(), torch.no_grad():
                trained(batch)
        except ValueError:
            handle.remove()
        with phase.micro_step(0):
            loss_of(trained, batch).backward()


def run_extra_forward(rank: int) -> None:
    ep, _model, trained = begin()

    def backward(loss: Any) -> None:
        loss.backward()
        if rank == ODD:
            with torch.no_grad():
                trained(draw_batches(rank, 1, 3)[0])

    run_phase(ep, trained, backward=backward)


def detach_alone(rank: int) -> None:
    ep, _, _ = begin()
    if rank == ODD:
        ep.detach()
    else:
        ep.plan(draw_routes(rank, 1, 3))


@pytest.mark.parametrize(("part", "reason"), [
    (retry_forward, f"a forward of micro-step 0 began, but the one before it ended after layer 0 of {LAYERS}"),
    (fail_unplanned, "ValueError: planted"),
    (run_extra_forward, "another forward of micro-step"),
    (detach_alone, f"detach() on rank {ODD}"),
])  # fmt: skip
def test_ranks_that_run_different_code_stop_promptly_and_one_gives_the_reason(
    rank: int, part: Callable[[int], None], reason: str
) -> None:
    said = gather(refusal(lambda: part(rank)))
    assert all(words != "nothing" for words in said)
    assert any(reason in words for words in said), said
