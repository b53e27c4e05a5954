"""Training under a plan is training: loss and every gradient are those of one eager process.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

RANKS = 4
EXPERTS = 16
LAYERS = 3
TOP_K = 2


def make_model(dtype: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        initializer_range=0.2,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return transformers.Qwen3MoeForCausalLM(config).to(dtype)


def draw_batches(rank: int, micro_steps: int, seed: int) -> list[Any]:
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randint(0, 64, (2, 12), generator=random) for _ in range(micro_steps)]


def draw_routes(rank: int, micro_steps: int, seed: int) -> list[Any]:
    """Skewed, other experts are popular in every micro-step, so that guests come and go; the last token has none."""
    popular = torch.Generator().manual_seed(seed)
    random = torch.Generator().manual_seed(1000 * seed + rank)
    routes = []
    for _ in range(micro_steps):
        weight = torch.rand(LAYERS, EXPERTS, generator=popular) ** 6 + 1e-3
        of = torch.stack([torch.multinomial(w.expand(24, -1), TOP_K, generator=random) for w in weight], 1)
        of = of.view(2, 12, LAYERS, TOP_K)
        of[:, -1] = -1
        routes.append(of)
    return routes


def loss_of(model: Any, ids: Any) -> Any:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 64), ids[:, 1:].reshape(-1))


def reference(
    dtype: Any, batches: list[list[Any]], routes: list[list[Any]], weights: Any = None
) -> tuple[float, dict[str, Any]]:
    """Mean over ranks of one eager process: rows without a route add nothing, as under a plan.

    weights: the type that the weights are rounded to first.
    """
    from foremoe.hf import expert_layers

    model = make_model(weights or dtype).to(dtype)
    layers = expert_layers(model)

    def eager(layer: Any) -> Any:
        def execute(hidden: Any, ids: Any, gates: Any) -> Any:
            out = torch.zeros_like(hidden)
            for e in range(EXPERTS):
                token, place = (layer.ids_now == e).nonzero(as_tuple=True)
                if len(token) == 0:
                    continue
                up = hidden[token] @ layer.experts.gate_up_proj[e].T
                rows = layer.experts._apply_gate(up) @ layer.experts.down_proj[e].T
                out = out.index_add(0, token, rows * gates[token, place, None])
            return out

        return execute

    for layer in layers:
        layer.execute_by(eager(layer))
    total = 0.0
    for of_rank, routes_of_rank in zip(batches, routes, strict=True):
        for ids, of in zip(of_rank, routes_of_rank, strict=True):
            for i, layer in enumerate(layers):
                layer.ids_now = of[:, :, i].reshape(-1, TOP_K)
                layer.replay(layer.ids_now)
            loss = loss_of(model, ids) / RANKS
            loss.backward()
            total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters()}


def worst_difference(ep: Any, model: Any, expected: dict[str, Any]) -> tuple[float, str]:
    """Largest |a − b| ÷ largest |b| of any tensor, and whose it is."""
    experts = {id(w): w for w in ep.expert_parameters()}
    worst = (0.0, "")
    for name, p in model.named_parameters():
        if id(p) in experts:
            parts = [torch.empty_like(p) for _ in range(RANKS)]
            dist.all_gather(parts, p.grad.contiguous())
            grad = torch.cat(parts)
        else:
            grad = p.grad
        scale = expected[name].abs().max().clamp(min=1e-30)
        worst = max(worst, (float((grad - expected[name]).abs().max() / scale), name))
    return worst


def run_step(
    rank: int,
    residency: str,
    dtype: Any,
    *,
    seed: int = 0,
    checkpointing: bool = False,
    uneven: bool = False,
    guest_slots: int = 1,
    spoil: Any = None,
    wrapper: str | None = None,
    policy: str = "foremoe",
) -> dict[str, Any]:
    from foremoe.hf import expert_layers
    from foremoe.torch import ExpertParallel

    micro_steps = [3, 3, 3, 2] if uneven else [4] * RANKS
    batches = [draw_batches(r, m, seed) for r, m in enumerate(micro_steps)]
    routes = [draw_routes(r, m, seed) for r, m in enumerate(micro_steps)]
    loss_expected, expected = reference(dtype, batches, routes)
    model = make_model(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    ep = ExpertParallel(
        expert_layers(model), guest_slots=guest_slots, residency=residency, ranks_per_node=2, policy=policy
    )
    trained = ep.wrap(model, wrapper)
    stage = ep.plan(routes[rank])
    if spoil is not None:
        spoil(ep, stage)
    total = 0.0
    with stage:
        for m in stage.micro_steps:
            if m >= len(batches[rank]):
                stage.idle(m)
                continue
            with stage.micro_step(m):
                loss = loss_of(trained, batches[rank][m])
                loss.backward()
                total += float(loss.detach())
        stage.drain()
    loss_all = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(loss_all)
    difference, whose = worst_difference(ep, model, expected)
    figures = stage.figures()
    result = {
        "loss": abs(float(loss_all) / RANKS - loss_expected) / abs(loss_expected),
        "difference": difference,
        "whose": whose,
        "copies": figures["copies"],
        "rho": figures["rho_planned"]["mean"],
    }
    ep.detach()
    full = make_model(dtype)
    result["detached"] = all(torch.equal(a, b) for a, b in zip(model.parameters(), full.parameters(), strict=True))
    return result


def error_of(grads: dict[str, Any], expected: dict[str, Any]) -> float:
    """Over all tensors, each relative to its own size."""
    total = 0.0
    for name, grad in grads.items():
        exact = expected[name].double()
        total += float(((grad.double() - exact).norm() / exact.norm().clamp(min=1e-30)) ** 2)
    return total**0.5


def compare_rounding(rank: int, dtype: Any) -> dict[str, Any]:
    """Errors against float64 of training under a plan, and of one eager process, both in this type."""
    from foremoe.hf import expert_layers
    from foremoe.torch import ExpertParallel

    batches = [draw_batches(r, 2, 9) for r in range(RANKS)]
    routes = [draw_routes(r, 2, 9) for r in range(RANKS)]
    _, exact = reference(torch.float64, batches, routes, weights=dtype)
    try:
        _, eager = reference(dtype, batches, routes)
    except RuntimeError as error:
        return {"skipped": f"torch has no CPU kernel: {error}"}
    model = make_model(dtype)
    ep = ExpertParallel(expert_layers(model), guest_slots=1, ranks_per_node=2)
    ep.wrap(model)
    with ep.plan(routes[rank]) as stage:
        for m in stage.micro_steps:
            with stage.micro_step(m):
                loss_of(model, batches[rank][m]).backward()
        stage.drain()
    experts = {id(w) for w in ep.expert_parameters()}
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = p.grad
        if id(p) in experts:
            parts = [torch.empty_like(p) for _ in range(RANKS)]
            dist.all_gather(parts, p.grad.contiguous())
            grads[name] = torch.cat(parts)
    return {"planned": error_of(grads, exact), "eager": error_of(eager, exact)}


def drop_guests_gradients(ep: Any, stage: Any) -> None:
    from foremoe.torch.guests import Guests

    add = Guests.add_gradients

    def nothing(self: Any, layer: int, gradients: dict[str, Any]) -> None:
        add(self, layer, {name: torch.zeros_like(gradient) for name, gradient in gradients.items()})

    Guests.add_gradients = nothing


def drop_copies(ep: Any, stage: Any) -> None:
    """Guest slots hold something else than the weights that came."""
    from foremoe.torch.guests import Guests

    wait = Guests.wait

    def overwritten(self: Any, turn: int) -> None:
        wait(self, turn)
        for buffers in self._buffers:
            for buffer in buffers.values():
                buffer.fill_(0.1)

    Guests.wait = overwritten


def turn_rows(ep: Any, stage: Any) -> None:
    prepare = stage._prepare

    def rolled(micro_step: int) -> Any:
        prepared = prepare(micro_step)
        for of in prepared:
            of.to_slots = of.to_slots.roll(1)
        return prepared

    stage._prepare = rolled


def replay_nothing(ep: Any, stage: Any) -> None:
    for layer in ep.layers:
        layer.replay = lambda ids: None


def swap_micro_steps(ep: Any, stage: Any) -> None:
    """The batch of one micro-step runs under the routes and the plan of another."""
    routes = stage._routes
    stage._routes = [routes[m ^ 1] for m in range(len(routes))]
    prepare = stage._prepare

    def with_routes_of_the_plan(micro_step: int) -> Any:
        stage._routes, replayed = routes, stage._routes
        prepared = prepare(micro_step)
        stage._routes = replayed
        return prepared

    stage._prepare = with_routes_of_the_plan


SPOILT = [drop_guests_gradients, drop_copies, turn_rows, replay_nothing, swap_micro_steps]


def run_spoilt(rank: int, spoil: Any) -> float:
    from foremoe.torch.guests import Guests

    kept = Guests.add_gradients, Guests.wait
    try:
        return float(run_step(rank, "resident", torch.float64, spoil=spoil)["difference"])
    finally:
        Guests.add_gradients, Guests.wait = kept


def step_the_optimizer_inside(rank: int) -> str:
    """An optimizer that steps inside a stage makes guests stale: that is refused on every rank alike."""
    from foremoe.hf import expert_layers
    from foremoe.torch import ExpertParallel

    model = make_model(torch.float32)
    ep = ExpertParallel(expert_layers(model), residency="shared")
    grads = [torch.ones_like(w) for w in ep.expert_parameters()]
    for weight, grad in zip(ep.expert_parameters(), grads, strict=True):
        weight.grad = grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, routes = draw_batches(rank, 2, 5), draw_routes(rank, 2, 5)
    try:
        with ep.plan(routes) as stage:
            for m, batch in enumerate(batches):
                with stage.micro_step(m):
                    loss_of(model, batch).backward()
                optimizer.step()  # too early
    except RuntimeError as error:
        back = all(w.grad is g for w, g in zip(ep.expert_parameters(), grads, strict=True))
        return f"{error}; gradients {'as before' if back else 'changed'}"
    return "nothing"


def checkpoint_all_layers(rank: int) -> str:
    """Under `shared` the buffers of one layer are lent to the next: a checkpoint of several is refused."""
    from foremoe.hf import expert_layers
    from foremoe.torch import ExpertParallel

    model = make_model(torch.float32)
    ep = ExpertParallel(expert_layers(model), residency="shared")
    (batch,), routes = draw_batches(rank, 1, 5), draw_routes(rank, 1, 5)
    run = model.model

    def whole(ids: Any) -> Any:
        return run(ids, use_cache=False).last_hidden_state

    embedded = run.embed_tokens.weight
    try:
        with ep.plan(routes) as stage, stage.micro_step(0):
            out = torch.utils.checkpoint.checkpoint(whole, batch, use_reentrant=False)
            (out.sum() + 0 * embedded.sum()).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def evaluate(rank: int) -> float:
    """Without a stage every row runs at its home: the output is that of the whole model."""
    from foremoe.hf import expert_layers
    from foremoe.torch import ExpertParallel

    whole, model = make_model(torch.float32), make_model(torch.float32)
    ExpertParallel(expert_layers(model))
    (batch,) = draw_batches(rank, 1, 7)
    with torch.no_grad():
        expected = whole(batch).logits
        return float((model(batch).logits - expected).abs().max() / expected.abs().max())


def count_in_a_stage(rank: int, planned: bool) -> dict[str, int]:
    """Collectives and waits for the device in the layers of one micro-step, forward and backward."""
    import foremoe.torch.exchange as exchange
    import foremoe.torch.guests as guests
    import foremoe.torch.parallel as parallel
    from foremoe.hf import _EXECUTE, expert_layers
    from foremoe.torch import ExpertParallel

    counts: dict[str, int] = {}

    class Waits(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                counts["waits"] = counts.get("waits", 0) + 1
            return func(*args, **(kwargs or {}))

    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__"):
                counts["waits"] = counts.get("waits", 0) + 1
            return func(*args, **(kwargs or {}))

    class Counted:
        def __getattr__(self, name: str) -> Any:
            found = getattr(dist, name)
            if name not in ("all_to_all_single", "all_gather", "all_reduce", "broadcast", "batch_isend_irecv"):
                return found

            def counted(*args: Any, **kwargs: Any) -> Any:
                counts[name] = counts.get(name, 0) + 1
                return found(*args, **kwargs)

            return counted

    model = make_model(torch.float32)
    ep = ExpertParallel(expert_layers(model))
    (batch,), routes = draw_batches(rank, 1, 8), draw_routes(rank, 1, 8)
    stage = ep.plan(routes)
    modules = (exchange, guests, parallel)
    with stage, stage.micro_step(0):
        for module in modules:
            module.dist = Counted()
        if not planned:
            ep._stage = None
        for layer in ep.layers:
            forward = _EXECUTE[layer.experts]

            def watched(*of: Any, forward: Any = forward) -> Any:
                with Calls(), Waits():
                    return forward(*of)

            layer.execute_by(watched)
        out = model.model(batch, use_cache=False).last_hidden_state
        with Waits():
            out.backward(torch.ones_like(out))
        for module in modules:
            module.dist = dist
        ep._stage = stage
        stage._drained, stage._next = True, 1
    return counts


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {}
    for residency in ("static", "resident", "shared"):
        for checkpointing in (False, True):
            key = f"{residency}, {'checkpointing' if checkpointing else 'plain'}"
            found[f"float64, {key}"] = run_step(rank, residency, torch.float64, checkpointing=checkpointing)
        found[f"float32, {residency}"] = run_step(rank, residency, torch.float32, seed=1)
        found[f"float64, {residency}, two guests"] = run_step(rank, residency, torch.float64, seed=2, guest_slots=2)
        found[f"float64, {residency}, uneven"] = run_step(rank, residency, torch.float64, seed=3, uneven=True)
    found["float64, resident, ddp"] = run_step(rank, "resident", torch.float64, seed=4, wrapper="ddp")
    for policy in ("feplb", "llep", "ultraep", "moonep"):  # whose plans are `shared`, whatever is asked for
        found[f"float64, {policy}"] = run_step(rank, "resident", torch.float64, seed=6, policy=policy)
    found["float64, no guests"] = run_step(rank, "resident", torch.float64, guest_slots=0)
    for name in ("bfloat16", "float16"):
        found[f"rounding, {name}"] = compare_rounding(rank, getattr(torch, name))
    found["spoilt"] = {spoil.__name__: run_spoilt(rank, spoil) for spoil in SPOILT}
    found["stale"] = step_the_optimizer_inside(rank)
    found["evaluation"] = evaluate(rank)
    found["several layers"] = checkpoint_all_layers(rank)
    found["planned"] = count_in_a_stage(rank, planned=True)
    found["unplanned"] = count_in_a_stage(rank, planned=False)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        mp.spawn(work, (folder,), nprocs=RANKS)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]


def cases(of: dict[str, Any]) -> dict[str, Any]:
    return {case: result for case, result in of.items() if case.startswith("float")}


def test_losses_and_gradients_are_those_of_one_eager_process(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        for case, result in cases(of).items():
            bound = 1e-12 if case.startswith("float64") else 1e-5
            assert result["loss"] <= bound, (rank, case, result)
            assert result["difference"] <= bound, (rank, case, result)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_types_round_no_worse_than_one_eager_process(found: list[dict[str, Any]], dtype: str) -> None:
    case = f"rounding, {dtype}"
    if "skipped" in found[0][case]:
        pytest.skip(f"{dtype}: {found[0][case]['skipped']}")
    for of in found:
        assert 0 < of[case]["planned"] <= 1.5 * of[case]["eager"], of[case]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_step_that_is_spoilt_is_seen(found: list[dict[str, Any]], spoil: Any) -> None:
    assert max(of["spoilt"][spoil.__name__] for of in found) > 1e-3


def test_guests_were_there(found: list[dict[str, Any]]) -> None:
    for case in cases(found[0]):
        if case in ("float64, feplb", "float64, llep", "float64, ultraep", "float64, moonep"):
            continue  # they may have found nothing to copy
        copies = sum(of[case]["copies"] for of in found)
        assert (copies > 0) == ("no guests" not in case), case
    copies = {r: sum(of[f"float64, {r}, plain"]["copies"] for of in found) for r in ("static", "resident", "shared")}
    assert copies["static"] < copies["resident"] < copies["shared"], copies


def test_recomputation_fetches_nothing_where_guests_stay(found: list[dict[str, Any]]) -> None:
    for residency in ("static", "resident"):
        plain, again = (found[0][f"float64, {residency}, {how}"]["copies"] for how in ("plain", "checkpointing"))
        assert plain == again


def test_detaching_gives_the_model_back(found: list[dict[str, Any]]) -> None:
    assert all(result["detached"] for of in found for result in cases(of).values())


def test_stale_weights_are_refused_and_gradients_stay(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "were changed inside a stage; gradients as before" in of["stale"]


def test_a_checkpoint_of_several_layers_is_refused_under_shared(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert "a checkpoint may hold one MoE layer" in of["several layers"]


def test_evaluation_needs_no_plan(found: list[dict[str, Any]]) -> None:
    assert max(of["evaluation"] for of in found) < 1e-5


def test_a_planned_layer_exchanges_no_counts_and_waits_for_nothing(found: list[dict[str, Any]]) -> None:
    for of in found:
        counts = dict(of["planned"])
        counts.pop("batch_isend_irecv", None)  # copies and gradients, on their own group
        assert counts == {"all_to_all_single": 4 * LAYERS}, counts
        # The same count of the same model without a plan sees the exchange of counts, and the waits for them.
        assert of["unplanned"]["all_to_all_single"] == 5 * LAYERS
        assert of["unplanned"]["waits"] >= 2 * LAYERS
