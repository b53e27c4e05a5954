"""Refuses what would overwrite this rank's experts, average them with other ranks' experts, or never train them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from foremoe._engine.communication import gathered
from foremoe._engine.sharded import local

_SAMPLE = 64  # elements of a weight
_INSTEAD = (
    'Load the model again, make ExpertParallel, call ep.wrap(model, "own"), and only then DistributedDataParallel or '
    "accelerate: they leave the experts alone then"
)


# Parameters that others have replaced in their model, by id: by this rank's experts, by whole ones in detach(), by
# shards. An optimizer that holds one would step it, and never train the model.
_REPLACED: weakref.WeakValueDictionary[int, torch.nn.Parameter] = weakref.WeakValueDictionary()


def refuse_optimizers_of(replaced: Iterable[torch.nn.Parameter]) -> None:
    """From now on, no optimizer steps that holds one of these parameters, which others have replaced in the model."""
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

    register_optimizer_step_pre_hook(expect_none_replaced)


class OwnExperts:
    """The experts that a rank owns while a model is spread."""

    def __init__(self, experts: list[torch.nn.Parameter], group: Any) -> None:
        self._experts = experts
        self._group = group
        self._at_first = self._fingerprint()
        self._checked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._watched: dict[torch.nn.Module, Any] = {}  # the handles of their hooks
        _SPREAD.add(self)

    def accept_loads_of(self, model: torch.nn.Module) -> None:
        """From now on, accepts experts that load_state_dict() of the model, or of a part of it, writes."""
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
        """Accepts what is about to be loaded on purpose into a weight; any other model's is ignored."""
        for i, own in enumerate(self._experts):
            if own is weight:
                self._at_first[i] = _sample(value.to(weight.dtype))

    def loaded(self) -> None:
        """Accepts the weights that were just loaded on purpose."""
        self._at_first = self._fingerprint()

    def expect_no_ddp(self) -> None:
        """Raises RuntimeError in the forward of a DistributedDataParallel that holds experts: it would average other
        experts' gradients into theirs, and has overwritten the experts of all ranks but one when it was made."""
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
        """Raises RuntimeError, on all ranks, where two ranks have the same weight that once had different ones.
        Collective.

        Compares a sample of each weight.
        """
        own = torch.stack([self._at_first, self._fingerprint()])
        at_first, now = gathered(own, self._group, 1).cpu()  # [ranks, weights, sample]
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

    @torch.no_grad()
    def _fingerprint(self) -> Tensor:
        """float64 [weights, sample]: the beginning of each weight of this rank's first expert."""
        return torch.stack([_sample(weight) for weight in self._experts])


# All there are. A hook that held its own could not be copied and pickled with the model.
_SPREAD: weakref.WeakSet[OwnExperts] = weakref.WeakSet()


def _accept_loaded(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """A hook before load_state_dict() of a module that holds experts."""
    for name, weight in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == weight.shape:
            for own in list(_SPREAD):
                own.accept(weight, value)


def _sample(weight: Tensor) -> Tensor:
    """float64 [sample], zeros after its end: the beginning of a weight's first expert on this rank."""
    sample = local(weight)[0].reshape(-1)[:_SAMPLE].double()
    return torch.nn.functional.pad(sample, (0, _SAMPLE - len(sample)))
