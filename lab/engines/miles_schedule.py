"""miles' own calls of the schedule under foremoe.miles, on four gloo ranks.

Usage: miles_schedule.py, with a checkout of miles on PYTHONPATH. miles' own: MegatronTrainRayActor.train_actor() with
its stages of replay, fill_replay_data() with padding of −1, forward_only(), train(), train_one_step(), the manager of
replays, and its process groups that sleep. Replaced: as in slime_schedule.py, and packages that are not installed
(below). Where miles' fork of Megatron-LM registers routers and wraps the top-k, this program does.
"""

import schedule_on_cpu
import slime_schedule
import torch
from slime_schedule import TOP_K, nothing

STAND_INS = ("megatron.bridge", "megatron.training", "mooncake", "polars", "sglang", "torch_memory_saver")


class Miles(slime_schedule.Slime):
    name = "miles"

    def make_actor(self):
        import miles.backends.megatron_utils.actor as actor
        import miles.backends.megatron_utils.model as model
        from miles.backends.megatron_utils import parallel
        from miles.backends.megatron_utils.replay_utils import register_replay_list_moe
        from miles.backends.training_utils.parallel import set_parallel_state
        from miles.utils import replay_base
        from miles.utils.ft_utils.process_group_utils import GroupInfo

        model.get_args = parallel.get_args = lambda: self.arguments
        set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
        replay_base.torch = slime_schedule.unpinned()
        self.manager = replay_base.routing_replay_manager
        self.manager.enabled, self.manager.register_replay_list_func = True, register_replay_list_moe
        model.get_batch, model.loss_function = self.batch, self.loss
        model.get_packed_seq_params = model.aggregate_train_losses = model.log_train_step = nothing
        model.finalize_model_grads_with_empty_cache = model.finalize_model_grads
        model.DumperMegatronUtil = Dumper
        actor.log_rollout_data = actor.log_perf_data = actor.log_train_advantage_computation_event = nothing
        self.replace_in(actor, model)
        actor.get_data_iterator = lambda *_: (self.data, slime_schedule.MICRO_STEPS)
        self.arguments.use_rollout_logprobs = False
        made = object.__new__(actor.MegatronTrainRayActor)
        made.with_ref, made._ft_test_action_executor = True, None
        made._heartbeat = type("Heartbeat", (), {"bump": nothing})()
        return made

    def top_k_function(self):
        for layer in self.net.moe:
            self.manager.register_to_module(layer.router, "routing_replay")
        return lambda compute: self.manager.get_topk_fn(compute, return_probs=True)

    def wrap_groups(self):
        import miles.utils.reloadable_process_group as groups

        groups.print_memory = nothing
        slime_schedule.wrap_names_of_torch(groups)
        groups.monkey_patch_torch_dist()
        self.groups = groups

    def train_actor(self, rollout, data):
        self.actor.train_actor(rollout, data, witness_info=None, attempt=0)

    def filler(self, rows):
        return torch.arange(TOP_K).expand(rows, len(self.net.moe), TOP_K)


class Dumper:
    """miles' writer of activations, switched off."""

    def __init__(self, *_, **__): ...

    def wrap_forward_step(self, forward_step):
        return forward_step

    finalize = nothing


class ColocatedMiles(Miles):
    name = "miles --colocate"
    sleeps = True


if __name__ == "__main__":
    schedule_on_cpu.stand_in(*STAND_INS)
    for trainer in (Miles, ColocatedMiles):
        schedule_on_cpu.run(trainer, "foremoe.miles")
