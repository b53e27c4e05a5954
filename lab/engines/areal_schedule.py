"""AReaL's MegatronEngine under foremoe.areal, on four gloo ranks. AReaL replays no routes: shadow mode only.

AReaL's own: optimizer_zero_grad(), forward_backward_batch() and optimizer_step(), and its micro-batches. Replaced: the
engine's construction, the packed call of the model, the loss, and the packages named below, which are hardly used here.
"""

import logging
import sys
import types

import torch
from step_on_cpu import TOKENS, VOCABULARY, Stubs, run, wrapped

Stubs(
    "mbridge", "megatron.bridge", "areal.api.alloc_mode", "areal.infra", "areal.models", "areal.utils.seqpack",
    "einops", "uvloop",
)  # fmt: skip
sys.modules["areal.utils.logging"] = logging
from areal.engine import megatron_engine  # noqa: E402
from areal.utils.data import MicroBatchList  # noqa: E402

MICRO_BATCHES = 3


def prepare(net, optimizer, losses):
    optimizer.param_groups = [{"lr": 1}]
    megatron_engine.packed_context_parallel_forward = lambda model, batch, **_: model(input_ids=batch["input_ids"])
    megatron_engine.unpad_logits = lambda logits, **_: logits
    engine = megatron_engine.MegatronEngine.__new__(megatron_engine.MegatronEngine)
    engine.model, engine.optimizer, engine.is_offload = [wrapped(net)], optimizer, False
    engine.config = types.SimpleNamespace(is_critic=False)
    engine.enable_tree_training = engine.is_vision_model = False

    def loss_of(logits, batch):
        logprobs = logits.log_softmax(-1).gather(2, batch["input_ids"].unsqueeze(2))
        losses.append(float((loss := logprobs.square().mean()).detach()))
        return loss

    def step(number, rows):
        random = torch.Generator().manual_seed(100 * torch.distributed.get_rank() + number)
        batches = [
            {
                "input_ids": torch.randint(VOCABULARY, (1, TOKENS), generator=random),
                "cu_seqlens": torch.tensor([0, TOKENS]),
            }
            for _ in range(MICRO_BATCHES)
        ]
        each = [TOKENS] * MICRO_BATCHES
        micro_batches = MicroBatchList(
            data={}, mb_spec=None, mbs=batches, group_lens=each, padded_mbs=batches, padded_to_lengths=each,
            padding_lengths=[0] * MICRO_BATCHES, old_cu_seqlens_list=[None] * MICRO_BATCHES,
        )  # fmt: skip
        rows.clear()
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(micro_batches, loss_of)
        engine.optimizer_step()

    return step


if __name__ == "__main__":
    run("AReaL", prepare, "foremoe.areal", 0, moe_enable_routing_replay=False)
