"""What one rank gives attach() and plan() otherwise than the others is refused by all of them, by its name.

One spawn of four processes runs all checks.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from megatron_training import RANKS, Case, begin_groups, counts_of, make_config, make_net, on_all_ranks
from refusals import ODD, OTHERS, timed_refusal

import foremoe
import foremoe.megatron
from foremoe._engine.arguments import OPTIONS
from foremoe.megatron import supported

# By argument of attach(): what rank 2 is given, and what all others are.
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "guest_slots": (2, 1),
    "residency": ("shared", None),
    "mode": ("shadow", "active"),
    "policy": ("static", "foremoe"),
    "depth": (3, 2),
    "ranks_per_node": (2, None),
    "cluster": ("h200", "h100"),
    "model": ("Mixtral-8x7B", None),
    "prefer": ("links", "balance"),
    "tolerance": (0.1, 0.2),
    "stages": ("BL", "BLP"),
    "max_copies_per_rank": (2, 3),
    "max_copies_per_source": (2, 3),
    "min_tokens_per_guest": (2, 3),
    "seed": (1, 2),
}
MAY_DIFFER = {"threads"}


def of_arguments(rank: int, net: Any) -> dict[str, Any]:
    found = {}
    attach = foremoe.megatron.attach
    for name, (odd, others) in ARGUMENTS.items():
        options = {name: odd if rank == ODD else others}
        found[name] = timed_refusal(lambda options=options: attach(net, **options))
    found["threads"] = timed_refusal(lambda: attach(net, threads=1 + (rank == ODD)).detach())
    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr("megatron.core.__version__", "0.16.99")
        found["version"] = timed_refusal(lambda: attach(net))
    return found


def of_models(rank: int, net: Any) -> dict[str, Any]:
    case = Case()

    def odd_net(**options: Any) -> Any:
        return make_net(make_config(case, **options)) if rank == ODD else net

    frozen = make_net(make_config(case))
    frozen.moe[1].experts.requires_grad_(rank != ODD)
    attach = foremoe.megatron.attach
    return {
        "layers": timed_refusal(lambda: attach(make_net(make_config(case), layers=2 if rank == ODD else 3))),
        "top_k": timed_refusal(lambda: attach(odd_net(moe_router_topk=1, moe_router_pre_softmax=True))),
        "dispatcher": timed_refusal(lambda: attach(odd_net(moe_token_dispatcher_type="allgather"))),
        "type": timed_refusal(lambda: attach(odd_net(params_dtype=torch.float32))),
        "chunks": timed_refusal(lambda: attach([net, torch.nn.Linear(2, 2)] if rank == ODD else net)),
        "frozen": timed_refusal(lambda: attach(frozen)),
        "frozen in shadow mode": timed_refusal(lambda: attach(frozen, mode="shadow").detach()),
    }


def of_plan(rank: int, net: Any) -> dict[str, Any]:
    replicas = foremoe.megatron.attach(net)
    good = counts_of(0, rank)
    begun = replicas.plan(good)
    phase = "recompute" if rank == ODD else "policy_update"
    wrong = -good if rank == ODD else good
    found = {
        "phase": timed_refusal(lambda: replicas.plan(good, phase)),
        "begun": timed_refusal(lambda: replicas.plan(good, begun=begun if rank == ODD else None)),
        "micro-steps": timed_refusal(lambda: replicas.plan(good[: 3 - (rank == ODD)])),
        "counts": timed_refusal(lambda: replicas.plan(wrong)),
    }
    replicas.detach()
    return found


def work(rank: int) -> dict[str, Any]:
    begin_groups(4)
    net = make_net(make_config(Case()))
    return of_arguments(rank, net) | of_models(rank, net) | {f"plan: {k}": v for k, v in of_plan(rank, net).items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_every_argument_is_compared() -> None:
    """One that is new must be compared, and be put to the test here."""
    arguments = set(inspect.signature(foremoe.megatron.attach).parameters) - {"model_chunks", "options"} | OPTIONS
    assert arguments == set(ARGUMENTS) | MAY_DIFFER


@pytest.mark.parametrize("name", ARGUMENTS)
def test_all_ranks_refuse_an_argument_that_one_has_otherwise(found: list[dict[str, Any]], name: str) -> None:
    odd, others = ARGUMENTS[name]
    for of in found:
        expected = f"{name}: {odd!r} on rank 2, {others!r} on {OTHERS}; expected the same on all ranks"
        assert (of[name]["said"], of[name]["field"]) == (expected, name)


def test_threads_may_differ(found: list[dict[str, Any]]) -> None:
    assert [of["threads"]["said"] for of in found] == ["nothing"] * RANKS


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("version", "megatron-core: 0.16.99 on rank 2, "),
        ("layers", f"model_chunks[0]: 2 MoE layers on rank 2, 3 MoE layers on {OTHERS}; expected the same"),
        ("top_k", "model_chunks[0].moe.0: top 1 of 8 experts, 16 wide, dispatched by alltoall on rank 2, top 2 of"),
        ("dispatcher", "model_chunks[0].moe.0: top 2 of 8 experts, 16 wide, dispatched by allgather on rank 2, top 2"),
        ("type", "model_chunks[0].moe.0.local_experts.0.linear_fc1.weight: float32 [16, 16], trained on rank 2, "),
        ("chunks", f"model_chunks: 2 on rank 2, 1 on {OTHERS}; expected the same"),
        ("frozen", "model_chunks[0].moe.1.local_experts.0.linear_fc1.weight: float64 [16, 16], frozen on rank 2, "),
        ("frozen in shadow mode", "nothing"),
        ("plan: phase", f"phase: recompute on rank 2, policy_update on {OTHERS}; expected the same on all ranks"),
        ("plan: begun", f"begun: given on rank 2, not given on {OTHERS}; expected the same on all ranks"),
        ("plan: micro-steps", f"counts: 2 micro-steps on rank 2, 3 micro-steps on {OTHERS}; expected the same on"),
    ],
)
def test_all_ranks_refuse_what_one_has_otherwise(found: list[dict[str, Any]], case: str, words: str) -> None:
    for of in found:
        assert of[case]["said"].startswith(words), of[case]


def test_counts_that_one_rank_refuses_are_told_by_all(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        own = of["plan: counts"]["said"].removeprefix("" if rank == ODD else "rank 2 refused: ")
        assert own.startswith("counts[0, 0, ")
        assert own.endswith("] rows, expected 0 to 2147483647") or " rows, expected 0 to " in own


def test_ranks_refuse_within_five_seconds(found: list[dict[str, Any]]) -> None:
    assert max(case["seconds"] for of in found for case in of.values()) < 5


def test_versions_are_those_that_are_served() -> None:
    assert supported.expect_version().startswith("0.")
