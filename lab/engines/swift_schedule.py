"""ms-swift's train_step() under foremoe.swift, on four gloo ranks, with R3 and with R2.

ms-swift's own: MegatronGRPOTrainer's train_step(), forward_step() and compute_per_token_logps(), the patch of the
dispatcher, and its functions that give routes to the routers. Replaced: the trainer's construction, the loss, the
optimizer, and the packages in STUBS, which are imported but not used here.
"""

import types
from copy import deepcopy

import torch
from step_on_cpu import TOKENS, VOCABULARY, Stubs, routes, run, wrapped

Stubs("mcore_bridge", "einops", "dacite", "msgspec")
from megatron.core.rerun_state_machine import RerunDataIterator  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction  # noqa: E402
from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer  # noqa: E402
from swift.megatron.utils import apply_router_replay_patch  # noqa: E402
from swift.rl_core.data import GRPOBatch  # noqa: E402

LENGTHS, MICRO_BATCHES = [TOKENS - 9, 9], 3
ARGUMENTS = types.SimpleNamespace(
    router_replay_mode="R3", num_microbatches=MICRO_BATCHES, seq_length=TOKENS, micro_batch_size=2,
    global_batch_size=24, padding_free=True, context_parallel_size=1, pipeline_model_parallel_size=1,
    task_type="causal_lm", report_to=[],
)  # fmt: skip


def prepare(net, optimizer, losses):
    model = wrapped(net)
    apply_router_replay_patch()
    trainer = MegatronGRPOTrainer.__new__(MegatronGRPOTrainer)
    trainer.args, trainer.enable_routing_replay, trainer.optimizer = ARGUMENTS, True, optimizer
    trainer.wrapped_models, trainer.unwrapped_models = [model], [net]
    trainer.micro_batch_size, trainer.temperature, trainer.compute_entropy = len(LENGTHS), 1.0, False
    trainer.opt_param_scheduler = types.SimpleNamespace(step=lambda increment: None)
    trainer._replace_data_iterator = lambda batches: RerunDataIterator(iter(batches))  # as rollout_mixin.py does

    def loss_func(logps, data):
        losses.append(float((loss := (logps * data["grpo_batch"].completion_mask).square().mean()).detach()))
        return loss, torch.tensor(1), {"loss": loss.detach().clone()}

    trainer.loss_func = loss_func
    recorded = ARGUMENTS.router_replay_mode == "R2"

    def micro_batch(seed):
        mask = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - of for of in LENGTHS])
        ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        positions = torch.cat([torch.arange(of) for of in LENGTHS]).unsqueeze(0)
        inputs = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "seq_lens": LENGTHS}
        if not recorded:
            inputs["routed_experts"] = routes(seed, TOKENS, len(net.moe)).unsqueeze(0)
        action = RouterReplayAction.RECORD if recorded else RouterReplayAction.REPLAY_FORWARD
        RouterReplay.set_global_router_replay_action(action)
        _, inputs["routed_experts"] = trainer.compute_per_token_logps(net, iter([deepcopy(inputs)]))
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()
        lengths = torch.tensor(LENGTHS)
        return inputs | {"grpo_batch": GRPOBatch(mask, torch.zeros(len(LENGTHS), dtype=torch.bool), lengths)}

    def step(number, rows):
        seed = 100 * torch.distributed.get_rank() + 10 * number
        batches = [micro_batch(seed + m) for m in range(MICRO_BATCHES)]
        rows.clear()
        trainer.train_step(batches)

    return step


if __name__ == "__main__":
    for ARGUMENTS.router_replay_mode in ("R3", "R2"):
        run(f"ms-swift, {ARGUMENTS.router_replay_mode}", prepare, "foremoe.swift", 2, moe_layer_freq=1)
