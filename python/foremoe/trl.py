"""trl: GRPOTrainer with routing replay and planned expert parallelism.

    trainer = GRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=data, guest_slots=1)
    trainer.train()                      # torchrun --nproc-per-node 4 train.py

Every rank generates with an unsharded copy of the model, or with use_vllm and vllm_mode="colocate" with vLLM's, which
records the routes of the batch. Training replays them, in one phase per optimizer step over its gradient-accumulation
micro-steps. This module overrides private methods of trl and transformers, and checks for them when it is imported.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import trl
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import foremoe
from foremoe import _core
from foremoe._engine.sharded import is_dtensor
from foremoe._errors import refuse

from ._trl_checkpoints import TrainerWithCheckpoints
from ._trl_vllm import made_by_trl
from .hf import Recorder, expert_layers, record
from .options import AnyHomes
from .supported import TRL
from .torch import ExpertParallel, Phase
from .torch.shards import expect_of_experts

_HOOKS = (
    "_clip_grad_norm", "_generate_and_score_completions", "_generate_single_turn", "_get_grad_norm",
    "_get_per_token_logps_and_entropies", "_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
    "_prepare_inputs", "_save", "_save_optimizer_and_scheduler", "create_optimizer", "training_step",
)  # fmt: skip

TRL.expect("foremoe.trl", trl.__version__)
for _hook in _HOOKS:
    if not hasattr(trl.GRPOTrainer, _hook):
        raise ImportError(f"foremoe.trl needs GRPOTrainer.{_hook}, which trl {trl.__version__} has not")

# Arguments of GRPOTrainer and of GRPOConfig that must keep their default, and why.
_NOT_SUPPORTED = {
    "peft_config": "adapters of experts are not spread over ranks",
    "quantization_config": "quantised experts are not spread over ranks",
    "tools": "routes of several turns are not joined",
    "environment_factory": "routes of several turns are not joined",
    "rollout_func": "routes of its completions are not known",
    "use_transformers_continuous_batching": "it does not tell whose rows run",
    "torch_compile": "recording and replaying routes is done by hooks",
    "use_liger_kernel": "it replaces the experts",
    "save_on_each_node": "rank 0 alone has all experts when they are saved",
    "auto_find_batch_size": "it starts again within a phase",
    "sync_ref_model": "the reference holds all experts, a rank its own",
    "fp16": "ranks would skip different steps where gradients overflow; bf16 does not",
    "fp16_full_eval": "it moves the model when the trainer has been made",
    "bf16_full_eval": "it moves the model when the trainer has been made",
    "deepspeed": "experts have their ranks already",
    "fsdp": "experts have their ranks already",
}
# Attributes that must be unset in models, and why.
_NOT_TRAINABLE = {
    "peft_config": "it has adapters",
    "hf_quantizer": "it is quantised",
}


def _expect_supported(given: dict[str, Any]) -> None:
    """Raises InputError for unsupported arguments. given: Arguments of GRPOTrainer by name."""
    args = given.get("args")
    for name, why in _NOT_SUPPORTED.items():
        value = given[name] if name in given else getattr(args, name, None)
        if value:
            raise foremoe.InputError(f"{name}: is not supported, since {why}", field=name)
    if args is not None and args.use_vllm and args.vllm_mode != "colocate":
        raise foremoe.InputError(
            f"vllm_mode: {args.vllm_mode} is not supported, since trl's server returns no routes; expected colocate",
            field="vllm_mode",
        )
    if given.get("optimizers", (None, None))[0] is not None:
        raise foremoe.InputError(
            "optimizers: an optimizer that was made before holds experts of other ranks; expected None",
            field="optimizers",
        )
    processor = given.get("processing_class")
    if processor is not None and not isinstance(processor, PreTrainedTokenizerBase):
        raise foremoe.InputError(
            f"processing_class: is a {type(processor).__name__}; expected a tokenizer, since images are not supported",
            field="processing_class",
        )


def _expect_known(cluster: Any, shape: Any) -> None:
    """Raises InputError, by the trainer's names of its arguments, for an unknown cluster or an invalid model shape."""
    for name, option, value in (("cluster", "cluster", cluster), ("model_shape", "model", shape)):
        given = {option: dict(value) if isinstance(value, Mapping) else value}
        try:
            _core._check_evaluation({} if value is None else given)
        except foremoe.InputError as error:
            refuse(name, str(error).removeprefix(f"{option}: "))


def _expect_trainable(model: Any) -> None:
    """Raises InputError for a model with adapters, a quantised or sharded model, and a model without experts."""
    for attribute, what in _NOT_TRAINABLE.items():
        if getattr(model, attribute, None):
            raise foremoe.InputError(f"model: {what}, which is not supported", field="model")
    config = getattr(model.config, "distributed_config", None)
    sharded = next((name for name, p in model.named_parameters() if is_dtensor(p)), None)
    if sharded is not None or getattr(model, "is_distributed_loading_by_transformers", False):
        raise foremoe.InputError(
            f"model: it is sharded already ({sharded}; {type(config).__name__} of {type(config).__module__}), but each "
            "rank generates with a whole copy; load it without distributed_config, or train it by foremoe.torch, which "
            "takes experts that transformers has sharded",
            field="model",
        )
    expert_layers(model)


def _tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


class GRPOTrainer(TrainerWithCheckpoints):
    """trl's GRPOTrainer, with the experts of the trained model spread over all ranks.

    Launch it like trl, with torchrun or accelerate, one process per rank of expert parallelism. It accepts the
    arguments of trl's trainer.

    Gradients of all other weights are averaged at the end of a phase. DistributedDataParallel is not used, and its
    options have no effect. save_model() and checkpoints contain all experts; call save_model() on all ranks. log()
    receives Phase.figures() as foremoe/NAME: means over ranks, micro-steps and layers. foremoe/NAME_max is the largest
    over micro-steps and layers.

    Args:
        guest_slots: See ExpertParallel, also for residency, policy, depth, path, dispatch, host_timeout,
            ranks_per_node, threads, homes and cluster.
        model_shape: ExpertParallel's argument `model`.
        warm_start: Passes the plan of the last policy update to ExpertParallel.plan() as `previous` (algorithm 3 of
            ForeMoE's review). With drifting expert popularity, warm starts changed almost nothing, but doubled the
            planning time. Checkpoints do not contain the plan.

    Attributes:
        expert_parallel: The trained model's ExpertParallel.
        generator: The unsharded copy that generates, one on each rank. None with vLLM, which has its own.

    Raises:
        InputError: with the name of an unsupported argument.
    """

    model_wrapped: Any  # set by transformers: the model that training runs

    def __init__(
        self,
        *arguments: Any,
        guest_slots: int = 1,
        residency: str | None = None,
        policy: str = "foremoe",
        depth: int = 2,
        path: str = "peer",
        dispatch: str = "row",
        host_timeout: float = 30.0,
        ranks_per_node: int | None = None,
        threads: int = 1,
        homes: AnyHomes = None,
        cluster: str | None = None,
        model_shape: str | Mapping[str, Any] | None = None,
        warm_start: bool = False,
        **keywords: Any,
    ) -> None:
        given = inspect.signature(trl.GRPOTrainer).bind(*arguments, **keywords).arguments
        _expect_supported(given)
        _expect_known(cluster, model_shape)
        if not isinstance(given["model"], str):
            _expect_trainable(given["model"])
        with made_by_trl():
            super().__init__(*arguments, **keywords)
        self._expect_data_parallel()
        _expect_trainable(self.model)
        self._expect_gatherable_state()

        self.generator: Any = None if self.use_vllm else self._made_generator()
        # Prepare both models now, so that DistributedDataParallel wraps neither when training begins.
        for model in (self.model, self.generator):
            if model is not None:
                self.accelerator.prepare_model(model, evaluation_mode=True)
        self.expert_parallel = ExpertParallel(
            expert_layers(self.model),
            guest_slots=guest_slots, residency=residency, policy=policy, depth=depth, path=path, dispatch=dispatch,
            host_timeout=host_timeout, ranks_per_node=ranks_per_node, threads=threads, homes=homes, cluster=cluster,
            model=model_shape,
        )  # fmt: skip
        if self.use_vllm:
            self.vllm_generation.expert_parallel = self.expert_parallel
        if warm_start:
            self.expert_parallel.expect_warm_starts()
        self._warm_start = warm_start
        self._updated: foremoe.Plan | None = None  # plan of the last policy update, if warm_start
        self._broadcast_weights()
        self.expert_parallel.wrap(self.model)

        self._routes: Tensor | None = None  # of the batch that is being scored, [batch, tokens, layers, top_k]
        self._phases = contextlib.ExitStack()  # holds the phase that is entered
        self._phase: Phase | None = None
        self._micro_step = contextlib.ExitStack()  # holds the micro-step that is entered
        self._next_of_phase = 0  # micro-step
        self._next_of_step = 0  # micro-step of the optimizer step

    def _made_generator(self) -> Any:
        generator = copy.deepcopy(self.model)
        vars(generator).pop("forward", None)  # trl's forward runs the model that was copied
        return generator.requires_grad_(False).eval()

    def _expect_data_parallel(self) -> None:
        kind = self.accelerator.distributed_type.value
        if not kind.startswith("MULTI_"):
            raise foremoe.InputError(
                f"distributed_type: {kind}; launch one process per rank of expert parallelism, with torchrun or "
                "accelerate, and without FSDP, DeepSpeed or the like",
                field="distributed_type",
            )
        if getattr(self.accelerator, "parallelism_config", None) is not None:
            raise foremoe.InputError("parallelism_config: is not supported; expected None", field="parallelism_config")
        if self.accelerator.state.dynamo_plugin.backend.value != "NO":
            raise foremoe.InputError(
                f"torch_compile: is not supported, since {_NOT_SUPPORTED['torch_compile']}", field="torch_compile"
            )

    def _expect_gatherable_state(self) -> None:
        """Raises InputError if the optimizer's state cannot be gathered. Tries a step of two small experts."""
        probe = torch.nn.Module()
        probe.experts = torch.nn.Parameter(next(self.model.parameters()).new_zeros(2, 64, 64))  # 8-bit from 4096 on
        try:
            optimizer = self.create_optimizer(probe)
            probe.experts.grad = torch.ones_like(probe.experts)
            optimizer.step()
            for name, value in optimizer.state[probe.experts].items():
                expect_of_experts(name, value, probe.experts)
        except Exception as error:
            raise foremoe.InputError(
                f"optim: {self.args.optim.value} is not supported, since its state cannot be gathered: {error}",
                field="optim",
            ) from error
        finally:
            self.optimizer = None

    @torch.no_grad()
    def _broadcast_weights(self) -> None:
        """Broadcasts rank 0's weights, as DDP does. Each rank keeps its own experts."""
        experts = {id(weight) for weight in self.expert_parallel.expert_parameters()}
        for tensor in _tensors(self.model):
            if id(tensor) not in experts:
                dist.broadcast(tensor.data, src=0)

    @torch.no_grad()
    def _publish(self) -> None:
        """Updates the generator's weights. Collective."""
        of_generator = self.generator.state_dict()
        for names, tensor in self.expert_parallel.checkpoints.whole_entries(self.model):
            of_generator[names[0]].copy_(tensor)

    # Routes are recorded during generation, in the layout of trl's tokens.

    def _generate_single_turn(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
        if self.generator is None:
            generated = super()._generate_single_turn(prompt_ids, *arguments, **keywords)
            read = self._returned
        else:
            self._publish()
            trained, self.model_wrapped = self.model_wrapped, self.generator
            try:
                with record(self.generator) as recorder:
                    generated = super()._generate_single_turn(prompt_ids, *arguments, **keywords)
            finally:
                self.model_wrapped = trained
            read = functools.partial(self._recorded, recorder)
        self._routes = read(self._mask_of(prompt_ids, generated[0])) if self.model.training else None
        return generated

    def _mask_of(self, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
        """Returns the mask of left-padded prompts and completions, [batch, tokens]."""
        multiple = self.pad_to_multiple_of or 1
        begin = -(-max(map(len, prompts)) // multiple) * multiple
        mask = torch.zeros(len(prompts), begin + max(map(len, completions)), dtype=torch.long)
        for row, prompt, completion in zip(mask, prompts, completions, strict=True):
            row[begin - len(prompt) : begin + len(completion)] = 1
        return mask

    def _returned(self, mask: Tensor) -> Tensor:
        """Returns the routes of vLLM, int16 [batch, tokens, layers, top_k]."""
        layers = self.expert_parallel.layers
        routes = torch.full((*mask.shape, len(layers), layers[0].top_k), -1, dtype=torch.int16)
        for of, row, found in zip(routes, mask, self.vllm_generation.routes(layers, len(mask)), strict=True):
            of[row.bool()] = found
        return routes

    def _recorded(self, recorder: Recorder, mask: Tensor) -> Tensor:
        """Returns the routes of generate(), int16 [batch, tokens, layers, top_k]."""
        try:
            return recorder.routes(mask, mask).cpu()
        except foremoe.InputError as error:
            raise foremoe.InputError(
                f"generation_kwargs: generate() must run each token of a sequence once, up to its end ({error})",
                field="generation_kwargs",
            ) from error

    def _routes_of(self, attention_mask: Tensor) -> Tensor:
        """Returns the routes of the batch that is being scored, [batch, tokens, layers, top_k]."""
        assert self._routes is not None
        more = attention_mask.shape[1] - self._routes.shape[1]  # trl pads completions further, or cuts them
        routes = torch.nn.functional.pad(self._routes, (0, 0, 0, 0, 0, more), value=-1)
        return routes.masked_fill((attention_mask == 0).cpu()[:, :, None, None], -1)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        try:
            output = super()._generate_and_score_completions(inputs)
            if self._routes is not None:
                mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
                output["routed_experts"] = self._routes_of(mask)  # shuffled and split with all other tensors
            return output
        finally:
            self._routes = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        if model is not self.model or torch.is_grad_enabled() or self._routes is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *arguments, **keywords
            )
        # Old log-probabilities have their own phase, which replays the same routes as training.
        size = self.args.per_device_train_batch_size
        found = []
        routes = torch.split(self._routes_of(attention_mask), size)
        with self.expert_parallel.plan(routes, phase="recompute", previous=self._updated) as phase:
            parts = zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True)
            for m, (ids, mask) in enumerate(parts):
                with phase.micro_step(m):
                    found.append(super()._get_per_token_logps_and_entropies(model, ids, mask, logits_to_keep)[0])
        return torch.cat(found), None, None

    # Training: phases of micro-steps.

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        self._phase, self._next_of_step = None, 0
        with contextlib.ExitStack() as self._phases:  # any exit from training ends its phase
            return super().train(*arguments, **keywords)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            if self._phase is None:
                phase = self.expert_parallel.plan(self._routes_ahead(), previous=self._updated)
                self._phase = self._phases.enter_context(phase)
                self._next_of_phase = 0
            self._micro_step.enter_context(self._phase.micro_step(self._next_of_phase))
        return inputs

    def _routes_ahead(self) -> list[Tensor]:
        """Returns the routes of the optimizer step's micro-steps from here on, up to the next generation."""
        every = self.args.steps_per_generation * self.num_iterations
        left = self.current_gradient_accumulation_steps - self._next_of_step
        steps = range(self._step, self._step + min(left, every - self._step % every))
        return [self._buffered_inputs[s % self.args.steps_per_generation]["routed_experts"] for s in steps]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with contextlib.ExitStack() as self._micro_step:  # entered by _prepare_inputs(): forward and backward
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        assert self._phase is not None
        self._next_of_phase += 1
        self._next_of_step = (self._next_of_step + 1) % self.current_gradient_accumulation_steps
        if self._next_of_phase == len(self._phase.micro_steps):
            self._phase.drain()
            self._phases.close()
            self._log_figures(self._phase.figures())
            if self._warm_start:
                self._updated = self._phase.plan
            self._phase = None
        return loss

    def _log_figures(self, figures: dict[str, Any]) -> None:
        flat = {}
        for name, value in figures.items():
            if isinstance(value, dict):
                flat[name], flat[f"{name}_max"] = value["mean"], value["max"]
            else:
                flat[name] = value
        own = torch.tensor(list(flat.values()), dtype=torch.float32, device=self.accelerator.device)
        means = self.accelerator.reduce(own, reduction="mean").tolist()
        for name, mean in zip(flat, means, strict=True):
            self._metrics["train"][f"foremoe/{name}"].append(mean)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.expert_parallel.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self.expert_parallel.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm
