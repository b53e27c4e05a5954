"""Averages of many small tensors over ranks, in few collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel


def average_in_buckets(tensors: Sequence[Tensor], group: Any, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replaces each tensor by its mean over the ranks of the group. Collective.

    One all_reduce serves consecutive tensors of one type and device, up to bucket_bytes; sparse tensors have one each.
    An element's position in a bucket determines the order in which ranks are summed. With three or more ranks, its last
    bit may therefore differ from an all_reduce per tensor. Results are equal on all ranks.

    tensors: The same shapes and types on all ranks, in the same order.
    """
    ranks = dist.get_world_size(group)
    for tensor in tensors:
        if tensor.is_sparse:
            dist.all_reduce(tensor, group=group)
            tensor /= ranks
    for bucket in _buckets([tensor for tensor in tensors if not tensor.is_sparse], bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        flat /= ranks
        for tensor, mean in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in by_kind.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
