"""Counts collectives and device synchronizations, in planned layers and in layers of transformers."""

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
    """Attribute `counts` has the number of calls per collective and, as "waits", of device synchronizations."""

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
    def collectives(self, *importers: Any) -> Iterator[None]:
        """Counts collectives called as dist.NAME, or by name in the modules `importers`."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (dist, *importers):
                for name in COUNTED:
                    if hasattr(module, name):
                        patch.setattr(module, name, self._counted(name, getattr(module, name)))
            yield

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Counts operators and tensor methods that wait for the device."""
        count = self

        class Operators(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                    count._count("waits")
                return func(*args, **(kwargs or {}))

        class Methods(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "__name__", "") in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__"):
                    count._count("waits")
                return func(*args, **(kwargs or {}))

        with Methods(), Operators():
            yield

    @contextlib.contextmanager
    def waits_in(self, *modules: Any) -> Iterator[None]:
        """Counts waits in the forward passes of these modules. No module may contain another."""
        inside = contextlib.ExitStack()
        hooks = [
            of.register_forward_pre_hook(lambda *_: (inside.enter_context(self.waits()), None)[1]) for of in modules
        ]
        hooks += [of.register_forward_hook(lambda *_: inside.close()) for of in modules]
        yield
        for hook in hooks:
            hook.remove()

    def count_layers(self, model: Any, batch: Any, *importers: Any) -> None:
        """Counts collectives in a forward and a backward, and waits in the MoE layers' forwards and in the backward."""
        layers = [of.mlp for of in model.model.layers]
        with self.collectives(*importers), self.waits_in(*layers):
            out = model(batch, use_cache=False).logits
            with self.waits():
                out.backward(torch.ones_like(out))
