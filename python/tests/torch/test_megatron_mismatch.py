"""Megatron-LM's layers under plans for other routes than those that run: on_mismatch="home"."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import megatron_flex_kernels as kernels
import megatron_training
import pytest
import test_megatron_pipeline as pipeline
import torch
import torch.distributed as dist
from megatron_training import (
    EXPERTS,
    MICRO_STEPS,
    STEPS,
    TOP_K,
    Case,
    batch,
    begin_groups,
    counts_of,
    expect_equal,
    make_config,
    make_net,
    routes_of,
    train,
    train_unplanned,
    under_a_plan,
)
from processes import gather
from refusals import ODD, input_error

import foremoe.megatron

OVERLAP = {"overlap_grad_reduce": True}
CASES = {
    "alltoall, EP 4": (Case(), {}),
    "two guests, shared": (Case(), {"residency": "shared", "guest_slots": 2}),
    "allgather": (Case(dispatcher="allgather"), {}),
    "EP 2 × 2, overlap": (Case(ep=2, ddp=OVERLAP), {"guest_slots": 2}),
    "layers recomputed": (Case(recompute="moe"), {"residency": "shared"}),
    "all recomputed": (Case(ep=2, recompute="all", ddp=OVERLAP), {}),
    "no guests": (Case(), {"guest_slots": 0}),
}
BIAS = {
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 1e-3,
}  # fmt: skip
TWENTIETH, ALL = 0.05, 1.0  # shares of a router's choices that were not recorded


def recorded(step: int, micro_step: int, layer: int, rank: int, share: float) -> Any:
    """Routes of which a share of the tokens' experts is replaced, so that rows run elsewhere. int64 [tokens, top_k].

    ALL: experts 0 and 1 for all tokens, so that no other expert has planned rows.
    """
    routes = routes_of(step, micro_step, layer, rank).cpu()
    if share == ALL:
        return torch.tensor([0, 1]).expand_as(routes)
    random = torch.Generator().manual_seed(1000 * step + 100 * micro_step + 10 * layer + rank)
    for ids in routes:
        for k in (torch.rand(TOP_K, generator=random) < share).nonzero()[:, 0].tolist():
            free = [e for e in range(EXPERTS) if e not in ids.tolist()]
            ids[k] = free[int(torch.randint(len(free), (), generator=random))]
    return routes


def counts_of_others(routes: Callable[..., Any], *arguments: Any) -> Any:
    """counts_of() of other routes than routes_of()."""
    with mock.patch.object(megatron_training, "routes_of", routes):
        return counts_of(*arguments)


def counts_of_recorded(share: float, step: int, rank: int) -> Any:
    return counts_of_others(functools.partial(recorded, share=share), step, rank)


def run(case: Case, options: dict[str, Any], share: float) -> tuple[dict[str, Any], list[dict[str, float]]]:
    metrics: list[dict[str, float]] = []

    @contextlib.contextmanager
    def inside(replicas: Any, step: int) -> Iterator[None]:
        with replicas.step(replicas.plan(counts_of_recorded(share, step, dist.get_rank()))):
            yield
        metrics.append(replicas.metrics())

    attach = functools.partial(foremoe.megatron.attach, ranks_per_node=2, on_mismatch="home", **options)
    return train(case, attach, inside), metrics


def expected_share(step: int, share: float, ranks: Sequence[int]) -> float:
    """Share of the rows that are beyond those recorded for their expert on their rank."""
    beyond = [(counts_of(step, rank) - counts_of_recorded(share, step, rank)).clamp(min=0) for rank in ranks]
    return float(sum(of.sum() for of in beyond)) / float(sum(counts_of(step, rank).sum() for rank in ranks))


@pytest.mark.parametrize("share", [TWENTIETH, ALL])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_unplanned_layers(rank: int, case: str, share: float) -> None:
    of, options = CASES[case]
    begin_groups(of.ep)
    found, metrics = run(of, options, share)
    expect_equal(found, train_unplanned(of))
    group = range(rank // of.ep * of.ep, rank // of.ep * of.ep + of.ep)
    for step in range(STEPS):
        assert metrics[step]["foremoe/mismatched"] == pytest.approx(expected_share(step, share, group), rel=1e-12)
        assert metrics[step]["foremoe/mismatched"] > (0.01 if share == TWENTIETH else 0.5)
    assert (sum(gather(metrics[-1]["foremoe/copies"])) > 0) == (options.get("guest_slots") != 0)


@pytest.mark.parametrize("mismatch", ["refuse", "home"])
@pytest.mark.parametrize("recompute", ["", "moe"])
def test_expert_biases_count_the_tokens_of_experts_as_without_a_plan(rank: int, mismatch: str, recompute: str) -> None:
    """Megatron-LM updates the biases by these counts if moe_router_bias_update_rate is above 0."""
    case = Case(recompute=recompute, config=BIAS)
    begin_groups(case.ep)
    found = under_a_plan(case, {})[0] if mismatch == "refuse" else run(case, {}, TWENTIETH)[0]
    expected = train_unplanned(case)
    expect_equal(found, expected)
    tokens, of_own = (torch.stack(of["tokens_per_expert"]) for of in (found, expected))
    assert torch.equal(tokens, of_own)
    assert torch.equal(tokens.long().cpu(), sum(counts_of(step, rank).sum(0) for step in range(STEPS)))


def test_routes_as_recorded_run_as_planned(rank: int) -> None:
    begin_groups(4)
    found, metrics = run(Case(), {}, 0.0)
    expect_equal(found, train_unplanned(Case()))
    for of in metrics:
        assert of["foremoe/mismatched"] == 0 and of["foremoe/rho_computed"] == of["foremoe/rho_planned"]


def test_balance_is_kept_where_few_rows_differ(rank: int) -> None:
    begin_groups(4)
    _, (of, _) = run(Case(), {"guest_slots": 2}, TWENTIETH)
    assert of["foremoe/rho_planned"] < of["foremoe/rho_computed"] < of["foremoe/rho_vanilla"]


def test_routers_may_choose_without_replay(rank: int) -> None:
    begin_groups(4)
    net = make_net(make_config(Case()))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2, on_mismatch="home")

    def outputs() -> list[Any]:
        return [net(batch(0, m)) for m in range(MICRO_STEPS)]

    with torch.no_grad():
        expected = outputs()
        with replicas.step(replicas.plan(counts_of(0, rank), phase="recompute")):
            found = outputs()
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= 1e-12
    assert replicas.metrics()["foremoe/mismatched"] > 0
    replicas.detach()


@pytest.mark.parametrize("share", [TWENTIETH, ALL])
@pytest.mark.parametrize("case", ["two guests", "two guests, layers recomputed", "shared", "allgather"])
def test_guests_that_move_between_forward_and_backward_serve_the_rows_that_came(
    rank: int, case: str, share: float
) -> None:
    """Under Megatron-LM's 1F1B schedule. Here the plan is for routes_of(), and other routes run."""
    begin_groups(2, pipeline_model_parallel_size=pipeline.STAGES)
    of, options = pipeline.CASES[case]
    run_elsewhere = functools.partial(recorded, share=share)
    with (
        mock.patch.object(megatron_training, "routes_of", run_elsewhere),
        mock.patch.object(pipeline, "counts_of", functools.partial(counts_of_others, routes_of)),
    ):
        found = pipeline.compare(of, {**options, "on_mismatch": "home"}, pipeline.Pipeline(of).run())
    assert found["worst"] <= 1e-12
    assert found["metrics"]["foremoe/mismatched"] > 0
    moved = gather(pipeline.moved_guests(found["plan"]))
    assert case != "two guests" or sum(moved[:2]) > 0


def test_other_values_and_values_that_differ_between_ranks_are_refused(rank: int) -> None:
    begin_groups(4)
    net = make_net(make_config(Case()))
    for values, said in (
        (("drop",) * 2, "on_mismatch: 'drop', expected refuse or home"),
        (("home", "refuse"), "on_mismatch"),
    ):
        attach = functools.partial(foremoe.megatron.attach, net, on_mismatch=values[rank == ODD])
        assert said in input_error(attach)


def test_the_flex_dispatcher_is_refused(rank: int) -> None:
    kernels.expect("deepep")
    begin_groups(4)
    of = kernels.with_backend(Case(config=kernels.ROUTER), "deepep")
    net = make_net(make_config(of))
    said = input_error(lambda: foremoe.megatron.attach(net, ranks_per_node=2, on_mismatch="home"))
    assert said.startswith("on_mismatch: 'home' needs moe_token_dispatcher_type alltoall or allgather, not flex")
