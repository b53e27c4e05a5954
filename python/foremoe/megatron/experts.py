"""Adapters from Megatron-LM's experts to the engine, and the guest experts of a layer.

foremoe.torch's ExpertLayer computes rows by a function of weights [experts, …]. Megatron's experts are modules with one
parameter per expert. DistributedDataParallel and the distributed optimizer move these parameters into their own
buffers, and the modules apply the router's probabilities themselves. So a layer here implements only the part of that
protocol that copies need: its weights by name, each a stack of separate parameters. A module of the same type, built
from the layer's own submodules with one expert per guest slot, computes the guests. This module is not registered in
the model, so DDP, the optimizer, checkpoints and weight sync never see it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import foremoe
from foremoe._engine.lent import kind_of, try_lending

from .lora import Adapters, expect_copyable

SEQUENTIAL, GROUPED = "SequentialMLP", "TEGroupedMLP"
_OF_A_TRAINER = (
    "finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "no_sync_func", "param_sync_func", "timers",
)  # fmt: skip


def row_width(config: Any) -> int:
    """Returns the width of the rows that are dispatched: the hidden size, or that of latent projections around it."""
    return int(getattr(config, "moe_latent_size", None) or config.hidden_size)


def expert_parameters(experts: Any, name: str) -> dict[str, list[torch.nn.Parameter]]:
    """Returns the parameters of a module of experts, by name, [expert]. Experts may share an adapter's parameters."""
    kind = type(experts).__name__
    if kind == SEQUENTIAL:
        of_experts = [dict(expert.named_parameters()) for expert in experts.local_experts]
        if any(parameters.keys() != of_experts[0].keys() for parameters in of_experts):
            raise foremoe.InputError(
                f"model_chunks: experts of {name} have different parameters; expected the same, such as an adapter on "
                "each expert or on none",
                field="model_chunks",
            )
        return {of: [parameters[of] for parameters in of_experts] for of in of_experts[0]}
    if kind != GROUPED:
        raise foremoe.InputError(
            f"model_chunks: the experts of {name} are {kind}; expected {SEQUENTIAL} or {GROUPED}", field="model_chunks"
        )
    found: dict[str, dict[int, torch.nn.Parameter]] = {}
    for full, parameter in experts.named_parameters():  # linear_fc1.weight0, …; of guests linear_fc1.adapter.0.…
        at = re.fullmatch(r"(.+\.adapter\.)(\d+)\.(.+)", full) or re.fullmatch(r"(.+?)(\d*)()", full)
        assert at is not None
        found.setdefault(at[1] + at[3], {})[int(at[2] or -1)] = parameter
    count = experts.num_local_experts
    for of, parameters in found.items():
        if set(parameters) == {-1} and ".adapter." in of:
            found[of] = dict.fromkeys(range(count), parameters[-1])
        elif set(parameters) != set(range(count)):
            raise foremoe.InputError(
                f"model_chunks: {name} has no {of} of its own for each expert; moe_single_grouped_weight must be False",
                field="model_chunks",
            )
    return {of: [parameters[i] for i in range(count)] for of, parameters in found.items()}


class Stack:
    """Parameters with the same name, one per expert. The engine uses them like one tensor [experts, …]."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.parameters), *self.parameters[0].shape))

    @property
    def requires_grad(self) -> bool:
        return self.parameters[0].requires_grad

    @property
    def _version(self) -> int:
        return sum(p._version for p in self.parameters)

    def detach(self) -> Stack:
        return self

    def new_empty(self, *size: Any, **options: Any) -> Tensor:
        return self.parameters[0].detach().new_empty(*size, **options)

    def __getitem__(self, expert: int) -> Tensor:
        return self.parameters[expert].detach()


class MoE:
    """One MoE layer, with the part of the ExpertLayer protocol that Guests uses."""

    def __init__(self, layer: Any, name: str) -> None:
        self.layer = layer
        self.name = name
        self.num_experts = int(layer.config.num_moe_experts)
        self.top_k = int(layer.config.moe_router_topk)
        self.hidden_size = row_width(layer.config)
        expect_copyable(layer.experts, name)
        self.own = expert_parameters(layer.experts, name)
        self._stacks = {of: Stack(parameters) for of, parameters in self.own.items()}

    def weights(self) -> dict[str, Any]:
        return dict(self._stacks)

    def trained(self) -> str:
        """Returns, for each weight name, whether it is trained; "mixed" if only some experts are frozen."""
        flags = {name: {p.requires_grad for p in parameters} for name, parameters in self.own.items()}
        return " ".join(f"{name} {found.pop() if len(found) == 1 else 'mixed'}" for name, found in flags.items())

    def shapes(self) -> dict[str, Any]:
        """Returns shape and dtype of one expert's weights, by name."""
        return {name: (parameters[0].shape, parameters[0].dtype) for name, parameters in self.own.items()}

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns this rank's trained parameters, ordered by name, then expert."""
        return [p for parameters in self.own.values() for p in parameters if p.requires_grad]

    def expert_bytes(self) -> int:
        return sum(of[0].numel() * of[0].element_size() for of in self.own.values())


def gradient_type(layers: Sequence[MoE]) -> torch.dtype:
    """Returns the dtype in which micro-batches' gradients are summed: main_grad's if Megatron's DDP created one."""
    types = {getattr(p, "main_grad", p).dtype for layer in layers for p in layer.parameters()}
    if len(types) > 1:
        names = ", ".join(sorted(map(str, types)))
        raise foremoe.InputError(f"model_chunks: gradients of experts are summed in {names}", field="model_chunks")
    return types.pop() if types else torch.float32


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Gathers all expert parameters now: overlap_param_gather gathers just before a layer runs, too late for copies."""
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        if config is not None and config.use_distributed_optimizer and config.overlap_param_gather:
            for group in chunk.expert_parallel_bucket_groups:
                group.start_param_sync(force_sync=True)


class GuestExperts:
    """The guests of one layer on this rank. Guest weights are views of the engine's buffers."""

    def __init__(self, of: MoE, slots: int, groups: Any) -> None:
        self.module = _build(of.layer, slots, groups)
        self._adapters = Adapters(of.layer.experts, self.module, slots)
        self._own = of
        self._parameters = expert_parameters(self.module, of.name)
        if _shapes(self._parameters) != _shapes(of.own):
            raise foremoe.InputError(
                f"model_chunks: the experts of {of.name} have other parameters than their submodules make; "
                "expected them as Megatron-LM builds them, except adapters of Megatron-Bridge",
                field="model_chunks",
            )
        self._sums: dict[str, Tensor] = {}  # gradients, by name [slots, …]
        self.kind = kind_of(self, self.module)
        self.release()

    def point_at(self, buffers: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        """Uses the buffers as weights, and `sums` to accumulate gradients; both by name [slots, …]. A weight without a
        sum gets no gradient."""
        self._sums = sums
        for name, parameters in self._parameters.items():
            for slot, parameter in enumerate(parameters):
                parameter.requires_grad_(name in sums)
                parameter.data = buffers[name][slot]
                if name in sums:  # fused weight-gradient kernels add to main_grad
                    parameter.main_grad = sums[name][slot]  # type: ignore[attr-defined]
                    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def try_lending(self) -> None:
        """Raises InputError if a backward fails after other guests have used its buffers since the forward. Tests one
        row per slot."""
        slots = len(next(iter(self._parameters.values())))
        weights = {name: of[0].detach().expand(slots, *of[0].shape) for name, of in self._own.own.items()}

        def run(buffers: dict[str, Tensor]) -> Callable[[], list[Tensor]]:
            sums = {name: torch.zeros_like(buffers[name]) for name, of in self._own.own.items() if of[0].requires_grad}
            self.point_at(buffers, sums)
            of = next(iter(buffers.values()))
            rows = of.new_ones(slots, self._own.hidden_size).requires_grad_()
            out = self(rows, torch.ones(slots, dtype=torch.int64), of.new_ones(slots))

            def backward() -> list[Tensor]:
                torch.autograd.backward(out.sum())
                assert rows.grad is not None
                return [rows.grad, *self.sum_gradients().values()]

            return backward

        try_lending(self._own.name, weights, run)
        self.release()

    def release(self) -> None:
        """Drops all references to weights and gradients."""
        self._sums = {}
        for parameters in self._parameters.values():
            for parameter in parameters:
                parameter.data = parameter.data.new_empty(0)
                parameter.grad = None
                parameter.main_grad = None  # type: ignore[attr-defined]

    @torch.no_grad()
    def sum_gradients(self) -> dict[str, Tensor]:
        """Adds the gradients of a micro-batch's backward, as DistributedDataParallel's hook does for homes. Returns the
        sums, by name [slots, …]."""
        for name, sums in self._sums.items():
            for slot, parameter in enumerate(self._parameters[name]):
                if parameter.grad is not None and not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
                    sums[slot] += parameter.grad
                parameter.grad = None
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        return self._sums

    def __call__(self, rows: Tensor, tokens: Tensor, probs: Tensor) -> Tensor:
        """Runs the guests. rows: [rows, hidden], grouped by slot. tokens: int64 [slots], on the host. probs: [rows]."""
        if self.module.training != self._own.layer.experts.training:
            self.module.train(self._own.layer.experts.training)
        self._adapters.prepare(tokens)
        computed, bias = self.module(rows, tokens, probs)
        assert bias is None
        return computed  # type: ignore[no-any-return]


def _shapes(of: dict[str, list[torch.nn.Parameter]]) -> dict[str, torch.Size]:
    return {name: parameters[0].shape for name, parameters in of.items()}


def _build(layer: Any, slots: int, groups: Any) -> torch.nn.Module:
    """Builds experts of the layer's type. Draws no random numbers: copies overwrite the weights before first use."""
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    config = copy.copy(layer.config)  # not deepcopy: it may hold groups
    config.perform_initialization = False
    for name in _OF_A_TRAINER:  # a trainer sets these; SequentialMLP's deep copy of its config would copy their owners
        if hasattr(config, name):
            setattr(config, name, None)
    config.init_method = config.output_layer_init_method = _keep_uninitialized
    builder = layer.submodules.experts
    if isinstance(builder, (ModuleSpec, type)):  # megatron-core 0.16
        built: torch.nn.Module = build_module(builder, slots, config, pg_collection=groups)
    else:
        built = builder(slots, config, pg_collection=groups)
    return built


def _keep_uninitialized(tensor: Tensor) -> Tensor:
    return tensor
