"""A package `vllm` as trl's colocate mode uses it, which generates with transformers and records routes.

Written from vLLM 0.29: routes are [tokens − 1, layers, top_k], zeros in dense layers; weights are reloaded under their
names in the model's files.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file


class LLM:
    """One engine of one process.

    Attributes:
        up_first: Its kernels store the rows of up_proj before those of gate_proj, as FlashInfer's do. load_weights() of
            the running model ignores that, as vLLM's does.
        ignored: Name of a weight that is not reloaded, as those of gpt-oss in vLLM, which only logs it.
    """

    up_first = False
    ignored = ""

    def __init__(self, *, model: str, enable_return_routed_experts: bool = False, seed: int, **_: Any) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model).eval().requires_grad_(False)
        self.returns_routes = enable_return_routed_experts
        self.random = torch.Generator().manual_seed(seed)
        self.syncs = 0
        self.path = model
        runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=self))
        config = types.SimpleNamespace(max_model_len=512)
        executor = types.SimpleNamespace(driver_worker=runner)
        self.llm_engine = types.SimpleNamespace(model_executor=executor, model_config=config)

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        own = dict(self.model.named_parameters())
        for name, value in weights:
            swapped = self.up_first and name.endswith("experts.gate_up_proj")
            own[name].copy_(value.roll(value.shape[1] // 2, 1) if swapped else value)  # of the whole shape

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        weights = dict(kwargs["weights_iterator"])
        assert weights.keys() == load_file(f"{self.path}/model.safetensors").keys()
        whole = type(self.model).from_pretrained(None, config=self.model.config, state_dict=weights).state_dict()
        self.model.load_state_dict(whole | {name: of for name, of in self.named_parameters() if name == self.ignored})

    def named_parameters(self) -> Any:
        """Like vLLM, keeps a parameter without elements where a kernel has its weight."""
        yield from self.model.named_parameters()
        yield "packed.weight", torch.nn.Parameter(torch.empty(0))

    def reset_prefix_cache(self) -> None:
        self.syncs += 1

    def generate(self, prompts: list[dict[str, Any]], *, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        return [self._completed(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def _completed(self, prompt: list[int], sampling: Any) -> Any:
        ids, logprobs = list(prompt), []
        while len(ids) - len(prompt) < sampling.max_tokens and (len(ids) == len(prompt) or ids[-1] != 1):
            scores = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=self.random)))
            logprobs.append({ids[-1]: types.SimpleNamespace(logprob=float(scores[ids[-1]]), rank=1)})
        routes = self.routes_of(ids[:-1]) if self.returns_routes else None
        completion = types.SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=logprobs, routed_experts=routes)
        return types.SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])

    def routes_of(self, ids: list[int]) -> Any:
        config = self.model.config
        routes = np.zeros((len(ids), config.num_hidden_layers, config.num_experts_per_tok), np.int16)
        moe = [i for i in range(config.num_hidden_layers) if i not in config.mlp_only_layers]
        for layer, scores in zip(
            moe, self.model(torch.tensor([ids]), output_router_logits=True).router_logits, strict=True
        ):
            routes[:, layer] = scores.topk(config.num_experts_per_tok, -1).indices.numpy()
        return routes


def install() -> None:
    """Makes `import vllm` find this. Call it before trl is imported, in a process of its own."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.29.0", "LLM": LLM, "RequestOutput": None, "SamplingParams": types.SimpleNamespace},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: False)},
        "vllm.sampling_params": {"StructuredOutputsParams": None},
        "vllm.utils.network_utils": {"get_ip": None},  # of trl's client for servers, as the next two
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": None},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": None},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(members)
        sys.modules[name] = module
