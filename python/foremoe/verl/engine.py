"""The engine that foremoe.verl registers: verl's engine with planned steps. Imports verl.

Only this module uses names of verl, except those of the registry, which foremoe.verl uses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import verl
from verl.utils import tensordict_utils as tu
from verl.utils.megatron.router_replay_utils import is_moe_layer, iter_model_routers
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from foremoe._errors import refuse
from foremoe.megatron import Plan, Replicas, attach, with_filler_routes
from foremoe.megatron.supported import moe_layers
from foremoe.supported import VERL

from .ahead import Counts, MiniBatchSplit, UpdatePlanner
from .routes import counts_of

__all__ = ["Engine", "arguments"]

_VARIABLE = "FOREMOE_ATTACH"
_WORDS = {"null": None, "true": True, "false": False}  # as in JSON


def arguments(text: str) -> dict[str, Any]:
    """Parses arguments of foremoe.megatron.attach() from "name=value,name=value". mode defaults to "shadow".

    Values are numbers, null (None), true and false; anything else is a string.

    Raises InputError for any other syntax.
    """
    found: dict[str, Any] = {"mode": "shadow"}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name.isidentifier() and equals and value) or name == "model_chunks":
            refuse(_VARIABLE, f"has {item!r}; expected name=value, and commas between them")
        found[name] = _value(value)
    return found


def _value(text: str) -> int | float | str | None:
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class Engine(MegatronEngineWithLMHead):
    """MegatronEngineWithLMHead with planned steps or shadow mode. It attaches at its first step.

    replicas: Result of foremoe.megatron.attach(); None before the first step.
    """

    replicas: Replicas | None = None
    _arguments: dict[str, Any]
    _ahead: UpdatePlanner

    def initialize(self) -> None:
        """Overrides verl's method. Raises InputError for an unsupported configuration, ImportError for a version."""
        self._arguments = arguments(os.environ.get(_VARIABLE, ""))
        VERL.expect("foremoe.verl", verl.__version__, self._arguments["mode"])
        self._ahead = UpdatePlanner()
        if not self.engine_config.forward_only:
            _expect_supported(self.engine_config, self.model_config, self._is_active)
        super().initialize()

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Overrides verl's method. For updates, adds foremoe.megatron's metrics to the result.

        Raises InputError for routes that cannot be replayed.
        """
        with self._step(data, forward_only):
            output = super().forward_backward_batch(data, loss_function, forward_only)
        if not forward_only and "metrics" in output and self.replicas is not None:
            output["metrics"].update({name: [value] for name, value in self.replicas.metrics().items()})
        return output

    @property
    def _is_active(self) -> bool:
        return bool(self._arguments["mode"] != "shadow")

    @contextlib.contextmanager
    def _step(self, data: Any, forward_only: bool) -> Iterator[None]:
        if not self._is_planned(data, forward_only):
            yield
            return
        if self.replicas is None:  # not earlier: weights may be offloaded before the first step
            self.replicas = attach(self.module, **self._arguments)
        if not self._is_active:
            with self.replicas.step():
                yield
            return
        layers = _Layers(self.module, self.tf_config)
        plan = self._plan(self.replicas, layers, data, forward_only)
        with self.replicas.step(plan), layers.with_filler_routes():
            yield

    def _is_planned(self, data: Any, forward_only: bool) -> bool:
        if self.engine_config.forward_only or not self._is_active:
            return not (self.engine_config.forward_only or forward_only)
        if tu.get_non_tensor_data(data, key="enable_routing_replay", default=False):
            return True
        if not forward_only:
            refuse("enable_routing_replay", "is False for an update; mode active needs routes that are known before it")
        return False  # the reference model's routers choose experts

    def _plan(self, replicas: Replicas, layers: _Layers, data: Any, forward_only: bool) -> Plan:
        """Plans the phase. Collective. Raises on all ranks if one rank refuses its routes."""

        def counts() -> Counts:
            # Collective over the data-parallel group, so call it before any check that may fail on one rank.
            micro_batches = self._micro_batches(data)
            layers.expect_replayed()
            return layers.counts(data, micro_batches)

        def counts_of_parts(parts: Sequence[range], options: dict[str, Any]) -> list[Counts]:
            micro_batches = []  # collective for each part, so before any check that may fail on one rank
            for sequences in parts:
                part = tu.index_select_tensor_dict(data.select("input_ids"), list(sequences))
                tu.assign_non_tensor(part, **options)
                micro_batches.append([[sequences[s] for s in of] for of in self._micro_batches(part)])
            return [layers.counts(data, of) for of in micro_batches]

        if not forward_only:
            return self._ahead.update(replicas, counts, MiniBatchSplit(len(data), _options(data)))
        plan = replicas.plan(counts, "recompute")
        self._ahead.recompute(replicas, len(data), counts_of_parts)
        return plan

    def _micro_batches(self, data: Any) -> list[list[int]]:
        """Returns the sequences of each micro-batch, as verl's forward_backward_batch will cut them. Collective."""
        light = data.select("input_ids")  # avoids copying all other fields for each micro-batch
        tu.assign_non_tensor(light, **_options(data), sp_size=self.engine_config.context_parallel_size)
        micro_batches, sequences = prepare_micro_batches(
            data=light,
            dp_group=self.get_data_parallel_group(),
            num_batches_divided_by=None,
            same_micro_num_in_dp=True,
            min_num_micro_batch=None,
        )
        if sequences is not None:
            return [list(map(int, of)) for of in sequences]
        ends = np.cumsum([len(of) for of in micro_batches]).tolist()
        return [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]


def _options(data: Any) -> dict[str, Any]:
    """Returns the options that prepare_micro_batches reads."""
    names = "use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "force_group_size"
    given = {name: tu.get_non_tensor_data(data, key=name, default=None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _expect_supported(engine: Any, model: Any, is_active: bool) -> None:
    """Raises InputError with the unsupported field of verl's configuration and its expected value."""
    if engine.dynamic_context_parallel:
        refuse("dynamic_context_parallel", "is True; expected False, since its micro-batches are not known beforehand")
    if not is_active:
        return
    if engine.router_replay.mode != "R3":
        refuse("router_replay.mode", f"is {engine.router_replay.mode!r}; expected 'R3', or mode=shadow in {_VARIABLE}")
    if not engine.use_remove_padding:
        refuse("use_remove_padding", "is False; expected True, since rows of padded batches are not counted")
    if engine.tensor_model_parallel_size > 1 and not engine.sequence_parallel:
        refuse(
            "sequence_parallel", "is False; expected True, since replayed routes are split over tensor parallel ranks"
        )
    if model.mtp.enable:
        refuse("mtp.enable", "is True; expected False, since these layers' routes are not replayed")
    if hasattr(model.hf_config, "vision_config"):
        refuse("vision_config", "is in the model's configuration; expected a model of text alone")


class _Layers:
    """The MoE layers of a model, and the routers that verl replays."""

    def __init__(self, module: Any, tf_config: Any) -> None:
        found = [layer for chunk in module for _, layer in moe_layers(chunk)]
        self._module = module
        self._tf_config = tf_config
        self._numbers = [layer.router.layer_number - 1 for layer in found]
        self._routers = [layer.router.router_replay for layer in found]
        self._first = int(found[0].local_expert_indices[0]) if found else 0

    def expect_replayed(self) -> None:
        """Raises InputError if a router would not replay exactly the recorded routes."""
        config = self._tf_config
        if getattr(config, "experimental_attention_variant", None) == "dsv4_hybrid":
            refuse("experimental_attention_variant", "is 'dsv4_hybrid', whose rows are split otherwise over ranks")
        if getattr(config, "moe_router_enable_expert_bias", False) and config.moe_router_bias_update_rate:
            rate = config.moe_router_bias_update_rate
            refuse("moe_router_bias_update_rate", f"is {rate}; expected 0, since rows that are not replayed count too")
        in_force = dict(iter_model_routers([unwrap_model(chunk) for chunk in self._module]))
        for number, router in zip(self._numbers, self._routers, strict=True):
            if router is None or in_force.get(number + 1) is not router:
                refuse("router_replay", "is not in force", f" of layer {number + 1}")

    def counts(self, data: Any, micro_batches: list[list[int]]) -> Counts:
        """Returns this rank's rows, int64 [micro_steps, layers, experts]."""
        if not self._numbers:  # a pipeline stage of dense layers
            return np.zeros((len(micro_batches), 0, 0), np.int64)
        if data.get("routed_experts", None) is None:
            refuse("routed_experts", "is missing; set rollout.enable_rollout_routing_replay")
        lengths = data["input_ids"].offsets().diff().tolist()
        responses = data["response_mask"].sum(dim=-1).tolist()
        routes = data["routed_experts"].unbind()
        if not len(routes) == len(responses) == len(lengths):
            refuse("routed_experts", f"has {len(routes)} sequences; expected {len(lengths)}, as input_ids")
        return np.stack(
            [
                counts_of(
                    [routes[s] for s in of],
                    [responses[s] for s in of],
                    [lengths[s] for s in of],
                    layers=self._recorded(routes[of[0]].shape[1]),
                    num_experts=self._tf_config.num_moe_experts,
                    top_k=self._tf_config.moe_router_topk,
                    first=self._first,
                    names=of,
                )
                for of in micro_batches
            ]
        )

    def _recorded(self, layers: int) -> list[int]:
        """Returns the index of each MoE layer among the recorded layers: all layers, or MoE layers only, as in verl."""
        if layers == self._tf_config.num_layers:
            return self._numbers
        return [sum(is_moe_layer(self._tf_config, i) for i in range(number)) for number in self._numbers]

    @contextlib.contextmanager
    def with_filler_routes(self) -> Iterator[None]:
        """Gives routes to rows that verl does not replay, until exit."""
        with contextlib.ExitStack() as stack:
            for router in self._routers:
                router.set_target_indices = self._filling(router.set_target_indices)
                stack.callback(delattr, router, "set_target_indices")
            yield

    def _filling(self, own: Callable[..., None]) -> Callable[..., None]:
        experts = self._tf_config.num_moe_experts

        def set_target_indices(routes: Any, replay_mask: Any = None) -> None:
            if replay_mask is not None:
                routes = with_filler_routes(routes, replay_mask.bool(), num_experts=experts, first=self._first)
            own(routes)

        return set_target_indices
