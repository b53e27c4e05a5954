"""Tests foremoe.verl with a fake verl package that imports external modules and registers engines like verl."""

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
    "verl/workers/engine/__init__.py": """
        import verl
        from .base import EngineRegistry
        imported_by_a_whole_verl = verl.is_whole
        EngineRegistry.register("language_model", "megatron", "cuda")("verl's own")
    """,
    "verl/workers/engine/base.py": """
        class EngineRegistry:
            _engines = {}

            @classmethod
            def register(cls, model_type, backend, device, vendor=None):
                engines = cls._engines.setdefault(model_type, {}).setdefault(backend, {})
                return lambda engine: engines.setdefault((device, vendor) if vendor else device, engine)
    """,
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


def test_the_engine_is_registered_when_verl_imports_its_engines(tmp_path: pathlib.Path) -> None:
    job = """
        import sys, types
        sys.modules["foremoe.verl.engine"] = engine = types.ModuleType("foremoe.verl.engine")
        engine.Engine = "planned"
        import verl
        early = {"torch", "megatron", "foremoe.megatron", "verl.workers.engine"} & set(sys.modules)
        assert "foremoe.verl" in sys.modules and not early, early
        import verl.workers.engine as engines
        assert engines.imported_by_a_whole_verl
        import foremoe.verl
        foremoe.verl.register()
        print(engines.EngineRegistry._engines)
    """
    ran = run(tmp_path, job, VERL_ENGINE_VENDOR="foremoe")
    assert ran.returncode == 0, ran.stderr
    own = {"cuda": "verl's own", ("cuda", "foremoe"): "planned"}
    assert ran.stdout.strip() == str({"language_model": {"megatron": own}})
    without = run(tmp_path, "import verl, verl.workers.engine as e; print(e.EngineRegistry._engines)")
    assert "planned" not in without.stdout
    assert "VERL_ENGINE_VENDOR is not foremoe, so verl's own engines are used" in without.stderr


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_a_missing_package_is_reported_on_use() -> None:
    with pytest.raises(ImportError, match=r"foremoe\.verl needs verl 0\.9 or newer and .*: No module named 'verl'"):
        foremoe.verl.register()


def test_an_older_version_of_verl_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.8.2", "0.8.0.dev", "0.7.1"):
        monkeypatch.setitem(sys.modules, "verl", types.SimpleNamespace(__version__=version))  # type: ignore[misc]
        with pytest.raises(ImportError, match=f"needs verl 0.9 or newer and .*: verl is {version}"):
            foremoe.verl.register()
