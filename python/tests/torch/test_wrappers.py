"""Whatever averages the other parameters, an optimizer step is that of one eager process.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import (
    RANKS,
    assert_equal_to_eager,
    draw_batches,
    draw_routes,
    loss_of,
    make_model,
    on_all_ranks,
    reference,
    run_step,
    spread,
    whole,
    whole_gradients,
    worst_difference,
)

import foremoe

WRAPPERS = (None, "ddp", "fsdp2")
MAX_NORM = 0.1


def shard_over_two_replicas(model: Any, experts: set[Any]) -> None:
    """HSDP: each shard is on two ranks."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicas", "shards"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)


def shard_decoder_layers_alone(model: Any, experts: set[Any]) -> None:
    """Embeddings and head stay whole on every rank."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)), ignored_params=experts)


# What a trainer does before ep.wrap(model).
SHARDED: dict[str, Callable[[Any, set[Any]], None]] = {
    "hsdp": shard_over_two_replicas,
    "decoder layers": shard_decoder_layers_alone,
}


def make_optimizer(groups: list[Any]) -> Any:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2, eps=1e-3, foreach=True)


def train(rank: int, wrapper: str | None) -> dict[str, Any]:
    """An optimizer step of two phases, after an evaluation, and a third phase that is given up."""
    batches = [draw_batches(r, 4, 11) for r in range(RANKS)]
    routes = [draw_routes(r, 4, 11) for r in range(RANKS)]
    _, expected = reference(torch.float64, batches, routes)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    eager = make_model(torch.float64)
    for name, p in eager.named_parameters():
        p.grad = expected[name] * MAX_NORM / (norm + 1e-6)
    make_optimizer([list(eager.parameters())]).step()

    model = make_model(torch.float64)
    ep = spread(model, ranks_per_node=2)
    if wrapper in SHARDED:
        SHARDED[wrapper](model, set(ep.expert_parameters()))
    trained = ep.wrap(model, None if wrapper in SHARDED else wrapper)
    shards = [p for p in ep.dense_parameters() if hasattr(p, "to_local")]  # which foreach takes by themselves
    others = [p for p in ep.dense_parameters() if not hasattr(p, "to_local")]
    optimizer = make_optimizer([shards, others, ep.expert_parameters()])
    for begin in (0, 2):
        with torch.no_grad():
            trained(input_ids=batches[rank][0], use_cache=False)  # leaves FSDP2's root with whole parameters
        with ep.plan(routes[rank][begin : begin + 2]) as phase:
            for m in phase.micro_steps:
                with phase.micro_step(m):
                    loss_of(trained, batches[rank][begin + m]).backward()
            phase.drain()
    found: dict[str, Any] = {"gradients": worst_difference(whole_gradients(ep, model), expected)}
    with torch.no_grad():
        trained(input_ids=batches[rank][0], use_cache=False)
    found["norm"] = float(ep.clip_grad_norm_(MAX_NORM) / norm)
    clipped = torch.stack([gradient.norm() for gradient in whole_gradients(ep, model).values()]).norm()
    found["clipped"] = float(clipped)
    found["given up"] = give_up(ep, trained, batches[rank][0], routes[rank][:1])
    optimizer.step()
    weights = ep.whole_state_dict(trained)
    found["weights"] = worst_difference(weights, dict(eager.named_parameters()))
    found["moved"] = worst_difference(dict(make_model(torch.float64).named_parameters()), weights)
    own = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in ep.dense_parameters())
    dense = sum(p.numel() for name, p in eager.named_parameters() if ".experts." not in name)
    found["share"] = own / dense
    return found


def give_up(ep: Any, trained: Any, batch: Any, routes: list[Any]) -> str:
    """A phase without drain() changes no gradients, under any wrapper."""
    parameters = [*ep.dense_parameters(), *ep.expert_parameters()]
    before = [(p.grad, whole(p.grad).clone()) for p in parameters]
    try:
        with ep.plan(routes) as phase, phase.micro_step(0):
            loss_of(trained, batch).backward()
    except RuntimeError as error:
        same = all(p.grad is grad for p, (grad, _) in zip(parameters, before, strict=True))
        same = same and all(torch.equal(whole(grad), value) for grad, value in before)
        return f"{'kept' if same else 'changed'}: {error}"
    return "nothing"


def idle(rank: int) -> dict[str, str]:
    """One rank has no batch."""
    found = {}
    for wrapper in ("ddp", "fsdp2"):
        model = make_model(torch.float32)
        ep = spread(model)
        ep.wrap(model, wrapper)
        try:
            ep.plan(draw_routes(rank, 1, 5) if rank else [])
        except foremoe.InputError as error:
            found[wrapper] = str(error)
    return found


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {str(wrapper): train(rank, wrapper) for wrapper in (*WRAPPERS, *SHARDED)}
    for residency in ("static", "resident", "shared"):
        for checkpointing in (False, True):
            found[f"float64, {residency}, {checkpointing}"] = run_step(
                rank, torch.float64, wrapper="fsdp2", residency=residency, checkpointing=checkpointing
            )
    found["idle"] = idle(rank)
    found["float32"] = run_step(rank, torch.float32, seed=1, wrapper="fsdp2")
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


@pytest.mark.parametrize("wrapper", (*WRAPPERS, *SHARDED))
def test_an_optimizer_step_of_two_phases_is_that_of_one_eager_process(
    found: list[dict[str, Any]], wrapper: str | None
) -> None:
    for rank, of in enumerate(found):
        result = of[str(wrapper)]
        assert result["gradients"][0] <= 1e-12, (rank, result)
        assert result["norm"] == pytest.approx(1.0, rel=1e-12), rank
        assert result["clipped"] == pytest.approx(MAX_NORM, rel=1e-4), rank
        assert result["weights"][0] <= 1e-12, (rank, result)
        assert result["moved"][0] > 1e-3


@pytest.mark.parametrize("wrapper", (*WRAPPERS, *SHARDED))
def test_a_phase_that_is_given_up_changes_no_gradients(found: list[dict[str, Any]], wrapper: str | None) -> None:
    for of in found:
        assert of[str(wrapper)]["given up"].startswith("kept: the phase was left"), of[str(wrapper)]["given up"]


def test_fsdp2_shards_what_is_no_expert(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["None"]["share"] == of["ddp"]["share"] == 1
        assert of["fsdp2"]["share"] == pytest.approx(1 / RANKS, rel=0.1)
        assert of["hsdp"]["share"] == pytest.approx(2 / RANKS, rel=0.1)


def test_a_rank_without_a_batch_is_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert set(of["idle"]) == {"ddp", "fsdp2"}
        refused = "routes: 0 micro-steps on rank 0, 1 micro-steps on ranks 1, 2, 3; expected the same on all ranks"
        assert set(of["idle"].values()) == {refused}


def test_losses_and_gradients_under_fsdp2_are_those_of_one_eager_process(found: list[dict[str, Any]]) -> None:
    assert_equal_to_eager(found)
