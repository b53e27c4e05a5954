"""Tiny model, tokenizer and TRL trainer for the tests of foremoe.trl."""

from __future__ import annotations

from typing import Any

import torch
import transformers
import trl

RANKS, STEPS, WORDS = 2, 5, 64
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def make_model(seed: int = 0, **sizes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | sizes))


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<bos>", *(f"w{i}" for i in range(WORDS - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )


def make_arguments(folder: str, **changed: Any) -> Any:
    arguments = {
        "output_dir": folder, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_generations": 4, "max_completion_length": 12, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "bf16": False, "router_aux_loss_coef": 0.0,
    }  # fmt: skip
    return trl.GRPOConfig(**arguments | changed)


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def make_trainer(kind: Any, folder: str, model: Any = None, parallel: Any = None, **changed: Any) -> Any:
    from datasets import Dataset

    prompts = [" ".join(f"w{(7 * i + j) % 61}" for j in range(4 + i % 5)) for i in range(64)]
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    return kind(
        model=make_model() if model is None else model, reward_funcs=even, args=make_arguments(folder, **changed),
        train_dataset=data, eval_dataset=data.select(range(8)), processing_class=make_tokenizer(), **parallel or {},
    )  # fmt: skip
