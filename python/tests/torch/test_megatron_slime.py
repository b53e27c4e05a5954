"""The adapters of slime and miles, with a trainer that replays lists of routes and makes the calls that they make.

The trainers' modules, lists and process groups are fakes, written from their sources. lab/engines runs slime's and
miles' own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from megatron_training import TOKENS, TOP_K, Case, batch, begin_groups, expect_equal, is_bitwise, routes_of
from processes import DEVICE, gather
from refusals import refusal
from test_megatron_pipeline import STAGES, STEP, Pipeline

import foremoe.miles
import foremoe.slime
from foremoe.megatron.shadow import Shadow

OF_STEPS = [4, 3]  # micro-batches of each training step of a rollout
ACTIVE = "mode=active,ranks_per_node=2"
ADAPTERS: dict[str, Any] = {"slime": foremoe.slime, "miles": foremoe.miles}
of_both = pytest.mark.parametrize("trainer", ADAPTERS)


class Lists(Pipeline):
    """A trainer whose routers replay lists of routes, [micro-batch] int32 [rows, top_k]."""

    def __init__(self, trainer: str, **of_pipeline: Any) -> None:
        super().__init__(Case(ep=2, ddp={"overlap_grad_reduce": True}), **of_pipeline)
        self.models[0].role = "actor"
        self.trainer = trainer
        for i, layer in zip(self.layers, self.nets[0].moe, strict=True):
            lists = [self.routes(m, i) for m in range(sum(OF_STEPS))]
            layer.router.routing_replay = types.SimpleNamespace(top_indices_list=lists, forward_index=0)
        self.replays = [layer.router.routing_replay for layer in self.nets[0].moe]

    def routes(self, m: int, layer: int) -> Any:
        routes = routes_of(STEP, m, layer, dist.get_rank()).int().cpu()
        if self.trainer == "miles":
            routes[5 * m : 5 * m + 5] = -1  # padding
        return routes

    def set_stage(self, stage: str) -> None:
        os.environ["ROUTING_REPLAY_STAGE"] = sys.modules["miles.utils.replay_base"].routing_replay_manager.stage = stage

    def rollout(self, stage: str = "replay_forward") -> dict[str, Any]:
        """Computes log-probabilities, in this stage of replay, and trains. Returns losses and gradients."""
        self.set_stage(stage)
        losses = [loss for step in range(len(OF_STEPS)) for loss in self.call(step, forward_only=True)]
        for replay in self.replays:  # clear_all_forward()
            replay.forward_index = 0
        self.set_stage("replay_backward")
        weights = []
        for step in range(len(OF_STEPS)):
            for model in self.models:
                model.zero_grad_buffer()
            losses += self.call(step)
            weights.append({name: p.main_grad.clone() for name, p in self.nets[0].named_parameters()})
        for replay in self.replays:
            replay.forward_index = 0
        return {"losses": losses, "inputs": [], "weights": weights}

    def call(self, step: int, forward_only: bool = False) -> list[float]:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        first = sum(OF_STEPS[:step])
        replays = not forward_only or os.environ["ROUTING_REPLAY_STAGE"] == "replay_forward"

        def forward_step(data: Any, model: Any) -> Any:
            m = data.get_next()
            for i, layer in zip(self.layers, self.nets[0].moe, strict=True):
                own = layer.router.routing_replay
                routes = own.top_indices_list[own.forward_index] if replays else self.routes(m, i)
                own.forward_index += replays
                routes = torch.where(routes < 0, torch.arange(TOP_K, dtype=torch.int32), routes)
                layer.router.router_replay.set_target_indices(routes.long().to(DEVICE))
                layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            return model(batch(STEP, m)), lambda y: ((loss := y.square().mean()), {"loss": loss.detach().clone()})

        losses = sys.modules[f"{self.trainer}.backends.megatron_utils.model"].get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[types.SimpleNamespace(get_next=iter(range(first, sum(OF_STEPS))).__next__)],
            model=self.models,
            num_microbatches=OF_STEPS[step],
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [float(of["loss"]) for of in losses]


@contextlib.contextmanager
def faked(trainer: str, attach: str | None = None, **args: Any) -> Iterator[Any]:
    """Fakes the trainer's modules and variables. Yields its adapter; attach: FOREMOE_ATTACH of a call of init()."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    begin_groups(2, pipeline_model_parallel_size=STAGES)
    fakes: dict[str, Any] = {
        f"{trainer}.backends.megatron_utils.model": {"get_forward_backward_func": get_forward_backward_func},
        "miles.utils.replay_base": {"routing_replay_manager": types.SimpleNamespace(enabled=True, stage="")},
    }
    adapter = ADAPTERS[trainer]
    with pytest.MonkeyPatch.context() as patch:
        for name, members in fakes.items():
            parts = name.split(".")
            for end in range(1, len(parts)):
                patch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
            patch.setitem(sys.modules, name, types.SimpleNamespace(**members))
        patch.setenv("ENABLE_ROUTING_REPLAY", "1")
        patch.setenv("ROUTING_REPLAY_STAGE", "")
        patch.setattr(adapter, "schedule", None)
        if attach is not None:
            patch.setenv("FOREMOE_ATTACH", attach)
            adapter.init(types.SimpleNamespace(**{"use_routing_replay": True, "offload_train": False} | args))
        yield adapter
        if attach is not None and adapter.schedule.replicas is not None:
            adapter.schedule.replicas.detach()


def unplanned(trainer: str, **of_pipeline: Any) -> dict[str, Any]:
    with faked(trainer):
        return Lists(trainer, **of_pipeline).rollout()


@contextlib.contextmanager
def plans_of(adapter: Any) -> Iterator[list[str]]:
    """Records the phases and micro-batches of plans."""
    found: list[str] = []
    plan = adapter.schedule.replicas.plan

    def recorded(counts: Callable[[], Any], phase: str) -> Any:
        def noted() -> Any:
            found.append(f"{phase} {len(of := counts())}")
            return of

        return plan(noted, phase)

    adapter.schedule.replicas.plan = recorded
    yield found
    del adapter.schedule.replicas.plan


@of_both
@pytest.mark.parametrize("dense_stage", [-1, 0])
def test_steps_and_log_probabilities_that_replay_lists_are_planned(rank: int, trainer: str, dense_stage: int) -> None:
    expected = unplanned(trainer, dense_stage=dense_stage)
    with faked(trainer, ACTIVE) as adapter:
        model = Lists(trainer, dense_stage=dense_stage)
        expect_equal(model.rollout(), expected)
        with plans_of(adapter) as plans:
            expect_equal(model.rollout(), expected)
            expect_equal(model.rollout("record"), expected)
        trained = ["policy_update 4", "policy_update 3"]
        assert plans == ["recompute 4", "recompute 3", *trained, *trained]
        metrics = adapter.schedule.metrics()
        if model.layers:
            assert metrics["foremoe/rho_computed"] == metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
            assert "foremoe/mismatched" not in metrics


@of_both
def test_shadow_mode_needs_no_variable_and_changes_no_results(rank: int, trainer: str) -> None:
    with faked(trainer, "") as adapter:
        assert is_bitwise(Lists(trainer).rollout(), unplanned(trainer))
        adapter.schedule.replicas.wait()
        assert adapter.schedule.metrics()["foremoe/rho_planned"] < adapter.schedule.metrics()["foremoe/rho_vanilla"]


def test_calls_of_a_critic_run_unchanged(rank: int) -> None:
    with faked("slime", ACTIVE) as adapter:
        model = Lists("slime")
        model.models[0].role = "critic"
        model.rollout()
        assert adapter.schedule.replicas is None


def test_lists_that_cannot_be_planned_are_refused_on_all_ranks(rank: int) -> None:
    def expect(problem: str) -> None:
        said = gather(refusal(lambda: model.call(1)))
        assert said[2].startswith(f"InputError: {problem}"), said
        assert all(said[other].startswith(f"InputError: rank 2 refused: {problem}") for other in (0, 1, 3)), said

    with faked("slime", ACTIVE):
        model = Lists("slime")
        model.rollout()
        own = model.replays[1].top_indices_list
        model.replays[1].top_indices_list = own[:2] if rank == 2 else own
        expect("top_indices_list[1]: has 2 micro-batches; expected 0 to 2 among them")
        lazy = types.SimpleNamespace(materialize_for_routing_replay=None)
        model.replays[1].top_indices_list = [own[0], lazy, own[2]] if rank == 2 else own
        expect("top_indices_list[1][1]: is read when it is replayed")
        if rank == 2:
            del model.nets[0].moe[1].router.routing_replay
        expect("routing_replay[1]: is missing in the router")
        os.environ["ENABLE_ROUTING_REPLAY"] = "0" if rank == 2 else "1"
        expect("router_replay: gives no routes to the routers of a step of slime")


@of_both
def test_arguments_that_active_mode_cannot_run_with_are_refused_by_name(rank: int, trainer: str) -> None:
    def said(attach: str = ACTIVE, **args: Any) -> str:
        def begin() -> None:
            with faked(trainer, attach, **args):
                pass

        return refusal(begin)

    assert said(use_routing_replay=False).startswith("InputError: use_routing_replay: is False; mode active needs")
    assert said(moe_router_fusion=True).startswith("InputError: moe_router_fusion: is True; expected False")
    asleep = "InputError: offload_train: is True"
    assert said(offload_train=True).startswith(f"{asleep}, but torch.distributed.new_group is of torch.distributed.")
    with sleeping_groups(trainer) as patch:
        assert said(offload_train=True).startswith(f"{asleep} with TMS_INIT_ENABLE_CPU_BACKUP=None; expected 1")
        patch.setenv("TMS_INIT_ENABLE_CPU_BACKUP", "0")
        assert "TMS_INIT_ENABLE_CPU_BACKUP=0" in said(offload_train=True)
        patch.setenv("TMS_INIT_ENABLE_CPU_BACKUP", "1")
        assert said(offload_train=True) == "nothing"
    assert said("", use_routing_replay=False, moe_router_fusion=True, offload_train=True) == "nothing"


class Wrapper(dist.ProcessGroup):
    """A group that its trainer ends and makes again. Functions of torch.distributed take the group inside."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.make, self.group = make, make()
        self.made.append(self)

    def _get_backend(self, device: Any) -> Any:
        return self.group._get_backend(device)

    @classmethod
    def sleep(cls) -> None:
        for of in cls.made:
            dist.destroy_process_group(of.group)
            of.group = None

    @classmethod
    def wake_up(cls) -> None:
        dist.barrier()
        for of in cls.made:
            of.group = of.make()


@contextlib.contextmanager
def sleeping_groups(trainer: str) -> Iterator[pytest.MonkeyPatch]:
    """Wraps the groups that are made inside, as the trainer does."""
    new_group = dist.new_group

    def group_in(of: Any) -> Any:
        if isinstance(of, Wrapper):
            if of.group is None:
                raise RuntimeError("the trainer sleeps")
            return of.group
        return of

    def unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: function(
            *map(group_in, given), **{name: group_in(of) for name, of in named.items()}
        )

    def wrapped(*given: Any, **named: Any) -> Any:
        return Wrapper(lambda: new_group(*given, **named))

    wrapped.__module__ = f"{trainer}.utils.reloadable_process_group"
    Wrapper.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single",
            "get_backend", "get_process_group_ranks", "get_rank", "get_world_size", "P2POp",
        ):  # fmt: skip
            patch.setattr(dist, name, unwrapping(getattr(dist, name)))
        patch.setattr(dist, "new_group", wrapped)
        yield patch


@of_both
def test_planned_steps_run_between_sleeps_of_the_trainer(rank: int, trainer: str) -> None:
    expected = unplanned(trainer)
    with sleeping_groups(trainer) as patch:
        patch.setenv("TMS_INIT_ENABLE_CPU_BACKUP", "1")
        with faked(trainer, ACTIVE, offload_train=True) as adapter:
            model = Lists(trainer)
            for _ in range(3):
                expect_equal(model.rollout(), expected)
                Wrapper.sleep()
                Wrapper.wake_up()
            metrics = adapter.schedule.metrics()
            assert metrics["foremoe/rho_computed"] < metrics["foremoe/rho_vanilla"]
            assert len(Wrapper.made) >= 4
        for of in Wrapper.made:
            if of.group is not dist.GroupMember.NON_GROUP_MEMBER:
                with pytest.raises(ValueError, match="Invalid process group"):  # destroyed by detach()
                    dist.destroy_process_group(of.group)


@pytest.mark.parametrize("sleeps", [True, False])
def test_shadow_mode_exchanges_nothing_while_the_trainer_sleeps(rank: int, sleeps: bool) -> None:
    """The background thread is slow. If the adapter did not know of the sleep, the groups would end first."""
    evaluated, asleep = Shadow._evaluated, threading.Event()

    def slow(self: Any, counted: Any) -> Any:
        asleep.wait(2)
        return evaluated(self, counted)

    with sleeping_groups("slime") as patch, faked("slime", "", offload_train=sleeps) as adapter:
        patch.setattr(Shadow, "_evaluated", slow)
        Lists("slime").rollout()
        Wrapper.sleep()
        asleep.set()
        adapter.schedule.replicas.wait()
        assert bool(adapter.schedule.metrics()) is sleeps
        Wrapper.wake_up()
