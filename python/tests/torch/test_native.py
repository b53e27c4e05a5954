"""Models that transformers loaded in parts, each rank its own experts: planned, they train as one eager process does.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import transformers.distributed.expert_parallel as native
from counting import Counter
from refusals import refusal
from training import (
    EXPERTS,
    LAYERS,
    RANKS,
    TOP_K,
    assert_equal_to_eager,
    draw_batches,
    draw_routes,
    loss_of,
    make_model,
    on_all_ranks,
    reference,
    spread,
    worst_difference,
)
from transformers.distributed import DistributedConfig

import foremoe
import foremoe.hf
from foremoe._engine import communication, guests
from foremoe.hf import expert_layers, record
from foremoe.torch import ExpertParallel, dispatch, exchange, parallel


def load(folder: str, dtype: Any, **config: Any) -> Any:
    """float64: torch's grouped_mm, which transformers' own exchange would run, has no such kernel."""
    config = {"fsdp_size": RANKS, "ep_size": RANKS, "ep_implementation": "foremoe"} | config
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        distributed_config=DistributedConfig(**config),
        attn_implementation="eager",
        experts_implementation="eager" if dtype is torch.float64 else "grouped_mm",
    )


def attach(model: Any, **options: Any) -> Any:
    ep = spread(model, ranks_per_node=2, **options)
    assert ep.wrap(model) is model
    return ep


def run_phase(ep: Any, model: Any, batches: list[Any], routes: list[Any]) -> tuple[float, Any]:
    """The loss, mean over ranks, and the phase's figures."""
    total = 0.0
    with ep.plan(routes) as phase:
        for m, batch in enumerate(batches):
            with phase.micro_step(m):
                loss = loss_of(model, batch)
                loss.backward()
                total += float(loss.detach())
        phase.drain()
    mean = torch.tensor(total / RANKS, dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean), phase.figures()


def gradients_of(model: Any) -> dict[str, Any]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def draw(seed: int) -> tuple[list[Any], list[Any]]:
    """Batches and routes [rank][micro-step]."""
    return [draw_batches(r, 3, seed) for r in range(RANKS)], [draw_routes(r, 3, seed) for r in range(RANKS)]


def one_phase(rank: int, folder: str, dtype: Any, *, checkpointing: bool = False, **options: Any) -> dict[str, Any]:
    batches, routes = draw(seed=0)
    expected_loss, expected = reference(dtype, batches, routes)
    model = load(folder, dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    ep = attach(model, **options)
    loss, figures = run_phase(ep, model, batches[rank], routes[rank])
    difference, whose = worst_difference(gradients_of(model), expected)
    ep.detach()
    return {
        "dtype": str(dtype),
        "loss": abs(loss - expected_loss) / expected_loss,
        "difference": difference,
        "whose": whose,
        "copies": figures["copies"],
        "detached": all(layer._by.execute is None for layer in ep.layers),
    }


def train(rank: int, folder: str) -> dict[str, Any]:
    """Two clipped steps of AdamW, the second of two phases; the weights in every form in which they leave the ranks."""
    model, eager = load(folder, torch.float64), make_model(torch.float64)
    ep = attach(model)
    optimizer, expected = (torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (model, eager))
    norms = []
    for seeds in ((1,), (2, 3)):
        optimizer.zero_grad(set_to_none=True)
        expected.zero_grad(set_to_none=True)
        for seed in seeds:
            batches, routes = draw(seed)
            run_phase(ep, model, batches[rank], routes[rank])
            _, gradients = reference(torch.float64, batches, routes, state=eager.state_dict())
            for name, p in eager.named_parameters():
                p.grad = gradients[name] if p.grad is None else p.grad + gradients[name]
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        norms.append(float(abs(ep.clip_grad_norm_(0.5) - norm) / norm))
        optimizer.step()
        expected.step()
    weights = eager.state_dict()
    trained = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    state = ep.whole_state_dict(model)
    model.save_pretrained(f"{folder}/trained")
    ep.save_pretrained(model, f"{folder}/trained by all")
    dist.barrier()
    saved, by_all = (
        transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float64)
        for name in ("trained", "trained by all")
    )
    moments = ep.whole_optimizer_state(optimizer)["state"]
    ep.load_whole_state_dict(model, {name: weight + 1 for name, weight in state.items()})
    own = next(iter(ep.expert_parameters()))
    return {
        "norm": max(norms),
        "weights": worst_difference(trained, weights)[0],
        "state": worst_difference(state, weights)[0] if state.keys() == weights.keys() else "other names",
        "moments": worst_difference(
            {name: of["exp_avg"] for name, of in moments.items()},
            {name: expected.state[p]["exp_avg"] for name, p in eager.named_parameters()},
        )[0],
        "saved": all(torch.equal(p, trained[name]) for of in (saved, by_all) for name, p in of.named_parameters()),
        "loaded": torch.equal(own.detach().full_tensor(), state["model.layers.0.mlp.experts.gate_up_proj"] + 1),
        "local": own.to_local().shape[0],
    }


def evaluate(rank: int, folder: str) -> dict[str, Any]:
    """Logits before a plan can be made, without one, within a phase, and when the executor is gone again."""
    whole, model = make_model(torch.float64), load(folder, torch.float64)
    whole.set_experts_implementation("eager")
    (batch,) = draw_batches(rank, 1, 7)

    def difference() -> float:
        with torch.no_grad():
            return float((model(batch).logits - whole(batch).logits).abs().max())

    found = {"before": difference()}
    ep = attach(model)
    found["without a phase"] = difference()
    with ep.plan([draw_routes(rank, 1, 7)[0]], phase="recompute") as phase:
        with ep.unplanned():
            found["in a phase"] = difference()
        with phase.micro_step(0), torch.no_grad():
            model(batch)
    ep.detach()
    found["detached"] = difference()
    return found


def record_and_replay(rank: int, folder: str) -> dict[str, Any]:
    """What the sharded model itself generates, replayed under a plan."""
    model = load(folder, torch.float32)
    ep = attach(model)
    prompt = draw_batches(rank, 1, 11)[0][:, :5].clamp(min=2)
    mask = torch.ones_like(prompt)
    with record(model) as recorder, torch.no_grad():
        out = model.generate(input_ids=prompt, attention_mask=mask, min_new_tokens=6, max_new_tokens=6, do_sample=False)
    routes = recorder.routes(out, torch.ones_like(out))
    _, figures = run_phase(ep, model, [out], [routes])
    return {"routes": tuple(routes.shape), "mismatch": figures["mismatch"], "rho": figures["rho_vanilla"]["mean"]}


def count(rank: int, folder: str, *, planned: bool) -> dict[str, int]:
    """Collectives and waits for the device in the layers of one micro-step, forward and backward."""
    counter = Counter()
    model = load(folder, torch.float32)
    (batch,), routes = draw_batches(rank, 1, 8), draw_routes(rank, 1, 8)
    with contextlib.ExitStack() as inside:
        layers = expert_layers(model)
        if planned:
            ep = attach(model)
            layers = ep.layers
            phase = inside.enter_context(ep.plan(routes))
            inside.enter_context(phase.micro_step(0))
        for layer in layers:
            own = super(type(layer._by), layer._by).__call__
            layer.execute_by(counter.watched(layer._by.execute or own))
        with counter.collectives(native, dispatch, exchange, guests, communication, parallel):
            out = model(batch, use_cache=False).logits
            with counter.waits():
                out.backward(torch.ones_like(out))
        if planned:
            phase._drained = True
    return counter.counts


def refusals(rank: int, folder: str) -> dict[str, str]:
    f32 = torch.float32
    found = {
        "tp": refusal(lambda: load(folder, f32, fsdp_size=2, tp_size=2)),
        "ep": refusal(lambda: load(folder, f32, ep_size=2)),
        "implementation": refusal(lambda: expert_layers(load(folder, f32, ep_implementation="all_to_all"))),
        "fsdp alone": refusal(lambda: expert_layers(load(folder, f32, ep_size=1))),
        "mixed": refusal(lambda: expert_layers(load(folder, f32, fsdp_mixed_precision=True))),
    }
    model = load(folder, f32)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found["group"] = refusal(lambda: ExpertParallel(expert_layers(model), halves[rank // 2], replicate_group=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foremoe.hf.transformers, "__version__", "5.22.1")
        found["version"] = refusal(lambda: expert_layers(model))
    ep = ExpertParallel(expert_layers(model))
    found["wrapper"] = refusal(lambda: ep.wrap(model, "ddp"))
    optimizer = torch.optim.AdamW(ep.expert_parameters(), foreach=True)
    (batch,), routes = draw_batches(rank, 1, 5), draw_routes(rank, 1, 5)

    def step_inside() -> None:
        with ep.plan(routes) as phase:
            with phase.micro_step(0):
                loss_of(model, batch).backward()
            optimizer.step()
            phase.drain()

    def stay_idle() -> None:
        with ep.plan(routes) as phase:
            phase.idle(0)

    found["idle"] = refusal(stay_idle)
    ep.detach()
    ep = ExpertParallel(expert_layers(model))
    found["stale"] = refusal(step_inside)
    return found


def work(rank: int) -> dict[str, Any]:
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = str(folders[0])
    os.environ["LOCAL_RANK"] = str(rank)
    transformers.utils.logging.disable_progress_bar()
    for dtype in (torch.float32, torch.float64):
        if rank == 0:
            make_model(dtype).save_pretrained(f"{folder}/{dtype}")
    dist.barrier()
    f32, f64 = f"{folder}/{torch.float32}", f"{folder}/{torch.float64}"
    found: dict[str, Any] = {
        "float64, resident": one_phase(rank, f64, torch.float64),
        "float32, resident": one_phase(rank, f32, torch.float32),
        "float64, shared, host": one_phase(rank, f64, torch.float64, residency="shared", path="host"),
        "float64, static, checkpointing": one_phase(rank, f64, torch.float64, checkpointing=True, residency="static"),
        "training": train(rank, f64),
        "evaluation": evaluate(rank, f64),
        "replay": record_and_replay(rank, f32),
        "planned": count(rank, f32, planned=True),
        "native": count(rank, f32, planned=False),
        "refusals": refusals(rank, f32),
    }
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


@pytest.mark.parametrize(
    "case", ["float64, resident", "float32, resident", "float64, shared, host", "float64, static, checkpointing"]
)
def test_losses_and_gradients_are_those_of_one_eager_process(found: list[dict[str, Any]], case: str) -> None:
    assert_equal_to_eager(found, case)
    assert sum(of[case]["copies"] for of in found) > 0


def test_clipped_steps_of_adamw_give_the_same_weights(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["training"]["norm"] <= 1e-12
        assert of["training"]["weights"] <= 1e-10  # AdamW divides by the root of squared gradients


def test_weights_leave_the_ranks_whole_and_come_back_in_parts(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["training"]["state"] <= 1e-10 and of["training"]["moments"] <= 1e-10
        assert of["training"]["saved"] and of["training"]["loaded"]
        assert of["training"]["local"] == EXPERTS // RANKS


def test_a_forward_without_a_plan_is_that_of_the_whole_model(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert max(of["evaluation"].values()) <= 1e-12, of["evaluation"]


def test_what_the_sharded_model_generates_replays_without_mismatch(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["replay"]["routes"] == (2, 11, LAYERS, TOP_K)
        assert of["replay"]["mismatch"] == 0
        assert of["replay"]["rho"] > 1


def test_a_planned_layer_exchanges_no_counts_and_waits_for_nothing(found: list[dict[str, Any]]) -> None:
    for of in found:
        counts = dict(of["planned"])
        assert counts.pop("batch_isend_irecv") > 0  # copies and gradients, on their own group
        assert counts == {"all_to_all_single": 4 * LAYERS}


def test_the_same_count_sees_the_exchange_of_counts_by_transformers(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["native"]["all_to_all_single"] == LAYERS  # counts; rows go by the functions with gradients
        assert of["native"]["all_to_all_single_autograd"] == 2 * LAYERS
        assert of["native"]["waits"] >= LAYERS


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tp", "InputError: tp_size: 2; expected 1"),
        ("ep", "InputError: ep_size: 2; expected 4"),
        ("implementation", "InputError: ep_implementation: model.layers.0.mlp has experts that are sharded"),
        ("fsdp alone", "InputError: ep_implementation: model.layers.0.mlp has experts that are sharded"),
        ("mixed", "InputError: fsdp_mixed_precision: is not supported"),
        ("group", "has its experts on ranks [0, 1, 2, 3]"),
        ("version", "InputError: model: its experts are sharded, which needs transformers 5.23 or newer, not 5.22.1"),
        ("wrapper", "InputError: wrapper: 'ddp', but FSDP2 shards the model already"),
        ("stale", "an optimizer of experts stepped inside a phase"),
        ("idle", "need a batch of every rank"),
    ],
)
def test_what_cannot_run_is_refused_by_name(found: list[dict[str, Any]], case: str, words: str) -> None:
    for of in found:
        assert words in of["refusals"][case]
