"""The doctor's results: a table with a line of advice, and a JSON document for an issue."""

from __future__ import annotations

import os
import re
import shutil
import socket
import textwrap
from collections.abc import Sequence
from typing import Any

from foremoe._errors import refuse

from .hardware import Hardware, versions
from .ranks import CANNOT_RUN, FAILED, PASSED, Check, Outcome

FORMAT = 2
"""Version of the document."""
WORTH = 0.9
"""A larger depth is advised if it shortens the wait to at most this share."""


def scrub(text: str) -> str:
    """Removes names and addresses of machines from a text, and replaces paths by file names."""
    for name in {socket.gethostname(), socket.getfqdn()} - {"", "localhost"}:
        text = text.replace(name, "HOST")
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b|\[[0-9a-fA-F:]*::[0-9a-fA-F:]*\]", "ADDRESS", text)
    return re.sub(r"(?<![\w/])(?:~|\.\.|[A-Za-z]:)?(?:/[^\s/:'\",;()]+)+", lambda path: os.path.basename(path[0]), text)


def document_of(hardware: Hardware, rows: Sequence[tuple[Check, Outcome, float]], seconds: float) -> dict[str, Any]:
    """Returns the JSON document: versions, hardware, counts, advice and one entry per check."""
    found = [outcome.status for _, outcome, _ in rows]
    return {
        "format": FORMAT,
        "versions": versions(hardware),
        "ranks": hardware.ranks,
        "device": hardware.device,
        "backend": hardware.backend,
        "seconds": round(seconds, 1),
        **{status.replace(" ", "_"): found.count(status) for status in (PASSED, FAILED, CANNOT_RUN)},
        "advice": advice_of({check.name: outcome for check, outcome, _ in rows}),
        "checks": [
            {
                "check": check.name,
                "outcome": outcome.status,
                "detail": scrub(outcome.detail),
                "figures": outcome.figures,
                "seconds": round(taken, 2),
            }
            for check, outcome, taken in rows
        ],
    }


def advice_of(outcomes: dict[str, Outcome]) -> str:
    """Returns a line with the recommended depth and path for ExpertParallel, or why there is no advice."""
    if any(outcome.status == FAILED for outcome in outcomes.values()):
        return "do not train here before the failed checks pass"

    def figures(check: str) -> dict[str, float]:
        return outcomes[check].figures if check in outcomes else {}

    advice = []
    waits = {name: wait for name, wait in figures("copies overlap with computing").items() if name.startswith("depth_")}
    if waits:
        best, *deeper = waits
        for name in deeper:
            best = name if waits[name] < WORTH * waits[best] else best
        advice.append(f"depth={best.removeprefix('depth_')}: a step waits {1e3 * waits[best]:.1f} ms for copies")
    peer = figures("bandwidth: copies between ranks").get("gigabytes_per_second")
    host = figures("bandwidth: copies from host memory").get("gigabytes_per_second")
    if peer and host:
        path = "host" if host > peer else "peer"
        advice.append(f"path='{path}': ranks send {peer:.3g} GB/s, host memory {host:.3g} GB/s")
    return "; ".join(advice) or "none: neither the overlap of copies nor their bandwidth was measured"


def cluster_file_of(document: dict[str, Any], base: str) -> str:
    """Returns a cluster file with the measured links, and the other values of the preset `base`.

    Raises InputError for a bandwidth that was not measured, with the outcome of its check.
    """
    checks = {row["check"]: row for row in document["checks"]}
    names = [f"bandwidth: {of}" for of in ("all-to-all", "copies between ranks", "copies from host memory")]
    for name in names:
        if checks.get(name, {}).get("outcome") != PASSED:
            refuse(name, f"was not measured: {checks[name]['detail'] if name in checks else 'not among the checks'}")
    rows, peers, host = (1e9 * checks[name]["figures"]["gigabytes_per_second"] for name in names)
    return f"""\
# Links measured by foremoe.torch.doctor between {document["ranks"]} ranks of one machine; other values: {base}.
name = "{base}, measured"
base = "{base}"

[peers]
bytes_per_second = {peers:.4g}

[exchange]
row_efficiency = {min(1.0, rows / peers):.3g}

[host]
bytes_per_second = {host:.4g}

[node]
ranks_per_switch = 1  # all ranks copied from the host at once
switch_bytes_per_second = {host:.4g}
"""


def table_of(document: dict[str, Any], width: int | None = None) -> str:
    """Returns the document as text. width: columns; None: those of the terminal, at most 120."""
    width = width or min(120, shutil.get_terminal_size((120, 24)).columns)
    of, checks = document["versions"], document["checks"]
    extra = [f"{name} {of[name]}" for name in ("cuda", "nccl") if of[name]]
    lines = [
        f"foremoe {of['foremoe']}, torch {of['torch']}, Python {of['python']}, {', '.join([of['system'], *extra])}",
        f"{document['ranks']} ranks, {document['backend']}, {', '.join(of['gpus']) or 'CPU'}",
        "",
    ]
    name_width = max((len(row["check"]) for row in checks), default=0)
    indent = " " * (name_width + len(CANNOT_RUN) + 4)
    for row in checks:
        begin = f"{row['check']:{name_width}}  {row['outcome']:{len(CANNOT_RUN)}}  "
        lines += textwrap.wrap(
            row["detail"], max(width, len(indent) + 30), initial_indent=begin, subsequent_indent=indent
        )
    counts = ", ".join(f"{document[s.replace(' ', '_')]} {s}" for s in (PASSED, FAILED, CANNOT_RUN))
    return "\n".join([*lines, "", f"{counts}, in {document['seconds']:.0f} s", f"Advice: {document['advice']}"])
