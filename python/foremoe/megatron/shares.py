"""Planning shared by the ranks of an expert-parallel group: each plans some of the layers, and all get the whole plan.

Layers are planned independently: the parts join to the plan that each rank would make alone, byte for byte.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

import foremoe
from foremoe import _core

# That plan a layer without knowing the others.
POLICIES = ("foremoe", "static", "vanilla")


class SharedPlan:
    """A plan in the making, as foremoe.RunningPlan: all of it is final at once, when it begins."""

    def __init__(self, planned: Future[foremoe.Plan], num_micro_steps: int) -> None:
        self._planned = planned
        self._num_micro_steps = num_micro_steps

    def begin(self) -> foremoe.Plan:
        """Waits until the plan is final. What one rank's planning raised is raised on all ranks."""
        return self._planned.result()

    def wait_for(self, micro_step: int) -> None:
        if not 0 <= micro_step < self._num_micro_steps:
            last = self._num_micro_steps - 1
            raise foremoe.InputError(f"micro_step: {micro_step} is none of 0 … {last}", field="micro_step")
        self._planned.result()

    def finish(self) -> foremoe.Plan:
        return self._planned.result()


class Shares:
    """Begins plans that the ranks of a group make together, one after the other, each on a thread of its own."""

    def __init__(self, group: Any, planning: dict[str, Any]) -> None:
        """group: of gloo, which nobody else uses at the same time. planning: arguments of foremoe.start_plan(), policy
        among them; the same on all ranks, but for threads."""
        self._planning = planning
        self._group = group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foremoe-shares")
        self._can_share = planning["policy"] in POLICIES

    def start_plan(self, load: foremoe.Load, **more: Any) -> foremoe.RunningPlan | SharedPlan:
        """more: further arguments of foremoe.start_plan(). Collective, with the same load, which it does not check, and
        on all ranks in the same order."""
        planning = self._planning | more
        if not self._can_share:
            return foremoe.start_plan(load, **planning)
        return SharedPlan(self._pool.submit(self._plan, load, **planning), load.num_micro_steps)

    def _plan(self, load: foremoe.Load, *, policy: str, threads: int, **options: Any) -> foremoe.Plan:
        own: foremoe.Plan | Exception | None = None
        cause: Exception | None = None
        layers = self.layers_of(self._rank, load.num_layers)
        try:
            if layers:  # foremoe.plan() would log its remarks on every rank in every step
                own = _core._plan(load, policy, options, None, None, None, layers, threads, None)
        except (foremoe.InputError, foremoe.PolicySkipped) as error:
            own = cause = error
        except Exception as error:
            own, cause = RuntimeError(f"rank {self._rank} could not plan its layers: {error!r}"), error
        shares: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(shares, own, group=self._group)
        for rank, share in enumerate(shares):
            if isinstance(share, Exception):
                raise share from (cause if rank == self._rank else None)
        return foremoe.Plan.join([share for share in shares if share is not None])

    def layers_of(self, rank: int, num_layers: int) -> range:
        """That a rank plans; empty where there are more ranks than layers."""
        return range(num_layers * rank // self._num_ranks, num_layers * (rank + 1) // self._num_ranks)

    def close(self, failed: bool = False) -> None:
        """Ends it when all plans that were begun are made. failed: at once, since other ranks may be gone."""
        self._pool.shutdown(wait=not failed, cancel_futures=failed)
