"""Experts spread over the ranks of a group.

ExpertParallel assigns each rank its own experts, wraps the other parameters, and plans phases. A phase executes the
layers while it runs. Without a phase every row goes to its expert's home, and ranks exchange counts first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe._engine.arguments import expect_warm_start
from foremoe._engine.compiled import expect_not_compiling
from foremoe._engine.layers import ExpertLayer
from foremoe._engine.node_memory import NodeMemory
from foremoe._engine.session import EVALUATION, PHASE
from foremoe._engine.sharded import local_weights
from foremoe.options import AnyHomes

from .arguments import ExecutorArguments
from .checkpoints import Checkpoints
from .dense import Dense
from .evaluation import Evaluation
from .gradients import clip
from .opening import load_of, open_session
from .own_experts import ExpertGuards, refuse_optimizers_of
from .phase import GIVEN_UP, Phase
from .relays import Relays
from .routes import RoutesOfMicroStep, gather_routes
from .shards import ExpertShards
from .spread import SpreadExperts

_OF_CHECKPOINTS = (
    "whole_state_dict", "whole_entries", "load_whole_state_dict", "save_pretrained", "whole_optimizer_state",
    "load_whole_optimizer_state",
)  # fmt: skip


class ExpertParallel:
    """Spreads the experts of a model over the ranks of a group, plans phases, and executes them.

    The constructor is collective over all ranks of the default process group. If several groups create an
    ExpertParallel each, all do so at the same time, and ranks in no group call foremoe.torch.stand_by(). All other
    methods involve the group only.

    Create it before the optimizer: it replaces the experts' parameters by those at home on this rank, E/R of each
    layer, in ascending order. Experts that are DTensors are already on their ranks and are not changed.

    Args:
        layers: MoE layers in the order in which the model runs them, equal on all ranks.
        group: Expert-parallel group. None: all processes.
        guest_slots: See foremoe.plan(), also for policy and options.
        residency: static, resident, shared or auto; see foremoe.plan(). None: resident; with a known cluster, a phase
            that is modelled to be faster without a plan then runs without one. auto: needs a known cluster, and chooses
            among no plan, static and resident, each with prefer balance, links and time, at the first plan.
        depth: Number of turns (passes of a layer) that copies start ahead.
        path: Source of copies. peer: the rank that owns the expert. host: an arena in shared memory per node, filled
            when a phase begins. auto: the less loaded of both, for each copy.
        dispatch: How planned rows travel. row: each directly to its replica. token: a token once to each other node
            that serves it, and from there once to each rank of the node that serves it; each rank chooses which of its
            tokens go to which replica, so that few nodes serve each token. Layers that run without their guests, rows
            without a route, and all rows under on_mismatch="home" are dispatched by row, and so is everything on a
            single node.
        host_timeout: Seconds that a phase waits for experts in its node's arena. After that, layers run at homes.
        ranks_per_node: Ranks that share a fast interconnect and, for the host path, memory. None: 8, or all if fewer.
        threads: Threads for planning.
        homes: The rank that owns each expert; see foremoe.plan() and foremoe.choose_homes(). None: rank r owns experts
            r · E/R to (r + 1) · E/R − 1. With other homes, state_dict() and load_state_dict() of the model and the
            optimizer are collective, and state_dict() has copies of the experts: entries list experts in ascending
            order for any homes, so checkpoints can be loaded with other ones.
        copy_group: Second group of the same ranks, for copies. None: creates one.
        replicate_group: Ranks that own the same experts as this rank, one per expert-parallel group that trains the
            model. Gradients are also averaged over them. None: no other rank owns these experts. Required unless
            `group` has all processes.
        cluster: Cluster for which seconds of a step are modelled, to choose plans; see foremoe.evaluate(). None:
            detected by the name of the CUDA device. If none is found, it is not known.
        model: Model of these seconds. None: derived from the transformers configuration of the layers' model, else from
            the layers, with attention heads of width 128.
        options: prefer, copy_price, free_copies, tolerance, stages, max_copies_per_rank, max_copies_per_source,
            min_tokens_per_guest, seed.

    Attributes:
        checkpoints: Saves and loads whole states.

    Raises:
        InputError: on all ranks, with the argument's name, if one rank refuses an argument, if ranks of a group differ
            in arguments (except threads) or layers, or if any rank runs other versions of foremoe or torch.
        PolicySkipped: if the policy is not defined for this group.
    """

    def __init__(
        self,
        layers: Iterable[ExpertLayer],
        group: Any = None,
        *,
        guest_slots: int = 1,
        residency: str | None = None,
        policy: str = "foremoe",
        depth: int = 2,
        path: str = "peer",
        dispatch: str = "row",
        host_timeout: float = 30.0,
        ranks_per_node: int | None = None,
        threads: int = 1,
        homes: AnyHomes = None,
        copy_group: Any = None,
        replicate_group: Any = ...,
        cluster: str | None = None,
        model: str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        given = ExecutorArguments(
            guest_slots=guest_slots, residency=residency, policy=policy, depth=depth, path=path, dispatch=dispatch,
            host_timeout=host_timeout, ranks_per_node=ranks_per_node, threads=threads, homes=homes, group=self.group,
            copy_group=copy_group, replicate_group=replicate_group, cluster=cluster, model=model, options=options,
        )  # fmt: skip
        opened = open_session(layers, given)
        self.layers, self.arguments, self.ranks = opened.layers, opened.arguments, opened.ranks
        self._session = opened.session
        self.rank, self.num_ranks = self.ranks.rank, self.ranks.num_ranks
        self._memory = NodeMemory(self.ranks)
        self._relays = Relays(self.ranks) if self.ranks.relays is not None else None
        replaced = [weight for layer in self.layers for weight in layer.weights().values()]
        self.experts = SpreadExperts(self.layers, self.ranks, self._session)
        self._own_experts = ExpertGuards(self.experts.parameters(), self.ranks)
        if not self.experts.is_sharded:
            refuse_optimizers_of(replaced)
        del replaced
        self.experts.expect_callable = self._expect_callable
        # Called with the index of a layer before it runs at homes.
        self._announce: Callable[[int], None] = self._announce_forward
        self.experts.execute_by(self._execute_at_homes)
        self._dense = Dense(self.experts)
        self._own_experts.note_step = self._dense.trained_with
        own = [list(layer.weights().values()) for layer in self.layers]
        self._shards = ExpertShards(own, self.ranks, self._session)
        self.checkpoints = Checkpoints(self._session, self._shards, self._trained_model, self._own_experts.loaded)
        if (model := getattr(self.layers[0], "model", None)) is not None:
            self._register_hooks(model)

    def __getattr__(self, name: str) -> Any:
        """Returns methods of `checkpoints`: their names on this class still work."""
        if name in _OF_CHECKPOINTS:
            return getattr(self.checkpoints, name)
        raise AttributeError(f"ExpertParallel has no attribute {name!r}")

    def _expect_callable(self) -> None:
        expect_not_compiling()
        self._own_experts.expect_no_ddp()

    def _announce_forward(self, index: int) -> None:
        """Announces a forward without a plan. All ranks must run it."""
        if index == 0 and torch._C._current_graph_task_id() < 0:  # not a recomputation
            self._session.expect_call("a forward without a plan")

    def _execute_at_homes(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Runs a layer of the trainer's forward without a plan."""
        self._expect_callable()
        self._session.expect_usable()
        self._announce(index)
        return self._run_at_homes(index, hidden, ids, gates)

    def _run_at_homes(self, index: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Runs a layer without a plan. An error on one rank ends the layer on all ranks, since they exchange rows."""
        try:
            return self.experts.at_homes(index, hidden, ids, gates)[0]
        except BaseException as error:
            if type(error).__name__ != "_StopRecomputationError":  # a checkpoint has recomputed all that it needs
                self._session.fail(error, "begin anew after detach()")
            raise

    def _trained_model(self) -> torch.nn.Module | None:
        return self._dense.model if self._dense.model is not None else getattr(self.layers[0], "model", None)

    def expert_parameters(self) -> list[torch.nn.Parameter]:
        """Returns this rank's experts of all layers."""
        return self.experts.parameters()

    def dense_parameters(self) -> list[torch.nn.Parameter]:
        """Returns the trained parameters of the wrapped model except experts; under "fsdp2" this rank's shards.

        Call it outside of forward and backward.
        """
        return list(self._dense.named_parameters().values())

    def wrap(
        self, model: torch.nn.Module, wrapper: str | None = None, *, sharded: Iterable[str] = ()
    ) -> torch.nn.Module:
        """Averages gradients of all parameters except experts over all ranks. Returns the model to train.

        Without wrap(), drain() raises. No wrapper sees the experts, not even a wrapper that the trainer creates
        afterwards, such as DistributedDataParallel or accelerate's; drain() averages experts' gradients over ranks. If
        FSDP2 already shards parameters, it averages their gradients, and wrapper None averages the others.

        All other parameters except DTensors must be equal on all ranks. Under None and "fsdp2" wrap() compares them
        completely; plan() compares some elements of each.

        Args:
            model: The model whose experts are spread.
            wrapper: Where gradients are averaged. None: in every drain(). "ddp": in every backward, by
                DistributedDataParallel, which is returned. "fsdp2": in every backward, by fully_shard(), which turns
                these parameters into DTensors sharded over the group; call it before the optimizer is created. "own":
                by the trainer, in every backward or after drain(); also for models without other parameters. With
                "ddp" and "fsdp2", and if the trainer wraps the model in DistributedDataParallel itself, all ranks must
                have the same number of micro-steps.
            sharded: Names of parameters, or patterns such as "head.*", that intentionally differ between ranks. Their
                gradients stay separate. With None and "own" only.

        Raises:
            InputError: for the first parameter that differs between ranks, and for a part of the model whose layers are
                spread.
        """
        self._session.expect_call("wrap()")
        wrapped = self._dense.wrap(model, wrapper, sharded)
        self._register_hooks(model)
        return wrapped

    def _register_hooks(self, model: torch.nn.Module) -> None:
        """Registers hooks on a model that contains the experts.

        state_dict() returns them as DTensors, load_state_dict() takes this rank's part, save_pretrained() requires all
        experts, and loaded weights are accepted.
        """
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
        """Plans a phase in the background: each rank plans some of the layers. Collective.

        Args:
            routes: Per micro-step of this rank, integers [rows, layers, top_k] or [batch, tokens, layers, top_k], in
                the order in which the model flattens its tokens; −1 in all entries of a row without a route. Ranks may
                have different numbers of micro-steps.
            phase: "recompute" or "policy_update".
            unrouted: Treatment of rows without a route. drop: experts add nothing to them, so only unread rows may lack
                a route, such as padding and a sequence's last token. home: the router chooses their experts, which
                serve them at home. In micro-steps where a rank has such rows, layers exchange these rows separately,
                after their counts.
            on_mismatch: refuse: replays the routes. The phase ends with an error if a layer runs other experts, or if
                the routes belong to other rows. They do if they agree with the routers' choices no better than in any
                other order of rows, or clearly better with neighbouring rows, another micro-step or another layer.
                replay: accepts any routes. home: routers choose, and the routes are a guess for planning. A row (a
                token at one of its experts) whose expert was recorded goes to its planned replica, any other row to its
                expert's home. Each forward of a layer has one more all-to-all, of counts, for which the host waits.
            previous: Plan of an earlier phase. Planning runs a second time, from this plan's guests, and takes about
                twice as long. No weights are reused: the optimizer changed them, and every guest is copied again. A
                plan of other homes is refused, and when the phase is entered a plan of other layers, ranks or experts.

        Raises:
            InputError: on all ranks, for arguments that differ between ranks; for a previous plan without effect; for
                invalid routes on any rank; if no rank has a micro-step; if ranks have different numbers of micro-steps
                although FSDP2 or DistributedDataParallel needs a batch of each; and, under drop, for rows without a
                route that are certainly read: rows with a route in other layers, and two or more adjacent rows
                between routed rows of their sequence.
        """
        self._session.expect_no_failure()
        self._session.expect_call("plan()")
        self._own_experts.expect_not_overwritten()
        gathered = gather_routes(
            self.experts, routes, phase, unrouted, on_mismatch, previous, as_many=self._dense.needs_all_ranks,
            add_facts=(self._dense.add_facts, self._own_experts.add_facts),
        )  # fmt: skip
        load = load_of(gathered.counts, self.layers[0].top_k, self.ranks)
        if previous is not None:
            expect_warm_start(self.arguments)
        running = self._session.shares.start_plan(load, phase=phase, **self.arguments.planning(), previous=previous)
        tokens = None
        if self._relays is not None and on_mismatch != "home":
            tokens = self._relays.start(running, load, gathered, later=bool(self._session.runs))
        return Phase(
            self.experts, self._dense, self.arguments, load, running, gathered,
            phase=phase, memory=self._memory, tokens=tokens,
        )  # fmt: skip

    def expect_warm_starts(self) -> None:
        """Raises InputError if planning would ignore a previous plan."""
        expect_warm_start(self.arguments)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips like `torch.nn.utils.clip_grad_norm_`, by the norm over all parameters and ranks."""
        self._session.expect_call("clip_grad_norm_()")
        return clip(self.expert_parameters(), self._dense.named_parameters(), self.ranks, max_norm, self._dense.sharded)

    def detach(self) -> None:
        """Restores every layer's own forward, and all of its experts unless they came as DTensors. Collective.

        No phase can run afterwards: the groups for copies are destroyed. Raises RuntimeError on NCCL after a
        failed phase: ranks may have aborted their groups, so that experts cannot be gathered.
        """
        self._session.expect_ended()
        if self._session.is_closed:
            return
        self._session.expect_call("detach()")
        self._shards.remove()
        self._own_experts.release()
        self._dense.unwrap()
        self._memory.release()
        if self._relays is not None:
            self._relays.close(self._session.has_failed)
        if not self.experts.is_sharded:
            refuse_optimizers_of(self.expert_parameters())
        if self._session.close():
            raise RuntimeError("after a failure on NCCL, experts of other ranks cannot be gathered: end the process")
        self.experts.gather()

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[None]:
        """Inside, ranks may run different numbers of forwards without a plan and without gradients, as generate() does.

        Collective: all ranks enter. A rank that exits early serves the rows of the others until all are done. Each
        layer has one more collective, of an integer per rank. An error on one rank ends all; on NCCL, torch's watchdog
        ends ranks whose device waits for it. Outside of evaluate(), all ranks must run the same number of forwards
        without a plan.

        Raises RuntimeError during a phase, and under FSDP2, which gathers weights in every forward.
        """
        with self._session.busy(EVALUATION), torch.no_grad(), self.experts.executed_by(self._execute_at_homes):
            if self._dense.is_sharded:
                raise RuntimeError(
                    "evaluate(): FSDP2 gathers weights of all ranks in every forward; run as many forwards on all "
                    "ranks without it, such as by generate(synced_gpus=True)"
                )
            self._session.expect_call("evaluate()")
            evaluation = Evaluation(self.ranks.group, self.ranks.device)
            self._announce = evaluation.expect_layer
            try:
                yield
                evaluation.serve(self._serve)
            except BaseException:
                if not self._session.has_failed:  # else all ranks know
                    evaluation.fail()
                raise
            finally:
                self._announce = self._announce_forward

    def _serve(self, index: int) -> None:
        """Runs a layer without rows of this rank, outside of a phase."""
        layer = self.layers[index]
        hidden = next(iter(local_weights(layer).values())).new_zeros(0, layer.hidden_size)
        gates = hidden.new_zeros(0, layer.top_k)
        self._run_at_homes(index, hidden, gates.long(), gates)

    @contextlib.contextmanager
    def unplanned(self) -> Iterator[None]:
        """Inside, layers run without a plan, every row at its expert's home. Collective.

        Inside phase.micro_step() the routes of the micro-step are still replayed; between micro-steps routers choose.
        Gradients of this code, such as those of an auxiliary loss in a phase, are averaged by drain() with all others.
        """
        inside = self._session.ending_all(GIVEN_UP) if self._session.runs == PHASE else contextlib.nullcontext()
        with inside, self.experts.executed_by(self._execute_at_homes):
            yield
