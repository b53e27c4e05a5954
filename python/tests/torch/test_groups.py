"""Groups of expert parallelism that are not the world: each has its own model and plan, and knows nothing of the other.

One spawn of four processes runs all checks, in two groups whose ranks are neither adjacent nor in the world's order.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from training import (  # noqa: E402
    RANKS,
    assert_equal_to_eager,
    make_model,
    on_all_ranks,
    run_step,
    spread,
    steps_of,
)

import foremoe  # noqa: E402
from foremoe.torch.groups import group_like  # noqa: E402

GROUPS = ((0, 2), (1, 3))


def evaluate(group: Any, seed: int) -> float:
    """Without a stage, between a group's whole model and its spread one."""
    whole, model = make_model(torch.float32, seed), make_model(torch.float32, seed)
    ep = spread(model, group)
    batch = torch.arange(24).view(2, 12) + dist.get_rank()
    with torch.no_grad():
        expected = whole(batch).logits
        worst = float((model(batch).logits - expected).abs().max() / expected.abs().max())
    ep.load_full_state_dict(ep.full_state_dict())
    ep.detach()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    return worst if same else 1.0


def join_another(group: Any) -> str:
    try:
        spread(make_model(torch.float32), group)
    except foremoe.InputError as error:
        return f"{error.field}: {error}"
    return "nothing"


def after_another_group(group: Any) -> list[str]:
    """What group_like() says where one rank has made a group more than the others, and where all have again."""
    own = dist.get_rank()
    is_first = dist.get_process_group_ranks(group)[0] == own
    said = []
    for makes_one in (is_first, not is_first):
        if makes_one:
            dist.new_group([own], use_local_synchronization=True)
        try:
            dist.destroy_process_group(group_like(group, "gloo", "cpu"))
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def work(rank: int) -> dict[str, Any]:
    groups = [dist.new_group(list(ranks)) for ranks in GROUPS]
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
        refused, made = of["after another group"]
        assert "have made other process groups before" in refused
        assert made == "nothing"
