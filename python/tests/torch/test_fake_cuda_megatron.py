"""Counts waits for the device in Megatron-LM's planned layers, on a fake device "cuda" (fake_cuda.py).

The tests run in a process of their own, because megatron_training.py builds layers on the CPU with stubs for CUDA.
Parameters then become fake tensors on "cuda". Operations that do not wait replace Transformer Engine's fused kernels,
so the fused case tests only the code around these kernels.
"""

from __future__ import annotations

import contextlib
import tempfile
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from fake_cuda import DATA_DEPENDENT, FakeCuda, begin_fake_group
from processes import run_ranks

RANKS, MICRO_STEPS = 4, 2
MASKED_SELECT = "aten.masked_select.default at moe_utils.py"
FUSED = ("fused_permute", "fused_permute_with_probs", "fused_unpermute", "fused_sort_chunks_by_index",
         "fused_sort_chunks_by_index_with_probs")  # fmt: skip


class LeaveStep(Exception):
    """Leaves a step early, because a completed step waits for the device once."""


class SynchronousExecutor:
    """A Background that runs functions in submit(), because fake tensors work on one thread only."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future

    def close(self, **_: Any) -> None: ...


def permute_with_probs(tokens: Any, probs: Any, routing_map: Any, num_out_tokens: int) -> Any:
    chosen = torch.nonzero_static(routing_map.T.reshape(-1), size=num_out_tokens)[:, 0]
    rows = chosen % len(tokens)
    return tokens.index_select(0, rows), probs.T.reshape(-1).index_select(0, chosen), rows


def unpermute(rows: Any, order: Any, merging_probs: Any, restore_shape: Any) -> Any:
    assert merging_probs is None
    return rows.new_zeros(restore_shape).index_add(0, order, rows)


def sort_chunks(rows: Any, sizes: Any, order: Any) -> Any:
    assert sizes.is_cuda and order.is_cuda  # the kernel reads them there
    return rows.clone()


def sort_chunks_with_probs(rows: Any, probs: Any, sizes: Any, order: Any) -> Any:
    return sort_chunks(rows, sizes, order), probs.clone()


def without_waits(tensor: Any, mask: Any, num_out_tokens: int) -> Any:
    """Return masked_select()'s result, given its size, without waiting for the device."""
    chosen = torch.nonzero_static(mask.reshape(-1), size=num_out_tokens)[:, 0]
    return tensor.reshape(-1).index_select(0, chosen)


def move(module: Any, cuda: FakeCuda) -> None:
    """Replace all parameters by fake tensors on the device."""
    for of in module.modules():
        for name, parameter in list(of.named_parameters(recurse=False)):
            setattr(of, name, cuda.parameter_like(parameter))


def waits_of_a_step(cuda: FakeCuda, *, fused: bool, residency: str, sized: bool = True) -> tuple[list[str], int]:
    """Return the waits of all layers, forward and backward, and the number of experts copied into this rank.

    masked_select() waits for the size of its result. If `sized`, these waits are counted, and the result has one row
    per row sent. Otherwise masked_select() raises.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron_training import HIDDEN, TOKENS, TOP_K, Case, counts_of, make_config, make_net, replay

    import foremoe.megatron
    from foremoe._engine import shares
    from foremoe.megatron import experts, step
    from foremoe.megatron import replicas as of_replicas

    select, groups = torch.Tensor.masked_select, of_replicas.make_groups

    def counted_select(tensor: Any, mask: Any) -> Any:
        if not tensor.is_cuda:
            return select(tensor, mask)
        cuda.count("aten.masked_select.default", caller=1)
        return without_waits(tensor, mask, TOKENS * TOP_K)

    def fake_groups(wanted: Any, device: Any) -> Any:
        return groups([(group, "fake") for group, _ in wanted], device)

    RouterReplay.clear_global_router_replay_instances()
    with pytest.MonkeyPatch.context() as patch, cuda.stand_ins():
        patch.setattr(of_replicas, "make_groups", fake_groups)
        patch.setattr(shares, "SMALLEST", 1 << 62)  # this process plans everything, since no other rank exists
        patch.setattr(step, "Background", SynchronousExecutor)
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        for name, function in zip(
            FUSED, (None, permute_with_probs, unpermute, sort_chunks, sort_chunks_with_probs), strict=True
        ):
            patch.setattr(moe_utils, name, function or permute_with_probs, raising=False)
        patch.setattr(moe_utils, "HAVE_TE", fused)
        if sized:
            patch.setattr(torch.Tensor, "masked_select", counted_select)
        with pytest.MonkeyPatch.context() as build:
            build.setattr(torch.cuda, "current_device", lambda: "cpu")
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS, create_gloo_process_groups=False)
            case = Case(dtype=torch.bfloat16)
            net = make_net(make_config(case, moe_permute_fusion=fused, moe_router_dtype="fp32"))
            move(net, cuda)
            build.setattr(experts.GuestExperts, "try_lending", lambda _: None)  # try_lending() reads values
            replicas = foremoe.megatron.attach(net, ranks_per_node=2, guest_slots=2, residency=residency)
            build.setattr(replicas, "_device", torch.device("cpu"))
            plan = replicas.plan(counts_of(0, 0)[:MICRO_STEPS])
            plan.finish()
        for guests, moe in zip(replicas._guests, replicas._moes, strict=True):
            move(guests.module, cuda)
            guests._parameters = experts.expert_parameters(guests.module, moe.name)
        patch.setattr(replicas, "_expect_same", lambda *_: None)  # _expect_same() compares digests on the device
        cuda.waits.clear()
        with contextlib.suppress(LeaveStep), replicas.step(plan):
            for m in range(MICRO_STEPS):
                replay(net, 0, m)
                for layer in net.moe:  # a trainer keeps routes on the device
                    of = layer.router.router_replay
                    of.set_target_indices(of.target_topk_idx.pin_memory().to(cuda.device, non_blocking=True))
                hidden = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device=cuda.device, requires_grad=True)
                net(hidden).float().square().mean().backward()
            found = list(cuda.waits), net.moe[0].token_dispatcher.step.engine.guests.copies["peer"]
            raise LeaveStep
        return found


def work(_: int, folder: str) -> None:
    begin_fake_group(0, RANKS)
    cuda = FakeCuda()
    found: dict[str, Any] = {}
    for residency in ("static", "resident", "shared"):
        for fused in (True, False):
            case = f"{residency}, {'fused' if fused else 'unfused'}"
            found[case] = waits_of_a_step(cuda, fused=fused, residency=residency)
    with contextlib.suppress(*DATA_DEPENDENT):
        waits_of_a_step(cuda, fused=False, residency="resident", sized=False)
    found["not sized"] = cuda.waits[:1]
    torch.save(found, f"{folder}/found.pt")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, work, folder)
        of: dict[str, Any] = torch.load(f"{folder}/found.pt")
        return of


@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
def test_planned_layers_with_fused_permutation_never_wait_for_the_device(found: Any, residency: str) -> None:
    waits, copies = found[f"{residency}, fused"]
    assert copies > 0
    assert waits == []


def selects_by_mask() -> bool:
    """Returns whether Megatron-LM permutes with masked_select(), as 0.16 does; from 0.17 on it sorts without waits."""
    import megatron.core

    return str(megatron.core.__version__).startswith("0.16.")


@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
def test_unfused_permutation_waits_only_in_megatrons_own_masked_select(found: Any, residency: str) -> None:
    from megatron_training import LAYERS

    waits, copies = found[f"{residency}, unfused"]
    assert copies > 0
    assert len(waits) == (2 * LAYERS * MICRO_STEPS if selects_by_mask() else 0)
    assert all(MASKED_SELECT in wait for wait in waits)


def test_masked_select_without_a_known_size_raises(found: Any) -> None:
    if not selects_by_mask():
        pytest.skip("this megatron-core permutes without masked_select()")
    (wait,) = found["not sized"]
    assert MASKED_SELECT in wait
