"""An optimizer step equals one eager process's under every wrapper that averages the dense parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import RANKS
from refusals import refusal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import (
    begin,
    draw_batches,
    draw_routes,
    gradient_error,
    loss_of,
    make_model,
    reference,
    run_step,
    spread,
    whole,
    whole_gradients,
    worst_difference,
)

WRAPPERS = (None, "ddp", "fsdp2")
MAX_NORM = 0.1


def shard_over_two_replicas(model: Any, experts: set[Any]) -> None:
    """Shard the model by HSDP, with each shard on two ranks."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicas", "shards"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)


def shard_decoder_layers_alone(model: Any, experts: set[Any]) -> None:
    """Shard only the decoder layers; embeddings and head stay whole on every rank."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)), ignored_params=experts)


# How a trainer shards the model before ep.wrap(model).
SHARDED: dict[str, Callable[[Any, set[Any]], None]] = {
    "hsdp": shard_over_two_replicas,
    "decoder layers": shard_decoder_layers_alone,
}


def make_optimizer(groups: list[Any]) -> Any:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2, eps=1e-3, foreach=True)


def abandon_phase(ep: Any, trained: Any, batch: Any, routes: list[Any]) -> str:
    """Run a phase without drain(). Return whether all gradients were kept, and the error."""
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


@pytest.mark.parametrize("wrapper", (*WRAPPERS, *SHARDED))
def test_an_optimizer_step_of_two_phases_matches_one_eager_process(rank: int, wrapper: str | None) -> None:
    """An evaluation comes first, and a third phase is abandoned."""
    batches, routes = ([draw(r, 4, 11) for r in range(RANKS)] for draw in (draw_batches, draw_routes))
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
    shards = [p for p in ep.dense_parameters() if hasattr(p, "to_local")]  # foreach needs a separate group for DTensors
    others = [p for p in ep.dense_parameters() if not hasattr(p, "to_local")]
    optimizer = make_optimizer([shards, others, ep.expert_parameters()])

    def evaluate() -> None:
        with torch.no_grad():
            trained(input_ids=batches[rank][0], use_cache=False)  # leaves FSDP2's root with whole parameters

    for first in (0, 2):
        evaluate()
        with ep.plan(routes[rank][first : first + 2]) as phase:
            for m in phase.micro_steps:
                with phase.micro_step(m):
                    loss_of(trained, batches[rank][first + m]).backward()
            phase.drain()
    assert gradient_error(ep, model, expected) <= 1e-12
    evaluate()
    assert float(ep.clip_grad_norm_(MAX_NORM) / norm) == pytest.approx(1.0, rel=1e-12)
    clipped = torch.stack([gradient.norm() for gradient in whole_gradients(ep, model).values()]).norm()
    assert float(clipped) == pytest.approx(MAX_NORM, rel=1e-4)
    said = abandon_phase(ep, trained, batches[rank][0], routes[rank][:1])
    assert said.startswith("kept: the phase was left"), said
    optimizer.step()
    weights = ep.whole_state_dict(trained)
    assert worst_difference(weights, dict(eager.named_parameters()))[0] <= 1e-12
    assert worst_difference(dict(make_model(torch.float64).named_parameters()), weights)[0] > 1e-3
    own = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in ep.dense_parameters())
    dense = sum(p.numel() for name, p in eager.named_parameters() if ".experts." not in name)
    share = {None: 1, "ddp": 1, "fsdp2": 1 / RANKS, "hsdp": 2 / RANKS}.get(wrapper)  # of the dense parameters
    assert share is None or own / dense == pytest.approx(share, rel=0.1 if share < 1 else 0)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_rank_without_a_batch_is_rejected(rank: int, wrapper: str) -> None:
    ep, _, _ = begin(wrapper, torch.float32)
    refused = "routes: 0 micro-steps on rank 0, 1 micro-steps on ranks 1, 2, 3; expected the same on all ranks"
    assert refusal(lambda: ep.plan(draw_routes(rank, 1, 5) if rank else [])) == f"InputError: {refused}"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
def test_losses_and_gradients_under_fsdp2_match_one_eager_process(
    rank: int, residency: str, checkpointing: bool
) -> None:
    run_step(rank, torch.float64, wrapper="fsdp2", residency=residency, checkpointing=checkpointing)
    if residency == "resident":
        run_step(rank, torch.float32, seed=1, wrapper="fsdp2", checkpointing=checkpointing)
