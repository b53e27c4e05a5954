"""Shadow mode: estimates the benefit of balancing from a step's own routes, and leaves the model unchanged.

A hook on each router counts the rows of each expert on the device. When a micro-batch has passed the last MoE layer of
a model chunk, its counts are copied to the host asynchronously. After the step a background thread gathers the counts
[micro_steps, layers, experts] of all ranks, once, and plans. The thread uses its own gloo group, since Replicas.plan()
may run at the same time.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

import foremoe
from foremoe._engine.background import Background, pause
from foremoe._engine.choice import Choice
from foremoe._engine.failures import Channel
from foremoe._engine.shares import Shares

from .counts import gathered_counts
from .metrics import figures
from .plan import PipelineStage

PENDING = 2  # steps that may wait to be planned; a further step waits for the oldest
_log = logging.getLogger("foremoe")


class Shadow:
    """Counts rows and plans for an unchanged model."""

    def __init__(
        self, stage: PipelineStage, chunks: Sequence[Sequence[Any]], choice: Choice | None, group: Any
    ) -> None:
        """chunks: MoE layers of each chunk. choice: Models seconds, if given. group: Gloo group of the same ranks."""
        self._stage = stage
        self._group = group
        self._shares = Shares(Channel(group), stage.arguments.planning(), choice)
        self._open = False
        # Per chunk, for its current micro-batch: int32 [layers of chunk, experts], and its rows as views.
        self._rows: list[tuple[Tensor, tuple[Tensor, ...]]] = [(torch.empty(0), ())] * len(chunks)
        self._counted: list[list[Tensor]] = [[] for _ in chunks]  # [chunk][micro-batch], on the host or in transit
        self._hooks = [
            layer.router.register_forward_hook(self._hook(chunk, position, len(layers)))
            for chunk, layers in enumerate(chunks)
            for position, layer in enumerate(layers)
        ]
        self._pool = Background("shadow")
        self._pending: collections.deque[Future[None]] = collections.deque()
        self._metrics: dict[str, float] = {}

    def _hook(self, chunk: int, position: int, layers: int) -> Callable[[Any, Any, Any], None]:
        def count(module: Any, inputs: Any, output: Any) -> None:
            # Skips recomputations by checkpoints, which run inside a backward pass.
            if not self._open or torch._C._current_graph_task_id() >= 0:
                return
            routing_map: Tensor = output[1]  # bool [tokens, experts]
            if position == 0:
                rows = torch.empty(layers, routing_map.shape[1], dtype=torch.int32, device=routing_map.device)
                self._rows[chunk] = rows, rows.unbind()
            rows, of_layers = self._rows[chunk]
            torch.sum(routing_map, 0, dtype=torch.int32, out=of_layers[position])
            if position == layers - 1:
                on_host = torch.empty_like(rows, device="cpu", pin_memory=rows.is_cuda)
                self._counted[chunk].append(on_host.copy_(rows, non_blocking=True))

        return count

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Counts the rows of micro-batches run inside, then plans in the background unless any rank had an error."""
        self._counted = [[] for _ in self._counted]
        self._open, complete = True, False
        try:
            yield
            complete = True
        finally:
            self._open = False
            self._submit(self._counted if complete else [])

    def _submit(self, counted: list[list[Tensor]]) -> None:
        copied: Any = torch.cuda.Event() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()
        while len(self._pending) >= PENDING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._evaluate, counted, copied))

    def _evaluate(self, counted: list[list[Tensor]], copied: Any) -> None:
        try:
            while copied is not None and not copied.query():
                pause()
            self._metrics = self._evaluated(counted)
        except Exception:
            self._metrics = {}
            _log.exception("shadow: this step was not planned")
            return
        if self._stage.ranks.rank == 0:
            _log.info("shadow: %s", ", ".join(f"{k.split('/')[1]} {v:.4g}" for k, v in self._metrics.items()))

    def _evaluated(self, counted: list[list[Tensor]]) -> dict[str, float]:
        made = self._stage.start(gathered_counts(_stacked(counted), self._group), self._shares, "policy_update")
        load, plan = made.load, made.finish()
        seconds = made.running.seconds()
        copies = foremoe.figures(plan, load)["copies"] / load.num_ranks
        return {
            **figures(load, plan, self._stage.buffers),
            "foremoe/copies": float(copies),
            **dict(zip(("foremoe/modelled_seconds", "foremoe/modelled_seconds_vanilla"), seconds, strict=False)),
        }

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last step that was planned."""
        return self._metrics

    def wait(self) -> None:
        """Waits until all steps have been planned."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Removes the hooks and waits until all steps have been planned."""
        for hook in self._hooks:
            hook.remove()
        self._pool.close()
        self._shares.close()


def _stacked(counted: list[list[Tensor]]) -> Tensor:
    """Returns int64 [micro_steps, layers, experts]; empty after an error, or if chunks differ in micro-steps."""
    of_chunks = [of_chunk for of_chunk in counted if of_chunk]
    if not of_chunks or len({len(of_chunk) for of_chunk in of_chunks}) > 1:
        return torch.zeros(0, 0, 0, dtype=torch.int64)
    return torch.cat([torch.stack(of_chunk) for of_chunk in of_chunks], 1).long()
