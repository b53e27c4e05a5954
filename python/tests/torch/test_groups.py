"""Groups of expert parallelism that are not the world: each has its own model and plan, and knows nothing of the other.

One spawn of four processes runs all checks, in two groups whose ranks are neither adjacent nor in the world's order.
"""

from __future__ import annotations

import atexit
import contextlib
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
from torch.distributed import distributed_c10d
from training import (
    RANKS,
    assert_equal_to_eager,
    make_model,
    on_all_ranks,
    run_step,
    spread,
    steps_of,
)

import foremoe
from foremoe._engine import groups as groups_module
from foremoe._engine.groups import make_groups, stand_by

GROUPS = ((0, 2), (1, 3))
TIMEOUTS = (700.0, 800.0)  # seconds
OF_WORLD = 1800.0


def evaluate(group: Any, seed: int) -> float:
    """Without a phase, between a group's whole model and its spread one."""
    whole, model = make_model(torch.float32, seed), make_model(torch.float32, seed)
    ep = spread(model, group)
    batch = torch.arange(24).view(2, 12) + dist.get_rank()
    with torch.no_grad():
        expected = whole(batch).logits
        worst = float((model(batch).logits - expected).abs().max() / expected.abs().max())
    ep.load_whole_state_dict(model, ep.whole_state_dict(model))
    ep.detach()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    return worst if same else 1.0


def join_another(group: Any) -> str:
    try:
        spread(make_model(torch.float32), group)
    except foremoe.InputError as error:
        return f"{error.field}: {error}"
    return "nothing"


def said(of: Callable[[], Any]) -> str:
    before = len(distributed_c10d._world.pg_names)
    try:
        of()
    except (RuntimeError, foremoe.InputError) as error:
        assert len(distributed_c10d._world.pg_names) == before, "a refused group was made"
        return str(error)
    return "nothing"


def make_one(group: Any) -> None:
    for made in make_groups([(group, "gloo")]):
        dist.destroy_process_group(made)


def after_another_group(group: Any) -> list[Any]:
    """What make_groups() says where one rank has made a group more than the others, and where all have again; and how
    many torch has counted before. Not all versions count these."""
    own = dist.get_rank()
    found: list[Any] = []
    for makes_one in (own == 0, own != 0):
        if makes_one:
            dist.new_group([own], use_local_synchronization=True)
        found += [distributed_c10d.get_pg_count(), said(lambda: make_one(group))]
    return found


def timeout_of(group: Any) -> float:
    """In seconds."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def made_together(group: Any) -> list[Any]:
    """What this rank asks torch for where each rank wants groups of its own, and what ranks and timeouts these have."""
    own = dist.new_group

    def watched(*ranks: Any, timeout: timedelta, **options: Any) -> Any:
        asked.append((ranks, options | {"timeout": timeout.total_seconds()}))
        return own(*ranks, timeout=timeout, **options)

    asked: list[Any] = []
    wanted = [(group, "gloo"), (group, "gloo"), (dist.group.WORLD, "gloo")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", watched)
        made = make_groups(wanted if dist.get_rank() % 2 else wanted[:1] + wanted[2:])
    of = [(dist.get_process_group_ranks(group), timeout_of(group)) for group in made]
    for group in made:
        dist.destroy_process_group(group)
    return [asked, of]


def alone(of: int, group: Any) -> float:
    """One group trains, the ranks of the other are in none."""
    if of == 1:
        stand_by()
        return 0.0
    return float(
        run_step(GROUPS[of].index(dist.get_rank()), torch.float64, group=group, ranks_per_node=1)["difference"]
    )


def work(rank: int) -> dict[str, Any]:
    groups = [
        dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))
        for ranks, seconds in zip(GROUPS, TIMEOUTS, strict=True)
    ]
    of = next(i for i, ranks in enumerate(GROUPS) if rank in ranks)
    options: dict[str, Any] = {"group": groups[of], "seed": 20 + of, "model_seed": of}
    own = GROUPS[of].index(rank)
    found: dict[str, Any] = {"group": of}
    for residency in ("static", "resident", "shared"):
        # One of the groups has a micro-step more than the other, and ranks of its own on different nodes.
        found[f"{residency}, peer"] = run_step(
            own, torch.float64, residency=residency, uneven=of == 1, ranks_per_node=2 - of, **options
        )
        found[f"{residency}, host"] = run_step(
            own, torch.float64, residency=residency, path="host", ranks_per_node=2 - of, **options
        )
    for wrapper in ("ddp", "fsdp2"):
        found[wrapper] = run_step(own, torch.float64, wrapper=wrapper, path="auto", checkpointing=True, **options)
    found["home"] = run_step(own, torch.float64, unrouted="home", **options)
    found["another"] = join_another(groups[1 - of])
    before = len(distributed_c10d._world.pg_names)
    found["evaluation"] = evaluate(groups[of], of)
    found["groups left"] = len(distributed_c10d._world.pg_names) - before
    found["after another group"] = after_another_group(groups[of])
    found["made together"] = made_together(groups[of])
    found["alone"] = alone(of, groups[of])
    model = make_model(torch.float32)
    found["one refuses"] = said(lambda: spread(model, groups[of], depth=0 if rank == 1 else 2))
    found["one makes none"] = said(lambda: make_groups([] if rank == 2 else [(groups[of], "gloo")]))
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_losses_and_gradients_are_those_of_one_eager_process_per_group(found: list[dict[str, Any]]) -> None:
    assert_equal_to_eager(found)


def test_each_group_has_a_plan_of_its_own(found: list[dict[str, Any]]) -> None:
    for case in steps_of(found[0]):
        rho = [[found[rank][case]["rho_vanilla"] for rank in ranks] for ranks in GROUPS]
        assert all(len(set(of_group)) == 1 for of_group in rho), case
        assert rho[0] != rho[1], case
        for ranks in GROUPS:
            assert sum(found[rank][case]["copies"] for rank in ranks) > 0, case
            assert all(found[rank][case]["fallbacks"] == 0 for rank in ranks), case
            for of in (found[rank][case] for rank in ranks):
                assert of["rho_computed"] == pytest.approx(of["rho_expected"], rel=1e-12), case


def test_a_group_of_others_is_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["another"] == "group: group: this process is none of its ranks"


def test_evaluation_and_files_hold_the_groups_experts(found: list[dict[str, Any]]) -> None:
    assert len(found) == RANKS
    assert max(of["evaluation"] for of in found) < 1e-5


def test_detached_experts_leave_no_groups(found: list[dict[str, Any]]) -> None:
    assert all(of["groups left"] == 0 for of in found)


def test_ranks_that_made_other_groups_before_are_told_so(found: list[dict[str, Any]]) -> None:
    for of in found:
        _, refused, _, made = of["after another group"]
        told = "ranks [1, 2, 3] have made other process groups before than rank 0"
        assert refused.startswith(told if len({of["after another group"][0] for of in found}) > 1 else "nothing")
        assert made == "nothing"


def test_all_ranks_ask_torch_for_the_groups_of_all_in_one_order(found: list[dict[str, Any]]) -> None:
    """Where a new group splits the NCCL communicator, every rank of the default group must do so."""
    once = [([0, 2], TIMEOUTS[0]), ([0, 1, 2, 3], OF_WORLD), ([1, 3], TIMEOUTS[1]), ([1, 3], TIMEOUTS[1])]
    for of in found:
        asked, _ = of["made together"]
        assert asked == [((ranks,), {"timeout": timeout, "backend": "gloo"}) for ranks, timeout in once]


def test_new_groups_have_the_ranks_and_the_timeout_of_the_given_ones(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        _, own = of["made together"]
        group = (list(GROUPS[of["group"]]), TIMEOUTS[of["group"]])
        assert own == [group, *([group] if rank % 2 else []), ([0, 1, 2, 3], OF_WORLD)]


def test_ranks_of_no_group_stand_by(found: list[dict[str, Any]]) -> None:
    assert max(of["alone"] for of in found) <= 1e-12


def test_all_ranks_refuse_what_one_refuses_and_make_no_group(found: list[dict[str, Any]]) -> None:
    own = found[1]["one refuses"]
    assert own.startswith("depth: 0")
    assert [of["one refuses"] for of in found] == [own if r == 1 else f"rank 1 refused: {own}" for r in range(RANKS)]
    for of in found:
        assert of["one makes none"].startswith("ranks [2] do not make the gloo group of ranks [0, 2]")


kept: list[Any] = []


def end_at_once(rank: int) -> dict[str, Any]:
    """Like a script whose last word is an exchange, and whose model still refers to its group."""
    kept.append(dist.group.WORLD)
    make_groups([])

    def last_word() -> None:
        sys.setswitchinterval(30)  # so gloo's thread, which wants to let go of the tensors, is not let in below
        kept[0].barrier().wait()
        kept[0].alltoall_base(torch.empty(RANKS, 1), torch.ones(RANKS, 1), [], [])
        since = time.monotonic()
        while time.monotonic() < since + 1:
            pass

    atexit.register(last_word)
    return {}


def test_a_rank_whose_last_word_is_an_exchange_ends_well() -> None:
    assert on_all_ranks(end_at_once) == [{}] * RANKS


@pytest.mark.parametrize(
    ("version", "bound", "backend", "waits"),
    [
        ("2.14.1+cu130", 0, "gloo", True),
        ("2.15.0", 0, "gloo", False),
        ("2.9.1", None, "gloo", False),
        ("2.9.1", 0, "nccl", False),
    ],
)
def test_a_torch_that_would_wait_forever_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str, bound: int | None, backend: str, waits: bool
) -> None:
    """Before 2.15 ranks outside a gloo group split the default NCCL communicator, and its members do not."""
    world = types.SimpleNamespace(bound_device_id=bound if bound is None else torch.device("cuda", bound))
    monkeypatch.setattr(groups_module.dist, "group", types.SimpleNamespace(WORLD=world))
    monkeypatch.setattr(torch, "__version__", version)
    refused = pytest.raises(RuntimeError, match=re.escape("init_process_group(device_id=…); leave device_id out"))
    with refused if waits else contextlib.nullcontext():
        groups_module._expect_makeable([((0,), backend, 0)], [{((0,), backend, 0)}, set()])
