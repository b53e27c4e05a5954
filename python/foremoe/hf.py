"""transformers: adapters of MoE layers for foremoe.torch, and recording of routes.

    ep = foremoe.torch.ExpertParallel(expert_layers(model))
    with record(rollout_model) as recorder:
        out = rollout_model.generate(...)
    routes = recorder.routes(out, attention_mask)  # or, after each plain forward, of its input_ids

From transformers 5.23 on, each rank can load only its own experts, by DistributedConfig(fsdp_size=R, ep_size=R). All
other calls are the same. See foremoe.supported for accepted versions.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import foremoe

from ._engine.compiled import expect_not_compiled
from ._engine.layers import Execute
from ._engine.sharded import is_dtensor
from ._routers import GivenTopK, expect_replayable
from .supported import TRANSFORMERS, TRANSFORMERS_LOADING_PARTS
from .torch import grouped_linear

TRANSFORMERS.expect("foremoe.hf", transformers.__version__)
if TRANSFORMERS_LOADING_PARTS.accepts(transformers.__version__):
    from . import _planned_ep


# Keys are modules, so that copies of a model are not attached.
_EXECUTE: weakref.WeakKeyDictionary[torch.nn.Module, Execute] = weakref.WeakKeyDictionary()


def _execute(experts: torch.nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    if is_parametrized(experts):
        _refuse_adapters("")
    if experts not in _EXECUTE:
        raise RuntimeError(
            "a copy of a spread model, as deepcopy and AveragedModel make one, can be averaged, saved and loaded, but "
            "it cannot run: load it into the spread model by model.load_state_dict(copy.state_dict()), or copy the "
            "model before ExpertParallel is made"
        )
    return _EXECUTE[experts](hidden, ids, gates)


ALL_EXPERTS_FUNCTIONS.register("foremoe", _execute)


class TransformersExperts:
    """Experts and router of one block; an ExpertLayer."""

    model: torch.nn.Module | None = None  # model that contains the experts
    is_replayed = True  # False: the router looks experts up by token id

    def __init__(self, name: str, router: torch.nn.Module, experts: Any) -> None:
        self.name = name
        self.router = router
        self.experts = experts
        self.num_experts = int(experts.num_experts)
        self.top_k = int(getattr(router, "top_k", 0) or _top_k_of(experts.config))
        self._names = [
            n
            for n in ("gate_up_proj", "up_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj", "down_proj_bias")
            if isinstance(getattr(experts, n, None), torch.nn.Parameter)
        ]
        down = experts.down_proj
        self.hidden_size = int(down.shape[2 if experts.is_transposed else 1])
        experts.config = copy.copy(experts.config)  # other modules, and other models, may share it
        self._implementation = getattr(experts.config, "_experts_implementation", None)
        self.own_choice: Tensor | None = None  # [tokens, top_k], the router's own choice where another was replayed
        self._ids: Tensor | None = None
        self._mode: GivenTopK | None = None
        self.replayed_rows: Tensor | int = 0  # rows with a route
        self.mismatched_rows: Tensor | int = 0
        self._hooks: list[Any] = []

    def weights(self) -> dict[str, torch.nn.Parameter]:
        return {name: getattr(self.experts, name) for name in self._names}

    def set_weights(self, weights: dict[str, torch.nn.Parameter]) -> None:
        for name, weight in weights.items():
            setattr(self.experts, name, weight)

    def execute_by(self, execute: Execute | None) -> None:
        if execute is not None:
            _EXECUTE[self.experts] = execute
        else:
            _EXECUTE.pop(self.experts, None)
        self.experts.config._experts_implementation = "foremoe" if execute is not None else self._implementation

    def forward_rows(self, rows: Tensor, offsets: Tensor, weights: dict[str, Tensor]) -> Tensor:
        experts = self.experts
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        out = self._linear(rows, offsets, weights, up)
        out = experts._apply_gate(out) if experts.has_gate else experts.act_fn(out)
        return self._linear(out, offsets, weights, "down_proj")

    def _linear(self, rows: Tensor, offsets: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
        weight = weights[name] if self.experts.is_transposed else weights[name].transpose(1, 2)
        out = grouped_linear(rows.to(weight.dtype), weight, offsets)  # as in transformers; autocast does not reach it
        if f"{name}_bias" in weights:
            rows_of = torch.diff(offsets, prepend=offsets.new_zeros(1)).long()
            out = out + weights[f"{name}_bias"].repeat_interleave(rows_of, 0, output_size=rows.shape[0])
        return out

    def replay(self, ids: Tensor | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ids, self.own_choice = ids, None
        if ids is not None and self.is_replayed:
            self._hooks.append(self.router.register_forward_pre_hook(self._before_router))
            self._hooks.append(self.router.register_forward_hook(self._after_router, always_call=True))

    def _before_router(self, *_: Any) -> None:
        assert self._ids is not None
        self._mode = GivenTopK(self._ids, self.num_experts)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _after_router(self, *_: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if mode.hits != 1 or mode.own is None or self._ids is None:
            if mode.rows is not None and self._ids is not None:
                raise RuntimeError(f"{self.name}: {mode.rows} rows ran, but there are routes of {len(self._ids)}")
            raise RuntimeError(f"{self.name}: the router chose its experts in a way that cannot be replayed")
        self.own_choice = mode.own
        own, ids = mode.own.sort(-1).values, self._ids.sort(-1).values
        routed = (ids >= 0).all(-1)
        self.replayed_rows = self.replayed_rows + routed.sum()
        self.mismatched_rows = self.mismatched_rows + ((own != ids).any(-1) & routed).sum()


class LoadedExperts(TransformersExperts):
    """Experts loaded in parts by transformers' expert parallelism.

    weights() returns the parameters that were loaded, even while FSDP2 replaces them.
    """

    def __init__(self, name: str, router: torch.nn.Module, experts: Any, implementation: _planned_ep.PlannedEP) -> None:
        super().__init__(name, router, experts)
        self._loaded = super().weights()
        self.num_experts = int(experts.down_proj.shape[0])  # of all ranks
        self._by = implementation

    def weights(self) -> dict[str, torch.nn.Parameter]:
        return dict(self._loaded)

    def execute_by(self, execute: Execute | None) -> None:
        self._by.execute = execute


def _layer_of(model: torch.nn.Module, name: str, router: torch.nn.Module, experts: Any) -> TransformersExperts:
    if not is_dtensor(experts.down_proj):
        return TransformersExperts(name, router, experts)
    if not TRANSFORMERS_LOADING_PARTS.accepts(transformers.__version__):
        raise foremoe.InputError(
            f"model: its experts are sharded, which needs transformers {TRANSFORMERS_LOADING_PARTS.accepted}, "
            f"not {transformers.__version__}",
            field="model",
        )
    implementation = _planned_ep.implementation_of(experts, model)
    if implementation is None:
        placement = experts.down_proj.placements, tuple(experts.down_proj.device_mesh.shape)
        raise foremoe.InputError(
            f"model: the experts of {name} are sharded, as {placement[0]} on a mesh of {placement[1]}, but not by "
            "transformers' expert parallelism; load them whole, or by DistributedConfig(fsdp_size=R, ep_size=R), where "
            "R is the number of processes",
            field="model",
        )
    for option in ("fsdp_mixed_precision", "fsdp_cpu_offload"):
        if getattr(getattr(model.config, "distributed_config", None), option, False):
            raise foremoe.InputError(f"{option}: is not supported; expected False", field=option)
    return LoadedExperts(name, router, experts, implementation)


def _top_k_of(config: Any) -> int:
    for name in ("num_experts_per_tok", "moe_top_k", "top_k", "top_k_experts"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    raise foremoe.InputError("model: its configuration does not say how many experts a token has", field="model")


def _experts_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Returns the blocks whose experts transformers executes by a function, with names. Raises InputError if none."""
    blocks = []
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        if isinstance(experts, torch.nn.Module) and hasattr(_without_adapters(experts), "is_transposed"):
            blocks.append((name, block))
    if not blocks:
        raise foremoe.InputError("model: it has no experts that transformers can execute by a function", field="model")
    return blocks


def _without_adapters(experts: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside peft's adapters."""
    while isinstance(base := getattr(experts, "base_layer", None), torch.nn.Module):
        experts = base
    return experts


def _refuse_adapters(name: str) -> NoReturn:
    """Raises InputError. name: Name of the block, if known."""
    raise foremoe.InputError(
        f"model: {f'the experts of {name}' if name else 'experts'} have adapters, or parametrizations; expected none, "
        "as after merge_and_unload()",
        field="model",
    )


def _expect_no_tensor_parallelism(model: torch.nn.Module) -> None:
    """Raises InputError if transformers has sharded a part of the model along tensors.

    Early versions of transformers keep a part of each expert as a plain tensor, which looks like a whole expert.
    """
    for module in model.modules():
        if (size := getattr(module, "_tp_size", None) or 1) > 1:
            raise foremoe.InputError(
                f"tp_size: {size}; expected 1: {type(module).__name__} is tensor-parallel, so ranks share a "
                "batch. Load it without tp_plan and tp_size, or by DistributedConfig(fsdp_size=R, ep_size=R), where R "
                "is the number of processes",
                field="tp_size",
            )


def _expect_recordable(model: torch.nn.Module) -> None:
    """Raises InputError if routers replace the experts of other ranks, as "ep_router" did before transformers 5.23."""
    for module in model.modules():
        config = getattr(getattr(module, "config", None), "distributed_config", None)
        plan = getattr(module, "_ep_plan", None) or {}
        if getattr(config, "enable_expert_parallel", False) and "ep_router" in plan.values():
            raise foremoe.InputError(
                "ep_plan: under ep_router a rank's router returns its own experts alone, numbered from 0; expected a "
                "model without it, such as that of transformers 5.23 or newer",
                field="ep_plan",
            )


def expert_layers(model: torch.nn.Module) -> list[TransformersExperts]:
    """Returns the MoE layers of a transformers model in the order in which they run.

    Experts that transformers' expert parallelism has sharded over all processes are taken as they are.

    Raises InputError if there are none, for experts or routers of unknown shape, for routers that cannot replay a
    choice, for tensor parallelism, and for experts that have adapters, are compiled, or are sharded in another way.
    """
    _expect_no_tensor_parallelism(model)
    layers = []
    for name, block in _experts_of(model):
        router = getattr(block, "gate", None) or getattr(block, "router", None)
        if not isinstance(router, torch.nn.Module):
            raise foremoe.InputError(f"model: {name} has experts, and neither gate nor router", field="model")
        experts: Any = block.experts
        if _without_adapters(experts) is not experts or is_parametrized(experts):
            _refuse_adapters(name)
        if getattr(experts, "has_post_expert_norm", False):
            raise foremoe.InputError(
                f"model: {name} norms what its experts return, which is not supported", field="model"
            )
        layer = _layer_of(model, name, router, experts)
        layer.is_replayed = expect_replayable(
            name, router, num_experts=layer.num_experts, top_k=layer.top_k, hidden_size=layer.hidden_size
        )
        layer.model = model
        layers.append(layer)
    expect_not_compiled(model, [weight for layer in layers for weight in layer.weights().values()])
    return layers


class Recorder:
    """The routes of the rows that run inside record()."""

    def __init__(self, experts: list[Any]) -> None:
        self._calls: list[list[Tensor]] = [[] for _ in experts]
        self._hooks = [
            of.register_forward_pre_hook(self._keep(calls)) for of, calls in zip(experts, self._calls, strict=True)
        ]

    @staticmethod
    def _keep(calls: list[Tensor]) -> Any:
        def keep(_: Any, arguments: tuple[Any, ...]) -> None:
            calls.append(arguments[1].detach().to(torch.int16))

        return keep

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def routes(self, out: Any, attention_mask: Tensor) -> Tensor:
        """Returns the routes of the rows since the last call, int16 [batch, tokens, layers, top_k]; −1: did not run.

        After generate() the last token of each sequence has no route, since it was never an input.

        Args:
            out: Output of generate(), or the input_ids of one plain forward, such as one for old log-probabilities.
            attention_mask: [batch, tokens] of prompt and completion, 0 for padding.

        Raises:
            InputError: for an argument of another shape, and if no or other rows ran, as in two plain forwards.
        """
        tokens = out if isinstance(out, Tensor) else out.sequences
        batch, length = tokens.shape
        if tuple(attention_mask.shape) != (batch, length):
            raise foremoe.InputError(
                f"attention_mask: is {list(attention_mask.shape)}; expected [{batch}, {length}]", field="attention_mask"
            )
        if not any(self._calls):
            raise foremoe.InputError(
                "out: no rows ran since record() began or routes() was last called; routes() returns each row once",
                field="out",
            )
        is_plain = all([call.shape[0] for call in calls] == [batch * length] for calls in self._calls)
        per_layer = []
        for calls in self._calls:
            rows = sum(call.shape[0] for call in calls)
            if not is_plain and rows != batch * (length - 1):
                raise foremoe.InputError(
                    f"out: {rows} rows ran in {len(calls)} forwards, but it has {batch * (length - 1)} before the last "
                    f"tokens; expected these, or all {batch * length} in one forward",
                    field="out",
                )
            per_layer.append(torch.cat([call.view(batch, -1, call.shape[-1]) for call in calls], 1))
        routes = torch.stack(per_layer, 2)
        for calls in self._calls:
            calls.clear()
        mask = attention_mask.to(routes.device).bool()
        if not is_plain:
            routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, 1), value=-1)
            last = length - 1 - mask.flip(1).int().argmax(1)
            mask = mask.scatter(1, last[:, None], False)
        return routes.masked_fill(~mask[:, :, None, None], -1)


@contextlib.contextmanager
def record(model: torch.nn.Module) -> Iterator[Recorder]:
    """Records the experts of every row that runs inside, without waiting for the device.

    Raises InputError for a model without experts, and for one whose routers return a rank's own experts alone.
    """
    _expect_recordable(model)
    recorder = Recorder([block.experts for _, block in _experts_of(model)])
    try:
        yield recorder
    finally:
        recorder.stop()
