"""foremoe.trl rejects unsupported arguments, options, models and versions by name before training."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from grpo import WORDS, even, make_arguments, make_model, make_trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import foremoe
import foremoe.trl


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_config", object()),
        ("quantization_config", object()),
        ("tools", [even]),
        ("environment_factory", object),
        ("rollout_func", even),
        ("optimizers", (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), None)),
        ("processing_class", object()),
        ("cluster", "h10"),
        ("model_shape", "Qwen3-30B"),
        ("model_shape", {"name": "x"}),
    ],
)
def test_unsupported_arguments_are_rejected_by_name(tmp_path: Any, name: str, value: Any) -> None:
    with pytest.raises(foremoe.InputError, match=f"^{name}: ") as error:
        foremoe.trl.GRPOTrainer(make_model(), even, make_arguments(str(tmp_path)), **{name: value})
    assert error.value.field == name


@pytest.mark.parametrize(
    "name",
    [
        "use_transformers_continuous_batching",
        "torch_compile",
        "use_liger_kernel",
        "auto_find_batch_size",
        "sync_ref_model",
        "fp16",
        "fp16_full_eval",
        "bf16_full_eval",
        "deepspeed",
        "fsdp",
    ],
)
def test_unsupported_options_are_rejected_by_name(tmp_path: Any, name: str) -> None:
    arguments = make_arguments(str(tmp_path))
    setattr(arguments, name, True)
    with pytest.raises(foremoe.InputError, match=f"^{name}: ") as error:
        foremoe.trl.GRPOTrainer(make_model(), even, args=arguments)
    assert error.value.field == name


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("peft_config", "it has adapters"),
        ("hf_quantizer", "it is quantised"),
        ("is_distributed_loading_by_transformers", "it is sharded already"),
    ],
)
def test_models_that_cannot_be_spread_are_rejected(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, attribute: str, words: str
) -> None:
    model = make_model()
    monkeypatch.setattr(type(model), attribute, True, raising=False)
    with pytest.raises(foremoe.InputError, match=words):
        make_trainer(foremoe.trl.GRPOTrainer, str(tmp_path), model)


def test_models_that_other_code_has_sharded_are_rejected(tmp_path: Any) -> None:
    """trl#7297 shards at load time as transformers does, and does not set its attribute."""
    model = make_model()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        experts = model.model.layers[1].mlp.experts
        experts.down_proj = torch.nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))
        with pytest.raises(foremoe.InputError, match=r"sharded already \(model\.layers\.1\.mlp\.experts\.down_proj;"):
            make_trainer(foremoe.trl.GRPOTrainer, str(tmp_path), model)
    finally:
        dist.destroy_process_group()


def test_models_without_experts_and_single_processes_are_rejected(tmp_path: Any) -> None:
    dense_model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=WORDS
        )
    )
    with pytest.raises(foremoe.InputError, match="no experts"):
        make_trainer(foremoe.trl.GRPOTrainer, str(tmp_path), dense_model)
    with pytest.raises(foremoe.InputError, match="distributed_type: NO; launch one process per rank"):
        make_trainer(foremoe.trl.GRPOTrainer, str(tmp_path))


@pytest.mark.parametrize("version", ["1.15.2", "2.0.0"])
def test_other_versions_of_trl_are_rejected(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(ImportError, match=f"needs trl 1.16 or newer, below 2, not {version}"):
        importlib.reload(foremoe.trl)


def test_a_trl_without_an_overridden_method_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trl.GRPOTrainer, "_generate_single_turn")
    with pytest.raises(ImportError, match=r"needs GRPOTrainer\._generate_single_turn"):
        importlib.reload(foremoe.trl)


def test_a_server_of_vllm_is_refused(tmp_path: Any) -> None:
    arguments = make_arguments(str(tmp_path), vllm_mode="server")
    arguments.use_vllm = True
    with pytest.raises(foremoe.InputError, match=r"^vllm_mode: server is not supported, .* expected colocate"):
        foremoe.trl.GRPOTrainer(make_model(), even, args=arguments)
