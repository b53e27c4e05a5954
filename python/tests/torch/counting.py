"""Counts collectives and waits for the device: the same counter for planned layers and for transformers' own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

COUNTED = (
    "all_to_all_single", "all_to_all_single_autograd", "all_gather", "all_gather_object", "all_reduce", "barrier",
    "broadcast", "batch_isend_irecv",
)  # fmt: skip


class Counter:
    """counts: by name of a collective, and "waits" for the device."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return function(*args, **kwargs)

        return counted

    @contextlib.contextmanager
    def collectives(self, *modules: Any) -> Iterator[None]:
        """Counts those that these modules call, as dist.NAME or as a name that they imported."""
        count = self

        class Counted:
            def __getattr__(self, name: str) -> Any:
                found = getattr(dist, name)
                return count._counted(name, found) if name in COUNTED else found

        with pytest.MonkeyPatch.context() as patch:
            for module in modules:
                if hasattr(module, "dist"):
                    patch.setattr(module, "dist", Counted())
                for name in COUNTED:
                    if hasattr(module, name):
                        patch.setattr(module, name, self._counted(name, getattr(module, name)))
            yield

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Counts operators that wait for the device."""
        count = self

        class Waits(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                    count._count("waits")
                return func(*args, **(kwargs or {}))

        with Waits():
            yield

    def watched(self, forward: Any) -> Any:
        """The function, with the operators and methods in it counted that wait for the device."""
        count = self

        class Calls(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "__name__", "") in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__"):
                    count._count("waits")
                return func(*args, **(kwargs or {}))

        def run(*of: Any) -> Any:
            with Calls(), self.waits():
                return forward(*of)

        return run
