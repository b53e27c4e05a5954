"""Runs a function when a module has been imported. Only the standard library, since foremoe.ray sends this module."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls functions, by name of a module, each time that module has been executed. An error ends the import."""

    def __init__(self, actions: dict[str, Callable[[], object]]) -> None:
        self._actions = actions

    def install(self) -> None:
        """Acts at once for modules that are imported already."""
        sys.meta_path.insert(0, self)
        for name, action in self._actions.items():
            if name in sys.modules:
                action()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._actions[fullname]()

        loader: Any = spec.loader
        loader.exec_module = execute_and_act
        return spec
