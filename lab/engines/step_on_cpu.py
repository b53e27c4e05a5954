"""Runs a trainer's own training step on four gloo ranks: without ForeMoE, in shadow mode and in active mode.

The model is a few MoE layers of Megatron-LM without attention, in float64. Shared by *_schedule.py. Their prepare()
returns the trainer's training step, which must call the schedule, and step() of the given optimizer.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from schedule_on_cpu import RANKS, begin_rank

STEPS, TOKENS, EXPERTS, TOP_K, VOCABULARY = 2, 24, 8, 2, 32


class Stub(types.ModuleType):
    """A module with an empty class under every name."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {"__module__": self.__name__}))
        return vars(self)[name]


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that the trainer imports, and that its training step does not use."""

    def __init__(self, *packages):
        self.packages = packages
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path, target=None):
        of_these = any(f"{name}.".startswith(f"{of}.") for of in self.packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if of_these else None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module): ...


class Descent:
    """Plain descent, with the interface of Megatron-LM's optimizer. Keeps the gradients of all steps."""

    def __init__(self, net):
        self.net, self.gradients, self.param_groups = net, [], []

    def zero_grad(self): ...

    @torch.no_grad()
    def step(self):
        self.gradients.append([parameter.main_grad.clone() for parameter in self.net.parameters()])
        for parameter in self.net.parameters():
            parameter -= 0.05 * parameter.main_grad
        return True, 0.0, 0


def wrapped(net):
    """Wraps a model as a trainer does, if the trainer's own code that does so is not run."""
    import megatron_training as megatron

    net.config.finalize_model_grads_func = lambda models, *_, **__: [of.finish_grad_sync() for of in models]
    return megatron.wrap(megatron.Case(ddp={"overlap_grad_reduce": True}), net.config, net)


def routes(seed, rows, layers):
    """Draws skewed routes, int64 [rows, layers, top_k]. The last two rows have one expert twice, as padding has."""
    random = torch.Generator().manual_seed(seed)
    chances = torch.rand(layers, EXPERTS, generator=torch.Generator().manual_seed(3)) ** 3 + 0.02
    drawn = torch.stack([torch.multinomial(of.expand(rows, -1), TOP_K, generator=random) for of in chances], 1)
    drawn[-2:] = 0
    return drawn


def _worker(rank, folder, name, prepare, adapter, mode, planned_calls, config):
    import megatron_training as megatron

    begin_rank(rank, folder, mode)
    megatron.begin_groups(RANKS)
    net = megatron.make_net(megatron.make_config(megatron.Case(config=config)))
    random = torch.Generator().manual_seed(5)
    table, head = (
        torch.randn(size, dtype=torch.float64, generator=random)
        for size in ((VOCABULARY, megatron.HIDDEN), (megatron.HIDDEN, VOCABULARY))
    )

    def forward(self, input_ids=None, **_):
        """Maps ids [batch, sequence] to logits [batch, sequence, vocabulary], as Megatron-LM's models do."""
        return (self.layers(table[input_ids].transpose(0, 1)) @ head).transpose(0, 1).contiguous()

    type(net).forward = forward
    rows, counts = [], []
    for layer in net.moe:
        layer.router.register_forward_hook(lambda module, given, result: rows.append(result[1].sum(0)))
    optimizer, losses = Descent(net), []
    if mode != "plain":
        from foremoe.megatron import schedule as schedules

        schedule, count = importlib.import_module(adapter).init(), schedules.count

        def counted(*given):
            found = count(*given)
            counts.append(torch.from_numpy(found[0]))
            return found

        schedules.count = counted
    step = prepare(net, optimizer, losses)
    for number in range(STEPS):
        step(number, rows)
        own = torch.stack(rows).reshape(-1, len(net.moe), EXPERTS)
        assert not counts or torch.equal(own, counts[-1]), "the routers' rows are not those that were counted"
    assert len(optimizer.gradients) == STEPS and losses
    if mode == "plain":
        torch.save((optimizer.gradients, losses), f"{folder}/plain{rank}.pt")
    else:
        plain, plain_losses = torch.load(f"{folder}/plain{rank}.pt")
        own, expected = (
            torch.cat([of.flatten() for step in of_run for of in step]) for of_run in (optimizer.gradients, plain)
        )
        assert expected.count_nonzero() > len(expected) / 2
        differs = max(
            float((own - expected).abs().max()), *(abs(a - b) for a, b in zip(losses, plain_losses, strict=True))
        )
        assert differs <= (1e-12 if mode == "active" else 0), differs
        assert len(counts) == (planned_calls if mode == "active" else 0), len(counts)
        schedule.replicas.wait()
        found = schedule.metrics()
        planned, vanilla = found["foremoe/rho_planned"], found["foremoe/rho_vanilla"]
        assert planned < vanilla and (mode == "shadow" or found["foremoe/rho_computed"] == planned)
        dist.barrier()
        if rank == 0:
            change = f"ρ {vanilla:.2f} to {planned:.2f}"
            print(f"{name}, {mode} mode: loss and gradients differ by at most {differs:.0e}; {change}", flush=True)
    dist.barrier()
    os._exit(0)  # foremoe's groups stay open, as in a job that goes on


def run(name, prepare, adapter, planned_calls, **config):
    """Runs prepare(net, optimizer, losses) and its step(number, rows) in each mode.

    prepare: Returns the trainer's training step, which empties `rows` before it calls the schedule. Its loss function
        appends to `losses`. adapter: Module with init(). planned_calls: Number in active mode; 0: shadow mode only.
    config: Fields of TransformerConfig.
    """
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("plain", "shadow", "active")[: 3 if planned_calls else 2]:
            mp.start_processes(
                _worker, (folder, name, prepare, adapter, mode, planned_calls, config), RANKS, start_method="fork"
            )
