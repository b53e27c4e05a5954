"""RLinf's MegatronWorker under foremoe.rlinf, on four gloo ranks. RLinf replays no routes: shadow mode only.

RLinf's own: run_forward_backward(), with its iterators over micro-batches. Replaced: the worker's construction, the
forward step and loss, the optimizer, and the packages named below, which are hardly used here.
"""

import torch
from step_on_cpu import TOKENS, VOCABULARY, Stubs, run, wrapped

Stubs("megatron.training", "wandb", "sortedcontainers")
from rlinf.workers import megatron_worker  # noqa: E402

MICRO_BATCHES, SEQUENCES = 3, 2


def prepare(net, optimizer, losses):
    megatron_worker.clear_memory = lambda: None
    megatron_worker.get_num_microbatches = lambda: MICRO_BATCHES
    worker = megatron_worker.MegatronWorker.__new__(megatron_worker.MegatronWorker)
    worker.model, worker.enable_dynamic_batch_size, worker.use_profiler = [wrapped(net)], False, False
    worker.log_debug = lambda *_: None

    def forward_step(iterator, model):
        batch = next(iterator)

        def loss_of(logits):
            logprobs = logits.log_softmax(-1).gather(2, batch["input_ids"].unsqueeze(2))
            losses.append(float((loss := logprobs.square().mean()).detach()))
            return loss, {"loss": loss.detach()}

        return model(input_ids=batch["input_ids"]), loss_of

    worker.get_forward_step_func = lambda: forward_step

    def step(number, rows):
        random = torch.Generator().manual_seed(100 * torch.distributed.get_rank() + number)
        ids = torch.randint(VOCABULARY, (MICRO_BATCHES * SEQUENCES, TOKENS), generator=random)
        rows.clear()
        worker.model[0].zero_grad_buffer()
        worker.run_forward_backward({"input_ids": ids}, forward_only=False)
        optimizer.step()

    return step


if __name__ == "__main__":
    run("RLinf", prepare, "foremoe.rlinf", 0, moe_enable_routing_replay=False)
