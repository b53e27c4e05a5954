"""trl's vLLM in colocate mode: it returns the routes of its completions, and receives the experts of all ranks.

Written from trl 1.16 and vLLM 0.26, 0.29 and 0.31. Tests use a stand-in for vLLM; lab/engines trains two
ranks with vLLM 0.29 itself on CPUs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

import foremoe

from .hf import TransformersExperts
from .recorders import Recorder, from_vllm
from .supported import VLLM_OF_TRL
from .torch import ExpertParallel

for _name in ("_init_vllm", "_iter_named_params", "_fix_param_name_to_vllm", "generate", "sync_weights"):
    if not hasattr(vllm_generation.VLLMGeneration, _name):
        raise ImportError(f"foremoe.trl needs VLLMGeneration.{_name}, which this trl has not")


@contextlib.contextmanager
def made_by_trl() -> Iterator[None]:
    """Inside, trl's trainers create RoutedVLLM."""
    with mock.patch.object(grpo_trainer, "VLLMGeneration", RoutedVLLM):
        yield


class RoutedVLLM(vllm_generation.VLLMGeneration):  # type: ignore[misc]
    """VLLMGeneration whose engine returns routes.

    Attributes:
        expert_parallel: Of the trained model. Set it before weights are synchronised.
    """

    expert_parallel: ExpertParallel
    llm: Any
    _weights_arrive = False  # True: the first sync_weights() has found so

    def _init_vllm(self) -> None:
        _expect_vllm()
        own = vllm_generation.LLM
        with mock.patch.object(vllm_generation, "LLM", functools.partial(own, enable_return_routed_experts=True)):
            super()._init_vllm()
        generate = self.llm.generate

        @functools.wraps(generate)
        def generate_and_keep(*arguments: Any, **keywords: Any) -> Any:
            self._outputs = generate(*arguments, **keywords)
            return self._outputs

        self.llm.generate = generate_and_keep

    def sync_weights(self) -> None:
        """Gives vLLM the trained weights. Collective.

        trl calls load_weights() of the running model. It expects the layout of files, but some kernels have changed the
        layout of experts (FlashInfer's, and those for CPUs), and then fails or computes with mixed-up experts.

        Raises:
            InputError: with the name of a weight that vLLM does not reload, which it would only log.
        """
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if not self._weights_arrive:
            for weight in self._weights_of_engine().values():
                weight.data.fill_(torch.nan)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
        if not self._weights_arrive:
            for name, weight in self._weights_of_engine().items():
                if weight.isnan().all():
                    kind = type(self.model).__name__
                    raise foremoe.InputError(
                        f"model: vLLM does not reload {name} of a {kind}, so that it would generate with old weights",
                        field="model",
                    )
            self._weights_arrive = True
        self.llm.reset_prefix_cache()

    def _weights_of_engine(self) -> dict[str, Tensor]:
        """Returns the weights in which NaN can be written and found: with elements, of at least 16 bits."""
        model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        wide = (torch.float32, torch.bfloat16, torch.float16)
        return {name: weight for name, weight in model.named_parameters() if weight.numel() and weight.dtype in wide}

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the unspread model's parameters and persistent buffers, such as biases of routers. Collective.

        Names are those in files, where each expert has its own; transformers has one for all experts of a layer.
        """
        for names, value in self.expert_parallel.checkpoints.whole_entries(self.model):
            entry = {self._fix_param_name_to_vllm(names[0]): value}
            yield from revert_weight_conversion(self.model, entry).items()

    def routes(self, layers: list[TransformersExperts], batch: int) -> list[Tensor]:
        """Returns the routes of each sequence of the last generate(), int16 [tokens, layers, top_k]; −1: no route.

        Args:
            layers: MoE layers of the model.
            batch: Sequences of this rank. vLLM generates those of all ranks of its tensor-parallel group.

        Raises:
            InputError: with the number of the sequence, if rows are missing or invalid.
        """
        first = dist.get_rank(self.tp_group) * batch if self.tensor_parallel_size > 1 else 0
        recorder = Recorder(
            num_layers=self.model.config.get_text_config().num_hidden_layers,
            num_experts=layers[0].num_experts,
            top_k=layers[0].top_k,
            moe_layers=[_number_of(layer.name) for layer in layers],
            keep_routes=False,
        )
        found = [recorder.add(s, from_vllm(of)) for s, of in enumerate(self._outputs[first : first + batch])]
        return [torch.from_numpy(np.where(of == np.iinfo(of.dtype).max, -1, of.astype(np.int16))) for of in found]


def _expect_vllm() -> None:
    """Raises ImportError for other versions than accepted, and InputError on CPUs."""
    import vllm
    from vllm.platforms import current_platform

    VLLM_OF_TRL.expect("foremoe.trl", vllm.__version__)
    if current_platform.is_cpu():
        raise foremoe.InputError(
            "vllm_mode: vLLM rearranges experts for CPUs when it first loads them, but not when they are reloaded",
            field="vllm_mode",
        )


def _number_of(name: str) -> int:
    """Returns 3 for "model.layers.3.mlp"."""
    return next(int(part) for part in reversed(name.split(".")) if part.isdigit())
