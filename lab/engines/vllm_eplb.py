"""vLLM's own expert balancing (EPLB) moves weights by the maps of foremoe.eplb.vllm_policy(), on four gloo ranks.

Only the Python files of vllm are used. Replaced: synchronisation with CUDA, the group of ranks, and the communicator of
newer versions, which is one of NCCL.
"""

import contextlib
import importlib.metadata
import inspect
import os
import tempfile
import types

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import vllm
import vllm.distributed.eplb.eplb_state  # imported once, before ranks are forked
from vllm.distributed.eplb import policy as policies
from vllm.distributed.eplb import rebalance_execute

import foremoe.eplb

LAYERS, EXPERTS, RANKS, SLOTS, STEPS = 3, 16, 4, 24, 4
OWN = SLOTS // RANKS  # slots of a rank


def weights_of(slots):
    """Returns the two parameters of some slots of each layer: constants that name the layer and the expert."""
    return [
        [torch.stack([torch.full(shape, 1000.0 * layer + 100 * part + int(e)) for e in slots[layer]])
         for part, shape in enumerate([(8, 4), (5,)])]
        for layer in range(LAYERS)
    ]  # fmt: skip


def communicator():
    from vllm.distributed.eplb.eplb_communicator import EplbCommunicator

    class Gloo(EplbCommunicator):
        def __init__(self):
            self.sent = []

        def add_send(self, tensors, dst_rank, expert_id=None):
            self.sent += [dist.P2POp(dist.isend, tensor, dst_rank) for tensor in tensors]

        def add_recv(self, tensors, src_rank, expert_id=None):
            self.sent += [dist.P2POp(dist.irecv, tensor, src_rank) for tensor in tensors]

        def execute(self):
            for request in dist.batch_isend_irecv(self.sent) if self.sent else []:
                request.wait()
            self.sent = []

    return Gloo()


def balance(policy, rank):
    """Balances four steps. Returns the mean of busiest rank ÷ mean rank, and this rank's changed slots."""
    mine = slice(rank * OWN, (rank + 1) * OWN)
    random = torch.Generator().manual_seed(0)
    old = (torch.arange(SLOTS) % EXPERTS).expand(LAYERS, -1).clone()
    weights, load, busiest, changed = weights_of(old[:, mine]), None, 0.0, 0
    known = inspect.signature(rebalance_execute.rearrange_expert_weights_inplace).parameters
    options = {"communicator": communicator()} if "communicator" in known else {}
    if "expert_buffer" in known:
        options["expert_buffer"] = [torch.empty_like(weight) for weight in weights[0]]
    for _ in range(STEPS):
        drawn = torch.randint(1, 1000, (LAYERS, EXPERTS), generator=random).pow(2).float()
        load = drawn if load is None else 0.9 * load + 0.1 * drawn
        maps = policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, old)
        new = maps[0] if isinstance(maps, tuple) else maps  # until 0.23: three maps
        assert (new.dtype, new.shape) == (torch.int64, old.shape)
        rebalance_execute.rearrange_expert_weights_inplace(
            old.clone(), new, weights, ep_group=dist.group.WORLD, **options
        )
        for moved, expected in zip(weights, weights_of(new[:, mine]), strict=True):
            assert all(map(torch.equal, moved, expected))
        for counts, experts in zip(load, new, strict=True):
            ranks = (counts / torch.bincount(experts, minlength=EXPERTS))[experts].reshape(RANKS, OWN).sum(1)
            busiest += float(ranks.max() / ranks.mean())
        changed += int((old != new)[:, mine].sum())
        old = new.clone()
    return busiest / STEPS / LAYERS, changed


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda *_, **__: None
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    group = types.SimpleNamespace(device_communicator=object(), world_size=RANKS, rank=rank)
    rebalance_execute.get_ep_group = lambda: group
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: vllm.__version__ if name == "vllm" else installed(name)
    line = f"vLLM {vllm.__version__}'s EPLB: all moved weights are right"
    for name, policy in (("foremoe", foremoe.eplb.vllm_policy()), ("vllm", policies.DefaultEplbPolicy)):
        assert issubclass(policy, policies.AbstractEplbPolicy)
        ratio, changed = balance(policy, rank)
        changed = torch.tensor(changed)
        dist.all_reduce(changed)
        assert changed > 0
        line += f"; {name}: busiest rank ÷ mean {ratio:.3f}, {changed} slots changed"
    if rank == 0:
        print(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (folder,), RANKS, start_method="fork")
