"""Adapters, with a small fake of each trainer's module and with calls as that trainer makes them.

The trainers' own code runs with the adapters in lab/engines.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_megatron_schedule as schedules
import torch
from megatron_training import expect_equal
from processes import gather
from refusals import refusal

MODULES = {
    "foremoe.roll": "roll.distributed.strategy.megatron_strategy",
    "foremoe.swift": "swift.megatron.trainers.base",
    "foremoe.areal": "areal.engine.megatron_engine",
    "foremoe.rlinf": "rlinf.workers.megatron_worker",
}


class Fake(schedules.Trainer):
    """A trainer with the calls of ROLL: a partial of a strategy's method. The strategy has stored the schedule."""

    role = "actor_train"

    def initialize(self) -> Fake:
        """Stores the schedule, as ROLL's strategies do."""
        self.forward_backward = sys.modules[self.module].get_forward_backward_func()
        sys.modules["a_trainer"] = types.SimpleNamespace(get_forward_backward_func=lambda: self.call)  # type: ignore
        return self

    @property
    def worker_config(self) -> Any:
        return types.SimpleNamespace(name=self.role)

    def inner_forward_step(self, loss_function: Any, data: Iterator[Any], model: Any) -> Any:
        return loss_function(data, model)

    def call(self, forward_step_func: Any, **keywords: Any) -> Any:
        step: Any = functools.partial(self.inner_forward_step, forward_step_func)
        if self.module == MODULES["foremoe.areal"]:  # a closure over the engine, and no lists

            def step(data: Iterator[Any], model: Any) -> Any:
                return self.inner_forward_step(forward_step_func, data, model)

        return self.forward_backward(forward_step_func=step, **keywords)

    config = property(lambda self: types.SimpleNamespace(is_critic=self.role == "critic"))


def begin(patch: pytest.MonkeyPatch, adapter: str, attach: str) -> tuple[Fake, Any]:
    """Returns a trainer, and the adapter's module, imported anew. The trainer's packages have only the one module."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parts = MODULES[adapter].split(".")
    for i in range(1, len(parts) + 1):
        module: Any = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []
        patch.setitem(sys.modules, module.__name__, module)
    module.get_forward_backward_func = get_forward_backward_func
    patch.setenv("FOREMOE_ATTACH", f"{attach},ranks_per_node=2")
    patch.delitem(sys.modules, adapter, raising=False)
    trainer: Any = schedules.make_trainer()
    trainer.__class__ = Fake
    trainer.module = MODULES[adapter]
    return trainer, importlib.import_module(adapter)


@pytest.mark.parametrize("adapter", ["foremoe.roll", "foremoe.swift"])
def test_steps_of_trainers_that_replay_routes_are_planned(rank: int, adapter: str) -> None:
    expected = schedules.make_trainer().train()
    with pytest.MonkeyPatch.context() as patch:
        trainer, module = begin(patch, adapter, "mode=active")
        schedule = module.init()
        assert module.init() is schedule
        found = trainer.initialize().train(in_list=adapter == "foremoe.roll")
    expect_equal(found, expected)
    metrics = schedule.metrics()
    assert metrics["foremoe/rho_computed"] == metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
    schedule.replicas.detach()


@pytest.mark.parametrize("adapter", ["foremoe.areal", "foremoe.rlinf"])
def test_trainers_without_replay_have_shadow_mode_only(rank: int, adapter: str) -> None:
    expected = schedules.make_trainer().train()
    with pytest.MonkeyPatch.context() as patch:
        trainer, module = begin(patch, adapter, "mode=active")
        assert refusal(module.init).startswith("InputError: mode: is active, but ")
        patch.setenv("FOREMOE_ATTACH", "ranks_per_node=2")
        schedule = module.init()
        assert module.init() is schedule
        found = trainer.initialize().train(in_list=adapter == "foremoe.rlinf")
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(found["weights"][0][name], of) for name, of in expected["weights"][0].items())
    schedule.replicas.wait()
    assert schedule.metrics()["foremoe/rho_planned"] < schedule.metrics()["foremoe/rho_vanilla"]
    schedule.replicas.detach()


@pytest.mark.parametrize(("adapter", "attach"), [("foremoe.roll", "mode=active"), ("foremoe.areal", "mode=shadow")])
def test_critics_are_trained_without_a_plan(rank: int, adapter: str, attach: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        trainer, module = begin(patch, adapter, attach)
        trainer.role = "critic"
        trainer.routes = "none"
        schedule = module.init()
        trainer.initialize().train(in_list=adapter == "foremoe.roll")
    assert gather(schedule.replicas) == [None] * 4


def test_swift_imports_the_plugin_from_a_folder_of_its_own() -> None:
    printed = subprocess.run([sys.executable, "-m", "foremoe.swift"], capture_output=True, text=True, check=True).stdout
    plugin = Path(printed.strip())
    assert [of.name for of in plugin.parent.glob("*.py")] == [plugin.name]  # it would hide modules of these names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        runpy.run_path(str(plugin))
        assert type(sys.meta_path[0]).__name__ == "WhenImported"
