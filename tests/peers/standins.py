"""Imports one engine's own files on a machine that has none of what the rest of the engine needs.

Serving engines import GPU kernels at once. Here only the named modules are the engine's own; every other import they
make gets a module of stand-ins, which do nothing, except for the few that the caller provides.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class StandIn(type):
    """A class whose attributes, items and results are itself; as a decorator it leaves things as they are."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and isinstance(args[0], (type, types.FunctionType)) else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __bool__(cls) -> bool:
        return False


class Nothing(metaclass=StandIn):
    pass


class StandInModule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """
    Args:
        engine (`str`): top-level package.
        own (set of `str`): its modules that are imported as they are.
        absent (tuple of `str`): other top-level packages to stand in for.
        provided (`dict`): content of modules, by name.
    """

    def __init__(self, engine: str, own: set[str], absent: tuple[str, ...], provided: dict[str, dict[str, Any]]):
        self.engine, self.own, self.absent, self.provided = engine, own, absent, provided
        self.place = importlib.machinery.PathFinder.find_spec(engine).submodule_search_locations[0]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self.own:
            file = f"{self.place}/{'/'.join(name.split('.')[1:])}.py"
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in (self.engine, *self.absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = StandInModule(spec.name)
        vars(module).update(self.provided.get(spec.name, {}))
        return module

    def exec_module(self, module: Any) -> None:
        pass

    def install(self) -> None:
        sys.meta_path.insert(0, self)
