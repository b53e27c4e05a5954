"""Tests foremoe.verl with a fake verl package that imports external modules like verl."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest

import foremoe.verl

VERL = {
    "verl/__init__.py": """
        import importlib, os
        __version__ = "0.9.1"
        for name in os.environ["VERL_USE_EXTERNAL_MODULES"].split(","):
            importlib.import_module(name)
        is_whole = True
    """,
    "verl/workers/__init__.py": "",
    "verl/workers/engine/__init__.py": "",
    "verl/workers/engine/megatron/__init__.py": "",
    "verl/workers/engine/megatron/transformer_impl.py": """
        import verl
        imported_by_a_whole_verl = verl.is_whole
    """,
    "verl/workers/actor/__init__.py": "",
    "verl/workers/actor/megatron_actor.py": "",
}


def run(folder: pathlib.Path, job: str, **environment: str) -> subprocess.CompletedProcess[str]:
    for name, text in VERL.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    found = os.pathsep.join([str(folder), *filter(None, sys.path)])
    own = {"PYTHONPATH": found, "VERL_USE_EXTERNAL_MODULES": "foremoe.verl", **environment}
    command = [sys.executable, "-c", textwrap.dedent(job)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "module", ["verl.workers.engine.megatron.transformer_impl", "verl.workers.actor.megatron_actor"]
)
def test_the_schedule_is_wrapped_when_verl_imports_its_engine(tmp_path: pathlib.Path, module: str) -> None:
    job = f"""
        import importlib, sys
        import verl
        early = {{"torch", "megatron", "foremoe.megatron", "verl.workers"}} & set(sys.modules)
        assert "foremoe.verl" in sys.modules and not early, early
        import foremoe.verl
        foremoe.verl.init = lambda name: print("wrapped", name, name in sys.modules)
        importlib.import_module({module!r})
        importlib.import_module({module!r})
    """
    ran = run(tmp_path, job)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"wrapped {module} True\n"


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_a_missing_package_is_reported_on_use() -> None:
    with pytest.raises(ImportError, match=r"foremoe\.verl needs verl .*: No module named 'verl'"):
        foremoe.verl.init(foremoe.verl.ENGINE)


def test_another_version_of_verl_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREMOE_ATTACH", "mode=active")
    for version in ("0.7.1", "0.70.0", "1.0.0"):
        monkeypatch.setitem(sys.modules, "verl", types.SimpleNamespace(__version__=version))  # type: ignore[misc]
        with pytest.raises(ImportError, match=f"needs verl .* not {version}"):
            foremoe.verl.init(foremoe.verl.ENGINE)
