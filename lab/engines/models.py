"""A small Qwen3-MoE with random weights, and the experts that transformers' routers choose for the same tokens."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from foremoe.recorders import Recorder

LAYERS, EXPERTS, TOP_K, TOKENS = 4, 16, 4, 512


def make_model(folder, dense_layers=()):
    """Writes a checkpoint into folder. dense_layers: numbers of layers without experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=TOKENS,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        mlp_only_layers=list(dense_layers),
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


class Comparison:
    """Records sequences, and compares the experts of each row with transformers' routers."""

    def __init__(self, folder, dense_layers=(), dtype="float32"):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        layers = [layer for layer in range(LAYERS) if layer not in dense_layers]
        self.recorder = Recorder(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, moe_layers=layers)
        self.sequences = self.rows = self.differing = 0

    def add(self, segments):
        """segments: of one sequence. The last token was not processed, so that it has no route."""
        recorded = self.recorder.add(self.sequences, segments)
        self.sequences += 1
        ids = torch.tensor(np.array([segments[-1].token_ids]))  # a turn's prompt contains the earlier turns
        with torch.no_grad():
            scores = self.model(ids, output_router_logits=True).router_logits
        expected = np.stack([np.sort(of.topk(TOP_K, -1).indices.numpy(), -1) for of in scores], 1)
        assert (recorded[-1] == np.iinfo(recorded.dtype).max).all()
        differs = (np.sort(recorded[:-1], -1) != expected[:-1]).any(-1)
        self.rows += differs.size
        self.differing += int(differs.sum())

    def report(self, what, *, allowed=0.0):
        """Prints the result. allowed: largest share of rows that may differ."""
        print(f"{what}: {self.differing:,} of {self.rows:,} rows differ from transformers'", flush=True)
        assert self.rows > 0 and self.differing <= allowed * self.rows


def prompts(lengths=(5, 33, 64, 17), seed=0):
    """Returns lists of token ids."""
    random = np.random.default_rng(seed)
    return [random.integers(3, TOKENS, length).tolist() for length in lengths]


def converse(ask):
    """Returns the segments of three turns, each of which returns only new rows.

    Args:
        ask: Called with the ids so far, the number of rows held, and the turn; returns segments and generated ids.
    """
    (ids, *questions), segments, held = prompts((30, 7, 7), seed=1), [], 0
    for turn, question in enumerate([*questions, []]):
        new, generated = ask(ids, held, turn)
        segments += new
        held = len(ids) + len(generated) - 1
        ids = ids + generated + question
    return segments
