"""foremoe.supported has the versions that pyproject.toml accepts and that CI installs, and compares them by number."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from foremoe.supported import FRAMEWORKS, MEGATRON, PYTHON, TORCH, TRANSFORMERS, TRL, VERL, Framework, table

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTALLED = (TORCH, TRANSFORMERS, TRL, MEGATRON, VERL)


def pins() -> dict[str, set[str]]:
    """Returns the versions of each package in python/requirements*.txt."""
    found: dict[str, set[str]] = {}
    for file in ROOT.glob("python/requirements*.txt"):
        for package, version in re.findall(r"^([\w-]+)==(\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize("framework", INSTALLED, ids=lambda of: of.package)
def test_tested_versions_are_those_that_ci_installs(framework: Framework) -> None:
    assert set(framework.tested) == pins()[framework.package]


def test_pyproject_accepts_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == PYTHON.specifier
    required = {of for extra in project["optional-dependencies"].values() for of in extra}
    for framework in INSTALLED:
        same = {of for of in required if re.fullmatch(rf"{framework.package}[^\w-].*", of)}
        assert same == ({framework.package + framework.specifier} if framework is not VERL else set())


def test_tested_versions_are_accepted() -> None:
    for framework in FRAMEWORKS:
        assert all(framework.accepts(version) for version in framework.tested), framework.name


# (accepted, refused) versions around each limit
@pytest.mark.parametrize(
    ("framework", "words", "accepted", "refused"),
    [
        (TORCH, "2.9.1 or newer", ["2.9.1", "2.15.0+cpu", "2.10", "3.0"], ["2.9.0", "2.9", "1.13.1", "unknown"]),
        (TRANSFORMERS, "5.0 or newer", ["5.0.0", "5", "5.23.0.dev0"], ["4.99.9", "4"]),
        (TRL, "1.16 or newer, below 2", ["1.16.0", "1.20.3"], ["1.15.2", "2.0.0", "10.16"]),
        (MEGATRON, "0.16 to 0.19", ["0.16.0", "0.19.9rc1"], ["0.15.3", "0.21.0", "1.0"]),
        (VERL, "0.9", ["0.9.0", "0.9.12"], ["0.8.2", "0.10.0.dev", "0.90.0", "1.0.0"]),
    ],
)
def test_versions_are_compared_by_number(
    framework: Framework, words: str, accepted: list[str], refused: list[str]
) -> None:
    assert framework.accepted == words
    for version in accepted:
        framework.expect("foremoe.adapter", version)
    for version in refused:
        with pytest.raises(ImportError, match=rf"^foremoe.adapter needs {framework.package} {words}, not {version}$"):
            framework.expect("foremoe.adapter", version)


def test_every_use_is_run_read_refused_or_none() -> None:
    for framework in FRAMEWORKS:
        for use in (framework.routes, framework.shadow, framework.plans):
            assert re.match(r"(run|read|refused)\b|–$", use), (framework.name, use)


def test_the_command_prints_the_table() -> None:
    printed = subprocess.run([sys.executable, "-m", "foremoe.supported"], capture_output=True, text=True, check=True)
    assert printed.stdout == table() + "\n"
    assert len(printed.stdout.splitlines()) == 2 + len(FRAMEWORKS)
