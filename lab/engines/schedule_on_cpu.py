"""What the programs share that run a trainer's own calls of Megatron-LM's schedule with ForeMoE, on four gloo ranks.

A program gives run() a class whose train() makes the trainer's calls with a tiny MoE model, and returns losses and
gradients. It runs plain, in shadow mode and in active mode. Losses and gradients must be equal to 1e-12, planned rows
must be those that ranks computed, and the routers' rows those that the data say.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __getitem__(cls, _):
        return cls


class Nothing(metaclass=_Names):
    """A class, function, decorator, type hint or object of a package that is not installed."""

    def __init__(self, *_, **__): ...

    def __getattr__(self, name):
        return getattr(Nothing, name)

    def __call__(self, of=None, *_, **__):
        return of


class _StandIn(types.ModuleType):
    """A package that is not installed. It has all names."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, fullname, path, target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in self.packages):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module): ...


def stand_in(*packages):
    """Replaces packages, or modules, that the trainer imports but its calls of the schedule do not use."""
    sys.meta_path.insert(0, _StandIns(packages))


class Descent:
    """Plain descent, with the interface of Megatron-LM's optimizer. Keeps the gradients of all steps."""

    chained_optimizers, param_groups = [], [{}]

    def __init__(self, net):
        self.net, self.gradients = net, []

    def zero_grad(self): ...

    def scale_loss(self, loss):
        return loss

    @torch.no_grad()
    def step(self):
        for parameter in self.net.parameters():
            self.gradients.append(parameter.main_grad.clone())
            parameter -= 0.05 * parameter.main_grad
        return True, 0.0, 0


def routes(layers, rows, seed, experts=8, top_k=2):
    """Draws skewed routes [rows, layers, top_k]."""
    random = torch.Generator().manual_seed(seed)
    chances = torch.rand(layers, experts, generator=torch.Generator().manual_seed(3)) ** 3 + 0.02
    return torch.stack([torch.multinomial(of.expand(rows, -1), top_k, generator=random) for of in chances], 1)


def begin_rank(rank, folder, mode):
    """Joins the group of RANKS ranks, with Megatron-LM on a CPU and FOREMOE_ATTACH for the mode."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
                   "FOREMOE_ATTACH": f"mode={mode},ranks_per_node=2"}  # fmt: skip
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{mode}", rank=rank, world_size=RANKS)
    import megatron_on_cpu

    megatron_on_cpu.apply()


def _worker(rank, trainer, adapter, folder, mode):
    warnings.simplefilter("ignore")
    begin_rank(rank, folder, mode)
    made = trainer()
    if mode != "plain":
        importlib.import_module(adapter).init(*getattr(made, "init_arguments", ()))
    rows = []
    for layer in made.net.moe:
        layer.router.register_forward_hook(lambda module, given, result: rows.append(result[1].sum(0).tolist()))
    losses, gradients = made.train()
    losses, gradients = torch.tensor(losses, dtype=torch.float64), torch.cat([of.flatten() for of in gradients])
    assert made.rows is None or rows == made.rows, "the routers did not replay the routes"
    if mode == "plain":
        assert gradients.count_nonzero() > len(gradients) / 3
        torch.save((losses, gradients), f"{folder}/plain{rank}.pt")
    else:
        plain_losses, plain = torch.load(f"{folder}/plain{rank}.pt")
        worst = torch.stack([(losses - plain_losses).abs().max(), (gradients - plain).abs().max() / plain.abs().max()])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        schedule = sys.modules[adapter].schedule
        schedule.replicas.wait()  # shadow mode evaluates steps in the background
        found = schedule.metrics()
        assert worst.max() <= (1e-12 if mode == "active" else 0), worst
        assert found["foremoe/rho_planned"] < found["foremoe/rho_vanilla"]
        if mode == "active" and made.rows is not None:
            assert found["foremoe/rho_computed"] == found["foremoe/rho_planned"]
        if rank == 0:
            print(
                f"{made.name}, {mode} mode: {len(losses)} losses differ by at most {worst[0]:.0e}, gradients by "
                f"{worst[1]:.0e} (relative); "
                f"ρ {found['foremoe/rho_vanilla']:.2f} to {found['foremoe/rho_planned']:.2f}",
                flush=True,  # _exit() does not
            )
    dist.barrier()
    os._exit(0)  # foremoe's groups stay open, as in a job that goes on


def run(trainer, adapter):
    """Runs a trainer in each mode.

    trainer: A class, whose objects have name, net, train() and then rows, [router call][expert]; None if routers choose
        for some rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("plain", "shadow", "active"):
            mp.start_processes(_worker, (trainer, adapter, folder, mode), RANKS, start_method="fork")
