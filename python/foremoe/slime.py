"""Runs slime's training steps under plans, or in shadow mode. Uses slime's own hook flags, without patches.

    --custom-megatron-before-train-step-hook-path foremoe.slime.before_train_step

This flag selects shadow mode, which counts each step's routes. The log and `foremoe.slime.hooks.replicas.metrics()`
report the possible gain. For other arguments, create hooks in a module of your own, `balance.py`:

    from foremoe.slime import Hooks

    hooks = Hooks(mode="active", guest_slots=1)  # and other arguments of foremoe.megatron.attach()
    before_log_prob, before_training, before_train_step = hooks

    --custom-megatron-before-log-prob-hook-path balance.before_log_prob
    --rollout-data-postprocess-path balance.before_training
    --custom-megatron-before-train-step-hook-path balance.before_train_step

Active mode reads routes from the lists that slime replays (--use-rollout-routing-replay, --use-routing-replay).

With --colocate or --offload-train, use shadow mode: its process groups are gloo's, which slime does not end when it
offloads. Active mode is refused.

Written from slime's sources (foremoe.supported names the revision) and tested with stand-ins. lab/engines runs
slime's own train() with them on four CPU ranks, for a few MoE layers. miles has the same flags. On miles, the first
flag selects shadow mode; active mode is refused (docs/users/adopting.md).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _core
from ._errors import InputError, refuse
from .supported import expect

if TYPE_CHECKING:
    from .megatron import Plan, Replicas


def recorded_counts(num_experts: int, first: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
    """Returns the rows that each expert gets when slime's lists are replayed, int64 [micro_steps, layers, experts].

    Layers are the MoE layers of this pipeline stage.

    Args:
        num_experts: Experts of a layer.
        first: First micro-step of the rollout.
        end: End of the micro-steps. None: all. Required on a stage without MoE layers, which has no lists.

    Raises:
        InputError: if the lists do not have these micro-steps, or ids are out of range.
    """
    from slime.utils.routing_replay import RoutingReplay

    lists = [replay.top_indices_list for replay in RoutingReplay.all_routing_replays]
    if not lists and end is not None:
        return np.zeros((end - first, 0, num_experts), np.int64)
    recorded = sorted({len(of_layer) for of_layer in lists})
    if len(recorded) != 1:
        refuse("all_routing_replays", f"{len(lists)} layers with {recorded} micro-steps; expected as many in each")
    end = recorded[0] if end is None else end
    if not 0 <= first < end <= recorded[0]:
        refuse("top_indices_list", f"has {recorded[0]} micro-steps; expected {first} to {end - 1} among them")
    counts = np.zeros((end - first, len(lists), num_experts), np.int64)
    for layer, of_layer in enumerate(lists):
        for m, indices in enumerate(of_layer[first:end]):
            place = f"[{layer}][{first + m}]"
            if hasattr(indices, "materialize_for_routing_replay"):
                refuse("top_indices_list", "is read when it is replayed, which is not supported", place)
            rows = np.ascontiguousarray(indices)[:, None]
            try:
                counts[m, layer] = _core._count_routes(rows, num_experts, distinct=True)[1]
            except InputError as error:
                refuse("top_indices_list", f"entry {error.index}: {error.problem}", place)
    return counts


class Hooks:
    """Three of slime's hooks for one model: before_log_prob, before_training and before_train_step.

    Args:
        arguments: Arguments of foremoe.megatron.attach(), which runs at the first step. Default mode: "shadow".

    Attributes:
        replicas: Result of attach(); None until it has run. Its metrics() returns the metrics of the last step that
            ended or, in shadow mode, was evaluated.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = {"mode": "shadow"} | arguments
        self.replicas: Replicas | None = None
        self._step = contextlib.ExitStack()
        self._num_micro_steps: list[int] | None = None  # of each training step of this rollout

    def __iter__(self) -> Iterator[Callable[..., None]]:
        return iter((self.before_log_prob, self.before_training, self.before_train_step))

    def before_log_prob(self, args: Any, model: Any, store_prefix: str) -> None:
        """--custom-megatron-before-log-prob-hook-path. In active mode the actor's log-probabilities are planned.

        Does nothing in a pipeline, where a stage without MoE layers has no lists and cannot count micro-batches.
        """
        self._close()
        if store_prefix or not self._is_active or not _is_actor(model):
            return  # the reference model and the teacher choose their own experts
        if getattr(args, "pipeline_model_parallel_size", 1) > 1:
            return
        if os.environ.get("ROUTING_REPLAY_STAGE") == "replay_forward":
            replicas = self._attached(args, model)
            self._open(replicas, replicas.plan(lambda: recorded_counts(args.num_experts), "recompute"))

    def before_training(self, args: Any, rollout_id: int = 0, rollout_data: Any = None) -> None:
        """--rollout-data-postprocess-path: provides the number of micro-batches of each training step."""
        self._close()
        if not self._is_active:
            return
        if rollout_data is None:
            refuse("rollout_data_postprocess_path", "got args alone, as in miles; mode active needs slime")
        self._num_micro_steps = [int(n) for n in rollout_data["num_microbatches"]]

    def before_train_step(
        self, args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
    ) -> None:
        """--custom-megatron-before-train-step-hook-path. The step ends when Megatron finalizes its gradients."""
        from megatron.core.utils import get_model_config

        self._close()
        if not _is_actor(model):
            return
        replicas = self._attached(args, model)
        plan = None
        if self._is_active:
            plan = replicas.plan(lambda: recorded_counts(args.num_experts, *self._micro_steps_of(step_id)))
        config = get_model_config(model[0])
        finalize = config.finalize_model_grads_func

        def close_and_finalize(*arguments: Any, **keywords: Any) -> Any:
            config.finalize_model_grads_func = finalize
            self._close()
            return finalize(*arguments, **keywords)

        self._open(replicas, plan)
        config.finalize_model_grads_func = close_and_finalize

    @property
    def _is_active(self) -> bool:
        return bool(self._arguments["mode"] != "shadow")

    def _attached(self, args: Any, model: Any) -> Replicas:
        if self.replicas is None:
            values = {
                "offload_train": getattr(args, "offload_train", False),
                "replay": "R3" if getattr(args, "use_routing_replay", False) else "disabled",
                "moe_router_fusion": getattr(args, "moe_router_fusion", False),
            }
            expect(values, "active" if self._is_active else "shadow", "slime")
            from .megatron import attach

            self.replicas = attach(model, **self._arguments)
        return self.replicas

    def _micro_steps_of(self, step_id: int) -> tuple[int, int]:
        if self._num_micro_steps is None or step_id >= len(self._num_micro_steps):
            refuse("rollout_data_postprocess_path", "should be before_training of the same Hooks, for mode active")
        first = sum(self._num_micro_steps[:step_id])
        return first, first + self._num_micro_steps[step_id]

    def _open(self, replicas: Replicas, plan: Plan | None) -> None:
        self._step.enter_context(replicas.step(plan))

    def _close(self) -> None:
        self._step.close()


def _is_actor(model: Any) -> bool:
    return bool(getattr(model[0], "role", "actor") == "actor")  # hooks are called for critics too


hooks = Hooks()
before_log_prob, before_training, before_train_step = hooks
