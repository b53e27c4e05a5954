"""The systems to compare: policies with options. Subclasses in arranged.py and in experiments may change the plan."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from foremoe import Evaluation, Homes, InputError, Load, Plan, _core

from .inputs import Case
from .measured import Measured


class Skipped(Exception):
    """The policy is not defined for the input; the message gives the reason."""


class System:
    """label: the system's name in the table. policy: the planning policy; empty: the label. options: options of
    foremoe.evaluate() and of the policy. warm: if each step is planned separately, start with the former step's plan.
    columns: names of the columns defined for this system; None: all.
    """

    def __init__(
        self,
        label: str,
        policy: str = "",
        *,
        warm: bool = False,
        columns: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        self.label, self.policy, self.warm, self.columns = label, policy or label, warm, columns
        own = _core._own_options(self.policy)
        self.own = {key: value for key, value in options.items() if key in own}
        self.options = {key: value for key, value in options.items() if key not in own}

    def measure(self, case: Case) -> dict[str, Measured]:
        """Plans once, with the first dispatch, and evaluates the plan with each dispatch. Raises Skipped."""
        made = self.planned(case, case.load)
        first = case.on.by_dispatch[0]
        by = {d: made if d == first else self.again(made, case, d) for d in case.on.by_dispatch}
        return {dispatch: Measured(evaluation, case.load, case.on, made) for dispatch, evaluation in by.items()}

    def planned(self, case: Case, load: Load, dispatch: str | None = None) -> Evaluation:
        """Plans for this load and evaluates the plan. dispatch: default: the input's first. Raises Skipped."""
        options = self.options_of(case, case.on.by_dispatch[0] if dispatch is None else dispatch)
        known: dict[str, Any] = {"homes": self.homes(), "previous_load": case.former, "threads": case.threads}
        made = _core._evaluate(load, self.policy, options, self.own, previous=self.previous(case), **known)
        if made.skipped:
            raise Skipped(made.skipped)
        return accepted(made)

    def again(self, made: Evaluation, case: Case, dispatch: str, plan: Plan | None = None) -> Evaluation:
        """Evaluates the plan of `made`, or `plan` if given, on the case's load."""
        known: dict[str, Any] = {"previous_load": case.former, "threads": case.threads}
        known["recompute_plan"] = made.recompute_plan if made.plan.in_flight > 1 else None
        options = self.options_of(case, dispatch)
        return accepted(_core._evaluate_plan(plan or made.plan, case.load, options, self.own, **known))

    def options_of(self, case: Case, dispatch: str) -> dict[str, Any]:
        by = {"dispatch": dispatch} if dispatch else {}
        # With a residency, foremoe plans even where no plan is faster.
        own = {"guest_slots": case.on.guest_slots, "residency": "resident"}
        return {**own, **self.options, **case.on.modelled, **by}

    def homes(self) -> Homes | None:
        """Homes of the experts; None: contiguous. Others need an input with one dispatch."""
        return None

    def previous(self, case: Case) -> Plan | None:
        """The plan to start with, if any."""
        if not case.on.former_plan:
            return case.before if self.warm else None
        assert case.former is not None
        options = self.options_of(case, case.on.by_dispatch[0])
        former = _core._evaluate(case.former, self.policy, options, self.own, threads=case.threads)
        return None if former.skipped else former.plan


def accepted(evaluation: Evaluation) -> Evaluation:
    """Raises InputError for a plan that check_plan rejects."""
    if not evaluation.figures["ok"]:
        raise InputError(f"the plan is wrong: {evaluation.figures['violations'][0]['message']}")
    return evaluation
