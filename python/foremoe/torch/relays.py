"""What ranks forward to each other when they dispatch by token: sizes and orders, gathered before layers run.

Where a token goes follows from routes and plan, which only its source knows row by row. Each source tells the relay of
every node which ranks of the node serve its tokens, and every rank which of its tokens, and which of their experts, it
computes: a bit and two bytes (four in large micro-steps) per row. A thread of its own exchanges this for each
micro-step, a few micro-steps ahead of the phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import foremoe
from foremoe._engine.background import Background
from foremoe._engine.communication import exchanged_bytes
from foremoe._engine.ranks import Ranks
from foremoe._engine.shares import SharedPlan

from .by_token import Fan, Hop, TokenDispatch
from .routes import Routes

Array = np.ndarray[Any, Any]
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
        self._pool = Background("relays")

    def start(self, running: SharedPlan, load: foremoe.Load, routes: Routes, *, later: bool) -> GatheredTokens:
        """Begins to gather for a phase. Collective, on all ranks in the same order.

        later: Begins only when the phase does, since another phase is running and needs the thread.
        """
        gathered = GatheredTokens(self._ranks, self._pool, running, load, routes)
        if not later:
            gathered.begin()
        return gathered

    def close(self, failed: bool = False) -> None:
        """Ends the thread. failed: Stops its calls, since other ranks may be gone."""
        self._pool.close(failed)


class GatheredTokens:
    """Destinations of the tokens of one phase. Collective: all ranks take the micro-steps in order."""

    def __init__(self, ranks: Ranks, pool: Background, running: SharedPlan, load: foremoe.Load, routes: Routes) -> None:
        self._ranks, self._pool, self._running, self._load, self._routes = ranks, pool, running, load, routes
        self._turns: foremoe.RankTurns | None = None
        self._of: dict[int, Future[list[TokenRows]]] = {}
        self._failed: BaseException | None = None

    def begin(self) -> None:
        """Begins to gather the first micro-steps, unless it has begun. Called before take()."""
        if not self._of:
            for m in range(_AHEAD):
                self._begin(m)

    def _begin(self, micro_step: int) -> None:
        if micro_step < self._load.num_micro_steps:
            self._of[micro_step] = self._pool.submit(self._gather_next, micro_step)

    def take(self, micro_step: int) -> list[TokenRows]:
        """Returns the destinations of a micro-step, by layer. Waits until they are gathered."""
        self._begin(micro_step + _AHEAD)
        return self._of.pop(micro_step).result()

    def _gather_next(self, micro_step: int) -> list[TokenRows]:
        """Gathers unless an earlier micro-step failed, since its exchange may still be awaited by other ranks."""
        if self._failed is not None:
            raise self._failed
        try:
            return self._gather(micro_step)
        except BaseException as error:
            self._failed = error
            raise

    def _gather(self, micro_step: int) -> list[TokenRows]:
        self._running.wait_for(micro_step)
        if self._turns is None:  # of its own, since the phase's are used by another thread
            plan = self._running.begin()
            self._turns = foremoe.RankTurns(
                plan, self._load, rank=self._ranks.rank, phase="recompute", path="peer", rows="token"
            )
        turns = [self._turns["forward", micro_step, layer] for layer in range(self._load.num_layers)]
        own = self._routes.own[micro_step].numpy()
        sent = [Sent(turn, np.ascontiguousarray(own[:, turn.layer]), self._ranks) for turn in turns]
        assert self._ranks.relays is not None
        parts = [packed(sent, target, self._ranks) for target in range(self._ranks.num_ranks)]
        received = exchanged_bytes(parts, self._ranks.relays.group)
        found = [unpacked(part, turns, source, self._ranks) for source, part in enumerate(received)]
        return [joined(*of, self._ranks) for of in zip(turns, sent, zip(*found, strict=True), strict=True)]


class Sent:
    """What this rank sends in one layer."""

    def __init__(self, turn: foremoe.RankTurn, routes: Array, ranks: Ranks) -> None:
        """routes: int32 [tokens, top_k]."""
        self.tokens, self.top_k = routes.shape
        token, entry = np.divmod(turn.row_order(routes), self.top_k)
        target = np.repeat(np.arange(ranks.num_ranks), turn.send)
        goes = np.zeros((ranks.num_ranks, self.tokens), bool)
        goes[target, token] = True
        by_node = goes.reshape(ranks.num_nodes, ranks.ranks_per_node, self.tokens)
        self.to_nodes: Array = np.logical_or.reduce(by_node, 1)  # [nodes, tokens]
        self.masks = [of[:, to] for of, to in zip(by_node, self.to_nodes, strict=True)]  # [node], [ranks, tokens sent]
        number = goes.cumsum(1, dtype=np.int32)[target, token] - 1  # of a token among those that a rank serves
        self.entries = np.split(number * self.top_k + entry, np.cumsum(turn.send)[:-1])  # [rank]


@dataclass(frozen=True)
class Received:
    """What one source sends to this rank in one layer.

    masks: bool [ranks of a node, tokens], which ranks of this node serve the tokens that this rank relays.
    entries: int64 [rows], entry of each row in [tokens that the source sends to this rank, top_k].
    """

    masks: Array
    entries: Array


def _is_relay(source: int, target: int, ranks: Ranks) -> bool:
    return source % ranks.ranks_per_node == target % ranks.ranks_per_node


def packed(sent: list[Sent], target: int, ranks: Ranks) -> bytes:
    """Returns what another rank needs of all layers: sizes and masks for a relay, then entries."""
    parts: list[Array] = []
    if _is_relay(ranks.rank, target, ranks):
        masks = [of.masks[target // ranks.ranks_per_node] for of in sent]
        parts += [np.array([of.shape[1] for of in masks], np.int32), np.packbits(np.concatenate(masks, 1), 0)]
    kind = np.uint16 if max(of.tokens * of.top_k for of in sent) <= 1 << 16 else np.int32
    return b"".join(of.tobytes() for of in [*parts, *(of.entries[target].astype(kind) for of in sent)])


def unpacked(part: bytes, turns: list[foremoe.RankTurn], source: int, ranks: Ranks) -> list[Received]:
    """Returns what a source sends to this rank, by layer."""
    sizes, masks = np.zeros(len(turns), np.int32), b""
    if _is_relay(source, ranks.rank, ranks):
        sizes, part = np.frombuffer(part[: sizes.nbytes], np.int32), part[sizes.nbytes :]
        end = int(sizes.sum()) * -(-ranks.ranks_per_node // 8)
        masks, part = part[:end], part[end:]
    bits = np.frombuffer(masks, np.uint8).reshape(-(-ranks.ranks_per_node // 8), -1)
    of_layers = np.split(np.unpackbits(bits, 0, ranks.ranks_per_node).view(bool), np.cumsum(sizes)[:-1], 1)
    rows = [int(turn.recv[source]) for turn in turns]
    kind = np.uint16 if len(part) <= 2 * sum(rows) else np.int32
    entries = np.split(np.frombuffer(part, kind).astype(np.int64), np.cumsum(rows)[:-1])
    return [Received(*of) for of in zip(of_layers, entries, strict=True)]


def joined(turn: foremoe.RankTurn, sent: Sent, received: Sequence[Received], ranks: Ranks) -> TokenRows:
    """Returns the destinations of one layer's tokens. received: By source."""
    nodes, width, top_k = ranks.num_nodes, ranks.ranks_per_node, sent.top_k
    relayed = [of.masks for of in received[ranks.rank % width :: width]]
    to_ranks = np.concatenate(relayed, 1)
    tokens = np.array([int(of.entries.max(initial=-1)) // top_k + 1 for of in received])
    # Tokens arrive relay by relay, each with those of the sources at its position, node by node.
    by_relay = np.arange(nodes * width).reshape(nodes, width).T
    first = np.zeros(nodes * width, np.int64)
    first[by_relay.reshape(-1)] = _begins(tokens[by_relay].reshape(-1))[:-1]
    arrived = np.concatenate([of.entries + begin * top_k for of, begin in zip(received, first, strict=True)])
    entries = arrived[turn.to_slots]
    tables = {
        "entries": entries,
        **_fan("relay", _rows_of(sent.to_nodes), sent.tokens),
        **_fan("rank", _rows_of(to_ranks), to_ranks.shape[1]),
        **_fan("slot", entries // top_k, int(tokens.sum()), entries),
    }
    return TokenRows(
        across=(sent.to_nodes.sum(1).tolist(), [of.shape[1] for of in relayed]),
        within=(to_ranks.sum(1).tolist(), tokens[by_relay].sum(1).tolist()),
        tables={name: torch.from_numpy(table) for name, table in tables.items()},
    )


def _rows_of(goes: Array) -> Array:
    """Returns the row of each copy, by (target, row). goes: bool [targets, rows]."""
    rows: Array = np.flatnonzero(goes) % max(1, goes.shape[1])
    return rows


def _fan(name: str, row: Array, num_rows: int, rank: Array | None = None) -> dict[str, Array]:
    """Returns the tables of a Fan, by the names that TokenRows.on() reads.

    Args:
        name: Prefix of the names.
        row: The row of each copy.
        num_rows: Number of rows.
        rank: Sorts the copies by row, and those of a row in the order in which they are summed. None: by position.
    """
    order = (row if rank is None else rank).argsort(kind="stable")
    tables = {"row": row, "order": order, "first": _begins(np.bincount(row, minlength=num_rows))}
    return {f"{name}_{of}": table.astype(np.int32) for of, table in tables.items()}


def _begins(sizes: Array) -> Array:
    begins: Array = np.concatenate([[0], sizes.cumsum()])
    return begins
