"""Gradients of all parameters are means over ranks, inside and outside of phases, or what trains is refused by name.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from refusals import refusal
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from training import (
    RANKS,
    draw_batches,
    draw_routes,
    loss_of,
    make_eager_model,
    make_model,
    on_all_ranks,
    reference,
    spread,
    whole_gradients,
    worst_difference,
)

BESIDE = 0.3  # weight of an auxiliary loss


def average_by_hand(ep: Any) -> None:
    for p in ep.dense_parameters():
        dist.all_reduce(p.grad)
        p.grad /= RANKS


def eager_gradients(seeds: list[int], scale: float = 1.0) -> dict[str, Any]:
    """Of one process with all experts, whose routers choose: the mean over ranks of the sum over seeds."""
    model = make_eager_model()
    for seed in seeds:
        for rank in range(RANKS):
            (loss_of(model, draw_batches(rank, 1, seed)[0]) * scale / RANKS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def train_without_phase(rank: int, trainer: str, checkpointing: bool | None) -> float:
    """The error of gradients of two micro-batches. checkpointing: whether checkpoints are reentrant; None: there are
    none."""
    model = make_model(torch.float64)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.train()
    ep = spread(model)
    trained = ep.wrap(model, trainer if trainer in ("ddp", "fsdp2") else "own")
    if trainer == "accelerate":
        trained = accelerate.Accelerator(cpu=True).prepare(model)
    for m, seed in enumerate((3, 4)):
        first_of_ddp = m == 0 and isinstance(trained, DistributedDataParallel)
        with trained.no_sync() if first_of_ddp else contextlib.nullcontext():
            loss_of(trained, draw_batches(rank, 1, seed)[0]).backward()
    if trainer == "by hand":
        average_by_hand(ep)
    return worst_difference(whole_gradients(ep, model), eager_gradients([3, 4]))[0]


def refuse_without_phase(rank: int, wrapped: bool, frozen: bool) -> str:
    """Nothing would average gradients of other parameters."""
    model = make_model(torch.float64)
    ep = spread(model)
    if wrapped:
        ep.wrap(model)
    for weight in ep.expert_parameters():
        weight.requires_grad_(not frozen)
    return refusal(loss_of(model, draw_batches(rank, 1, 3)[0]).backward)


def add_beside(rank: int, wrapper: str | None, when: str) -> float:
    """An auxiliary loss before, inside or after a phase."""
    model = make_model(torch.float64)
    ep = spread(model)
    trained = ep.wrap(model, wrapper)

    def beside() -> None:
        (loss_of(trained, draw_batches(rank, 1, 4)[0]) * BESIDE).backward()

    if when == "before":
        beside()
    with ep.plan(draw_routes(rank, 2, 3)) as phase:
        for m, batch in enumerate(draw_batches(rank, 2, 3)):
            with phase.micro_step(m):
                loss_of(trained, batch).backward()
            if m == 0 and when == "inside":
                with ep.unplanned():
                    beside()
        phase.drain()
    if when == "after":
        beside()
    batches, routes = ([draw(r, 2, 3) for r in range(RANKS)] for draw in (draw_batches, draw_routes))
    planned, aside = reference(torch.float64, batches, routes)[1], eager_gradients([4], BESIDE)
    return worst_difference(whole_gradients(ep, model), {name: planned[name] + aside[name] for name in planned})[0]


def step(ep: Any, trained: Any, rank: int, seed: int = 3) -> None:
    (batch,) = draw_batches(rank, 1, seed)
    with ep.plan(draw_routes(rank, 1, seed)) as phase:
        with phase.micro_step(0):
            loss_of(trained, batch).backward()
        phase.drain()


def make(wrapper: str | None = None, dtype: Any = torch.float32) -> tuple[Any, Any, Any, Any]:
    model = make_model(dtype)
    ep = spread(model)
    trained = ep.wrap(model, wrapper)
    return ep, model, trained, torch.optim.SGD(model.parameters(), lr=0.1)


def clip_by_torch(rank: int, clip: Callable[[Any, float], Any]) -> str:
    """Each rank has its own norm, by which it scales what all have."""
    ep, model, trained, optimizer = make()
    step(ep, trained, rank)
    clip(model.parameters(), 0.1)
    optimizer.step()
    return refusal(lambda: ep.plan(draw_routes(rank, 1, 4)))


def clip_by_torch_without_phase(rank: int, clip: Callable[[Any, float], Any]) -> list[str]:
    model = make_model(torch.float32)
    ep = spread(model)
    trained = ep.wrap(model, "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for clips in (lambda parameters, norm: ep.clip_grad_norm_(norm), clip, clip):
        (batch,) = draw_batches(rank, 1, 3)
        optimizer.zero_grad()
        found.append(refusal(lambda batch=batch: loss_of(trained, batch).backward()))
        if found[-1] == "nothing":
            clips(model.parameters(), 0.1)
            optimizer.step()
    return found


def clip_by_accelerate(parameters: Any, max_norm: float) -> None:
    accelerate.Accelerator(cpu=True).clip_grad_norm_(parameters, max_norm)


def begin_apart(rank: int, wrapper: str | None, **options: Any) -> str:
    """Rank 2 alone has another weight in the middle of a tensor."""
    model = make_model(torch.float32)
    ep = spread(model)
    if rank == 2:
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight[3, 5] += 1e-3
    return refusal(lambda: step(ep, ep.wrap(model, wrapper, **options), rank))


def drift(rank: int, **options: Any) -> str:
    """Rank 2 alone changes a whole tensor, between two phases."""
    model = make_model(torch.float32)
    ep = spread(model)
    trained = ep.wrap(model, **options)
    step(ep, trained, rank)
    if rank == 2:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.001)
    return refusal(lambda: step(ep, trained, rank))


def train_another_module(rank: int) -> str:
    ep, model, _, _ = make("ddp")
    return refusal(lambda: step(ep, model, rank))


def train_another_module_without_phase(rank: int) -> str:
    _, model, _, _ = make("ddp")
    return refusal(loss_of(model, draw_batches(rank, 1, 3)[0]).backward)


def wrap_a_part() -> str:
    model = make_model(torch.float32)
    ep = spread(model)
    return refusal(lambda: ep.wrap(model.model))


def average_over_another_group(rank: int) -> str:
    ep, model, _, _ = make("own")
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    trained = DistributedDataParallel(model, process_group=halves[rank // 2])
    return refusal(lambda: step(ep, trained, rank))


def turn_fsdp2s_synchronization_off(rank: int) -> list[str]:
    found = []
    for of_last in (False, True):
        ep, _, trained, _ = make("fsdp2")

        def run(ep: Any = ep, trained: Any = trained, of_last: bool = of_last) -> None:
            with ep.plan(draw_routes(rank, 2, 3)) as phase:
                for m, batch in enumerate(draw_batches(rank, 2, 3)):
                    trained.set_requires_gradient_sync(of_last and m == 1)
                    with phase.micro_step(m):
                        loss_of(trained, batch).backward()
                phase.drain()

        found.append(refusal(run))
    return found


def scale_gradients(rank: int, make_scaler: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Gradients overflow in one expert of rank 1, in the first of two steps."""
    ep, model, trained, optimizer = make()
    scaler = make_scaler()
    scaler.scale(torch.ones(()))
    before = model.lm_head.weight.detach().clone()
    found: dict[str, Any] = {"stepped": [], "refused": []}
    for seed in range(3, 3 + steps):
        optimizer.zero_grad()
        (batch,) = draw_batches(rank, 1, seed)
        with ep.plan(draw_routes(rank, 1, seed)) as phase:
            with phase.micro_step(0):
                scaler.scale(loss_of(trained, batch)).backward()
            phase.drain()
        if seed == 3 and rank == 1:
            ep.expert_parameters()[0].grad[0, 0, 0] = torch.inf
        found["refused"].append(refusal(lambda: scaler.step(optimizer)))
        if found["refused"][-1] != "nothing":
            return found
        scaler.update()
        found["stepped"].append(not torch.equal(before, model.lm_head.weight))
        found["scale"] = scaler.get_scale()
    return found


HOOKS: dict[str, Callable[[Any], Any]] = {
    "hook": lambda weight: weight.register_hook(lambda gradient: gradient * 0),
    "hook after accumulation": lambda weight: weight.register_post_accumulate_grad_hook(lambda weight: None),
}


def hook_experts(rank: int, make_hook: Callable[[Any], Any]) -> dict[str, str]:
    """Hooks that are made before experts are spread, before plan(), and inside a phase."""
    model = make_model(torch.float32)
    make_hook(model.model.layers[1].mlp.experts.down_proj)
    found = {"before": refusal(lambda: spread(model))}
    ep, model, trained, _ = make()
    hook = make_hook(ep.expert_parameters()[3])
    found["plan"] = refusal(lambda: ep.plan(draw_routes(rank, 1, 3)))
    with ep.plan(draw_routes(rank, 1, 3), phase="recompute") as phase, torch.no_grad(), phase.micro_step(0):
        trained(input_ids=draw_batches(rank, 1, 3)[0], use_cache=False)
    hook.remove()
    found["removed"] = refusal(lambda: step(ep, trained, rank))

    def inside() -> None:
        with ep.plan(draw_routes(rank, 1, 3)) as phase:
            make_hook(ep.expert_parameters()[3])
            with phase.micro_step(0):
                loss_of(trained, draw_batches(rank, 1, 3)[0]).backward()
            phase.drain()

    found["inside"] = refusal(inside)
    return found


def zero_inside(rank: int, to_none: bool, when: str) -> str:
    """The trainer calls zero_grad() inside of a phase."""
    ep, _, trained, optimizer = make("ddp")
    step(ep, trained, rank)

    def run() -> None:
        with ep.plan(draw_routes(rank, 2, 3)) as phase:
            for m, batch in enumerate(draw_batches(rank, 2, 3)):
                if when == "between" or (when == "first" and m == 0):
                    optimizer.zero_grad(to_none)
                with phase.micro_step(m):
                    loss = loss_of(trained, batch)
                    if when == "in the micro-step":
                        optimizer.zero_grad(to_none)
                    loss.backward()
            if when == "last":
                optimizer.zero_grad(to_none)
            phase.drain()

    return refusal(run)


ZEROED = [(to_none, when) for to_none in (True, False) for when in ("first", "between", "in the micro-step", "last")]


def leave_unused(rank: int) -> list[Any]:
    """A tower that no rank used, and one that rank 1 alone did."""
    model = make_model(torch.float32)
    model.unused, model.used = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for tower in (model.unused, model.used):
        torch.nn.init.ones_(tower.weight)
        torch.nn.init.ones_(tower.bias)
    ep = spread(model)
    trained = ep.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    (batch,) = draw_batches(rank, 1, 3)
    with ep.plan(draw_routes(rank, 1, 3)) as phase:
        with phase.micro_step(0):
            loss = loss_of(trained, batch)
            (loss + model.used(torch.ones(2)).sum() if rank == 1 else loss).backward()
        phase.drain()
    optimizer.step()
    return [model.unused.weight.grad is None, float(model.unused.weight.max()), model.used.weight.grad.tolist()]


def work(rank: int) -> dict[str, Any]:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    found: dict[str, Any] = {}
    for trainer in TRAINERS:
        for checkpointing in (None, True, False):
            found[f"{trainer}, {checkpointing}"] = train_without_phase(rank, trainer, checkpointing)
    for wrapped in (False, True):
        for frozen in (False, True):
            found[f"outside, {wrapped}, {frozen}"] = refuse_without_phase(rank, wrapped, frozen)
    for wrapper, when in BESIDES:
        found[f"{wrapper}, {when}"] = add_beside(rank, wrapper, when)
    found["clipped by torch"] = clip_by_torch(rank, torch.nn.utils.clip_grad_norm_)
    found["clipped outside"] = clip_by_torch_without_phase(rank, clip_by_accelerate)
    found["clipped by accelerate"] = clip_by_torch(rank, clip_by_accelerate)
    for wrapper in (None, "fsdp2", "ddp"):
        found[f"apart, {wrapper}"] = begin_apart(rank, wrapper)
    found["apart, sharded"] = begin_apart(rank, None, sharded=["*.q_proj.weight"])
    found["apart, no name"] = begin_apart(rank, None, sharded=["lm_tail.*"])
    found["drift"] = drift(rank)
    found["drift, own"] = drift(rank, wrapper="own")
    found["drift, sharded"] = drift(rank, sharded=["lm_head.weight"])
    found["another module"] = train_another_module(rank)
    found["another module, outside"] = train_another_module_without_phase(rank)
    found["a part"] = wrap_a_part()
    found["another group"] = average_over_another_group(rank)
    found["fsdp2 off"] = turn_fsdp2s_synchronization_off(rank)
    found["GradScaler"] = scale_gradients(rank, lambda: torch.amp.GradScaler("cpu", init_scale=4.0), 1)
    found["ShardedGradScaler"] = scale_gradients(rank, lambda: ShardedGradScaler("cpu", init_scale=4.0), 2)
    for name, make_hook in HOOKS.items():
        found[name] = hook_experts(rank, make_hook)
    for to_none, when in ZEROED:
        found[f"zeroed, {to_none}, {when}"] = zero_inside(rank, to_none, when)
    found["unused"] = leave_unused(rank)
    return found


TRAINERS = ("ddp", "fsdp2", "accelerate", "by hand")
BESIDES = [("ddp", "before"), ("ddp", "inside"), ("ddp", "after"), (None, "inside")]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_gradients_without_a_phase_are_those_of_one_process(
    found: list[dict[str, Any]], trainer: str, checkpointing: bool | None
) -> None:
    for of in found:
        assert of[f"{trainer}, {checkpointing}"] <= 1e-12


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_without_a_phase_is_refused_where_nothing_averages(
    found: list[dict[str, Any]], frozen: bool
) -> None:
    for of in found:
        assert of[f"outside, False, {frozen}"].startswith("RuntimeError: ep.wrap(model) was never called")
        said = of[f"outside, True, {frozen}"]
        assert said.startswith(
            "RuntimeError: a backward outside of a phase: ep.wrap(model) averages gradients in drain"
        )
        assert all(choice in said for choice in ('"ddp"', '"fsdp2"', '"own"', "ep.unplanned()"))


@pytest.mark.parametrize(("wrapper", "when"), BESIDES)
def test_an_auxiliary_loss_beside_a_phase_is_averaged_once(
    found: list[dict[str, Any]], wrapper: str | None, when: str
) -> None:
    for of in found:
        assert of[f"{wrapper}, {when}"] <= 1e-12


@pytest.mark.parametrize("by", ["torch", "accelerate"])
def test_ranks_that_clipped_by_norms_of_their_own_are_refused(found: list[dict[str, Any]], by: str) -> None:
    for of in found:
        said = of[f"clipped by {by}"]
        assert said.startswith("InputError: weights[")
        assert "expected the same on all ranks. Ranks have trained apart. Likely causes: torch.nn.utils.clip" in said


def test_ranks_that_clipped_without_a_phase_are_refused_in_the_next_forward(found: list[dict[str, Any]]) -> None:
    for of in found:
        *right, apart = of["clipped outside"]
        assert right == ["nothing"] * 2
        assert apart.startswith("InputError: weights[")
        assert "max_grad_norm=0" in apart


@pytest.mark.parametrize("wrapper", [None, "fsdp2"])
def test_weights_that_differ_from_the_start_are_refused_by_wrap(
    found: list[dict[str, Any]], wrapper: str | None
) -> None:
    for of in found:
        said = of[f"apart, {wrapper}"]
        assert said.startswith("InputError: weights[model.layers.1.self_attn.q_proj.weight]: ")
        assert "on rank 2, " in said
        assert "Load or initialize the same weights on all ranks" in said


def test_weights_that_ddp_broadcasts_or_that_others_shard_may_differ(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["apart, ddp"] == of["apart, sharded"] == of["drift, sharded"] == "nothing"
        assert of["apart, no name"] == "InputError: sharded: 'lm_tail.*' is the name of no parameter"


@pytest.mark.parametrize("case", ["drift", "drift, own"])
def test_weights_that_drift_apart_are_refused_by_plan(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        assert of[case].startswith("InputError: weights[lm_head.weight]: [")
        assert "] on rank 2; [" in of[case] or "] on rank 2, [" in of[case]


@pytest.mark.parametrize("case", ["another module", "another module, outside"])
def test_a_module_beside_the_wrapped_one_is_not_trained(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        assert of[case].startswith('RuntimeError: the module that ep.wrap(model, "ddp") returned did not run')


def test_a_part_of_the_model_cannot_be_wrapped(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["a part"].startswith("InputError: model: it is a part of the model whose experts are spread")
        assert "lacks lm_head.weight" in of["a part"]


def test_a_ddp_over_fewer_ranks_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        half = [0, 1] if rank < 2 else [2, 3]
        assert of["another group"].startswith(
            f"RuntimeError: DistributedDataParallel averages over ranks {half}, but the experts of this model are "
            "trained by ranks [0, 1, 2, 3]"
        )


def test_fsdp2_must_average_the_last_micro_step(found: list[dict[str, Any]]) -> None:
    for of in found:
        off, on_in_the_last = of["fsdp2 off"]
        assert off.startswith("RuntimeError: the last micro-step ran inside no_sync()")
        assert "set_requires_gradient_sync(False)" in off
        assert on_in_the_last == "nothing"


def test_a_scaler_of_one_rank_is_refused_and_one_of_all_ranks_skips_on_all(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        if rank != 1:  # which skips
            assert of["GradScaler"]["refused"][0].startswith("RuntimeError: torch.amp.GradScaler")
            assert "ShardedGradScaler" in of["GradScaler"]["refused"][0]
        assert of["ShardedGradScaler"] == {"refused": ["nothing"] * 2, "stepped": [False, True], "scale": 2.0}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_gradients_of_experts_are_refused(found: list[dict[str, Any]], name: str) -> None:
    for of in found:
        for when, layer in (("before", "model.layers.1"), ("plan", "model.layers.1"), ("inside", "model.layers.1")):
            assert of[name][when].startswith(f"InputError: layers: the down_proj of {layer}"), of[name]
            assert "has a hook on its gradient" in of[name][when]
        assert of[name]["removed"] == "nothing"


@pytest.mark.parametrize(("to_none", "when"), ZEROED)
def test_zero_grad_inside_a_phase_is_refused(found: list[dict[str, Any]], to_none: bool, when: str) -> None:
    for of in found:
        words = "RuntimeError: gradients of experts were written inside a phase"
        assert of[f"zeroed, {to_none}, {when}"].startswith(words), of[f"zeroed, {to_none}, {when}"]


def test_a_parameter_without_a_gradient_on_any_rank_has_none(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["unused"] == [True, 1.0, [[0.25, 0.25], [0.25, 0.25]]]
