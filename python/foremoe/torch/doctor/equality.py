"""A planned step gives the outputs and gradients that one process gives, which holds all experts.

The reference runs every expert on its rows, one after the other, in float64. A planned step rounds as its type does, so
it may be as far from the reference as one process of that type is, up to a factor.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe

from .._measured import Experts
from ..parallel import ExpertParallel
from .checks import Check, Found
from .hardware import Hardware
from .ranks import CannotRun, Failure
from .staging import staged

PATHS = ("peer", "host", "auto")
RESIDENCIES = ("static", "resident", "shared")
DTYPES = ("float32", "bfloat16")
LAYERS, MICRO_STEPS, ROWS = 3, 3, 48
SIZES = {"experts": 24, "top_k": 2, "hidden": 32, "intermediate": 32}
ROUNDING = 2.0
"""How much further from float64 a planned step may be than one process of the same type."""


@dataclass(frozen=True)
class Case:
    path: str
    residency: str
    dtype: str

    @property
    def name(self) -> str:
        return f"equal to one process: {self.path}, {self.residency}, {self.dtype}"


def checks() -> list[Check]:
    return [
        Check(case.name, functools.partial(_check, case))
        for case in (Case(p, r, d) for d in DTYPES for p in PATHS for r in RESIDENCIES)
    ]


class Net(torch.nn.Module):
    """MoE layers alone. All ranks make the same one."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        super().__init__()
        sizes = argparse.Namespace(**SIZES, dtype=dtype)
        torch.manual_seed(0)
        self.moe = [Experts(f"layer {i}", sizes, torch.device("cpu")) for i in range(LAYERS)]
        self.layers = torch.nn.ModuleList(self.moe)
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(5)  # so that what experts add matters
        self.to(device)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.moe:
            hidden = layer(hidden)
        return hidden


def draw_routes(rank: int) -> list[Tensor]:
    """Of each micro-step, int64 [rows, layers, top_k]. A few experts are popular, others in every micro-step."""
    popular, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + rank)
    routes = []
    for _ in range(MICRO_STEPS):
        weight = torch.rand(LAYERS, SIZES["experts"], generator=popular) ** 6 + 1e-3
        drawn = [torch.multinomial(w.expand(ROWS, -1), SIZES["top_k"], generator=own) for w in weight]
        routes.append(torch.stack(drawn, 1))
    return routes


def draw_inputs(rank: int) -> list[Tensor]:
    """Of each micro-step, float64 [rows, hidden]; values that every type represents exactly."""
    own = torch.Generator().manual_seed(200 + rank)
    return [torch.randn(ROWS, SIZES["hidden"], generator=own).bfloat16().double() for _ in range(MICRO_STEPS)]


def _execute_one_by_one(layer: Experts, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """Every expert on its rows, one after the other."""
    out = torch.zeros_like(hidden)
    for expert in range(layer.num_experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[token] @ layer.gate_up[expert]).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ layer.down[expert]
        out = out.index_add(0, token, rows * gates[token, place, None])
    return out


@dataclass(frozen=True)
class Step:
    """What a step computed: outputs of this rank's micro-steps, and gradients by name, means over ranks."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def _run_one_process(net: Net, rank: int, ranks: int) -> Step:
    """The step of all ranks in this process."""
    weight = net.moe[0].gate_up
    for layer in net.moe:
        layer.execute_by(functools.partial(_execute_one_by_one, layer))
    outputs: list[Tensor] = []
    for r in range(ranks):
        for hidden, routes in zip(draw_inputs(r), draw_routes(r), strict=True):
            for i, layer in enumerate(net.moe):
                layer.replay(routes[:, i].to(weight.device))
            out = net(hidden.to(weight))
            (out.square().mean() / ranks).backward()
            if r == rank:
                outputs.append(out.detach())
    return Step(outputs, {name: p.grad for name, p in net.named_parameters() if p.grad is not None})


@functools.cache
def _references(dtype: str, device: torch.device, rank: int, ranks: int) -> tuple[Step, Step]:
    """In float64, and in the type that is tested, with the same weights. The same for all paths and residencies."""
    return (
        _run_one_process(Net(dtype, device).double(), rank, ranks),
        _run_one_process(Net(dtype, device), rank, ranks),
    )


def spread(net: Net, **options: Any) -> ExpertParallel:
    """The net's experts over all ranks, and the mean of its other gradients at every drain."""
    ep = ExpertParallel(net.moe, guest_slots=2, **options)
    ep.wrap(net)
    return ep


def _run_planned(net: Net, ep: ExpertParallel, rank: int) -> tuple[Step, dict[str, Any]]:
    """The step of this rank, and the figures of its phase."""
    outputs: list[Tensor] = []
    with ep.plan(draw_routes(rank)) as phase:
        for m, hidden in enumerate(draw_inputs(rank)):
            with phase.micro_step(m):
                out = net(hidden.to(ep.expert_parameters()[0]))
                out.square().mean().backward()
                outputs.append(out.detach())
        phase.drain()
    return Step(outputs, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}), phase.figures()


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Over all tensors, each relative to its own norm."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(found, exact, strict=True):
        total += ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).cpu() ** 2
    return float(total.sqrt())


def _check(case: Case, hardware: Hardware) -> Found:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = hardware.device_of(rank)
    exact, eager = _references(case.dtype, device, rank, ranks)
    net = Net(case.dtype, device)
    with staged(hardware):
        ep = spread(net, residency=case.residency, path=case.path)
        try:
            planned, figures = _run_planned(net, ep, rank)
        except foremoe.InputError as error:
            if error.field == "path":  # no room in shared memory, which all ranks find together
                raise CannotRun(str(error)) from error
            raise
    begin, end = rank * ep.ranks.homes, (rank + 1) * ep.ranks.homes
    experts = {id(p) for p in ep.expert_parameters()}
    own = {name for name, p in net.named_parameters() if id(p) in experts}

    def gradients_of(step: Step) -> list[Tensor]:
        """By the names of the planned step, of this rank's experts alone."""
        of = step.gradients
        return [of[name][begin:end] if name in own and step is not planned else of[name] for name in planned.gradients]

    if set(planned.gradients) != set(exact.gradients):
        raise Failure(f"gradients are missing: {sorted(set(exact.gradients) - set(planned.gradients))}")
    errors = [
        _error(planned.outputs, exact.outputs),
        _error(eager.outputs, exact.outputs),
        _error(gradients_of(planned), gradients_of(exact)),
        _error(gradients_of(eager), gradients_of(exact)),
    ]
    ep.detach()
    return _judge(case, figures, errors, device)


def _judge(case: Case, figures: dict[str, Any], errors: Sequence[float], device: torch.device) -> Found:
    """Collective. errors: of outputs, planned and of one process; of gradients, the same."""
    worst = torch.tensor([*errors, figures["fallbacks"]], dtype=torch.float64, device=device)
    copies = torch.tensor([figures["copies"], figures["host_copies"]], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(copies)
    forward, forward_eager, backward, backward_eager, fallbacks = worst.tolist()
    all_copies, host_copies = copies.tolist()
    for what, error, of_eager in (
        ("outputs", forward, forward_eager),
        ("gradients", backward, backward_eager),
    ):
        if not error <= ROUNDING * of_eager:  # also where it is not a number
            raise Failure(f"{what} are {error:.2g} from float64, those of one process in {case.dtype} {of_eager:.2g}")
    if all_copies == 0 or (case.path == "host" and host_copies == 0):
        raise Failure("no expert was copied on this path, so nothing was tested")
    if fallbacks:
        raise Failure(f"{fallbacks:.0f} layers ran at homes, because experts did not come in time")
    return Found(
        f"outputs {forward:.1e}, gradients {backward:.1e} from float64; one process {backward_eager:.1e};"
        f" {all_copies} copies",
        {
            "output_error": forward,
            "output_error_of_one_process": forward_eager,
            "gradient_error": backward,
            "gradient_error_of_one_process": backward_eager,
            "copies": float(all_copies),
            "host_copies": float(host_copies),
        },
    )
