"""Planning in shares: each rank of an expert-parallel group plans some layers, and all ranks get the whole plan.

Layers are planned independently, so the joined parts equal, byte for byte, the plan that each rank would make alone.
Under residency shared, micro-steps are also independent. Micro-steps arrive in blocks, and a phase runs the first block
while the next blocks are planned.
"""

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

import foremoe
from foremoe import _core

from .communication import gathered_bytes
from .failures import Channel

# Policies that plan each layer independently.
POLICIES = ("foremoe", "static", "vanilla")
SMALLEST = 1 << 18  # counts of a load; one rank plans fewer in less time than the gather takes (lab/performance.md)


class SharedPlan:
    """A plan in progress, with the methods of foremoe.RunningPlan. Under residency shared its micro-steps arrive in
    blocks; otherwise the whole plan is final when it begins."""

    def __init__(self, growing: Any, planned: Future[None]) -> None:
        self._growing = growing
        self._planned = planned

    def begin(self) -> foremoe.Plan:
        """Waits for the first block. All methods raise an error of one rank's planning on all ranks."""
        self.wait_for(0)
        plan: foremoe.Plan = self._growing.begin()
        return plan

    def wait_for(self, micro_step: int) -> None:
        try:
            self._growing.wait_for(micro_step)
        except RuntimeError:
            self._planned.result()  # raises the original error
            raise

    def finish(self) -> foremoe.Plan:
        self._planned.result()
        return self.begin()


class Shares:
    """Begins plans that the ranks of a group make together, one after the other, in a background thread.

    Each rank makes small plans, and plans of other policies, alone.
    """

    def __init__(self, channel: Channel | None, planning: dict[str, Any]) -> None:
        """
        Args:
            channel: Gloo channel between the ranks, used by nothing else at the same time. None: this rank plans alone.
            planning: Arguments of foremoe.start_plan(), including the policy; equal on all ranks, except threads.
        """
        self._planning = planning
        self._channel = channel
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foremoe-shares")

    def start_plan(self, load: foremoe.Load, **more: Any) -> foremoe.RunningPlan | SharedPlan:
        """Begins a plan. Collective, on all ranks in the same order.

        Args:
            load: Must be equal on all ranks; not checked.
            more: Further arguments of foremoe.start_plan(), the same on all ranks.
        """
        planning = self._planning | more
        if self._channel is None or planning["policy"] not in POLICIES or load.array.size < SMALLEST:
            return foremoe.start_plan(load, **planning)
        growing = _core._GrowingPlan(load)
        return SharedPlan(growing, self._pool.submit(_plan_in_blocks, growing, self._channel.group, load, **planning))

    def close(self, failed: bool = False) -> None:
        """Ends the thread after the plans that have begun. failed: At once, since other ranks may have ended."""
        self._pool.shutdown(wait=not failed, cancel_futures=failed)


def layers_of(rank: int, num_ranks: int, num_layers: int) -> range:
    """Returns the layers that a rank plans; none for ranks beyond the layers."""
    return range(num_layers * rank // num_ranks, num_layers * (rank + 1) // num_ranks)


def blocks_of(num_micro_steps: int) -> list[slice]:
    """Returns blocks of micro-steps: first one, so that the phase can begin, then blocks that double the total."""
    ends = [0]
    while ends[-1] < num_micro_steps:
        ends.append(min(num_micro_steps, max(1, 2 * ends[-1])))
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _plan_in_blocks(growing: Any, group: Any, load: foremoe.Load, **planning: Any) -> None:
    """Plans block by block with policy foremoe under residency shared. Otherwise one block has all micro-steps."""
    streams = planning["policy"] == "foremoe" and planning.get("residency") == "shared"
    blocks = blocks_of(load.num_micro_steps) if streams else [slice(None)]
    try:
        failed: Exception | None = None  # on this rank, since the last gather
        for block in blocks:
            own = failed or _own_part(group, load, block, **planning)
            gathered = gathered_bytes(pickle.dumps(own), group)
            try:
                failed = None
                shares = [pickle.loads(share) for share in gathered]
            except Exception as error:  # the other ranks go on to the next gather, where they learn of it
                failed = error
                continue
            _raise_first(shares, own, dist.get_rank(group))
            try:
                growing.append(foremoe.Plan.join([share for share in shares if share is not None]))
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
    except BaseException as error:
        growing.fail(f"the plan could not be finished: {error}")
        raise


def _own_part(
    group: Any,
    load: foremoe.Load,
    block: slice,
    *,
    policy: str,
    threads: int,
    homes: Any = None,
    previous: foremoe.Plan | None = None,
    **options: Any,
) -> foremoe.Plan | Exception | None:
    """Returns this rank's layers of a block of micro-steps, None if it has none, or the error of planning them."""
    rank = dist.get_rank(group)
    try:
        layers = layers_of(rank, dist.get_world_size(group), load.num_layers)
        if not layers:
            return None
        if block != slice(None):
            load = foremoe.Load.from_array(
                load.array[block], top_k=load.top_k, ranks_per_node=load.ranks_per_node, name=load.name
            )
        # foremoe.plan() would log its remarks on every rank in every step
        return _core._plan(load, policy, options, homes=homes, previous=previous, layers=layers, threads=threads)
    except (foremoe.InputError, foremoe.PolicySkipped) as error:
        return error
    except Exception as error:
        raised = RuntimeError(f"rank {rank} could not plan its layers: {error!r}")
        raised.__cause__ = error
        return raised


def _raise_first(shares: list[Any], own: foremoe.Plan | Exception | None, rank: int) -> None:
    """Raises the error of the first rank that failed; this rank's own error if it is that rank."""
    for of, share in enumerate(shares):
        if isinstance(share, Exception):
            raise own if of == rank and isinstance(own, Exception) else share
