"""Models whose experts transformers sharded at load time train under a plan as in one eager process."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import transformers.distributed.expert_parallel as native
from counting import Counter
from processes import LATER, RANKS, gather
from refusals import refusal
from training import (
    EXPERTS,
    LAYERS,
    TOP_K,
    draw_batches,
    draw_routes,
    loss_of,
    make_model,
    reference,
    run_phase,
    spread,
    worst_difference,
)
from transformers.distributed import DistributedConfig

import foremoe
import foremoe.hf
from foremoe.hf import expert_layers, record
from foremoe.torch import ExpertParallel


def load(dtype: Any, folder: str = "", **config: Any) -> Any:
    """Loads a sharded model. In float64 experts run eagerly, since torch's grouped_mm has no float64 kernel."""
    config = {"fsdp_size": RANKS, "ep_size": RANKS, "ep_implementation": "foremoe"} | config
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder or folder_of(dtype),
        dtype=dtype,
        distributed_config=DistributedConfig(**config),
        attn_implementation="eager",
        experts_implementation="eager" if dtype is torch.float64 else "grouped_mm",
    )


F32, F64 = torch.float32, torch.float64


@functools.cache
def folder_of(dtype: Any) -> str:
    """Returns a folder with the checkpoint of the whole model."""
    return saved(make_model(dtype))


def saved(model: Any) -> str:
    rank = dist.get_rank()
    transformers.utils.logging.disable_progress_bar()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    if rank == 0:
        model.save_pretrained(folders[0])
    dist.barrier()
    return str(folders[0])


def attach(model: Any, **options: Any) -> Any:
    ep = spread(model, ranks_per_node=2, **options)
    assert ep.wrap(model) is model
    return ep


@pytest.mark.parametrize("options", [
    {"dtype": F64}, {"dtype": F32}, {"residency": "shared", "path": "host"},
    {"residency": "static", "checkpointing": True}, {"by": "auto"}, {"by": "all_to_all", "residency": "shared"},
])  # fmt: skip
def test_losses_and_gradients_match_one_eager_process(rank: int, options: dict[str, Any]) -> None:
    options = dict(options)
    dtype, checkpointing = options.pop("dtype", F64), options.pop("checkpointing", False)
    batches, routes = ([draw(r, 3, 3) for r in range(RANKS)] for draw in (draw_batches, draw_routes))
    expected_loss, expected = reference(dtype, batches, routes)
    model = load(dtype, ep_implementation=options.pop("by", "foremoe"))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    ep = attach(model, **options)
    losses: list[float] = []
    phase = run_phase(ep, model, 3, 3, backward=lambda loss: (losses.append(float(loss.detach())), loss.backward()))
    bound = 1e-12 if dtype is F64 else 1e-5
    assert sum(gather(sum(losses))) / RANKS == pytest.approx(expected_loss, rel=bound)
    assert worst_difference({name: p.grad.full_tensor() for name, p in model.named_parameters()}, expected)[0] <= bound
    assert sum(gather(phase.figures()["copies"])) > 0
    ep.detach()


@torch.no_grad()
def write_a_part(model: Any) -> None:
    model.lm_head.weight.to_local().mul_(0.9)


@torch.no_grad()
def write_through_the_whole(model: Any) -> None:
    model.model.embed_tokens.weight.mul_(0.9)


@pytest.mark.parametrize(("words", "write"), [  # parts of 16, 16, 16, 14; 2, 2, 1, 0; and 2, 2, 2, 1
    (62, None), (5, None), (62, write_a_part), (7, write_through_the_whole),
])  # fmt: skip
def test_weights_in_uneven_parts_train_unless_they_are_written(rank: int, words: int, write: Any) -> None:
    """In the first forward, FSDP2 replaces uneven parts by equal ones."""
    whole = make_model(F64)
    whole.resize_token_embeddings(words, mean_resizing=False)
    whole.set_experts_implementation("eager")
    batches = [[batch % words for batch in draw_batches(r, 2, 3)] for r in range(RANKS)]
    (sum(whole(batch, labels=batch).loss for of in batches for batch in of) / RANKS).backward()
    routes = []
    for batch in batches[rank]:
        with record(whole) as recorder, torch.no_grad():
            whole(batch)
        routes.append(recorder.routes(batch, torch.ones_like(batch)))
    model = load(F64, saved(whole))
    ep = attach(model)

    def train() -> None:
        with ep.plan(routes) as phase:
            for m, batch in enumerate(batches[rank]):
                with phase.micro_step(m):
                    model(batch, labels=batch).loss.backward()
                if write is not None and m == 0:
                    write(model)
            phase.drain()

    if write is not None:
        assert "were changed inside a phase" in refusal(train)
        return
    train()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    assert worst_difference({name: p.grad.full_tensor() for name, p in model.named_parameters()}, expected)[0] <= 1e-12


def test_clipped_adamw_steps_give_the_same_weights_in_every_saved_form(rank: int) -> None:
    """Trains two steps, the second of two phases, then compares weights in every format that gathers them."""
    model, eager = load(F64), make_model(F64)
    ep = attach(model)
    optimizer, expected = (torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (model, eager))
    for seeds in ((1,), (2, 3)):
        optimizer.zero_grad(set_to_none=True)
        expected.zero_grad(set_to_none=True)
        for seed in seeds:
            batches, routes = ([draw(r, 3, seed) for r in range(RANKS)] for draw in (draw_batches, draw_routes))
            run_phase(ep, model, seed, 3)
            _, gradients = reference(F64, batches, routes, state=eager.state_dict())
            for name, p in eager.named_parameters():
                p.grad = gradients[name] if p.grad is None else p.grad + gradients[name]
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        assert float(ep.clip_grad_norm_(0.5)) == pytest.approx(float(norm), rel=LATER)
        optimizer.step()
        expected.step()
    weights = eager.state_dict()
    trained = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    state = ep.whole_state_dict(model)
    assert state.keys() == weights.keys()
    for of in (trained, state):
        assert worst_difference(of, weights)[0] <= LATER
    moments = {name: of["exp_avg"] for name, of in ep.whole_optimizer_state(optimizer)["state"].items()}
    of_eager = {name: expected.state[p]["exp_avg"] for name, p in eager.named_parameters()}
    assert worst_difference(moments, of_eager)[0] <= LATER
    folder = folder_of(F64)
    model.save_pretrained(f"{folder}/trained")
    ep.save_pretrained(model, f"{folder}/trained by all")
    dist.barrier()
    for name in ("trained", "trained by all"):
        saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=F64)
        assert all(torch.equal(p, trained[name]) for name, p in saved.named_parameters())
    ep.load_whole_state_dict(model, {name: weight + 1 for name, weight in state.items()})
    own = next(iter(ep.expert_parameters()))
    assert torch.equal(own.detach().full_tensor(), state["model.layers.0.mlp.experts.gate_up_proj"] + 1)
    assert own.to_local().shape[0] == EXPERTS // RANKS


def test_a_forward_without_a_plan_matches_the_whole_model(rank: int) -> None:
    """Checks before attaching, without a plan, within a phase, and after detaching."""
    whole, model = make_model(F64), load(F64)
    whole.set_experts_implementation("eager")
    (batch,) = draw_batches(rank, 1, 7)

    def expect_equal() -> None:
        with torch.no_grad():
            assert float((model(batch).logits - whole(batch).logits).abs().max()) <= 1e-12

    expect_equal()
    ep = attach(model)
    expect_equal()
    with ep.plan([draw_routes(rank, 1, 7)[0]], phase="recompute") as phase:
        with ep.unplanned():
            expect_equal()
        with phase.micro_step(0), torch.no_grad():
            model(batch)
    ep.detach()
    expect_equal()


def test_routes_of_a_sharded_generation_replay_without_mismatch(rank: int) -> None:
    model = load(F32)
    ep = attach(model)
    prompt = draw_batches(rank, 1, 11)[0][:, :5].clamp(min=2)
    mask = torch.ones_like(prompt)
    with record(model) as recorder, torch.no_grad():
        out = model.generate(input_ids=prompt, attention_mask=mask, min_new_tokens=6, max_new_tokens=6, do_sample=False)
    routes = recorder.routes(out, torch.ones_like(out))
    assert tuple(routes.shape) == (2, 11, LAYERS, TOP_K)
    with ep.plan([routes]) as phase:
        with phase.micro_step(0):
            loss_of(model, out).backward()
        phase.drain()
    assert phase.figures()["mismatch"] == 0
    assert phase.figures()["rho_vanilla"]["mean"] > 1


def test_a_planned_layer_exchanges_no_counts_and_never_waits(rank: int) -> None:
    model, counter = load(F32), Counter()
    ep = attach(model)
    with ep.plan(draw_routes(rank, 1, 8)) as phase:
        with phase.micro_step(0):
            counter.count_layers(model, draw_batches(rank, 1, 8)[0], native)
        phase.drain()
    assert counter.counts.pop("batch_isend_irecv") > 0  # copies and gradients of guests, on their own group
    assert counter.counts == {"all_to_all_single": 4 * LAYERS}


def test_the_counter_sees_the_exchange_of_counts_by_transformers(rank: int) -> None:
    counter = Counter()
    counter.count_layers(load(F32), draw_batches(rank, 1, 8)[0], native)
    assert counter.counts["all_to_all_single"] == LAYERS  # counts; rows use all_to_all_single_autograd
    assert counter.counts["all_to_all_single_autograd"] == 2 * LAYERS
    assert counter.counts["waits"] >= LAYERS


@pytest.mark.parametrize(("config", "words"), [
    ({"fsdp_size": 2, "tp_size": 2}, "tp_size: 2; expected 1"),
    ({"fsdp_size": 1, "tp_size": 4, "ep_size": 1}, "tp_size: 4; expected 1: Qwen3MoeForCausalLM is tensor-parallel"),
    ({"fsdp_size": 1, "tp_size": 4, "ep_implementation": "auto"}, "tp_size: 4; expected 1"),
    ({"ep_size": 2}, "ep_size: 2; expected 4"),
    ({"ep_size": 2, "ep_implementation": "auto"}, "ep_size: 2; expected 4"),
    ({"ep_size": 1}, "model: the experts of model.layers.0.mlp are sharded, as (Shard(dim=0),) on a mesh of (4,)"),
    ({"fsdp_mixed_precision": True}, "fsdp_mixed_precision: is not supported"),
])  # fmt: skip
def test_unsupported_sharding_options_are_rejected_by_name(rank: int, config: dict[str, Any], words: str) -> None:
    assert refusal(lambda: expert_layers(load(F32, **config))).startswith(f"InputError: {words}")


def test_experts_whose_dispatch_another_hook_replaced_are_rejected(rank: int) -> None:
    model = load(F32, ep_implementation="auto")
    experts = model.model.layers[0].mlp.experts
    dispatch = experts.forward
    experts.forward = lambda *arguments: dispatch(*arguments)
    assert "not by transformers' expert parallelism" in refusal(lambda: expert_layers(model))


def test_unsupported_groups_versions_wrappers_and_calls_are_rejected_by_name(rank: int) -> None:
    model = load(F32)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    said = refusal(lambda: ExpertParallel(expert_layers(model), halves[rank // 2], replicate_group=None))
    assert "has its experts on ranks [0, 1, 2, 3]" in said
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foremoe.hf.transformers, "__version__", "5.22.1")
        said = refusal(lambda: expert_layers(model))
    words = "InputError: model: its experts are sharded, which needs transformers 5.23 or newer, not 5.22.1"
    assert said.startswith(words)
    ep = ExpertParallel(expert_layers(model))
    said = refusal(lambda: ep.wrap(model, "ddp"))
    assert said.startswith("InputError: wrapper: 'ddp', but FSDP2 shards the model already")
    optimizer = torch.optim.AdamW(ep.expert_parameters(), foreach=True)

    def stay_idle() -> None:
        with ep.plan(draw_routes(rank, 1, 5)) as phase:
            phase.idle(0)

    assert "need a batch of every rank" in refusal(stay_idle)
    ep.detach()
    ep = ExpertParallel(expert_layers(model))
    ep.plan = functools.partial(ep.plan, on_mismatch="replay")
    said = refusal(lambda: run_phase(ep, model, 5, 1, between=lambda m: optimizer.step() if m else None))
    assert "an optimizer of experts stepped inside a phase" in said
