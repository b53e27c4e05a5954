"""foremoe.ray in workers of a Ray cluster on this machine, with a fake of a trainer's package and of its adapter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import foremoe

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs ray, which is in the environment frameworks", allow_module_level=True)

TRAINER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
DRIVER = f"""
import importlib, importlib.util, os, sys
import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={{"env_vars": {{"OF_THE_JOB": "1"}}}})

class Worker:
    def is_wrapped(self):
        importlib.util.find_spec("{TRAINER}")
        own = importlib.import_module("{TRAINER}").get_forward_backward_func
        return own.__qualname__, os.environ.get("FOREMOE_ATTACH"), os.environ["OF_THE_JOB"], os.environ.get("OF_ACTOR")

    def imports(self, name):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return str(error)
        return ""

    def nested(self):
        return ray.get(ray.remote(num_cpus=0)(Worker).options(runtime_env={{"env_vars": {{"OF_ACTOR": "2"}}}})
                       .remote().is_wrapped.remote())

actor = ray.remote(num_cpus=0)(Worker)
print("wrapped", *ray.get(actor.remote().is_wrapped.remote()))
print("nested", *ray.get(actor.remote().nested.remote()))
without = actor.options(runtime_env={{"env_vars": {{"PYTHONPATH": os.environ["WITHOUT_FOREMOE"]}}}}).remote()
print("other module", ray.get(without.imports.remote("skyrl.backends")))
print("trainer", ray.get(without.imports.remote("{TRAINER}")))
"""


def run(folder: Path, driver: str, *paths: Path, hook: str = "foremoe.ray.hook") -> subprocess.CompletedProcess[str]:
    """Runs a driver with RAY_RUNTIME_ENV_HOOK. paths: what its Python finds beside the trainer's package."""
    module = folder.joinpath(*TRAINER.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text("def get_forward_backward_func():\n    raise NotImplementedError\n")
    environment = {
        **os.environ, "PYTHONPATH": ":".join(map(str, (folder, *paths))), "RAY_RUNTIME_ENV_HOOK": hook,
        "FOREMOE_ATTACH": "mode=active,guest_slots=2", "WITHOUT_FOREMOE": str(folder), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(driver)], env=environment, capture_output=True, text=True, timeout=600
    )


PACKAGE = Path(foremoe.__file__).parent.parent


@pytest.mark.parametrize("hook", ["foremoe.ray.hook", "foremoe.ray.uv_hook"])
def test_workers_wrap_the_schedule_of_their_trainer(tmp_path: Path, hook: str) -> None:
    done = run(tmp_path, DRIVER, PACKAGE, hook=hook)
    wrapped = "install.<locals>.looked_up mode=active,guest_slots=2 1"
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"wrapped {wrapped} None", f"nested {wrapped} 2", "other module "], done.stderr
    assert lines[3].startswith(f"trainer {TRAINER}: RAY_RUNTIME_ENV_HOOK is of foremoe.ray, but this worker's Python")
    assert "has no foremoe (No module named 'foremoe'); install it there, or unset the variable" in lines[3]


def test_a_job_with_a_setup_of_its_own_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "import ray; ray.init(runtime_env={'worker_process_setup_hook': 'os.getpid'})", PACKAGE)
    assert "RuntimeError: foremoe.ray.hook: runtime_env has a worker_process_setup_hook; expected none" in done.stderr
