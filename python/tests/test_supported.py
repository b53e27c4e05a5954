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
        versions = framework.tested + framework.trees
        assert all(framework.accepts(version) for version in versions), framework.name


# (accepted, refused) versions around each limit
@pytest.mark.parametrize(
    ("framework", "words", "accepted", "refused"),
    [
        (TORCH, "2.9.1 or newer", ["2.9.1", "2.15.0+cpu", "2.10", "3.0"], ["2.9.0", "2.9", "1.13.1", "unknown"]),
        (TRANSFORMERS, "5.0 or newer", ["5.0.0", "5", "5.23.0.dev0"], ["4.99.9", "4"]),
        (TRL, "1.16 or newer, below 2", ["1.16.0", "1.20.3"], ["1.15.2", "2.0.0", "10.16"]),
        (MEGATRON, "0.16 to 0.20", ["0.16.0rc0", "0.16", "0.20.0+14346b65"], ["0.15.3", "0.21.0rc0", "0.160", "1"]),
        (VERL, "0.8 to 0.10", ["0.8.0.dev", "0.10.0.dev"], ["0.7.1", "0.11.0", "0.90.0", "1.0.0"]),
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


PINNED = Framework(name="Trainer", package="trainer", oldest=(0, 8), newest=(0, 10), oldest_in_shadow=(0, 7, 1))


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0.dev", "0.10.9"])
def test_shadow_mode_has_a_first_version_of_its_own(version: str, caplog: pytest.LogCaptureFixture) -> None:
    PINNED.expect("foremoe.adapter", version, "shadow")
    assert caplog.text == ""


def test_shadow_mode_refuses_older_versions() -> None:
    for version in ("0.7.0", "0.6.12", "unknown"):
        with pytest.raises(ImportError, match=f"needs trainer 0.7.1 or newer in mode shadow, not {version}$"):
            PINNED.expect("foremoe.adapter", version, "shadow")


def test_shadow_mode_warns_once_of_a_newer_version(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("0.11.0", "0.11.0", "1.0"):
        PINNED.expect("foremoe.adapter", version, "shadow")
        with pytest.raises(ImportError, match=f"^foremoe.adapter needs trainer 0.8 to 0.10, not {version}$"):
            PINNED.expect("foremoe.adapter", version)
    assert caplog.messages == [
        f"foremoe.adapter was tested with trainer 0.8 to 0.10, not with {version}" for version in ("0.11.0", "1.0")
    ]


def test_every_use_is_run_read_refused_or_none() -> None:
    for framework in FRAMEWORKS:
        for use in (framework.routes, framework.shadow, framework.plans):
            assert re.match(r"(run|read|refused)\b|–$", use), (framework.name, use)


def test_the_command_prints_the_table() -> None:
    printed = subprocess.run([sys.executable, "-m", "foremoe.supported"], capture_output=True, text=True, check=True)
    assert printed.stdout == table() + "\n"
    assert len(printed.stdout.splitlines()) == 2 + len(FRAMEWORKS)
