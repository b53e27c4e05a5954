"""In place of SGLang's compiled kernels, which need CUDA: every name can be imported, no function can be called."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Missing:
    def __init__(self, name):
        self._name = name

    def __call__(self, *_, **__):
        raise NotImplementedError(f"sgl_kernel.{self._name}")

    def __getattr__(self, name):
        return _named(f"{self._name}.{name}", name)


def _named(path, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(path)


def __getattr__(name):
    return _named(name, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())
