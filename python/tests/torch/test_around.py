"""What users do around the documented loop: it trains rightly, or is refused by name and on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refusals import ODD, refusal
from training import LAYERS, RANKS, draw_batches, draw_routes, loss_of, make_model, on_all_ranks, spread

from foremoe.hf import expert_layers
from foremoe.torch import ExpertParallel


def begin(wrapper: str | None = None, *, head: bool = False, **wrapped: Any) -> tuple[Any, Any, Any]:
    """ep, the model, and what wrap() returned. head: of each rank's own values, in the model."""
    model = make_model(torch.float64)
    if head:
        model.head = torch.nn.Linear(4, 1, bias=False).double()
        torch.nn.init.constant_(model.head.weight, 1 + dist.get_rank())
    ep = spread(model)
    return ep, model, ep.wrap(model, wrapper, **wrapped)


def run_phase(ep: Any, trained: Any, backward: Callable[[Any], None] = lambda loss: loss.backward()) -> None:
    rank = dist.get_rank()
    with ep.plan(draw_routes(rank, 2, 3)) as phase:
        for m, batch in enumerate(draw_batches(rank, 2, 3)):
            with phase.micro_step(m):
                backward(loss_of(trained, batch))
        phase.drain()


def sharded_parameters(rank: int) -> dict[str, Any]:
    """Of the head, each rank has another part."""
    found: dict[str, Any] = {
        wrapper: refusal(lambda wrapper=wrapper: begin(wrapper, head=True, sharded=["head.*"]))
        for wrapper in ("ddp", "fsdp2")
    }
    ep, model, trained = begin(head=True, sharded=["head.*"])
    run_phase(ep, trained, lambda loss: (loss + 10 * (1 + rank) * model.head.weight.sum()).backward())
    found["gradient"] = float(model.head.weight.grad[0, 0])
    for p in model.parameters():
        if p is not model.head.weight:
            p.grad = None
    found["norm"] = float(ep.clip_grad_norm_(1e9))
    ep.detach()
    return found


def head_outside(rank: int) -> list[str]:
    """A value head that ep.wrap() never saw, in the optimizer of the experts: apart after a step."""
    ep, model, trained = begin()
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 1, bias=False).double()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    found = []
    for _ in range(2):
        found.append(refusal(lambda: run_phase(ep, trained)))
        head.weight.grad = torch.full_like(head.weight, 1.0 + rank)
        optimizer.step()
        optimizer.zero_grad()
    return found


def adafactor(rank: int) -> str:
    ep, model, trained = begin()
    run_phase(ep, trained)
    words = refusal(torch.optim.Adafactor(model.parameters()).step)
    ep.detach()
    return words


def gradients_left_out(rank: int) -> list[str]:
    found = []
    for kind in ("inputs", "grad"):
        ep, _, trained = begin()
        dense = ep.dense_parameters()

        def backward(loss: Any, kind: str = kind, dense: Any = dense) -> None:
            if kind == "inputs":
                loss.backward(inputs=dense)
            else:
                torch.autograd.grad(loss, dense)

        found.append(refusal(lambda: run_phase(ep, trained, backward)))  # noqa: B023
        ep.detach()
    return found


def shared_experts(rank: int) -> str:
    model = make_model(torch.float64)
    model.model.layers[2].mlp.experts = model.model.layers[0].mlp.experts
    return refusal(lambda: ExpertParallel(expert_layers(model)))


def replaced_experts(rank: int) -> str:
    """Outside of a phase."""
    _ep, model, trained = begin("own")
    batch = draw_batches(rank, 1, 3)[0]
    loss_of(trained, batch)
    model.load_state_dict(model.state_dict(), assign=True)
    return refusal(lambda: loss_of(trained, batch))


def no_sync(rank: int) -> str:
    """drain() averages; so it does not matter that the trainer's DistributedDataParallel did not."""
    ep, model, _trained = begin()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    with ddp.no_sync():
        words = refusal(lambda: run_phase(ep, ddp))
    ep.detach()
    return words


def unequal_fsdp2(rank: int) -> str:
    ep, model, trained = begin("fsdp2")
    model.set_requires_all_reduce(False)
    return refusal(lambda: run_phase(ep, trained))


def hooked(model: Any, rank: int) -> Any:
    """The second layer's forward fails on one rank, until the handle is removed."""

    def fail(*_: Any) -> None:
        if rank == ODD:
            raise ValueError("planted")

    return model.model.layers[1].self_attn.register_forward_pre_hook(fail)


def try_again(rank: int) -> str:
    ep, model, trained = begin()

    def run() -> None:
        with ep.plan(draw_routes(rank, 1, 3)) as phase, phase.micro_step(0):
            batch, handle = draw_batches(rank, 1, 3)[0], hooked(model, rank)
            try:
                loss_of(trained, batch)
            except ValueError:
                handle.remove()
                loss_of(trained, batch).backward()

    return refusal(run)


def fail_unplanned(rank: int) -> str:
    ep, model, trained = begin()

    def run() -> None:
        with ep.plan(draw_routes(rank, 1, 3)) as phase:
            batch, handle = draw_batches(rank, 1, 3)[0], hooked(model, rank)
            try:
                with ep.unplanned(), torch.no_grad():
                    trained(batch)
            except ValueError:
                handle.remove()
            with phase.micro_step(0):
                loss_of(trained, batch).backward()

    return refusal(run)


def one_forward_more(rank: int) -> str:
    ep, _model, trained = begin()

    def backward(loss: Any) -> None:
        loss.backward()
        if rank == ODD:
            with torch.no_grad():
                trained(draw_batches(rank, 1, 3)[0])

    return refusal(lambda: run_phase(ep, trained, backward))


def detach_alone(rank: int) -> str:
    ep, _, _ = begin()
    return refusal(ep.detach if rank == ODD else lambda: ep.plan(draw_routes(rank, 1, 3)))


CASES = (
    sharded_parameters, head_outside, adafactor, gradients_left_out, shared_experts, replaced_experts, no_sync,
    unequal_fsdp2, try_again, fail_unplanned, one_forward_more, detach_alone,
)  # fmt: skip


def work(rank: int) -> dict[str, Any]:
    return {case.__name__: case(rank) for case in CASES}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_parameters_that_other_code_shards_keep_their_gradients(found: list[dict[str, Any]]) -> None:
    norm = sum(4 * (10.0 * (1 + rank)) ** 2 for rank in range(RANKS)) ** 0.5
    for rank, of in enumerate(found):
        of = of["sharded_parameters"]
        for wrapper in ("ddp", "fsdp2"):
            assert of[wrapper].startswith(
                f"InputError: sharded: wrapper '{wrapper}' would give all ranks the same head"
            )
        assert of["gradient"] == 2 * 10 * (1 + rank), "of two micro-steps, and not averaged"
        assert of["norm"] == pytest.approx(2 * norm)


def test_a_head_that_wrap_never_saw_is_compared_once_it_has_stepped(found: list[dict[str, Any]]) -> None:
    for of in found:
        first, second = of["head_outside"]
        assert first == "nothing"
        assert second.startswith("InputError: weights[optimizer's parameter ")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("adafactor", "InputError: optimizer: row_var is "),
        ("shared_experts", "InputError: layers[2]: shares a parameter of its experts with a layer before it"),
        ("unequal_fsdp2", "RuntimeError: the last micro-step ran inside no_sync()"),
        ("no_sync", "nothing"),
    ],
)
def test_single_mistakes_are_refused_on_all_ranks(found: list[dict[str, Any]], case: str, words: str) -> None:
    for of in found:
        assert of[case].startswith(words)


def test_a_backward_that_leaves_out_experts_is_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        for words in of["gradients_left_out"]:
            assert words.startswith("RuntimeError: no backward of this phase reached this rank's experts")


def test_replaced_experts_are_refused_without_a_phase_too(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "is no longer the parameter that was spread" in of["replaced_experts"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("try_again", f"a forward of micro-step 0 began, but the one before it ended after layer 0 of {LAYERS}"),
        ("fail_unplanned", "ValueError: planted"),
        ("one_forward_more", "another forward of micro-step"),
        ("detach_alone", f"detach() on rank {ODD}"),
    ],
)
def test_ranks_that_part_end_at_once_and_some_rank_says_why(
    found: list[dict[str, Any]], case: str, reason: str
) -> None:
    said = [of[case] for of in found]
    assert all(words != "nothing" for words in said)
    assert any(reason in words for words in said), said
