"""Refuses what would overwrite this rank's experts, average them with other ranks' experts, or never train them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
        """Raises RuntimeError, on all ranks, where two ranks have the same experts that once had different ones.
        Collective.

        Compares a sample of each weight.
        """
        own = torch.stack([self._at_first, self._fingerprint()])
        of_all = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(of_all, own, group=self._group)
        at_first, now = torch.stack(of_all, 1).cpu()  # [ranks, weights, sample]
        first: dict[bytes, int] = {}  # rank that has these experts
        for rank, of in enumerate(now):
            other = first.setdefault(of.numpy().tobytes(), rank)
            if bool(of.isfinite().all()) and not torch.equal(at_first[rank], at_first[other]):
                raise RuntimeError(
                    f"ranks {other} and {rank} have the same experts, but had different ones when these were spread: "
                    "something wrote one rank's over another's, as DistributedDataParallel and accelerate do if they "
                    f"come before ep.wrap(). {_INSTEAD}"
                )

    @torch.no_grad()
    def _fingerprint(self) -> Tensor:
        """float64 [weights, sample]: the beginning of each weight of this rank's first expert."""
        samples = [local(weight)[0].reshape(-1)[:_SAMPLE].double() for weight in self._experts]
        return torch.stack([torch.nn.functional.pad(of, (0, _SAMPLE - len(of))) for of in samples])
