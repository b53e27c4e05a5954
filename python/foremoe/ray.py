"""Loads ForeMoE in the workers of trainers that run on Ray: NeMo-RL, SkyRL, ROLL, RLinf and AReaL.

    export RAY_RUNTIME_ENV_HOOK=foremoe.ray.hook FOREMOE_ATTACH=mode=active,guest_slots=1

in the environment of the process that calls ray.init(). Without FOREMOE_ATTACH, training runs in shadow mode. Its
values are arguments of foremoe.megatron.attach(): numbers, null, true and false; anything else is a string.

Ray calls hook() in ray.init(). Each worker process of the job then waits for the import of a trainer's module, and
wraps the schedule that this module uses (foremoe.megatron.schedule). Other workers, such as those of inference engines,
need no ForeMoE.

If a driver runs under `uv run`, Ray by default starts workers by the same `uv run` (SkyRL), and calls no other hook.
uv_hook() does both:

    export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_RUNTIME_ENV_HOOK=foremoe.ray.uv_hook
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from ._import_hook import WhenImported
from ._variable import VARIABLE

ADAPTERS = {
    "nemo_rl.models.megatron.train": "foremoe.nemo_rl",
    "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper": "foremoe.skyrl",
    "roll.distributed.strategy.megatron_strategy": "foremoe.roll",
    "swift.megatron.trainers.base": "foremoe.swift",
    "rlinf.workers.megatron_worker": "foremoe.rlinf",
    "rlinf.workers.actor.ma_megatron_actor_worker": "foremoe.rlinf",
    "areal.engine.megatron_engine": "foremoe.areal",
}
"""Modules in which trainers look up the schedule, and the adapter of each, whose init() wraps it."""


def hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Returns Ray's runtime environment with this job's setup of workers.

    Raises RuntimeError if the environment has a setup of its own.
    """
    from ray import cloudpickle

    environment = dict(runtime_env or {})
    if environment.get("worker_process_setup_hook"):
        raise RuntimeError("foremoe.ray.hook: runtime_env has a worker_process_setup_hook; expected none")
    for part in (WhenImported, hook):
        cloudpickle.register_pickle_by_value(sys.modules[part.__module__])  # workers may lack foremoe
    given = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
    environment["env_vars"] = {**(environment.get("env_vars") or {}), **given}
    environment["worker_process_setup_hook"] = setup
    return environment


def uv_hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Does the same as hook(), after Ray's own hook for `uv run`."""
    from ray._private.runtime_env import uv_runtime_env_hook

    return hook(uv_runtime_env_hook.hook(runtime_env))


def setup() -> None:
    """Wraps the schedule of a trainer when its module is imported. Ray calls this in each worker process."""

    def load(adapter: str, trainer: str) -> None:
        try:
            importlib.import_module(adapter).init()
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "foremoe":
                raise
            raise ImportError(
                f"{trainer}: RAY_RUNTIME_ENV_HOOK is of foremoe.ray, but this worker's Python {sys.executable} has no "
                f"foremoe ({error}); install it there, or unset the variable"
            ) from error

    WhenImported({name: functools.partial(load, of, name) for name, of in ADAPTERS.items()}).install()
