"""Tests foremoe.slime with fakes of slime's lists, Megatron-LM's configuration and foremoe.megatron."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import foremoe
import foremoe.slime
from foremoe.slime import Hooks, recorded_counts

EXPERTS = 8
ARGS = types.SimpleNamespace(num_experts=EXPERTS, use_routing_replay=True, offload_train=False)


class RoutingReplay:
    """Fake of slime's RoutingReplay: one per router, with routes [rows, top_k] per micro-step."""

    all_routing_replays: ClassVar[list[RoutingReplay]] = []

    def __init__(self, top_indices_list: list[Any]) -> None:
        self.top_indices_list = top_indices_list


class Replicas:
    """Fake of the result of foremoe.megatron.attach(), which logs its calls."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.plans: list[np.ndarray] = []

    def plan(self, counts: Callable[[], np.ndarray], phase: str = "policy_update") -> str:
        self.plans.append(counts())
        self.log.append(f"plan {phase} {len(self.plans[-1])}")
        return f"{phase} {len(self.plans) - 1}"

    @contextlib.contextmanager
    def step(self, plan: str | None) -> Iterator[None]:
        self.log.append(f"begin {plan}")
        yield
        self.log.append("end")


def draw_lists(layers: int = 2, micro_steps: int = 5, top_k: int = 2) -> list[list[np.ndarray]]:
    """Draws routes, int32 [rows, top_k] per [layer][micro-step]. The number of rows varies by micro-step."""
    random = np.random.default_rng(0)
    return [
        [random.random((3 + m, EXPERTS)).argsort(-1)[:, :top_k].astype(np.int32) for m in range(micro_steps)]
        for _ in range(layers)
    ]


def fill(lists: list[list[Any]]) -> None:
    RoutingReplay.all_routing_replays = [RoutingReplay(of_layer) for of_layer in lists]


def counts_by_hand(lists: list[list[np.ndarray]], first: int, end: int) -> np.ndarray:
    counts = np.zeros((end - first, len(lists), EXPERTS), np.int64)
    for layer, of_layer in enumerate(lists):
        for m in range(first, end):
            for row in of_layer[m].tolist():
                for expert in set(row):  # a routing map counts a repeated expert once
                    counts[m - first, layer, expert] += 1
    return counts


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []

    def attach(model: Any, **arguments: Any) -> Replicas:
        log.append(arguments)
        return Replicas(log)

    stubs = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.routing_replay": {"RoutingReplay": RoutingReplay},
        "megatron": {},
        "megatron.core": {},
        "megatron.core.utils": {"get_model_config": lambda chunk: chunk.config},
        "foremoe.megatron": {"attach": attach},
    }
    for name, members in stubs.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))
    return log


def model_of(log: list[Any], role: str = "actor") -> list[Any]:
    config = types.SimpleNamespace(finalize_model_grads_func=lambda *_, **keywords: log.append(f"finalize {keywords}"))
    return [types.SimpleNamespace(config=config, role=role)]


def train(hooks: Any, log: list[Any], model: list[Any], steps: int, args: Any = ARGS) -> None:
    """Makes the calls of slime's train(): hook, forward and backward, gradient finalization, optimizer."""
    for step_id in range(steps):
        hooks.before_train_step(args, 0, step_id, model, None, None)
        log.append("forward_backward")
        model[0].config.finalize_model_grads_func([model], num_tokens=1)
        log.append("optimizer")


STEP = ["forward_backward", "end", "finalize {'num_tokens': 1}", "optimizer"]


def test_a_pipeline_stage_without_moe_layers_takes_part_only_in_training_steps(log: list[Any]) -> None:
    fill([])
    assert recorded_counts(EXPERTS, 2, 5).shape == (3, 0, EXPERTS)
    hooks, model = Hooks(mode="active"), model_of(log)
    in_pipeline = types.SimpleNamespace(**vars(ARGS), pipeline_model_parallel_size=2)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROUTING_REPLAY_STAGE", "replay_forward")
        hooks.before_log_prob(in_pipeline, model, "")
    assert log == []
    hooks.before_training(in_pipeline, 0, {"num_microbatches": [3, 2]})
    train(hooks, log, model, 2, in_pipeline)
    assert [counts.shape for counts in hooks.replicas.plans] == [(3, 0, EXPERTS), (2, 0, EXPERTS)]


def test_shadow_mode_needs_one_flag_and_wraps_each_step(log: list[Any]) -> None:
    model = model_of(log)
    finalize = model[0].config.finalize_model_grads_func
    hooks = Hooks(guest_slots=2)
    train(hooks, log, model, 2)
    assert log == [{"mode": "shadow", "guest_slots": 2}, *["begin None", *STEP] * 2]
    assert model[0].config.finalize_model_grads_func is finalize
    log.clear()
    hooks.before_log_prob(ARGS, model, "")
    train(hooks, log, model_of(log, role="critic"), 1)
    assert log == ["forward_backward", "finalize {'num_tokens': 1}", "optimizer"]


def test_the_documented_flags_name_hooks_in_shadow_mode(log: list[Any]) -> None:
    train(foremoe.slime, log, model_of(log), 1)
    assert log == [{"mode": "shadow"}, "begin None", *STEP]
    assert isinstance(foremoe.slime.hooks.replicas, Replicas)
    own: dict[str, Any] = {}
    exec("\n".join(re.findall(r"^    ((?:from|hooks|before).*)$", foremoe.slime.__doc__ or "", re.M)), own)
    fill(draw_lists())
    own["before_training"](ARGS, 0, {"num_microbatches": [5]})
    log.clear()
    train(types.SimpleNamespace(**own), log, model_of(log), 1)
    assert log[:2] == [{"mode": "active", "guest_slots": 1}, "plan policy_update 5"]


def test_active_mode_plans_each_step_from_the_routes_of_its_micro_steps(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = draw_lists()
    fill(lists)
    model = model_of(log)
    hooks = Hooks(mode="active")
    before_log_prob, before_training, _ = hooks
    for stage, prefix in (("fallthrough", ""), ("record", ""), ("replay_forward", "ref_")):
        monkeypatch.setenv("ROUTING_REPLAY_STAGE", stage)
        before_log_prob(ARGS, model, prefix)
    assert log == []
    before_log_prob(ARGS, model, "")
    before_training(ARGS, 0, {"num_microbatches": [3, 2]})
    assert log == [{"mode": "active"}, "plan recompute 5", "begin recompute 0", "end"]
    train(hooks, log, model, 2)
    steps = [[f"plan policy_update {n}", f"begin policy_update {i}", *STEP] for i, n in ((1, 3), (2, 2))]
    assert log[4:] == steps[0] + steps[1]
    assert isinstance(hooks.replicas, Replicas)
    for counts, (first, end) in zip(hooks.replicas.plans, ((0, 5), (0, 3), (3, 5)), strict=True):
        np.testing.assert_array_equal(counts, counts_by_hand(lists, first, end))


def test_a_repeated_expert_in_a_row_counts_once(log: list[Any]) -> None:
    lists = draw_lists(top_k=3)
    lists[1][2][1:3] = [[0, 0, 0], [5, 5, 1]]
    fill(lists)
    np.testing.assert_array_equal(recorded_counts(EXPERTS), counts_by_hand(lists, 0, 5))
    fill(draw_lists(top_k=1))
    assert recorded_counts(EXPERTS).sum() == 2 * (3 + 4 + 5 + 6 + 7)


def test_unsupported_settings_are_rejected_by_name(log: list[Any]) -> None:
    model = model_of(log)
    lists = draw_lists()

    def refused(words: str) -> Any:
        return pytest.raises(foremoe.InputError, match=words)

    fill([lists[0], lists[1][:4]])
    with refused(r"all_routing_replays: 2 layers with \[4, 5\] micro-steps"):
        recorded_counts(EXPERTS)
    fill([])
    with refused("all_routing_replays: 0 layers"):
        recorded_counts(EXPERTS)
    fill(lists)
    with refused("top_indices_list: has 5 micro-steps; expected 3 to 5 among them"):
        recorded_counts(EXPERTS, 3, 6)
    with refused(r"top_indices_list\[0\]\[\d\]: entry \[0, .*\]: expert 7, but there are 7"):
        recorded_counts(EXPERTS - 1)
    lists[1][3] = types.SimpleNamespace(materialize_for_routing_replay=None)
    with refused(r"top_indices_list\[1\]\[3\]: is read when it is replayed"):
        recorded_counts(EXPERTS)
    with refused("rollout_data_postprocess_path: should be before_training"):
        Hooks(mode="active").before_train_step(ARGS, 0, 0, model, None, None)
    with refused("rollout_data_postprocess_path: got args alone, as in miles"):
        Hooks(mode="active").before_training(ARGS)
    without = types.SimpleNamespace(num_experts=EXPERTS, use_routing_replay=False)
    with refused("replay: 'disabled'; expected 'R3'"):
        Hooks(mode="active").before_train_step(without, 0, 0, model, None, None)
