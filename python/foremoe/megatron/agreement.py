"""What all ranks that train one model must find alike, and refuse together.

Its ranks are those of all pipeline and tensor parallel groups and of all replicas. Where one of them refused alone, the
others would wait for it in the next exchange, until a timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from foremoe.torch.groups import group_like

_REFUSES, _LEFT = 1, 2


class Agreement:
    """Words between all ranks. A rank that gives up leaves its word without waiting."""

    def __init__(self, device: torch.device) -> None:
        """Collective. device: of the model's parameters."""
        from megatron.core import parallel_state

        # What reaches all ranks of the one group, and then all of the other, has reached all. Replicas have a group of
        # their own, since DistributedDataParallel may use Megatron's when a rank leaves. Between pipeline stages it is
        # Megatron's, which nobody else uses inside a step. It can be none of its own: torch names a group that its own
        # ranks make by the number of groups that they are in, and stages are in different numbers of groups.
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        stages = parallel_state.get_model_parallel_group()
        self._own = group_like(replicas, "gloo", "cpu") if dist.get_world_size(replicas) > 1 else None
        self._groups: list[tuple[Any, torch.device]] = []
        if self._own is not None:
            self._groups.append((self._own, torch.device("cpu")))
        if dist.get_world_size(stages) > 1:
            self._groups.append((stages, device))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Collective. Raises RuntimeError where a rank has left."""
        return self._most(int(flag), 0)[0] == _REFUSES

    def micro_steps(self, own: int, refused: bool) -> tuple[bool, int, int]:
        """Whether any rank refuses, the fewest micro-steps and the most. Collective. Raises as any()."""
        word, most, least = self._most(int(refused), own)
        return word == _REFUSES, -least, most

    def _most(self, word: int, micro_steps: int) -> list[int]:
        found = torch.tensor([word, micro_steps, -micro_steps])
        for group, device in self._groups:
            found = found.to(device)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        most: list[int] = found.tolist()
        if most[0] == _LEFT:
            raise RuntimeError("another rank left its step by an error: do not use the step's gradients")
        return most

    def leave(self) -> None:
        """Tells all ranks that this one has given up. Waits for nobody, and nothing can be agreed upon afterwards."""
        for group, device in self._groups:
            with contextlib.suppress(RuntimeError):  # the others, or the device, may be gone
                word = torch.tensor([_LEFT, 0, 0], device=device)
                dist.all_reduce(word, dist.ReduceOp.MAX, group=group, async_op=True)

    def close(self) -> None:
        if self._own is not None:
            dist.destroy_process_group(self._own)


def others_than(decides: Any, table: np.ndarray[Any, Any], group: Any, device: torch.device) -> list[int]:
    """The ranks of the group that have another one. Collective."""
    digest = hashlib.sha256(repr(decides).encode())
    digest.update(np.ascontiguousarray(table).tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [rank for rank, part in enumerate(parts) if not torch.equal(part, mine)]


def checked_counts(counts: Any, layers: int, experts: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [micro_steps, layers, experts]. Raises InputError."""
    array = counts.detach().cpu().numpy() if isinstance(counts, torch.Tensor) else np.asarray(counts)
    expected = f"integers [micro_steps, {layers}, {experts}]"
    if (
        array.dtype.kind not in "iu"
        or array.ndim != 3
        or array.shape[1] != layers
        or layers * array.shape[2] != layers * experts
    ):
        raise foremoe.InputError(f"counts: is {array.dtype} {list(array.shape)}; expected {expected}", field="counts")
    if not len(array):
        raise foremoe.InputError("counts: has no micro-step", field="counts")
    negative = np.argwhere(array < 0)
    if len(negative):
        place = negative[0].tolist()
        raise foremoe.InputError(
            f"counts{place}: {array[tuple(place)]} rows, expected 0 or more", field="counts", index=str(place)
        )
    return array.astype(np.int64)
