"""Checks that outputs and gradients of a planned step equal those of one process with all experts.

The reference runs the experts on their rows, one after the other, in float64. A planned step rounds in its own type, so
its error may be up to ROUNDING times that of one process in the same type.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

import foremoe

from ..parallel import ExpertParallel
from .hardware import Hardware
from .layers import TOKEN, Experts, Net, Sizes, draw_inputs, draw_routes
from .ranks import PASSED, CannotRun, Check, Failure, Outcome

PATHS = ("peer", "host", "auto")
RESIDENCIES = ("static", "resident", "shared")
DTYPES = ("float32", "bfloat16")
OTHER_HOMES, BY_TOKEN = "other homes", "dispatch by token"
ROUNDING = 2.0
"""Largest error of a planned step, as a multiple of the error of one process of the same type."""


def checks() -> list[Check]:
    return [
        Check(
            f"equal to one process: {path}, {residency}, {dtype}",
            functools.partial(_check, path, residency, dtype, ""),
        )
        for dtype in DTYPES
        for path in PATHS
        for residency in RESIDENCIES
    ] + [
        Check(f"equal to one process: {variant}", functools.partial(_check, "peer", "resident", "float32", variant))
        for variant in (OTHER_HOMES, BY_TOKEN)
    ]


@dataclass(frozen=True)
class _Step:
    """Outputs of this rank's micro-steps, and gradients by name, averaged over ranks."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def _step(outputs: list[Tensor], net: Net) -> _Step:
    return _Step(outputs, {name: p.grad for name, p in net.named_parameters() if p.grad is not None})


def _execute_one_by_one(layer: Experts, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for expert in range(layer.num_experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[token] @ layer.gate_up[expert]).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ layer.down[expert]
        out = out.index_add(0, token, rows * gates[token, place, None])
    return out


def _run_one_process(net: Net, rank: int, ranks: int) -> _Step:
    """Runs the step of all ranks in this process. Returns this rank's outputs and all gradients."""
    for layer in net.moe:
        layer.execute_by(functools.partial(_execute_one_by_one, layer))
    outputs: list[Tensor] = []
    for r in range(ranks):
        for hidden, routes in zip(draw_inputs(net.sizes, r), draw_routes(net.sizes, r, ranks), strict=True):
            for i, layer in enumerate(net.moe):
                layer.replay(routes[:, i].long().to(layer.gate_up.device))
            out = net(hidden.to(net.moe[0].gate_up))
            (out.square().mean() / ranks).backward()
            if r == rank:
                outputs.append(out.detach())
    return _step(outputs, net)


@functools.cache
def _references(sizes: Sizes, device: torch.device, rank: int, ranks: int) -> tuple[_Step, _Step]:
    """Returns the step in float64 and in the tested type, with the same weights."""
    exact = Net(sizes, device)
    return _run_one_process(exact.double(), rank, ranks), _run_one_process(Net(sizes, device), rank, ranks)


def run_planned(net: Net, ep: ExpertParallel, rank: int, ranks: int) -> tuple[_Step, dict[str, Any]]:
    """Runs a step of this rank; returns it, and the figures of its phase."""
    outputs: list[Tensor] = []
    with ep.plan(draw_routes(net.sizes, rank, ranks)) as phase:
        for m, hidden in enumerate(draw_inputs(net.sizes, rank)):
            with phase.micro_step(m):
                out = net(hidden.to(ep.expert_parameters()[0]))
                out.square().mean().backward()
                outputs.append(out.detach())
        phase.drain()
    return _step(outputs, net), phase.figures()


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the norm of the tensors' errors. Each error is relative to the tensor's norm."""
    relative = [(a.double() - b).norm() / b.norm().clamp(min=1e-30) for a, b in zip(found, exact, strict=True)]
    return float(torch.stack(relative).norm())


def draw_homes(sizes: Sizes, ranks: int) -> npt.NDArray[np.int32]:
    """Draws homes, int32 [layers, experts], equally many experts of each layer on each rank."""
    contiguous = np.tile(np.arange(sizes.experts, dtype=np.int32) * ranks // sizes.experts, (sizes.layers, 1))
    return np.random.default_rng(0).permuted(contiguous, axis=1)


def _check(path: str, residency: str, dtype: str, variant: str, hardware: Hardware) -> Outcome:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, sizes = hardware.device_of(rank), Sizes(dtype=dtype)
    exact, eager = _references(sizes, device, rank, ranks)
    net = Net(sizes, device)
    homes = draw_homes(sizes, ranks) if variant == OTHER_HOMES else None
    ep = net.spread(residency=residency, path=path, homes=homes, **(TOKEN if variant == BY_TOKEN else {}))
    try:
        planned, figures = run_planned(net, ep, rank, ranks)
    except foremoe.InputError as error:
        if error.field == "path":  # no room in shared memory; all ranks raise this together
            raise CannotRun(str(error)) from error
        raise
    layer_of = {id(p): i for i, layer in enumerate(ep.layers) for p in layer.weights().values()}
    own = {
        name: ep.ranks.table.of_rank(layer_of[id(p)], rank) for name, p in net.named_parameters() if id(p) in layer_of
    }
    if set(planned.gradients) != set(exact.gradients):
        raise Failure(f"gradients are missing: {sorted(set(exact.gradients) - set(planned.gradients))}")

    def gradients_of(step: _Step) -> list[Tensor]:
        """Returns gradients in the order of the planned step, for this rank's experts only."""
        of = step.gradients
        return [of[name][own[name]] if name in own and step is not planned else of[name] for name in planned.gradients]

    errors = {
        "output": (_error(planned.outputs, exact.outputs), _error(eager.outputs, exact.outputs)),
        "gradient": (
            _error(planned.gradients.values(), gradients_of(exact)),  # type: ignore[arg-type]
            _error(gradients_of(eager), gradients_of(exact)),
        ),
    }
    ep.detach()
    worst = torch.tensor([*sum(errors.values(), ()), figures["fallbacks"]], dtype=torch.float64, device=device)
    copies = torch.tensor([figures["copies"], figures["host_copies"]], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(copies)
    output, output_eager, gradient, gradient_eager, fallbacks = worst.tolist()
    for name, distance, of_eager in (("outputs", output, output_eager), ("gradients", gradient, gradient_eager)):
        if not distance <= ROUNDING * of_eager:  # also true for NaN
            raise Failure(f"{name} are {distance:.2g} from float64, those of one process in {dtype} {of_eager:.2g}")
    if copies[0] == 0 or (path == "host" and copies[1] == 0):
        raise Failure("no expert was copied on this path, so nothing was tested")
    if fallbacks:
        raise Failure(f"{fallbacks:.0f} layers ran at homes, because experts did not come in time")
    seen = f"outputs {output:.1e}, gradients {gradient:.1e} from float64; one process {gradient_eager:.1e}"
    found = {"output_error": output, "gradient_error": gradient, "copies": float(copies[0])}
    return Outcome(PASSED, f"{seen}; {int(copies[0])} copies", found)
