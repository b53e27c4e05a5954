"""Guest buffers of one phase: copies into them, and gradients out of them.

Copies by the peer path go from homes to guests over a separate process group, so that they overlap with the exchange of
rows. All ranks start copies and send gradients at the same turns in the same order (RankTurns), so no announcement is
needed. Copies by the host path come from the node's arena.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe

from .background import keep
from .communication import start_point_to_point
from .host_path import HostPath
from .layers import CopiedLayer
from .ranks import Ranks
from .sharded import Written, local
from .waits import Waits

# Transfers of failed steps. torch cancels transfers without references, but other ranks wait for this rank's sends
# until their own step ends. Receives are also stored: after a cancelled receive, gloo reads nothing more from that
# peer, not even its readiness for this rank's sends, and both ranks would wait until a timeout.


class Guests:
    """Guests of all layers on this rank during a phase."""

    def __init__(
        self,
        layers: Sequence[CopiedLayer],
        plan: foremoe.Plan,
        turns: foremoe.RankTurns,
        ranks: Ranks,
        gradient_type: torch.dtype | None = None,
    ):
        """gradient_type: Type in which gradients go home and are summed. None: the type of the weights, or float32 if
        it is narrower."""
        self.host_path: HostPath | None = None  # None if no copy uses it
        self._turns = turns
        self._channel = ranks.copies
        self._layers = list(layers)
        self._slots = plan.guest_slots
        self.are_lent = plan.residency == "shared"  # buffers serve all layers in turn
        self._table = ranks.table
        self._weights = [layer.weights() for layer in layers]
        # Recorded when the phase begins: if a rank freezes a weight later, other ranks still exchange its gradients.
        self._trained = [{name for name, w in weights.items() if w.requires_grad} for weights in self._weights]
        self._was_written = [{name: Written(w) for name, w in weights.items()} for weights in self._weights]
        self._begun = -1  # the last turn whose copies have been started
        self._ahead: set[int] = set()  # later turns whose copies have all been started
        self._arriving: dict[int, list[Any]] = collections.defaultdict(list)  # by turn
        # Transfers in progress, with the turn in which they began: sends, and receives of gradients at home.
        self._sent: collections.deque[tuple[int, Any, Tensor]] = collections.deque()
        self._returns: collections.deque[tuple[int, Any, int, int, str, Tensor]] = collections.deque()
        # [layer]: sums of returned gradients of guests, by (home slot, name).
        self._home: list[dict[tuple[int, str], Tensor]] = [{} for _ in layers]
        self._gradient_type = gradient_type
        self._buffers = self._allocate()
        self._gradients: dict[tuple[int, str], Tensor] = {}
        self.weight_bytes = sum(w.nbytes for buffers in self._buffers for w in buffers.values())
        self.gradient_bytes = 0  # the most that all sums of gradients of guests have occupied
        self._peer_copies = 0
        self._waits = Waits(ranks.device)

    def _allocate(self) -> list[dict[str, Tensor]]:
        """Returns buffers of each layer, or under `shared` of each of `depth` sets, by name [guest slots, …]."""
        if self._slots == 0:
            return []
        count = self._turns.depth if self.are_lent else len(self._layers)
        like = [self._weights[0 if self.are_lent else i] for i in range(count)]
        return [
            {name: local(w.detach()).new_empty(self._slots, *w.shape[1:]) for name, w in weights.items()}
            for weights in like
        ]

    def weights(self, layer: int, turn: int) -> dict[str, Tensor]:
        """Returns the weights in the layer's guest slots in this turn, by name [guest slots, …]."""
        return self._buffers[turn % self._turns.depth if self.are_lent else layer]

    @property
    def copies(self) -> dict[str, int]:
        """Number of experts copied into this rank, by path."""
        return {"peer": self._peer_copies, "host": self.host_path.copies if self.host_path is not None else 0}

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank waited for copies and for experts in its node's arena; see Waits."""
        return self._waits.seconds + (self.host_path.exposed_seconds if self.host_path is not None else 0.0)

    def agree(self, micro_step: int) -> set[int]:
        """Returns the layers that must run without guests in this micro-step, on all ranks.

        Collective, before the first layer.
        """
        return self.host_path.agree(micro_step) if self.host_path is not None else set()

    def begin(self, turn: int) -> None:
        """Starts the copies of all turns up to this one."""
        while self._begun < turn:
            self._begun += 1
            self._start_peers(self._begun, [c for c in self._peers(self._begun) if c.arrives not in self._ahead])
            self._ahead.discard(self._begun)
        if self.host_path is not None:
            self.host_path.begin(turn, self._weights_of_buffer)

    def begin_ahead(self, turn: int) -> None:
        """Starts the peer-path copies that this turn reads, but no other copies of earlier turns.

        Needed if one activation checkpoint spans several MoE layers, and the guests of a backward pass differ from
        those of its forward. Recomputation then reads guests of a later turn of the same event. The buffers are free,
        since they change only between events.
        """
        if turn in self._ahead:
            return
        for before in range(self._begun + 1, turn + 1):
            self._start_peers(before, [copy for copy in self._peers(before) if copy.arrives == turn])
        if turn > self._begun:
            self._ahead.add(turn)

    def _peers(self, turn: int) -> list[foremoe.Copy]:
        return [copy for copy in self._turns.starting(turn) if copy.path == "peer"]

    def _start_peers(self, turn: int, copies: list[foremoe.Copy]) -> None:
        if not copies:
            return
        self._expect_same_weights()
        operations: list[Any] = []
        arrives: list[int | None] = []  # turn of each receive; None for sends
        for copy in copies:
            receives = copy.rank == self._turns.rank
            self._peer_copies += receives
            for name, weight in self._weights[copy.layer].items():
                if receives:
                    slot = self._weights_of_buffer(copy)[name]
                    operations.append(dist.P2POp(dist.irecv, slot, group=self._channel.group, group_peer=copy.source))
                else:
                    home = local(weight.detach())[self._table.index(copy.layer, copy.expert)]
                    operations.append(dist.P2POp(dist.isend, home, group=self._channel.group, group_peer=copy.rank))
                arrives.append(copy.arrives if receives else None)
        for work, operation, turn_of in zip(start_point_to_point(operations), operations, arrives, strict=True):
            if turn_of is None:
                self._sent.append((turn, work, operation.tensor))
            else:
                self._arriving[turn_of].append(work)

    def _weights_of_buffer(self, copy: foremoe.Copy) -> dict[str, Tensor]:
        buffers, slot = divmod(copy.buffer, self._slots)
        return {name: w[slot] for name, w in self._buffers[buffers].items()}

    def _expect_same_weights(self) -> None:
        """Raises if weights changed since the phase began, because guests are copies of the earlier weights."""
        for i, layer in enumerate(self._layers):
            for name, weight in layer.weights().items():
                if weight is not self._weights[i][name] or self._was_written[i][name]():
                    raise RuntimeError(f"the weights {name} of MoE layer {i} were changed inside a phase")

    def trained(self, layer: int) -> set[str]:
        """Returns the names of weights that have gradients."""
        return self._trained[layer]

    def wait(self, turn: int) -> None:
        """Waits for the copies that this turn reads."""
        waits = [work.wait for work in self._arriving.pop(turn, [])]
        if self.host_path is not None:
            waits += self.host_path.waits(turn)
        if waits:
            with self._waits.one():
                for wait in waits:
                    wait()

    def add_gradients(self, layer: int, gradients: dict[str, Tensor]) -> None:
        """Adds gradients of guests, by name [guest slots, …], and takes ownership of them.

        Two gradients may be the same tensor: autograd returns one for two weights if a layer reads only their sum.
        """
        taken: set[int] = set()
        for name, gradient in gradients.items():
            held = self._gradients.get((layer, name))
            if held is not None:
                held += gradient
                continue
            own = gradient.to(self._type_of_gradient(gradient))
            memory = own.untyped_storage().data_ptr()
            self._gradients[layer, name] = own.clone() if memory in taken else own
            taken.add(memory)
        self.gradient_bytes = max(self.gradient_bytes, sum(g.nbytes for g in self._gradients.values()))

    def end(self, turn: int, layer: int) -> None:
        """Sends home the gradients of guests that leave after this turn."""
        self._send_home(turn, layer, self._turns.returning(turn))
        # By now, peers have reached the transfers that began a micro-step ago. Under `shared`, wait earlier: gradients
        # return in every turn. A later wait would cost all memory that `shared` saves on gradient sums.
        before = turn - (self._turns.depth if self.are_lent else 2 * len(self._layers))
        while self._returns and self._returns[0][0] < before:
            self._take_first_return()
        while self._sent and self._sent[0][0] < before:
            self._sent.popleft()[1].wait()

    def _send_home(self, turn: int, layer: int, returns: list[foremoe.GradientReturn]) -> None:
        operations: list[Any] = []
        names = [name for name in self._weights[layer] if name in self.trained(layer)]
        for g in returns:
            for name in names:
                if g.guest == self._turns.rank:
                    gradient = self._take_gradient(layer, name, g.slot - self._table.per_rank)
                    operations.append(dist.P2POp(dist.isend, gradient, group=self._channel.group, group_peer=g.home))
                else:
                    gradient = self._new_gradient(layer, name)
                    operations.append(dist.P2POp(dist.irecv, gradient, group=self._channel.group, group_peer=g.guest))
        at = iter(zip(start_point_to_point(operations), operations, strict=True))
        for g in returns:
            for name in names:
                work, operation = next(at)
                if g.guest == self._turns.rank:
                    self._sent.append((turn, work, operation.tensor))
                else:
                    home = self._table.index(layer, g.expert)
                    self._returns.append((turn, work, layer, home, name, operation.tensor))
        if self.are_lent:
            self._gradients.clear()

    def _take_gradient(self, layer: int, name: str, slot: int) -> Tensor:
        """Returns the gradient of a guest that leaves; zeros if all of its turns ran at homes."""
        held = self._gradients.get((layer, name))
        if held is None:
            return self._new_gradient(layer, name).zero_()
        gradient = held[slot].clone(memory_format=torch.contiguous_format)
        held[slot].zero_()
        return gradient

    def _new_gradient(self, layer: int, name: str) -> Tensor:
        """Allocates the gradient of one expert."""
        weight = local(self._weights[layer][name].detach())
        return weight.new_empty(weight.shape[1:], dtype=self._type_of_gradient(weight))

    def _type_of_gradient(self, weight: Tensor) -> torch.dtype:
        return self._gradient_type or torch.promote_types(weight.dtype, torch.float32)

    def _take_first_return(self) -> None:
        """Adds the next gradient in the order of the plan, so that sums do not depend on arrival."""
        _, work, layer, home, name, gradient = self._returns.popleft()
        work.wait()
        held = self._home[layer].get((home, name))
        if held is None:
            self._home[layer][home, name] = gradient
        else:
            held += gradient

    def bring_home(self, *layers: int) -> None:
        """Sends home all remaining gradients, and waits for gradients in transit."""
        for layer in layers:
            self._send_home(len(self._turns), layer, self._turns.draining(layer))
        while self._returns:
            self._take_first_return()

    def take_home(self, layer: int) -> dict[tuple[int, str], Tensor]:
        """Returns the sums of gradients that came home to a layer, by (home slot, name). The caller owns them."""
        taken, self._home[layer] = self._home[layer], {}
        return taken

    def finish(self) -> None:
        """Waits until no rank reads this rank's weights and gradients, then releases all memory."""
        assert not self._arriving, "a copy has arrived that no turn waited for"
        for _, work, _ in self._sent:
            work.wait()
        self._sent.clear()
        if self.host_path is not None:
            self.host_path.close(complete=True)
        self._buffers.clear()
        self._gradients.clear()

    def abandon(self) -> None:
        """Stops background work after a failure. Transfers in progress last until the process ends or their channel is
        closed."""
        if not self._channel.ends_exchanges:
            keep(self._sent, self._returns, self._arriving, self._buffers)
        self._sent, self._returns, self._arriving = (
            collections.deque(),
            collections.deque(),
            collections.defaultdict(list),
        )
        if self.host_path is not None:
            self.host_path.close(complete=False)
