"""Comparison of values between ranks, and joint refusals.

If one rank refused alone, the others would wait in the next exchange. A rank that continued with another value would
cause a transport error or wrong gradients. So refused_together() compares values in a gather, and all ranks raise the
first error. Votes compares few values in less time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe

from .layers import ExpertLayer

_LONGEST = 160  # characters of a value in an error
_MOST_RANKS = 8  # that an error lists


class Given:
    """Values of this rank that refused_together() compares with those of the other ranks."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()  # the group of this rank
        self.alike: dict[str, dict[str, str]] = {}  # by `among` of expect_equal(), then by name
        self.hints: dict[str, str] = {}  # by name: sentence for the error if values differ
        self.told: Any = None
        self.of_all: list[Any] = []  # at the end: `told` of each rank of the group

    def expect_equal(self, values: Mapping[str, str], among: str = "", hint: str = "") -> None:
        """Requires each value, as printed, to be equal on all ranks that pass the same `among`.

        hint: Sentence for the error.
        """
        self.hints.update(dict.fromkeys(values, hint) if hint else {})
        known = self.alike.setdefault(among, {})
        known.update({name: shortened(value) for name, value in values.items()})

    def expect_same_group(self, ranks: Sequence[int]) -> str:
        """Requires all ranks of this rank's group to list the same ranks. Returns the `among` of this group."""
        self.ranks = tuple(ranks)
        return f"ranks {list(ranks)}"


@contextlib.contextmanager
def refused_together(group: Any = None) -> Iterator[Given]:
    """If one rank raises inside, all ranks raise at the end; if given values differ, all ranks refuse.

    The end is collective over the group (None: the default group); the body is not. A rank that raised nothing inside
    raises an InputError with the first rank that raised and its message, or with the first value that differs.
    """
    given, own = Given(), None
    try:
        yield given
    except Exception as error:
        own = error
    if not dist.is_initialized():
        if own is not None:
            raise own
        return
    words = None if own is None else words_of(own)
    digests = {among: _digest(repr(sorted(values.items()))) for among, values in given.alike.items()}
    said = _gathered((words, given.ranks, digests, given.told), group)
    if own is not None:
        raise own
    expect_no_errors({rank: words for rank, (words, *_) in said.items()})
    _expect_same_groups({rank: ranks for rank, (_, ranks, *_) in said.items()})
    found = {of for _, _, digests, _ in said.values() for of in digests.items()}
    if len(found) > len({among for among, _ in found}):
        of_ranks = _gathered(given.alike, group)
        for among in dict.fromkeys(among for of in of_ranks.values() for among in of):
            expect_equal_values({rank: of[among] for rank, of in of_ranks.items() if among in of}, given.hints)
    given.of_all = [told for *_, told in said.values()]


def _gathered(own: Any, group: Any) -> dict[int, Any]:
    """Returns the objects of all ranks of the group, by rank in the default group."""
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, own, group=group)
    return dict(zip(dist.get_process_group_ranks(group), of_all, strict=True))


def _expect_same_groups(groups: Mapping[int, tuple[int, ...]]) -> None:
    """Raises InputError unless the ranks of each group list the same ranks. groups: by rank."""
    if any(groups.get(other) != ranks for ranks in groups.values() for other in ranks):
        listed = {rank: str(list(ranks)) if ranks else "none" for rank, ranks in groups.items()}
        raise foremoe.InputError(f"group: {spelled(listed)}; expected the same on all ranks of a group", field="group")


def words_of(error: Exception) -> tuple[str, str]:
    """Returns the error's message and field, for other ranks."""
    if isinstance(error, foremoe.InputError):
        return str(error), error.field
    return f"{type(error).__name__}: {error}", ""


def expect_no_errors(words: Mapping[int, Sequence[str] | None]) -> None:
    """Raises InputError for the first rank that refuses. words: message and field by rank; None: does not refuse."""
    for rank, of in words.items():
        if of is not None:
            raise foremoe.InputError(f"rank {rank} refused: {of[0]}", field=of[1])


def expect_equal_values(values: Mapping[int, Mapping[str, str]], hints: Mapping[str, str] | None = None) -> None:
    """Raises InputError for the first value that differs. values: by rank, then by name. hints: by name."""
    for name in dict.fromkeys(name for of in values.values() for name in of):
        of_ranks = {rank: of.get(name, "not given") for rank, of in values.items()}
        if len(set(of_ranks.values())) > 1:
            field, bracket, index = name.partition("[")
            hint = f". {hints[name]}" if hints and name in hints else ""
            raise foremoe.InputError(
                f"{name}: {spelled(of_ranks)}; expected the same on all ranks{hint}",
                field=field,
                index=bracket + index,
            )


def spelled(values: Mapping[int, str]) -> str:
    """Lists values with their ranks, the rarest first: "3 on rank 2, 2 on ranks 0, 1, 3".

    Semicolons separate values if a list of ranks precedes another value: "1 on ranks 0, 2; 2 on ranks 1, 3".
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    rarest_first = sorted(ranks_of.items(), key=lambda of: (len(of[1]), of[1]))
    runs_on = any(len(ranks) > 1 for _, ranks in rarest_first[:-1])
    return ("; " if runs_on else ", ").join(f"{value} on {_listed(ranks)}" for value, ranks in rarest_first)


def _listed(ranks: list[int]) -> str:
    more = f", … ({len(ranks)})" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST_RANKS]))}{more}"


def shortened(value: str) -> str:
    """Returns a short text that differs for different values."""
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST // 2]}… ({_digest(value)[:8]})"


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def digest_of(*values: Any) -> str:
    """Returns the SHA-256 in hex of array values and of the repr() of everything else."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def number_of(words: str) -> int:
    """Returns a digest. The digest and its negative fit a signed 64-bit integer."""
    return int(_digest(words)[:14], 16)


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all ranks."""
    return {"foremoe": foremoe.__version__, "torch": str(torch.__version__)}


def facts_of(layers: Sequence[ExpertLayer]) -> dict[str, str]:
    """Returns the properties of expert layers and their weights that must be equal on all ranks, by name."""
    facts = {"layers": str(len(layers))}
    for i, layer in enumerate(layers):
        weights = layer.weights()
        facts[f"layers[{i}]"] = (
            f"{layer.name}, top {layer.top_k} of {layer.num_experts} experts, {layer.hidden_size} wide, with "
            f"{', '.join(weights)}"
        )
        facts |= {f"layers[{i}].{name}": fact_of(weight) for name, weight in weights.items()}
    return facts


def fact_of(weight: torch.Tensor) -> str:
    """Returns type, shape, and whether the weight is trained."""
    dtype = str(weight.dtype).removeprefix("torch.")
    return f"{dtype} {list(weight.shape)}, {'trained' if weight.requires_grad else 'frozen'}"
