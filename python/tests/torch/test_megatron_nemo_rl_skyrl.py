"""Adapters of trainers, with fakes of the modules in which the trainers look up the schedule, and of their calls.

Each fake makes the calls of one trainer as its own code does: the type of its micro-batches, what its forward step does
with routes, and what surrounds the call. lab/engines runs the trainers' own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import TOKENS, Case, batch, begin_groups, expect_equal, routes_of
from test_megatron_pipeline import MICRO_STEPS, STAGES, STEP, Pipeline
from test_megatron_schedule import choose_where_none_is_recorded

from foremoe.megatron.schedule import Schedule

CASE = Case(ep=2, ddp={"overlap_grad_reduce": True})


@contextlib.contextmanager
def active() -> Iterator[pytest.MonkeyPatch]:
    """Sets arguments of attach(), which adapters read, for one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREMOE_ATTACH", "mode=active,ranks_per_node=2")
        yield patch


def fake_module(patch: pytest.MonkeyPatch, name: str, **members: Any) -> Any:
    """Puts a module with Megatron-LM's get_forward_backward_func(), and its packages, into sys.modules."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        patch.setitem(sys.modules, of := ".".join(parts[:i]), types.ModuleType(of))
    module: Any = sys.modules[name]
    vars(module).update(members, get_forward_backward_func=get_forward_backward_func)
    return module


def start(adapter: str) -> Schedule:
    """Starts an adapter as foremoe.ray does. Returns its schedule."""
    module = importlib.import_module(adapter)
    module.init()
    found: Schedule = module.schedule
    return found


class Trainer(Pipeline):
    """This rank's part of a pipeline, and what all fakes need."""

    def routes(self, m: int) -> list[torch.Tensor]:
        return [routes_of(STEP, m, layer, dist.get_rank()) for layer in self.layers]

    def gradients(self) -> list[dict[str, Any]]:
        return [{name: p.main_grad.clone() for name, p in self.nets[0].named_parameters()}]

    def loss(self, y: Any) -> Any:
        return (loss := y.square().mean()), {"loss": loss.detach().clone()}


def expect_planned(trainer: type[Trainer], adapter: str, module: Any, case: Case = CASE) -> Schedule:
    """Asserts that two planned steps have the gradients and losses of a step without ForeMoE."""
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    expected = trainer(case).train(module)
    planned = trainer(case)
    schedule = start(adapter)
    for _ in range(2):
        found = planned.train(module)
        expect_equal(found, expected)
    metrics = schedule.metrics()
    assert metrics["foremoe/rho_computed"] == metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
    return schedule


# NeMo-RL: a generator of objects, the model itself instead of a list, and replay that is cleared after an error.


@dataclasses.dataclass
class ProcessedMicrobatch:
    x: torch.Tensor
    routed_experts_cp_sharded: list[torch.Tensor] | None


class NemoRL(Trainer):
    groups = 1  # calls of the schedule before an optimizer step; several with its SingleController
    post_processing: Any = types.SimpleNamespace()

    def processed(self, micro_batches: range) -> Iterator[ProcessedMicrobatch]:
        for m in micro_batches:
            yield ProcessedMicrobatch(batch(STEP, m), self.routes(m))

    def forward_step(self, data: Iterator[Any], model: Any, post_processing_fn: Any, router_replay_train: bool) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        of = next(data)
        replays = [layer.router.router_replay for layer in self.nets[0].moe]
        for replay, target in zip(replays, of.routed_experts_cp_sharded or [], strict=True):
            replay.set_target_indices(target)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            y = model(of.x)
        except Exception:
            self.clear()
            raise
        for replay in replays:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return y, self.loss

    def clear(self) -> None:
        for layer in self.nets[0].moe:
            layer.router.router_replay.clear_router_replay_action()
            layer.router.router_replay.clear_indices()

    def forward_backward(self, module: Any, micro_batches: range) -> list[Any]:
        step = functools.partial(self.forward_step, post_processing_fn=self.post_processing, router_replay_train=True)
        schedule = module.get_forward_backward_func()
        self.clear()
        try:
            found: list[Any] = schedule(
                forward_step_func=step, data_iterator=self.processed(micro_batches), model=self.models[0],
                num_microbatches=len(micro_batches), seq_length=TOKENS, micro_batch_size=1, decoder_seq_length=TOKENS,
                forward_only=False,
            )  # fmt: skip
        finally:
            self.clear()
        return found

    def train(self, module: Any) -> dict[str, Any]:
        model, config, losses = self.models[0], self.config, []
        model.zero_grad_buffer()
        own = config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func
        if self.groups > 1:
            config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = None, _nothing, None
        size = MICRO_STEPS // self.groups
        for first in range(0, MICRO_STEPS, size):
            with model.no_sync() if self.groups > 1 else contextlib.nullcontext():
                losses += self.forward_backward(module, range(first, first + size))
        config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = own
        if self.groups > 1:
            model.scale_gradients(1 / 3)
            model.start_grad_sync()
            config.finalize_model_grads_func([model], None)
        return {"losses": [float(of["loss"]) for of in losses], "inputs": [], "weights": self.gradients()}


_nothing = contextlib.nullcontext
NEMO_RL = "nemo_rl.models.megatron.train"


@pytest.mark.parametrize("recompute", ["", "moe"])
@pytest.mark.parametrize("groups", [1, 2])
def test_nemo_rl_trains_by_planned_steps(rank: int, groups: int, recompute: str) -> None:
    with active() as patch:
        patch.setattr(NemoRL, "groups", groups)
        case = dataclasses.replace(CASE, recompute=recompute)
        schedule = expect_planned(NemoRL, "foremoe.nemo_rl", fake_module(patch, NEMO_RL), case)
        schedule.replicas.detach()


def test_tokens_without_a_route_are_computed_at_home_under_nemo_rl(rank: int) -> None:
    own = Trainer.routes

    def routes(self: Any, m: int) -> list[torch.Tensor]:
        return [torch.cat([of[:-5], torch.full_like(of[-5:], -1)]) for of in own(self, m)]

    begin_groups(2, pipeline_model_parallel_size=STAGES)
    with active() as patch:
        choose_where_none_is_recorded(patch)
        patch.setattr(NemoRL, "routes", routes)
        module = fake_module(patch, NEMO_RL)
        expected = NemoRL(CASE).train(module)
        planned, schedule = NemoRL(CASE), start("foremoe.nemo_rl")
        expect_equal(planned.train(module), expected)
        assert 0 < schedule.metrics()["foremoe/mismatched"] < 0.2
        schedule.replicas.detach()


def test_the_value_model_of_nemo_rl_passes(rank: int) -> None:
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    with active() as patch:
        patch.setattr(NemoRL, "post_processing", types.SimpleNamespace(prepare_fn=lambda *_: None))
        module = fake_module(patch, NEMO_RL)
        schedule = start("foremoe.nemo_rl")
        NemoRL(CASE).train(module)
        assert schedule.replicas is None


# SkyRL: dictionaries from which the forward step takes the routes, and to which it adds what its loss reads; replay of
# all routers of the process at once, cleared around the call.


class SkyRL(Trainer):
    def forward_step(self, data: Iterator[Any], model: Any) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        of = next(data)
        RouterReplay.set_replay_data(of.pop("rollout_expert_indices"))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        assert "packed_seq_params" not in of
        of["packed_seq_params"] = True
        y = model(of["sequences"])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return y, functools.partial(self.loss_of, data=of)

    def loss_of(self, y: Any, data: dict[str, Any]) -> Any:
        assert data["packed_seq_params"]
        return self.loss(y)

    def clear(self) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()

    def train(self, module: Any) -> dict[str, Any]:
        self.models[0].zero_grad_buffer()
        batches = [{"sequences": batch(STEP, m), "rollout_expert_indices": self.routes(m)} for m in range(MICRO_STEPS)]
        schedule = module.get_forward_backward_func()
        self.clear()
        try:
            losses = schedule(
                forward_step_func=self.forward_step, data_iterator=iter(batches), model=self.models,
                num_microbatches=len(batches), seq_length=TOKENS, micro_batch_size=1, forward_only=False,
            )  # fmt: skip
        finally:
            self.clear()
        return {"losses": [float(of["loss"]) for of in losses], "inputs": [], "weights": self.gradients()}


@pytest.mark.parametrize("recompute", ["", "moe"])
def test_skyrl_trains_by_planned_steps(rank: int, recompute: str) -> None:
    with active() as patch:
        module = fake_module(patch, "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper")
        case = dataclasses.replace(CASE, recompute=recompute)
        expect_planned(SkyRL, "foremoe.skyrl", module, case).replicas.detach()
