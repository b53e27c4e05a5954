"""How ranks compare values, refuse together, and learn that one of them failed.

A rank that refused alone would leave the others waiting in the next exchange. A rank that continued with another value
would end in an error of the transport, or in wrong gradients. So:

refused_together()  compares values in a gather; all ranks raise the first error
Agreement           does the same between all ranks of a training job, over several groups, without a device
Failures            tells the other ranks, in a phase, that this one failed, and why

A rank that fails leaves its reason in the store of the default group and closes its channels to the others. On gloo
their exchanges end at once, with an error that names no rank, so they look the reason up. A rank that dies leaves no
reason: then the survivors report that they live, and name those that do not. On NCCL, an exchange that a rank does not
join ends by torch's watchdog, when its timeout expires.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import foremoe

from .communication import gathered
from .layers import ExpertLayer

PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.02
_FAILED, _LOST, _LIVES, _CALLS = "failed", "lost", "lives", "calls"
_KEPT = 64  # calls
_LONGEST = 160  # characters of a value in an error
_MOST_RANKS = 8  # that an error lists
_REFUSES, _LEFT = 1, 2


class LostConnection(RuntimeError):
    """Another rank has lost a connection."""


class Channel:
    """A process group for rows, copies or agreement. Users ask for the group at each use. Since nobody else refers to
    it, close() ends its connections, and with them what other ranks exchange over it."""

    def __init__(self, group: Any, *, is_own: bool = False) -> None:
        """is_own: whether close() ends the group; a group of the user's stays."""
        self._group = group
        self._is_own = is_own
        self.ends_exchanges = is_own and dist.get_backend(group) == "gloo"  # of other ranks, when it is closed

    @property
    def is_closed(self) -> bool:
        return self._group is None

    @property
    def group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the exchanges between ranks are closed, since a phase failed or detach() ran")
        return self._group

    def close(self) -> None:
        if self._is_own and self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class Failures:
    """What the ranks of one group say of their failures. Each says it once."""

    def __init__(self, name: str, ranks: Sequence[int], own: int, channels: Sequence[Channel]) -> None:
        """name: of this group and nothing else, the same on all of its ranks. ranks: in the default group. own: this
        rank there. channels: between these ranks."""
        self._store = distributed_c10d.PrefixStore(f"foremoe/failures/{name}", distributed_c10d._get_default_store())
        self._ranks = list(ranks)
        self._own = own
        self._channels = list(channels)
        self._told = False

    def end(self, error: BaseException) -> str:
        """Ends the work of all ranks because of an error on this one. Returns which other rank failed, and why, where
        the error is a lost connection to it; "" where the error is this rank's own, and from the second call on."""
        if self._told:
            return ""
        self._told = True
        lost = _is_lost_connection(error)
        try:
            if lost:
                return self._wait_for_reason()
            self._store.compare_set(_FAILED, "", f"{self._own} {type(error).__name__}: {error}")  # the first one counts
            return ""
        except RuntimeError:  # the store ended with the process that serves it
            return "the rank that serves the store of the default group ended" if lost else ""
        finally:
            for channel in self._channels:
                if channel.ends_exchanges:
                    channel.close()

    def reason(self) -> str:
        """Which rank failed first, and why; "" where none has left word."""
        if not self._store.check([_FAILED]):
            return ""
        rank, error = self._store.get(_FAILED).decode().split(" ", 1)
        return f"rank {rank} failed: {error}"

    def expect_connected(self) -> None:
        """Raises LostConnection where another rank has lost a connection: then a rank may have died."""
        if self._store.check([_LOST]):
            raise LostConnection("another rank lost a connection")

    def note(self, number: int, call: str) -> None:
        """Leaves word of this rank's call of a number, for those that wait for its announcement."""
        self._store.set(f"{_CALLS}/{number}", call)
        with contextlib.suppress(RuntimeError):  # not every store deletes
            self._store.delete_key(f"{_CALLS}/{number - _KEPT}")

    def noted(self, number: int) -> str:
        """Of which call of this number a rank has left word; "" of none."""
        key = f"{_CALLS}/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait_for_reason(self) -> str:
        """Until a rank has left its reason, or all ranks but those that died have said that they live."""
        self._store.set(_LOST, "")
        self._store.set(f"{_LIVES}/{self._own}", "")
        silent = [rank for rank in self._ranks if rank != self._own]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and silent:
            if reason := self.reason():
                return reason
            silent = [rank for rank in silent if not self._store.check([f"{_LIVES}/{rank}"])]
            time.sleep(_POLL_SECONDS)
        if not silent:
            return "the connection between ranks was lost"
        ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return f"{ranks} died, or did not answer for {PATIENCE_SECONDS:g} seconds"


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a peer is gone, or does not answer: gloo raises it where this rank is connected to it."""
    return isinstance(error, LostConnection) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


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


class Agreement:
    """Words between all ranks. A rank that gives up leaves its word without waiting."""

    def __init__(self, groups: Sequence[Any], failures: Failures) -> None:
        """groups: of gloo, so that nothing here waits for a device. What reaches all ranks of the first, and then all
        of the second, has reached all."""
        self._groups = list(groups)
        self._failures = failures
        self.is_over = False  # a rank has left, as far as this one has heard

    def expect_open(self) -> None:
        """Raises RuntimeError where a rank has left."""
        if self.is_over:
            raise RuntimeError("a step failed: what it sent may still be on its way; attach anew with other groups")

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Collective. Raises RuntimeError where a rank has left."""
        return self._most(int(flag), 0)[0] == _REFUSES

    def expect_alike(self, values: Mapping[str, str], refused: Exception | None = None) -> None:
        """All ranks have the same values, by name, and none refuses. Collective.

        Raises InputError that names the rank that refuses, and why, or the value that differs; on a rank that refuses,
        what it refuses by. Raises as any().
        """
        words = None if refused is None else words_of(refused)
        own = json.dumps([words, values])
        word, most, least = self._most(int(refused is not None), number_of(own))
        if word != _REFUSES and most == -least:
            return
        said = self._said(own.encode())
        if refused is not None:
            raise refused
        expect_none_refused({rank: words for rank, (words, _) in said.items()})
        expect_values_alike({rank: values for rank, (_, values) in said.items()})

    def _said(self, own: bytes) -> dict[int, Any]:
        """What each rank says, in JSON. Collective."""
        longest = torch.tensor([len(own)])
        self._reduce(longest)
        table = torch.zeros(dist.get_world_size(), int(longest), dtype=torch.uint8)
        table[dist.get_rank(), : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._reduce(table)
        return {rank: json.loads(bytes(row.tolist()).rstrip(b"\0")) for rank, row in enumerate(table)}

    def _most(self, word: int, number: int) -> list[int]:
        self.expect_open()
        found = torch.tensor([word, number, -number])
        self._reduce(found)
        most: list[int] = found.tolist()
        if most[0] == _LEFT:
            self.is_over = True
            reason = self._failures.reason() or "another rank left its step by an error"
            raise RuntimeError(f"{reason}: do not use the step's gradients")
        return most

    def _reduce(self, found: torch.Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)

    def leave(self, error: BaseException) -> str:
        """Tells all ranks that this one has given up, unless another had, which they all know. Nothing can be agreed
        upon afterwards. Returns which other rank failed, and why, where the error is a lost connection to it."""
        if self.is_over:
            return ""
        self.is_over = True
        ended_by = self._failures.end(error)
        for group in self._groups:
            with contextlib.suppress(RuntimeError):  # the others may be gone
                dist.all_reduce(torch.tensor([_LEFT, 0, 0]), dist.ReduceOp.MAX, group=group, async_op=True)
        return ended_by


def slots_at_begin(plan: foremoe.Plan) -> np.ndarray[Any, Any]:
    """The slots that are final when a plan begins: all; under residency shared those of the first micro-step."""
    if plan.residency != "shared" or plan.num_events == 0:
        return plan.slot_expert
    first: np.ndarray[Any, Any] = plan._slots_of_event(0)[0]
    return first


def others_than(decides: Any, table: np.ndarray[Any, Any], group: Any, device: torch.device) -> list[int]:
    """The ranks of the group that have another one. Collective."""
    digest = bytes.fromhex(digest_of(decides, table))
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    return [rank for rank, of in enumerate(gathered(mine, group)) if not torch.equal(of, mine)]
