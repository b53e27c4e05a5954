"""The data of a page. to_html() needs nothing else.

All values are per training step of the whole model: seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


def speedup(before: float, after: float) -> float:
    """Return the speedup of `after` over `before`; 1 if `after` takes no time."""
    return before / after if after > 0 else 1.0


@dataclass(frozen=True)
class PhaseTime:
    """A phase's critical path: seconds by part ("experts", "exposed copies", …), and at perfect balance."""

    parts: dict[str, float]
    ideal_seconds: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass
class LinkBytes:
    """Traffic over one kind of link in the whole step, all ranks together."""

    link: str
    rows: int = 0
    copies: int = 0
    gradients: int = 0
    busiest_use: float = 0.0  # 0 … 1: share of the time in which the busiest such link is in use

    @property
    def all_bytes(self) -> int:
        return self.rows + self.copies + self.gradients


@dataclass(frozen=True)
class PolicyResult:
    """Figures of one policy's plan."""

    policy: str
    residency: str  # of its plan
    rho: npt.NDArray[np.float64]  # of every (layer, micro-step) with load
    copies_per_layer_event: float
    home_moves: int
    plan_us: float | None  # measured, µs; None: not shown
    recompute: PhaseTime
    policy_update: PhaseTime
    step_seconds: float
    ideal_step_seconds: float
    exposed_copy_seconds: float
    speedup: float  # over Report.before
    rl_step_seconds: float  # with the rollout
    rl_speedup: float | None  # of the RL step, if the rollout's seconds are known
    memory_bytes: int  # of the fullest rank
    guest_bytes: int  # part of memory_bytes: weights and gradients of guests
    peak_tokens: int  # the most that any rank computes at once
    largest_micro_batch: int | None  # tokens per rank that fit the memory budget
    links: list[LinkBytes]

    @property
    def can_train(self) -> bool:
        """Whether gradients and optimizer state have a home. A plan without homes serves recompute alone."""
        return self.residency != "free"

    @property
    def fraction_of_ideal(self) -> float:
        return speedup(self.ideal_step_seconds, self.step_seconds)

    @property
    def mean_rho(self) -> float:
        return float(self.rho.mean()) if self.rho.size else 1.0


@dataclass(frozen=True)
class Skipped:
    """A policy without a plan, and the reason."""

    policy: str
    reason: str


@dataclass(frozen=True)
class LayerLoads:
    """Tokens of every rank in one layer, [micro_steps, ranks]."""

    layer: int
    before: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ExpertHeat:
    """Load of each expert ÷ mean of its layer, [layers, experts]; 0 in layers without load."""

    step: npt.NDArray[np.float64]  # of the whole step's loads
    steady: npt.NDArray[np.float64]  # reached in at least three quarters of the micro-steps with load


@dataclass(frozen=True)
class MemoryPoint:
    """Result of foremoe with one residency and number of guest slots, or of vanilla ("no guests")."""

    residency: str
    guest_slots: int
    result: PolicyResult


@dataclass(frozen=True)
class GroupResult:
    """Results of an expert-parallel group of consecutive ranks, with vanilla and with the policy of the page."""

    first_rank: int
    num_ranks: int
    before: PolicyResult
    after: PolicyResult


@dataclass(frozen=True)
class Span:
    """Activity of a rank from `begin` to `end`."""

    kind: str
    name: str
    begin: float
    end: float
    beneath: bool = False  # a copy, which travels while the rank works


@dataclass(frozen=True)
class Window:
    """Activities of some ranks while one layer of one micro-step runs. Spans are in seconds since the window began."""

    policy: str
    what: str
    seconds: float
    lanes: dict[int, list[Span]]  # by rank


@dataclass
class Report:
    """All data of a page. The page compares all policies with `before` and presents `after`."""

    input: str
    model: str
    cluster: str
    num_ranks: int
    ranks_per_node: int
    guest_slots: int
    settings: dict[str, str]
    before: PolicyResult
    after: PolicyResult
    policies: list[PolicyResult | Skipped]
    loads: LayerLoads
    experts: ExpertHeat
    traffic: dict[str, npt.NDArray[np.int64]]  # by policy, [from node, to node]
    windows: list[Window]
    ablation: dict[str, PolicyResult] = field(default_factory=dict)  # by stages
    memory: list[MemoryPoint] = field(default_factory=list)
    groups: list[GroupResult] = field(default_factory=list)  # all, if the page shows one of several
    remarks: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # descriptions of wrong plans, which the page leaves out

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def planned(self) -> list[PolicyResult]:
        return [p for p in self.policies if isinstance(p, PolicyResult)]
