"""Gradients are averaged over ranks inside and outside of phases; setups that do not average are rejected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from processes import RANKS
from refusals import refusal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from training import (
    begin,
    draw_batches,
    draw_routes,
    expected_gradients,
    gradient_error,
    loss_of,
    make_eager_model,
    make_model,
    run_phase,
    spread,
)

AUXILIARY_WEIGHT = 0.3  # weight of an auxiliary loss
F32 = torch.float32


def eager_gradients(seeds: list[int], scale: float = 1.0) -> dict[str, Any]:
    """Gradients of one process with all experts and its own routing: mean over ranks of the sum over seeds."""
    model = make_eager_model()
    for seed in seeds:
        for rank in range(RANKS):
            (loss_of(model, draw_batches(rank, 1, seed)[0]) * scale / RANKS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [None, True, False])  # None: no activation checkpointing
@pytest.mark.parametrize("trainer", ["ddp", "fsdp2", "accelerate", "by hand"])
def test_gradients_without_a_phase_match_one_process(rank: int, trainer: str, reentrant: bool | None) -> None:
    model = make_model(torch.float64)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
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
        for p in ep.dense_parameters():
            dist.all_reduce(p.grad)
            p.grad /= RANKS
    assert gradient_error(ep, model, eager_gradients([3, 4])) <= 1e-12


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_outside_a_phase_is_rejected_if_nothing_averages_gradients(rank: int, frozen: bool) -> None:
    model = make_model(torch.float64)
    ep = spread(model)
    for wrapped in (False, True):
        if wrapped:
            ep.wrap(model)
        for weight in ep.expert_parameters():
            weight.requires_grad_(not frozen)
        said = refusal(loss_of(model, draw_batches(rank, 1, 3)[0]).backward)
        if wrapped:
            refused = "RuntimeError: a backward outside of a phase: ep.wrap(model) averages gradients in drain"
            assert said.startswith(refused)
            assert all(choice in said for choice in ('"ddp"', '"fsdp2"', '"own"', "ep.unplanned()"))
        else:
            assert said.startswith("RuntimeError: ep.wrap(model) was never called")


@pytest.mark.parametrize(
    ("wrapper", "when"), [("ddp", "before"), ("ddp", "inside"), ("ddp", "after"), (None, "inside")]
)
def test_an_auxiliary_loss_outside_a_phase_is_averaged_once(rank: int, wrapper: str | None, when: str) -> None:
    ep, model, trained = begin(wrapper)

    def add_auxiliary_loss(now: str) -> None:
        if now == when:
            with ep.unplanned() if now == "inside" else contextlib.nullcontext():
                (loss_of(trained, draw_batches(rank, 1, 4)[0]) * AUXILIARY_WEIGHT).backward()

    add_auxiliary_loss("before")
    run_phase(ep, trained, between=lambda m: add_auxiliary_loss("inside" if m == 1 else ""))
    add_auxiliary_loss("after")
    planned, aside = expected_gradients(), eager_gradients([4], AUXILIARY_WEIGHT)
    assert gradient_error(ep, model, {name: planned[name] + aside[name] for name in planned}) <= 1e-12


def clip_with_accelerate(parameters: Any, max_norm: float) -> None:
    accelerate.Accelerator(cpu=True).clip_grad_norm_(parameters, max_norm)


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, clip_with_accelerate])
def test_clipping_by_per_rank_norms_is_rejected(rank: int, clip: Callable[[Any, float], Any]) -> None:
    ep, model, trained = begin(dtype=F32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_phase(ep, trained)
    clip(model.parameters(), 0.1)
    optimizer.step()
    said = refusal(lambda: ep.plan(draw_routes(rank, 1, 4)))
    assert said.startswith("InputError: weights[")
    assert "expected the same on all ranks. Ranks have trained apart. Likely causes: torch.nn.utils.clip" in said


def test_clipping_by_per_rank_norms_outside_a_phase_is_rejected_in_the_next_forward(rank: int) -> None:
    ep, model, trained = begin("ddp", F32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for clip in (lambda parameters, norm: ep.clip_grad_norm_(norm), clip_with_accelerate):
        optimizer.zero_grad()
        loss_of(trained, draw_batches(rank, 1, 3)[0]).backward()
        clip(model.parameters(), 0.1)
        optimizer.step()
    said = refusal(lambda: loss_of(trained, draw_batches(rank, 1, 3)[0]).backward())
    assert said.startswith("InputError: weights[") and "max_grad_norm=0" in said


@pytest.mark.parametrize(("wrapper", "sharded", "refused"), [
    (None, (), True), ("fsdp2", (), True), ("ddp", (), False), (None, ["*.q_proj.weight"], False),
])  # fmt: skip
def test_different_initial_weights_are_rejected_unless_ddp_broadcasts_or_another_library_shards_them(
    rank: int, wrapper: str | None, sharded: Any, refused: bool
) -> None:
    model = make_model(F32)
    ep = spread(model)
    if rank == 2:
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight[3, 5] += 1e-3
    said = refusal(lambda: run_phase(ep, ep.wrap(model, wrapper, sharded=sharded)))
    if not refused:
        assert said == "nothing"
        return
    assert said.startswith("InputError: weights[model.layers.1.self_attn.q_proj.weight]: ")
    assert "on rank 2, " in said and "Load or initialize the same weights on all ranks" in said


@pytest.mark.parametrize("wrapper", [None, "ddp", "fsdp2"])
def test_tensor_parallel_weights_are_rejected_unless_the_trainer_averages(rank: int, wrapper: str | None) -> None:
    model = make_model(F32)
    ep, head = spread(model), model.lm_head
    mesh = init_device_mesh(head.weight.device.type, (RANKS,))
    head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    said = refusal(lambda: ep.wrap(model, wrapper))
    assert said.startswith("InputError: model: lm_head.weight is a DTensor that FSDP2 does not gather")
    assert refusal(lambda: ep.wrap(model, "own")) == "nothing"


def test_a_sharded_name_that_matches_no_parameter_is_rejected(rank: int) -> None:
    model = make_model(F32)
    said = refusal(lambda: spread(model).wrap(model, sharded=["lm_tail.*"]))
    assert said == "InputError: sharded: 'lm_tail.*' is the name of no parameter"


@pytest.mark.parametrize("options", [{}, {"wrapper": "own"}, {"sharded": ["lm_head.weight"]}])
def test_plan_rejects_weights_that_diverge_unless_another_library_shards_them(
    rank: int, options: dict[str, Any]
) -> None:
    model = make_model(F32)
    ep = spread(model)
    trained = ep.wrap(model, **options)
    run_phase(ep, trained)
    if rank == 2:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.001)
    said = refusal(lambda: run_phase(ep, trained))
    if "sharded" in options:
        assert said == "nothing"
        return
    assert said.startswith("InputError: weights[lm_head.weight]: [")
    assert "] on rank 2; [" in said or "] on rank 2, [" in said


def test_training_the_unwrapped_module_is_rejected(rank: int) -> None:
    refused = 'RuntimeError: the module that ep.wrap(model, "ddp") returned did not run'
    ep, model, _ = begin("ddp", F32)
    assert refusal(lambda: run_phase(ep, model)).startswith(refused)
    _, model, _ = begin("ddp", F32)
    assert refusal(loss_of(model, draw_batches(rank, 1, 3)[0]).backward).startswith(refused)


def test_wrapping_a_part_of_the_model_is_rejected(rank: int) -> None:
    model = make_model(F32)
    said = refusal(lambda: spread(model).wrap(model.model))
    assert said.startswith("InputError: model: it is a part of the model whose experts are spread")
    assert "lacks lm_head.weight" in said


def test_ddp_over_fewer_ranks_is_rejected(rank: int) -> None:
    ep, model, _ = begin("own", F32)
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    trained = DistributedDataParallel(model, process_group=halves[rank // 2])
    assert refusal(lambda: run_phase(ep, trained)).startswith(
        f"RuntimeError: DistributedDataParallel averages over ranks {[0, 1] if rank < 2 else [2, 3]}, but the experts "
        "of this model are trained by ranks [0, 1, 2, 3]"
    )


def test_fsdp2_must_average_the_last_micro_step(rank: int) -> None:
    for of_last in (False, True):
        ep, _, trained = begin("fsdp2", F32)

        def turn(m: int, trained: Any = trained, of_last: bool = of_last) -> None:
            if m < 2:
                trained.set_requires_gradient_sync(of_last and m == 1)

        said = refusal(lambda ep=ep, trained=trained, turn=turn: run_phase(ep, trained, between=turn))
        if of_last:
            assert said == "nothing"
        else:
            assert said.startswith("RuntimeError: the last micro-step ran inside no_sync()")
            assert "set_requires_gradient_sync(False)" in said


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_local_grad_scaler_is_rejected_and_a_sharded_one_skips_on_all_ranks(rank: int, kind: Any) -> None:
    """In the first of two steps, the gradients of one expert of rank 1 overflow."""
    ep, model, trained = begin(dtype=F32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=4.0)
    before = model.lm_head.weight.detach().clone()
    for seed in (3, 4):
        optimizer.zero_grad()
        run_phase(ep, trained, seed, 1, backward=lambda loss: scaler.scale(loss).backward())
        if seed == 3 and rank == 1:
            ep.expert_parameters()[0].grad[0, 0, 0] = torch.inf
        said = refusal(lambda: scaler.step(optimizer))
        if kind is torch.amp.GradScaler:
            skips = rank == 1
            assert skips or (said.startswith("RuntimeError: torch.amp.GradScaler") and "ShardedGradScaler" in said)
            return
        assert said == "nothing"
        scaler.update()
        assert torch.equal(before, model.lm_head.weight) == (seed == 3)
        assert scaler.get_scale() == 2.0


HOOKS: dict[str, Callable[[Any], Any]] = {
    "hook": lambda weight: weight.register_hook(lambda gradient: gradient * 0),
    "hook after accumulation": lambda weight: weight.register_post_accumulate_grad_hook(lambda weight: None),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_gradients_of_experts_are_rejected(rank: int, name: str) -> None:
    """Registers hooks before experts are spread, before plan(), and inside a phase."""

    def expect_refused(act: Callable[[], Any]) -> None:
        said = refusal(act)
        assert said.startswith("InputError: layers: the down_proj of model.layers.1"), said
        assert "has a hook on its gradient" in said

    hook, model = HOOKS[name], make_model(F32)
    hook(model.model.layers[1].mlp.experts.down_proj)
    expect_refused(lambda: spread(model))
    ep, model, trained = begin(dtype=F32)
    handle = hook(ep.expert_parameters()[3])
    expect_refused(lambda: ep.plan(draw_routes(rank, 1, 3)))
    with ep.plan(draw_routes(rank, 1, 3), phase="recompute") as phase, torch.no_grad(), phase.micro_step(0):
        trained(input_ids=draw_batches(rank, 1, 3)[0], use_cache=False)
    handle.remove()
    assert refusal(lambda: run_phase(ep, trained)) == "nothing"
    expect_refused(lambda: run_phase(ep, trained, between=lambda m: m == 0 and hook(ep.expert_parameters()[3])))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["first", "between", "in the micro-step", "last"])
def test_zero_grad_inside_a_phase_is_rejected(rank: int, to_none: bool, when: str) -> None:
    ep, model, trained = begin("ddp", F32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_phase(ep, trained)

    def zero(now: set[str]) -> None:
        if when in now:
            optimizer.zero_grad(to_none)

    def between(m: int) -> None:
        zero([{"first", "between"}, {"between"}, {"last"}][m])

    said = refusal(
        lambda: run_phase(
            ep, trained, backward=lambda loss: (zero({"in the micro-step"}), loss.backward()), between=between
        )
    )
    assert said.startswith("RuntimeError: gradients of experts were written inside a phase"), said


def test_a_parameter_without_a_gradient_on_any_rank_has_none(rank: int) -> None:
    """No rank uses the first tower; only rank 1 uses the second."""
    model = make_model(F32)
    model.unused, model.used = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for tower in (model.unused, model.used):
        torch.nn.init.ones_(tower.weight)
        torch.nn.init.ones_(tower.bias)
    ep = spread(model)
    trained = ep.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    of_used = lambda: model.used(torch.ones(2)).sum() if rank == 1 else 0.0  # noqa: E731
    run_phase(ep, trained, 3, 1, backward=lambda loss: (loss + of_used()).backward())
    optimizer.step()
    assert model.unused.weight.grad is None and float(model.unused.weight.max()) == 1.0
    assert model.used.weight.grad.tolist() == [[0.25, 0.25], [0.25, 0.25]]
