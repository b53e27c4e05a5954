"""The C++ library of ForeMoE. Use the package foremoe."""

from collections.abc import Callable, Sequence, Set
import os
from typing import Annotated, Any, overload

import numpy
import numpy.typing
from numpy.typing import NDArray

class Trace:
    """
    What a rollout recorded: the experts of every token in every layer, sequence after sequence.
    """

    @staticmethod
    def from_arrays(
        routed_experts: Annotated[NDArray[Any], dict(writable=False)],
        cu_seqlens: Annotated[NDArray[Any], dict(writable=False)],
        *,
        num_experts: int,
        prompt_lengths: Annotated[NDArray[Any], dict(writable=False)] | None = None,
        group_ids: Annotated[NDArray[Any], dict(writable=False)] | None = None,
        layer_ids: Annotated[NDArray[Any], dict(writable=False)] | None = None,
        micro_step: Annotated[NDArray[Any], dict(writable=False)] | None = None,
        rank: Annotated[NDArray[Any], dict(writable=False)] | None = None,
        ranks: int | None = None,
        ranks_per_node: int | None = None,
        model: str = "",
    ) -> Trace:
        """
        A trace of arrays in memory, which are not copied: do not change them while it lives.

        routed_experts: uint8, uint16, int16 or int32 [tokens, layers, top_k], expert ids; all top_k entries of a row without a
            route are −1, or the largest value of an unsigned type.
        cu_seqlens: int64 [sequences + 1], first token of each sequence, then the number of tokens.
        prompt_lengths, group_ids: int32 [sequences], tokens of the prompt and GRPO group.
        layer_ids: int32 [layers], the model's own numbers; None for 0, 1, ….
        micro_step, rank: int32 [sequences], the trainer's batching, both or none.
        ranks, ranks_per_node: of that batching; None for the largest rank + 1, and 8 or all if fewer.

        Raises InputError for another dtype, layout or shape, and for values out of range. Routes are checked by collect().
        """

    @property
    def routed_experts(self) -> NDArray[numpy.integer[Any]]:
        """[tokens, layers, top_k], as recorded; a view."""

    @property
    def cu_seqlens(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """int64 [sequences + 1], tokens; a view."""

    @property
    def prompt_lengths(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)] | None:
        """int32 [sequences], tokens; None when not recorded."""

    @property
    def group_ids(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)] | None:
        """int32 [sequences]; None when not recorded."""

    @property
    def micro_step(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)] | None:
        """int32 [sequences]; None when no batching was recorded."""

    @property
    def rank(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)] | None:
        """int32 [sequences]; None when no batching was recorded."""

    @property
    def layer_ids(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)]:
        """int32 [layers], the model's own numbers of the layers; a view."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def origin(self) -> str: ...
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a foremoe.trace/1 file, whole or not at all."""

    def __repr__(self) -> str: ...

class Load:
    """
    Tokens that each source rank sends to each expert, per micro-step and layer.
    """

    @staticmethod
    def from_array(
        array: Annotated[NDArray[Any], dict(writable=False)],
        *,
        top_k: int = 1,
        ranks_per_node: int = 8,
        name: str = "load",
    ) -> Load:
        """
        A load of counts: int64 [micro_steps, layers, ranks, experts], tokens, copied once.

        A token counts once for each of its top_k experts. Raises InputError for another dtype, layout or shape, for negative
        counts, and where the ranks do not divide the experts.
        """

    @property
    def array(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """int64 [micro_steps, layers, ranks, experts], tokens; a view."""

    @property
    def num_micro_steps(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the counts, which plans record."""

    @property
    def batching(
        self,
    ) -> (
        tuple[
            Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]
        ]
        | None
    ):
        """
        (micro_step, rank), int32 [sequences] each, of a load that was collected from a trace; else None.
        """

    @property
    def remarks(self) -> list[str]:
        """What was done in collecting it that nobody asked for, in sentences."""

    def fold(self, ranks: int) -> Load:
        """
        The same load on fewer ranks, a divisor: consecutive sources are added.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a foremoe.load/1 file, whole or not at all."""

    def __str__(self) -> str: ...
    def __repr__(self) -> str: ...

def _read_trace(arg: str | os.PathLike[str], /) -> Trace: ...
def _read_load(arg: str | os.PathLike[str], /) -> Load: ...

class Collector:
    """
    Counts sequences as they finish, from any thread; routes may be forgotten after add().

    Held per sequence: one counter for each (layer, expert), in the narrowest type that fits.
    """

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int) -> None: ...
    def add(self, sequence: int, routes: Annotated[NDArray[Any], dict(writable=False)]) -> None:
        """
        One finished sequence, number 0, 1, …: routes [tokens, layers, top_k] as Trace.from_arrays takes them.

        Raises InputError for a number that was used, and for a row that is no route; then nothing is kept.
        """

    @property
    def num_sequences(self) -> int: ...
    def lengths(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        int64 [sequences], tokens. Raises InputError where a number is missing.
        """

    def load(
        self,
        micro_step: Annotated[NDArray[Any], dict(writable=False)],
        rank: Annotated[NDArray[Any], dict(writable=False)],
        *,
        ranks: int,
        ranks_per_node: int = 8,
    ) -> Load:
        """
        The load when sequence s runs in micro_step[s] on rank[s]; int32 [sequences] each.
        """

def _count_routes(
    routes: numpy.typing.NDArray[Any], num_experts: int, *, distinct: bool = False
) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int64]]:
    """
    Checks and counts the routes of one rank's rows.

    routes: integers [tokens, layers, top_k]; −1 in all entries of a row without a route. distinct: every row has a route,
    and may name an expert twice, which is one row of it. Returns the routes as int32, which are the same array where
    they were, and int64 [layers, experts]. Raises InputError with index [token, layer, entry].
    """

def batch(
    lengths: Annotated[NDArray[Any], dict(writable=False)],
    *,
    ranks: int,
    ranks_per_node: int = 8,
    tokens_per_rank: int = 8192,
) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
    """
    Spreads sequences over micro-steps and ranks, balanced by tokens (Karmarkar and Karp).

    lengths: int64 [sequences], tokens. Returns (micro_step, rank), int32 [sequences] each. No rank gets more than
    tokens_per_rank tokens in a micro-step. Raises InputError for a sequence that is longer.
    """

def _collect(trace: Trace, options: dict[str, Any], threads: int) -> Load: ...
def _import_files(paths: Sequence[str], options: dict[str, Any]) -> tuple[Trace | Load, dict[str, Any]]: ...
def _import_payloads(payloads: Sequence[tuple[str, bytes]], options: dict[str, Any]) -> Trace: ...
def _parse_response(body: bytes) -> Any: ...
def _read_input(path: str, options: dict[str, Any], threads: int) -> Load: ...
def _unused_of_synthesis(options: dict[str, Any], given: Set[str]) -> list[str]: ...
def _synthesize_load(arg: dict[str, Any], /) -> Load: ...
def _synthesize_trace(arg: dict[str, Any], /) -> Trace: ...

class PlanTimes:
    """How long planning took, seconds."""

    @property
    def wall_seconds(self) -> float: ...
    @property
    def base_cpu_seconds(self) -> float:
        """What is done once per step (ours: stage B), summed over threads."""

    @property
    def planning_cpu_seconds(self) -> float:
        """Everything else, summed over threads."""

    def __repr__(self) -> str: ...

class Plan:
    """
    What every slot holds and how many tokens it serves, at every event of every layer.
    """

    @property
    def slot_expert(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)]:
        """
        int32 [events, layers, ranks, slots], the expert in that slot, −1 when empty; a view.
        """

    @property
    def slot_tokens(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """
        int64 [events, layers, ranks, slots], tokens that the slot serves; a view.
        """

    def _slots_of_event(self, event: int) -> tuple[Any, ...]: ...
    @property
    def home(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)]:
        """int32 [layers, experts], the rank that owns the expert; a view."""

    @property
    def event_micro_step(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)]:
        """int32 [events]."""

    @property
    def event_pass(self) -> Annotated[NDArray[numpy.uint8], dict(writable=False)]:
        """uint8 [events], 0 forward, 1 backward."""

    @property
    def max_load(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """int64 [micro_steps, layers], tokens of the busiest rank; a view."""

    @property
    def policy(self) -> str: ...
    @property
    def residency(self) -> str: ...
    @property
    def guest_slots(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def num_events(self) -> int: ...
    @property
    def num_micro_steps(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def options(self) -> dict[str, Any]:
        """The planner's options as recorded, by long option name."""

    @property
    def load_digest(self) -> str:
        """Hexadecimal SHA-256 of the load that it is for."""

    @property
    def layers(self) -> range:
        """range of the load's layers that it has: all, save of a part."""

    @property
    def times(self) -> PlanTimes: ...
    @staticmethod
    def join(parts: Sequence[Plan]) -> Plan:
        """
        The plan of all layers from plans of slices of them, in any order; equal to the whole, byte for byte.

        Raises InputError where parts are of different plans, or a layer is in none or in two.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a foremoe.plan/1 file, whole or not at all."""

    def __getstate__(self) -> tuple[str, str, bytes, tuple[int, int, int], tuple[float, float, float]]: ...
    def __setstate__(self, state: object | None) -> None: ...
    def __repr__(self) -> str: ...

def _read_plan(arg: str | os.PathLike[str], /) -> Plan: ...
def _check(plan: Plan, load: Load, trace: Trace | None, align: int, homes: object | None) -> Any: ...
def _split_anew(plan: Plan, load: Load) -> Plan: ...
def _figures(plan: Plan, load: Load, trace: Trace | None, align: int, homes: object | None) -> Any: ...
def _plan(
    load: Load,
    policy: str,
    options: dict[str, Any],
    homes: object | None = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    layers: object | None = None,
    threads: int = 0,
    on_micro_step: Callable[[int], object] | None = None,
    policy_options: dict[str, Any] = {},
) -> Plan: ...

class RunningPlan:
    """
    A plan that is made in the background; foremoe.start_plan() begins it.

    Micro-steps are planned in order. begin() returns the plan when its placement is final: homes do not change any more, nor
    do slots, but under residency shared. The quotas of a micro-step are final when wait_for() has returned, and under
    residency shared its slots; do not read quotas of later ones.
    """

    def begin(self) -> Plan:
        """
        Waits until slots and homes are final, and returns the plan. Raises what planning raised, or PolicySkipped.
        """

    def wait_for(self, micro_step: int) -> None:
        """Waits until this micro-step, and all before it, are planned."""

    def finish(self) -> Plan:
        """Waits until all of it is final, and returns the plan."""

class _GrowingPlan:
    def __init__(self, load: Load) -> None: ...
    def append(self, block: Plan) -> None: ...
    def fail(self, why: str) -> None: ...
    def begin(self) -> Plan: ...
    def wait_for(self, micro_step: int) -> None: ...

def _start_plan(
    load: Load,
    policy: str,
    options: dict[str, Any],
    policy_options: dict[str, Any] = {},
    homes: object | None = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> RunningPlan: ...

class Evaluation:
    """
    What one policy's plan is worth on a load; foremoe.evaluate() makes it.
    """

    @property
    def policy(self) -> str: ...
    @property
    def skipped(self) -> str | None:
        """Why there is no plan; None, and all below holds."""

    @property
    def figures(self) -> dict[str, Any]:
        """
        The keys of `foremoe compare --json` and, with a cluster, of `foremoe simulate --json`, without speedups over other policies.
        """

    @property
    def plan(self) -> Plan:
        """Of the policy update."""

    @property
    def recompute_plan(self) -> Plan:
        """Of recompute; the same unless more than one micro-step is in flight."""

    @property
    def cost(self) -> dict[str, Any] | None:
        """
        Of the modelled cluster and model, None without: names, moe_layers, memory_bytes of a rank, fetch_seconds of one copy from the host, gather_seconds of all ranks' loads of a layer (0 where the system itself gathers them), expert_gradient_bytes, expert_state_bytes (weights and optimizer shard of one), bytes_per_second and latency_seconds of a rank's links to peers and network, and the options of cost.
        """

    def timeline(self, micro_steps: int, layers: int) -> list[dict[str, Any]]:
        """
        Spans of the modelled recompute of the first micro-steps and layers, as events of a Chrome trace: pid is the rank, ts and dur are in µs.
        """

def _evaluate(
    load: Load,
    policy: str,
    options: dict[str, Any],
    policy_options: dict[str, Any] = {},
    homes: object | None = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> Evaluation: ...
def _compare(
    load: Load,
    policies: Sequence[str],
    options: dict[str, Any],
    policy_options: dict[str, Any] = {},
    homes: object | None = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> Any: ...
def _simulate(
    load: Load,
    policies: Sequence[str],
    options: dict[str, Any],
    policy_options: dict[str, Any] = {},
    homes: object | None = None,
    previous: Plan | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> Any: ...
def _pair_figures(plan: Plan, load: Load, routed: bool) -> dict[str, Any]: ...
def _load_stability(load: Load, steps: int) -> dict[str, Any]: ...
def _memory_remarks(evaluation: Evaluation, bytes_of: Sequence[tuple[str, int]]) -> list[str]: ...
def _evaluate_plan(
    plan: Plan,
    load: Load,
    options: dict[str, Any],
    policy_options: dict[str, Any] = {},
    recompute_plan: Plan | None = None,
    phase: str | None = None,
    homes: object | None = None,
    previous_load: Load | None = None,
    threads: int = 0,
) -> Evaluation: ...
def _evaluate_quotas(
    plan: Plan,
    slot_tokens: Annotated[NDArray[Any], dict(writable=False)],
    load: Load,
    options: dict[str, Any],
    policy_options: dict[str, Any] = {},
    previous_load: Load | None = None,
    threads: int = 0,
) -> Evaluation: ...
def _option_tables() -> dict[str, Any]: ...
def _unused_options(
    load: Load,
    policies: Sequence[str],
    options: dict[str, Any],
    given: Set[str],
    previous: Plan | None = None,
    previous_load: Load | None = None,
) -> list[str]: ...
def _policies_named(arg: Sequence[str], /) -> list[str]: ...
def _ranks_per_node(arg: str, /) -> int: ...
def _own_options(policy: str, own: dict[str, Any] = {}) -> list[str]: ...
def policies() -> dict[str, str]:
    """Every policy by name, with what it does in one line."""

def clusters() -> list[str]:
    """Names of the clusters that simulate() knows."""

def models() -> list[str]:
    """Names of the models that simulate() knows."""

def _launched_processes() -> tuple[int, str]: ...
def _check_evaluation(options: dict[str, Any]) -> dict[str, Any] | None: ...

class Copy:
    """
    One expert's weights on their way into one guest buffer of one rank.

    At the beginning of turn `opens` the buffer is free; turn `arrives` is the first that reads it, `closes` the last.
    """

    @property
    def rank(self) -> int:
        """The rank that receives it."""

    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def slot(self) -> int:
        """Of the plan."""

    @property
    def buffer(self) -> int:
        """
        Of the rank: layer·G + guest slot; under shared one of depth·G that layers borrow in turn.
        """

    @property
    def opens(self) -> int: ...
    @property
    def arrives(self) -> int: ...
    @property
    def closes(self) -> int: ...
    @property
    def path(self) -> str:
        """host: from the node's arena. peer: from rank `source`."""

    @property
    def source(self) -> int:
        """
        The rank that is read; on the host path the expert's home, which fills the arena.
        """

    def __repr__(self) -> str: ...

class GradientReturn:
    """The gradient of a guest on its way home."""

    @property
    def expert(self) -> int: ...
    @property
    def home(self) -> int:
        """The rank that owns the expert."""

    @property
    def guest(self) -> int:
        """The rank that hosts the guest."""

    @property
    def slot(self) -> int:
        """The slot there."""

    def __repr__(self) -> str: ...

class RankTurn:
    """
    What a rank does in one pass of one layer in one micro-step.

    Sent rows lie by destination rank, then expert, then row order; received rows by source, then expert; computed rows by
    slot, then source.
    """

    @property
    def index(self) -> int:
        """In execution order."""

    @property
    def layer_pass(self) -> str: ...
    @property
    def micro_step(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def event(self) -> int:
        """Of the plan."""

    @property
    def send(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """int64 [ranks], rows to each rank."""

    @property
    def recv(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """int64 [ranks], rows from each rank."""

    @property
    def to_slots(self) -> Annotated[NDArray[numpy.int32], dict(writable=False)]:
        """int32 [rows received]: computed row i is received row to_slots[i]."""

    @property
    def slot_offsets(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """int64 [slots + 1], first computed row of each slot."""

    @property
    def received(self) -> Annotated[NDArray[numpy.int64], dict(writable=False)]:
        """int64 [slots, ranks], rows that each slot computes for each rank."""

    @property
    def blocks(self) -> list[tuple[int, int, int, int]]:
        """
        (expert, rank, slot, rows), by expert: how many of this rank's rows of the expert go to that slot of that rank.

        For executors that know only counts. They may give a replica any rows of its expert, so long as they give it as many;
        those that have routes read slots().
        """

    @property
    def rows_sent(self) -> int: ...
    @property
    def copies(self) -> list[Copy]:
        """
        Copies that this turn waits for. Under residency shared with path peer, until they are planned.
        """

    def slots(
        self, routes: Annotated[NDArray[Any], dict(writable=False)]
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]:
        """
        int32 [tokens, top_k]: the replica that serves each row, as rank * plan.num_slots + slot; -1 where there is no route.

        routes: int32 [tokens, top_k], this rank's; a negative entry is no route. Raises InputError when they are not the routes
        that the load counts.
        """

    def row_order(
        self, routes: Annotated[NDArray[Any], dict(writable=False)]
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        int32 [rows sent]: entry order[i] of the flattened routes is sent as row i, so its token is order[i] // top_k.

        Follows from slots(routes), with the same argument and errors.
        """

    def __repr__(self) -> str: ...

class RankTurns:
    """
    What one rank needs to execute a plan, without a word between ranks.

    Turns are the (pass, micro-step, layer) of a phase in execution order: index them by number, or by those three.
    """

    def __init__(
        self,
        plan: Plan,
        load: Load,
        *,
        rank: int,
        phase: str = "policy_update",
        expert_bytes: int = 1,
        path: str = "auto",
        depth: int = 2,
    ) -> None:
        """
        rank: whose turns. phase: recompute (forwards alone) or policy_update. expert_bytes: weights of one expert, which
        decide between paths. path: where copies come from, host (the node's arena in shared memory), peer (the rank that owns
        the expert) or auto. depth: turns ahead of which a copy starts.

        Raises InputError for a plan of another load, a phase that the plan is not for, and arguments out of range.
        """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, arg: int, /) -> RankTurn: ...
    @overload
    def __getitem__(self, arg: tuple[str, int, int], /) -> RankTurn: ...
    def at_homes(self, layer_pass: str, micro_step: int, layer: int) -> RankTurn:
        """The turn without its guests: every expert is served at its home."""

    def starting(self, turn: int) -> list[Copy]:
        """
        Copies that this rank starts, or serves to a peer, when the turn begins.

        Two ranks start the copies between them at the same turn and in the same order. Under residency shared with path peer it
        waits until they are planned, some of them for the next micro-step.
        """

    def returning(self, turn: int) -> list[GradientReturn]:
        """
        Gradients that this rank sends or receives when the turn is over, by (expert, guest).
        """

    def draining(self, layer: int) -> list[GradientReturn]:
        """Gradients that are still away after the last turn."""

    @property
    def rank(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def num_buffers(self) -> int:
        """Guest buffers of this rank."""

    def arena(self, node: int) -> list[tuple[int, int]]:
        """
        (layer, expert) that the node keeps in shared memory for this phase, ascending.
        """

class HostArena:
    """
    Places for experts in memory that the processes of one node share.

    An expert consists of segments of bytes: its weights, one after the other. It is written under a version, with a
    checksum of each segment. Used by foremoe.torch.
    """

    @staticmethod
    def create(places: int, segment_bytes: Sequence[int]) -> HostArena:
        """
        Memory of a new name, with so many places. segment_bytes: of each segment of an expert, even.

        Raises InputError where there is too little memory.
        """

    @staticmethod
    def open(name: str, places: int, segment_bytes: Sequence[int]) -> HostArena:
        """
        What another process has created. Raises InputError where there is no such memory, or it has other places.
        """

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    def remove_name(self) -> None:
        """
        Nobody can open it any more; it lives until the last process that has it lets go. By its creator.
        """

    def publish(
        self,
        place: int,
        version: int,
        segments: Sequence[
            Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
        ],
    ) -> None:
        """
        Writes an expert, uint8 arrays of its segments, then its version, above 0. One writer per place.
        """

    def version(self, place: int) -> int:
        """
        Under which the expert at this place was published; 0: there is none yet.
        """

    def is_intact(self, place: int, version: int) -> bool:
        """
        Is an expert there in this version, with the bytes that were published?
        """

    def copy(
        self,
        place: int,
        version: int,
        segments: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]],
    ) -> bool:
        """
        Copies an expert into uint8 arrays, one per segment; False: not that version, or not the bytes published.

        Then what the arrays hold is undefined.
        """

    def segments(self, place: int) -> list[NDArray[numpy.uint8]]:
        """Views of an expert's segments, uint8 [bytes] each, writable."""

    def __repr__(self) -> str: ...

__version__: str
