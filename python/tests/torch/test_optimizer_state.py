"""Whole optimizer state is saved from a spread model, and the run resumes on another number of ranks or in one process.

Four ranks train two steps and save. Four, two and one ranks load and train the third step. The reference is an
uninterrupted eager process.
"""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import LATER, RANKS
from refusals import refusal
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from training import draw_batches, draw_routes, loss_of, make_model, reference, spread, worst_difference

MICRO_STEPS = RANKS  # in total per step, independent of the number of ranks
STEPS = 3
LR = 1e-2


def make_optimizer(groups: list[Any], lr: float = LR) -> Any:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=lr, eps=1e-3, weight_decay=0.1, foreach=True)


def batches_of(step: int) -> tuple[list[Any], list[Any]]:
    """Batches and routes of all micro-steps."""
    return (
        [draw_batches(m, 1, 20 + step)[0] for m in range(MICRO_STEPS)],
        [draw_routes(m, 1, 20 + step)[0] for m in range(MICRO_STEPS)],
    )


def train_step(ep: Any, trained: Any, optimizer: Any, step: int) -> None:
    batches, routes = batches_of(step)
    own = range(ep.rank, MICRO_STEPS, ep.num_ranks)
    optimizer.zero_grad()
    with ep.plan([routes[m] for m in own]) as phase:
        for number, m in enumerate(own):
            with phase.micro_step(number):
                (loss_of(trained, batches[m]) / len(own)).backward()
        phase.drain()
    optimizer.step()


def train_eagerly(model: Any, optimizer: Any, step: int) -> None:
    batches, routes = batches_of(step)
    _, gradients = reference(torch.float64, [[b] for b in batches], [[r] for r in routes], state=model.state_dict())
    for name, p in model.named_parameters():
        p.grad = gradients[name]
    optimizer.step()


def set_up(wrapper: str | None, group: Any = None) -> tuple[Any, Any, Any, Any]:
    model = make_model(torch.float64)
    ep = spread(model, group, ranks_per_node=1)
    trained = ep.wrap(model, wrapper)
    groups = [ep.dense_parameters(), ep.expert_parameters()] if wrapper == "fsdp2" else [list(model.parameters())]
    return model, ep, trained, make_optimizer(groups)


@functools.cache
def saved_by(wrapper: str | None) -> dict[str, Any]:
    """Returns the state of model and optimizer after two steps."""
    _, ep, trained, optimizer = set_up(wrapper)
    for step in range(STEPS - 1):
        train_step(ep, trained, optimizer, step)
    if ep.rank == 1:  # a loaded state may have another order of keys
        for p, of in optimizer.state.items():
            optimizer.state[p] = dict(reversed(of.items()))
    on_rank_0 = ep.whole_optimizer_state(optimizer, rank0_only=True, cpu_offload=True)
    assert set(on_rank_0) == ({"state", "param_groups"} if ep.rank == 0 else set())
    saved = {"model": ep.whole_state_dict(trained), "optimizer": ep.whole_optimizer_state(optimizer)}
    file = io.BytesIO()
    torch.save(saved, file)
    return torch.load(io.BytesIO(file.getvalue()))


@functools.cache
def uninterrupted() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the weights of one eager process after two and after three steps."""
    model = make_model(torch.float64)
    optimizer = make_optimizer([list(model.parameters())])
    for step in range(STEPS):
        before = {name: p.clone() for name, p in model.state_dict().items()}
        train_eagerly(model, optimizer, step)
    return before, model.state_dict()


of_wrappers = pytest.mark.parametrize("saving", [None, "fsdp2"])


@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.parametrize("wrapper", [None, "fsdp2"])
@of_wrappers
def test_a_run_resumes_on_another_number_of_ranks(
    rank: int, saving: str | None, wrapper: str | None, ranks: int
) -> None:
    halves = [dist.new_group(of) for of in ([0, 1], [2, 3])]
    saved = copy.deepcopy(saved_by(saving))
    _, ep, trained, optimizer = set_up(wrapper, halves[rank // 2] if ranks == 2 else None)
    ep.load_whole_state_dict(trained, saved["model"])
    ep.load_whole_optimizer_state(optimizer, saved["optimizer"])
    train_step(ep, trained, optimizer, STEPS - 1)
    weights = ep.whole_state_dict(trained)
    assert worst_difference(weights, uninterrupted()[1])[0] <= LATER
    assert worst_difference(weights, uninterrupted()[0])[0] > 1e-3, "the step changes them"


@of_wrappers
def test_a_run_resumes_in_one_process_with_a_plain_optimizer(rank: int, saving: str | None) -> None:
    saved = copy.deepcopy(saved_by(saving))
    model = make_model(torch.float64, seed=1)
    model.load_state_dict(saved["model"])
    optimizer = make_optimizer([list(model.parameters())], lr=1.0)
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
    train_eagerly(model, optimizer, STEPS - 1)
    assert worst_difference(model.state_dict(), uninterrupted()[1])[0] <= LATER


@of_wrappers
def test_saved_state_has_the_names_and_shapes_of_the_unspread_model(rank: int, saving: str | None) -> None:
    shapes = {name: p.shape for name, p in make_model(torch.float64).named_parameters()}
    state = saved_by(saving)["optimizer"]
    assert {name: of["exp_avg"].shape for name, of in state["state"].items()} == shapes
    assert {float(of["step"]) for of in state["state"].values()} == {STEPS - 1}
    assert sorted(name for group in state["param_groups"] for name in group["params"]) == sorted(shapes)


def test_incomplete_or_mismatched_state_is_rejected_on_all_ranks(rank: int) -> None:
    model, ep, trained, optimizer = set_up("fsdp2")
    train_step(ep, trained, optimizer, 0)
    state = ep.whole_optimizer_state(optimizer)
    dense, experts = state["param_groups"]
    name = experts["params"][0]

    def expect_refused(words: str, changed: Any, into: Any = optimizer) -> None:
        said = refusal(lambda: ep.load_whole_optimizer_state(into, changed))
        assert words in said, said

    expect_refused("InputError: state: its parameters have numbers", optimizer.state_dict())
    expect_refused("InputError: state: expected what whole_optimizer_state() returned", {})
    expect_refused("is not in the state", state | {"param_groups": [dense]})
    more = experts | {"params": [*experts["params"], "more"]}
    expect_refused("InputError: state: more is not in the optimizer", state | {"param_groups": [dense, more]})
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    expect_refused(
        f"InputError: state: exp_avg of {gate_up} is (3,), expected (16, 32, 32)",
        state | {"state": state["state"] | {name: {"exp_avg": torch.ones(3)}}},
    )
    one_group = torch.optim.AdamW(model.parameters(), lr=LR)
    faster = state | {"param_groups": [dense, experts | {"lr": 1.0}]}
    expect_refused("have different options, but are in one group now", faster, one_group)

    before = make_optimizer([list(make_model(torch.float64).parameters())])
    words = "optimizer: parameter 0 of its group 0 is not one of the model's"
    assert refusal(lambda: ep.whole_optimizer_state(before)).startswith(f"InputError: {words}")
    assert words in refusal(lambda: ep.whole_optimizer_state(before if rank == 1 else optimizer))
    factored = torch.optim.Adafactor(ep.expert_parameters())
    for p in ep.expert_parameters():
        p.grad = torch.ones_like(p)
    refusal(factored.step)  # step() is rejected too, but creates the state
    said = refusal(lambda: ep.whole_optimizer_state(factored))
    assert said.startswith("InputError: optimizer: row_var of parameter 0 is [4, 32, 1], but")
    if rank == 2:
        optimizer.state[ep.expert_parameters()[0]]["step"] += 1
    said = refusal(lambda: ep.whole_optimizer_state(optimizer))
    assert said.startswith(f"InputError: optimizer[step of {gate_up}]: 2.0 on rank 2, 1.0 on ranks 0, 1")
