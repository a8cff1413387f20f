"""Pinning: guards on what running code may read of things that are not copied.

Classes, functions of classes, modules that a mod imports, libraries: they run as they are, and each attribute
of theirs that some code mentions must stay as it is. So must the process's environment and torch's modes,
where the code asks for them.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.trace.attributes import class_data
from fa4flex.codegen.trace.mentions import (
    all_attributes,
    asks_for_modes,
    class_code,
    from_library,
    from_torch,
    function_in,
    globals_of,
    imported,
    is_users_module,
    mentioned,
    steps_to_function,
)
from fa4flex.codegen.trace.origin import is_library
from fa4flex.codegen.trace.paths import Guard, Path
from fa4flex.codegen.trace.snapshot import Opaque, plain, snapshot

LEFT_ALONE = (str, bytes, BuiltinFunctionType, enum.Enum, torch.dtype, torch.device, BaseException)
STORES = ("_parameters", "_buffers", "_modules")
"""Dictionaries of an nn.Module whose entries are its attributes."""


class Pins:
    """Guards on what runs as it is. Of objects only attributes in `names` are looked at; `mentioned` are the
    names that the code which was found mentions."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names: frozenset[str] | None = None if all_attributes(names) else names
        self.mentioned: set[str] = set()
        self.tensors: dict[int, tuple[Tensor, str, Path]] = {}
        """Captured tensors by id, with what the user would call them, and where they were found first."""
        self.guards: list[Guard] = []
        self.opaque: str | None = None
        """Description of a capture whose change nobody would notice; None if there is none."""
        self.device: torch.device | None = None
        self.asking: list[dict[str, Any]] = []
        """Globals of functions that run as they are and ask for types."""
        self.grad_mode = False
        """True if code asks whether gradients are recorded."""
        self._first: dict[int, Path] = {}
        self._alive: list[Any] = []

    def _guard(self, kind: str, path: Path, constant: Any = None) -> None:
        if path.kind != "constant":
            self.guards.append(Guard(kind, path, constant))

    def _as_it_is(self, thing: Any, path: Path) -> Any:
        """`thing`, compared by value at each call."""
        if isinstance(thing, enum.Enum) and id(thing) not in self._first:
            self._enumerated(thing, path)
        try:
            if plain(thing):  # no snapshot is to be taken at each call
                self._guard("equal", path, thing)
            else:
                self._guard("value", path, snapshot(thing))
        except Opaque as what:
            self.opaque = self.opaque or str(what)
        return thing

    def _enumerated(self, thing: enum.Enum, path: Path) -> None:
        """A member is told by its identity, but its class has code, and its value may be a container."""
        self._first[id(thing)] = path
        self._class_code(type(thing))
        for key, x in vars(thing).items():
            if key == "_value_" or self.names is None or key in self.names:
                self._pin(x, key, path.attribute("__dict__").item(key))

    def _tensor(self, tensor: Tensor, name: str, path: Path) -> Tensor:
        self.tensors[id(tensor)] = tensor, name, path
        self.device = self.device or tensor.device
        own = vars(tensor)
        if own or self.names is None:
            self._nothing_more(tensor, path)
            for key in self._looked_at(own):
                self._pin(own[key], f"{name}.{key}", path.attribute("__dict__").item(key))
        if not from_library(type(tensor)):
            self._class(type(tensor), type(tensor).__name__, Path(None, "constant", type(tensor)))
        return tensor

    def _names(self, cls: type) -> frozenset[str]:
        """Names that code may look up in a class."""
        return frozenset(dir(cls)) if self.names is None else self.names

    def _looked_at(self, attributes: Any) -> list[str]:
        """Those of an object's attributes that code may read."""
        names = self.names
        return [key for key in attributes if names is None or key in names or key in STORES]

    def _class(self, thing: type, name: str, path: Path) -> Any:
        """A class is used as it is: its plain attributes are compared by value at each call."""
        self._guard("is", path, thing)
        self._class_code(thing)
        self._class_code(type(thing))
        result = class_data(type(thing), self._names(type(thing))) | class_data(thing, self._names(thing))
        for key, x in result.items():
            self._pin(x, f"{name}.{key}", path.attribute(key))
        return thing

    def _asks_for_class(self, cls: type) -> bool:
        """True if code may read attributes of the class of an object, rather than of the object."""
        if self.names is None or not {"type", "__class__", "super"}.isdisjoint(self.names):
            return True
        results = (vars(base)[name] for base, name in class_code(cls, self.names))
        return any(isinstance(member, classmethod) for member in results)

    def _class_code(self, cls: type) -> None:
        """Functions of a class run as they are: they, and globals that they read, are compared by value."""
        for base, name in class_code(cls, self._names(cls)):
            self._member(cls, base, name)
        if self.names is None:
            for base in (base for base in cls.__mro__ if not from_library(base)):
                self._nothing_more(base, Path(None, "constant", base))

    def _member(self, cls: type, base: type, name: str) -> None:
        """Guard what a class above `cls` has under a name, and that no class between comes to hide it."""
        member = vars(base)[name]
        function = function_in(member)
        if function is None:  # a descriptor of a class of its own
            self._pin(member, name, Path(None, "constant", member))
            return
        self._pin_code(function, Path(None, "constant", function))
        if is_library(function.__code__.co_filename):
            return
        first = next(c for c in cls.__mro__ if name in vars(c)) is base
        place = Path(None, "constant", cls if first else base).attribute(name)
        for step in steps_to_function(member):
            place = place.attribute(step)
        self._guard("code", place, function.__code__)
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
            self._guard("is", place, function)

    def _nothing_more(self, thing: Any, path: Path) -> None:
        """Guard that code which finds attributes by computed names finds the ones that there are, and that
        none comes to hide a function of the class."""
        own = getattr(thing, "__dict__", None)
        if own is not None and self.names is None:
            self._guard("keys", path.attribute("__dict__"), tuple(own))
        elif own is not None:
            for base, name in class_code(type(thing), self.names or frozenset()):
                if not (name in own or name.startswith("__") or isinstance(vars(base)[name], property)):
                    self._guard("absent", path.attribute("__dict__"), name)

    # --- modules ----------------------------------------------------------------------------------------

    def _pin_module(self, thing: ModuleType, name: str, path: Path) -> None:
        """Guard what code may read of a module: of a library, numbers, what the user put there, and modes."""
        self._guard("is", path, thing)
        own, users = vars(thing), is_users_module(thing)
        flags = thing is torch.backends
        if flags or (users and (type(thing) is not ModuleType or "__getattr__" in own)):
            self.opaque = self.opaque or f"the module {name}, which computes its attributes"
        for key in [key for key in (self.names or self.mentioned) if key in own]:
            x, place = own[key], path.attribute(key)
            of_user = isinstance(x, FunctionType) and not is_library(x.__code__.co_filename)
            below = isinstance(x, ModuleType) and from_torch(x)
            if users or of_user or below or type(x) in (bool, int, float, str):
                self._pin(x, f"{name}.{key}", place)
            elif asks_for_modes(thing, key):
                self._mode(thing, key, path)

    def _mode(self, module: ModuleType, key: str, path: Path) -> None:
        """Guard that a function of torch without arguments still answers what it answers now."""
        self.grad_mode = self.grad_mode or key == "is_grad_enabled"
        try:
            if module is not torch or "autocast" in key:  # it may take arguments, or wake a device
                raise TypeError
            self._as_it_is(getattr(module, key)(), path.result(key))
        except (TypeError, RuntimeError):
            self.opaque = self.opaque or f"what {module.__name__}.{key}() answers"

    def _code(self, function: FunctionType) -> None:
        """Note what code mentions, the modules that it imports, and whether it asks for the environment."""
        code = function.__code__
        names = mentioned(code)
        self.mentioned.update(names)
        if not is_library(code.co_filename) and not {"environ", "environb", "getenv"}.isdisjoint(names):
            self._environment()
        if not {"import_module", "__import__"}.isdisjoint(names):
            self.opaque = self.opaque or "a module that the mod imports by a computed name"
        for name in imported(code, function.__globals__.get("__package__")):
            module, _, part = name.partition(":")
            there = sys.modules.get(module)
            if there is None or (part and not hasattr(there, part)):
                self.opaque = self.opaque or f"the module {name}, which the mod is the first to import"
                continue
            path = Path(None, "constant", sys.modules).item(module)
            if not part:
                self._pin(there, module, path)
            elif isinstance(getattr(there, part), ModuleType):
                self._pin(getattr(there, part), part, path.attribute(part))

    def _environment(self) -> None:
        now = dict(os.environ._data)  # type: ignore[attr-defined]
        self._guard("environment", Path(None, "constant", os.environ).attribute("_data"), now)

    def _no_globals(self, function: FunctionType, inside: Path) -> None:
        """Guard that globals do not come to hide builtins. What is found by computed names is not watched."""
        for name in globals_of(function.__code__):
            if name in ("globals", "eval", "exec"):
                self.opaque = self.opaque or f"a name that {name}() looks up"
            if name not in function.__globals__:
                self._guard("absent", inside, name)

    def _pin_code(self, function: FunctionType, path: Path) -> None:
        if id(function) in self._first:
            return
        self._alive.append(function)
        self._first[id(function)] = path
        self._code(function)
        library = is_library(function.__code__.co_filename)
        for at, cell in enumerate(function.__closure__ or ()):
            with contextlib.suppress(ValueError):  # a cell without contents
                if not library or isinstance(cell.cell_contents, FunctionType):  # what a decorator was given
                    self._pin(cell.cell_contents, function.__code__.co_freevars[at], path.cell(at))
        if library:
            return
        space, inside = function.__globals__, path.attribute("__globals__")
        if "type" in globals_of(function.__code__) and "type" not in space:
            self.asking.append(space)
        for name in mentioned(function.__code__):
            if name in space:
                self._pin(space[name], name, inside.item(name))
        self._no_globals(function, inside)
        for at, x in enumerate(function.__defaults__ or ()):
            self._pin(x, "default", path.attribute("__defaults__").item(at))
        for key, x in (function.__kwdefaults__ or {}).items():
            self._pin(x, key, path.attribute("__kwdefaults__").item(key))

    def _pin(self, thing: Any, name: str, path: Path) -> None:
        """Guard what code that is not copied may read: all of it by value, but for tensors."""
        if isinstance(thing, Tensor):
            if id(thing) not in self.tensors:
                self._alive.append(thing)
                self._tensor(thing, name, path)
        elif isinstance(thing, FunctionType):
            self._guard("is", path, thing)
            self._pin_code(thing, path)
        elif isinstance(thing, MethodType):
            self._pin(thing.__func__, name, path.attribute("__func__"))
            self._pin(thing.__self__, name, path.attribute("__self__"))
        elif id(thing) in self._first:
            self._guard("is", path, thing)
        elif isinstance(thing, type):
            self._first[id(thing)] = path
            self._alive.append(thing)
            self._class(thing, name, path)
        elif isinstance(thing, ModuleType):
            self._first[id(thing)] = path
            self._pin_module(thing, name, path)
        elif hasattr(thing, "__dict__") and not isinstance(thing, (ModuleType, *LEFT_ALONE)):
            self._first[id(thing)] = path
            self._alive.append(thing)
            self._guard("type", path, type(thing))
            self._class_code(type(thing))
            self._nothing_more(thing, path)
            for key in self._looked_at(vars(thing)):
                self._pin(vars(thing)[key], f"{name}.{key}", path.attribute("__dict__").item(key))
        elif type(thing) in (list, tuple, dict) and any(isinstance(x, Tensor) for x in _items(thing)):
            pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
            for at, x in pairs:
                self._pin(x, f"{name}[{at!r}]", path.item(at))
        else:
            self._as_it_is(thing, path)


def _items(thing: Any) -> list[Any]:
    return list(thing.values() if isinstance(thing, dict) else thing)
