"""Planning in shares: each rank of an expert-parallel group plans some layers, and all ranks get the whole plan.

Layers are planned independently, so the joined parts equal, byte for byte, the plan that each rank would make alone.
Under residency shared, micro-steps are also independent. Micro-steps arrive in blocks, and a phase runs the first block
while the next blocks are planned.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import pickle
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import torch.distributed as dist

import foremoe
from foremoe import _core

from .background import Background
from .choice import Choice
from .communication import gathered_bytes
from .failures import Channel

_LOOK_SECONDS = 0.1
SMALLEST = 1 << 18  # counts of a load; one rank plans fewer in less time than the gather takes (lab/performance.md)


class SharedPlan:
    """A plan in progress, with the methods of foremoe.RunningPlan. Under residency shared its micro-steps arrive in
    blocks; otherwise, and where no plan may be faster, the whole plan is final when it begins."""

    def __init__(self, growing: Any, planned: Future[list[float]], look: Callable[[], None]) -> None:
        """look: Called about ten times a second while a method waits. Raises if no rank can finish the plan."""
        self._growing = growing
        self._planned = planned
        self._look = look

    def begin(self) -> foremoe.Plan:
        """Waits for the first block. All methods raise an error of one rank's planning on all ranks."""
        self.wait_for(0)
        plan: foremoe.Plan = self._growing.begin()
        return plan

    def wait_for(self, micro_step: int) -> None:
        while not self._is_planned(micro_step):
            self._look()

    def _is_planned(self, micro_step: int) -> bool:
        try:
            return bool(self._growing.is_planned_after_a_while(micro_step))
        except RuntimeError:
            self._planned.result()  # raises the original error
            raise

    def finish(self) -> foremoe.Plan:
        self.seconds()
        return self.begin()

    def seconds(self) -> list[float]:
        """Returns the modelled seconds of the phase as planned and without a plan; nothing if they were not compared.
        Waits until the plan is final."""
        while concurrent.futures.wait([self._planned], _LOOK_SECONDS).not_done:
            self._look()
        return self._planned.result()


class Shares:
    """Begins plans that the ranks of a group make together, one after the other, in a background thread.

    Each rank makes small plans, and plans of other policies, alone.
    """

    def __init__(
        self,
        channel: Channel | None,
        planning: dict[str, Any],
        choice: Choice | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            channel: Gloo channel between the ranks, used by nothing else at the same time. None: this rank plans alone.
            planning: Arguments of foremoe.start_plan(), including the policy; equal on all ranks, except threads.
            choice: Makes further arguments at the first plan. None: the cluster is not known.
            look: See SharedPlan.
        """
        self._choice = choice
        self._planning = planning
        self._channel = channel
        self._look = look
        self._pool = Background("shares")

    def start_plan(self, load: foremoe.Load, phase: str = "policy_update", **more: Any) -> SharedPlan:
        """Begins a plan. Collective, on all ranks in the same order.

        Args:
            load: Must be equal on all ranks; not checked.
            more: Further arguments of foremoe.start_plan(), the same on all ranks.
        """
        planning = self._planning | more
        group = None if self._channel is None else self._channel.group
        alone = load.array.size < SMALLEST or not _core._plans_layers_alone(planning["policy"])
        growing = _core._GrowingPlan(load)
        planned = self._pool.submit(self._plan, growing, group, alone, load, phase, planning)
        planned.add_done_callback(functools.partial(_end_readers, growing))
        return SharedPlan(growing, planned, self._look)

    def _plan(
        self, growing: Any, group: Any, alone: bool, load: foremoe.Load, phase: str, planning: dict[str, Any]
    ) -> list[float]:
        """Plans in the background. Returns SharedPlan.seconds()."""
        choice = self._choice
        try:
            if choice is not None:
                if not choice.is_made():
                    choice.keep(_first_made(lambda: choice.make(load, planning), group))
                planning = planning | choice.options
            compared = None if choice is None or not choice.is_pending else (choice, phase)
            return _plan_in_blocks(growing, None if alone else group, load, compared, **planning)
        except BaseException as error:
            growing.fail(f"the plan could not be finished: {error}")
            raise

    def close(self, failed: bool = False) -> None:
        """Ends the thread after the plans that have begun. failed: Stops them, since other ranks may have ended."""
        self._pool.close(failed)


def _end_readers(growing: Any, planned: Future[list[float]]) -> None:
    """Ends waits for a plan that was stopped, perhaps before _plan() began."""
    if isinstance(planned.exception(), CancelledError):
        growing.fail("the plan was stopped")


def layers_of(rank: int, num_ranks: int, num_layers: int) -> range:
    """Returns the layers that a rank plans; none for ranks beyond the layers."""
    return range(num_layers * rank // num_ranks, num_layers * (rank + 1) // num_ranks)


def blocks_of(num_micro_steps: int) -> list[slice]:
    """Returns blocks of micro-steps: first one, so that the phase can begin, then blocks that double the total."""
    ends = [0]
    while ends[-1] < num_micro_steps:
        ends.append(min(num_micro_steps, max(1, 2 * ends[-1])))
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _first_made(make: Callable[[], dict[str, Any]], group: Any) -> dict[str, Any]:
    """Returns what the first rank makes; without a group, each rank makes it. Collective."""
    if group is None:
        return make()
    own: Any = None
    rank = dist.get_rank(group)
    if rank == 0:
        try:
            own = make()
        except Exception as error:
            own = error
    made = pickle.loads(gathered_bytes(pickle.dumps(own), group)[0])
    _raise_first([made], own, rank)
    return dict(made)


def _plan_in_blocks(
    growing: Any, group: Any, load: foremoe.Load, compared: tuple[Choice, str] | None, **planning: Any
) -> list[float]:
    """Plans block by block with policy foremoe under residency shared. Otherwise one block has all micro-steps.

    group: None: this rank plans all layers. compared: The choice that compares the phase of this name with none.
    """
    blocks = blocks_of(load.num_micro_steps) if _streams(compared, **planning) else [slice(None)]
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    seconds = np.zeros(2)
    failed: Exception | None = None  # on this rank, since the last gather
    for block in blocks:
        own = failed or _own_part(rank, num_ranks, load, block, compared, **planning)
        gathered = [] if group is None else gathered_bytes(pickle.dumps(own), group)
        try:
            failed = None
            shares = [pickle.loads(share) for share in gathered] or [own]
        except Exception as error:  # the other ranks go on to the next gather, where they learn of it
            failed = error
            continue
        _raise_first(shares, own, rank)
        try:
            parts = [share for share in shares if share is not None]
            plan = foremoe.Plan.join([part for part, _ in parts])
            seconds = sum((of for _, of in parts), seconds)
            if compared and block == blocks[-1]:
                choice, phase = compared
                plan = choice.judged(plan, load, phase, seconds, num_ranks, planning)
            growing.append(plan)
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed
    return seconds.tolist() if compared else []


def _streams(compared: tuple[Choice, str] | None, *, policy: str, residency: str = "", **_: Any) -> bool:
    """Returns whether a phase may begin before all of its micro-steps are planned."""
    return policy == "foremoe" and residency == "shared" and not (compared is not None and compared[0].replaces)


def _own_part(
    rank: int,
    num_ranks: int,
    load: foremoe.Load,
    block: slice,
    compared: tuple[Choice, str] | None,
    *,
    policy: str,
    threads: int,
    homes: Any = None,
    previous: foremoe.Plan | None = None,
    **options: Any,
) -> tuple[foremoe.Plan, np.ndarray[Any, Any]] | Exception | None:
    """Returns this rank's layers of a block of micro-steps and their modelled seconds, None if it has none, or the
    error of planning them."""
    try:
        layers = layers_of(rank, num_ranks, load.num_layers)
        if not layers:
            return None
        if block != slice(None):
            load = foremoe.Load.from_array(
                load.array[block], top_k=load.top_k, ranks_per_node=load.ranks_per_node, name=load.name
            )
        # foremoe.plan() would log its remarks on every rank in every step
        plan = _core._plan(load, policy, options, homes=homes, previous=previous, layers=layers, threads=threads)
        return plan, np.zeros(2) if compared is None else compared[0].seconds(plan, load, compared[1], homes)
    except (foremoe.InputError, foremoe.PolicySkipped) as error:
        return error
    except Exception as error:
        if num_ranks == 1:
            return error
        raised = RuntimeError(f"rank {rank} could not plan its layers: {error!r}")
        raised.__cause__ = error
        return raised


def _raise_first(shares: list[Any], own: Any, rank: int) -> None:
    """Raises the error of the first rank that failed; this rank's own error if it is that rank."""
    for of, share in enumerate(shares):
        if isinstance(share, Exception):
            raise own if of == rank and isinstance(own, Exception) else share
