"""Planned layers never make the host wait for the device. Runs on a fake device "cuda" (fake_cuda.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import DATA_DEPENDENT, FakeCuda, begin_fake_group

from foremoe.torch import ExpertParallel, grouped_linear
from foremoe.torch.doctor.layers import Experts, Sizes

RANKS, LAYERS, MICRO_STEPS, ROWS, EXPERTS, TOP_K, HIDDEN = 4, 3, 2, 32, 16, 2, 32


@pytest.fixture(scope="module")
def cuda() -> Iterator[FakeCuda]:
    begin_fake_group(0, RANKS)
    yield FakeCuda()
    dist.destroy_process_group()


def draw_routes() -> list[torch.Tensor]:
    """Routes of each micro-step, [rows, layers, top_k]. The hot experts are not on rank 0, so rank 0 has guests."""
    random = torch.Generator().manual_seed(0)
    weight = torch.full((EXPERTS,), 0.02)
    weight[5], weight[9], weight[13] = 1.0, 0.6, 0.4
    return [
        torch.multinomial(weight.expand(ROWS * LAYERS, -1), TOP_K, generator=random).view(ROWS, LAYERS, TOP_K)
        for _ in range(MICRO_STEPS)
    ]


class LeavePhase(Exception):
    """Ends a phase before drain(), which waits for the device once."""


def waits_of_a_phase(
    cuda: FakeCuda,
    *,
    phase: str = "policy_update",
    on_mismatch: str = "replay",
    spoil: Callable[[torch.Tensor], object] | None = None,
    **options: Any,
) -> tuple[list[str], int]:
    """Returns the waits in all micro-steps, from preparation to backward, and the number of copies into this rank.

    Plans on the CPU, then replaces weights by fake "cuda" tensors. spoil: called with each layer's hidden states.
    """
    sizes = Sizes(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, intermediate=HIDDEN, dtype="bfloat16")
    layers = [Experts(f"layer {i}", sizes) for i in range(LAYERS)]
    alone = mock.patch("foremoe.torch.opening.can_make_gloo", lambda *_: False)  # plans all layers: no other rank runs
    with alone:
        ep = ExpertParallel(layers, ranks_per_node=2, **options)
    ep._session._failures._store = dist.HashStore()  # that of the fake group returns a value for any key
    planned = ep.plan(draw_routes(), phase, on_mismatch=on_mismatch)
    for layer in layers:
        layer.set_weights({name: cuda.parameter_like(weight) for name, weight in layer.weights().items()})
        layer.router.weight = cuda.parameter_like(layer.router.weight)
    ep.experts.ranks = dataclasses.replace(ep.ranks, device=cuda.device)
    grad = contextlib.nullcontext() if phase == "policy_update" else torch.no_grad()
    cuda.waits.clear()
    with cuda.stand_ins(), contextlib.suppress(LeavePhase), grad, planned:
        for m in planned.micro_steps:
            with planned.micro_step(m):
                hidden = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device=cuda.device)
                for layer in layers:
                    if spoil is not None:
                        spoil(hidden.detach())
                    hidden = layer(hidden)
                if phase == "policy_update":
                    hidden.float().square().mean().backward()
        found = list(cuda.waits), planned.guests.copies["peer"]
        raise LeavePhase
    return found


@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
@pytest.mark.parametrize("phase", ["policy_update", "recompute"])
def test_planned_layers_never_wait_for_the_device(cuda: FakeCuda, residency: str, phase: str) -> None:
    before = cuda.uploads
    waits, copies = waits_of_a_phase(cuda, phase=phase, residency=residency, guest_slots=2)
    assert copies > 0
    assert waits == []
    assert cuda.uploads - before == MICRO_STEPS, "one copy brings the tables of all layers"


@pytest.mark.parametrize("options", [{"guest_slots": 0}, {"policy": "vanilla"}], ids=str)
def test_plans_without_guests_run_on_the_device(cuda: FakeCuda, options: dict[str, Any]) -> None:
    """The tables of these plans contain empty arrays."""
    assert waits_of_a_phase(cuda, **options) == ([], 0)


def test_layers_with_their_own_routing_wait_for_counts_and_the_harness_detects_it(cuda: FakeCuda) -> None:
    with pytest.raises(DATA_DEPENDENT):
        waits_of_a_phase(cuda, on_mismatch="home")
    assert len(cuda.waits) == 1
    assert "dispatch.py" in cuda.waits[0]


@pytest.mark.parametrize("read", ["item", "tolist", "nonzero", "numpy"])
def test_an_injected_read_of_a_value_is_counted(cuda: FakeCuda, read: str) -> None:
    with pytest.raises((*DATA_DEPENDENT, RuntimeError, TypeError)):
        waits_of_a_phase(cuda, spoil=lambda hidden: getattr(hidden.sum(), read)())
    if read != "numpy":  # numpy() raises before it reads
        assert len(cuda.waits) == 1
        assert "test_fake_cuda.py" in cuda.waits[0]


@pytest.mark.parametrize(("spoil", "name"), [
    (lambda hidden: hidden.cpu(), "cuda → cpu"),
    (lambda hidden: hidden.to("cpu", non_blocking=True), "cuda → cpu"),
    (lambda hidden: torch.zeros(3).to(hidden.device), "cpu → cuda"),
    (lambda hidden: torch.zeros(3).to(hidden.device, non_blocking=True), "cpu → cuda"),
    (lambda hidden: torch.zeros(3).pin_memory().to(hidden.device), "cpu → cuda"),
    (lambda hidden: hidden[0].copy_(torch.zeros(HIDDEN)), "cpu → cuda"),
    (lambda hidden: torch.tensor([1, 2], device=hidden.device), "cpu → cuda"),
    (lambda hidden: hidden.clone().__setitem__(hidden > 0, hidden[0]), "by a mask"),
    (lambda hidden: hidden[torch.arange(3)], "by an index on the host"),
    (lambda hidden: torch.cuda.synchronize(), "synchronize"),
    (lambda hidden: torch.cuda.Event().synchronize(), "synchronize"),
])  # fmt: skip
def test_an_injected_wait_is_counted_once_per_layer(
    cuda: FakeCuda, spoil: Callable[[torch.Tensor], object], name: str
) -> None:
    waits, _ = waits_of_a_phase(cuda, spoil=spoil)
    assert len(waits) == LAYERS * MICRO_STEPS
    assert all(name in wait and "test_fake_cuda.py" in wait for wait in waits)


def test_a_pinned_non_blocking_copy_does_not_count_as_a_wait(cuda: FakeCuda) -> None:
    waits, _ = waits_of_a_phase(
        cuda, spoil=lambda hidden: torch.zeros(3).pin_memory().to(hidden.device, non_blocking=True)
    )
    assert waits == []


def test_layouts_that_cuda_rejects_are_rejected(cuda: FakeCuda) -> None:
    """Operands of a grouped GEMM need strides that are multiples of 16 bytes."""
    with cuda.stand_ins():
        offsets = torch.zeros(2, dtype=torch.int32, device=cuda.device)
        rows = torch.zeros(4, 8, dtype=torch.bfloat16, device=cuda.device)
        weight = torch.zeros(2, 8, 8, dtype=torch.bfloat16, device=cuda.device)
        assert grouped_linear(rows, weight, offsets).shape == (4, 8)
        with pytest.raises(RuntimeError, match="multiple of 16"):
            grouped_linear(rows[:, :7], weight[:, :7, :7].contiguous(), offsets)


def test_the_fake_autograd_engine_computes_the_gradients_of_autograd(cuda: FakeCuda) -> None:
    """Checks on real tensors: values, accumulation of a tensor read twice, and gradients of selected inputs."""

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w, b = (torch.randn(size, requires_grad=True) for size in ((6, 4), (4, 4), (4,)))
        first, second = (x @ w + b).tanh().chunk(2, -1)
        out = (first * second + first.exp()).sum() + (w * w).sum()
        of_w = torch.autograd.grad(out, [w], retain_graph=True)
        out.backward()
        assert x.grad is not None and w.grad is not None and b.grad is not None
        return [*of_w, x.grad, w.grad, b.grad]

    expected = gradients()
    with cuda.stand_ins():
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
