"""What ranks forward to each other when they dispatch by token: sizes and orders, gathered before layers run.

Where a token goes follows from routes and plan, which only its source knows row by row. Each source tells the relay of
every node which ranks of the node serve its tokens, and every rank which of its tokens, and which of their experts, it
computes: a bit and two bytes (four in large micro-steps) per row. A thread of its own exchanges this for each
micro-step, a few micro-steps ahead of the phase.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import foremoe
from foremoe._engine.communication import exchanged_bytes
from foremoe._engine.planned_phase import PlanInProgress
from foremoe._engine.ranks import Ranks

from .by_token import Fan, Hop, TokenDispatch
from .routes import Routes

Array = np.ndarray[Any, np.dtype[Any]]
_AHEAD = 2  # micro-steps whose tables are made before the phase reaches them; limits host memory


@dataclass(frozen=True)
class TokenRows:
    """Destinations of one layer's tokens, on the host. See TokenDispatch."""

    across: tuple[list[int], list[int]]  # sizes sent and received
    within: tuple[list[int], list[int]]
    tables: dict[str, Tensor]

    def on(self, tables: dict[str, Tensor], **slots: Any) -> TokenDispatch:
        """Returns the dispatch. tables: `tables` on the device. slots: Attributes of SlotRows."""

        def fan(name: str) -> Fan:
            return Fan(*(tables[f"{name}_{of}"] for of in ("row", "order", "first")))

        return TokenDispatch(
            **slots,
            to_relays=Hop(fan("relay"), *self.across),
            to_ranks=Hop(fan("rank"), *self.within),
            to_slots=fan("slot"),
            entries=tables["entries"],
        )


class Relays:
    """Gathers the destinations of tokens, in a background thread, for one phase after the other."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foremoe-relays")

    def start(self, running: PlanInProgress, load: foremoe.Load, routes: Routes) -> GatheredTokens:
        """Begins to gather for a phase. Collective, on all ranks in the same order."""
        return GatheredTokens(self._ranks, self._pool, running, load, routes)

    def close(self, failed: bool = False) -> None:
        """Ends the thread. failed: At once, since other ranks may be gone."""
        self._pool.shutdown(wait=not failed, cancel_futures=True)


class GatheredTokens:
    """Destinations of the tokens of one phase. Collective: all ranks take the micro-steps in order."""

    def __init__(
        self, ranks: Ranks, pool: ThreadPoolExecutor, running: PlanInProgress, load: foremoe.Load, routes: Routes
    ) -> None:
        self._ranks, self._pool, self._running, self._load, self._routes = ranks, pool, running, load, routes
        self._turns: foremoe.RankTurns | None = None
        self._of: dict[int, Future[list[TokenRows]]] = {}
        for m in range(_AHEAD):
            self._begin(m)

    def _begin(self, micro_step: int) -> None:
        if micro_step < self._load.num_micro_steps:
            self._of[micro_step] = self._pool.submit(self._gather, micro_step)

    def take(self, micro_step: int) -> list[TokenRows]:
        """Returns the destinations of a micro-step, by layer. Waits until they are gathered."""
        self._begin(micro_step + _AHEAD)
        return self._of.pop(micro_step).result()

    def _gather(self, micro_step: int) -> list[TokenRows]:
        self._running.wait_for(micro_step)
        if self._turns is None:  # of its own, since the phase's are used by another thread
            plan = self._running.begin()
            self._turns = foremoe.RankTurns(plan, self._load, rank=self._ranks.rank, phase="recompute", path="peer")
        turns = [self._turns["forward", micro_step, layer] for layer in range(self._load.num_layers)]
        own = self._routes.own[micro_step].numpy()
        num_slots = self._running.begin().num_slots
        sent = [_Sent(turn, own[:, turn.layer], num_slots, self._ranks) for turn in turns]
        assert self._ranks.relays is not None
        parts = [_packed(sent, target, self._ranks) for target in range(self._ranks.num_ranks)]
        received = exchanged_bytes(parts, self._ranks.relays.group)
        found = [_unpacked(part, turns, source, self._ranks) for source, part in enumerate(received)]
        return [_joined(*of, self._ranks) for of in zip(turns, sent, zip(*found, strict=True), strict=True)]


class _Sent:
    """What this rank sends in one layer."""

    def __init__(self, turn: foremoe.RankTurn, routes: Array, num_slots: int, ranks: Ranks) -> None:
        """routes: int32 [tokens, top_k]."""
        routes = np.ascontiguousarray(routes)
        tokens, self.top_k = routes.shape
        order = turn.row_order(routes)
        token, entry = np.divmod(order, self.top_k)
        target = turn.slots(routes).reshape(-1)[order] // num_slots
        goes = np.zeros((tokens, ranks.num_ranks), bool)
        goes[token, target] = True
        by_node = goes.reshape(tokens, ranks.num_nodes, ranks.ranks_per_node)
        self.to_nodes = by_node.any(2)
        self.masks = [by_node[self.to_nodes[:, n], n] for n in range(ranks.num_nodes)]  # [node], bool [tokens, ranks]
        number = goes.cumsum(0, dtype=np.int32) - 1  # of a token among those that a rank serves
        entries = number[token, target] * self.top_k + entry
        self.entries = np.split(entries, np.cumsum(turn.send)[:-1])  # [rank]


@dataclass(frozen=True)
class _Received:
    """What one source tells this rank about one layer.

    masks: bool [tokens, ranks of a node], which ranks of this node serve the tokens; none unless this rank relays them.
    entries: int64 [rows], entry in [tokens that the source sends to this rank, top_k] of each row.
    """

    masks: Array
    entries: Array


def _is_relay(source: int, target: int, ranks: Ranks) -> bool:
    return source % ranks.ranks_per_node == target % ranks.ranks_per_node


def _packed(sent: list[_Sent], target: int, ranks: Ranks) -> bytes:
    """Returns what another rank needs, all layers after each other: sizes and masks for a relay, then entries."""
    parts: list[Array] = []
    if _is_relay(ranks.rank, target, ranks):
        masks = [of.masks[target // ranks.ranks_per_node] for of in sent]
        parts += [np.array([len(of) for of in masks], np.int32), *(np.packbits(of, 1) for of in masks)]
    largest = max(of.to_nodes.shape[0] * of.top_k for of in sent)
    kind = np.uint16 if largest <= 1 << 16 else np.int32
    return b"".join(of.tobytes() for of in [*parts, *(of.entries[target].astype(kind) for of in sent)])


def _unpacked(part: bytes, turns: list[foremoe.RankTurn], source: int, ranks: Ranks) -> list[_Received]:
    """Returns what a source tells this rank, by layer."""
    width, layers = ranks.ranks_per_node, len(turns)
    masks = [np.zeros((0, width), bool)] * layers
    if _is_relay(source, ranks.rank, ranks):
        sizes, part = np.frombuffer(part[: 4 * layers], np.int32), part[4 * layers :]
        end = int(sizes.sum()) * -(-width // 8)
        bits = np.frombuffer(part[:end], np.uint8).reshape(-1, -(-width // 8))
        masks = np.split(np.unpackbits(bits, 1, width).astype(bool), np.cumsum(sizes)[:-1])
        part = part[end:]
    rows = [int(turn.recv[source]) for turn in turns]
    kind = np.uint16 if len(part) <= 2 * sum(rows) else np.int32
    entries = np.split(np.frombuffer(part, kind).astype(np.int64), np.cumsum(rows)[:-1])
    return [_Received(*of) for of in zip(masks, entries, strict=True)]


def _joined(turn: foremoe.RankTurn, sent: _Sent, received: tuple[_Received, ...], ranks: Ranks) -> TokenRows:
    """Returns the destinations of one layer's tokens. received: By source."""
    nodes, width, top_k = ranks.num_nodes, ranks.ranks_per_node, sent.top_k
    relayed = [of.masks for of in received[ranks.rank % width :: width]]
    to_ranks = np.concatenate(relayed)
    # A relay forwards the tokens of the sources at its position, node by node; relays are in ascending order.
    by_relay = np.arange(nodes * width).reshape(nodes, width).T
    tokens = np.array([int(of.entries.max()) // top_k + 1 if len(of.entries) else 0 for of in received])
    first = np.zeros(nodes * width, np.int64)
    first[by_relay.reshape(-1)] = np.cumsum(tokens[by_relay]) - tokens[by_relay].reshape(-1)
    arrived = np.concatenate([of.entries + begin * top_k for of, begin in zip(received, first, strict=True)])
    entries = arrived[turn.to_slots]
    place = np.full((int(tokens.sum()), top_k), -1, np.int32)
    place.reshape(-1)[entries] = np.arange(len(entries))
    slots = {
        "row": entries // top_k,
        "order": place[place >= 0],
        "first": _begins((place >= 0).sum(1)),
    }
    fans = {"relay": _fan(sent.to_nodes), "rank": _fan(to_ranks), "slot": slots}
    return TokenRows(
        across=(sent.to_nodes.sum(0).tolist(), [len(of) for of in relayed]),
        within=(to_ranks.sum(0).tolist(), tokens[by_relay].sum(1).tolist()),
        tables={
            f"{name}_{of}": torch.from_numpy(table.astype(np.int32)) for name, fan in fans.items()
            for of, table in fan.items()
        }
        | {"entries": torch.from_numpy(entries)},
    )  # fmt: skip


def _fan(goes: Array) -> dict[str, Array]:
    """Returns the tables of a Fan, whose copies lie by (target, row). goes: bool [rows, targets]."""
    number = goes.T.cumsum(dtype=np.int32).reshape(goes.shape[::-1]).T - 1
    return {"row": goes.T.nonzero()[1], "order": number[goes], "first": _begins(goes.sum(1))}


def _begins(sizes: Array) -> Array:
    return np.concatenate([[0], sizes.cumsum()])
