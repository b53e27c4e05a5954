"""NeMo-RL's own training step with router replay, under foremoe.nemo_rl: nemo_rl_schedule.py CHECKOUT.

From the checkout: the iterator over packed sequences, the forward step, megatron_forward_backward, router replay with
its fallback for tokens without a route, and begin_train_step, train_microbatch and finish_train_step of its worker,
with two groups of micro-batches before each of two optimizer steps. Megatron-LM is the tree on PYTHONPATH.

Stand-ins: packages that are not installed (below), among them megatron.bridge; the model (three MoE layers), its loss,
the optimizer and the learning rate; functions that agree on a norm across the single model-parallel rank.
"""

import sys
import types

import torch
from schedule_on_cpu import Descent, routes, run, stand_in

STEPS, GROUPS, SEQUENCES, LONGEST, TOKENS, EXPERTS = 2, 2, 6, 20, 100, 8
CFG = {
    "sequence_packing": {"enabled": True}, "dynamic_batching": {"enabled": False},
    "make_sequence_length_divisible_by": 4, "train_global_batch_size": 1, "train_micro_batch_size": 1,
    "megatron_cfg": {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
        "sequence_parallel": False, "empty_unused_memory_level": 0, "moe_per_layer_logging": False,
        "distributed_data_parallel_config": {"overlap_grad_reduce": True},
    },
}  # fmt: skip


class NemoRL:
    name = "NeMo-RL"
    missing = 0  # tokens of each sequence without a route

    def __init__(self):
        import megatron_training as megatron
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict
        from nemo_rl.models.policy.workers import megatron_policy_worker as module

        self.rank, self.layers = torch.distributed.get_rank(), megatron.LAYERS
        BatchedDataDict.to = lambda self, device: self
        torch.cuda.get_device_name = lambda: "cpu"
        module.get_moe_metrics = module.broadcast_loss_metrics_from_last_stage = lambda of=None, **_: of
        module.reduce_max_stat_across_model_parallel_group = lambda of, **_: of

        class Loss(module.LossPostProcessor):
            def __call__(self, data_dict, **_):
                return lambda y: ((of := y.square().mean() * self.num_microbatches), {"loss": of.detach().clone()})

        module.LossPostProcessor = Loss
        megatron.begin_groups(4)
        case = megatron.Case(ddp={"overlap_grad_reduce": True}, config={"num_layers": self.layers})
        self.net = megatron.make_net(config := megatron.make_config(case))
        for i, layer in enumerate(self.net.moe):
            layer.set_layer_number(i + 1)
        table = torch.randn(TOKENS, megatron.HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        own = type(self.net).forward
        type(self.net).forward = lambda net, input_ids, **_: own(net, table[input_ids[0]].unsqueeze(1)).transpose(0, 1)
        worker = self.worker = module.MegatronPolicyWorkerImpl.__new__(module.MegatronPolicyWorkerImpl)
        worker.model = megatron.wrap(case, config, self.net)
        config.no_sync_func = worker.model.no_sync
        config.finalize_model_grads_func = lambda models, *_: [model.finish_grad_sync() for model in models]
        worker.optimizer = Descent(self.net)
        worker.scheduler = types.SimpleNamespace(step=lambda **_: None, get_lr=lambda _: 0, get_wd=lambda: 0)
        worker.mcore_state = types.SimpleNamespace(straggler_timer=None)
        worker.cfg, worker.rank, worker.dtype = CFG, self.rank, torch.float64
        worker.sampling_params = worker.draft_model = None
        worker._router_replay_enabled, worker.defer_fp32_logits = True, False
        self.dict, self.rows = BatchedDataDict, []

    def group(self, seed):
        """One data-parallel slice: sequences with routes, packed by NeMo-RL. Notes the rows of its routers.

        Lengths are equal on all ranks, so that they have as many micro-batches, as NeMo-RL's driver provides for.
        """
        random = torch.Generator().manual_seed(seed)
        lengths = torch.randint(6, LONGEST, (SEQUENCES,), generator=torch.Generator().manual_seed(seed // 10))
        of_tokens = routes(self.layers, SEQUENCES * LONGEST, seed).view(SEQUENCES, LONGEST, self.layers, 2)
        for sequence, length in enumerate(lengths):
            of_tokens[sequence, length - self.missing : length] = -1
        data = self.dict(
            input_ids=torch.randint(1, TOKENS, (SEQUENCES, LONGEST), generator=random), input_lengths=lengths,
            sample_mask=torch.ones(SEQUENCES), token_mask=torch.ones(SEQUENCES, LONGEST), routed_experts=of_tokens,
        )  # fmt: skip
        [shard], _ = data.shard_by_batch_size(1, batch_size=SEQUENCES, sequence_packing_args={
            "max_tokens_per_microbatch": 40, "input_key": "input_ids", "input_lengths_key": "input_lengths",
            "algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 4,
        })  # fmt: skip
        for first, end in shard.micro_batch_indices[0]:
            counts = torch.zeros(self.layers, EXPERTS, dtype=torch.int64)
            for sequence in range(first, end):
                length = int(shard["input_lengths"][sequence])
                padding = torch.arange(2).expand(-length % 4, self.layers, 2)
                for i, of in enumerate(torch.cat([shard["routed_experts"][sequence, :length], padding]).unbind(1)):
                    counts[i] += torch.bincount(of[of >= 0].flatten(), minlength=EXPERTS)
            self.rows += counts.tolist()
        return shard

    def train(self):
        losses = []
        for step in range(STEPS):
            self.worker.begin_train_step(loss_fn=None)
            for group in range(GROUPS):
                self.worker.train_microbatch(self.group(100 * step + 10 * group + self.rank))
            losses += self.worker._train_step_state["mb_losses"]
            self.worker.finish_train_step()
        if self.missing:
            self.rows = None
        return losses, self.worker.optimizer.gradients


class WithMissingRoutes(NemoRL):
    name, missing = "NeMo-RL, tokens without routes", 2


if __name__ == "__main__":
    stand_in(
        "megatron.bridge", "megatron.training", "matplotlib", "mlflow", "pynvml", "swanlab", "tensordict",
        "transfer_queue", "vllm", "zmq",
    )  # fmt: skip
    sys.path.insert(0, sys.argv[1])
    import nemo_rl.models.policy.workers.megatron_policy_worker  # noqa: F401, once, and not by each rank

    for trainer in (NemoRL, WithMissingRoutes):
        run(trainer, "foremoe.nemo_rl")
