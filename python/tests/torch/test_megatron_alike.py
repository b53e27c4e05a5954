"""All ranks refuse, by name and within five seconds, arguments of attach() and plan() that differ on one rank."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from megatron_training import Case, begin_groups, counts_of, make_config, make_net
from refusals import ODD, OTHERS, input_error

import foremoe
import foremoe.megatron
from foremoe._engine.arguments import OPTIONS
from foremoe.megatron import supported

input_error = functools.partial(input_error, within=5.0)
# attach()'s arguments: the value on rank 2 and the value on all other ranks.
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "guest_slots": (2, 1),
    "residency": ("shared", None),
    "mode": ("shadow", "active"),
    "policy": ("static", "foremoe"),
    "depth": (3, 2),
    "ranks_per_node": (2, None),
    "on_mismatch": ("home", "refuse"),
    "cluster": ("h200", "h100"),
    "model": ("Mixtral-8x7B", None),
    "prefer": ("links", "balance"),
    "copy_price": (1.0, 2.0),
    "free_copies": (1.0, None),
    "tolerance": (0.1, 0.2),
    "stages": ("BL", "BLP"),
    "max_copies_per_rank": (2, 3),
    "max_copies_per_source": (2, 3),
    "min_tokens_per_guest": (2, 3),
    "seed": (1, 2),
}
ELSEWHERE = {"homes"}  # compared with the model's permutation; test_megatron_homes.py
MAY_DIFFER = {"threads"}


attach = foremoe.megatron.attach


def net_of(**options: Any) -> Any:
    begin_groups(4)
    return make_net(make_config(Case(), **options))


def test_every_argument_is_compared() -> None:
    """A new argument must be compared across ranks and tested here."""
    arguments = set(inspect.signature(attach).parameters) - {"model_chunks", "options"} | OPTIONS
    assert arguments == set(ARGUMENTS) | ELSEWHERE | MAY_DIFFER


@pytest.mark.parametrize("name", ARGUMENTS)
def test_all_ranks_reject_an_argument_that_differs_on_one_rank(rank: int, name: str) -> None:
    odd, others = ARGUMENTS[name]
    needs = {"prefer": "time", "copy_price": 1.0} if name in ("copy_price", "free_copies") else {}
    said = input_error(lambda: attach(net_of(), **needs | {name: odd if rank == ODD else others}))
    assert said == f"{name}: {odd!r} on rank 2, {others!r} on {OTHERS}; expected the same on all ranks"


def test_an_option_given_on_one_rank_is_rejected_and_threads_may_differ(rank: int) -> None:
    said = input_error(lambda: attach(net_of(), **{"tolerance": 0.1} if rank == ODD else {}))
    assert said.startswith(f"tolerance: 0.1 on rank 2, not given on {OTHERS}; expected")
    attach(net_of(), threads=1 + (rank == ODD)).detach()


def test_a_megatron_version_that_differs_on_one_rank_is_rejected(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr("megatron.core.__version__", "0.16.99")
        assert input_error(lambda: attach(net_of())).startswith("megatron-core: 0.16.99 on rank 2, ")


@pytest.mark.parametrize(("odd", "words"), [
    ({"moe_router_topk": 1, "moe_router_pre_softmax": True},
     ".moe.0: top 1 of 8 experts, 16 wide, dispatched by alltoall on rank 2, top 2 of"),
    ({"moe_token_dispatcher_type": "allgather"},
     ".moe.0: top 2 of 8 experts, 16 wide, dispatched by allgather on rank 2, top 2"),
    ({"params_dtype": torch.float32},
     ".moe.0.local_experts.0.linear_fc1.weight: float32 [16, 16], trained on rank 2, "),
])  # fmt: skip
def test_all_ranks_reject_a_model_that_differs_on_one_rank(rank: int, odd: dict[str, Any], words: str) -> None:
    net = net_of(**odd if rank == ODD else {})
    assert input_error(lambda: attach(net)).startswith(f"model_chunks[0]{words}")


def test_different_numbers_of_layers_or_chunks_and_frozen_weights_are_rejected(rank: int) -> None:
    frozen = net_of()
    net = make_net(make_config(Case()), layers=2 if rank == ODD else 3)
    expected = f"model_chunks[0]: 2 MoE layers on rank 2, 3 MoE layers on {OTHERS}; expected the same"
    assert input_error(lambda: attach(net)).startswith(expected)
    chunks = [frozen, torch.nn.Linear(2, 2)] if rank == ODD else frozen
    expected = f"model_chunks: 2 on rank 2, 1 on {OTHERS}; expected the same"
    assert input_error(lambda: attach(chunks)).startswith(expected)
    frozen.moe[1].experts.requires_grad_(rank != ODD)
    expected = "model_chunks[0].moe.1.local_experts.0.linear_fc1.weight: float64 [16, 16], frozen on rank 2, "
    assert input_error(lambda: attach(frozen)).startswith(expected)
    attach(frozen, mode="shadow").detach()


def test_arguments_of_plan_must_be_equal_on_all_ranks(rank: int) -> None:
    replicas = attach(net_of())
    odd, good = rank == ODD, counts_of(0, rank)
    begun = replicas.plan(good)
    for words, arguments in {
        f"phase: recompute on rank 2, policy_update on {OTHERS}; expected the same on all ranks": (
            good, "recompute" if odd else "policy_update"
        ),
        f"counts: 2 micro-steps on rank 2, 3 micro-steps on {OTHERS}; expected the same on": (good[: 3 - odd],),
    }.items():  # fmt: skip
        assert input_error(lambda arguments=arguments: replicas.plan(*arguments)).startswith(words)
    said = input_error(lambda: replicas.plan(good, begun=begun if odd else None))
    assert said.startswith(f"begun: given on rank 2, not given on {OTHERS}; expected the same on all ranks")
    negative = good.clone()
    negative[1, 2, 3] = -1
    said = input_error(lambda: replicas.plan(negative.numpy() if odd else good))
    assert said == f"{'' if odd else 'rank 2 refused: '}counts[1, 2, 3]: -1 rows, expected 0 to 2147483647"
    replicas.detach()


def test_the_installed_megatron_version_is_supported() -> None:
    assert supported.expect_version("active").startswith("0.")
