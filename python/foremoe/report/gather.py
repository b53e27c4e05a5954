"""Gathers the data of a page: evaluates all policies, and two of them in more detail.

All policies are compared with vanilla. Only two policies keep their plans: vanilla, and foremoe or, if it was not
requested, the fastest policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from .._balance import imbalance, planned_rows
from .._core import Evaluation, Load
from .._errors import InputError
from .._evaluation import evaluate
from .facts import (
    ExpertHeat,
    GroupResult,
    LayerLoads,
    LinkBytes,
    MemoryPoint,
    PhaseTime,
    PolicyResult,
    Report,
    Skipped,
    speedup,
)
from .numbers import counted
from .window import choose_window, window_of

BASELINE = "vanilla"
OURS = "foremoe"
ABLATED = ("B", "BL", "BLP", "BLPT")  # stages; before them, vanilla
RESIDENCIES = ("static", "resident", "shared")
_ARGUMENTS = ("homes", "previous", "previous_load", "threads")  # options of evaluate() that no C++ table has


@dataclass(frozen=True)
class Request:
    """Options of a page. Raises InputError for invalid values.

    Attributes:
        policies: Keys of foremoe.policies(), or "all".
        guest_slots: Policies are compared at the first number; the plot of memory against speedup shows all.
        options: Further options of foremoe.evaluate(). Values may be texts.
        measured: Show the planning time, which is measured here and differs from run to run.
    """

    policies: Sequence[str]
    guest_slots: Sequence[int | str]
    options: Mapping[str, Any]
    measured: bool = True

    @property
    def num_evaluations(self) -> int:
        """The number of evaluations for the page."""
        policies = {BASELINE, *_core._policies_named(list(self.policies))}
        return len(policies) + len(ABLATED) + len(RESIDENCIES) * len(self.guests)

    @property
    def guests(self) -> list[int]:
        """The numbers of guest slots above 0."""
        return [slots for slots in map(int, self.guest_slots) if slots > 0]

    def __post_init__(self) -> None:
        _core._policies_named(list(self.policies))
        if not self.options.get("cluster"):
            raise InputError("cluster: is missing", field="cluster")
        if "policy_options" in self.options:
            problem = "policy_options: belong to one policy, but a report compares several"
            raise InputError(problem, field="policy_options")
        if len(self.guest_slots) == 0:
            raise InputError("guest_slots: lists no number", field="guest_slots")
        if self.options.get("residency") == "auto":
            raise InputError("residency: 'auto', expected static, resident, shared or free", field="residency")
        for slots in self.guest_slots:
            _core._check_evaluation({"guest_slots": slots})
        _core._check_evaluation({key: value for key, value in self.options.items() if key not in _ARGUMENTS})


def gather_report(
    load: Load | Sequence[Load], request: Request, progress: Callable[[str], None] = lambda what: None
) -> Report:
    """Return the data of the page. Calls `progress` before each evaluation. Raises InputError if there is no plan.

    Of the loads of several expert-parallel groups, the page shows the one with the longest step before planning, and a
    table of all.
    """
    groups = [_Gatherer(one, request, progress) for one in ([load] if isinstance(load, Load) else load)]
    shown = max(groups, key=lambda group: group.before.step_seconds)
    report = shown.report()
    if len(groups) == 1:
        return report
    for i, group in enumerate(groups):
        result = report.after if group is shown else group.evaluated(report.after.policy)[1]
        if group is not shown:
            report.wrong += group.wrong
        if isinstance(result, PolicyResult):
            ranks = group.load.num_ranks
            report.groups.append(GroupResult(i * ranks, ranks, group.before, result))
    report.input += f", group {groups.index(shown)} of {len(groups)}: the slowest before planning"
    return report


class _Gatherer:
    def __init__(self, load: Load, request: Request, progress: Callable[[str], None]) -> None:
        self.load = load
        self.request = request
        self.progress = progress
        self.wrong: list[str] = []
        self.slots = int(request.guest_slots[0])
        self.vanilla: dict[str, Any] | None = None
        self.baseline, before = self.evaluated(BASELINE)
        if isinstance(before, Skipped):
            raise InputError(f"{load.name}: {BASELINE}: {before.reason}", file=load.name)
        self.before = before
        self.vanilla = self.baseline.figures

    def evaluated(self, policy: str, **changed: object) -> tuple[Evaluation, PolicyResult | Skipped]:
        """Evaluate a policy with changed options. Records a wrong plan in `wrong`, and returns it as skipped."""
        self.progress(f"evaluating {policy}")
        options: dict[str, Any] = {**self.request.options, "guest_slots": self.slots, **changed}
        evaluation = evaluate(self.load, policy, **options)
        if evaluation.skipped is not None:
            return evaluation, Skipped(policy, evaluation.skipped)
        figures = evaluation.figures
        if figures["ok"]:
            return evaluation, result_of(evaluation, self.vanilla or figures, measured=self.request.measured)
        plan = evaluation.plan
        reason = f"its plan is WRONG: {figures['violations'][0]['message']}"
        slots = counted(plan.guest_slots, "guest slot")
        self.wrong.append(f"{evaluation.policy}, {slots}, residency {plan.residency}: {reason}")
        return evaluation, Skipped(policy, reason)

    def compared(self) -> tuple[list[PolicyResult | Skipped], Evaluation, PolicyResult]:
        """Return the results of all policies, and evaluation and result of the policy that the page presents."""
        results: list[PolicyResult | Skipped] = [self.before]
        chosen, after = self.baseline, self.before
        for policy in dict.fromkeys(_core._policies_named(list(self.request.policies))):
            if policy == BASELINE:
                continue
            evaluation, result = self.evaluated(policy)
            results.append(result)
            if isinstance(result, Skipped):
                continue
            better = after is self.before or result.speedup > after.speedup
            if policy == OURS or (better and after.policy != OURS):
                chosen, after = evaluation, result
        return results, chosen, after

    def report(self) -> Report:
        policies, chosen, after = self.compared()
        before_loads, after_loads = planned_rows(self.baseline.plan), planned_rows(chosen.plan)
        rho = imbalance(before_loads)
        layer = int(rho.sum(0).argmax())
        window = choose_window(before_loads, rho)
        cost = self.baseline.cost
        assert cost is not None  # the request has a cluster
        report = Report(
            input=f"{self.load.name}: {self.load}",
            model=cost["model"],
            cluster=cost["cluster"],
            num_ranks=self.load.num_ranks,
            ranks_per_node=self.load.ranks_per_node,
            guest_slots=self.slots,
            settings=self.settings(cost),
            before=self.before,
            after=after,
            policies=policies,
            loads=LayerLoads(layer, before_loads[:, layer], after_loads[:, layer]),
            experts=ExpertHeat(*_core._expert_heat(self.load)),
            traffic={
                e.policy: np.sum([phase["between_nodes"] for phase in e.figures["phases"]], 0, np.int64)
                for e in (self.baseline, chosen)
            },
            windows=[window_of(e, window) for e in (self.baseline, chosen)],
            ablation={BASELINE: self.before},
            memory=[MemoryPoint("no guests", 0, self.before)],
            wrong=self.wrong,
        )
        del chosen
        for stages in ABLATED:
            residency = self.request.options.get("residency", "resident")  # named, so that a plan is made
            _, result = self.evaluated(OURS, residency=residency, stages=stages)
            if isinstance(result, PolicyResult):
                report.ablation[stages] = result
        for residency in RESIDENCIES:
            for slots in self.request.guests:
                _, result = self.evaluated(OURS, residency=residency, guest_slots=slots)
                if isinstance(result, PolicyResult):
                    report.memory.append(MemoryPoint(residency, slots, result))
        needed = [(p.policy, p.memory_bytes) for p in report.planned]
        remarks = _core._memory_remarks(self.baseline, needed)
        report.remarks = [f"Memory, of the policies side by side: {remark}." for remark in remarks]
        return report

    def settings(self, cost: Mapping[str, Any]) -> dict[str, str]:
        """Return the options, in words."""
        initial = {option["name"]: option["default"] for option in _core._option_tables()["planner"]}
        options = {key: value for key, value in self.request.options.items() if value is not None}
        settings = {
            "input": self.load.name,
            "load": str(self.load),
            "cluster": cost["cluster"],
            "model": cost["model"],
            "guest slots per rank and layer": str(self.slots),
            "residency": str(options.get("residency", initial["residency"])),
            "micro-steps in flight": str(options.get("in_flight", initial["in_flight"])),
            "tokens of a sequence": _sequences(cost, self.baseline.figures),
            "data-parallel ranks that share optimizer state": str(cost["optimizer_shards"]),
            "memory of a rank": f"{cost['memory_bytes'] / 1e9:.1f} GB",
            "dispatch": _dispatch(cost, self.baseline.figures),
            "activations": _activations(cost),
        }
        moe_layers = cost["moe_layers"]
        if self.load.num_layers < moe_layers:
            share = f"{moe_layers / self.load.num_layers:.4g} of the model's {counted(moe_layers, 'MoE layer')}"
            settings["each layer stands for"] = share
        for name, words, unit in (("rollout_seconds", "rollout", "s"), ("memory_budget", "memory budget", "GB")):
            if float(options.get(name, 0)) > 0:
                settings[words] = f"{float(options[name]):g} {unit}"
        return settings


def _dispatch(cost: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    if cost["dispatch"] == "row":
        return "every token–expert assignment directly to its rank"
    estimated = ", estimated from the load" if figures["dispatch_estimated"] else ""
    return f"a token once to each node, and from there once to each rank{estimated}"


def _sequences(cost: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    return "as in the trace" if figures["attention"] == "sequences" else str(cost["sequence_tokens"])


def _activations(cost: Mapping[str, Any]) -> str:
    if not cost["keep_activations"]:
        return "computed anew in the backward pass"
    return "kept, those inside experts computed anew" if cost["recompute_experts"] else "kept"


def result_of(evaluation: Evaluation, vanilla: Mapping[str, Any], *, measured: bool = True) -> PolicyResult:
    """Return the figures of one plan and its speedup over vanilla; with the planning time if `measured`."""
    f = evaluation.figures
    recompute, update = f["phases"]
    update_parts = parts_of(update)
    if f["home_move_seconds"] > 0:
        update_parts = {"homes moved": f["home_move_seconds"], **update_parts}
    rho = imbalance(planned_rows(evaluation.plan)).ravel()
    guests = (phase["memory"]["guest_weights"] + phase["memory"]["guest_gradients"] for phase in f["phases"])
    with_rollout = f["rl_step_seconds"] > f["step_seconds"]
    return PolicyResult(
        policy=evaluation.policy,
        residency=evaluation.plan.residency,
        rho=rho[rho > 0],
        copies_per_layer_event=f["copies_per_layer_event"],
        home_moves=f["home_moves"],
        plan_us=f["plan_us_per_layer_micro_step"] if measured else None,
        recompute=PhaseTime(parts_of(recompute), recompute["ideal_seconds"]),
        policy_update=PhaseTime(update_parts, update["ideal_seconds"]),
        step_seconds=f["step_seconds"],
        ideal_step_seconds=f["ideal_step_seconds"],
        exposed_copy_seconds=f["exposed_copy_seconds"],
        speedup=speedup(vanilla["step_seconds"], f["step_seconds"]),
        rl_step_seconds=f["rl_step_seconds"],
        rl_speedup=speedup(vanilla["rl_step_seconds"], f["rl_step_seconds"]) if with_rollout else None,
        memory_bytes=f["memory_bytes_per_rank"],
        guest_bytes=max(guests),
        peak_tokens=f["peak_tokens_per_rank"],
        largest_micro_batch=f.get("largest_micro_batch_tokens"),
        links=links_of(f["phases"]),
    )


def parts_of(phase: Mapping[str, Any]) -> dict[str, float]:
    return {name.replace("_", " "): seconds for name, seconds in phase["parts"].items()}


def links_of(phases: Sequence[Mapping[str, Any]]) -> list[LinkBytes]:
    """Return the traffic of all phases, by kind of link."""
    links: dict[str, LinkBytes] = {}
    for traffic in (traffic for phase in phases for traffic in phase["traffic"]):
        link = links.setdefault(traffic["link"], LinkBytes(traffic["link"]))
        link.rows += traffic["row_bytes"]
        link.copies += traffic["copy_bytes"]
        link.gradients += traffic["gradient_bytes"]
        link.busiest_use = max(link.busiest_use, traffic["busiest_use"])
    return list(links.values())
