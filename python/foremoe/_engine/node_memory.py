"""Memory in which the ranks of a node share experts. It outlives phases, since pinning memory for CUDA is slow.

Each phase takes places for its experts under a new version, which distinguishes them from experts of earlier phases.
The memory is allocated again only if a phase needs more places.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import foremoe
from foremoe._core import HostArena

from .background import keep
from .ranks import Ranks
from .together import digest_of

Expert = tuple[int, int]
"""(layer, expert)"""


class Places:
    """The places of one phase's experts."""

    def __init__(self, arena: HostArena | None, version: int, of: dict[Expert, int]) -> None:
        """arena: None without experts. version: Version of the phase. of: Place by expert."""
        self._arena, self._version, self._of = arena, version, of

    def _at(self, expert: Expert) -> tuple[HostArena, int]:
        assert self._arena is not None
        return self._arena, self._of[expert]

    def publish(self, expert: Expert, segments: list[Any]) -> None:
        """Writes an expert from uint8 arrays of its segments. Each expert has one writer."""
        arena, place = self._at(expert)
        arena.publish(place, self._version, segments)

    def is_published(self, expert: Expert) -> bool:
        """Returns whether the expert was published in this phase."""
        arena, place = self._at(expert)
        return arena.version(place) == self._version

    def is_intact(self, expert: Expert) -> bool:
        """Returns whether the expert was published in this phase and its bytes are unchanged."""
        arena, place = self._at(expert)
        return arena.is_intact(place, self._version)

    def copy(self, expert: Expert, segments: list[Any]) -> bool:
        """Copies an expert into uint8 arrays. Returns False if it is not intact; the arrays are undefined then."""
        arena, place = self._at(expert)
        return arena.copy(place, self._version, segments)

    def segments(self, expert: Expert) -> list[Any]:
        """Returns writable views of an expert's segments, uint8 [bytes] each."""
        arena, place = self._at(expert)
        return arena.segments(place)

    def release(self) -> None:
        """Releases the memory. Nothing can be read or written afterwards."""
        self._arena = None


class NodeMemory:
    """One rank's view of its node's memory."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._version = 0
        self._arena: HostArena | None = None
        self._places = 0  # capacity
        self._segment_bytes: list[int] = []
        self._unpin: weakref.finalize[Any, Any] | None = None

    def take_places(self, experts: Sequence[Expert], segment_bytes: Sequence[int]) -> Places:
        """Takes places for the experts of the next phase. Collective, after every rank has ended the last phase.

        Args:
            experts: Experts of this rank's node, in the same order on all of its ranks.
            segment_bytes: Bytes of each weight of an expert.

        Raises:
            InputError: on all ranks, if a node's ranks cannot share memory.
            RuntimeError: if ranks take places for different experts.
        """
        self._version += 1
        wanted = digest_of(list(segment_bytes), list(experts))
        fits = len(experts) <= self._places and (not experts or list(segment_bytes) == self._segment_bytes)
        told = self._of_all_ranks((self._ranks.node, wanted, fits))
        others = [rank for rank, (node, of, _) in enumerate(told) if of != told[self._first_rank(node)][1]]
        if others:
            raise RuntimeError(f"ranks {others} share other experts than the first rank of their node")
        too_small = {node for node, _, of_rank in told if not of_rank}
        if too_small:
            self._make(self._ranks.node in too_small, len(experts), list(segment_bytes))
        return Places(self._arena, self._version, {expert: place for place, expert in enumerate(experts)})

    def _first_rank(self, node: int) -> int:
        return node * self._ranks.ranks_per_node

    def _make(self, here: bool, places: int, segment_bytes: list[int]) -> None:
        """Allocates memory on a node's first rank; the others open it. Collective. here: Whether on this node."""
        first = self._first_rank(self._ranks.node)
        # Plans of one model need similar numbers of places. A reserve of a quarter avoids most further allocations.
        sizes = [places + places // 4, places] if self._arena is not None else [places]
        if here:
            self.release()
        self._of_all_ranks(None)  # all ranks have released the old memory
        refusal = ""
        for size in sizes if here and self._ranks.rank == first else []:
            refusal = self._hold(lambda size=size: HostArena.create(size, segment_bytes), size)  # type: ignore[misc]
            if not refusal:
                break
        name, places = self._of_all_ranks((self._arena.name if self._arena is not None else "", self._places))[first]
        if here and name and self._arena is None:
            refusal = self._hold(lambda: HostArena.open(name, places, segment_bytes), places)
        refusals = self._of_all_ranks(refusal)
        if here and self._arena is not None:
            self._arena.remove_name()
        self._segment_bytes = segment_bytes if here else self._segment_bytes
        for rank, of in enumerate(refusals):
            if of:
                if here:
                    self.release()
                raise foremoe.InputError(
                    f"path: rank {rank} cannot share memory with its node, of {self._ranks.ranks_per_node} ranks: {of} "
                    "(path 'peer' needs none)",
                    field="path",
                )

    def _hold(self, make: Callable[[], HostArena], places: int) -> str:
        """Allocates the memory, pinned for CUDA. Returns the error, for the waiting ranks, or ""."""
        try:
            arena = make()
            if self._ranks.device.type == "cuda":
                self._unpin = weakref.finalize(self, _unpin, arena, _pin(arena, places), self._ranks.device)
                self._unpin.atexit = False  # the driver may have ended by then
        except Exception as error:  # any error is reported to the waiting ranks
            return str(error) or type(error).__name__
        self._arena, self._places = arena, places
        return ""

    def _of_all_ranks(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self._ranks.num_ranks
        assert self._ranks.agreement is not None
        dist.all_gather_object(found, own, group=self._ranks.agreement.group)
        return found

    @property
    def num_bytes(self) -> int:
        return self._arena.num_bytes if self._arena is not None else 0

    def release(self) -> None:
        """Releases the memory. No copy may be reading it. The next phase allocates it again."""
        if self._unpin is not None:
            self._unpin()
        self._unpin = self._arena = None
        self._places = 0

    def abandon(self) -> None:
        """Does not free the memory, since a copy may never end. The next phase allocates new memory."""
        if self._unpin is not None:
            self._unpin.detach()
        keep(self._arena)  # which copies may read
        self._unpin = self._arena = None
        self._places = 0


def _pin(arena: HostArena, places: int) -> int:
    """Pins the memory and returns its address."""
    first, last = arena.segments(0)[0], arena.segments(places - 1)[-1]
    begin = first.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(last.ctypes.data + last.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cuda.cudaHostRegister(begin, end - begin, 0))
    return begin


def _unpin(arena: HostArena, begin: int, device: torch.device) -> None:
    """Unpins the memory of an arena, which must still exist."""
    torch.cuda.synchronize(device)
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cuda.cudaHostUnregister(begin))
