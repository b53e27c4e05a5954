"""Experts spread over the ranks of a group.

ExpertParallel leaves each rank its own experts, wraps what is no expert, plans phases, and gives and takes layers.
While a phase runs, the phase executes them; without one, every row goes home, with counts exchanged first.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe._engine.arguments import expect_layers, expect_warm_start, plan_nothing
from foremoe._engine.compiled import expect_not_compiling
from foremoe._engine.layers import ExpertLayer
from foremoe._engine.lent import try_lending_layers
from foremoe._engine.node_memory import NodeMemory
from foremoe._engine.ranks import Ranks
from foremoe._engine.sharded import local_weights
from foremoe._engine.shares import Shares
from foremoe._engine.together import facts_of, refused_together, versions

from . import optimizer_state, saving
from .arguments import ExecutorArguments, ranks_of
from .channels import replicas_of, with_channels
from .dense import Dense
from .evaluation import Evaluation
from .gradients import clip
from .own_experts import OwnExperts, refuse_optimizers_of
from .phase import Phase
from .routes import Counts, RoutesOfMicroStep, gather_routes
from .shards import ExpertShards
from .spread import SpreadExperts, expect_no_hooks


class ExpertParallel:
    """Leaves each rank its own experts of every layer, plans phases, and executes them.

    Collective over all ranks of the default process group: where several groups make one each, they do it at the same
    time, and a rank in none of them calls foremoe.torch.stand_by(). What follows is of the group alone.

    Make it before the optimizer: it replaces the experts' parameters by this rank's, E/R of each layer, ascending.
    Experts that are DTensors, and so lie on their ranks already, stay as they are.

    layers: in the order in which the model runs them, alike on all ranks.
    group: the expert-parallel group; None for all processes.
    replicate_group: the ranks that hold the same experts as this one, one of each expert-parallel group that trains the
        model: gradients are averaged over them too. None: there are none. Required where group is not all processes.
    guest_slots, residency, policy and the options: as foremoe.plan() takes them.
    depth: turns (a layer of a pass) ahead of which copies start.
    path: where copies come from: peer (the rank that owns the expert), host (an arena in shared memory per node, filled
        when a phase begins) or auto (each copy by the path that it loads least).
    host_timeout: seconds. A phase waits no longer than that for experts in its node's arena; then layers run at homes.
    ranks_per_node: that share a fast interconnect, and for the host path memory; None for all of them, or 8.
    threads: for planning.
    copy_group: a second group of the same ranks, for copies; None: one is made.
    options: prefer, tolerance, stages, max_copies_per_rank, max_copies_per_source, min_tokens_per_guest, seed.

    Raises InputError that names the argument, and PolicySkipped where the policy is not defined for this group. Where
    one rank refuses, all ranks raise; and where ranks of a group were given other arguments (threads may differ) or
    layers than each other, or any rank runs other versions of foremoe and torch.
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
        replicate_group: Any = ...,
        **options: Any,
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.arguments = ExecutorArguments(
            guest_slots=guest_slots, residency=residency, policy=policy, depth=depth, path=path,
            host_timeout=host_timeout, ranks_per_node=ranks_per_node, threads=threads, group=self.group,
            copy_group=copy_group, replicate_group=replicate_group, options=options,
        )  # fmt: skip
        with refused_together() as given:
            given.expect_alike(versions())
            among = given.expect_same_group(ranks_of(self.group, "group"))
            given.expect_alike(self.arguments.compared(), among)
            self.arguments.expect_executable()
            replicas = self.arguments.replicas
            self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            self.layers = list(layers)
            expect_layers(self.layers, self.group)
            expect_no_hooks(self.layers)
            facts = facts_of(self.layers)
            given.expect_alike(facts, among)
            if replicas is not None:
                of_replica = self.arguments.compared_between_replicas() | facts
                given.expect_alike(of_replica, f"replicas {replicas}")
            given.told = ranks_of(self.group, "group"), replicas
            num_experts = self.layers[0].num_experts
            device = next(iter(self.layers[0].weights().values())).device
            self.ranks = Ranks.of(self.group, num_experts, ranks_per_node, device)
            nothing = self._load(np.zeros((1, 1, self.num_ranks, num_experts), np.int64))
            if plan_nothing(nothing, self.arguments, path=path).residency == "shared":
                try_lending_layers(self.layers)
        self._nothing = nothing
        grid = replicas_of(ranks_of(self.group, "group"), given.of_all)
        replicated = None if len(grid) == 1 else replicate_group
        self.ranks, self._channels = with_channels(self.ranks, copy_group, replicated, grid, agree=path != "peer")
        self._memory = NodeMemory(self.ranks)
        self._shares = Shares(self.ranks.plans, self.arguments.planning())
        replaced = [weight for layer in self.layers for weight in layer.weights().values()]
        self.experts = SpreadExperts(self.layers, self.ranks)
        self._own_experts = OwnExperts(self.experts.parameters(), self.ranks)
        if not self.experts.is_sharded:
            refuse_optimizers_of(replaced)
        del replaced
        self.experts.expect_callable = self._expect_callable
        self._at_homes = functools.partial(self._execute_at_homes, self._announce)
        self.experts.execute_by(self._at_homes)
        self._dense = Dense(self.experts)
        self._own_experts.note_step = self._dense.trained_with
        self._shards = ExpertShards(self.expert_parameters(), self.ranks)
        if (model := getattr(self.layers[0], "model", None)) is not None:
            self._know(model)
        self._is_evaluating = False

    def _load(self, counts: Counts) -> foremoe.Load:
        return foremoe.Load.from_array(
            counts, top_k=self.layers[0].top_k, ranks_per_node=self.ranks.ranks_per_node, name="routes"
        )

    def _expect_callable(self) -> None:
        expect_not_compiling()
        self._own_experts.expect_no_ddp()

    def _announce(self, index: int) -> None:
        """Announces a forward without a plan, which all ranks must run."""
        if index == 0 and torch._C._current_graph_task_id() < 0:  # not a recomputation
            self.ranks.expect_call("a forward without a plan")

    def _execute_at_homes(
        self, announce: Callable[[int], None], index: int, hidden: Tensor, ids: Tensor, gates: Tensor
    ) -> Tensor:
        """A layer without a plan. What one rank raises inside ends those of all ranks, which exchange rows with it.

        announce: called with the layer's index, before any exchange.
        """
        self._expect_callable()
        self.experts.expect_usable()
        announce(index)
        try:
            return self.experts.at_homes(index, hidden, ids, gates)[0]
        except BaseException as error:
            if type(error).__name__ == "_StopRecomputationError":  # a checkpoint has computed again all that it needs
                raise
            self.experts.failed = True
            ended_by = self.ranks.failures.end(error) if self.ranks.failures is not None else ""
            if ended_by:
                raise RuntimeError(f"{ended_by}; begin anew after detach()") from error
            raise

    def expert_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's, of all layers."""
        return self.experts.parameters()

    def dense_parameters(self) -> list[torch.nn.Parameter]:
        """Those of the wrapped model that are trained, and no experts; under "fsdp2" this rank's shards.

        Call it outside of forward and backward.
        """
        return list(self._dense.named_parameters().values())

    def wrap(
        self, model: torch.nn.Module, wrapper: str | None = None, *, sharded: Iterable[str] = ()
    ) -> torch.nn.Module:
        """Has the gradients of all other parameters averaged over all ranks, and returns the model to train.

        None: at every drain(). "ddp": in every backward, by DistributedDataParallel, which is what is returned.
        "fsdp2": in every backward, by fully_shard(), which turns these parameters into DTensors sharded over the group:
        call it before the optimizer is made. With "ddp" and "fsdp2" all ranks must have the same number of micro-steps;
        so also where the trainer makes a DistributedDataParallel of the model afterwards.
        "own": by the trainer, in every backward or after drain(); so also where the model has no other parameters.
        What FSDP2 shards already, the model or parts of it, averages its own gradients; None averages the others.
        sharded: names of parameters, or patterns such as "head.*", of which each rank holds another part on purpose.
            Their gradients stay this rank's own. With None and "own" alone.

        All other parameters but DTensors must be the same on all ranks. Under None and "fsdp2" wrap() compares them
        whole. plan() compares some elements of each. Raises InputError for the first that differs, and for a part of
        the model whose layers are spread.

        No wrapper sees experts, also none that the trainer makes of this model afterwards, such as
        DistributedDataParallel or that of accelerate; drain() makes their gradients the mean over ranks. Without
        wrap(), drain() raises.
        """
        self.ranks.expect_call("wrap()")
        wrapped = self._dense.wrap(model, wrapper, sharded)
        self._know(model)
        return wrapped

    def _know(self, model: torch.nn.Module) -> None:
        """Has a model that holds the experts save and load all of them, and report what is loaded into it."""
        self._shards.add(model)
        self._own_experts.accept_loads_of(model)

    def plan(
        self,
        routes: Sequence[RoutesOfMicroStep],
        phase: str = "policy_update",
        *,
        unrouted: str = "drop",
        on_mismatch: str = "refuse",
        previous: foremoe.Plan | None = None,
    ) -> Phase:
        """Plans a phase, in the background: each rank plans some of the layers. Collective.

        routes: of each of this rank's micro-steps, a tensor or array of integers [rows, layers, top_k] or [batch,
        tokens, layers, top_k], as the model flattens its tokens; −1 in all entries of a row that has no route. Ranks
        may have different numbers of micro-steps.
        unrouted: what becomes of rows without a route. drop: the experts add nothing to them, so that only rows which
        nothing reads may have none: padding, and the last token of a sequence. home: each takes the experts that its
        router chooses, at their homes. Layers of micro-steps in which some rank has such rows exchange these apart from
        the others, and their counts first.
        on_mismatch: refuse: the routes are replayed; a layer that runs other experts ends the phase with an error. So
        do routes of other rows: those that agree with what routers would choose no better than in any other order of
        rows, or clearly better with neighbouring rows, another micro-step or another layer. replay: routes may be any.
        home: routers choose their own experts, and the routes are a guess that the plan is made for. A row (a token at
        one of its experts) whose expert was recorded takes the replica that was planned for it; any other one goes to
        its expert's home. Each forward of a layer has an all-to-all of counts more, for which the host waits.
        previous: plan of a former phase, from whose guests planning starts too, which takes about twice as long. No
        weights are kept: the optimizer changed them, and every guest is fetched anew. A plan of other layers, ranks or
        experts is refused when the phase is entered.

        Raises InputError, on all ranks, for arguments that are not those of another rank, for a previous plan that has
        no effect, and for invalid routes on any rank; where no rank has a micro-step; where ranks have different
        numbers of them although FSDP2, or a DistributedDataParallel of the trainer's or of wrap()'s, needs a batch of
        each; and, under drop, for rows without a route that something certainly reads: a row that has one in other
        layers, or one of several that lie between rows of its sequence that have one.
        """
        self.experts.expect_usable()
        if self.ranks.failures is not None and (reason := self.ranks.failures.reason()):
            raise RuntimeError(f"{reason}; begin anew after detach()")
        self.ranks.expect_call("plan()")
        self._own_experts.expect_not_overwritten()
        gathered = gather_routes(
            self.experts, routes, phase, unrouted, on_mismatch, previous, as_many=self._dense.needs_all_ranks,
            tell=(self._dense.tell, self._own_experts.tell),
        )  # fmt: skip
        load = self._load(gathered.counts)
        if previous is not None:
            expect_warm_start(self.arguments)
        running = self._shares.start_plan(load, **self.arguments.planning(), previous=previous)
        return Phase(
            self.experts, self._dense, self.arguments, load, running, gathered,
            phase=phase, memory=self._memory,
        )  # fmt: skip

    def expect_warm_starts(self) -> None:
        """Raises InputError if planning would ignore a previous plan."""
        expect_warm_start(self.arguments)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, of all parameters and all ranks: the same coefficient everywhere."""
        self.ranks.expect_call("clip_grad_norm_()")
        return clip(self.expert_parameters(), self._dense.named_parameters(), self.ranks, max_norm, self._dense.sharded)

    def whole_state_dict(
        self, model: torch.nn.Module, *, cpu_offload: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The state_dict() that the model would have if it were not spread. Collective.

        It has the experts of all ranks, whole tensors in place of DTensors, buffers and tied weights, under the names
        of the model inside DistributedDataParallel, or of a copy of it. Experts are gathered one parameter at a time.
        Entries share no memory with the model.

        Args:
            model: The model whose experts are spread, or what wrap() returned.
            cpu_offload: Moves each entry to the CPU when it is whole.
            rank0_only: Returns the entries on the first rank of all replicas; the other ranks get an empty dict.
        """
        self.ranks.expect_call("whole_state_dict()")
        return saving.whole_state_dict(self._shards, model, cpu_offload=cpu_offload, rank0_only=rank0_only)

    def whole_entries(self, model: torch.nn.Module) -> Iterator[tuple[list[str], Any]]:
        """The entries of whole_state_dict(model), one at a time: names, of which tied weights have several, and value.

        Collective: all ranks take all of them. Values that are no experts may share the model's memory.
        """
        self.ranks.expect_call("whole_entries()")
        return saving.whole_entries(self._shards, model)

    def load_whole_state_dict(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of what whole_state_dict() returned, on any number of ranks.

        Raises InputError that names the entry which is missing, unexpected or of another shape.
        """
        saving.load_whole_state_dict(self._shards, model, state)
        self._own_experts.loaded()

    def save_pretrained(self, model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
        """Writes what save_pretrained() of the unspread transformers model would write. Collective; rank 0 writes.

        When it returns on any rank, the files are complete. If rank 0 cannot write, all ranks raise.

        Args:
            model: The model whose experts are spread, or what wrap() returned.
            folder: Where from_pretrained() will find the model.
            options: Of the model's own save_pretrained(), such as max_shard_size.
        """
        self.ranks.expect_call("save_pretrained()")
        saving.save_pretrained(self._shards, model, folder, **options)

    def whole_optimizer_state(
        self, optimizer: torch.optim.Optimizer, *, cpu_offload: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The optimizer's state with the experts of all ranks, by the model's parameter names. Collective.

        {"state": {name: {key: value}}, "param_groups": [{"params": [names], option: value}]}, as
        torch.distributed.checkpoint.state_dict has it: set_optimizer_state_dict() loads it where nothing is spread.

        Args:
            optimizer: Of the spread model, of which it keeps scalars and tensors of the parameters' shapes.
            cpu_offload: Moves each tensor to the CPU when it is whole.
            rank0_only: Returns the state on the first rank of all replicas; the other ranks get an empty dict.

        Raises InputError, on all ranks, for other state, and for scalars that differ between ranks.
        """
        self.ranks.expect_call("whole_optimizer_state()")
        return optimizer_state.whole_optimizer_state(
            self._shards, self._trained_model(), optimizer, cpu_offload=cpu_offload, rank0_only=rank0_only
        )

    def load_whole_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of what whole_optimizer_state() returned, on any number of ranks.

        The parameter groups may be other ones, if those that are joined have the same options. Raises InputError.
        """
        optimizer_state.load_whole_optimizer_state(self._shards, self._trained_model(), optimizer, state)

    def _trained_model(self) -> torch.nn.Module:
        model = self._dense.model if self._dense.model is not None else getattr(self.layers[0], "model", None)
        if model is None:
            raise foremoe.InputError("model: unknown; call ep.wrap(model) first", field="model")
        return model  # type: ignore[no-any-return]

    def detach(self) -> None:
        """Gives every layer its own forward back, and all of its experts if it came with all. Collective. No phase can
        run afterwards: the groups that were made for copies are gone."""
        self.ranks.expect_call("detach()")
        self._shards.remove()
        self._own_experts.release()
        self._dense.unwrap()
        self._memory.release()
        self._shares.close(self.experts.failed)
        for channel in self._channels:
            if not self.experts.failed:  # else something may be on its way
                channel.close()
        if not self.experts.is_sharded:
            refuse_optimizers_of(self.expert_parameters())
        self.experts.gather()

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[None]:
        """Forwards without a plan and without gradients, of which ranks may run different numbers, as generate() does.

        Collective: all ranks enter. A rank that leaves goes on serving the rows of the others until all are done. Each
        layer has one more collective, an integer per rank. What one rank raises inside ends all ranks.

        Outside of it, forwards without a plan must be as many on all ranks: a rank that runs more waits for the others.

        Raises RuntimeError where a phase is running, and under FSDP2, which gathers weights in every forward.
        """
        if self.experts.phase is not None or self._is_evaluating:
            raise RuntimeError("evaluate() was entered inside a phase, or twice")
        if self._dense.is_sharded:
            raise RuntimeError(
                "evaluate(): FSDP2 gathers weights of all ranks in every forward; run as many forwards on all ranks "
                "without it, such as by generate(synced_gpus=True)"
            )
        self.ranks.expect_call("evaluate()")
        evaluation = Evaluation(self.ranks.group, self.ranks.device)
        self._is_evaluating = True
        before, self._at_homes = self._at_homes, functools.partial(self._execute_at_homes, evaluation.expect_layer)
        with torch.no_grad(), self.experts.executed_by(self._at_homes):
            try:
                yield
                evaluation.serve(self._serve)
            except BaseException:
                if not self.experts.failed:  # else all ranks know
                    evaluation.fail()
                raise
            finally:
                self._is_evaluating = False
                self._at_homes = before

    def _serve(self, index: int) -> None:
        """One layer on no rows of this rank's own, outside of a phase."""
        layer = self.layers[index]
        hidden = next(iter(local_weights(layer).values())).new_zeros(0, layer.hidden_size)
        gates = hidden.new_zeros(0, layer.top_k)
        self._execute_at_homes(lambda layer: None, index, hidden, gates.long(), gates)

    @contextlib.contextmanager
    def unplanned(self) -> Iterator[None]:
        """Layers run without a plan inside, every row at its home. Collective.

        Inside phase.micro_step() the routes of the micro-step are still replayed. Between micro-steps routers choose.
        Inside a phase drain() averages the gradients of what runs here, such as an auxiliary loss, with all others.
        """
        phase, self.experts.phase = self.experts.phase, None
        try:
            with (
                contextlib.nullcontext() if phase is None else phase.ending_all(),
                self.experts.executed_by(self._at_homes),
            ):
                yield
        finally:
            self.experts.phase = phase
