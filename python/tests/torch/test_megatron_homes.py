"""Megatron-LM models whose experts were moved to other homes: results, checkpoints, renumbering and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import megatron_training
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_training import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOKENS,
    Case,
    begin_groups,
    counts_of,
    expect_equal,
    make_config,
    make_net,
    routes_of,
    train,
    train_unplanned,
)
from processes import DEVICE, gather
from refusals import ODD, input_error

import foremoe.megatron

CASES = {
    "resident": (Case(), {}),
    "shared": (Case(), {"residency": "shared"}),
    "EP 2 × 2": (Case(ep=2, ddp={}), {}),
    "allgather": (Case(dispatcher="allgather"), {"guest_slots": 2}),
}


def draw_homes(ranks: int, seed: int = 0) -> Any:
    contiguous = np.tile(np.arange(EXPERTS, dtype=np.int32) * ranks // EXPERTS, (LAYERS, 1))
    return np.random.default_rng(seed).permuted(contiguous, axis=1)


def order_of(homes: Any, layer: int) -> list[int]:
    return sorted(range(EXPERTS), key=lambda e: (homes[layer][e], e))


def by_expert(weights: dict[str, Any], homes: Any, ep: int) -> dict[str, Any]:
    """Gathers gradients of experts by their first number, and orders rows of routers by it. homes: None: contiguous."""
    found = {}
    for rank, of_rank in enumerate(gather(weights)):
        for name, gradient in of_rank.items():
            _, number, *rest = name.split(".")
            layer = int(number)
            order = order_of(homes, layer) if homes is not None else list(range(EXPERTS))
            if "local_experts" in name:
                rest[2] = str(order[rank % ep * (EXPERTS // ep) + int(rest[2])])
            if "router" in name:
                place = torch.tensor(order, device=gradient.device)
                found[name] = torch.empty_like(gradient).index_copy(0, place, gradient)
            else:
                found[".".join([str(rank // ep), number, *rest])] = gradient
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_the_model_without_a_plan_and_permutation(rank: int, case: str) -> None:
    of, options = CASES[case]
    begin_groups(of.ep)
    homes = draw_homes(of.ep)
    expected = train_unplanned(of)
    replay, attached = megatron_training.replay, []

    def prepare(model: Any) -> Any:
        foremoe.megatron.permute_experts(model, homes)
        attached.append(foremoe.megatron.attach(model, ranks_per_node=2, homes=homes, **options))
        return attached[0]

    @contextlib.contextmanager
    def inside(replicas: Any, step: int) -> Iterator[None]:
        with replicas.step(replicas.plan(counts_of(step, dist.get_rank()))):
            yield
        assert replicas.metrics()["foremoe/rho_computed"] == replicas.metrics()["foremoe/rho_planned"]

    def replay_renumbered(net: Any, step: int, micro_step: int) -> None:
        replay(net, step, micro_step)
        routers = [layer.router.router_replay for layer in net.moe]
        routes = attached[0].renumbered(torch.stack([router.target_topk_idx for router in routers], 1))
        for i, router in enumerate(routers):
            router.set_target_indices(routes[:, i])

    with mock.patch.object(megatron_training, "replay", replay_renumbered):
        found = train(of, prepare, inside)
    for run, by in ((found, homes), (expected := dict(expected), None)):
        run["weights"] = [by_expert(weights, by, of.ep) for weights in run["weights"]]
    expect_equal(found, expected)


def output_of(net: Any) -> Any:
    with torch.no_grad():
        x = torch.randn(
            TOKENS, 1, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank())
        )
        return net(x.to(DEVICE))


BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32"}


def test_a_permuted_model_computes_the_same_and_its_checkpoint_has_the_permutation(rank: int) -> None:
    begin_groups(4)
    homes = draw_homes(4)
    net, loaded = (make_net(make_config(Case(config=BIAS))) for _ in range(2))
    for layer in net.moe:
        layer.router.expert_bias.copy_(torch.linspace(-1, 1, EXPERTS))
    expected = output_of(net)
    foremoe.megatron.permute_experts(net, homes)
    assert float((output_of(net) - expected).abs().max() / expected.abs().max()) < 1e-6  # the bias is float32
    for i, layer in enumerate(net.moe):
        assert layer.router.foremoe_expert_of_position.tolist() == order_of(homes, i)
        assert "router.foremoe_expert_of_position" in layer.router.sharded_state_dict("router.")
    foremoe.megatron.permute_experts(loaded)
    assert "has no permutation" in input_error(lambda: foremoe.megatron.attach(loaded, homes=homes))
    loaded.load_state_dict(net.state_dict())
    assert torch.equal(output_of(loaded), output_of(net))
    foremoe.megatron.attach(loaded, homes=homes).detach()


def test_models_without_the_permutation_of_the_given_homes_are_refused(rank: int) -> None:
    begin_groups(4)
    net, homes = make_net(make_config(Case())), draw_homes(4)
    said = input_error(lambda: foremoe.megatron.attach(net, homes=homes))
    assert said.startswith("homes: given, but moe.0 has no permutation; load a checkpoint")
    said = input_error(lambda: foremoe.megatron.permute_experts(net, homes if rank != ODD else homes[:1]))
    assert "homes" in said and torch.equal(output_of(net), output_of(make_net(make_config(Case()))))
    said = input_error(lambda: foremoe.megatron.permute_experts(net, draw_homes(4, seed=int(rank == ODD))))
    assert "expected the same on all ranks" in said
    foremoe.megatron.permute_experts(net, homes)
    said = input_error(lambda: foremoe.megatron.attach(net, homes=draw_homes(4, 1)))
    assert "moe.0 has the permutation of other homes" in said
    said = input_error(lambda: foremoe.megatron.permute_experts(net, homes))
    assert said == "model_chunks: experts of moe.0 were permuted before"
    groups = make_net(make_config(Case(config={"moe_router_num_groups": 4, "moe_router_group_topk": 2})))
    assert input_error(lambda: foremoe.megatron.permute_experts(groups, homes)).startswith("moe_router_num_groups: 4")


def test_routes_are_renumbered_and_a_replay_of_old_numbers_is_an_error(rank: int) -> None:
    begin_groups(4)
    net, homes = make_net(make_config(Case())), draw_homes(4)
    foremoe.megatron.permute_experts(net, homes)
    replicas = foremoe.megatron.attach(net, homes=homes)
    routes = torch.stack([routes_of(0, 0, i, rank) for i in range(LAYERS)], 1)
    routes[0] = -1
    found = replicas.renumbered(routes)
    expected = [
        [[order_of(homes, i).index(e) if e >= 0 else -1 for e in ids] for i, ids in enumerate(row)]
        for row in routes.tolist()
    ]
    assert found.tolist() == expected
    for wrong in (routes[:, :1], routes + EXPERTS):
        assert input_error(lambda wrong=wrong: replicas.renumbered(wrong)).startswith("routes: ")
    plan = replicas.plan(counts_of(0, rank)[:1], phase="recompute")
    with pytest.raises(RuntimeError) as error, torch.no_grad(), replicas.step(plan):
        megatron_training.replay(net, 0, 0)
        net(megatron_training.batch(0, 0))
    said = " ".join([str(error.value), *getattr(error.value, "__notes__", ())])  # NCCL does not compare sizes
    assert "were not those that counts told plan()" in said
