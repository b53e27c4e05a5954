"""ROLL's MegatronTrainStrategy under foremoe.roll, on four gloo ranks, with R3.

ROLL's own: initialize(), forward_step() (old log-probabilities), train_step(), inner_forward_step(), its functions that
give routes to the routers, and DataProto. Replaced: the model's provider, tokenizer, optimizer and losses, and the
packages in STUBS, which are imported but hardly used here.
"""

import types

import torch
from step_on_cpu import TOKENS, VOCABULARY, Stubs, routes, run

Stubs("mcore_adapter", "transfer_queue", "wandb", "roll.utils.telemetry", "pybase64")
from roll.distributed.scheduler.protocol import DataProto  # noqa: E402
from roll.distributed.strategy import megatron_strategy  # noqa: E402

MICRO_BATCHES, SEQUENCES = 3, 2


class Values(types.SimpleNamespace):
    """ROLL's arguments. Those that are not given are None."""

    def __getattr__(self, name):
        return None


class Models(list):
    """ROLL's VirtualModels: a model's chunks."""

    def __init__(self, net):
        super().__init__([net])
        self.config = net.config
        net.get_batch_on_this_cp_rank = lambda batch, dim3_keys: batch

    models = property(lambda self: list(self), lambda self, chunks: self.__setitem__(slice(None), chunks))

    def get_models(self):
        return list(self)

    def train(self):
        self[0].train()

    def eval(self):
        self[0].eval()


def prepare(net, optimizer, losses):
    def nothing(*_, **__): ...

    megatron_strategy.current_platform.empty_cache = nothing
    optimizer.reload_states = optimizer.offload_states = nothing
    megatron_strategy.default_tokenizer_provider = megatron_strategy.default_processor_provider = nothing
    megatron_strategy.get_megatron_optimizer = lambda *_: optimizer
    megatron_strategy.bind_megatron_offload_states_func = nothing
    megatron_strategy.get_megatron_lr_scheduler = lambda *_, **__: Values(step=nothing)
    strategy = megatron_strategy.MegatronTrainStrategy.__new__(megatron_strategy.MegatronTrainStrategy)
    training = {"max_steps": 10, "per_device_train_batch_size": SEQUENCES, "gradient_accumulation_steps": MICRO_BATCHES}
    strategy.worker = Values(pipeline_config=Values(sequence_length=TOKENS), rank_info=Values())
    strategy.worker_config = Values(
        name="actor_train", training_args=Values(**training), use_dynamic_batching_in_train=False,
        apply_loss_scale=False, use_dynamic_batching_in_infer=False, use_sequence_packing=False,
    )  # fmt: skip
    strategy.megatron_train_args = Values(
        **training, accumulate_allreduce_grads_in_fp32=False, overlap_grad_reduce=True, use_distributed_optimizer=False,
        check_for_nan_in_loss_and_grad=False, ddp_bucket_size=300, fp16=False, bf16=False, optimizer="adam",
        learning_rate=1, lr_scheduler_kwargs={}, weight_decay=0, adam_beta1=0, adam_beta2=0, adam_epsilon=0,
        max_grad_norm=0, delay_grad_reduce=False, compile_warmup=False,
    )  # fmt: skip
    strategy.use_sequence_packing, strategy.enable_router_replay, strategy.router_replay_mode = False, True, "R3"
    strategy.initialize(lambda **_: Models(net))

    def loss_of(data, logits):
        logprobs = logits.log_softmax(-1).gather(2, data.batch["input_ids"].unsqueeze(2))
        losses.append(float((loss := logprobs.square().mean()).detach()))
        return loss, {"logprobs": logprobs.detach().clone()}

    def step(number, rows):
        size, layers = MICRO_BATCHES * SEQUENCES, len(net.moe)
        seed = 100 * torch.distributed.get_rank() + number
        ids = torch.randint(VOCABULARY, (size, TOKENS), generator=torch.Generator().manual_seed(seed))
        of_sequences = torch.stack([routes(1000 * seed + i, TOKENS, layers) for i in range(size)])
        batch = DataProto.from_dict(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "routed_experts": of_sequences.to(torch.uint8)},
            meta_info={"loss_mask_keys": [], "micro_batch_size": SEQUENCES},
        )
        with torch.no_grad():
            strategy.forward_step(batch, loss_of)
        rows.clear()
        strategy.train_step(batch, loss_of)

    return step


if __name__ == "__main__":
    run("ROLL", prepare, "foremoe.roll", 3, moe_layer_freq=1)
