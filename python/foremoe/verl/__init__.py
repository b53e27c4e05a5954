"""Planned steps for the Megatron engines of verl, from the routes that R3 replays, and shadow mode.

    export VERL_USE_EXTERNAL_MODULES=foremoe.verl VERL_ENGINE_VENDOR=foremoe

These variables select shadow mode: the actor's update counts routes, and verl's metrics include the estimated benefit
of balancing, such as actor/foremoe/rho_vanilla and actor/foremoe/rho_planned. A third variable sets other arguments of
foremoe.megatron.attach():

    export FOREMOE_ATTACH=mode=active,guest_slots=1,residency=static

Values are numbers, null (None: `cluster=null`), true and false; anything else is a string.

verl imports this module in each of its processes while verl itself is being imported. So this module imports no verl
module at that time; it registers the engine after verl.workers.engine has been imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from foremoe.supported import VERL

VENDOR = "foremoe"
_ENGINES = "verl.workers.engine"
_log = logging.getLogger("foremoe")


def register() -> None:
    """Adds the engine to verl's registry, once.

    Raises ImportError, with the missing package or version, if verl or its Megatron engine cannot be imported.
    """
    needs = f"foremoe.verl needs verl {VERL.accepted_in('shadow')} and what its Megatron engine imports"
    try:
        import verl

        if not VERL.accepts(verl.__version__, "shadow"):  # the engine checks the range of its mode
            raise ImportError(f"verl is {verl.__version__}")
        from verl.workers.engine.base import EngineRegistry

        from .engine import Engine
    except ImportError as error:
        raise ImportError(f"{needs}: {error}") from error
    registered = EngineRegistry._engines["language_model"]["megatron"]
    if ("cuda", VENDOR) not in registered:
        EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor=VENDOR)(Engine)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Import hook that calls register() after verl's engines have been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ENGINES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        loader: Any = spec.loader
        loader.exec_module = execute_and_register
        return spec


if os.environ.get("VERL_ENGINE_VENDOR") != VENDOR:
    if "verl" in sys.modules:
        _log.warning("foremoe.verl: VERL_ENGINE_VENDOR is not %s, so verl's own engines are used", VENDOR)
elif _ENGINES in sys.modules:
    register()
else:
    sys.meta_path.insert(0, _WhenImported())
