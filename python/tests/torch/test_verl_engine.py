"""Tests foremoe.verl inside verl on CPU: micro-batches, routing replay and schedule.

Four processes run all checks, with the environment variables documented in docs/users/adopting.md.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import EXPERTS, on_all_ranks
from verl_on_cpu import Losses, Split, begin_groups, draw_batch, leaves_rows_to_routers, make_engine, run


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
    "R2": Split(replay="R2"),
    "bias": Split(biased=True, cp=2),
    "padded, TP 2, CP 2": Split(padded=1, tp=2, cp=2),
}


STEPS = {"EP 4": [[0, 1], [0, 1, 0, 1], [1, 0]], "EP 2 × 2": [[0, 1], [0, 1]]}  # order of mini-batches in each step


def wrap(patch: Any, options: str) -> Any:
    """Wraps verl's schedule for this variable until the end of the patch. Returns the wrapped schedule."""
    import verl.utils.megatron.router_replay_patch as replay
    import verl.workers.engine.megatron.transformer_impl as engine

    import foremoe.verl

    for owner, names in (
        (engine, ["get_forward_backward_func"]),
        (engine.MegatronEngineWithLMHead, ["forward_backward_batch", "initialize"]),
        (replay.RouterReplay, ["set_target_indices"]),
    ):
        for name in names:
            patch.setattr(owner, name, getattr(owner, name))  # restored afterwards
    patch.setattr(engine.MegatronEngineWithLMHead, "initialize", lambda self: None)
    patch.setenv("FOREMOE_ATTACH", options)
    return foremoe.verl.init(foremoe.verl.ENGINE)


def check_cases(monkeypatch: Any) -> dict[str, Any]:
    from verl.workers.engine.megatron import MegatronEngineWithLMHead

    import foremoe.megatron

    plans: list[Any] = []
    own_plan = foremoe.megatron.Replicas.plan

    def plan(self: Any, *args: Any, **more: Any) -> Any:
        made = own_plan(self, *args, **more)
        plans.append((made.phase, torch.tensor(made.load.array[:, :, self._ranks.rank])))
        return made

    monkeypatch.setattr(foremoe.megatron.Replicas, "plan", plan)
    found: dict[str, Any] = {}
    for name, split in CASES.items():
        begin_groups(split)
        steps = STEPS.get(name, [[0]])
        expected = run(make_engine(MegatronEngineWithLMHead, split), split, monkeypatch, steps)
        for options in (ACTIVE, ""):
            plans.clear()
            with monkeypatch.context() as patch:
                schedule = wrap(patch, options)
                engine = make_engine(MegatronEngineWithLMHead, split)
                engine.initialize()
                of = run(engine, split, patch, steps)
                schedule.replicas.detach()
            found[f"{name}, {options or 'shadow'}"] = of | {"plans": list(plans), "expected": expected}
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
        except Exception as error:
            said[name] = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])

    configurations = {
        "dynamic": {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64},
        "off": {"router_replay": EngineRouterReplayConfig()},
        "whole rows": {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        "forward only": {"forward_only": True, "router_replay": EngineRouterReplayConfig()},
    }
    for mode in ("active", "shadow"):
        with monkeypatch.context() as patch:
            wrap(patch, f"mode={mode}")
            for name, config in configurations.items():
                try_to(f"{name}, {mode}", make_engine(MegatronEngineWithLMHead, split, **config).initialize)
        with monkeypatch.context() as patch:
            patch.setattr("verl.__version__", "0.11.0")
            try_to(f"newer, {mode}", lambda patch=patch, mode=mode: wrap(patch, f"mode={mode}"))
    for text in ("guest_slots", "guest_slots=", "=1", "guests=1", "cluster=h10"):
        with monkeypatch.context() as patch:
            try_to(text, lambda patch=patch, text=text: wrap(patch, text))

    def step(
        spoil: Any = lambda batch: None,
        options: str = ACTIVE,
        forward_only: bool = False,
        router: Any = lambda layer: None,
        model_type: str = "language_model",
        padded: int = 0,
        **of_config: Any,
    ) -> Any:
        def work() -> None:
            with monkeypatch.context() as patch:
                schedule = wrap(patch, options)
                of = dataclasses.replace(split, padded=padded)
                engine = make_engine(MegatronEngineWithLMHead, of)
                engine.model_config.model_type = model_type
                for name, value in of_config.items():
                    setattr(engine.tf_config, name, value)
                for layer in engine.module[0].moe:
                    router(layer.router)
                batch = draw_batch(of)
                spoil(batch)
                losses = Losses(padded)
                patch.setattr("verl.models.mcore.get_mcore_engine_forward_fn", lambda _: losses.forward)
                with torch.set_grad_enabled(not forward_only):
                    engine.forward_backward_batch(batch, losses, forward_only)
                said[f"planned, {model_type}"] = str(schedule.replicas is not None)

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
    if leaves_rows_to_routers():  # by this mask
        try_to("lost on one rank", step(remove_mask_on_one_rank))
    try_to("no replay on one rank", step(router=replay_nothing_on_one_rank))
    try_to("split", step(experimental_attention_variant="dsv4_hybrid"))
    if leaves_rows_to_routers():  # the routers check the number of rows
        for options in (ACTIVE, "mode=shadow"):
            try_to(f"padded pairs, {options}", step(padded=2, options=options))
    try_to("critic", step(model_type="value_model"))
    try_to("reference", step(lambda batch: tu.assign_non_tensor(batch, enable_routing_replay=False), forward_only=True))
    return said


def check_all(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    os.environ.update(VARIABLES)  # before verl is imported; the fork server started before this test
    import foremoe.verl

    wrapped: list[str] = []
    own_init = foremoe.verl.init
    foremoe.verl.init = wrapped.append  # type: ignore[assignment]  # check_cases() does it
    import verl.utils.megatron.router_replay_utils as replay
    import verl.workers.engine  # noqa: F401

    foremoe.verl.init = own_init
    replay.device_name = "cpu"
    with pytest.MonkeyPatch.context() as monkeypatch:
        return {
            "wrapped": wrapped,
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
    assert of_ray == {"VERL_USE_EXTERNAL_MODULES": VARIABLES["VERL_USE_EXTERNAL_MODULES"], "FOREMOE_ATTACH": ACTIVE}


def test_verl_loads_foremoe_when_it_imports_its_engine(of_ranks: list[dict[str, Any]]) -> None:
    import foremoe.verl

    assert all(found["wrapped"] == [foremoe.verl.ENGINE] for found in of_ranks)


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


@pytest.mark.parametrize("name", CASES)
def test_plans_have_the_counts_that_routers_send_in_each_micro_step(of_ranks: list[dict[str, Any]], name: str) -> None:
    """The first old log-probabilities have no plan, nor have those with R2, which records then."""
    for rank in of_ranks:
        found = rank["cases"][f"{name}, {ACTIVE}"]
        phases, plans = zip(*found["plans"], strict=True)
        steps = STEPS.get(name, [[0]])
        recomputes = [[] if i == 0 or CASES[name].replay == "R2" else ["recompute"] for i in range(len(steps))]
        expected = [phase for i, order in enumerate(steps) for phase in recomputes[i] + len(order) * ["policy_update"]]
        assert [*phases] == expected
        planned = torch.cat(plans)
        passed = len(found["counts"]) - len(planned)  # micro-steps of calls without a plan
        assert 0 < passed < len(planned) or len(steps) == 1
        assert torch.equal(planned, found["counts"][passed:])
        assert len(found["counts"]) == len(found["losses"])
        metrics = found["metrics"]
        assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"])
        assert metrics["foremoe/rho_planned"][0] < metrics["foremoe/rho_vanilla"][0]


def test_rows_that_verl_does_not_replay_are_not_in_the_statistics_of_a_bias(of_ranks: list[dict[str, Any]]) -> None:
    for rank in of_ranks:
        found = rank["cases"][f"bias, {ACTIVE}"]
        assert torch.equal(torch.stack(found["biases"]), found["expected"]["replayed"])
        assert torch.equal(found["replayed"], found["expected"]["replayed"]) != leaves_rows_to_routers()


def test_shadow_mode_does_not_replay_rows_that_verl_routes_itself(of_ranks: list[dict[str, Any]]) -> None:
    for name in CASES:
        cases = [(rank["cases"][f"{name}, {ACTIVE}"], rank["cases"][f"{name}, shadow"]) for rank in of_ranks]
        assert all(torch.equal(shadow["counts"], shadow["expected"]["counts"]) for _, shadow in cases)
        chosen = any(not torch.equal(active["counts"], shadow["counts"]) for active, shadow in cases)
        assert chosen == (CASES[name].replay == "R3" and leaves_rows_to_routers())  # R2 replays all rows


def test_unsupported_settings_are_rejected_by_name_on_all_ranks(of_ranks: list[dict[str, Any]]) -> None:
    own, *others = (dict(found["refused"]) for found in of_ranks)
    for mode in ("active", "shadow"):
        assert own[f"dynamic, {mode}"].startswith(
            "InputError: dynamic_context_parallel: True of verl's engine; expected False"
        )
        assert own[f"forward only, {mode}"] == "nothing"
    assert own["newer, active"] == "ImportError: foremoe.verl needs verl 0.8 to 0.10, not 0.11.0"
    assert own["newer, shadow"] == "nothing"
    for name, said in {
        "off": "InputError: replay: 'disabled' of verl's engine; expected 'R3', or use shadow mode",
        "whole rows": "InputError: sequence_parallel: False of verl's engine; expected True",
    }.items():
        assert own[f"{name}, active"].startswith(said)
        assert own[f"{name}, shadow"] == "nothing"
    for name, said in {
        "guest_slots": "FOREMOE_ATTACH: has 'guest_slots'; expected name=value",
        "guest_slots=": "FOREMOE_ATTACH: has 'guest_slots='",
        "=1": "FOREMOE_ATTACH: has '=1'",
        "guests=1": "FOREMOE_ATTACH: guests: is no argument of attach(); did you mean guest_slots?",
        "cluster=h10": "FOREMOE_ATTACH: cluster: 'h10' is neither a file nor one of",
        "no replay": "router_replay: gives no routes to the routers of a step of verl",
        "split": "experimental_attention_variant: is 'dsv4_hybrid'",
    }.items():
        assert own[name].startswith(f"InputError: {said}"), own[name]
    assert "in the forward step of micro-batch 0, which foremoe ran to read its routes" in own["no routes"]
    for name in [*own]:
        if name.startswith("padded pairs"):  # as without ForeMoE
            assert own.pop(name).startswith("RuntimeError: Router replay tensors are not aligned")
    assert own["reference"] == own["critic"] == "nothing"
    assert own["planned, language_model"] == own["planned, value_model"] == "False"
    for name, said in {
        "spoilt on one rank": "InputError: routes",
        "lost on one rank": 'KeyError: \'key "response_mask" not found',
        "no replay on one rank": "InputError: router_replay: gives no routes to the routers",
    }.items():
        if name not in own:
            continue
        spoilt = [found["refused"][name] for found in of_ranks]
        assert spoilt[2].startswith(said), spoilt[2]
        told = f"InputError: rank 2 refused: {said.removeprefix('InputError: ')}"
        assert all(spoilt[rank].startswith(told) for rank in (0, 1, 3)), spoilt
        own.pop(name)
    for other in others:
        assert {name: other[name] for name in own} == own
