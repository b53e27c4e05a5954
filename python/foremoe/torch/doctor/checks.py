"""What a check is, and how checks are run one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .hardware import Hardware
from .ranks import Prepare, Ranks, Report
from .report import CANNOT_RUN, FAILED, PASSED, Outcome, Row

START_LIMIT = 100.0
"""Seconds in which ranks import torch and meet."""


@dataclass(frozen=True)
class Found:
    """What a check returns on a rank that has found nothing wrong: the same on all ranks."""

    detail: str
    figures: dict[str, float]


def runs_anywhere(hardware: Hardware) -> str:
    return ""


def judge_all(reports: Sequence[Report]) -> Outcome:
    """Passed only if every rank has returned what it found."""
    if all(report.ended == "cannot run" for report in reports):
        return Outcome(CANNOT_RUN, reports[0].text)
    problems = problems_of(reports)
    if problems:
        return Outcome(FAILED, problems)
    found: Found = reports[0].value
    return Outcome(PASSED, found.detail, found.figures)


def problems_of(reports: Sequence[Report]) -> str:
    """What went wrong, on which ranks; empty if all have returned. The first cause comes first."""
    failed = [report for report in reports if report.ended != "returned"]
    failed.sort(key=lambda report: (report.ended == "hung", report.seconds))
    if len(failed) == len(reports) and len({report.text for report in failed}) == 1:
        return f"all ranks: {failed[0].text}"
    return "; ".join(f"rank {report.rank}: {report.text}" for report in failed)


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    run: Callable[[Hardware], Found]
    """Runs on every rank, collectively. Raises Failure, or whatever goes wrong."""
    refusal: Callable[[Hardware], str] = runs_anywhere
    """Why it cannot run on this hardware; empty if it can."""
    judge: Callable[[Sequence[Report]], Outcome] = judge_all
    limit: float = 45.0  # seconds
    grace: float = 5.0  # seconds for the other ranks when one has raised or died
    ends_ranks: bool = False  # ranks of this check are of no further use


@dataclass(frozen=True)
class _OnRank:
    """What travels to a rank."""

    run: Callable[[Hardware], Found]
    hardware: Hardware

    def __call__(self) -> Found:
        return self.run(self.hardware)


def examine(
    hardware: Hardware, checks: Sequence[Check], *, limit: float = 120.0, prepare: Prepare | None = None
) -> Iterator[Row]:
    """Runs checks, and yields each one's row as soon as it is known.

    Args:
        hardware: that they run on.
        checks: in this order.
        limit: seconds for all of them. Checks that would begin later are not run, and say so.
        prepare: called on every rank before its first check.
    """
    deadline = time.monotonic() + limit
    ranks: Ranks | None = None
    try:
        for check in checks:
            begin = time.monotonic()
            refusal = check.refusal(hardware)
            if not refusal and begin >= deadline:
                refusal = f"not run: the limit of {limit:.0f} s was over"
            if refusal:
                yield Row(check.name, Outcome(CANNOT_RUN, refusal), 0.0)
                continue
            if ranks is None:
                ranks, problem = _start(hardware, prepare, max(1.0, min(START_LIMIT, deadline - begin)))
                if ranks is None:
                    yield Row(check.name, Outcome(FAILED, f"ranks did not start: {problem}"), time.monotonic() - begin)
                    continue
            seconds = max(1.0, min(check.limit, deadline - time.monotonic()))
            reports = ranks.run(_OnRank(check.run, hardware), seconds, check.grace)
            if check.ends_ranks or any(report.ended != "returned" for report in reports):
                ranks.end()
                ranks = None
            yield Row(check.name, check.judge(reports), time.monotonic() - begin)
    finally:
        if ranks is not None:
            ranks.end()


def _start(hardware: Hardware, prepare: Prepare | None, limit: float) -> tuple[Ranks | None, str]:
    """Ranks that have met; or why they have not."""
    ranks = Ranks(hardware, prepare)
    problems = problems_of(ranks.start(limit))
    if problems:
        ranks.end()
        return None, problems
    return ranks, ""
