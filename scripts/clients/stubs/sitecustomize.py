"""Stand-ins for modules that an engine imports and that cannot be installed beside a CPU build of PyTorch.

Python imports this in each process whose PYTHONPATH holds this folder. FA4FLEX_ABSENT names packages, with
commas between them: importing one, or anything inside it, gives a module whose attributes are classes that
raise when they are made or called. What a test runs must need none of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

ABSENT = frozenset(filter(None, os.environ.get("FA4FLEX_ABSENT", "").split(",")))


class Absent(type):
    """A class of an absent module: it may be subclassed, annotated with, and asked for attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} is not installed: it is a stand-in of scripts/clients")


def absent(name: str) -> type:
    return Absent(name, (), {})


class Module(ModuleType):
    """An absent module."""

    __version__ = "0.0.0"
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds absent modules."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if ABSENT:
    sys.meta_path.insert(0, Finder())
