"""foremoe.eplb on tensors, and its policy in a stand-in for vLLM, from the sources of 0.14, 0.18, 0.23 and 0.33."""

from __future__ import annotations

import abc
import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from foremoe import eplb

SHAPE = (24, 4, 2, 4)  # replicas, groups, nodes, GPUs
WEIGHT = torch.from_numpy(np.random.default_rng(0).integers(0, 10**6, (3, 16)))


class _Maps(abc.ABC):
    @classmethod
    @abc.abstractmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class _Map(abc.ABC):
    @classmethod
    @abc.abstractmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise NotImplementedError


class _Other(abc.ABC):  # 0.13
    @classmethod
    @abc.abstractmethod
    def rebalance_experts(cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> Any:
        raise NotImplementedError


class _Returning(abc.ABC):
    @classmethod
    @abc.abstractmethod
    def rebalance_experts(
        cls,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Any = None,
    ) -> dict[str, torch.Tensor]:
        raise NotImplementedError


Install = Callable[[str, type], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Returns a function that makes a version of vLLM with this abstract policy importable."""

    def made(version: str, policy: type) -> None:
        real = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "vllm" else real(name))
        for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb", "vllm.distributed.eplb.policy"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(sys.modules["vllm.distributed.eplb.policy"], "AbstractEplbPolicy", policy, raising=False)

    return made


def test_tensors_give_tensors_with_the_values_of_arrays() -> None:
    expected = eplb.rebalance_experts(WEIGHT.numpy(), *SHAPE)
    for weight in (WEIGHT, WEIGHT.float(), WEIGHT.double().requires_grad_()):
        maps = eplb.rebalance_experts(weight, *SHAPE)
        assert all(of.dtype == torch.int64 and of.device.type == "cpu" for of in maps)
        for ours, theirs in zip(maps, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
    assert eplb.rebalance_experts(WEIGHT.bfloat16(), *SHAPE)[0].shape == (3, 24)


@pytest.mark.parametrize("version", ["0.14.0", "0.18.1"])
def test_a_policy_of_older_vllm_returns_three_maps(version: str, install: Install) -> None:
    install(version, _Maps)
    policy = eplb.vllm_policy()
    assert issubclass(policy, _Maps)
    for ours, theirs in zip(
        policy.rebalance_experts(WEIGHT, *SHAPE), eplb.rebalance_experts(WEIGHT, *SHAPE), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_policy_of_newer_vllm_returns_one_map_with_kept_slots(install: Install) -> None:
    install("0.33.0", _Map)
    policy = eplb.vllm_policy()
    first = policy.rebalance_experts(WEIGHT, *SHAPE)
    assert torch.equal(first, eplb.rebalance_experts(WEIGHT, *SHAPE)[0])
    shuffled = first.reshape(3, 4, 6).flip(-1).reshape(3, 24)
    again = policy.rebalance_experts(WEIGHT, *SHAPE, old_global_expert_indices=shuffled)
    assert torch.equal(again, shuffled)
    assert not torch.equal(again, first)
    fewer_gpus = policy.rebalance_experts(WEIGHT, *SHAPE, first[:, :18])  # elastic: another number of replicas before
    assert torch.equal(fewer_gpus, first)


@pytest.mark.parametrize("annotation", ["torch.Tensor", torch.Tensor])
def test_annotations_may_be_text_or_classes(annotation: Any, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("0.20.2", _Map)
    monkeypatch.setitem(_Map.rebalance_experts.__func__.__annotations__, "return", annotation)  # type: ignore[attr-defined]
    assert isinstance(eplb.vllm_policy().rebalance_experts(WEIGHT, *SHAPE), torch.Tensor)


@pytest.mark.parametrize(
    ("version", "policy", "words"),
    [
        ("0.13.0", _Other, r"needs vllm 0.14 to 0.33, not 0.13.0"),
        ("0.34.1", _Map, r"needs vllm 0.14 to 0.33, not 0.34.1"),
        (
            "0.23.0",
            _Other,
            r"vLLM 0.23.0: AbstractEplbPolicy.rebalance_experts has other arguments: weight, .*num_ranks$",
        ),
        ("0.23.0", _Returning, r"vLLM 0.23.0: AbstractEplbPolicy.rebalance_experts returns dict"),
    ],
)
def test_other_versions_and_interfaces_are_refused_by_name(
    version: str, policy: type, words: str, install: Install
) -> None:
    install(version, policy)
    with pytest.raises(ImportError, match=words):
        eplb.vllm_policy()


def test_a_missing_vllm_is_named() -> None:
    with pytest.raises(ImportError, match=r"needs vLLM 0.14 to 0.33, which is not installed"):
        eplb.vllm_policy()
