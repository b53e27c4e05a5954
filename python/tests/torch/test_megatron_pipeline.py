"""Planned steps in a pipeline of Megatron-LM, under its own 1F1B schedules, against the same without a plan.

One spawn of four processes runs all checks: two stages of two ranks, which are an expert-parallel group.
"""

from __future__ import annotations

import contextlib
from typing import Any

import megatron_flex_kernels as kernels
import pytest
import torch
import torch.distributed as dist
from megatron_on_cpu import OnDevice, counted
from megatron_training import (
    EXPERTS,
    TOKENS,
    Case,
    batch,
    begin_groups,
    counts_of,
    differences,
    make_config,
    make_net,
    modelled_seconds,
    replay,
    wrap,
)

import foremoe
import foremoe.megatron
from foremoe._engine import guests, layer_turn
from foremoe.megatron import step as steps

STAGES, LAYERS_OF_STAGE, MICRO_STEPS = 2, 2, 8
STEP = 13  # of its routes
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
}


class Pipeline:
    """A pipeline's step, on this rank."""

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
            case,
            num_layers=num_layers,
            pipeline_model_parallel_size=STAGES,
            pipeline_dtype=case.dtype,
            deallocate_pipeline_outputs=not on_device,
            **virtual,
        )
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
        """One step: losses (last stage), gradients of inputs (first stage) and of weights."""
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
            if self.case.recompute:  # before layers are computed again; the next replay() is that of a forward
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


EXPECTED: dict[str, dict[str, Any]] = {}


def run_unplanned(case: Case, **of_pipeline: Any) -> dict[str, Any]:
    """A step as Megatron-LM itself runs it. Once per case."""
    key = repr((case, of_pipeline))
    if key not in EXPECTED:
        EXPECTED[key] = Pipeline(case, **of_pipeline).run()
    return EXPECTED[key]


def compare(
    case: Case, options: dict[str, Any], without_plan: Case | None = None, **of_pipeline: Any
) -> dict[str, Any]:
    """Two steps of the same weights: a second one begins where a first has left guests and sums.

    without_plan: what is expected, if it is not the same case.
    """
    expected = run_unplanned(without_plan or case, **of_pipeline)
    planned = Pipeline(case, **of_pipeline)
    replicas = foremoe.megatron.attach(planned.models, **{"ranks_per_node": 2, **options})
    found: dict[str, Any] = {"worst": 0.0, "differences": []}
    for _ in range(2):
        plan = replicas.plan(planned.counts())
        of = differences(planned.run(replicas.step(plan)), expected)
        found["differences"].append(of)
        found["worst"] = max(found["worst"], *of.values())
    found["metrics"] = replicas.metrics()
    if planned.layers:
        made = plan.finish()
        found["in_flight"] = made.in_flight
        found["moved"] = moved_guests(made)
    replicas.detach()
    return found


def moved_guests(plan: foremoe.Plan) -> int:
    """In how many micro-steps and layers a slot serves other experts in the backward than in the forward."""
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


def count_waits() -> list[dict[str, int]]:
    """Of a step as planned, and as it is: the dispatchers' gathers of counts, and waits for the device."""
    found = []
    for planned in (True, False):
        pipeline = Pipeline(Case(ep=2, ddp={}), on_device=True)
        context = None
        if planned:
            replicas = foremoe.megatron.attach(pipeline.models, ranks_per_node=2)
            context = replicas.step(replicas.plan(pipeline.counts()))
        with context if context is not None else contextlib.nullcontext(), counted() as counts:
            pipeline.run()
            found.append(dict(counts))
    return found


def shadow(chunks: int) -> dict[str, Any]:
    """Counting changes nothing; what it says is what counts say. chunks: virtual stages on a rank."""
    case = Case(ep=2, ddp=OVERLAP)
    expected = Pipeline(case, chunks).run()
    pipeline = Pipeline(case, chunks)
    replicas = foremoe.megatron.attach(pipeline.models, mode="shadow", ranks_per_node=2)
    found = pipeline.run(replicas.step())
    replicas.detach()
    first = dist.get_rank() // 2 * 2
    of_ranks = [counts_of(STEP, r, pipeline.layers, MICRO_STEPS) for r in (first, first + 1)]
    at_homes = sum(of_ranks).view(MICRO_STEPS, -1, 2, EXPERTS // 2).sum(-1).double()
    return {
        "equal": found["losses"] == expected["losses"]
        and all(torch.equal(a, b) for a, b in zip(found["inputs"], expected["inputs"], strict=True))
        and all(torch.equal(of, expected["weights"][0][name]) for name, of in found["weights"][0].items()),
        "rho": float((at_homes.amax(-1) / at_homes.mean(-1)).mean()),
        "metrics": replicas.metrics(),
        "seconds": modelled_seconds(of_ranks, STAGES - dist.get_rank() // 2),
    }


def refuse_on_one_stage() -> list[str]:
    """What both stages say of a policy that only the one with MoE layers can refuse; then of what words go over."""
    pipeline = Pipeline(Case(ep=2, ddp=OVERLAP), dense_stage=0)
    found = []
    try:
        foremoe.megatron.attach(pipeline.models, policy="eplb")
    except foremoe.InputError as error:
        found.append(str(error))
    replicas = foremoe.megatron.attach(pipeline.models)
    found += [dist.get_backend(group) for group in replicas._agreement._groups]
    replicas.detach()
    return found


def mutate() -> dict[str, float]:
    """What goes wrong where several micro-steps in flight are not heeded."""
    two = CASES["two guests"]

    def broken(of: tuple[Case, dict[str, Any]], where: Any, name: str, by: Any) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, by)
            return float(compare(*of)["worst"])

    computed_again = steps.MicroBatchRows.computed_again

    def stay(self: Any, turn: Any, *_: Any) -> Any:
        return computed_again(self, turn, [], [])

    def end_forward(self: Any) -> None:
        if not self.ran:
            self.ran, self._cursor.last = True, self.forward

    return {
        "gradients stay in the slot of the forward": broken(two, steps.MicroBatchRows, "computed_again", stay),
        "guests that leave after a forward keep their gradients": broken(
            two, layer_turn.LayerTurn, "end_forward", end_forward
        ),
        "a checkpoint reads the guests of the forward": broken(
            CASES["three layers, all recomputed"], guests.Guests, "begin_ahead", lambda *_: None
        ),
    }


def work(rank: int) -> dict[str, Any]:
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    found: dict[str, Any] = {name: compare(case, options) for name, (case, options) in CASES.items()}
    found["dense"] = [compare(Case(ep=2, ddp=OVERLAP), {}, dense_stage=stage) for stage in range(STAGES)]
    found["refused"] = refuse_on_one_stage()
    found["waits"] = count_waits()
    found["shadow"] = shadow(1)
    found["mutated"] = mutate()
    begin_groups(2, pipeline_model_parallel_size=STAGES, virtual_pipeline_model_parallel_size=2)
    found["virtual"] = shadow(2)
    begin_groups(2, pipeline_model_parallel_size=STAGES)
    kernels.apply()
    own = Case(ep=2, ddp=OVERLAP, config=kernels.ROUTER)
    for backend in kernels.BACKENDS:
        found[backend] = compare(kernels.with_backend(own, backend), {"guest_slots": 2}, own)
        kernels.nccl_ep_finalize()
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_megatrons_own_layers(found: list[dict[str, Any]], case: str) -> None:
    for rank, of in enumerate(found):
        assert of[case]["worst"] <= 1e-12, (rank, of[case]["differences"])


@pytest.mark.parametrize("case", CASES)
def test_every_rank_computes_the_rows_that_were_planned_for_it(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        metrics = of[case]["metrics"]
        assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"], rel=1e-12)
        assert metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])
def test_flex_dispatchers_compute_what_the_all_to_all_does(found: list[dict[str, Any]], backend: str) -> None:
    if backend not in found[0]:
        pytest.skip("this megatron-core has no NCCL-EP")
    for rank, of in enumerate(found):
        assert of[backend]["worst"] <= 1e-12, (rank, of[backend]["differences"])


def test_stages_plan_for_as_many_micro_steps_as_are_in_flight(found: list[dict[str, Any]]) -> None:
    assert [of["resident"]["in_flight"] for of in found] == [2, 2, 1, 1]


def test_guests_change_between_micro_steps_in_flight(found: list[dict[str, Any]]) -> None:
    for stage in (found[:2], found[2:]):
        copies = {case: sum(of[case]["metrics"]["foremoe/copies"] for of in stage) for case in ("static", "resident")}
        assert copies["resident"] > copies["static"] > 0, copies
    assert sum(of["two guests"]["moved"] for of in found[:2]) > 0, "no guest comes back into another slot"


def test_a_planned_stage_exchanges_no_counts_and_waits_for_nothing(found: list[dict[str, Any]]) -> None:
    for of in found:
        planned, own = of["waits"]
        assert planned == {}
        assert min(own[what] for what in ("all_gather", "synchronize", "to_host")) >= LAYERS_OF_STAGE * MICRO_STEPS


def test_a_stage_of_dense_layers_takes_part(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        for stage, dense in enumerate(of["dense"]):
            assert dense["worst"] <= 1e-12, (rank, stage, dense)
            assert (dense["metrics"] == {}) == (rank // 2 == stage)


def test_a_stage_of_dense_layers_refuses_what_another_stage_does(found: list[dict[str, Any]]) -> None:
    own = "policy: eplb made a plan of residency free"
    for rank, of in enumerate(found):
        assert of["refused"][0].startswith(own if rank >= 2 else f"rank 2 refused: {own}"), (rank, of["refused"])


def test_agreements_wait_for_no_device(found: list[dict[str, Any]]) -> None:
    assert all(of["refused"][1:] == ["gloo", "gloo"] for of in found)


@pytest.mark.parametrize("which", ["shadow", "virtual"])
def test_shadow_mode_counts_in_pipelines(found: list[dict[str, Any]], which: str) -> None:
    for of in found:
        assert of[which]["equal"]
        assert of[which]["metrics"]["foremoe/rho_vanilla"] == pytest.approx(of[which]["rho"], rel=1e-12)
        assert of[which]["metrics"]["foremoe/rho_planned"] < of[which]["metrics"]["foremoe/rho_vanilla"]
        assert of[which]["metrics"]["foremoe/modelled_seconds_vanilla"] == of[which]["seconds"]["vanilla"]
        assert of[which]["metrics"]["foremoe/modelled_seconds"] == of[which]["seconds"]["foremoe"]


def test_each_trap_is_seen(found: list[dict[str, Any]]) -> None:
    for trap in found[0]["mutated"]:
        assert max(of["mutated"][trap] for of in found) > 1e-6, (trap, [of["mutated"][trap] for of in found])
