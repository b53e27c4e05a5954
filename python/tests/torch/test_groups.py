"""Expert-parallel groups smaller than the world, each with its own model and plan.

The ranks of the two groups interleave: (0, 2) and (1, 3).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import re
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RANKS, gather
from refusals import refusal
from torch.distributed import distributed_c10d
from training import make_model, on_all_ranks, run_step, spread

import foremoe
from foremoe._engine import groups as groups_module
from foremoe._engine.groups import make_groups, stand_by

GROUPS = ((0, 2), (1, 3))
TIMEOUTS = (700.0, 800.0)  # seconds
OF_WORLD = 1800.0


F32, F64 = torch.float32, torch.float64


@functools.cache
def groups() -> list[Any]:
    of = zip(GROUPS, TIMEOUTS, strict=True)
    return [dist.new_group(list(ranks), timeout=timedelta(seconds=seconds)) for ranks, seconds in of]


def place(rank: int) -> tuple[int, int, Any]:
    """Returns the index of this rank's group, the rank within it, and the group."""
    (which,) = (i for i, ranks in enumerate(GROUPS) if rank in ranks)
    return which, GROUPS[which].index(rank), groups()[which]


def num_groups() -> int:
    return len(distributed_c10d._world.pg_names)


CASES: dict[str, dict[str, Any]] = {
    **{f"{residency}, peer": {"residency": residency} for residency in ("static", "resident", "shared")},
    **{
        f"{residency}, host": {"residency": residency, "path": "host"} for residency in ("static", "resident", "shared")
    },
    **{wrapper: {"wrapper": wrapper, "path": "auto", "checkpointing": True} for wrapper in ("ddp", "fsdp2")},
    "home": {"unrouted": "home"},
    "by token": {"dispatch": "token", "ranks_per_node": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_each_group_has_its_own_plan_and_matches_one_eager_process(rank: int, case: str) -> None:
    """In "peer" cases group 1 has uneven micro-batches, and one rank per node where group 0 has two."""
    which, own, group = place(rank)
    nodes = {"ranks_per_node": 2 - which} if "residency" in CASES[case] else {}
    options = CASES[case] | nodes | {"uneven": "peer" in case and which == 1}
    result = run_step(own, F64, group=group, seed=20 + which, model_seed=which, **options)
    assert result["rho_computed"] == pytest.approx(result["rho_expected"], rel=1e-12)
    assert result["fallbacks"] == 0
    found = gather((result["rho_vanilla"], result["copies"]))
    of_groups = [[found[of] for of in ranks] for ranks in GROUPS]
    assert all(len({rho for rho, _ in of}) == 1 and sum(copies for _, copies in of) > 0 for of in of_groups)
    assert of_groups[0][0][0] != of_groups[1][0][0]


def test_a_group_without_this_process_is_rejected(rank: int) -> None:
    others = groups()[1 - place(rank)[0]]
    said = refusal(lambda: spread(make_model(F32), others))
    assert said == "InputError: group: this process is not one of its ranks"


def test_evaluation_and_state_use_the_groups_experts_and_detach_destroys_the_groups(rank: int) -> None:
    which, _, group = place(rank)
    before = num_groups()
    whole, model = make_model(F32, which), make_model(F32, which)
    ep = spread(model, group)
    batch = torch.arange(24).view(2, 12) + rank
    with torch.no_grad():
        expected = whole(batch).logits
        assert float((model(batch).logits - expected).abs().max() / expected.abs().max()) < 1e-5
    ep.load_whole_state_dict(model, ep.whole_state_dict(model))
    ep.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    assert num_groups() == before


def error_without_new_groups(of: Callable[[], Any]) -> str:
    before = num_groups()
    try:
        of()
    except (RuntimeError, foremoe.InputError) as error:
        assert num_groups() == before, "a refused group was made"
        return str(error)
    return "nothing"


def test_different_numbers_of_process_groups_are_reported(rank: int) -> None:
    """Rank 0 creates an extra group, then the others do. Some PyTorch versions do not count these groups."""
    _, _, group = place(rank)

    def make_one() -> None:
        for made in make_groups([(group, "gloo")])[0]:
            dist.destroy_process_group(made)

    for makes_one in (rank == 0, rank != 0):
        if makes_one:
            dist.new_group([rank], use_local_synchronization=True)
        counts = gather(distributed_c10d.get_pg_count())
        told = "ranks [1, 2, 3] have made fewer or more process groups than rank 0"
        assert error_without_new_groups(make_one).startswith(told if len(set(counts)) > 1 else "nothing")
    assert len(set(counts)) == 1


def test_all_ranks_create_all_groups_in_one_order_and_get_their_own(rank: int) -> None:
    """If new_group() splits the NCCL communicator, every rank of the default group must call it."""
    which, _, group = place(rank)
    own = dist.new_group

    def watched(*ranks: Any, timeout: timedelta, **options: Any) -> Any:
        asked.append((ranks, options | {"timeout": timeout.total_seconds()}))
        return own(*ranks, timeout=timeout, **options)

    asked: list[Any] = []
    wanted = [(group, "gloo"), (group, "gloo"), (dist.group.WORLD, "gloo")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", watched)
        made, _ = make_groups(wanted if rank % 2 else wanted[:1] + wanted[2:])
    once = [([0, 2], TIMEOUTS[0]), ([0, 1, 2, 3], OF_WORLD), ([1, 3], TIMEOUTS[1]), ([1, 3], TIMEOUTS[1])]
    assert asked == [((ranks,), {"timeout": timeout, "backend": "gloo"}) for ranks, timeout in once]

    def timeout_of(group: Any) -> float:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    of_group = (list(GROUPS[which]), TIMEOUTS[which])
    expected = [of_group, *([of_group] if rank % 2 else []), ([0, 1, 2, 3], OF_WORLD)]
    assert [(dist.get_process_group_ranks(group), timeout_of(group)) for group in made] == expected
    for group in made:
        dist.destroy_process_group(group)


def test_ranks_without_a_group_stand_by(rank: int) -> None:
    which, own, group = place(rank)
    if which == 1:
        stand_by()
    else:
        run_step(own, F64, group=group, ranks_per_node=1)


def test_an_error_on_one_rank_is_raised_on_all_and_no_group_is_made(rank: int) -> None:
    _, _, group = place(rank)
    model = make_model(F32)
    found = gather(error_without_new_groups(lambda: spread(model, group, depth=0 if rank == 1 else 2)))
    own = found[1]
    assert own.startswith("depth: 0")
    assert found == [own if of == 1 else f"rank 1 refused: {own}" for of in range(RANKS)]
    refused = error_without_new_groups(lambda: make_groups([] if rank == 2 else [(group, "gloo")]))
    assert refused.startswith("ranks [2] do not make the gloo group of ranks [0, 2]")


def test_experts_on_a_device_of_no_backend_are_refused(rank: int) -> None:
    """As of a model that is still on the CPU, in an NCCL group."""
    refused = refusal(lambda: spread(make_model(F32).to("meta")))
    assert refused.startswith("InputError: layers: experts are on meta, where the group's backend, gloo, does not work")


kept: list[Any] = []


def exit_after_an_exchange(rank: int) -> dict[str, Any]:
    """Ends like a script that exits right after an exchange, with a live reference to its group."""
    kept.append(dist.group.WORLD)
    make_groups([])

    def exchange_at_exit() -> None:
        sys.setswitchinterval(30)  # keeps the GIL below from gloo's thread, which must release the tensors
        kept[0].barrier().wait()
        kept[0].alltoall_base(torch.empty(RANKS, 1), torch.ones(RANKS, 1), [], [])
        since = time.monotonic()
        while time.monotonic() < since + 1:
            pass

    atexit.register(exchange_at_exit)
    return {}


def test_a_rank_that_exits_right_after_an_exchange_exits_cleanly() -> None:
    assert on_all_ranks(exit_after_an_exchange) == [{}] * RANKS


@pytest.mark.parametrize(
    ("version", "bound", "backend", "waits"),
    [
        ("2.14.1+cu130", 0, "gloo", True),
        ("2.15.0", 0, "gloo", False),
        ("2.9.1", None, "gloo", False),
        ("2.9.1", 0, "nccl", False),
    ],
)
def test_torch_versions_that_would_deadlock_are_rejected(
    monkeypatch: pytest.MonkeyPatch, version: str, bound: int | None, backend: str, waits: bool
) -> None:
    """Before 2.15, ranks outside a gloo group split the default NCCL communicator, while its members do not."""
    world = types.SimpleNamespace(bound_device_id=bound if bound is None else torch.device("cuda", bound))
    monkeypatch.setattr(groups_module.dist, "group", types.SimpleNamespace(WORLD=world))
    monkeypatch.setattr(torch, "__version__", version)
    refused = pytest.raises(RuntimeError, match=re.escape("init_process_group(device_id=…); leave device_id out"))
    with refused if waits else contextlib.nullcontext():
        groups_module._expect_makeable([((0,), backend, 0)], [{((0,), backend, 0)}, set()])
