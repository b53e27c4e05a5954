"""slime's train() with the hooks of foremoe.slime, on four gloo ranks.

Usage: slime_hooks.py FOLDER, a checkout of slime. slime's own: train(), train_one_step(), RoutingReplay, its hook of
routers, and fill_routing_replay(). Replaced: names of megatron.training, the batch and the loss (the model is a few MoE
layers without attention), the optimizer, pinned memory, and slime's patch of Megatron-LM's top-k, for which the replay
hook of megatron-core 0.19 calls RoutingReplay.
"""

import ast
import os
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, EXPERTS, TOP_K, TOKENS, MICRO_STEPS = 4, 8, 2, 100, [3, 2]


class Arguments(types.SimpleNamespace):
    """slime's arguments. Those that are not given are None."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)


ARGUMENTS = Arguments(
    num_experts=EXPERTS, use_routing_replay=True, use_rollout_routing_replay=True, offload_train=False, seq_length=1,
    micro_batch_size=1, decoder_seq_length=1, data_pad_size_multiplier=8, pipeline_model_parallel_size=1,
)  # fmt: skip


def nothing(*_, **__):
    pass


def replace_megatron_training():
    """megatron.training is not in the package megatron-core. slime imports names of it, and calls get_args()."""
    names = {
        "": {}, ".global_vars": {"get_args": lambda: ARGUMENTS}, ".training": {"get_model": nothing},
        ".checkpointing": {"load_checkpoint": nothing, "save_checkpoint": nothing},
        ".arguments": {"core_transformer_config_from_args": nothing},
    }  # fmt: skip
    for name, members in names.items():
        module = sys.modules["megatron.training" + name] = types.ModuleType("megatron.training" + name)
        vars(module).update(members)


class Batches:
    """slime's iterator over micro-batches: sequences of 6 to 19 tokens, with routes of all but the last token."""

    def __init__(self, rank, layers):
        random = torch.Generator().manual_seed(7 + rank)
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


class Descent:
    """Plain descent, with the interface of Megatron-LM's optimizer. Keeps the gradients of all steps."""

    chained_optimizers, param_groups = [], []

    def __init__(self, net):
        self.net, self.gradients = net, []

    def zero_grad(self): ...

    def scale_loss(self, loss):
        return loss

    def prepare_grads(self):
        return False

    def get_grad_norm(self):
        return 0.0

    @torch.no_grad()
    def step(self):
        self.gradients.append([parameter.main_grad.clone() for parameter in self.net.parameters()])
        for parameter in self.net.parameters():
            parameter -= 0.05 * parameter.main_grad
        return True, 0.0, 0


class Replay:
    """megatron-core's hook in the top-k of a router, which answers as slime's patch of that function does."""

    def get_replay_topk(self, scores, topk, num_groups, group_topk, compute):
        from slime.utils import routing_replay

        stage = os.environ["ROUTING_REPLAY_STAGE"]
        if not stage.startswith("replay"):
            return compute(scores, topk, num_groups, group_topk)
        replay = routing_replay.ROUTING_REPLAY
        experts = (replay.pop_forward() if stage == "replay_forward" else replay.pop_backward()).long()
        return scores.gather(1, experts), experts


def function_of(path, name, **names):
    """Returns one function of a file which cannot be imported without Ray."""
    tree = ast.parse(Path(path).read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    exec(compile(ast.Module([found], []), path, "exec"), names)
    return names[name]


def worker(rank, source, folder, mode):
    import megatron_on_cpu
    import megatron_training as megatron

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
                   "ENABLE_ROUTING_REPLAY": "1", "ROUTING_REPLAY_STAGE": "replay_backward"}  # fmt: skip
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{mode}", rank=rank, world_size=RANKS)
    megatron_on_cpu.apply()
    megatron.begin_groups(RANKS)
    import megatron.core.transformer.moe.router as megatron_router
    import slime.backends.megatron_utils.model as slime_model
    from slime.backends.megatron_utils.cp_utils import prepare_routed_experts_for_routing_replay as prepare
    from slime.utils import accelerator, routing_replay

    accelerator.current_device = lambda: torch.device("cpu")
    unpinned = types.SimpleNamespace(**vars(torch))
    unpinned.empty_like = lambda tensor, device=None, pin_memory=None: torch.empty_like(tensor)
    routing_replay.torch = unpinned
    case = megatron.Case(ddp={}, config={"num_layers": megatron.LAYERS, "moe_enable_routing_replay": False})
    net = megatron.make_net(config := megatron.make_config(case))
    choose, rows, losses = megatron_router.topk_routing_with_score_function, [], []
    megatron_router.topk_routing_with_score_function = lambda *a, **k: choose(*a, **k | {"router_replay": Replay()})
    for layer in net.moe:
        routing_replay.register_routing_replay(layer.router)
        layer.router.register_forward_hook(lambda module, given, result: rows.append(result[1].sum(0).tolist()))
    data, rollout = [Batches(rank, megatron.LAYERS)], {"rollout_routed_experts": 1, "num_microbatches": MICRO_STEPS}
    fill = function_of(f"{source}/slime/backends/megatron_utils/actor.py", "fill_routing_replay",
                       prepare_routed_experts_for_routing_replay=prepare)  # fmt: skip
    module = types.SimpleNamespace(module=types.SimpleNamespace(config=config))
    fill(types.SimpleNamespace(args=ARGUMENTS, model=[module]), data, MICRO_STEPS, rollout)

    table = torch.randn(TOKENS, megatron.HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def batch_of(iterator, keys, *_):
        tokens = torch.cat((iterator[0] if isinstance(iterator, list) else iterator).get_next(keys)["tokens"])
        tokens = torch.cat([tokens, tokens.new_zeros(-len(tokens) % 8)])
        return {"tokens": tokens, "packed_seq_params": None, "full_loss_masks": None, "multimodal_train_inputs": None}

    def loss_of(args, batch, count, size, out):
        losses.append(float((loss := out.square().mean()).detach()))
        return loss, torch.tensor(1), {"keys": ["loss"], "values": torch.zeros(2)}

    forward = type(net).forward
    type(net).forward = lambda self, input_ids=None, **_: forward(self, table[input_ids].unsqueeze(1))
    slime_model.get_batch, slime_model.loss_function = batch_of, loss_of
    slime_model._with_rollout_top_p_token_keys = lambda args, keys: keys
    slime_model.train_metric_utils.reduce_train_step_metrics = lambda *_, **__: {}
    slime_model.logging_utils.log = nothing
    if mode != "plain":
        from foremoe.slime import Hooks, recorded_counts

        hooks = Hooks(mode=mode, **({"guest_slots": 2} if mode == "active" else {}))
        user = sys.modules["balance"] = types.ModuleType("balance")
        user.before_log_prob, user.before_training, user.before_train_step = hooks
        ARGUMENTS.custom_megatron_before_train_step_hook_path = "balance.before_train_step"
        user.before_training(ARGUMENTS, 0, rollout)
        counts = recorded_counts(EXPERTS)
    optimizer = Descent(net)
    schedule = types.SimpleNamespace(step=nothing, get_last_lr=lambda: [0])
    ddp = megatron.wrap(case, config, net)
    slime_model.train(0, [ddp], optimizer, schedule, data, MICRO_STEPS, [1, 1])
    assert len(optimizer.gradients) == len(MICRO_STEPS)
    if mode == "plain":
        torch.save((optimizer.gradients, losses), f"{folder}/plain{rank}.pt")
    else:
        assert (torch.tensor(rows).reshape(sum(MICRO_STEPS), megatron.LAYERS, EXPERTS).numpy() == counts).all()
        plain, plain_losses = torch.load(f"{folder}/plain{rank}.pt")
        own, expected = (
            torch.cat([of.flatten() for step in steps for of in step]) for steps in (optimizer.gradients, plain)
        )
        assert expected.count_nonzero() > len(expected) / 2
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(losses, plain_losses, rtol=0, atol=1e-12)
        dist.barrier()
        if rank == 0:
            found = hooks.replicas.metrics()
            planned = found["foremoe/rho_planned"]
            assert planned < found["foremoe/rho_vanilla"]
            print(
                f"slime, {mode} mode: counts are the routers' rows; gradients differ by at most "
                f"{float((own - expected).abs().max()):.0e}; ρ {found['foremoe/rho_vanilla']:.2f} to {planned:.2f}",
                flush=True,  # _exit() does not
            )
    dist.barrier()
    os._exit(0)  # foremoe's groups stay open, as in a job that goes on


if __name__ == "__main__":
    replace_megatron_training()
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("plain", "shadow", "active"):
            mp.start_processes(worker, (sys.argv[1], folder, mode), RANKS, start_method="fork")
