"""verl's engine on CPU: groups, batches and a model for verl's own schedule, shared by the tests of foremoe.verl.

A few MoE layers of Megatron-LM replace the model, because verl's models need Transformer Engine. There is no attention
between rows.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from megatron_training import EXPERTS, HIDDEN, LAYERS, TOP_K, Case, gradient, make_config, make_net

RECORDED = LAYERS + 1  # the first recorded layer is dense


@dataclasses.dataclass(frozen=True)
class Split:
    tp: int = 1
    cp: int = 1
    ep: int = 4
    dynamic: bool = True  # micro-batches are filled by tokens, not by sequences
    replay: str = "R3"
    padded: int = 0  # sequences of a micro-batch that is padded, not packed
    biased: bool = False  # with statistics for a bias of experts

    @property
    def dp(self) -> int:
        return 4 // (self.tp * self.cp)


def leaves_rows_to_routers() -> bool:
    """Returns whether R3 of this version of verl leaves rows to routers: from 0.9 on."""
    import verl.utils.megatron.router_replay_utils as replay

    return hasattr(replay, "build_r3_replay_mask")


def begin_groups(split: Split) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tp,
        context_parallel_size=split.cp,
        expert_model_parallel_size=split.ep,
        expert_tensor_parallel_size=1,
    )


def draw_batch(split: Split, seed: int = 0) -> Any:
    """Draw this data-parallel rank's sequences, as a worker has them. Some lack the route of their last token."""
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils as tu

    random = torch.Generator().manual_seed(100 * seed + parallel_state.get_data_parallel_rank())
    lengths = torch.randint(6, 40, (8,), generator=random).tolist()
    if split.padded > 1:  # on every rank sequences of other lengths
        lengths = list(range(8, 32, 3))
    responses = [length // 2 for length in lengths]
    responses[3] = 0
    popular = torch.rand(RECORDED, EXPERTS, generator=torch.Generator().manual_seed(3)) ** 3 + 0.02
    routes = []
    for s, length in enumerate(lengths):
        rows = length - s % 2 if split.replay == "R3" and leaves_rows_to_routers() else length
        of = [torch.multinomial(p.expand(rows, -1), TOP_K, generator=random) for p in popular]
        routes.append(torch.stack(of, 1).to(torch.int16))
        routes[-1][-2:] = 0  # as if the rollout recorded no routes

    def nested(parts: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    mask = [torch.arange(n) >= n - r for n, r in zip(lengths, responses, strict=True)]
    batch = tu.get_tensordict(
        {
            "input_ids": nested([torch.randint(1, 100, (n,), generator=random) for n in lengths]),
            "loss_mask": nested([m.long() for m in mask]),
            "response_mask": nested([m[-max(r, 1) :].long() for m, r in zip(mask, responses, strict=True)]),
            "routed_experts": nested(routes),
            "temperature": torch.ones(len(lengths)),
        }
    )
    is_dynamic = split.dynamic and not split.padded
    sizes = {"max_token_len_per_gpu": 60} if is_dynamic else {"micro_batch_size_per_gpu": split.padded or 2}
    tu.assign_non_tensor(batch, enable_routing_replay=True, use_dynamic_bsz=is_dynamic, **sizes)
    return batch


def local(nested: Any, padded: int = 0) -> Any:
    """Return this rank's rows: packed or padded, then split over context-parallel and tensor-parallel ranks."""
    from megatron.core import parallel_state
    from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine

    rows = preprocess_bshd_engine(nested)[0].T.flatten() if padded else preprocess_thd_engine(nested)[0].squeeze(0)
    size = parallel_state.get_tensor_model_parallel_world_size()
    return rows.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


class Watched:
    """Records the rows that this rank's routers sent to each expert, by micro-step and layer, and losses."""

    def __init__(self, net: Any) -> None:
        self.counts: list[list[Any]] = []
        self.losses: list[float] = []
        self.replayed = torch.zeros(len(net.moe), EXPERTS)  # rows of updates that verl replays, by its own mask
        for layer in net.moe:
            layer.router.register_forward_hook(self._count)

    def _count(self, module: Any, inputs: Any, output: Any) -> None:
        if module.layer_number == 2:
            self.counts.append([])
        self.counts[-1].append(output[1].sum(0))
        mask = getattr(module.router_replay, "target_replay_mask", None)
        if torch.is_grad_enabled():
            self.replayed[module.layer_number - 2] += output[1][slice(None) if mask is None else mask.bool()].sum(0)


def make_engine(cls: Any, split: Split, **config: Any) -> Any:
    """Create an engine of class `cls` with a few MoE layers. verl itself loads its model from a checkpoint on a GPU."""
    from verl.utils.megatron.router_replay_patch import RouterReplay, apply_router_replay_patch
    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    options = {
        "tensor_model_parallel_size": split.tp,
        "context_parallel_size": split.cp,
        "expert_model_parallel_size": split.ep,
        "expert_tensor_parallel_size": 1,
        "router_replay": EngineRouterReplayConfig(mode=split.replay),
        "use_remove_padding": not split.padded,
        **config,
    }
    engine = cls.__new__(cls)
    engine.engine_config = McoreEngineConfig(**options)
    engine.model_config = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(vision_config={}),
        mtp=types.SimpleNamespace(enable=False, enable_train=False),
        tokenizer=types.SimpleNamespace(pad_token_id=0),
    )
    engine.enable_routing_replay, engine.mini_layer_topk_idx_list = True, []
    apply_router_replay_patch()
    RouterReplay.router_instances.clear()
    biased = {
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.001,
        "moe_router_score_function": "sigmoid",
    }
    case = Case(
        config={"num_layers": RECORDED, "moe_layer_freq": [0] + [1] * LAYERS} | (biased if split.biased else {})
    )
    engine.tf_config = make_config(
        case,
        expert_model_parallel_size=split.ep,
        tensor_model_parallel_size=split.tp,
        expert_tensor_parallel_size=1,
        context_parallel_size=split.cp,
        sequence_parallel=split.tp > 1,
    )
    engine.tf_config.enable_routing_replay = True  # verl's own name for it, before 0.9
    net = make_net(engine.tf_config)
    for i, layer in enumerate(net.moe):
        layer.set_layer_number(i + 2)
    engine.module = [net]
    return engine


class Losses:
    """Replaces verl's model and loss. The loss is the sum of squared outputs over the replayed rows, divided by 100."""

    def __init__(self, padded: int = 0) -> None:
        self.of_micro_batches: list[float] = []
        self._padded = padded

    def forward(self, model: Any, input_ids: Any, *_: Any, **__: Any) -> dict[str, Any]:
        table = torch.randn(100, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        self._output = model(table[local(input_ids, self._padded)].unsqueeze(1))
        return {}

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        import verl.utils.megatron.router_replay_utils as replay

        used = local(torch.ones_like(data["input_ids"], dtype=torch.bool), self._padded)
        if leaves_rows_to_routers():
            used = local(replay.build_r3_replay_mask(data["input_ids"], data["response_mask"]), self._padded)
        loss = self._output[used].square().sum() / 100
        self.of_micro_batches.append(float(loss.detach()))
        return loss, {}


def run(engine: Any, split: Split, monkeypatch: Any, steps: list[list[int]]) -> dict[str, Any]:
    """Run steps: old log-probabilities, then an update per mini-batch in the step's given order.

    Returns losses, gradients, rows by expert, and the metrics of the last update.
    """
    import verl.models.mcore
    from verl.utils import tensordict_utils as tu

    losses, watched = Losses(split.padded), Watched(engine.module[0])
    monkeypatch.setattr(verl.models.mcore, "get_mcore_engine_forward_fn", lambda _: losses.forward)
    for i, order in enumerate(steps):
        batch = draw_batch(split, seed=i)
        with torch.no_grad():
            engine.forward_backward_batch(batch.clone(), losses, forward_only=True)
        size = len(batch) // len(set(order))
        for part in order:
            mini_batch = tu.index_select_tensor_dict(batch, list(range(part * size, (part + 1) * size)))
            output = engine.forward_backward_batch(mini_batch, losses)
    return {
        "losses": losses.of_micro_batches,
        "gradients": {name: gradient(p).clone() for name, p in engine.module[0].named_parameters()},
        "counts": torch.cat([torch.stack(of)[None] for of in watched.counts]),
        "metrics": output["metrics"],
        "modules": [name for name, _ in engine.module[0].named_modules()],
        "replayed": watched.replayed,
        "biases": [layer.router.local_tokens_per_expert.clone() for layer in engine.module[0].moe if split.biased],
    }
