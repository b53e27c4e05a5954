"""What all ranks must be given alike: they compare it, and refuse together.

A rank that refused alone would leave the others waiting in the next exchange. One that went on with another value would
leave them with an error of the transport, or with wrong gradients.
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
    """What this rank was given, for comparison with the other ranks: refused_together() makes it."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()  # of this rank's own group
        self.alike: dict[str, dict[str, str]] = {}  # by whom they are shared, then by name
        self.hints: dict[str, str] = {}  # by name: what an error says where values differ
        self.told: Any = None
        self.of_all: list[Any] = []  # when it has ended: what each rank told, by rank of the group that compared

    def expect_alike(self, values: Mapping[str, str], among: str = "", hint: str = "") -> None:
        """Each value, as it is printed, is the same on all ranks that say the same `among`. hint: for the error."""
        self.hints.update(dict.fromkeys(values, hint) if hint else {})
        known = self.alike.setdefault(among, {})
        known.update({name: shortened(value) for name, value in values.items()})

    def expect_same_group(self, ranks: Sequence[int]) -> str:
        """All ranks that this rank lists in its group list the same. Returns the `among` of these ranks."""
        self.ranks = tuple(ranks)
        return f"ranks {list(ranks)}"


@contextlib.contextmanager
def refused_together(group: Any = None) -> Iterator[Given]:
    """What one rank raises inside, all ranks raise where it ends; and where they were given other values, all refuse.

    Collective over the group, or the default group; inside is not. A rank that raised nothing itself raises InputError,
    which names the first rank that did, and its words; or the first value that differs, and on which ranks.
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
    expect_none_refused({rank: words for rank, (words, *_) in said.items()})
    _expect_same_groups({rank: ranks for rank, (_, ranks, *_) in said.items()})
    found = {of for _, _, digests, _ in said.values() for of in digests.items()}
    if len(found) > len({among for among, _ in found}):
        of_ranks = _gathered(given.alike, group)
        for among in dict.fromkeys(among for of in of_ranks.values() for among in of):
            expect_values_alike({rank: of[among] for rank, of in of_ranks.items() if among in of}, given.hints)
    given.of_all = [told for *_, told in said.values()]


def _gathered(own: Any, group: Any) -> dict[int, Any]:
    """Of all ranks of the group, by their rank in the default group."""
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, own, group=group)
    return dict(zip(dist.get_process_group_ranks(group), of_all, strict=True))


def _expect_same_groups(groups: Mapping[int, tuple[int, ...]]) -> None:
    """groups: by rank, the ranks of its own group."""
    if any(groups.get(other) != ranks for ranks in groups.values() for other in ranks):
        listed = {rank: str(list(ranks)) if ranks else "none" for rank, ranks in groups.items()}
        raise foremoe.InputError(f"group: {spelled(listed)}; expected the same on all ranks of a group", field="group")


def words_of(error: Exception) -> tuple[str, str]:
    """For other ranks: what it says, and the field that it names."""
    if isinstance(error, foremoe.InputError):
        return str(error), error.field
    return f"{type(error).__name__}: {error}", ""


def expect_none_refused(words: Mapping[int, Sequence[str] | None]) -> None:
    """words: by rank, why it refuses and the field of that; None where it does not. Raises InputError for the first."""
    for rank, of in words.items():
        if of is not None:
            raise foremoe.InputError(f"rank {rank} refused: {of[0]}", field=of[1])


def expect_values_alike(values: Mapping[int, Mapping[str, str]], hints: Mapping[str, str] | None = None) -> None:
    """values: by rank, then by name. hints: by name. Raises InputError for the first that differs."""
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
    """values: by rank. Which value is on which ranks, the rarest first: "3 on rank 2, 2 on ranks 0, 1, 3"; with
    semicolons where a list of ranks would run into the next value: "1 on ranks 0, 2; 2 on ranks 1, 3"."""
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
    """In few characters, yet other ones for other values."""
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST // 2]}… ({_digest(value)[:8]})"


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def digest_of(*values: Any) -> str:
    """SHA-256, in hex; the same where arrays have the same values, and everything else prints the same."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def number_of(words: str) -> int:
    """A digest that a signed integer of 64 bits holds, and its negative too."""
    return int(_digest(words)[:14], 16)


def versions() -> dict[str, str]:
    """Versions that must be the same on all ranks."""
    return {"foremoe": foremoe.__version__, "torch": str(torch.__version__)}


def facts_of(layers: Sequence[ExpertLayer]) -> dict[str, str]:
    """What must be alike of expert layers, and of their weights, by name."""
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
    """Its type, its shape, and whether it is trained."""
    dtype = str(weight.dtype).removeprefix("torch.")
    return f"{dtype} {list(weight.shape)}, {'trained' if weight.requires_grad else 'frozen'}"
