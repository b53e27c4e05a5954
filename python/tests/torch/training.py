"""Trains a tiny Qwen3-MoE under a plan and in one eager process. Shared by the tests of foremoe.torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from processes import DEVICE, RANKS, begin_rank, prepare_rank, results_of

from foremoe.hf import expert_layers
from foremoe.torch import ExpertParallel

torch.set_num_threads(1)  # as in the ranks: with more, some processors round softmax in float32 in another way

EXPERTS = 16
LAYERS = 3
TOP_K = 2
MICRO_STEPS = 3  # in run_step()

Spoil = Callable[[Any, Any], contextlib.AbstractContextManager[None]]
"""(ep, phase) → context that injects a fault into the step."""


def make_model(dtype: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, initializer_range=0.2, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).to(DEVICE, dtype)


def spread(model: Any, group: Any = None, **options: Any) -> Any:
    """Spreads a model over all ranks or a group, without a replicate group unless `options` has one."""
    ep: Any = ExpertParallel(expert_layers(model), group, **{"replicate_group": None, **options})
    ep.plan = functools.partial(ep.plan, on_mismatch="replay")  # most routes of tests are drawn, not recorded
    return ep


def begin(wrapper: str | None = None, dtype: Any = torch.float64, **options: Any) -> tuple[Any, Any, Any]:
    """Makes and spreads a model. Returns the ExpertParallel, the model, and the result of wrap()."""
    model = make_model(dtype)
    ep = spread(model, **options)
    return ep, model, ep.wrap(model, wrapper)


def run_phase(
    ep: Any,
    trained: Any,
    seed: int = 3,
    micro_steps: int = 2,
    *,
    backward: Callable[[Any], None] = lambda loss: loss.backward(),
    between: Callable[[int], Any] = lambda m: None,
    after: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Any:
    """Trains in a phase and returns the phase. Calls between(m) before micro-step m, backward(loss) in each micro-step,
    between(micro_steps) before drain(), and after() after drain(). options: arguments of ExpertParallel.plan()."""
    rank = dist.get_rank()
    with ep.plan(draw_routes(rank, micro_steps, seed), **options) as phase:
        for m, batch in enumerate(draw_batches(rank, micro_steps, seed)):
            between(m)
            with phase.micro_step(m):
                backward(loss_of(trained, batch))
        between(micro_steps)
        phase.drain()
        after()
    return phase


def expected_gradients(seed: int = 3, micro_steps: int = 2) -> dict[str, Any]:
    """Gradients of run_phase(), computed by one eager process."""
    batches, routes = ([draw(r, micro_steps, seed) for r in range(RANKS)] for draw in (draw_batches, draw_routes))
    return reference(torch.float64, batches, routes)[1]


def gradient_error(ep: Any, model: Any, expected: dict[str, Any]) -> float:
    return worst_difference(whole_gradients(ep, model), expected)[0]


def draw_batches(rank: int, micro_steps: int, seed: int) -> list[Any]:
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randint(0, 64, (2, 12), generator=random).to(DEVICE) for _ in range(micro_steps)]


def draw_all_routes(rank: int, micro_steps: int, seed: int) -> list[Any]:
    """Draws skewed routes for all tokens. Hot experts differ between micro-steps, so guests change."""
    popular = torch.Generator().manual_seed(seed)
    random = torch.Generator().manual_seed(1000 * seed + rank)
    routes = []
    for _ in range(micro_steps):
        weight = torch.rand(LAYERS, EXPERTS, generator=popular) ** 6 + 1e-3
        of = torch.stack([torch.multinomial(w.expand(24, -1), TOP_K, generator=random) for w in weight], 1)
        routes.append(of.view(2, 12, LAYERS, TOP_K))
    return routes


def draw_routes(rank: int, micro_steps: int, seed: int) -> list[Any]:
    """Draws routes for all tokens but the last of each sequence."""
    routes = draw_all_routes(rank, micro_steps, seed)
    for of in routes:
        of[:, -1] = -1
    return routes


def draw_partial_routes(rank: int, micro_steps: int, seed: int) -> list[Any]:
    """Draws routes with gaps. Even micro-steps: layer 0 has all routes, or none in micro-step 2; layer 1 lacks some on
    rank 1; layer 2 lacks all on rank 0 and 30% elsewhere. Odd: all layers lack a prefix and the last tokens."""
    routes = draw_all_routes(rank, micro_steps, seed)
    random = torch.Generator().manual_seed(77 * seed + rank)
    for m, of in enumerate(routes):
        if m % 2 == 0:
            if m == 2:
                of[:, :, 0] = -1
            if rank == 1:
                of[0, 3:9, 1] = -1
            of[torch.rand(2, 12, generator=random) < (1.0 if rank == 0 else 0.3), 2] = -1
        else:
            of[0, : 4 + rank] = of[:, -1] = -1
    return routes


def execute_eagerly(layer: Any, hidden: Any, ids: Any, gates: Any) -> Any:
    """Computes a layer's experts one after the other. Skips negative ids."""
    out = torch.zeros_like(hidden)
    for e in range(EXPERTS):
        token, place = (ids == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        up = hidden[token] @ layer.experts.gate_up_proj[e].T
        rows = layer.experts._apply_gate(up) @ layer.experts.down_proj[e].T
        out = out.index_add(0, token, rows * gates[token, place, None])
    return out


def make_eager_model(seed: int = 0) -> Any:
    """Makes a float64 model that computes all experts in this process."""
    model = make_model(torch.float64, seed)
    for layer in expert_layers(model):
        layer.execute_by(functools.partial(execute_eagerly, layer))
    return model


def wrong_routes(dtype: Any, batches: list[Any], routes: list[Any], share: float, seed: int) -> list[Any]:
    """Returns the routes that make_model() chooses on these batches, top-k reversed. Replaces a share of the experts by
    other experts. Rows without a route in `routes` get none."""
    model, random = make_model(dtype), torch.Generator().manual_seed(seed)
    calls: list[Any] = []

    def execute_of(layer: Any) -> Any:
        def execute(hidden: Any, ids: Any, gates: Any) -> Any:
            calls.append(ids)
            return execute_eagerly(layer, hidden, ids, gates)

        return execute

    for layer in expert_layers(model):
        layer.execute_by(execute_of(layer))
    found = []
    for batch, like in zip(batches, routes, strict=True):
        calls.clear()
        with torch.no_grad():
            model(batch)
        of = torch.stack(calls, 1).flip(-1).cpu()
        for ids in of.view(-1, TOP_K):
            chosen = ids.tolist()
            for k in (torch.rand(TOP_K, generator=random) < share).nonzero()[:, 0].tolist():
                free = [e for e in range(EXPERTS) if e not in (*chosen, *ids.tolist())]
                ids[k] = free[int(torch.randint(len(free), (), generator=random))]
        found.append(of.view_as(like).masked_fill(like < 0, -1))
    return found


def loss_of(model: Any, ids: Any, every_row: bool = False) -> Any:
    """Cross-entropy of the next token. every_row adds a term of all logits, including those of the last token."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))
    return loss + 0.1 * logits.square().mean() if every_row else loss


_references: dict[str, tuple[float, dict[str, Any]]] = {}


def reference(
    dtype: Any,
    batches: list[list[Any]],
    routes: list[list[Any]],
    *,
    weights: Any = None,
    state: dict[str, Any] | None = None,
    model_seed: int = 0,
    unrouted: str = "drop",
    on_mismatch: str = "replay",
    chosen: Any = None,
    mismatched: Any = None,
) -> tuple[float, dict[str, Any]]:
    """Returns loss and gradients of one eager process, averaged over ranks. Rows without a route are dropped. With
    unrouted="home" the router chooses their experts; with on_mismatch="home" it chooses the experts of all rows.

    weights: type to which weights are first rounded. state: the weights; None for those of make_model().
    chosen: int64 [micro_steps, layers, experts], incremented by choices of rows without a route and by choices that
    differ from the recorded ones. mismatched: int64 [micro_steps, layers], incremented by the differing choices.
    Results are cached if state, chosen and mismatched are None, since this takes a large part of a test's time.
    """
    key = repr(
        (dtype, weights, model_seed, unrouted, on_mismatch, [[of.tolist() for of in b] for b in (*batches, *routes)])
    )
    is_kept = state is None and chosen is None and mismatched is None
    if is_kept and key in _references:
        loss, gradients = _references[key]
        return loss, {name: gradient.clone() for name, gradient in gradients.items()}
    model = make_model(weights or dtype, model_seed).to(dtype)
    if state is not None:
        model.load_state_dict(state)
    layers = expert_layers(model)

    def eager(layer: Any) -> Any:
        def execute(hidden: Any, ids: Any, gates: Any) -> Any:
            routed = layer.ids_now >= 0
            if on_mismatch == "home":
                others = routed & torch.tensor(
                    [
                        [e not in was for e in now]
                        for now, was in zip(ids.tolist(), layer.ids_now.tolist(), strict=True)
                    ],
                    device=DEVICE,
                )
                layer.chosen += torch.bincount(ids[others], minlength=EXPERTS)
                layer.mismatched += others.sum()
            else:
                ids = torch.where(routed, layer.ids_now, ids)
            if unrouted == "home":
                layer.chosen += torch.bincount(ids[~routed], minlength=EXPERTS)
            else:
                ids = ids.masked_fill(~routed, -1)
            return execute_eagerly(layer, hidden, ids, gates)

        return execute

    for layer in layers:
        layer.execute_by(eager(layer))
    total = 0.0
    for of_rank, routes_of_rank in zip(batches, routes, strict=True):
        for m, (ids, of) in enumerate(zip(of_rank, routes_of_rank, strict=True)):
            for i, layer in enumerate(layers):
                layer.ids_now = of[:, :, i].reshape(-1, TOP_K).to(DEVICE)
                layer.chosen = (
                    chosen[m, i] if chosen is not None else torch.zeros(EXPERTS, dtype=torch.long, device=DEVICE)
                )
                layer.mismatched = (
                    mismatched[m, i] if mismatched is not None else torch.zeros((), dtype=torch.long, device=DEVICE)
                )
                layer.replay(None if on_mismatch == "home" else layer.ids_now)
            loss = loss_of(model, ids, unrouted == "home") / len(batches)
            loss.backward()
            total += float(loss.detach())
    found = {name: p.grad for name, p in model.named_parameters()}
    if is_kept:
        _references[key] = total, {name: gradient.clone() for name, gradient in found.items()}
    return total, found


def whole(tensor: Any) -> Any:
    """Gathers a tensor that FSDP2 has sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def draw_homes(seed: int = 0, ranks: int = RANKS) -> Any:
    """Draws homes, int32 [layers, experts], equally many experts of each layer on each rank."""
    contiguous = np.tile(np.arange(EXPERTS, dtype=np.int32) * ranks // EXPERTS, (LAYERS, 1))
    return np.random.default_rng(seed).permuted(contiguous, axis=1)


def sorted_by_home(homes: Any, layer: int) -> list[int]:
    """A layer's experts by the rank that owns them, and those of a rank in ascending order. homes: None: contiguous."""
    return list(range(EXPERTS)) if homes is None else sorted(range(EXPERTS), key=lambda e: (homes[layer][e], e))


def whole_gradients(ep: Any, model: Any) -> dict[str, Any]:
    """Gradients of all parameters by name. Gathers experts from all ranks."""
    experts = {id(weight): i for i, layer in enumerate(ep.layers) for weight in layer.weights().values()}
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = whole(p.grad)
        if id(p) in experts:
            parts = [torch.empty_like(p) for _ in range(ep.num_ranks)]
            dist.all_gather(parts, p.grad.contiguous(), group=ep.group)
            gradients[name] = torch.empty_like(torch.cat(parts))
            gradients[name][sorted_by_home(ep.arguments.homes, experts[id(p)])] = torch.cat(parts)
    return gradients


def worst_difference(gradients: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """Largest |a − b| ÷ largest |b| of any tensor, and that tensor's name."""
    worst = (0.0, "")
    for name, gradient in gradients.items():
        scale = expected[name].abs().max().clamp(min=1e-30)
        worst = max(worst, (float((gradient - expected[name]).abs().max() / scale), name))
    return worst


@dataclasses.dataclass(frozen=True)
class Step:
    """Input of run_step() on a rank, and the expected results over all ranks of its group. Never modified."""

    batches: list[Any]  # [micro-step]
    routes: list[Any]
    on_mismatch: str
    chosen: Any  # int64 [micro-step, layer, expert], choices that are not planned: see reference()
    mismatched: Any  # int64 [micro-step, layer]
    loss: float
    gradients: dict[str, Any]


_drawn: dict[tuple[Any, ...], Step] = {}


def draw_step(
    rank: int,
    group: Any,
    dtype: Any,
    seed: int,
    model_seed: int,
    micro_steps: tuple[int, ...],
    unrouted: str,
    wrong: float | None,
) -> Step:
    """Draws a step and trains it without spreading experts: each rank runs its micro-steps in an eager whole model, and
    loss and gradients are averaged. Cached, since this takes a large part of a test's time.

    micro_steps: micro-steps per rank of the group. For the other arguments see run_step().
    """
    key = (rank, dtype, seed, model_seed, micro_steps, unrouted, wrong)
    if key in _drawn:
        return _drawn[key]
    draw = draw_routes if unrouted == "drop" else draw_partial_routes
    batches, routes = draw_batches(rank, micro_steps[rank], seed), draw(rank, micro_steps[rank], seed)
    on_mismatch = "replay" if wrong is None else "home"
    if wrong is not None:
        routes = wrong_routes(dtype, batches, routes, wrong, 10 * seed + rank)
    chosen = torch.zeros(max(micro_steps), LAYERS, EXPERTS, dtype=torch.long, device=DEVICE)
    mismatched = torch.zeros(max(micro_steps), LAYERS, dtype=torch.long, device=DEVICE)
    loss, gradients = reference(
        dtype, [batches], [routes], model_seed=model_seed, unrouted=unrouted, on_mismatch=on_mismatch,
        chosen=chosen, mismatched=mismatched,
    )  # fmt: skip
    losses = torch.tensor(loss, dtype=torch.float64, device=DEVICE)
    for of in (chosen, mismatched, losses, *gradients.values()):
        dist.all_reduce(of, group=group)
    gradients = {name: gradient / len(micro_steps) for name, gradient in gradients.items()}
    loss = float(losses) / len(micro_steps)
    _drawn[key] = Step(batches, routes, on_mismatch, chosen.cpu(), mismatched.cpu(), loss, gradients)
    return _drawn[key]


def run_step(
    rank: int,
    dtype: Any,
    *,
    seed: int = 0,
    model_seed: int = 0,
    checkpointing: bool | str = False,
    uneven: bool = False,
    unrouted: str = "drop",
    wrong: float | None = None,
    wrapper: str | None = None,
    spoil: Spoil | None = None,
    may_differ: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs a step on nodes of two ranks. Asserts that loss and gradients equal those of one eager process, unless
    may_differ is set, and that detach() restores the model.

    checkpointing: True for each decoder layer, "whole" for one checkpoint around the model. wrong: share of recorded
    experts that routers do not choose, under on_mismatch="home"; None replays the routes. options: arguments of
    ExpertParallel. rank: rank within options["group"].
    """
    ranks = dist.get_world_size(options.get("group"))
    micro_steps = (*[MICRO_STEPS] * (ranks - 1), MICRO_STEPS - uneven)
    step = draw_step(rank, options.get("group"), dtype, seed, model_seed, micro_steps, unrouted, wrong)
    batches, routes, on_mismatch = step.batches, step.routes, step.on_mismatch
    chosen, mismatched = step.chosen, step.mismatched
    model = make_model(dtype, model_seed)
    if checkpointing is True:
        model.gradient_checkpointing_enable()
        model.train()
    ep = spread(model, **{"ranks_per_node": 2, **options})
    trained = ep.wrap(model, wrapper)
    phase = ep.plan(routes, unrouted=unrouted, on_mismatch=on_mismatch)
    total = 0.0
    with spoil(ep, phase) if spoil is not None else contextlib.nullcontext(), phase:
        for m in phase.micro_steps:
            if m >= len(batches):
                phase.idle(m)
                continue
            with phase.micro_step(m):
                forward = functools.partial(loss_of, trained, every_row=unrouted == "home")
                if checkpointing == "whole":
                    forward = functools.partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False)
                loss = forward(batches[m])
                loss.backward()
                total += float(loss.detach())
        phase.drain()
    loss_all = torch.tensor(total, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(loss_all, group=ep.group)
    difference, whose = worst_difference(whole_gradients(ep, model), step.gradients)
    figures = phase.figures()
    computed = torch.zeros(max(micro_steps), LAYERS, ranks, dtype=torch.long)
    computed[phase.plan.event_micro_step] = torch.from_numpy(phase.plan.slot_tokens.sum(-1))
    by_home = [chosen[:, i, sorted_by_home(ep.arguments.homes, i)] for i in range(LAYERS)]
    at_homes = torch.stack(by_home, 1).view(*chosen.shape[:2], ranks, -1).sum(-1)
    computed += at_homes
    result = {
        "loss": abs(float(loss_all) / ranks - step.loss) / abs(step.loss),
        "difference": difference,
        "whose": whose,
        **{name: figures[name] for name in ("copies", "host_copies", "fallbacks", "mismatch")},
        **{name: figures[name]["mean"] for name in ("rho_vanilla", "rho_planned", "rho_computed")},
        "mismatched": figures.get("mismatched"),
        "mismatched_expected": mismatched.tolist(),
        "unplanned": phase.beside.unplanned.sum(-1).tolist(),
        "unplanned_expected": (at_homes.sum(-1) - mismatched).tolist(),
        "rho_at_homes": float((at_homes.amax(-1) / at_homes.double().mean(-1)).mean()),
        "rho_expected": float((computed.amax(-1) / computed.double().mean(-1)).mean()),
    }
    ep.detach()
    full = make_model(dtype, model_seed)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    assert may_differ or max(result["loss"], difference) <= bound, result
    assert all(torch.equal(whole(a), b) for a, b in zip(model.parameters(), full.parameters(), strict=True))
    return result


def _on_rank(rank: int, work: Callable[[int], dict[str, Any]], folder: str) -> None:
    begin_rank(rank, RANKS, folder)
    prepare_rank()
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def recompute(
    rank: int, draw: Callable[[int, int, int], Any], wrong: float | None = None, path: str = "peer", **options: Any
) -> Any:
    """Compares planned forward passes with forward passes at home on the same routes. Returns the worst difference and
    the phase's figures. draw(rank, micro_steps, seed) returns routes. wrong: see run_step(). options: arguments of
    ExpertParallel.plan()."""
    batches, routes = draw_batches(rank, 3, 8), draw(rank, 3, 8)
    if wrong is not None:
        routes, options = wrong_routes(torch.float64, batches, routes, wrong, rank), {**options, "on_mismatch": "home"}
    model = make_model(torch.float64)
    ep = spread(model, path=path, ranks_per_node=2)
    worst = 0.0
    phase = ep.plan(routes, phase="recompute", **options)
    with torch.no_grad(), phase:
        for m, batch in enumerate(batches):
            with phase.micro_step(m):
                with ep.unplanned():
                    expected = model(batch).logits
                found = model(batch).logits
            if options.get("unrouted") != "home":  # the last token has no route
                expected, found = expected[:, :-1], found[:, :-1]
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst, phase.figures()


def on_all_ranks(work: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs work(rank) in one process per rank. Returns the results by rank."""
    return results_of(RANKS, _on_rank, work)
