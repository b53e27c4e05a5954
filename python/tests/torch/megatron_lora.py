"""Adapters on experts as Megatron-Bridge attaches them, and TEGroupedMLP on CPU. Only for tests.

Uses Megatron-Bridge's classes if they are installed. They import Transformer Engine without using it here, so it is
replaced by a mock. Otherwise uses stand-ins with the names and the arithmetic of Megatron-Bridge 0.5.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_training import draw
from torch import Tensor

RANK_OF_ADAPTER, ALPHA = 4, 6
TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine.pytorch")


class GroupedLinear(torch.nn.Module):
    """Stands in for Transformer Engine's grouped linear layers: weight0, weight1, …, one per expert."""

    def __init__(self, experts: int, width: int, out: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.config, self.num_gemms, self.in_features, self.out_features = config, experts, width, out
        for i in range(experts):
            weight = torch.nn.Parameter(torch.zeros(out, width, dtype=config.params_dtype))
            weight.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{i}", weight)

    def forward(self, rows: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        parts = zip(rows.split(m_splits), self.parameters(), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat([part @ weight.t() for part, weight in parts]), None


def grouped_experts() -> Any:
    """Returns what builds a TEGroupedMLP of GroupedLinear, for MoESubmodules.experts."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.spec_utils import ModuleSpec

    if hasattr(experts, "GroupedMLPSubmodules"):  # megatron-core 0.17 or newer
        of = experts.GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return functools.partial(experts.TEGroupedMLP, submodules=of)
    both = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    return ModuleSpec(module=experts.TEGroupedMLP, submodules=both)


class LoRALinear(torch.nn.Module):
    """Stands in for Megatron-Bridge's class."""

    def __init__(self, to_wrap: Any, adapter: Any) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter
        self._adapter_enabled = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, bias = self.to_wrap(x, *args, **kwargs)
        if not self._adapter_enabled:
            return out, bias
        return out + self.adapter(x.contiguous(), *args, **kwargs).reshape(out.shape), bias


class LoRATopKRouter(torch.nn.Module):
    """Stands in for Megatron-Bridge's class."""

    def __init__(self, to_wrap: Any, adapter: Any) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = self.to_wrap.gating(x)
        return self.to_wrap.routing(logits + self.adapter(x.contiguous()).to(logits.dtype), *args, **kwargs)


class ParallelLinearAdapter(torch.nn.Module):
    """Stands in for Megatron-Bridge's class."""

    def __init__(
        self, in_features: int, out_features: int, dim: int, *, input_is_parallel: bool, dropout: float = 0.0,
        alpha: int, model_parallel_config: Any, **_: Any,
    ) -> None:  # fmt: skip
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.dim, self.alpha = dim, alpha
        of: dict[str, Any] = {"config": model_parallel_config, "bias": False, "is_expert": True}
        if input_is_parallel:
            of_rows = {"input_is_parallel": True, "skip_bias_add": True, "init_method": torch.nn.init.zeros_}
            self.linear_in: Any = RowParallelLinear(in_features, dim, **of, **of_rows)
        else:
            self.linear_in = ColumnParallelLinear(
                in_features, dim, **of, gather_output=True, init_method=torch.nn.init.zeros_
            )
        self.linear_out = ColumnParallelLinear(
            dim, out_features, **of, gather_output=input_is_parallel, init_method=torch.nn.init.zeros_
        )
        self.dropout = torch.nn.Dropout(dropout) if dropout > 0 else torch.nn.Identity()

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        out: Tensor = self.linear_out(self.linear_in(self.dropout(x))[0])[0] * (self.alpha / self.dim)
        return out


@functools.cache
def bridge() -> tuple[Any, Any, Any]:
    """Returns LoRALinear, LoRATopKRouter and ParallelLinearAdapter, of Megatron-Bridge if it is installed."""
    if importlib.util.find_spec("megatron.bridge") is None:
        return LoRALinear, LoRATopKRouter, ParallelLinearAdapter
    importlib.import_module("megatron.core")  # asks for the version of Transformer Engine, so before the mock
    with mock.patch.dict(sys.modules, dict.fromkeys(TRANSFORMER_ENGINE, mock.MagicMock())):
        layers = importlib.import_module("megatron.bridge.peft.lora_layers")
        utils = importlib.import_module("megatron.bridge.peft.utils")
    return layers.LoRALinear, layers.LoRATopKRouter, utils.ParallelLinearAdapter


def adapt_experts(net: Any, *, alike: bool = False, dropout: float = 0.0) -> None:
    """Freezes the model, and adds trained adapters to the experts of all layers, as LoRA.transform() does.

    Adapters differ between layers, ranks of the expert-parallel group and experts. alike: One adapter for all ranks,
    whose gradients a hook sums, as in Megatron-Bridge 0.6.
    """
    wrapper, _, kind = bridge()
    net.requires_grad_(False)
    for i, layer in enumerate(net.moe):
        sequential = getattr(layer.experts, "local_experts", None)
        for e, owner in enumerate([layer.experts] if sequential is None else sequential):
            of_expert = "" if sequential is None else f"local_experts.{e}."
            for name in ("linear_fc1", "linear_fc2"):
                linear = getattr(owner, name)
                width, out = (linear.in_features, linear.out_features) if sequential is None else (
                    linear.input_size, linear.output_size)  # fmt: skip
                adapter = kind(
                    width, out, RANK_OF_ADAPTER, alpha=ALPHA, dropout=dropout, input_is_parallel=name == "linear_fc2",
                    model_parallel_config=linear.config, is_expert=True, activation="identity",
                    base_linear_name=f"decoder.layers.{i}.mlp.experts.{of_expert}{name}",
                )  # fmt: skip
                rank = 0 if alike else dist.get_rank(layer.ep_group)
                draw(adapter.parameters(), 900 + 100 * i + 20 * rank + 2 * e + (name == "linear_fc2"))
                for p in adapter.parameters():
                    if alike and not p._backward_hooks:
                        p.register_hook(_summed(layer.ep_group))
                setattr(owner, name, wrapper(linear, adapter))


def _summed(group: Any) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, group=group)
        return gradient

    return hook


class Outside(torch.nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear
        self.down, self.up = (torch.nn.Linear(*of, bias=False, dtype=linear.weight.dtype) for of in (
            (linear.in_features, RANK_OF_ADAPTER), (RANK_OF_ADAPTER, linear.out_features)))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.up(self.down(x))
        return out


def adapt_outside(net: Any) -> None:
    """Freezes the model, and adds trained adapters to its linear layers outside the experts and to its routers."""
    _, of_router, kind = bridge()
    net.requires_grad_(False)
    for i, layer in enumerate(net.moe):
        adapter = kind(
            layer.config.hidden_size, layer.config.num_moe_experts, RANK_OF_ADAPTER, alpha=ALPHA,
            input_is_parallel=False, model_parallel_config=layer.config, activation="identity",
            base_linear_name=f"decoder.layers.{i}.mlp.router", base_linear_is_parallel=False,
        )  # fmt: skip
        for p in adapter.parameters():
            p.allreduce = True  # not of an expert
        draw(adapter.parameters(), 700 + i)
        layer.router = of_router(layer.router, adapter)
    for i, linear in enumerate(net.mix):
        net.mix[i] = Outside(linear)
        draw((p for p in net.mix[i].parameters() if p.requires_grad), 800 + i)
