"""Guards against code that overwrites this rank's experts, averages them with other experts, or never trains them."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from foremoe._engine.communication import gathered
from foremoe._engine.ranks import Ranks
from foremoe._engine.sharded import local
from foremoe._engine.together import Given, digest_of

_SAMPLE = 64  # elements of a weight
_DEEPEST = 16  # calls between a GradScaler and the hook of the optimizer that it steps
_APART = (
    "Replicas hold other experts: they were loaded, initialized or clipped apart, or trained without drain(); load the "
    "same weights into all replicas"
)
_INSTEAD = (
    'Load the model again, make ExpertParallel, call ep.wrap(model, "own"), and only then DistributedDataParallel or '
    "accelerate: they leave the experts alone then"
)


# Replaced parameters of models, by id. Each was replaced by this rank's experts, by all experts (detach()) or by a
# shard. An optimizer with these parameters would never train the model.
_REPLACED: weakref.WeakValueDictionary[int, torch.nn.Parameter] = weakref.WeakValueDictionary()


def refuse_optimizers_of(replaced: Iterable[torch.nn.Parameter]) -> None:
    """Makes step() raise for optimizers that have one of these parameters, which were replaced in the model."""
    _REPLACED.update({id(weight): weight for weight in replaced})
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    def expect_none_replaced(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = (p for of in optimizer.param_groups for p in of["params"]) if _REPLACED else ()
        count = sum(_REPLACED.get(id(p)) is p for p in held)
        if count:
            raise RuntimeError(
                f"the optimizer holds {count} parameters that are no longer the model's, and would never train it: it "
                "was made before ExpertParallel, wrap() or detach() replaced them; make it afterwards"
            )
        training = [own for own in list(_GUARDS) if own.trained_by(optimizer)]
        for own in training:
            own.note_step(optimizer)
        if training and _scaler_of_one_rank():
            raise RuntimeError(
                "torch.amp.GradScaler skips a step where gradients of this rank's experts overflow, and the other "
                "ranks would not: use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=group)"
            )

    register_optimizer_step_pre_hook(expect_none_replaced)


def _scaler_of_one_rank() -> bool:
    """Returns whether torch's GradScaler, which sees only this rank's gradients, steps an optimizer."""
    frame = inspect.currentframe()
    for _ in range(_DEEPEST):
        frame = frame and frame.f_back
        # Read the locals of this frame only: reading those of another frame would extend their lifetime to its end.
        if frame is not None and frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            return type(scaler).__module__.startswith("torch.") and not hasattr(scaler, "process_group")
    return False


class ExpertGuards:
    """The experts of a rank while a model is spread."""

    def __init__(self, experts: list[torch.nn.Parameter], ranks: Ranks) -> None:
        self._experts = experts
        self._ranks = ranks
        self._at_first = self._fingerprint()
        self._checked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.note_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None  # called before each step
        self._watched: dict[torch.nn.Module, Any] = {}  # handles of the modules' hooks
        _GUARDS.add(self)
        _watch_optimizers()

    def trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether the optimizer has experts."""
        experts = {id(weight) for weight in self._experts} if self._ranks.num_ranks > 1 else set()
        return any(id(p) in experts for of in optimizer.param_groups for p in of["params"])

    def accept_loads_of(self, model: torch.nn.Module) -> None:
        """Accepts experts that load_state_dict() of the model, or of a part of it, writes from now on."""
        experts = {id(weight) for weight in self._experts}
        for module in model.modules():
            holds = any(id(p) in experts for p in module.parameters(recurse=False))
            if holds and module not in self._watched:
                self._watched[module] = module.register_load_state_dict_pre_hook(_accept_loaded)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Undoes accept_loads_of()."""
        while self._watched:
            self._watched.popitem()[1].remove()

    @torch.no_grad()
    def accept(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Accepts a value that is about to be loaded into a weight. Ignores weights of other models."""
        for i, own in enumerate(self._experts):
            if own is weight:
                self._at_first[i] = _sample(value.to(weight.dtype))

    def loaded(self) -> None:
        """Accepts the weights that were just loaded."""
        self._at_first = self._fingerprint()

    def expect_no_ddp(self) -> None:
        """Raises RuntimeError in the forward of a DistributedDataParallel that contains experts.

        The wrapper overwrote the experts of all ranks but one when it was created, and would average gradients of
        different experts.
        """
        ddp: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if ddp is None or ddp in self._checked:
            return
        experts = {id(weight) for weight in self._experts}
        for name, p in ddp.module.named_parameters():
            if id(p) in experts and name not in ddp.parameters_to_ignore:
                raise RuntimeError(
                    f"DistributedDataParallel holds the experts of this rank, such as {name}: it has written those of "
                    f"the first rank over them, and would average gradients of different experts. {_INSTEAD}"
                )
        self._checked.add(ddp)

    def expect_not_overwritten(self) -> None:
        """Raises RuntimeError on all ranks if two ranks have equal weights that differed before. Collective.

        Compares a sample of each weight.
        """
        own = torch.stack([self._at_first, self._fingerprint()])
        at_first, now = gathered(own, self._ranks.group, 1).cpu()  # [ranks, weights, sample]
        for i in range(len(self._experts)):
            first: dict[bytes, int] = {}  # rank that has this weight
            for rank, of in enumerate(now[:, i]):
                other = first.setdefault(of.numpy().tobytes(), rank)
                if other != rank and of.isfinite().all() and not at_first[rank, i].equal(at_first[other, i]):
                    raise RuntimeError(
                        f"ranks {other} and {rank} have the same experts, but had different ones when these were "
                        "spread: something wrote one rank's over another's, as DistributedDataParallel and accelerate "
                        f"do if they come before ep.wrap(). {_INSTEAD}"
                    )

    def add_facts(self, given: Given) -> None:
        """Requires equal samples on all ranks that own these experts."""
        if self._ranks.replicas is not None:
            replicas = dist.get_process_group_ranks(self._ranks.replicas.group)
            samples = {f"experts[{i}]": digest_of(of.numpy())[:8] for i, of in enumerate(self._fingerprint().cpu())}
            given.expect_equal(samples, f"replicas {replicas}", _APART)

    @torch.no_grad()
    def _fingerprint(self) -> Tensor:
        """Returns the first elements of each weight of this rank's first expert, float64 [weights, sample]."""
        return torch.stack([_sample(weight) for weight in self._experts])


# All instances. A hook that referred to its instance could not be copied and pickled with the model.
_GUARDS: weakref.WeakSet[ExpertGuards] = weakref.WeakSet()


def _accept_loaded(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of load_state_dict() for modules that contain experts."""
    for name, weight in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == weight.shape:
            for own in list(_GUARDS):
                own.accept(weight, value)


def _sample(weight: Tensor) -> Tensor:
    """Returns the first elements of a weight for this rank's first expert, float64 [sample], padded with zeros."""
    sample = local(weight)[0].reshape(-1)[:_SAMPLE].double()
    return torch.nn.functional.pad(sample, (0, _SAMPLE - len(sample)))
