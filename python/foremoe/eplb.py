"""Places replicas of experts for inference engines: EPLB's interface, and a policy for vLLM.

    physical_to_logical, logical_to_physical, expert_count = foremoe.eplb.rebalance_experts(
        weight, num_replicas=288, num_groups=8, num_nodes=4, num_gpus=32
    )

The interface is that of https://github.com/deepseek-ai/EPLB. Engines count the tokens of a window, place experts for
the next window, and let each replica serve an equal part of its expert's tokens. The placement differs from that of
DeepSeek's code, which the policy `eplb` repeats: replicas of an expert are on different GPUs wherever that is as good.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib import metadata
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _core
from ._errors import InputError
from ._files import expect
from .supported import VLLM

if TYPE_CHECKING:
    import torch

    TensorMaps = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ArrayMaps = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

_MOST = (1 << 31) - 1
_VLLM_ARGUMENTS = ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices")


@overload
def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> TensorMaps: ...
@overload
def rebalance_experts(
    weight: ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> ArrayMaps: ...
def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> TensorMaps | ArrayMaps:
    """Chooses how many replicas each expert has, and the GPU of each replica.

    With one window, the busiest GPU has at most 0.1 % more tokens than under EPLB in this window. With several windows,
    the placement allows for experts whose popularity differs between them. A GPU has two replicas of an expert only if
    it has more slots than its node has experts, or if no placement without was found in which the busiest GPU of the
    past windows has at most 0.1 % more tokens.

    Args:
        weight: Tokens of each expert in the last window, [layers, experts], or in several successive windows, [windows,
            layers, experts]. A torch tensor, or an array of integers or floats.
        num_replicas: Replicas per layer, a multiple of num_gpus.
        num_groups: Groups of consecutive experts of equal size. If this is a multiple of num_nodes, all replicas of a
            group are on one node; otherwise groups and nodes are ignored.
        num_nodes: Nodes, whose GPUs share a fast interconnect.
        num_gpus: GPUs, a multiple of num_nodes.

    Returns:
        physical_to_logical_map: int64 [layers, num_replicas], the expert of each replica, GPU by GPU.
        logical_to_physical_map: int64 [layers, experts, X], the replicas of each expert, ascending, then −1.
        expert_count: int64 [layers, experts], the number of replicas of each expert.
        They are torch tensors on the CPU if `weight` is a tensor, otherwise numpy arrays.

    Raises:
        InputError: for negative or infinite weights, and for numbers that do not divide each other.
    """
    array = _array_of(weight)
    experts = place(array, num_replicas, num_groups, num_nodes, num_gpus)
    maps: TensorMaps | ArrayMaps = _like(weight, maps_of(experts, array.shape[-1]))
    return maps


def place(
    weight: ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, *, distinct: bool = False
) -> NDArray[np.int64]:
    """Returns the physical_to_logical_map of rebalance_experts().

    distinct: GPUs have no two replicas of an expert, unless nothing can separate them. The busiest GPU may then have
    more tokens than under EPLB.
    """
    numbers = {"num_replicas": num_replicas, "num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
    expect(Integral, **numbers)
    for name, number in numbers.items():
        if not 1 <= number <= _MOST:
            raise InputError(f"{name}: {number}, expected from 1 to {_MOST}", field=name)
    windows = np.asarray(weight)
    if windows.dtype.kind not in "iuf" or windows.ndim not in (2, 3) or 0 in windows.shape:
        what = f"{windows.dtype} {list(windows.shape)}, expected integers or floats [layers, experts]"
        raise InputError(f"weight: is {what} or [windows, layers, experts]", field="weight")
    windows = np.ascontiguousarray(windows.reshape(-1, *windows.shape[-2:]), np.float64)
    return _core._place_replicas(windows, **numbers, distinct=distinct)


def maps_of(experts: NDArray[np.int64], num_experts: int) -> ArrayMaps:
    """Returns the three maps of rebalance_experts(). experts: the first, in which every expert must occur."""
    layers, replicas = experts.shape
    rows = np.arange(layers)[:, None]
    count = np.bincount((rows * num_experts + experts).ravel(), minlength=layers * num_experts)
    count = count.reshape(layers, num_experts)
    by_expert = np.argsort(experts, axis=1, kind="stable")
    expert = np.take_along_axis(experts, by_expert, 1)
    position = np.arange(replicas) - np.take_along_axis(count.cumsum(1) - count, expert, 1)
    listed = np.full((layers, num_experts, count.max()), -1)
    listed[rows, expert, position] = by_expert
    return experts, listed, count


def keep_slots(experts: NDArray[np.int64], former: NDArray[np.int64], num_gpus: int) -> NDArray[np.int64]:
    """Reorders the replicas of each GPU so that experts that were on it before keep their slots.

    Args:
        experts: [layers, replicas], GPU by GPU.
        former: The same before, with equal shape.
        num_gpus: A divisor of the number of replicas.
    """
    new = experts.reshape(-1, experts.shape[1] // num_gpus)  # one row per layer and GPU
    old = former.reshape(new.shape)
    kept = np.full_like(new, -1)
    is_left = np.ones(new.shape, bool)
    for slot in range(new.shape[1]):
        is_same = is_left & (new == old[:, slot : slot + 1])
        row = np.flatnonzero(is_same.any(1))
        is_left[row, is_same[row].argmax(1)] = False
        kept[row, slot] = old[row, slot]
    kept[kept < 0] = new[is_left]  # both are in the order of rows, and have equally many entries in each
    return kept.reshape(experts.shape)


def vllm_policy() -> type[Any]:
    """Returns a policy class for the installed vLLM, whose workers call it instead of their own EPLB.

    Register it in every worker before the model is loaded, for instance in a plugin of the group vllm.general_plugins:

        vllm.distributed.eplb.policy.EPLB_POLICIES["default"] = foremoe.eplb.vllm_policy()

    Experts that stay on a GPU keep their slots, so that vLLM does not copy them.

    Raises:
        ImportError: if vLLM is missing or has another version or interface than expected; the message names it.
    """
    try:
        version = metadata.version(VLLM.package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"foremoe.eplb.vllm_policy() needs vLLM {VLLM.accepted}, which is not installed") from None
    VLLM.expect("foremoe.eplb.vllm_policy()", version)
    base = importlib.import_module("vllm.distributed.eplb.policy").AbstractEplbPolicy
    signature = inspect.signature(base.rebalance_experts)
    if tuple(signature.parameters) != _VLLM_ARGUMENTS:
        found = ", ".join(signature.parameters)
        raise ImportError(f"vLLM {version}: AbstractEplbPolicy.rebalance_experts has other arguments: {found}")
    returned = str(signature.return_annotation).lower()
    returns_maps = returned.startswith("tuple[")  # up to 0.18: three maps; later only the first
    if not returns_maps and not returned.endswith(("tensor", "tensor'>")):
        raise ImportError(f"vLLM {version}: AbstractEplbPolicy.rebalance_experts returns {returned}")

    class ForemoePolicy(base):  # type: ignore[misc, valid-type]
        """Places experts with foremoe.eplb."""

        @classmethod
        def rebalance_experts(
            cls,
            weight: torch.Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: torch.Tensor | None = None,
        ) -> Any:
            array = _array_of(weight)
            experts = place(array, num_replicas, num_groups, num_nodes, num_ranks)
            if old_global_expert_indices is not None and old_global_expert_indices.shape == experts.shape:
                experts = keep_slots(experts, _array_of(old_global_expert_indices), num_ranks)
            maps = _like(weight, maps_of(experts, array.shape[-1]))
            return maps if returns_maps else maps[0]

    return ForemoePolicy


def _is_tensor(value: object) -> bool:
    return hasattr(value, "detach")  # torch itself is not imported: the planner works without it


def _array_of(weight: Any) -> NDArray[Any]:
    if not _is_tensor(weight):
        return np.asarray(weight)
    tensor = weight.detach().cpu()
    array: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # numpy has no bfloat16
    return array


def _like(weight: Any, maps: ArrayMaps) -> Any:
    if not _is_tensor(weight):
        return maps
    return tuple(map(sys.modules["torch"].from_numpy, maps))
