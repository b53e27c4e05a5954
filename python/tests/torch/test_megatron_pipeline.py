"""Planned steps under Megatron-LM's own 1F1B pipeline schedules, compared with the same steps without a plan.

There are two pipeline stages. The two ranks of each stage form an expert-parallel group.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import megatron_flex_kernels as kernels
import pytest
import torch
import torch.distributed as dist
from megatron_on_cpu import OnDevice, counted
from megatron_training import (
    TOKENS,
    Case,
    batch,
    begin_groups,
    counts_of,
    differences,
    expect_planned_rows,
    expect_shadow,
    group_of,
    is_bitwise,
    make_config,
    make_net,
    replay,
    wrap,
)
from processes import gather
from refusals import refusal

import foremoe
import foremoe.megatron
from foremoe._engine import guests, layer_turn
from foremoe.megatron import step as steps

STAGES, LAYERS_OF_STAGE, MICRO_STEPS = 2, 2, 8
STEP = 13  # selects the routes
OVERLAP = {"overlap_grad_reduce": True}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "static": (Case(ep=2, ddp=OVERLAP), {"residency": "static"}),
    "resident": (Case(ep=2, ddp=OVERLAP), {}),
    "resident, deep": (Case(ep=2, ddp={}), {"depth": 7}),
    "two guests": (Case(ep=2, ddp=OVERLAP), {"guest_slots": 2}),
    "two guests, layers recomputed": (Case(ep=2, ddp=OVERLAP, recompute="moe"), {"guest_slots": 2}),
    "two guests, all recomputed": (Case(ep=2, ddp=OVERLAP, recompute="all"), {"guest_slots": 2}),
    "three layers, all recomputed": (
        Case(ep=2, ddp=OVERLAP, recompute="all", config={"num_layers": 3 * STAGES}),
        {"depth": 1},
    ),
    "sharded": (Case(ep=2, ddp=OVERLAP | {"use_distributed_optimizer": True}), {}),
    "shared": (Case(ep=2, ddp=OVERLAP), {"residency": "shared", "guest_slots": 2}),
    "shared, layers recomputed": (Case(ep=2, ddp=OVERLAP, recompute="moe"), {"residency": "shared", "depth": 3}),
    "allgather": (Case(ep=2, dispatcher="allgather", ddp=OVERLAP), {}),
    "multi-token prediction": (Case(ep=2, ddp=OVERLAP, config={"mtp_num_layers": 1}), {}),
}


class Pipeline:
    """This rank's model chunks and a training step of the pipeline."""

    def __init__(self, case: Case, chunks: int = 1, *, dense_stage: int = -1, on_device: bool = False) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_router_replay_instances()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        num_layers = case.config.get("num_layers", STAGES * LAYERS_OF_STAGE)
        of_chunk = num_layers // STAGES // chunks
        layers = of_chunk if stage != dense_stage else 0
        virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
        self.config = make_config(
            case, num_layers=num_layers, pipeline_model_parallel_size=STAGES, pipeline_dtype=case.dtype,
            deallocate_pipeline_outputs=not on_device, **virtual,
        )  # fmt: skip
        first = [(stage + chunk * STAGES) * of_chunk for chunk in range(chunks)]
        self.layers = [of + i for of in first for i in range(layers)]
        self.nets = [make_net(self.config, layers, of) for of in first]
        self.models = [wrap(case, self.config, net) for net in self.nets]
        self.case, self.on_device = case, on_device
        for net in self.nets:
            net.checkpointed = case.recompute == "all"
        no_sync = [model.no_sync for model in self.models]
        self.config.no_sync_func = no_sync if chunks > 1 else no_sync[0]
        self.config.finalize_model_grads_func = lambda models, *_, **__: [m.finish_grad_sync() for m in models]

    def counts(self) -> Any:
        return counts_of(STEP, dist.get_rank(), self.layers, MICRO_STEPS)

    def run(self, context: Any = None) -> dict[str, Any]:
        """Run one step. Return losses (last stage), gradients of inputs (first stage) and gradients of weights."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        for model in self.models:
            model.zero_grad_buffer()
        inputs: list[Any] = []

        def forward_step(data: Any, model: Any) -> Any:
            net = self.nets[self.models.index(model)]
            replay(net, STEP, m := next(data))
            if self.on_device:
                for layer in net.moe:
                    replayed = layer.router.router_replay
                    replayed.set_target_indices(replayed.target_topk_idx.as_subclass(OnDevice))
            x = batch(STEP, m)
            if net is self.nets[0]:
                inputs.append(x)
            y = model(x).as_subclass(torch.Tensor) if self.on_device else model(x)
            if self.case.recompute:  # recomputation follows this hook; the next forward resets the action in replay()
                again = RouterReplayAction.REPLAY_BACKWARD
                y.register_hook(lambda _: RouterReplay.set_global_router_replay_action(again))
            return y, lambda y: ((loss := y.square().mean()), {"loss": loss.detach().clone()})

        with context if context is not None else contextlib.nullcontext():
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(range(MICRO_STEPS)) for _ in self.models],
                model=self.models,
                num_microbatches=MICRO_STEPS,
                seq_length=TOKENS,
                micro_batch_size=1,
            )
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        return {
            "losses": [float(of["loss"]) for of in losses],
            "inputs": [x.grad for x in inputs] if first else [],
            "weights": [
                {
                    f"{i} {name}": p.main_grad.clone()
                    for i, net in enumerate(self.nets)
                    for name, p in net.named_parameters()
                }
            ],
        }


unplanned: dict[str, dict[str, Any]] = {}


def run_unplanned(case: Case) -> dict[str, Any]:
    """Return the results of a step without a plan, run once per case."""
    if repr(case) not in unplanned:
        unplanned[repr(case)] = Pipeline(case).run()
    return unplanned[repr(case)]


def compare(case: Case, options: dict[str, Any], expected: dict[str, Any], **of_pipeline: Any) -> dict[str, Any]:
    """Compare two planned steps with `expected`. The second step starts with the guests and sums of the first."""
    planned = Pipeline(case, **of_pipeline)
    replicas = foremoe.megatron.attach(planned.models, **{"ranks_per_node": 2, **options})
    found: dict[str, Any] = {"worst": 0.0}
    for _ in range(2):
        plan = replicas.plan(planned.counts())
        of = differences(planned.run(replicas.step(plan)), expected)
        found["worst"] = max(found["worst"], *of.values())
    found["metrics"] = replicas.metrics()
    found["plan"] = plan.finish() if planned.layers else None
    replicas.detach()
    return found


@functools.cache
def compare_case(name: str) -> dict[str, Any]:
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    return compare(*CASES[name], run_unplanned(CASES[name][0]))


def moved_guests(plan: foremoe.Plan) -> int:
    """Count the micro-steps and layers in which a slot serves other experts in the backward than in the forward."""
    if plan.in_flight == 1:
        return 0
    events = {(int(m), int(p)): i for i, (m, p) in enumerate(zip(plan.event_micro_step, plan.event_pass, strict=True))}
    found = 0
    for m in range(MICRO_STEPS):
        served = [
            torch.where(
                torch.tensor(plan.slot_tokens[events[m, p]]) > 0, torch.tensor(plan.slot_expert[events[m, p]]), -1
            )
            for p in (0, 1)
        ]
        found += int((served[0] != served[1]).flatten(1).any(1).sum())
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_megatrons_own_layers(rank: int, case: str) -> None:
    found = compare_case(case)
    assert found["worst"] <= 1e-12
    expect_planned_rows(found["metrics"])


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])
def test_flex_dispatchers_match_the_all_to_all_dispatcher(rank: int, backend: str) -> None:
    kernels.expect(backend)
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    own = Case(ep=2, ddp=OVERLAP, config=kernels.ROUTER)
    found = compare(kernels.with_backend(own, backend), {"guest_slots": 2}, Pipeline(own).run())
    kernels.nccl_ep_finalize()
    assert found["worst"] <= 1e-12


def test_each_stage_plans_for_its_own_number_of_micro_steps_in_flight(rank: int) -> None:
    assert compare_case("resident")["plan"].in_flight == (2 if rank < 2 else 1)


def test_guests_change_between_micro_steps_in_flight(rank: int) -> None:
    static, resident = (gather(compare_case(case)["metrics"]["foremoe/copies"]) for case in ("static", "resident"))
    for stage in (slice(2), slice(2, 4)):
        assert sum(resident[stage]) > sum(static[stage]) > 0
    moved = gather(moved_guests(compare_case("two guests")["plan"]))
    assert sum(moved[:2]) > 0, "no guest comes back into another slot"


@pytest.mark.parametrize("planned", [True, False])
def test_a_planned_stage_exchanges_no_counts_and_never_waits(rank: int, planned: bool) -> None:
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    pipeline = Pipeline(Case(ep=2, ddp={}), on_device=True)
    replicas = foremoe.megatron.attach(pipeline.models, ranks_per_node=2) if planned else None
    context = replicas.step(replicas.plan(pipeline.counts())) if replicas else contextlib.nullcontext()
    with context, counted() as counts:
        pipeline.run()
        found = dict(counts)
    if planned:
        assert found == {}
    else:
        assert min(found[of] for of in ("all_gather", "synchronize", "to_host")) >= LAYERS_OF_STAGE * MICRO_STEPS


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_without_moe_layers_trains_with_the_others(rank: int, stage: int) -> None:
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    case = Case(ep=2, ddp=OVERLAP)
    found = compare(case, {}, Pipeline(case, dense_stage=stage).run(), dense_stage=stage)
    assert found["worst"] <= 1e-12
    assert (found["metrics"] == {}) == (rank // 2 == stage)


def test_a_stage_without_moe_layers_raises_the_error_of_another_stage(rank: int) -> None:
    """Only the stage with MoE layers can refuse the policy. Stages agree over gloo, which never waits for a device."""
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    pipeline = Pipeline(Case(ep=2, ddp=OVERLAP), dense_stage=0)
    own = "policy: eplb made a plan of residency free"
    said = refusal(lambda: foremoe.megatron.attach(pipeline.models, policy="eplb"))
    assert said.startswith(f"InputError: {own}" if rank >= 2 else f"InputError: rank 2 refused: {own}"), said
    replicas = foremoe.megatron.attach(pipeline.models)
    assert [dist.get_backend(of.group) for of in replicas._session._votes._channels] == ["gloo", "gloo"]
    replicas.detach()


@pytest.mark.parametrize("chunks", [1, 2])  # virtual pipeline stages per rank
def test_shadow_mode_counts_rows_in_pipelines_and_changes_no_results(rank: int, chunks: int) -> None:
    virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    begin_groups(2, pipeline_model_parallel_size=STAGES, **virtual)
    case = Case(ep=2, ddp=OVERLAP)
    expected = Pipeline(case, chunks).run()
    pipeline = Pipeline(case, chunks)
    replicas = foremoe.megatron.attach(
        pipeline.models, mode="shadow", ranks_per_node=2, cluster="h100", prefer="balance"
    )
    found = pipeline.run(replicas.step())
    replicas.detach()
    assert is_bitwise(found, expected)
    counts = [counts_of(STEP, of, pipeline.layers, MICRO_STEPS) for of in group_of(rank)]
    expect_shadow(replicas.metrics(), counts, STAGES - rank // 2)


computed_again = steps.MicroBatchRows.computed_again


def keep_forward_slot(self: Any, turn: Any, *_: Any) -> Any:
    return computed_again(self, turn, [], [])


def end_forward(self: Any) -> None:
    if not self.ran:
        self.ran, self._cursor.last = True, self.forward


def do_nothing(*_: Any) -> None: ...


@pytest.mark.parametrize(("case", "where", "name", "by"), [
    ("two guests", steps.MicroBatchRows, "computed_again", keep_forward_slot),  # gradients stay there
    ("two guests", layer_turn.LayerTurn, "end_forward", end_forward),  # departing guests keep their gradients
    ("three layers, all recomputed", guests.Guests, "begin_ahead", do_nothing),  # recomputes with the forward's guests
])  # fmt: skip
def test_faults_with_several_micro_steps_in_flight_change_the_results(
    rank: int, case: str, where: Any, name: str, by: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, by)
        assert max(gather(compare_case.__wrapped__(case)["worst"])) > 1e-6
