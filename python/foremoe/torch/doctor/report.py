"""What the doctor found: as a table, and as a JSON document for an issue."""

from __future__ import annotations

import os
import re
import shutil
import socket
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .hardware import Hardware, versions

PASSED, FAILED, CANNOT_RUN = "passed", "failed", "cannot run here"
FORMAT = 1
"""Version of the document."""


@dataclass(frozen=True)
class Outcome:
    """What became of a check."""

    status: str  # PASSED, FAILED or CANNOT_RUN
    detail: str  # what was seen, or why not
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A check with its outcome."""

    check: str
    outcome: Outcome
    seconds: float


def scrub(text: str) -> str:
    """The text without names and addresses of machines, and with files' names in the place of their paths."""
    for name in {socket.gethostname(), socket.getfqdn()} - {"", "localhost"}:
        text = text.replace(name, "HOST")
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b|\[[0-9a-fA-F:]*::[0-9a-fA-F:]*\]", "ADDRESS", text)
    return re.sub(r"(?<![\w/])(?:~|\.\.|[A-Za-z]:)?(?:/[^\s/:'\",;()]+)+", lambda path: os.path.basename(path[0]), text)


def document_of(hardware: Hardware, rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """The JSON document: versions, hardware, counts and one entry per check."""
    return {
        "format": FORMAT,
        "versions": versions(hardware),
        "ranks": hardware.ranks,
        "device": hardware.device,
        "backend": hardware.backend,
        "seconds": round(seconds, 1),
        **{status.replace(" ", "_"): _count(rows, status) for status in (PASSED, FAILED, CANNOT_RUN)},
        "checks": [
            {
                "check": row.check,
                "outcome": row.outcome.status,
                "detail": scrub(row.outcome.detail),
                "figures": row.outcome.figures,
                "seconds": round(row.seconds, 2),
            }
            for row in rows
        ],
    }


def table_of(document: dict[str, Any], width: int | None = None) -> str:
    """The document as text.

    Args:
        document: as document_of() makes it.
        width: columns of the screen; None: those of the terminal, at most 120.
    """
    width = width or min(120, shutil.get_terminal_size((120, 24)).columns)
    of = document["versions"]
    extra = [f"{name} {of[name]}" for name in ("cuda", "nccl", "driver") if of[name]]
    lines = [
        f"foremoe {of['foremoe']}, torch {of['torch']}, Python {of['python']}, {', '.join([of['system'], *extra])}",
        f"{document['ranks']} ranks, {document['backend']}, {', '.join(of['gpus']) or 'CPU'}",
        "",
    ]
    checks = document["checks"]
    name_width = max((len(row["check"]) for row in checks), default=0)
    status_width = len(CANNOT_RUN)
    indent = " " * (name_width + status_width + 4)
    for row in checks:
        begin = f"{row['check']:{name_width}}  {row['outcome']:{status_width}}  "
        lines += textwrap.wrap(
            row["detail"], max(width, len(indent) + 30), initial_indent=begin, subsequent_indent=indent
        )
    counts = ", ".join(f"{document[s.replace(' ', '_')]} {s}" for s in (PASSED, FAILED, CANNOT_RUN))
    return "\n".join([*lines, "", f"{counts}, in {document['seconds']:.0f} s"])


def _count(rows: Sequence[Row], status: str) -> int:
    return sum(row.outcome.status == status for row in rows)
