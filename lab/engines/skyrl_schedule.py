"""SkyRL's own calls of the schedule under foremoe.skyrl, on four gloo ranks: skyrl_schedule.py CHECKOUT.

SkyRL's own: MegatronModelWrapper with forward() and forward_backward_mini_batch(), its packing and padding, router
replay, policy loss, entropy and deferred synchronization of gradients; two mini-batches before each of two optimizer
steps. Its parser of options reads those of its published run_moonlight16b_router_replay.sh.

Replaced: packages that are not installed (below); the model (three MoE layers, whose outputs count as logits of 16
tokens), which recomputes all layers, as SkyRL does by default, and gives them the padding mask; the optimizer; the
worker's loop around these calls; and float32 by float64 in log-probabilities.
"""

import subprocess
import sys
import types

import torch
from schedule_on_cpu import RANKS, Descent, routes, run, stand_in

STEPS, MINI_BATCHES, MICRO_BATCHES, SEQUENCES, PROMPT, RESPONSE, EXPERTS, TOP_K = 2, 2, 3, 4, 10, 14, 8, 2
MAIN, FILE = "skyrl.train.entrypoints.main_base", "examples/train/router_replay/run_moonlight16b_router_replay.sh"


def published_options():
    """Returns the options that the published launch file gives to SkyRL."""
    of = ["bash", "-c", 'uv() { printf "%s\\0" "$@"; }; . "$0"', f"{sys.argv[1]}/{FILE}"]
    words = subprocess.run(of, check=True, capture_output=True, text=True).stdout.split("\0")
    return words[words.index(MAIN) + 1 : -1]


class SkyRL:
    name = "SkyRL"
    packs = True

    def __init__(self):
        import megatron_training as megatron
        from skyrl.backends.skyrl_train.distributed.megatron import model_utils
        from skyrl.backends.skyrl_train.utils import torch_utils
        from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper as module
        from skyrl.train.config import SkyRLTrainConfig

        model_utils.torch = torch_utils.torch = types.SimpleNamespace(**vars(torch) | {"float32": torch.float64})
        model_utils._compute_distributed_log_softmax = lambda logits, group: logits.log_softmax(-1)
        given = SkyRLTrainConfig.from_cli_overrides(published_options())
        assert given.trainer.policy.megatron_config.moe_enable_routing_replay
        given.trainer.remove_microbatch_padding = self.packs
        recompute = given.trainer.policy.megatron_config.transformer_config_kwargs
        assert recompute["recompute_granularity"] == "full"
        megatron.begin_groups(RANKS)
        case = megatron.Case(ddp={}, config={of: recompute[of] for of in recompute if of.startswith("recompute")})
        self.net, self.layers, self.rows = megatron.make_net(config := megatron.make_config(case)), megatron.LAYERS, []
        self.net.checkpointed, self.vocabulary = True, megatron.HIDDEN
        table = torch.randn(self.vocabulary, self.vocabulary, generator=torch.Generator().manual_seed(5)).double()
        own = type(self.net).forward

        def forward(net, tokens, positions, mask, packed_seq_params, padding_mask):
            self.padding = padding_mask.reshape(1, -1)
            x = table[tokens].flatten(0, 1).unsqueeze(1).requires_grad_()
            return own(net, x).view(*tokens.shape, -1)

        type(self.net).forward = forward
        for layer in self.net.moe:
            layer.register_forward_pre_hook(lambda of, x, more: (x, {"padding_mask": self.padding}), with_kwargs=True)
        self.optimizer = Descent(self.net)
        model, loss = megatron.wrap(case, config, self.net), module.PolicyLossRegistry.get("regular")
        self.wrapper = module.MegatronModelWrapper(given.trainer, [model], self.optimizer, loss)

    def micro_batch(self, seed):
        """Draws sequences with padding at both ends."""
        random = torch.Generator().manual_seed(seed)
        length, places = PROMPT + RESPONSE, torch.arange(PROMPT + RESPONSE)
        begins = torch.randint(0, PROMPT - 2, (SEQUENCES, 1), generator=random)
        ends = torch.randint(PROMPT + 2, length, (SEQUENCES, 1), generator=random)
        mask = ((places >= begins) & (places < ends)).long()
        of_tokens = routes(self.layers, SEQUENCES * length, seed).view(SEQUENCES, length, self.layers, TOP_K)
        actions = mask[:, PROMPT:].double()
        return {
            "sequences": torch.randint(0, self.vocabulary, mask.shape, generator=random), "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "num_actions": RESPONSE, "loss_mask": actions / 50,
            "response_mask": actions.long(), "advantages": torch.randn(actions.shape, generator=random).double(),
            "base_action_log_probs": None, "rollout_action_logprobs": None, "sub_seq_lengths": None,
            "num_microbatches": MICRO_BATCHES, "num_real_microbatches": MICRO_BATCHES,
            "rollout_expert_indices": of_tokens, "router_padding_mask": mask == 0,
        }  # fmt: skip

    def expect(self, batches, passes):
        """Notes the rows of the routers for micro-batches. passes: 2 with recomputation, else 1."""
        for batch in batches:
            mask = batch["attention_mask"].bool()
            padding = 0 if self.packs else int((mask.sum(1).max() - mask.sum(1)).sum())
            filler = torch.arange(TOP_K).expand(padding, self.layers, TOP_K)
            of_layers = torch.cat([batch["rollout_expert_indices"][mask], filler]).unbind(1)
            self.rows += passes * [torch.bincount(of.flatten(), minlength=EXPERTS).tolist() for of in of_layers]

    def train(self):
        found = []
        length = {"seq_len": PROMPT + RESPONSE, "micro_batch_size": SEQUENCES}
        for step in range(STEPS):
            seed = 1000 * torch.distributed.get_rank() + 100 * step
            batches = [self.micro_batch(seed + m) for m in range(MINI_BATCHES * MICRO_BATCHES)]
            self.expect(batches, 1)
            self.wrapper.eval()
            with torch.no_grad():
                old = self.wrapper.forward(batches, **length)
            found += old.flatten().tolist()
            for batch, of in zip(batches, old.split(SEQUENCES), strict=True):
                batch["old_action_log_probs"] = of
            self.wrapper.train()
            for i in range(MINI_BATCHES):
                mini_batch = batches[i * MICRO_BATCHES : (i + 1) * MICRO_BATCHES]
                self.expect(mini_batch, 2)
                metrics = self.wrapper.forward_backward_mini_batch(mini_batch, **length)
                found += [of[name] for of in metrics for name in ("final_loss", "policy_entropy")]
            self.wrapper.run_pending_grad_sync()
            self.optimizer.step()
            self.wrapper.actor_module[0].zero_grad_buffer()
        return found, self.optimizer.gradients


class PaddedSkyRL(SkyRL):
    name = "SkyRL, padded micro-batches"
    packs = False


if __name__ == "__main__":
    stand_in("skyrl.backends.backend", "loguru", "jaxtyping", "pybase64", "skyrl_gym", "vllm", "zstandard")
    sys.path.insert(0, sys.argv[1])
    import skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper  # noqa: F401, once, and not by each rank

    for trainer in (SkyRL, PaddedSkyRL):
        run(trainer, "foremoe.skyrl")
