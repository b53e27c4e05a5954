"""Experts spread over the ranks of a group.

ExpertParallel leaves each rank its own experts, wraps what is no expert, plans phases, and gives and takes layers.
While a stage runs, the stage executes them; without one, every row goes home, with counts exchanged first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe._engine.arguments import expect_arguments, expect_executable, expect_layers, mark_spread, unmark_spread
from foremoe._engine.groups import make_groups, refused_together
from foremoe._engine.layers import ExpertLayer
from foremoe._engine.lent import try_lending_layer
from foremoe._engine.sharded import is_dtensor, local, local_weights, sharded_over_ranks

from .dispatch import dispatch_to
from .exchange import AllToAll
from .phase import Stage
from .routes import gather_routes
from .wrappers import is_sharded_by_fsdp2, shard_by_fsdp2, wrap_in_ddp

WRAPPERS = (None, "ddp", "fsdp2")


def _squared_norm(parameters: list[torch.nn.Parameter], device: torch.device) -> Tensor:
    """Of this rank's part of their gradients, float64 [], in no shorter type than float32."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for p in parameters:
        if p.grad is not None:
            grad = local(p.grad)
            total += grad.norm(dtype=torch.promote_types(grad.dtype, torch.float32)).double() ** 2
    return total


class ExpertParallel:
    """Leaves each rank its own experts of every layer, plans phases, and executes them.

    Collective over all ranks of the default process group: where several groups make one each, they do it at the same
    time, and a rank in none of them calls foremoe.torch.stand_by(). What follows is of the group alone.

    Make it before the optimizer: it replaces the experts' parameters by this rank's, E/R of each layer, ascending.
    Experts that are DTensors, and so lie on their ranks already, stay as they are.

    layers: in the order in which the model runs them, alike on all ranks.
    group: the expert-parallel group; None for all processes.
    guest_slots, residency, policy and the options: as foremoe.plan() takes them.
    depth: turns (a layer of a pass) ahead of which copies start.
    path: where copies come from: peer (the rank that owns the expert), host (an arena in shared memory per node, filled
        when a stage begins) or auto (each copy by the path that it loads least).
    host_timeout: seconds. A stage waits no longer than that for experts in its node's arena; then layers run at homes.
    ranks_per_node: that share a fast interconnect, and for the host path memory; None for all of them, or 8.
    threads: for planning.
    copy_group: a second group of the same ranks, for copies; None: one is made.
    options: prefer, tolerance, stages, max_copies_per_rank, max_copies_per_source, min_tokens_per_guest, seed.

    Raises InputError that names the argument, and PolicySkipped where the policy is not defined for this group. Where
    one rank refuses, all ranks raise.
    """

    def __init__(
        self,
        layers: Iterable[ExpertLayer],
        group: Any = None,
        *,
        guest_slots: int = 1,
        residency: str = "resident",
        policy: str = "foremoe",
        depth: int = 2,
        path: str = "peer",
        host_timeout: float = 30.0,
        ranks_per_node: int | None = None,
        threads: int = 1,
        copy_group: Any = None,
        **options: Any,
    ) -> None:
        self.layers = list(layers)
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.num_ranks = dist.get_world_size(self.group)
        self.guest_slots = guest_slots
        self.residency = residency
        self.policy = policy
        self.depth = depth
        self.path = path
        self.host_timeout = host_timeout
        self.ranks_per_node = ranks_per_node if ranks_per_node is not None else min(8, self.num_ranks)
        self.threads = threads
        self._options = options
        with refused_together():
            expect_arguments(self, options)
            expect_layers(self.layers, self.group)
            weights = self.layers[0].weights().values()
            self._sharded = is_dtensor(next(iter(weights)))  # by a framework, before
            self.num_experts = self.layers[0].num_experts
            self.own = self.num_experts // self.num_ranks
            self.device = next(iter(weights)).device
            self.expert_bytes = sum(w.numel() // self.num_experts * w.element_size() for w in weights)
            self._expect_plannable()
            if residency == "shared":
                for layer in self.layers:
                    try_lending_layer(layer)
        wanted = [(self.group, dist.get_backend(self.group))] if copy_group is None else []
        if path != "peer":
            wanted.append((self.group, "gloo"))
        self._made_groups = make_groups(wanted, self.device)
        # Copies overlap with the exchange of rows on a group of their own.
        self.copy_group = self._made_groups[0] if copy_group is None else copy_group
        if copy_group is not None:
            # The first operation of a group must be one that all ranks take part in.
            dist.all_reduce(torch.zeros(1, device=self.device), group=copy_group)
        # On which ranks agree about copies by the host path.
        self.cpu_group: Any = self._made_groups[-1] if path != "peer" else None
        self.num_stages = 0  # entered
        self._model: Any = None  # whose other parameters are trained too
        self._averages = False  # drain() does it
        self._fsdp2 = self._sharded  # who shards experts shards the other weights by FSDP2
        self.needs_all_ranks = self._sharded  # in every micro-step
        self.failed = False  # a stage did, with copies on their way
        self._stage: Stage | None = None
        self._shard()

    def _expect_plannable(self) -> None:
        """Plans nothing at all: the planner refuses what it would refuse of a stage."""
        nothing = np.zeros((1, 1, self.num_ranks, self.num_experts), np.int64)
        load = self._load(nothing)
        plan = self._start_plan(load).finish()
        expect_executable(plan)
        foremoe.RankTurns(plan, load, rank=0, path=self.path, depth=self.depth)

    def _load(self, counts: np.ndarray[Any, np.dtype[np.int64]]) -> foremoe.Load:
        return foremoe.Load.from_array(
            counts, top_k=self.layers[0].top_k, ranks_per_node=self.ranks_per_node, name="routes"
        )

    def _start_plan(self, load: foremoe.Load) -> foremoe.RunningPlan:
        return foremoe.start_plan(
            load,
            policy=self.policy,
            guest_slots=self.guest_slots,
            residency=self.residency,  # type: ignore[arg-type]
            threads=self.threads,
            **self._options,
        )

    def _shard(self) -> None:
        begin = self.rank * self.own
        for i, layer in enumerate(self.layers):
            if not self._sharded:
                own = {}
                for name, weight in layer.weights().items():
                    part = weight.detach()[begin : begin + self.own].clone()
                    own[name] = torch.nn.Parameter(part, requires_grad=weight.requires_grad)
                layer.set_weights(own)
            layer.execute_by(self._execute_of(i))
        mark_spread(self.expert_parameters())

    def _execute_of(self, index: int) -> Any:
        def execute(hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            if self._stage is not None:
                return self._stage.execute(index, hidden, ids, gates)
            return self.execute_at_homes(index, hidden, ids, gates)[0]

        return execute

    def execute_at_homes(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> tuple[Tensor, int]:
        """Rows that no plan knows, at their experts' homes, with counts exchanged first.

        hidden: [tokens, hidden]; ids, gates: [tokens, top_k]. Returns [tokens, hidden], and the number of rows computed
        on this rank.
        """
        layer = self.layers[index]
        to = dispatch_to(ids, slots=self.own, own=self.own, group=self.group)
        token = to.order // layer.top_k
        rows = AllToAll.apply(hidden[token], to.send, to.recv, self.group, None, None)[to.to_slots]
        computed = layer.forward_rows(rows, to.home_ends, local_weights(layer))
        back = torch.empty_like(computed).index_copy(0, to.to_slots, computed)
        returned = AllToAll.apply(back, to.recv, to.send, self.group, None, None)
        weighted = returned * gates.reshape(-1)[to.order, None].to(returned.dtype)
        return torch.zeros_like(hidden).index_add(0, token, weighted.to(hidden.dtype)), to.home_rows

    def expert_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's, of all layers."""
        return [weight for layer in self.layers for weight in layer.weights().values()]

    def wrap(self, model: torch.nn.Module, wrapper: str | None = None) -> torch.nn.Module:
        """Has the gradients of all other parameters averaged over the group, and returns the model to train.

        None: at every drain(). "ddp": in every backward, by DistributedDataParallel, which is what is returned.
        "fsdp2": in every backward, by fully_shard(), which turns these parameters into DTensors sharded over the group:
        call it before the optimizer is made. With "ddp" and "fsdp2" all ranks must have the same number of micro-steps.
        No wrapper sees experts; drain() makes their gradients the mean over ranks. A model that FSDP2 shards already
        averages its own gradients; it takes None.
        """
        if wrapper not in WRAPPERS:
            raise foremoe.InputError(f"wrapper: '{wrapper}', expected None, ddp or fsdp2", field="wrapper")
        if is_sharded_by_fsdp2(model):
            if wrapper is not None:
                raise foremoe.InputError(
                    f"wrapper: '{wrapper}', but FSDP2 shards the model already; expected None", field="wrapper"
                )
            self._model = model
            self._fsdp2 = self.needs_all_ranks = True
            return model
        self._model = model
        self._averages = wrapper is None
        self._fsdp2 = wrapper == "fsdp2"
        self.needs_all_ranks = wrapper is not None
        if wrapper == "ddp":
            return wrap_in_ddp(model, self.expert_parameters(), self.group)
        if self._fsdp2:
            shard_by_fsdp2(model, self.expert_parameters(), self.group)
        return model

    def dense_parameters(self) -> list[torch.nn.Parameter]:
        """Those of the wrapped model that are trained, and no experts; under "fsdp2" this rank's shards.

        Call it outside of forward and backward.
        """
        if self._model is None:
            return []
        if self._fsdp2:
            self._model.reshard()  # a forward without a backward leaves whole parameters at the root
        experts = {id(weight) for weight in self.expert_parameters()}
        return [p for p in self._model.parameters() if id(p) not in experts and p.requires_grad]

    def reduced_parameters(self) -> list[torch.nn.Parameter]:
        """Those whose gradients drain() averages."""
        return self.dense_parameters() if self._averages else []

    def enter(self, stage: Stage) -> None:
        if self._stage is not None:
            raise RuntimeError("another stage is running")
        self._expect_usable()
        self._stage = stage
        self.num_stages += 1

    def _expect_usable(self) -> None:
        if self.failed:
            raise RuntimeError("a stage failed: what it sent may still be on its way; begin anew with other groups")

    def leave(self) -> None:
        self._stage = None

    def plan(
        self,
        routes: Sequence[Tensor],
        phase: str = "policy_update",
        *,
        unrouted: str = "drop",
        on_mismatch: str = "refuse",
    ) -> Stage:
        """Plans a phase, in the background. Collective.

        routes: of each of this rank's micro-steps, integers [rows, layers, top_k] or [batch, tokens, layers, top_k], as
        the model flattens its tokens; −1 in all entries of a row that has no route. Ranks may have different numbers of
        micro-steps.
        unrouted: what becomes of rows without a route. drop: the experts add nothing to them, so that only rows which
        nothing reads may have none: padding, and the last token of a sequence. home: each takes the experts that its
        router chooses, at their homes. Layers of micro-steps in which some rank has such rows exchange these apart from
        the others, and their counts first.
        on_mismatch: refuse: the routes are replayed; a layer that runs other experts ends the stage with an error.
        home: routers choose their own experts, and the routes are a guess that the plan is made for. A row (a token at
        one of its experts) whose expert was recorded takes the replica that was planned for it; any other one goes to
        its expert's home. Each forward of a layer has an all-to-all of counts more, for which the host waits.

        Raises InputError for routes that cannot be, where no rank has a micro-step, and under drop for rows without a
        route that something reads, where that can be seen: a row in some layers alone, or one between rows of its
        sequence that have a route.
        """
        self._expect_usable()
        gathered = gather_routes(self, routes, phase, unrouted, on_mismatch)
        load = self._load(gathered.counts)
        return Stage(self, load, self._start_plan(load), gathered, phase=phase)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, of all parameters and all ranks: the same coefficient everywhere."""
        dense = self.dense_parameters()
        sharded = sharded_over_ranks(dense)
        own = _squared_norm([*self.expert_parameters(), *sharded], self.device)
        dist.all_reduce(own, group=self.group)
        parts = {id(p) for p in sharded}
        norm: Tensor = (own + _squared_norm([p for p in dense if id(p) not in parts], self.device)).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in [*self.expert_parameters(), *dense]:
            if p.grad is not None:
                local(p.grad).mul_(scale.to(p.grad.dtype))
        return norm

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The experts of all ranks: "LAYER.NAME" → [experts, …], on every rank. Collective."""
        state = {}
        for i, layer in enumerate(self.layers):
            for name, weight in local_weights(layer).items():
                parts = [torch.empty_like(weight) for _ in range(self.num_ranks)]
                dist.all_gather(parts, weight.detach().contiguous(), group=self.group)
                state[f"{i}.{name}"] = torch.cat(parts)
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes this rank's experts from what full_state_dict() returned."""
        begin = self.rank * self.own
        for i, layer in enumerate(self.layers):
            for name, weight in local_weights(layer).items():
                if f"{i}.{name}" not in state:
                    raise foremoe.InputError(f"state: {i}.{name} is missing", field="state", index=f"[{i}.{name}]")
                weight.copy_(state[f"{i}.{name}"][begin : begin + self.own])

    def detach(self) -> None:
        """Gives every layer its own forward back, and all of its experts if it came with all. Collective. No stage can
        run afterwards: the groups that were made for copies are gone."""
        unmark_spread(self.expert_parameters())
        while self._made_groups and not self.failed:  # after a failure something may be on its way
            dist.destroy_process_group(self._made_groups.pop())
        if self._sharded:
            for layer in self.layers:
                layer.execute_by(None)
            return
        state = self.full_state_dict()
        for i, layer in enumerate(self.layers):
            layer.set_weights(
                {
                    name: torch.nn.Parameter(state[f"{i}.{name}"], requires_grad=w.requires_grad)
                    for name, w in layer.weights().items()
                }
            )
            layer.execute_by(None)

    @contextlib.contextmanager
    def unplanned(self) -> Iterator[None]:
        """Layers run without a plan inside, every row at its home."""
        stage, self._stage = self._stage, None
        try:
            yield
        finally:
            self._stage = stage
