#!/usr/bin/env bash
# Launch file of a GRPO job in verl on two nodes of eight GPUs, for `python -m foremoe.supported`.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
NODES=2
OPTIONS=(
  algorithm.adv_estimator=grpo
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
  actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
  trainer.nnodes=$NODES
  trainer.n_gpus_per_node=8
)
python3 -m verl.trainer.main_ppo model_engine=megatron "${OPTIONS[@]}" "$@"
