"""Stubs that let megatron-core run MoE layers on CPU, and a counter of its waits for the device. Only for tests.

The stubs replace CUDA's devices, streams, events and random states. An OnDevice marks a tensor that would be on the
device; results computed from it are also OnDevice, and every transfer of an OnDevice to the host is counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

COUNTS: dict[str, int] = {}


def count(name: str) -> None:
    COUNTS[name] = COUNTS.get(name, 0) + 1


class _Nothing:
    """A stub of a stream or an event. Counts synchronize(), for which the host would wait."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Nothing:
        return self

    def synchronize(self) -> None:
        count("synchronize")


class OnDevice(torch.Tensor):
    """A CPU tensor that would be on the device in a GPU run."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
            count("to_host")
        return super().__torch_function__(func, types, args, kwargs or {})


def apply() -> None:
    """Install the stubs permanently in this process."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    stream = _Nothing()
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *_: None  # Megatron-LM calls it around pipeline sends

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Convert CPU tensors too: Megatron-LM's version skips them, and all_to_all_single needs sizes as integers."""
        if not torch.is_tensor(tensor):
            return tensor
        if isinstance(tensor, OnDevice):
            count("to_host")
        plain = tensor.as_subclass(torch.Tensor)
        return plain.tolist() if as_numpy else plain

    token_dispatcher.maybe_move_tensor_to_cpu = move
    if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16 reads this name even without Transformer Engine
        moe_utils.te_general_gemm = None
    gather = token_dispatcher.gather_from_sequence_parallel_region

    def gather_counted(*args: Any, **kwargs: Any) -> Any:
        count("all_gather")
        return gather(*args, **kwargs)

    token_dispatcher.gather_from_sequence_parallel_region = gather_counted
    # Megatron-LM's schedules and optimizers create tensors on "cuda".
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, functools.partial(_on_cpu, getattr(torch, name)))
    # Activation checkpoints save CUDA's random states.
    random._get_all_rng_states = lambda *_, **__: ()
    random._set_all_rng_states = lambda *_, **__: None
    random._fork_rng = contextlib.nullcontext
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # around attention, even without dropout


def _on_cpu(make: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    return make(*args, device="cpu" if device == "cuda" else device, **kwargs)


@contextlib.contextmanager
def types_of_cuda() -> Iterator[None]:
    """Make Tensor.type() report CUDA types: Megatron-LM's optimizers require "torch.cuda.FloatTensor"."""
    own = torch.Tensor.type

    def of(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "type", of)
        yield


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count, inside the context, the dispatchers' all_gather calls, synchronize() and transfers to the host."""
    COUNTS.clear()
    yield COUNTS
