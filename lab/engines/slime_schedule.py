"""slime's own calls of the schedule under foremoe.slime, on four gloo ranks.

Usage: slime_schedule.py, with a checkout of slime on PYTHONPATH. slime's own: MegatronTrainRayActor.train_actor() with
its stages of replay, fill_routing_replay(), forward_only(), train(), train_one_step(), RoutingReplay, its functions for
routers, and its process groups that sleep. Replaced: packages that are not installed (below), the model (a few MoE
layers without attention), batch, loss, optimizer and pinned memory. Where slime patches Megatron-LM's top-k, the replay
hook of megatron-core calls the same functions of slime. gloo counts as a backend of an accelerator, so that WORLD ends
too in a sleep, and slime's wrapper gets the names that torch 2.15 calls.
"""

import contextlib
import datetime
import os
import types

import schedule_on_cpu
import torch
import torch.distributed as dist
from schedule_on_cpu import RANKS, Descent

STAND_INS = ("megatron.training", "sglang", "torch_memory_saver")
EXPERTS, TOP_K, TOKENS, MICRO_STEPS, ROLLOUTS = 8, 2, 100, [3, 2], 3


class Arguments(types.SimpleNamespace):
    """The trainer's arguments. Those that are not given are None."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)


def nothing(*_, **__):
    pass


class Batches:
    """The trainer's iterator over micro-batches: sequences of 6 to 19 tokens, with routes of all but the last token."""

    def __init__(self, seed, layers):
        random = torch.Generator().manual_seed(seed)
        chances = torch.rand(layers, EXPERTS, generator=torch.Generator().manual_seed(3)) ** 3 + 0.02
        self.batches, self.at = [], 0
        for _ in range(sum(MICRO_STEPS)):
            lengths = torch.randint(6, 20, (3,), generator=random).tolist()
            routes = [
                torch.stack([torch.multinomial(of.expand(n - 1, -1), TOP_K, generator=random) for of in chances], 1)
                for n in lengths
            ]
            tokens = [torch.randint(1, TOKENS, (n,), generator=random) for n in lengths]
            self.batches.append({"tokens": tokens, "rollout_routed_experts": [of.int() for of in routes]})

    def reset(self):
        self.at = 0

    def get_next(self, keys):
        self.at += 1
        return self.batches[self.at - 1]


class Slime:
    """Three rollouts of two training steps. Each computes log-probabilities of a reference and of the actor before."""

    name = "slime"
    sleeps = False

    def __init__(self):
        import megatron_training as megatron

        self.arguments = Arguments(
            num_experts=EXPERTS, use_routing_replay=True, use_rollout_routing_replay=True, offload_train=self.sleeps,
            seq_length=1, micro_batch_size=1, decoder_seq_length=1, data_pad_size_multiplier=8, qkv_format="thd",
            compute_advantages_and_returns=True, loss_type="policy_loss", kl_coef=0, global_batch_size=1,
            check_for_nan_in_loss_and_grad=True,
        )  # fmt: skip
        os.environ |= {"ENABLE_ROUTING_REPLAY": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        if self.sleeps:
            self.wrap_groups()
        megatron.begin_groups(RANKS)
        self.actor = self.make_actor()
        options = {"num_layers": megatron.LAYERS, "moe_enable_routing_replay": False}
        case = megatron.Case(ddp={}, config=options)
        self.net = megatron.make_net(config := megatron.make_config(case))
        self.route_with(self.top_k_function())
        self.init_arguments = (self.arguments,)
        self.optimizer, self.losses, self.routed, self.rows = Descent(self.net), [], [], None
        for layer in self.net.moe:
            layer.router.register_forward_hook(lambda of, given, result: self.routed.append(result[1].sum(0).tolist()))
        ddp = megatron.wrap(case, config, self.net)
        ddp.role = "actor"
        table = torch.randn(TOKENS, megatron.HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        forward = type(self.net).forward
        type(self.net).forward = lambda net, input_ids=None, **_: forward(net, table[input_ids].unsqueeze(1))
        vars(self.actor).update(
            args=self.arguments, model=[ddp], optimizer=self.optimizer, role="actor", rollout_data_postprocess=None,
            opt_param_scheduler=types.SimpleNamespace(step=nothing, get_lr=nothing), _active_model_tag="actor",
            weights_backuper=types.SimpleNamespace(backup_tags=["actor", "ref"], backup=nothing, restore=nothing),
            prof=types.SimpleNamespace(step=nothing), weight_updater=types.SimpleNamespace(pop_metrics=nothing),
        )  # fmt: skip

    def make_actor(self):
        import slime.backends.megatron_utils.actor as actor
        import slime.backends.megatron_utils.model as model
        from slime.utils import accelerator

        accelerator.current_device = lambda: torch.device("cpu")
        model.get_args = lambda: self.arguments
        model.get_batch, model.loss_function = self.batch, self.loss
        model.train_metric_utils.reduce_train_step_metrics = lambda *_, **__: {}
        model._with_rollout_top_p_token_keys = lambda args, keys: keys
        model.get_rollout_top_p_logprob_kwargs = lambda *_: {}
        model.logging_utils.log = nothing
        actor.train_metric_utils.log_rollout_data = actor.train_metric_utils.log_perf_data = nothing
        self.replace_in(actor, model)
        return object.__new__(actor.MegatronTrainRayActor)

    def replace_in(self, actor, model):
        """Replaces names that both trainers' modules have."""
        actor.get_data_iterator = lambda *given: self.data
        actor.get_log_probs_and_entropy = self.log_probabilities
        actor.compute_advantages_and_returns = nothing
        actor.timer = actor.inverse_timer = lambda name: contextlib.nullcontext()

    def top_k_function(self):
        """Returns the trainer's wrapper of a router's top-k, and registers the routers."""
        from slime.utils import routing_replay

        routing_replay.torch = unpinned()
        for layer in self.net.moe:
            routing_replay.register_routing_replay(layer.router)
        return routing_replay.get_routing_replay_compute_topk

    def route_with(self, wrap):
        import megatron.core.transformer.moe.router as router

        class Replay:
            """megatron-core's hook in the top-k of a router, which calls the trainer's function."""

            def get_replay_topk(self, scores, topk, num_groups, group_topk, compute):
                own = wrap(lambda scores, topk, num_groups=None, group_topk=None: compute(scores, topk, None, None))
                return own(scores, topk)

        choose = router.topk_routing_with_score_function
        router.topk_routing_with_score_function = lambda *a, **k: choose(*a, **k | {"router_replay": Replay()})

    def wrap_groups(self):
        import slime.utils.reloadable_process_group as groups
        from slime.utils.distributed_utils import init_gloo_group

        groups._uses_accelerator_backend = lambda backend: True
        groups.available_memory = groups.print_memory = lambda *_: {"free_GB": 99}
        wrap_names_of_torch(groups)
        groups.monkey_patch_torch_dist()
        groups.register_default_process_group(datetime.timedelta(minutes=2))
        init_gloo_group()
        self.groups = groups

    def batch(self, iterator, keys, *_, **__):
        tokens = torch.cat((iterator[0] if isinstance(iterator, list) else iterator).get_next(keys)["tokens"])
        tokens = torch.cat([tokens, tokens.new_zeros(-len(tokens) % 8)])
        names = ("unconcat_tokens", "packed_seq_params", "full_loss_masks", "multimodal_train_inputs",
                 "total_lengths", "response_lengths")  # fmt: skip
        return dict.fromkeys(names) | {"tokens": tokens}

    def loss(self, args, batch, count, size=None, out=None, **_):
        loss = (size if out is None else out).square().mean()
        self.losses.append(float(loss.detach()))
        return loss, torch.tensor(1), {"keys": ["loss"], "values": torch.zeros(2)}

    def log_probabilities(self, out, non_loss_data=False, **_):
        self.losses.append(float(out.square().mean()))
        found = {"log_probs": [out]}
        return found if non_loss_data else (out.mean(), found)

    def train(self):
        for rollout in range(ROLLOUTS):
            self.data = [Batches(100 * rollout + dist.get_rank(), len(self.net.moe))]
            data = {"rollout_routed_experts": 1, "num_microbatches": MICRO_STEPS, "global_batch_sizes": [1, 1]}
            self.train_actor(rollout, data)
            if self.sleeps:
                self.groups.destroy_process_groups()
                self.groups.reload_process_groups()
        assert self.is_expected(self.routed), "the routers did not replay the routes"
        return self.losses, self.optimizer.gradients

    def train_actor(self, rollout, data):
        self.actor.train_actor(rollout, data)

    def filler(self, rows):
        """Returns routes of padding, [rows, layers, top_k], as the trainer fills them."""
        layers = len(self.net.moe)
        return (torch.arange(rows * layers * TOP_K) % EXPERTS).reshape(rows, layers, TOP_K)

    def is_expected(self, rows):
        """Whether rows, [call of a router][expert], are those of the routes, except in the reference's calls."""
        found = torch.tensor(rows).reshape(ROLLOUTS, 3, sum(MICRO_STEPS), len(self.net.moe), EXPERTS)[:, 1:]
        for rollout in range(ROLLOUTS):
            for m, batch in enumerate(Batches(100 * rollout + dist.get_rank(), len(self.net.moe)).batches):
                routes = torch.cat([torch.cat([of, self.filler(1)]) for of in batch["rollout_routed_experts"]])
                routes = torch.cat([routes, self.filler(-len(routes) % 8)])
                chosen = torch.zeros(*routes.shape[:2], EXPERTS, dtype=torch.int64).scatter_(2, routes.long(), 1).sum(0)
                if not (found[rollout, :, m] == chosen).all():
                    return False
        return True


def unpinned():
    """Returns torch without pinned memory, which needs CUDA."""
    found = types.SimpleNamespace(**vars(torch))
    found.empty_like = lambda tensor, device=None, pin_memory=None: torch.empty_like(tensor)
    return found


def wrap_names_of_torch(groups):
    """Adds methods of process groups that torch 2.15 calls, and that the trainer's wrapper does not have."""
    for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):

        def call(self, *given, of=name, **named):
            return self._fwd(of, *given, **named)

        setattr(groups.ReloadableProcessGroup, name, call)


class ColocatedSlime(Slime):
    name = "slime --colocate"
    sleeps = True


if __name__ == "__main__":
    schedule_on_cpu.stand_in(*STAND_INS)
    for trainer in (Slime, ColocatedSlime):
        schedule_on_cpu.run(trainer, "foremoe.slime")
