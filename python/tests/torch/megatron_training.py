"""Trains a few MoE layers of Megatron-LM on the same routes with and without a plan. Shared by the Megatron tests."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron_on_cpu
import pytest
import torch
import torch.distributed as dist
from processes import DEVICE, LATER, RANKS, begin_rank, results_of

import foremoe
import foremoe.megatron

EXPERTS, TOP_K, HIDDEN, FFN, TOKENS, LAYERS, MICRO_STEPS, STEPS = 8, 2, 16, 8, 48, 3, 3, 2
LEARNING_RATE = 0.05


@dataclasses.dataclass
class Case:
    """Training configuration."""

    ep: int = 4
    dispatcher: str = "alltoall"
    ddp: dict[str, Any] | None = None  # arguments of DistributedDataParallelConfig; None disables DDP
    recompute: str = ""  # "moe": checkpoint each MoE layer; "all": one checkpoint around the whole model
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Any = torch.float64
    adapt: Callable[[Any], None] | None = None  # called with the model before DDP: adds adapters
    tp: int = 1  # tensor parallel ranks, under sequence parallelism; experts are not divided

    def begin_groups(self) -> None:
        tensor = {"tensor_model_parallel_size": self.tp, "expert_tensor_parallel_size": 1} if self.tp > 1 else {}
        begin_groups(self.ep, **tensor)


_made_groups: dict[str, dict[str, Any]] = {}  # Megatron-LM's globals by the arguments of initialize_model_parallel()


def group_of(rank: int) -> tuple[int, int]:
    """Ranks of the group of two that contains this rank."""
    return rank // 2 * 2, rank // 2 * 2 + 1


def begin_groups(ep: int, **more: Any) -> None:
    """Uses expert-parallel groups of `ep` ranks. Caches them per process, since Megatron-LM creates 50 groups."""
    from megatron.core import parallel_state

    own = {name: value for name, value in vars(parallel_state).items() if name.isupper() and name.startswith("_")}
    before = _made_groups.setdefault("", own)
    vars(parallel_state).update(_made_groups.get(key := repr((ep, more)), before))
    if key not in _made_groups:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, **more)
        _made_groups[key] = {name: vars(parallel_state)[name] for name in own}


def make_config(case: Case, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]} if case.recompute == "moe" else {}
    options = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K, "moe_ffn_hidden_size": FFN, "ffn_hidden_size": FFN,
        "expert_model_parallel_size": case.ep, "moe_token_dispatcher_type": case.dispatcher,
        "use_cpu_initialization": True, "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "bias_activation_fusion": False,
        "moe_router_load_balancing_type": "none", "moe_enable_routing_replay": True, "params_dtype": case.dtype,
        "moe_router_dtype": "fp64", "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "tensor_model_parallel_size": case.tp, "sequence_parallel": case.tp > 1, "expert_tensor_parallel_size": 1,
    }  # fmt: skip
    return TransformerConfig(**options | recompute | case.config | more)


def make_net(config: Any, layers: int = LAYERS, first: int = 0) -> Any:
    """Builds `layers` blocks x + MoE(tanh(linear(x))), or one dense block if `layers` is 0.

    An expert's weights depend on its layer and id, not on its rank. first: this pipeline stage's first layer.
    On the last stage, config.mtp_num_layers appends Megatron-LM's own layers for multi-token prediction.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    class Net(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.first = first
            self.checkpointed = False  # True: one checkpoint around all layers
            self._of_stage_before: Any = None
            spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
            if config.moe_grouped_gemm:
                import megatron_lora

                of = spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
                of.experts = megatron_lora.grouped_experts()
            build = build_module if isinstance(spec, ModuleSpec) else lambda spec, **options: spec(**options)
            self.moe = torch.nn.ModuleList(build(spec, config=config, layer_number=i + 1) for i in range(layers))
            self.mix = torch.nn.ModuleList(
                torch.nn.Linear(HIDDEN, HIDDEN, dtype=config.params_dtype) for _ in range(max(layers, 1))
            )
            predicts = config.mtp_num_layers and parallel_state.is_pipeline_last_stage()
            self.mtp = make_mtp(config) if predicts else None

        def set_input_tensor(self, tensor: Any) -> None:
            """Sets the output of the previous pipeline stage, or None on the first stage."""
            self._of_stage_before = tensor[0] if isinstance(tensor, list) else tensor

        def layers(self, x: Any) -> Any:
            for mix, moe in zip(self.mix, self.moe, strict=False):
                x = x + moe(torch.tanh(mix(x)))[0]
            if self.mtp is not None:
                tokens = torch.arange(len(x), device=x.device)[None]
                future = torch.ones(1, 1, len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
                x = self.mtp(tokens, tokens, x, future, embedding=lambda input_ids, **_: embedding(input_ids, x.dtype))
            return x if len(self.moe) else x + torch.tanh(self.mix[0](x))

        def forward(self, x: Any) -> Any:
            x = x if self._of_stage_before is None else self._of_stage_before
            return tensor_parallel.checkpoint(self.layers, False, x) if self.checkpointed else self.layers(x)

    net = Net()
    for i, mix in enumerate(net.mix):
        draw(mix.parameters(), 31 + first + i)
    if net.mtp is not None:
        draw(net.mtp.parameters(), 41)
    of_mtp = [] if net.mtp is None else [of for of in net.mtp.modules() if hasattr(of, "token_dispatcher")]
    for i, layer in enumerate([*net.moe, *of_mtp]):
        draw(layer.router.parameters(), 51 + first + i)
        if layer.shared_experts is not None:
            draw(layer.shared_experts.parameters(), 71 + first + i)
        if config.moe_latent_size:
            draw([*layer.fc1_latent_proj.parameters(), *layer.fc2_latent_proj.parameters()], 81 + first + i)
        grouped = [] if hasattr(layer.experts, "local_experts") else list(layer.experts.named_parameters())
        for own, e in enumerate(layer.local_expert_indices):
            weights = [p for name, p in grouped if name.endswith(f"weight{own}")]
            draw(weights or layer.experts.local_experts[own].parameters(), 100 + 20 * (first + i) + e)
    return net.to(DEVICE)


def make_mtp(config: Any) -> Any:
    """Builds Megatron-LM's layers for multi-token prediction, with attention and an MoE layer in each."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    layer = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    spec = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return MultiTokenPredictionBlock(config, spec, pg_collection=groups).to(config.params_dtype)


def embedding(tokens: Any, dtype: Any) -> Any:
    """Embeds tokens, integers [1, tokens], as [tokens, 1, hidden]."""
    places = torch.arange(1, HIDDEN + 1, dtype=dtype, device=tokens.device)
    return torch.sin(tokens.T[..., None] * places)


@torch.no_grad()
def draw(parameters: Any, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.copy_(0.3 * torch.randn(p.shape, generator=random, dtype=torch.float64))


def wrap(case: Case, config: Any, net: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    if case.ddp is None:
        return net
    # Small buckets: some are reduced while the gradients of others are still being computed.
    options = {"grad_reduce_in_fp32": False, "bucket_size": 300, **case.ddp}
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), net)


def routes_of(step: int, micro_step: int, layer: int, rank: int) -> Any:
    """Draws skewed routes, int64 [tokens, top_k], more skewed from step 10 on. Hot experts change per micro-step."""
    of = 100 * step + 10 * micro_step + layer
    power, least = (4, 0.02) if step < 10 else (8, 0.001)
    popular = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(of)) ** power + least
    return torch.multinomial(
        popular.expand(TOKENS, -1), TOP_K, generator=torch.Generator().manual_seed(1000 * rank + of)
    ).to(DEVICE)


def counts_of(step: int, rank: int, layers: Sequence[int] = range(LAYERS), micro_steps: int = MICRO_STEPS) -> Any:
    """Counts a rank's routes, int64 [micro_steps, layers, experts]."""
    counts = torch.zeros(micro_steps, len(layers), EXPERTS, dtype=torch.int64)
    for m in range(micro_steps):
        for i, layer in enumerate(layers):
            counts[m, i] = torch.bincount(routes_of(step, m, layer, rank).flatten(), minlength=EXPERTS)
    return counts


def batch(step: int, micro_step: int, dtype: Any = torch.float64) -> Any:
    """Draws inputs [tokens, 1, hidden], which differ between ranks."""
    random = torch.Generator().manual_seed(50 * (10 * step + micro_step) + dist.get_rank())
    return torch.randn(TOKENS, 1, HIDDEN, dtype=torch.float64, generator=random).to(DEVICE, dtype).requires_grad_()


def replay(net: Any, step: int, micro_step: int) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for i, layer in enumerate(net.moe):
        router = getattr(layer.router, "to_wrap", layer.router)  # in an adapter
        router.router_replay.set_target_indices(routes_of(step, micro_step, net.first + i, dist.get_rank()))
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def run_step(case: Case, model: Any, net: Any, step: int) -> dict[str, Any]:
    """Runs all micro-batches forward and backward. Returns losses and gradients of inputs."""
    losses, inputs = [], []
    for m in range(MICRO_STEPS):
        replay(net, step, m)
        x = batch(step, m, case.dtype)
        last = m == MICRO_STEPS - 1
        with model.no_sync() if case.ddp is not None and not last else contextlib.nullcontext():
            loss = model(x).square().mean()
            loss.backward()
        losses.append(float(loss.detach()))
        inputs.append(x.grad)
    return {"losses": losses, "inputs": inputs}


def gradient(p: Any) -> Any:
    return getattr(p, "main_grad", p.grad)


def train(
    case: Case,
    prepare: Callable[[Any], Any] | None = None,
    inside: Callable[[Any, int], contextlib.AbstractContextManager[Any]] | None = None,
    after: Callable[[Any, int], None] | None = None,
) -> dict[str, Any]:
    """Trains by plain gradient descent. Returns losses, gradients of inputs and of weights, rows, and the tokens that
    each layer's router counted for its expert bias.

    `inside` and `after` are called with the result of prepare(model) and the step. inside() returns a context manager
    for the step's passes. after() is called in this context after the passes, before gradients are synchronized.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    config = make_config(case)
    net = make_net(config)
    net.checkpointed = case.recompute == "all"
    if case.adapt is not None:
        case.adapt(net)
    model = wrap(case, config, net)
    prepared = prepare(model) if prepare is not None else None
    found: dict[str, Any] = {"losses": [], "inputs": [], "weights": [], "rows": []}
    for step in range(STEPS):
        if case.ddp is not None:
            model.zero_grad_buffer()
        else:
            net.zero_grad()
        with counted_rows() as rows, inside(prepared, step) if inside is not None else contextlib.nullcontext():
            of = run_step(case, model, net, step)
            if after is not None:
                after(prepared, step)
            if case.ddp is not None:
                model.finish_grad_sync()
        found["losses"] += of["losses"]
        found["inputs"] += of["inputs"]
        found["weights"].append({name: gradient(p).clone() for name, p in net.named_parameters() if p.requires_grad})
        found["rows"].append(sum(rows))
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, net.parameters()):
                p.data -= LEARNING_RATE * gradient(p)
    found["tokens_per_expert"] = [of for name, of in net.named_buffers() if name.endswith("local_tokens_per_expert")]
    return found


_expected: dict[str, dict[str, Any]] = {}


def train_unplanned(case: Case) -> dict[str, Any]:
    """train() without a plan. Cached per case and process."""
    if repr(case) not in _expected:
        _expected[repr(case)] = train(case)
    return _expected[repr(case)]


def modelled_seconds(counts: Sequence[Any], in_flight: int = 1) -> dict[str, float]:
    """Seconds of forward and backward of these layers by policy, on h100, with prefer balance. counts: per rank."""
    load = foremoe.Load.from_array(torch.stack(list(counts), 2).numpy(), top_k=TOP_K, ranks_per_node=2)
    model = {
        "name": "as make_config() has it", "moe_layers": load.num_layers, "experts": EXPERTS, "top_k": TOP_K,
        "hidden": HIDDEN, "intermediate": FFN, "vocabulary": 1, "heads": 2, "kv_heads": 2, "head_width": HIDDEN // 2,
    }  # fmt: skip
    found = foremoe.simulate(
        load, "vanilla,foremoe", cluster="h100", model=model, bytes_per_parameter=8, keep_activations=True, path="peer",
        in_flight=in_flight, dispatch="row", prefer="balance",
    )  # fmt: skip
    return {
        of["policy"]: phase["seconds"] for of in found for phase in of["phases"] if phase["phase"] == "policy_update"
    }


@contextlib.contextmanager
def counted_rows() -> Iterator[list[int]]:
    """Records the number of rows of each expert call on this rank, including guests."""
    from megatron.core.transformer.mlp import MLP

    rows: list[int] = []
    own = MLP.forward

    def watched(self: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(hidden.shape[0])
        return own(self, hidden, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MLP, "forward", watched)
        yield rows


def under_a_plan(
    case: Case, options: dict[str, Any], before: Callable[[Any], None] | None = None
) -> tuple[dict[str, Any], dict[str, float]]:
    """Runs train() in planned steps. Returns its result and the last step's metrics. Calls before() before attach()."""
    metrics: dict[str, float] = {}

    def prepare(model: Any) -> Any:
        if before is not None:
            before(model)
        return foremoe.megatron.attach(model, ranks_per_node=2, **options)

    @contextlib.contextmanager
    def inside(replicas: Any, step: int) -> Iterator[None]:
        with replicas.step(replicas.plan(counts_of(step, dist.get_rank()))):
            yield
        metrics.update(replicas.metrics())

    return train(case, prepare, inside), metrics


def expect_no_waits(planned: bool = True, **options: Any) -> None:
    """Asserts that a planned forward and backward neither waits for the device nor gathers counts. With planned=False,
    asserts that the counters detect both in a run without a plan.
    """
    if DEVICE.type == "cuda":
        pytest.skip("the counters stand in for CUDA, which does not report waits for events")
    begin_groups(4)
    net = make_net(make_config(Case()))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2, **options)
    plan = replicas.plan(counts_of(0, dist.get_rank())[:1])
    replay(net, 0, 0)
    for layer in net.moe:
        replayed = layer.router.router_replay
        replayed.set_target_indices(replayed.target_topk_idx.as_subclass(megatron_on_cpu.OnDevice))
    x = batch(0, 0).detach().as_subclass(megatron_on_cpu.OnDevice).requires_grad_()
    with replicas.step(plan) if planned else contextlib.nullcontext(), megatron_on_cpu.counted() as counts:
        y = net(x)
        y.backward(torch.ones_like(y))
        found = dict(counts)
    if planned:
        assert found == {}
    else:
        assert found["all_gather"] == LAYERS and min(found["synchronize"], found["to_host"]) >= LAYERS, found


def expect_planned_forwards(**options: Any) -> None:
    """Asserts that planning does not change the outputs of a phase of forward passes alone (old log-probabilities)."""
    begin_groups(4)
    net = make_net(make_config(Case()))
    replicas = foremoe.megatron.attach(net, ranks_per_node=2, **options)
    plan = replicas.plan(counts_of(0, dist.get_rank()), phase="recompute")

    def outputs() -> list[Any]:
        found = []
        for m in range(MICRO_STEPS):
            replay(net, 0, m)
            found.append(net(batch(0, m)))
        return found

    with torch.no_grad():
        expected = outputs()
        with replicas.step(plan):
            found = outputs()
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= 1e-12
    assert replicas.metrics()["foremoe/copies"] >= 0


def is_bitwise(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether losses and gradients of two runs are bitwise equal."""
    of_weights = [(a[name], b[name]) for a, b in zip(found["weights"], expected["weights"], strict=True) for name in b]
    inputs = zip(found["inputs"], expected["inputs"], strict=True)
    return found["losses"] == expected["losses"] and all(torch.equal(a, b) for a, b in (*inputs, *of_weights))


def rho_at_homes(counts: Any) -> float:
    """Imbalance ratio of two ranks without replicas. counts: [micro_steps, layers, experts], summed over both."""
    at_homes = counts.view(*counts.shape[:2], 2, -1).sum(-1).double()
    return float((at_homes.amax(-1) / at_homes.mean(-1)).mean())


def violations_of(counts: Any) -> dict[str, float]:
    """max_vio and avg_vio. counts: [micro_steps, layers, experts], summed over ranks."""
    d = [of / of.mean() - 1 for of in counts.double().flatten(0, 1) if of.sum() > 0]
    return {
        "max_vio": float(sum(of.max() for of in d)) / len(d),
        "avg_vio": float(sum(of.abs().mean() for of in d)) / len(d),
    }


def expect_planned_rows(metrics: dict[str, float]) -> None:
    """Asserts that ranks computed the planned rows, and that the plan balances rows."""
    assert metrics["foremoe/rho_computed"] == pytest.approx(metrics["foremoe/rho_planned"], rel=1e-12)
    assert metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]


def expect_shadow(metrics: dict[str, float], counts: list[Any], in_flight: int = 1) -> None:
    """Asserts that the metrics of shadow mode match `counts`, one array per rank of this rank's group."""
    assert metrics["foremoe/rho_vanilla"] == pytest.approx(rho_at_homes(sum(counts)), rel=1e-12)
    for name, value in violations_of(sum(counts)).items():
        assert metrics[f"foremoe/{name}"] == pytest.approx(value, rel=1e-12)
    assert metrics["foremoe/rho_planned"] < metrics["foremoe/rho_vanilla"]
    seconds = modelled_seconds(counts, in_flight)
    assert metrics["foremoe/modelled_seconds_vanilla"] == pytest.approx(seconds["vanilla"], rel=1e-9)
    assert metrics["foremoe/modelled_seconds"] == pytest.approx(seconds["foremoe"], rel=1e-9)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest |a − b| ÷ largest |b| of any tensor, for losses, gradients of inputs and gradients of weights."""

    def of(pairs: Any) -> float:
        return max((float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs), default=0.0)

    losses = zip(found["losses"], expected["losses"], strict=True)
    return {
        "loss": max((abs(a - b) / abs(b) for a, b in losses), default=0.0),
        "dx": of(zip(found["inputs"], expected["inputs"], strict=True)),
        "dw": of((a[name], b[name]) for a, b in zip(found["weights"], expected["weights"], strict=True) for name in b),
    }


def first_step(found: dict[str, Any]) -> dict[str, Any]:
    steps = len(found["weights"])
    return {name: found[name][: len(found[name]) // steps] for name in ("losses", "inputs", "weights")}


def expect_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that losses and gradients differ by at most 1e-12 in the first step and by LATER afterwards, relative."""
    worst = differences(first_step(found), first_step(expected))
    assert max(worst.values()) <= 1e-12, worst
    worst = differences(found, expected)
    assert max(worst.values()) <= LATER, worst


@contextlib.contextmanager
def stale_guests() -> Iterator[None]:
    """Injects a fault: guests keep the weights of their first copy."""
    first: dict[Any, Any] = {}

    def stale(self: Any, expert: int) -> Any:
        return first.setdefault((id(self), expert), self.parameters[expert].detach().clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foremoe.megatron.experts.Stack.__getitem__", stale)
        yield


def state(net: Any) -> dict[str, Any]:
    """Names and values, in order, as seen by a checkpoint, an optimizer and a weight sync."""
    sharded = {}
    for name, layer in net.named_modules():
        if hasattr(layer, "token_dispatcher"):
            for key, of in layer.sharded_state_dict(prefix=f"{name}.").items():
                if hasattr(of, "build"):  # a sharded-tensor factory, used for gated weights
                    for i, part in enumerate(of.build() if isinstance(of.build(), list) else of.build().values()):
                        sharded[f"{key}/{i}"] = part
                else:
                    sharded[key] = of
    return {
        "parameters": [name for name, _ in net.named_parameters()],
        "modules": [name for name, _ in net.named_modules()],
        "state_dict": {name: value for name, value in net.state_dict().items() if torch.is_tensor(value)},
        "sharded": {
            key: (of.key, tuple(of.global_shape), tuple(of.global_offset), of.replica_id)
            for key, of in sharded.items()
            if hasattr(of, "global_shape")
        },
        "sharded_data": {key: of.data for key, of in sharded.items() if torch.is_tensor(getattr(of, "data", None))},
    }


def is_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    plain = ("parameters", "modules", "sharded")
    return all(found[of] == expected[of] for of in plain) and all(
        list(found[of]) == list(expected[of])
        and all(torch.equal(value, expected[of][name]) for name, value in found[of].items())
        for of in ("state_dict", "sharded_data")
    )


def prepare_rank() -> None:
    warnings.simplefilter("ignore")
    if DEVICE.type == "cpu":
        megatron_on_cpu.apply()


def _on_rank(rank: int, work: Callable[[int], dict[str, Any]], folder: str) -> None:
    prepare_rank()
    begin_rank(rank, RANKS, folder)
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_all_ranks(work: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs work(rank) in one process per rank. Returns the results by rank."""
    return results_of(RANKS, _on_rank, work)
