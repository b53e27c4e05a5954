"""How policy foremoe plans the steps of a run: chosen once, by the modelled seconds of one step.

Under a known cluster, each planned phase is also compared with the same phase without a plan. Both comparisons use
values that are equal on all ranks, so that all ranks decide alike: rank 0 makes the choice, and the seconds of a phase
are sums over the ranks' shares of the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import foremoe
from foremoe import _core

from .arguments import PlanningArguments

LAYERS = 4  # of the load on which the choice is made
PRICES = "copy_price", "free_copies"
# Options of policy foremoe that leave all rows at home. With other values of prefer, guests serve rows in any stages.
UNPLANNED = {"stages": "none", "prefer": "balance", "copy_price": None, "free_copies": None}
_log = logging.getLogger("foremoe")


def cluster_named(device: str) -> str | None:
    """Returns the preset of foremoe.clusters() for a CUDA device's name, such as "NVIDIA H100 80GB HBM3"; None if no
    preset has it."""
    words = device.replace("-", " ").casefold().split()
    return next((name for name in foremoe.clusters() if name.casefold() in words), None)


def cluster_of(device: torch.device) -> str | None:
    is_on_gpu = device.type == "cuda" and torch.cuda.device_count() > 0
    return cluster_named(torch.cuda.get_device_name(device)) if is_on_gpu else None


class Choice:
    """The choice of a group's ranks. Its methods run in the thread that plans."""

    def __init__(self, arguments: PlanningArguments, cost: Mapping[str, Any], rank: int, executes: bool = True) -> None:
        """
        Args:
            cost: Cluster, model and other options of foremoe.evaluate() that describe a step.
            rank: This rank in its group.
            executes: Phases run as planned, or without a plan if that is faster. False in shadow mode.
        """
        self.is_fixed = arguments.is_fixed
        self._tries_all = arguments.residency == "auto"
        self._cost = dict(cost)
        self._rank = rank
        self._executes = executes
        self._replaces = executes and not self.is_fixed
        self._options: dict[str, Any] | None = {} if self.is_fixed else None
        self._is_done = False  # nothing is left to compare

    @property
    def is_pending(self) -> bool:
        """Whether plans are still compared, or the choice has not been made."""
        return not self._is_done

    @property
    def replaces(self) -> bool:
        """Whether a phase may turn out to run without a plan, so that it must not begin before all is planned."""
        return self._replaces

    def is_made(self) -> bool:
        return self._options is not None

    def make(self, load: foremoe.Load, planning: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of foremoe.plan() that plan this load's step fastest, and logs why."""
        layers = np.unique(np.linspace(0, load.num_layers - 1, LAYERS).round().astype(int))
        few = foremoe.Load.from_array(
            np.ascontiguousarray(load.array[:, layers]), top_k=load.top_k, ranks_per_node=load.ranks_per_node,
            name=load.name,
        )  # fmt: skip
        homes = planning.get("homes")
        given = {name: value for name, value in planning.items() if name not in ("policy", "residency", "previous")}
        given |= self._cost | {"homes": None if homes is None else homes[layers]}
        among: Any = {"residency": "auto"} if self._tries_all else {}
        trials = foremoe.evaluate(few, **given, **among)
        seconds = {of["plan"]: of["seconds"] for of in trials.figures["choice"]["trials"]}
        # An executor must be prepared for residency shared when it is created.
        best = min((plan for plan in seconds if not plan.startswith("shared")), key=lambda plan: seconds[plan])
        if best == "no plan" and not self._tries_all:  # a later step may gain: each is compared
            best = min((plan for plan in seconds if plan != "no plan"), key=lambda plan: seconds[plan])
        options: dict[str, Any] = {"residency": "resident"} | UNPLANNED
        if best != "no plan":
            residency, prefer = best.split(", ")
            options = {"residency": residency, "prefer": prefer}
            if prefer == "time":
                recorded = foremoe.evaluate(few, **given, **options).plan.options
                options |= {name: recorded[name.replace("_", "-")] for name in PRICES}
        said = "; ".join(f"{plan} {of:.4g} s" for plan, of in seconds.items())
        fixed = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        _log.info("plans of this run: %s, by the modelled seconds of its first step on %s (%s)", fixed,
                  self._cost["cluster"], said)  # fmt: skip
        return options

    def keep(self, options: dict[str, Any]) -> None:
        """Uses these options, which rank 0 has made, in all steps."""
        self._options = options
        self._is_done = self._executes and options.get("stages") == "none"

    @property
    def options(self) -> dict[str, Any]:
        assert self._options is not None
        return self._options

    def seconds(self, part: foremoe.Plan, load: foremoe.Load, phase: str, homes: Any) -> np.ndarray[Any, Any]:
        """Returns the modelled seconds of some layers' share of a phase: as planned, and without a plan."""
        unplanned = _core._plan(
            load, "vanilla", {"in_flight": part.in_flight}, homes=homes, layers=part.layers, threads=1
        )
        return np.array([_core._phase_seconds(of, load, self._cost, phase) for of in (part, unplanned)])

    def judged(
        self, plan: foremoe.Plan, load: foremoe.Load, phase: str, seconds: np.ndarray[Any, Any], planners: int,
        planning: Mapping[str, Any],
    ) -> foremoe.Plan:  # fmt: skip
        """Returns the plan, or one of the same shape that leaves all rows at home if the phase is faster without.

        seconds: Sum of seconds() over all layers. planners: Ranks that plan some layers each.
        """
        layers = -(-load.num_layers // planners)
        planned = float(seconds[0]) + layers * _core._estimated_planning_seconds(plan, load)
        if planned < seconds[1]:
            return plan
        said = f"a {phase} takes {planned:.4g} s with its plan and {seconds[1]:.4g} s without, as modelled"
        warns = self._executes and self.is_fixed
        if self._rank == 0:
            what = "leave out residency and prefer to run such phases without one" if warns else "it has none"
            _log.log(logging.WARNING if warns else logging.INFO, "%s: %s", said, what)
        self._is_done = warns
        if not self._replaces:
            return plan
        same = {
            name: value for name, value in planning.items() if name not in ("policy", "homes", "threads", "previous")
        }
        return _core._plan(load, "foremoe", same | UNPLANNED, homes=planning.get("homes"), threads=planning["threads"])


def known_choice(
    arguments: PlanningArguments, models: Sequence[Any], plan: foremoe.Plan, nothing: foremoe.Load, *,
    cluster: str | None, rank: int, executes: bool = True, **options: Any,
) -> Choice | None:  # fmt: skip
    """Returns the choice for a cluster that was given or detected; None if it is not known.

    Args:
        arguments: Their cluster and model, if given, must be usable.
        models: Descriptions of the model, tried in order until one fits, unless `arguments` has one.
        plan, nothing: A load without rows, and its plan.
        cluster: The cluster that was detected, or None.
        options: Options of foremoe.evaluate().
    """
    named = arguments.cluster if arguments.cluster is not None else cluster
    refused: foremoe.InputError | None = None
    if named is not None and plan.guest_slots > 0:
        for model in [arguments.model] if arguments.model is not None else models:
            cost = {"cluster": named, "model": dict(model) if isinstance(model, Mapping) else model, **options}
            try:
                _core._phase_seconds(plan, nothing, cost, "policy_update")
            except foremoe.InputError as error:
                refused = refused or error
                continue
            return Choice(arguments, cost, rank, executes)
    if refused is not None and arguments.cluster is not None:
        raise refused if refused.field else foremoe.InputError(f"cluster: {refused}", field="cluster") from refused
    if refused is not None:
        _log.info("cluster: %s was detected, but the model cannot be described: %s", named, refused)
    if arguments.residency == "auto":
        raise foremoe.InputError("residency: auto needs a known cluster: give cluster=NAME or FILE", field="residency")
    return None
