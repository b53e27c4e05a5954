"""CUDA without a GPU: runs code on device "cuda" and counts where the host would wait for the device.

torch's FakeTensorMode computes shapes and devices but no values. FakeTensorMode raises for operations with
data-dependent results, such as item(), and for layouts that CUDA's kernels reject. FakeCuda replaces the operations
that FakeTensorMode ignores or cannot run without a driver:

- Copies between host and device: FakeTensorMode ignores blocking copies. FakeCuda counts them. It also counts
  non-blocking copies whose host tensor is not pinned, because CUDA runs these synchronously.
- Masked assignment, x[mask] = y, reads the mask on the host, and host indices are first copied. FakeCuda counts both.
- Pinned memory is a flag per tensor. CUDA initialisation, which needs a driver, is a no-op.
- Streams and events enforce no order. Their synchronize() and query() are counted.
- Storage identity: data_ptr() is 0 for all fake tensors. FakeCuda returns a distinct number per storage.
- The autograd engine asks the driver for streams in C++. Instead, run_backward() calls the same nodes in the same order
  on the caller's thread. It omits node hooks, create_graph and the graph task id that distinguishes checkpoints.

Collectives use torch's fake process group: they complete at once and change nothing. Tests with FakeCuda therefore
cannot measure time, and cannot check stream ordering or the results of CUDA kernels.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import os
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXED = (
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default
)  # fmt: skip


class FakeCuda:
    """A fake CUDA device. Create one per process, after `begin_fake_group()`, and run device code in `stand_ins()`."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = torch.device("cuda", 0)
        self.waits: list[str] = []  # "operation at file:line" per wait
        self.uploads = 0  # copies from host to device
        self._pinned = WeakIdKeyDictionary()

    def parameter_like(self, parameter: torch.Tensor) -> torch.nn.Parameter:
        """Return a fake parameter on the device with the shape, strides and dtype of `parameter`."""
        with self.mode:
            like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self.device)
        return torch.nn.Parameter(like, parameter.requires_grad)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace Tensor.pin_memory()."""
        with self.mode:
            pinned = torch.empty_like(tensor, device="cpu")
        self._pinned[pinned] = True
        return pinned

    def count(self, what: str, caller: int = 0) -> None:
        """Record a wait for operation `what`, at the line `caller` frames above the innermost frame outside torch."""
        frames = [f for f in traceback.extract_stack() if "/torch/_" not in f.filename and f.filename != __file__]
        self.waits.append(f"{what} at {os.path.basename(frames[-1 - caller].filename)}:{frames[-1 - caller].lineno}")

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Replace CUDA's functions. Tensors created on or copied to the device are fake; all others stay real."""
        streams = _Streams(self)
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as after, _Counter(self):
            # Make torch.tensor(…, device=…) build a host tensor and copy it, as FakeTensorMode does.
            after.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: self.pin(tensor))
            patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: self.is_pinned(tensor))
            patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
            patch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)
            patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            for name in ("Stream", "Event"):
                patch.setattr(torch.cuda, name, lambda *_, **__: _Stream(self))
            for name in ("current_stream", "default_stream", "stream", "synchronize", "current_device"):
                patch.setattr(torch.cuda, name, getattr(streams, name))
            yield


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


class _Counter(TorchDispatchMode):
    """Intercepts every operation before FakeTensorMode and counts waits and uploads."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arrives = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        try:
            with self._cuda.mode if arrives else contextlib.nullcontext():
                result = func(*args, **kwargs)
        except DATA_DEPENDENT:
            self._cuda.count(str(func))
            raise
        if func in COPIES:
            to, of = (result, args[0]) if func is aten._to_copy.default else args[:2]
            self._count_copy(str(func), to, of, bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
        elif func in INDEXED and _is_on_device(args[0]):
            indices = [index for index in args[1] if index is not None]
            masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
            if masks and args[2:3] and args[2].numel() != 1:  # a single value is filled in without reading the mask
                self._cuda.count(f"{func} by a mask")
            if any(not _is_on_device(index) and index.dim() for index in indices):
                self._cuda.count(f"{func} by an index on the host")
        return result

    def _count_copy(self, name: str, to: torch.Tensor, of: torch.Tensor, non_blocking: bool) -> None:
        if _is_on_device(to) == _is_on_device(of):
            return
        host = to if _is_on_device(of) else of
        self._cuda.uploads += host is of
        if not (non_blocking and self._cuda.is_pinned(host)):
            self._cuda.count(f"{name} {of.device.type} → {to.device.type}")


class _Stream:
    """A stream or an event that enforces no order."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        self._cuda.count("synchronize")

    def query(self) -> bool:
        self._cuda.count("query")
        return True


class _Streams:
    """Replacements for the functions of torch.cuda that ask the driver for streams and devices."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._stream = _Stream(cuda)

    def current_stream(self, *_: Any) -> _Stream:
        return self._stream

    default_stream = current_stream

    def stream(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self, *_: Any) -> None:
        self._cuda.count("torch.cuda.synchronize")

    def current_device(self) -> int:
        return 0


def run_backward(
    outputs: Any, gradients: Any, retain: bool, create: bool, inputs: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor | None, ...]:
    """Replace the autograd engine: run each node after its predecessors, the most recently created ready node first.

    If `inputs` are given, return their gradients and accumulate nothing, as torch.autograd.grad() does.
    """
    assert not create
    roots = [torch.autograd.graph.get_gradient_edge(of) for of in outputs]
    wanted = [torch.autograd.graph.get_gradient_edge(of) for of in inputs]
    expected: collections.Counter[Any] = collections.Counter()
    seen = {edge.node for edge in roots}
    open_nodes = list(seen)
    while open_nodes:
        for node, _ in open_nodes.pop().next_functions:
            if node is None:
                continue
            expected[node] += 1
            if node not in seen:
                seen.add(node)
                open_nodes.append(node)
    arrived: dict[Any, dict[int, torch.Tensor]] = collections.defaultdict(dict)
    ready: list[tuple[int, int, Any]] = []
    order = itertools.count()

    def arrive(node: Any, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            expects = node._input_metadata[place]  # the engine, not the node, sums over broadcast dimensions
            gradient = gradient.sum_to_size(expects.shape).to(expects.dtype)
            held = arrived[node].get(place)
            arrived[node][place] = gradient if held is None else held + gradient

    def is_ready(node: Any) -> None:
        if expected[node] == 0:
            heapq.heappush(ready, (-node._sequence_nr(), next(order), node))

    with torch.no_grad():
        for edge, gradient in zip(roots, gradients, strict=True):
            arrive(edge.node, edge.output_nr, gradient)
        for node in {edge.node for edge in roots}:
            is_ready(node)
        found: dict[tuple[Any, int], torch.Tensor] = {}
        while ready:
            node = heapq.heappop(ready)[2]
            of_node = arrived.pop(node, {})
            found |= {(edge.node, edge.output_nr): of_node[edge.output_nr] for edge in wanted if edge.node is node}
            if wanted and node.name() == "torch::autograd::AccumulateGrad":
                continue
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            computed: list[torch.Tensor | None] = [None] * len(edges)
            if of_node:
                computed = _call(node, [of_node.get(place) for place in range(len(node._input_metadata))])
            for (after, place), gradient in zip(edges, computed, strict=True):
                arrive(after, place, gradient)
                expected[after] -= 1
                is_ready(after)
    return tuple(found.get((edge.node, edge.output_nr)) for edge in wanted)


def _call(node: Any, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Call a C++ node or a torch.autograd.Function. Return the gradients of the inputs that have an edge."""
    if not hasattr(node, "apply"):
        computed = node(*gradients)
        computed = computed if isinstance(computed, tuple) else (computed,)
        return [of for of, edge in zip(computed, node.next_functions, strict=True) if edge[0] is not None]
    computed = node.apply(*gradients)
    computed = computed if isinstance(computed, tuple) else (computed,)
    return [of for of, needed in zip(computed, node.needs_input_grad, strict=True) if needed]


def begin_fake_group(rank: int, ranks: int) -> None:
    """Make torch's fake process group the default group. Each rank receives the values that it sends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
