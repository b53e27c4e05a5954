"""The wrapper of the schedule, with a trainer that replays routes as verl, NeMo-RL, SkyRL, ROLL and ms-swift do.

The trainer's schedules are Megatron-LM's own: without a pipeline, and 1F1B with two stages.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import TOKENS, Case, batch, begin_groups, expect_equal, routes_of
from processes import gather
from refusals import refusal
from test_megatron_pipeline import MICRO_STEPS, STAGES, STEP, Pipeline

import foremoe.megatron
from foremoe._engine.arguments import OPTIONS
from foremoe._variable import ARGUMENTS, VARIABLE
from foremoe.megatron import rehearsal
from foremoe.megatron import schedule as schedules
from foremoe.megatron.schedule import Adapter, install
from foremoe.ray import ADAPTERS

WITHOUT_ROUTES = 5  # rows of each micro-batch, in the case "partly"


class Trainer(Pipeline):
    """A trainer whose forward step takes a micro-batch, gives its routes to the routers, and calls the model.

    Its module `a_trainer` looks up the schedule. As in ms-swift, the forward step changes the micro-batch.
    """

    routes = "all"  # or "partly": some rows without; or "none"

    def micro_batch(self, m: int) -> dict[str, Any]:
        of_layers = [routes_of(STEP, m, layer, dist.get_rank()).clone() for layer in self.layers]
        for of in of_layers if self.routes == "partly" else []:
            of[m : m + WITHOUT_ROUTES] = -1
        return {"number": m, "x": batch(STEP, m), "routes": of_layers if self.routes != "none" else None}

    def schedule(self, forward_only: bool = False, in_list: bool = True, micro_batches: int = MICRO_STEPS) -> Any:
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        net = self.nets[0]

        def forward_step(data: Iterator[Any], model: Any) -> Any:
            of = next(data)
            routes = of.pop("routes")
            for layer, target in zip(net.moe, routes or [], strict=False):
                layer.router.router_replay.set_target_indices(target)
                layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            y = model(of["x"])
            if self.case.recompute and not forward_only:
                again = RouterReplayAction.REPLAY_BACKWARD
                y.register_hook(lambda _: RouterReplay.set_global_router_replay_action(again))
            return y, lambda y: ((loss := y.square().mean()), {"loss": loss.detach().clone()})

        data = RerunDataIterator(iter([self.micro_batch(m) for m in range(micro_batches)]))  # has no __iter__()
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()
        return sys.modules["a_trainer"].get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[data] if in_list else data,
            model=self.models if in_list else self.models[0],
            num_microbatches=MICRO_STEPS,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def train(self, **options: Any) -> dict[str, Any]:
        for model in self.models:
            model.zero_grad_buffer()
        losses = self.schedule(**options)
        weights = {name: p.main_grad.clone() for name, p in self.nets[0].named_parameters()}
        return {"losses": [float(of["loss"]) for of in losses], "inputs": [], "weights": [weights]}


CASE = Case(ep=2, ddp={"overlap_grad_reduce": True})
RECOMPUTED = Case(ep=2, ddp={"overlap_grad_reduce": True}, recompute="moe")


def make_trainer(case: Case = CASE, **of_pipeline: Any) -> Trainer:
    """Makes a trainer, and its module anew."""
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    make_module()
    return Trainer(case, **of_pipeline)


def make_module() -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    module: Any = types.ModuleType("a_trainer")
    module.get_forward_backward_func = get_forward_backward_func
    sys.modules["a_trainer"] = module


def planned(mode: str = "active", **of_adapter: Any) -> schedules.Schedule:
    """Wraps the schedule of the trainer's module."""
    return install(Adapter("a trainer", ("a_trainer",), **of_adapter), {"mode": mode, "ranks_per_node": 2})


def choose_where_none_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """Lets routers choose for rows of -1, as NeMo-RL does."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    own = RouterReplay.get_replay_topk

    def get_replay_topk(replay: Any, scores: Any, topk: int, *more: Any, **named: Any) -> Any:
        targets = replay.target_topk_idx
        if targets is None or (targets >= 0).all():
            return own(replay, scores, topk, *more, **named)
        chosen = torch.where(targets >= 0, targets, scores.topk(topk, dim=1).indices)
        return scores.gather(1, chosen), chosen

    patch.setattr(RouterReplay, "get_replay_topk", get_replay_topk)


@pytest.mark.parametrize("in_list", [True, False])
@pytest.mark.parametrize("case", [CASE, RECOMPUTED], ids=["kept", "recomputed"])
def test_planned_training_steps_equal_the_trainers_own(rank: int, case: Case, in_list: bool) -> None:
    expected = make_trainer(case).train()
    trainer = make_trainer(case)
    schedule = planned()
    assert planned() is schedule  # not wrapped twice
    random = torch.get_rng_state()
    for _ in range(2):
        found = trainer.train(in_list=in_list)
        expect_equal(found, expected)
    assert torch.equal(torch.get_rng_state(), random)
    metrics = schedule.metrics()
    assert metrics["foremoe/rho_computed"] == metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
    assert "foremoe/mismatched" not in metrics
    schedule.replicas.detach()


def test_rows_for_which_the_router_chooses_are_computed_at_home(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        choose_where_none_is_recorded(patch)
        patch.setattr(Trainer, "routes", "partly")
        expected = make_trainer().train()
        trainer = make_trainer()
        schedule = planned()
        found = trainer.train()
        expect_equal(found, expected)
        assert 0 < schedule.metrics()["foremoe/mismatched"] < 0.2
        patch.setattr(Trainer, "routes", "all")
        trainer.train()
        assert "foremoe/mismatched" not in schedule.metrics()
    schedule.replicas.detach()


def test_a_training_step_without_routes_is_an_error_on_all_ranks(rank: int) -> None:
    trainer = make_trainer()
    schedule = planned()
    trainer.routes = "none" if rank == 1 else "all"
    said = gather(refusal(trainer.train))
    own = "router_replay: gives no routes to the routers of a step of a trainer"
    assert said[1].startswith(f"InputError: {own}")
    assert all(said[other].startswith(f"InputError: rank 1 refused: {own}") for other in (0, 2, 3)), said
    schedule.replicas.detach()


def test_forward_only_calls_are_planned_if_they_replay_routes(rank: int) -> None:
    trainer = make_trainer(dense_stage=0)  # this stage has no routes to tell
    expected = trainer.schedule(forward_only=True)
    schedule = planned()
    trainer.schedule(forward_only=True)
    assert schedule.replicas is None
    trainer.train()
    plans: list[str] = []
    plan = schedule.replicas.plan
    schedule.replicas.plan = lambda counts, phase: plans.append(phase) or plan(counts, phase)
    assert repr(trainer.schedule(forward_only=True)) == repr(expected)
    assert plans == ["recompute"]
    trainer.routes = "none"
    trainer.schedule(forward_only=True)
    assert plans == ["recompute"]
    schedule.replicas.detach()


def test_calls_of_other_models_pass_through_or_are_refused(rank: int) -> None:
    trainer, other = make_trainer(), make_trainer()
    schedule = planned(is_policy=lambda call: call.chunks[0] is not other.models[0])
    trainer.train()
    before = schedule.metrics()
    other.train()
    assert schedule.metrics() == before
    schedule.replicas.detach()
    make_module()
    schedule = planned()
    trainer.train()
    other.schedule(forward_only=True)
    assert refusal(other.train).startswith("InputError: model: is another than that of the first training step")
    schedule.replicas.detach()


def test_shadow_mode_changes_no_results_and_is_done_before_the_trainer_sleeps(rank: int) -> None:
    expected = make_trainer().train()
    trainer = make_trainer()
    schedule = planned("shadow", sleeps=lambda: True)
    trainer.schedule(forward_only=True)
    assert schedule.replicas is None
    found = trainer.train()
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(found["weights"][0][name], of) for name, of in expected["weights"][0].items())
    assert schedule.metrics()["foremoe/rho_planned"] < schedule.metrics()["foremoe/rho_vanilla"]
    schedule.replicas.detach()


def test_wrong_calls_are_refused_by_name(rank: int) -> None:
    trainer = make_trainer()
    schedule = planned()
    trainer.train()
    assert "data_iterator: has 7 micro-batches; expected num_microbatches = 8" in refusal(
        lambda: trainer.schedule(micro_batches=MICRO_STEPS - 1)
    )
    schedule.replicas.detach()
    sys.modules["a_trainer"] = types.ModuleType("a_trainer")
    assert refusal(planned).startswith(
        "ImportError: foremoe: this version of a trainer has no a_trainer.get_forward_backward_func"
    )


def test_foremoe_attach_takes_all_arguments_of_attach_except_arrays_and_modules() -> None:
    own = set(inspect.signature(foremoe.megatron.attach).parameters) - {"model_chunks", "homes", "options"}
    assert sorted(ARGUMENTS) == sorted(own | OPTIONS)


@pytest.mark.parametrize("name", sorted({"foremoe.slime", "foremoe.miles", *ADAPTERS.values()}))
def test_every_adapter_refuses_a_wrong_cluster_before_training(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(VARIABLE, "cluster=h10")
    init = importlib.import_module(name).init
    with pytest.raises(foremoe.InputError, match=r"^FOREMOE_ATTACH: cluster: 'h10' is neither a file nor one of a100"):
        init(*[None] * len(inspect.signature(init).parameters))


def routes(*rows: list[int]) -> Any:
    return [[torch.tensor(rows)]]


def test_rows_are_counted_once_for_each_of_their_experts() -> None:
    counts, chosen = rehearsal.count(routes([0, 3], [3, 3], [2, 0]), 4)
    assert (counts.tolist(), chosen) == ([[[2, 0, 1, 2]]], False)
    counts, chosen = rehearsal.count(routes([0, 3], [-1, -1]), 4)
    assert (counts.tolist(), chosen) == ([[[1, 0, 0, 1]]], True)
    for wrong, said in (([0, 4], "has ids above 3"), ([-1, 2], "has rows with −1 in some entries")):
        with pytest.raises(foremoe.InputError, match=rf"routes\[0\]\[0\]: {said}"):
            rehearsal.count(routes([0, 3], wrong), 4)
