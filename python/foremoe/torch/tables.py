"""Integers that the layers of a micro-step need on their device, copied together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of each table in the copy


def to_device(tables: Sequence[dict[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """Returns the tables on the device, by one copy for which the host does not wait."""
    if device.type == "cpu":
        return list(tables)
    # numpy's empty arrays have stride 0, which contiguous() preserves and view() refuses.
    flat = [table.clone(memory_format=torch.contiguous_format) for of in tables for table in of.values()]
    parts = [torch.nn.functional.pad(of.view(-1).view(torch.uint8), (0, -of.nbytes % _ALIGNMENT)) for of in flat]
    copied = torch.cat(parts).pin_memory().to(device, non_blocking=True)
    places = copied.split([len(part) for part in parts])  # type: ignore[no-untyped-call]
    moved = iter(place[: of.nbytes].view(of.dtype).view(of.shape) for place, of in zip(places, flat, strict=True))
    return [{name: next(moved) for name in of} for of in tables]
