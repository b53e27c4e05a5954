"""Gradients of a phase, which are averaged over ranks at its end, and their norm."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from foremoe._engine.guests import Guests
from foremoe._engine.ranks import Ranks
from foremoe._engine.sharded import local, num_parts

from .buckets import average_in_buckets
from .dense import Dense
from .spread import Accumulated, SpreadExperts


class PhaseGradients:
    """Stores the gradients of parameters. finish() restores them and adds the phase's gradients; give_back() restores
    them unchanged."""

    def __init__(self, experts: SpreadExperts, dense: Dense) -> None:
        self._experts, self._dense = experts, dense
        parameters = [*experts.parameters(), *dense.named_parameters().values()]
        # Gradients that are views belong to a bucket of DistributedDataParallel, whose next backward overwrites them.
        self._before = [
            (weight, grad, grad.clone() if grad is not None and grad._is_view() else grad)
            for weight, grad in ((weight, weight.grad) for weight in parameters if weight.requires_grad)
        ]
        own = {id(weight) for weight in experts.parameters()}
        for weight, grad, _ in self._before:
            # Zeros let Accumulated detect zero_grad() in the phase, which would not reach the stored gradients.
            weight.grad = torch.zeros_like(weight) if grad is not None and id(weight) in own else None
        dense.drains = True
        self._accumulated = [Accumulated(weight) for weight in experts.parameters() if weight.requires_grad]

    def expect_accumulated(self) -> None:
        """Raises RuntimeError if anything except autograd wrote gradients of experts since the phase began."""
        if any(of.is_written() for of in self._accumulated):
            raise RuntimeError(
                "gradients of experts were written inside a phase, before drain(), as zero_grad() does: those of "
                "guests and of former phases would be left as they are; call it before the phase, or after drain()"
            )

    def expect_trained(self) -> None:
        """Raises RuntimeError if autograd summed no gradient of any expert."""
        if self._accumulated and not self._experts.is_sharded and not any(of.has_summed for of in self._accumulated):
            raise RuntimeError(
                "no backward of this phase reached this rank's experts: torch.autograd.grad() and backward(inputs=...) "
                "leave out their gradients; expected backward() without inputs, or experts that are frozen"
            )

    def _release(self) -> None:
        self._dense.drains = False
        for of in self._accumulated:
            of.release()

    @torch.no_grad()
    def give_back(self) -> None:
        """Restores the stored gradients, so that the phase's gradients are not partly applied."""
        self._release()
        for weight, grad, value in self._before:
            if grad is not None and value is not None and value is not grad:
                grad.copy_(value)
            weight.grad = grad

    @torch.no_grad()
    def finish(self, guests: Guests) -> None:
        """Sends gradients of guests home, and averages all gradients that no wrapper has averaged. Collective."""
        guests.bring_home(*range(len(self._experts.layers)))
        for i, layer in enumerate(self._experts.layers):
            weights = layer.weights()
            for (home, name), gradient in guests.take_home(i).items():
                weight = weights[name]
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                local(weight.grad)[home] += gradient
        ranks, gradients = self._experts.ranks, []
        for weight in self._experts.parameters():
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weight.grad /= ranks.num_ranks
                gradients.append(local(weight.grad))
        if ranks.replicas is not None:
            average_in_buckets(gradients, ranks.replicas.group)
        self._dense.average()
        self._release()
        for weight, _, before in self._before:
            if before is not None:
                weight.grad = before if weight.grad is None else weight.grad.add_(before)


@torch.no_grad()
def clip(
    experts: Sequence[torch.nn.Parameter],
    dense: Mapping[str, torch.nn.Parameter],
    ranks: Ranks,
    max_norm: float,
    sharded: Container[str],
) -> Tensor:
    """See ExpertParallel.clip_grad_norm_().

    Args:
        experts: This rank's experts.
        dense: All other parameters by name; whole, or shards of FSDP2.
        ranks: The ranks.
        max_norm: Largest norm.
        sharded: Names of parameters that differ between ranks.
    """
    parts = [(p, ranks.num_ranks) for p in experts]
    parts += [(p, ranks.num_ranks if name in sharded else num_parts(p)) for name, p in dense.items()]
    squares = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for p, of in parts:
        if p.grad is not None:
            grad = local(p.grad)
            norm = grad.norm(dtype=torch.promote_types(grad.dtype, torch.float32)).double()
            squares += norm**2 * of / ranks.num_trainers  # each rank adds its share of what several hold
    dist.all_reduce(squares, group=ranks.trainers)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p, _ in parts:
        if p.grad is not None:
            local(p.grad).mul_(scale.to(p.grad.dtype))
    return norm
