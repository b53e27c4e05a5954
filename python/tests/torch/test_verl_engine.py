"""Tests foremoe.verl inside verl on CPU: engine registry, micro-batches, routing replay and schedule.

Four processes run all checks, with the environment variables documented in docs/users/adopting.md.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import EXPERTS, LAYERS, on_all_ranks
from verl_on_cpu import Losses, Split, begin_groups, draw_batch, engine_class, make_engine, run

import foremoe


def documented_section() -> str:
    document = pathlib.Path(__file__).resolve().parents[3] / "docs" / "users" / "adopting.md"
    return document.read_text().split("\n## verl\n")[1].split("\n## ")[0]


def documented_shell_lines() -> list[str]:
    """Lines of the shell blocks in the section on verl."""
    blocks = documented_section().split("```sh\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].replace("\\\n", " ").splitlines()]


EXPORTED = [line.split()[1:] for line in documented_shell_lines() if line.startswith("export ")]
VARIABLES = dict(variable.split("=", 1) for of_line in EXPORTED for variable in of_line)
ACTIVE = VARIABLES.pop("FOREMOE_ATTACH")
CASES = {
    "EP 4": Split(),
    "EP 2 × 2": Split(ep=2),
    "TP 2, EP 4": Split(tp=2),
    "CP 2, EP 4": Split(cp=2),
    "TP 2, CP 2, EP 4, micro-batches of two": Split(tp=2, cp=2, dynamic=False),
}


# Order of the mini-batches in each step. The third step is shuffled.
STEPS = {"EP 4": [[0, 1], [0, 1, 0, 1], [1, 0], [0, 1]], "EP 2 × 2": [[0, 1], [0, 1]]}


def check_cases(monkeypatch: Any) -> dict[str, Any]:
    from verl.workers.engine.megatron import MegatronEngineWithLMHead

    import foremoe.megatron

    plans: list[Any] = []
    kept: list[Any] = []
    numbers: dict[int, int] = {}
    events: list[str] = []
    own_plan, own_step = foremoe.megatron.Replicas.plan, foremoe.megatron.Replicas.step

    def plan(self: Any, *args: Any, **more: Any) -> Any:
        made = own_plan(self, *args, **more)
        if id(made) not in numbers:
            numbers[id(made)] = len(plans)
            events.append(f"plan {len(plans)}")
            plans.append((made.phase, torch.tensor(made.load.array[:, :, self._ranks.rank])))
            kept.append(made)
        return made

    def step(self: Any, made: Any = None) -> Any:
        events.append(f"run {numbers.get(id(made))}")
        return own_step(self, made)

    monkeypatch.setattr(foremoe.megatron.Replicas, "plan", plan)
    monkeypatch.setattr(foremoe.megatron.Replicas, "step", step)
    found: dict[str, Any] = {}
    for name, split in CASES.items():
        begin_groups(split)
        steps = STEPS.get(name, [[0]])
        with monkeypatch.context() as patch:
            expected = run(make_engine(MegatronEngineWithLMHead, split), split, patch, steps)
            for options in (ACTIVE, ""):
                for of_run in (plans, events, numbers):
                    of_run.clear()
                patch.setenv("FOREMOE_ATTACH", options)
                engine = make_engine(engine_class(), split)
                patch.setattr(MegatronEngineWithLMHead, "initialize", lambda self: None)
                engine.initialize()
                of = run(engine, split, patch, steps)
                engine.replicas.detach()
                of["plans"], of["events"] = list(plans), list(events)
                of["expected"] = expected
                found[f"{name}, {options or 'shadow'}"] = of
    return found


def check_refusals(monkeypatch: Any) -> dict[str, str]:
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine.megatron import MegatronEngineWithLMHead

    split = Split()
    begin_groups(split)
    said: dict[str, str] = {}

    def try_to(name: str, work: Any) -> None:
        try:
            work()
            said[name] = "nothing"
        except (foremoe.InputError, ImportError, KeyError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    monkeypatch.setattr(MegatronEngineWithLMHead, "initialize", lambda self: None)
    configurations = {
        "dynamic": {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64},
        "R2": {"router_replay": EngineRouterReplayConfig(mode="R2")},
        "padded": {"use_remove_padding": False},
        "whole rows": {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        "forward only": {"forward_only": True, "router_replay": EngineRouterReplayConfig()},
    }
    for mode in ("active", "shadow"):
        monkeypatch.setenv("FOREMOE_ATTACH", f"mode={mode}")
        for name, config in configurations.items():
            try_to(f"{name}, {mode}", make_engine(engine_class(), split, **config).initialize)
        with monkeypatch.context() as newer:
            newer.setattr("verl.__version__", "0.11.0")
            try_to(f"newer, {mode}", make_engine(engine_class(), split).initialize)
    monkeypatch.setenv("FOREMOE_ATTACH", ACTIVE)
    for name, field in (("MTP", "mtp"), ("pictures", "hf_config")):
        engine = make_engine(engine_class(), split)
        made = {"mtp": types.SimpleNamespace(enable=True), "hf_config": types.SimpleNamespace(vision_config={})}
        setattr(engine.model_config, field, made[field])
        try_to(name, engine.initialize)
    for text in ("guest_slots", "guest_slots=", "=1", "model_chunks=1"):
        monkeypatch.setenv("FOREMOE_ATTACH", text)
        try_to(text, make_engine(engine_class(), split).initialize)

    def step(
        spoil: Any = lambda batch: None,
        options: str = ACTIVE,
        forward_only: bool = False,
        router: Any = lambda layer: None,
        **of_config: Any,
    ) -> Any:
        def work() -> None:
            monkeypatch.setenv("FOREMOE_ATTACH", options)
            engine = make_engine(engine_class(), split)
            engine.initialize()
            for name, value in of_config.items():
                setattr(engine.tf_config, name, value)
            for layer in engine.module[0].moe:
                router(layer.router)
            batch = draw_batch(split)
            spoil(batch)
            losses = Losses()
            monkeypatch.setattr("verl.models.mcore.get_mcore_engine_forward_fn", lambda _: losses.forward)
            with torch.set_grad_enabled(not forward_only):
                engine.forward_backward_batch(batch, losses, forward_only)
            said["planned"] = str(engine.replicas is not None)

        return work

    def corrupt_routes_on_one_rank(batch: Any) -> None:
        if dist.get_rank() == 2:
            batch["routed_experts"].unbind()[5][1, 2, 0] = EXPERTS

    def remove_mask_on_one_rank(batch: Any) -> None:
        if dist.get_rank() == 2:
            del batch["response_mask"]

    def replay_nothing_on_one_rank(router: Any) -> None:
        if dist.get_rank() == 2:
            router.router_replay = None

    try_to("no replay", step(lambda batch: tu.assign_non_tensor(batch, enable_routing_replay=False)))
    try_to("no routes", step(lambda batch: batch.pop("routed_experts")))
    try_to("spoilt on one rank", step(corrupt_routes_on_one_rank))
    try_to("lost on one rank", step(remove_mask_on_one_rank))
    try_to("no replay on one rank", step(router=replay_nothing_on_one_rank))
    try_to("unknown argument", step(options="mode=active,guests=1"))
    try_to("bias", step(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.001))
    try_to("split", step(experimental_attention_variant="dsv4_hybrid"))
    try_to("reference", step(lambda batch: tu.assign_non_tensor(batch, enable_routing_replay=False), forward_only=True))
    return said


def check_all(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    os.environ.update(VARIABLES)  # before verl is imported; the fork server started before this test
    engines = engine_class()
    import verl.utils.megatron.router_replay_utils as replay

    replay.device_name = "cpu"
    with pytest.MonkeyPatch.context() as monkeypatch:
        return {
            "engine": f"{engines.__module__}.{engines.__name__}",
            "cases": check_cases(monkeypatch),
            "refused": check_refusals(monkeypatch),
        }


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return on_all_ranks(check_all)


def test_the_documented_options_are_accepted_by_verl() -> None:
    import hydra

    (options,) = (line.split()[3:] for line in documented_shell_lines() if "verl.trainer" in line)
    variables = re.findall(r'`"?(\+ray_kwargs[^`"]*)"?`', documented_section())
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    configs = str(pathlib.Path(spec.origin).parent / "trainer" / "config")
    with hydra.initialize_config_dir(configs, version_base=None):
        config = hydra.compose("ppo_trainer", overrides=options + variables)
    actor = config.actor_rollout_ref.actor
    assert (actor.strategy, actor.megatron.router_replay.mode) == ("megatron", "R3")
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    of_ray = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert of_ray == {"VERL_ENGINE_VENDOR": VARIABLES["VERL_ENGINE_VENDOR"], "FOREMOE_ATTACH": ACTIVE}


def test_verl_selects_the_engine(of_ranks: list[dict[str, Any]]) -> None:
    assert {found["engine"] for found in of_ranks} == {"foremoe.verl.engine.Engine"}


@pytest.mark.parametrize("options", [ACTIVE, "shadow"])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_those_of_verl(of_ranks: list[dict[str, Any]], name: str, options: str) -> None:
    for rank in of_ranks:
        found = rank["cases"][f"{name}, {options}"]
        expected = found["expected"]
        assert len(found["losses"]) == len(expected["losses"]) >= 4
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        for of, value in expected["gradients"].items():
            assert torch.allclose(found["gradients"][of], value, rtol=1e-12, atol=1e-12 * float(value.abs().max())), of
        assert found["modules"] == expected["modules"]
        assert found["left"] == [None] * LAYERS


@pytest.mark.parametrize("name", CASES)
def test_plans_have_the_counts_that_routers_send_in_each_micro_step(of_ranks: list[dict[str, Any]], name: str) -> None:
    for rank in of_ranks:
        found = rank["cases"][f"{name}, {ACTIVE}"]
        plans = [found["plans"][int(event.split()[1])] for event in found["events"] if event.startswith("run")]
        phases, counts = zip(*plans, strict=True)
        orders = STEPS.get(name, [[0]])
        assert [*phases] == [phase for order in orders for phase in ["recompute"] + len(order) * ["policy_update"]]
        assert torch.equal(torch.cat(counts), found["counts"])
        assert len(found["counts"]) == len(found["losses"])
        metrics = found["metrics"]
        assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"])
        assert metrics["foremoe/rho_planned"][0] < metrics["foremoe/rho_vanilla"][0]


def test_updates_are_planned_while_the_preceding_step_runs(of_ranks: list[dict[str, Any]]) -> None:
    for rank in of_ranks:
        known = ["plan 0", "run 0", "plan 1", "run 1", "plan 2", "run 2"]
        ahead = ["plan 3", "plan 4", "run 3", "plan 5", "run 4", "run 5"]
        assert rank["cases"][f"EP 2 × 2, {ACTIVE}"]["events"] == known + ahead
        # The second step has twice the mini-batches. The third is shuffled. After it, nothing is planned ahead.
        ahead += ["plan 6", "run 6", "plan 7", "run 7"]
        shuffled = ["plan 8", "plan 9", "run 8", "plan 10", "run 10", "plan 11", "run 11"]
        as_they_come = [f"{what} {i}" for i in (12, 13, 14) for what in ("plan", "run")]
        assert rank["cases"][f"EP 4, {ACTIVE}"]["events"] == known + ahead + shuffled + as_they_come
        assert rank["cases"]["EP 4, shadow"]["events"] == 10 * ["run None"]


def test_verl_rejects_batches_that_do_not_divide_evenly_among_ranks() -> None:
    """foremoe.verl.ahead relies on equal numbers of sequences."""
    from verl.utils import tensordict_utils as tu

    of_all_ranks = tu.get_tensordict({"input_ids": torch.zeros(7, 2)})
    with pytest.raises(AssertionError, match="divisible by chunks"):
        tu.chunk_tensordict(of_all_ranks, 2)
    with pytest.raises(AssertionError, match="7 % 2"):
        tu.make_iterator(of_all_ranks, mini_batch_size=2, epochs=1, seed=1)


def test_shadow_mode_does_not_replay_rows_that_verl_routes_itself(of_ranks: list[dict[str, Any]]) -> None:
    for name in CASES:
        cases = [(rank["cases"][f"{name}, {ACTIVE}"], rank["cases"][f"{name}, shadow"]) for rank in of_ranks]
        assert all(torch.equal(shadow["counts"], shadow["expected"]["counts"]) for _, shadow in cases)
        assert any(not torch.equal(active["counts"], shadow["counts"]) for active, shadow in cases)


def test_attach_arguments_are_parsed_as_numbers_strings_and_null() -> None:
    from foremoe.verl.engine import arguments

    given = arguments("cluster=null, residency=static,guest_slots=2,tolerance=.5,model=true,policy=None")
    assert given == {
        "mode": "shadow", "cluster": None, "residency": "static", "guest_slots": 2, "tolerance": 0.5, "model": True,
        "policy": "None",
    }  # fmt: skip
    assert type(given["guest_slots"]) is int


def test_unsupported_settings_are_rejected_by_name_on_all_ranks(of_ranks: list[dict[str, Any]]) -> None:
    own, *others = (dict(found["refused"]) for found in of_ranks)
    for mode in ("active", "shadow"):
        assert own[f"dynamic, {mode}"].startswith("InputError: dynamic_context_parallel: is True; expected False")
        assert own[f"forward only, {mode}"] == "nothing"
    assert own["newer, active"] == "ImportError: foremoe.verl needs verl 0.9 to 0.10, not 0.11.0"
    assert own["newer, shadow"] == "nothing"
    for name, said in {
        "R2": "InputError: router_replay.mode: is 'R2'; expected 'R3', or mode=shadow in FOREMOE_ATTACH",
        "padded": "InputError: use_remove_padding: is False; expected True",
        "whole rows": "InputError: sequence_parallel: is False; expected True",
    }.items():
        assert own[f"{name}, active"].startswith(said)
        assert own[f"{name}, shadow"] == "nothing"
    for name, said in {
        "MTP": "mtp.enable: is True; expected False",
        "pictures": "vision_config: is in the model's configuration",
        "guest_slots": "FOREMOE_ATTACH: has 'guest_slots'; expected name=value",
        "guest_slots=": "FOREMOE_ATTACH: has 'guest_slots='",
        "=1": "FOREMOE_ATTACH: has '=1'",
        "model_chunks=1": "FOREMOE_ATTACH: has 'model_chunks=1'",
        "no replay": "enable_routing_replay: is False for an update",
        "no routes": "routed_experts: is missing; set rollout.enable_rollout_routing_replay",
        "unknown argument": "guests: is not one of",
        "bias": "moe_router_bias_update_rate: is 0.001; expected 0",
        "split": "experimental_attention_variant: is 'dsv4_hybrid'",
    }.items():
        assert own[name].startswith(f"InputError: {said}"), own[name]
    assert own["reference"] == "nothing"
    assert own["planned"] == "False"
    for name, said in {
        "spoilt on one rank": "InputError: routed_experts[5]: has ids from 0 to 8; expected 0 to 7",
        "lost on one rank": 'KeyError: \'key "response_mask" not found',
        "no replay on one rank": "InputError: router_replay of layer 2: is not in force",
    }.items():
        spoilt = [found["refused"][name] for found in of_ranks]
        assert spoilt[2].startswith(said), spoilt[2]
        told = f"InputError: rank 2 refused: {said.removeprefix('InputError: ')}"
        assert all(spoilt[rank].startswith(told) for rank in (0, 1, 3)), spoilt
        own.pop(name)
    for other in others:
        assert {name: other[name] for name in own} == own
