"""The arena of a node: weights of experts in shared memory, from which the node's ranks copy their guests.

An arena belongs to one phase and contains the experts that RankTurns lists for the node. One rank writes each expert,
in the background: the owner or, if the owner is on another node, the rank of this node that receives the expert.
Readers use a version and checksums to reject damaged weights and weights of other phases. The memory belongs to the
node and is reused by the next phase (node_memory.py).

After the phase's timeout, no rank waits for an expert, even if an owner, the link between nodes or the writer is slow.
Experts that arrive later are still written, for later micro-steps.

On CUDA, copies run on a separate stream.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe

from .background import Background, keep, pause
from .communication import start_point_to_point
from .layers import CopiedLayer
from .node_memory import Expert, NodeMemory
from .ranks import Ranks
from .sharded import local_weights

ATTEMPTS = 2  # to copy an expert


def _bytes(tensor: Tensor) -> Any:
    """Returns the memory of a contiguous CPU tensor, uint8 [bytes]."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


class NodeArena:
    """One rank's part of its node's arena.

    The constructor is collective. It raises InputError on all ranks if a node's ranks cannot share memory.
    """

    def __init__(
        self,
        layers: Sequence[CopiedLayer],
        turns: foremoe.RankTurns,
        ranks: Ranks,
        memory: NodeMemory,
        *,
        timeout: float,
    ) -> None:
        """memory: Memory of this node. timeout: Seconds that a phase waits for its experts, from now on."""
        self._ranks = ranks
        self._memory = memory
        self._timeout = timeout
        self._weights = [local_weights(layer) for layer in layers]
        segment_bytes = [w[0].numel() * w.element_size() for w in self._weights[0].values()]
        self._places = memory.take_places(turns.arena(ranks.node), segment_bytes)
        self._stream: Any = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Separate threads, so that waiting for a slow link and writing do not block readers. With two readers, one can
        # copy while the other waits for writers.
        self._receiver = Background("arena-receiver")
        self._writers = Background("arena-writer", 2)
        self._readers = Background("arena-reader", 2)
        self._arriving: collections.deque[tuple[list[Any], Any]] = collections.deque()  # (receives, tensors)
        self._now: Any = None  # the entry of _arriving that is being received
        self._sent: list[tuple[Any, Tensor]] = []  # to other nodes; kept until transfers complete
        self._publishing: list[Future[None]] = []
        self._deadline = time.monotonic() + timeout
        try:
            self._fill(turns)
        except BaseException:
            self.close(complete=False)
            raise

    def _fill(self, turns: foremoe.RankTurns) -> None:
        """Writes this rank's experts and the experts that other nodes send, layer by layer."""
        ranks = self._ranks
        of_layer: dict[int, list[tuple[int, int]]] = {}  # (node, expert), in the same order on all ranks
        for node in range(ranks.num_nodes):
            for layer, expert in turns.arena(node):
                of_layer.setdefault(layer, []).append((node, expert))
        # On gloo nothing tells whether a receive is complete. Messages between two ranks arrive in order, so a byte
        # after an owner's experts announces them.
        announces = dist.get_backend(ranks.copies.group) == "gloo"
        before: Future[None] | None = None  # receives of the previous layer
        for layer, experts in sorted(of_layer.items()):
            operations: list[Any] = []
            received: list[tuple[Expert, dict[str, Tensor]]] = []
            of_peer: dict[tuple[Any, int], Tensor] = {}  # announcement, uint8 [1], by operation and rank
            for node, expert in experts:
                owner = ranks.table.owner(layer, expert)
                writer = self._writer(node, owner)
                if ranks.rank not in (owner, writer):
                    continue
                index = ranks.table.index(layer, expert)
                mine = {name: w.detach()[index] for name, w in self._weights[layer].items()}
                if owner == writer:
                    self._publish((layer, expert), mine)
                elif ranks.rank == owner:
                    operations += [
                        dist.P2POp(dist.isend, w.contiguous(), group=ranks.copies.group, group_peer=writer)
                        for w in mine.values()
                    ]
                    of_peer[dist.isend, writer] = torch.ones(1, dtype=torch.uint8)
                else:
                    came = {name: torch.empty_like(w) for name, w in mine.items()}
                    received.append(((layer, expert), came))
                    operations += [
                        dist.P2POp(dist.irecv, w, group=ranks.copies.group, group_peer=owner) for w in came.values()
                    ]
                    of_peer[dist.irecv, owner] = torch.zeros(1, dtype=torch.uint8)
            of_peer = of_peer if announces else {}
            for (call, peer), byte in of_peer.items():
                operations.append(dist.P2POp(call, byte, group=ranks.copies.group, group_peer=peer))
            works = start_point_to_point(operations)
            arriving = []
            for work, operation in zip(works, operations, strict=True):
                if operation.op is dist.irecv:
                    arriving.append(work)
                else:
                    self._sent.append((work, operation.tensor))
            if before is not None:
                # Bounds memory: until the deadline, at most two layers are in transit. After the deadline, posts all
                # receives, since copies and gradients from these ranks arrive in the order of the plan.
                with contextlib.suppress(TimeoutError):
                    before.result(max(0.0, self._deadline - time.monotonic()))
            announced = [byte for (call, _), byte in of_peer.items() if call is dist.irecv]
            before = self._receive(arriving, announced, received) if received else None

    def _receive(
        self, works: list[Any], announced: list[Tensor], received: list[tuple[Expert, dict[str, Tensor]]]
    ) -> Future[None]:
        """Publishes received experts as they arrive, in the background. announced: Bytes that are 1 then."""

        def receive() -> None:
            while not all(announced):
                pause()
            self._now = self._arriving.popleft()  # kept until its transfers have ended, see close()
            with torch.cuda.stream(self._stream):
                for work in works:
                    work.wait()
            for future in [self._publish(expert, weights) for expert, weights in received]:
                future.result()

        self._arriving.append((works, received))
        future = self._receiver.submit(receive)
        self._publishing.append(future)
        return future

    def _writer(self, node: int, owner: int) -> int:
        """Returns the rank that writes the owner's experts into this node's arena: the owner if it is on the node."""
        size = self._ranks.ranks_per_node
        there = range(self._ranks.num_ranks)[node * size :][:size]
        return there[owner % size % len(there)]

    def _publish(self, expert: Expert, weights: dict[str, Tensor]) -> Future[None]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._ranks.device))

        future = self._writers.submit(self._write, expert, weights)
        self._publishing.append(future)
        return future

    def _write(self, expert: Expert, weights: dict[str, Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            came = None if self._stream is None else self._stream.record_event()
            while came is not None and not came.query():
                pause()
            segments = [_bytes(w.to("cpu").contiguous()) for w in weights.values()]
        self._places.publish(expert, segments)

    def check(self, experts: list[Expert]) -> Future[set[Expert]]:
        """Returns the experts that are intact, with the bytes that this phase published.

        Until the phase's timeout, waits for missing experts in the background. After the timeout, does not wait.
        """
        return self._readers.submit(self._intact, experts)

    def _intact(self, experts: list[Expert]) -> set[Expert]:
        intact: set[Expert] = set()
        for expert in experts:
            while not self._places.is_published(expert) and time.monotonic() < self._deadline:
                pause()
            if self._places.is_intact(expert):
                intact.add(expert)
        return intact

    def copy(self, expert: Expert, to: dict[str, Tensor]) -> Callable[[], None]:
        """Starts to copy an intact expert into contiguous weights. Returns a function that waits for the copy.

        The returned function raises RuntimeError if the expert was damaged in the meantime (detected on CPU only) or
        the copy exceeds the timeout.
        """
        if self._stream is not None:
            return self._copy_on_stream(expert, to)
        future = self._readers.submit(self._copy_checked, expert, to)

        def wait() -> None:
            try:
                future.result(self._timeout)
            except TimeoutError as error:
                layer, number = expert
                raise RuntimeError(
                    f"expert {number} of MoE layer {layer} did not come from the node's arena in {self._timeout} "
                    "seconds"
                ) from error

        return wait

    def _copy_checked(self, expert: Expert, to: dict[str, Tensor]) -> None:
        segments = [_bytes(w) for w in to.values()]
        if not any(self._places.copy(expert, segments) for _ in range(ATTEMPTS)):
            layer, number = expert
            raise RuntimeError(
                f"expert {number} of MoE layer {layer} was damaged in the node's arena after it had been checked"
            )

    def _copy_on_stream(self, expert: Expert, to: dict[str, Tensor]) -> Callable[[], None]:
        """Copies on CUDA."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._ranks.device))  # which may still read the slot
        with torch.cuda.stream(stream):
            for w, segment in zip(to.values(), self._places.segments(expert), strict=True):
                w.copy_(torch.from_numpy(segment).view(w.dtype).view(w.shape), non_blocking=True)
        event = stream.record_event()
        return lambda: torch.cuda.current_stream(self._ranks.device).wait_event(event)

    def close(self, complete: bool) -> None:
        """Ends background work. Must be the last call.

        complete: True waits for all copies and transfers, and keeps the memory for the next phase. False ends at once,
        and releases the memory unless a copy on the device is in progress.
        """
        threads = self._receiver, self._writers, self._readers
        self._receiver.stop()  # nobody reads experts that arrive later
        if not complete:  # before any is joined, since they wait for each other
            for background in threads:
                background.stop()
        for background in threads:
            background.close(failed=not complete)
        if not complete and not self._ranks.copies.ends_exchanges:  # transfers may still be in progress
            keep(self._now, self._arriving, self._sent)  # a user's group stays open
        if not complete and self._stream is not None and not self._stream.query():
            self._memory.abandon()
            return
        if complete:
            for work in [*(work for works, _ in self._arriving for work in works), *(work for work, _ in self._sent)]:
                work.wait()
            for future in self._publishing:
                with contextlib.suppress(CancelledError):
                    future.result()
        if self._stream is not None:
            self._stream.synchronize()  # its copies read the arena
        self._now, self._arriving, self._sent = None, collections.deque(), []
        self._publishing.clear()
        self._places.release()
        if not complete:
            self._memory.release()
