"""Routes that a trainer will replay, read before the step by a rehearsal.

A trainer's forward step takes a micro-batch from the iterator, gives its routes to Megatron-LM's RouterReplay, and then
calls the model. A rehearsal runs the trainer's own forward step up to that call and reads the routes that each router
was given. So the routes are those of this rank under any tensor, context and pipeline parallelism, packing and padding,
and no adapter repeats how its trainer cuts them. The micro-batches that it took are kept for the schedule, and the
routers' state is restored.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foremoe._errors import refuse

from .counts import Counts
from .lora import replay_of

Routes = Sequence[Iterable[Tensor]]  # [micro-batch][layer], integers [rows, top_k]; −1: the router chooses


@dataclass
class Call:
    """A call of the schedule: its arguments by name, as the trainer passes them, with the model's chunks in a list."""

    keywords: dict[str, Any]

    @property
    def chunks(self) -> list[Any]:
        model = self.keywords["model"]
        return list(model) if isinstance(model, (list, tuple)) else [model]

    @property
    def num_micro_batches(self) -> int:
        return int(self.keywords["num_microbatches"])

    @property
    def forward_only(self) -> bool:
        return bool(self.keywords.get("forward_only", False))

    def keep_micro_batches(self) -> list[Any]:
        """Takes the micro-batches from the trainer's iterator, and leaves an iterator over them for the schedule.

        Returns copies, which a forward step may change. A rank without an iterator has None for each micro-batch.
        """
        given = self.keywords["data_iterator"]
        iterator = given[0] if isinstance(given, (list, tuple)) else given
        if iterator is None:
            return [None] * self.num_micro_batches
        if not hasattr(iterator, "__next__"):
            refuse("data_iterator", f"is {type(iterator).__name__}; expected an iterator over micro-batches")
        kept = []
        with contextlib.suppress(StopIteration):  # Megatron-LM's RerunDataIterator has no __iter__()
            for _ in range(self.num_micro_batches):
                kept.append(next(iterator))
        if len(kept) < self.num_micro_batches:
            refuse(
                "data_iterator", f"has {len(kept)} micro-batches; expected num_microbatches = {self.num_micro_batches}"
            )
        self.keywords["data_iterator"] = [iter(kept)] if isinstance(given, (list, tuple)) else iter(kept)
        return [copy.copy(of) for of in kept]


class _Rehearsed(BaseException):
    """Ends a rehearsal where the model would run. Not an Exception, so that no trainer handles it."""


def rehearse(call: Call, layers: Sequence[Any]) -> Routes | None:
    """Returns the routes that each micro-batch gives to the layers' routers; None if it gives none to any router.

    layers: MoE layers of this pipeline stage. Runs the collectives, if any, of the trainer's forward step.

    Raises InputError if the forward step does not call the model, or gives routes to some routers only.
    """
    found: list[list[Any]] = []
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    random = torch.random.fork_rng(devices)
    with _replay_restored(call.chunks), _models_stopped(call.chunks), torch.no_grad(), random:
        for micro_batch in call.keep_micro_batches():
            iterator = None if micro_batch is None else iter([micro_batch])
            for layer in layers:
                if (own := replay_of(layer)) is not None:
                    own.target_topk_idx = None
            try:
                call.keywords["forward_step_func"](iterator, call.chunks[0])
            except Exception as error:
                error.add_note(f"in the forward step of micro-batch {len(found)}, which foremoe ran to read its routes")
                raise
            except _Rehearsed:
                targets = [getattr(replay_of(layer), "target_topk_idx", None) for layer in layers]
            else:
                refuse("forward_step_func", "did not call the model; expected it to call the module that it was given")
            if layers and all(of is None for of in targets):
                return None
            for i, of in enumerate(targets):
                if of is None:
                    refuse(
                        "router_replay",
                        f"has routes for some MoE layers only; expected routes for all {len(layers)}",
                        f"[{i}]",
                    )
            found.append(targets)
    return found if layers else None


@contextlib.contextmanager
def _models_stopped(chunks: Sequence[Any]) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Rehearsed

    hooks = [chunk.register_forward_pre_hook(stop, prepend=True) for chunk in chunks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _replay_restored(chunks: Sequence[Any]) -> Iterator[None]:
    """Restores the state of all routers' replay on exit."""
    replays = [
        own for chunk in chunks for m in chunk.modules() if (own := getattr(m, "router_replay", None)) is not None
    ]
    before = [{name: list(v) if isinstance(v, list) else v for name, v in vars(own).items()} for own in replays]
    try:
        yield
    finally:
        for own, state in zip(replays, before, strict=True):
            vars(own).clear()
            vars(own).update(state)


def count(routes: Routes, num_experts: int) -> tuple[Counts, bool]:
    """Counts rows per expert, int64 [micro_steps, layers, experts]. A row counts once for each of its experts.

    Also returns whether the router chooses for some rows, which are not counted. Waits for the device once.

    Raises InputError for ids out of range, and for rows with a route in some entries only.
    """
    sums = torch.stack([torch.stack([_sums(of, num_experts) for of in layers]) for layers in routes]).cpu().numpy()
    counts, without, too_large, some = np.split(sums, [num_experts, num_experts + 1, num_experts + 2], -1)
    for wrong, problem in (
        (too_large, f"has ids above {num_experts - 1}, the last expert"),
        (some - without, "has rows with −1 in some entries; expected −1 in all, where the router chooses, or in none"),
    ):
        for place in np.argwhere(wrong)[:1]:
            refuse("routes", problem, f"[{place[0]}][{place[1]}]")
    return np.ascontiguousarray(counts), bool(without.any())


def _sums(routes: Tensor, num_experts: int) -> Tensor:
    """Returns the rows of each expert, without a route, with an id too large, and with a negative id; int64."""
    ids = routes.reshape(-1, routes.shape[-1]).long()
    missing = ids < 0
    bins = torch.where(missing, num_experts, ids.clamp(max=num_experts)) + (ids >= num_experts)
    chosen = torch.zeros(len(ids), num_experts + 2, dtype=torch.bool, device=ids.device).scatter_(1, bins, True)
    chosen[:, num_experts] = missing.all(1)
    return torch.cat([chosen, missing.any(1, keepdim=True)], 1).sum(0)
