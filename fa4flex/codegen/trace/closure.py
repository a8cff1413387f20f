"""Lifting: a copy of the user's function in which captured numbers are proxies.

Closure cells, default arguments, referenced globals, functools.partial arguments, attributes of a bound
`self`, and the containers among them are copied with every int and float replaced by a Number. Nested
functions are lifted too. The originals are never touched; what the mod stores into the copies shows up in
`Lifter.check_unchanged`.
"""

from __future__ import annotations

import dis
import enum
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from fa4flex.codegen.trace.dispatch import registered
from fa4flex.codegen.trace.functions import applying, is_apply
from fa4flex.codegen.trace.origin import first_line, is_library
from fa4flex.codegen.trace.value import Number
from fa4flex.errors import Origin, TraceError

MAX_ITEMS = 1024
"""Containers longer than this keep their numbers as constants."""
MAX_OBJECTS, MAX_DEPTH = 20_000, 50
"""Beyond these, what the mod captured is used as it is, its numbers as constants."""
_LEFT_ALONE = (
    str,
    bytes,
    type,
    ModuleType,
    BuiltinFunctionType,
    enum.Enum,
    torch.dtype,
    torch.device,
    BaseException,
)


@dataclass
class _Globals:
    """A module's globals, copied once for all its functions; `before` is what the copy should still hold."""

    copy: dict[str, Any]
    before: dict[str, Any]
    lifted: set[str]


class Lifter:
    """Copies a callable; numbers named in `constant` (all of them, if `freeze`) stay plain numbers."""

    def __init__(self, constant: set[str], freeze: bool) -> None:
        self.constant, self.freeze = constant, freeze
        self.tensor_names: dict[int, str] = {}
        self.numbers: dict[str, int | float] = {}
        self.device: torch.device | None = None
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._depth = 0
        self._codes: list[CodeType] = []
        self._spaces: dict[int, _Globals] = {}
        self._watched: list[tuple[str, str, Callable[[], dict[Any, Any]], dict[Any, Any]]] = []

    def lift(self, thing: Any, name: str) -> Any:
        """A copy of `thing` with proxies for its numbers; `name` is what the user would call it."""
        if type(thing) in (int, float) or isinstance(thing, numpy.number):
            return self._number(thing, name)
        if thing is None or isinstance(thing, (bool, *_LEFT_ALONE)):
            return thing
        if id(thing) in self._memo:
            return self._memo[id(thing)]
        if len(self._memo) > MAX_OBJECTS or self._depth > MAX_DEPTH:
            return thing
        self._alive.append(thing)  # ids in the memo must not be reused
        self._memo[id(thing)] = thing
        self._depth += 1
        lifted = self._copy(thing, name)
        self._depth -= 1
        self._memo[id(thing)] = lifted
        return lifted

    def _number(self, value: Any, name: str) -> Any:
        value = value.item() if isinstance(value, numpy.number) else value
        if name in self.numbers:
            name = next(
                f"{name}#{i}" for i in range(2, len(self.numbers) + 3) if f"{name}#{i}" not in self.numbers
            )
        self.numbers[name] = value
        # An infinite or NaN constant is structure (-inf masks), not a parameter that varies.
        if (
            self.freeze
            or name in self.constant
            or not math.isfinite(value)
            or not isinstance(value, (int, float))
        ):
            return value
        return Number(value, {name: value})

    def _copy(self, thing: Any, name: str) -> Any:
        if isinstance(thing, Tensor):
            return self._tensor(thing, name)
        if is_apply(thing):
            return applying(thing.__self__)
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if isinstance(thing, MethodType):
            return MethodType(self.lift(thing.__func__, name), self.lift(thing.__self__, name))
        if isinstance(thing, functools.partial):
            return self._partial(thing, name)
        if isinstance(thing, (list, tuple, dict, set)):
            return self._container(thing, name)
        return self._object(thing, name)

    def _tensor(self, tensor: Tensor, name: str) -> Tensor:
        self.tensor_names[id(tensor)] = name
        self.device = self.device or tensor.device
        return tensor

    # --- functions ----------------------------------------------------------------------------------

    def _function(self, function: FunctionType) -> Any:
        lowering = registered(function)
        if lowering is not None:
            return lowering
        library = is_library(function.__code__.co_filename)
        if library and not function.__closure__:
            return function
        cells, fresh = self._cells(function)
        namespace = function.__globals__ if library else self._space(function).copy
        lifted = FunctionType(function.__code__, namespace, function.__name__, None, cells)
        self._memo[id(function)] = lifted  # before its contents: a function may refer to itself
        self._codes.append(function.__code__)
        lifted.__qualname__, lifted.__module__ = function.__qualname__, function.__module__
        lifted.__dict__.update(
            {key: self.lift(x, key) if callable(x) else x for key, x in function.__dict__.items()}
        )
        lifted.__defaults__ = self._items(function.__defaults__, _default_names(function))
        keyword = function.__kwdefaults__
        lifted.__kwdefaults__ = {key: self.lift(x, key) for key, x in keyword.items()} if keyword else None
        for name, original in fresh:
            self._fill(name, original)
        if not library:
            self._lift_globals(function)
        return lifted

    def _cells(self, function: FunctionType) -> tuple[tuple[CellType, ...], list[tuple[str, CellType]]]:
        """Copies of the closure's cells, one per original, shared as it was; and which are new."""
        cells, fresh = [], []
        for name, original in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(original) not in self._memo:
                self._memo[id(original)] = CellType()
                self._alive.append(original)
                fresh.append((name, original))
            cells.append(self._memo[id(original)])
        return tuple(cells), fresh

    def _fill(self, name: str, original: CellType) -> None:
        cell: CellType = self._memo[id(original)]
        try:
            contents = original.cell_contents
        except ValueError:  # a variable that the enclosing function has not assigned
            return
        cell.cell_contents = lifted = self.lift(contents, name)
        self._watch("the closure variable", "STORE_DEREF", lambda: {name: cell.cell_contents}, {name: lifted})

    def _space(self, function: FunctionType) -> _Globals:
        original = function.__globals__
        if id(original) not in self._spaces:
            space = self._spaces[id(original)] = _Globals(dict(original), dict(original), set())
            self._alive.append(original)
            self._watch("the global variable", "STORE_GLOBAL", lambda: space.copy, space.before)
        return self._spaces[id(original)]

    def _lift_globals(self, function: FunctionType) -> None:
        space = self._space(function)
        for name in _mentioned(function.__code__):
            if name in function.__globals__ and name not in space.lifted:
                space.lifted.add(name)
                space.copy[name] = space.before[name] = self.lift(function.__globals__[name], name)

    def _watch(
        self, what: str, instruction: str, now: Callable[[], dict[Any, Any]], before: dict[Any, Any]
    ) -> None:
        self._watched.append((what, instruction, now, before))

    def _items(self, items: tuple[Any, ...] | None, names: list[str]) -> tuple[Any, ...] | None:
        return None if items is None else tuple(self.lift(x, n) for x, n in zip(items, names, strict=True))

    def _partial(self, thing: functools.partial[Any], name: str) -> functools.partial[Any]:
        args = (self.lift(x, f"{name}.args[{i}]") for i, x in enumerate(thing.args))
        keywords = {key: self.lift(x, key) for key, x in thing.keywords.items()}
        return functools.partial(self.lift(thing.func, name), *args, **keywords)

    # --- containers and objects -----------------------------------------------------------------------

    def _container(self, thing: Any, name: str) -> Any:
        if len(thing) > MAX_ITEMS:
            return thing
        if type(thing) is dict:
            copy: dict[Any, Any] = {}
            self._memo[id(thing)] = copy
            of_module = name.endswith(("_parameters", "_buffers", "_modules"))
            copy.update(
                (key, self.lift(x, key if of_module else f"{name}[{key!r}]")) for key, x in thing.items()
            )
            self._watch(f"the dictionary {name}", "STORE_SUBSCR", lambda: copy, dict(copy))
            return copy
        if type(thing) is list:
            items: list[Any] = []
            self._memo[id(thing)] = items
            items.extend(self.lift(x, f"{name}[{i}]") for i, x in enumerate(thing))
            self._watch(
                f"the list {name}", "STORE_SUBSCR", lambda: dict(enumerate(items)), dict(enumerate(items))
            )
            return items
        if type(thing) is tuple or hasattr(thing, "_fields"):
            fields = getattr(thing, "_fields", None)
            names = [f"{name}.{f}" for f in fields] if fields else [f"{name}[{i}]" for i in range(len(thing))]
            lifted = [self.lift(x, n) for x, n in zip(thing, names, strict=True)]
            return type(thing)(*lifted) if hasattr(thing, "_fields") else tuple(lifted)
        return thing

    def _object(self, thing: Any, name: str) -> Any:
        """A shallow clone of an instance of a user's class or an nn.Module; others are used as they are."""
        cls = type(thing)
        slots = _slots(cls)
        # A copy of an object with a finaliser would release the original's resources when it dies.
        plain = cls.__new__ is object.__new__ and not hasattr(cls, "__del__")
        plain = plain and bool(slots or hasattr(thing, "__dict__"))
        if not plain or (_from_library(cls) and not isinstance(thing, torch.nn.Module)):
            return thing
        clone = object.__new__(cls)
        self._memo[id(thing)] = clone
        prefix = "" if name in ("", "mod") else f"{name}."
        for key, x in getattr(thing, "__dict__", {}).items():
            clone.__dict__[key] = self.lift(x, prefix + key)
        for key in slots:
            if hasattr(thing, key):
                object.__setattr__(clone, key, self.lift(getattr(thing, key), prefix + key))
        call = vars(cls).get("__call__")
        if isinstance(call, FunctionType):
            self._codes.append(call.__code__)
        self._watch("an attribute of the mod", "STORE_ATTR", lambda: _stored(clone), _stored(clone))
        return clone

    # --- after the call -------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Raise if the mod stored into a global, a closure variable, a container or an object it captured."""
        for what, instruction, now, before in self._watched:
            after = now()
            changed = [
                k for k in {**before, **after} if after.get(k, _MISSING) is not before.get(k, _MISSING)
            ]
            if changed:
                raise TraceError(
                    given=f"the mod changes {what}: {', '.join(map(str, changed))}",
                    expected="a mod without side effects: it runs once per (query, key) pair, in any order",
                    fix="return the value, or compute it outside the mod",
                    where=self._storing_line(instruction, changed[0]),
                )

    def _storing_line(self, instruction: str, name: Any) -> Origin | None:
        for code in self._codes:
            for inner in _nested(code):
                line = inner.co_firstlineno
                for step in dis.get_instructions(inner):
                    line = step.starts_line or line
                    if step.opname == instruction and step.argval in (name, None):
                        return Origin(inner.co_filename, line)
        return first_line(self._codes[0]) if self._codes else None


_MISSING = object()


def _stored(thing: Any) -> dict[str, Any]:
    """Attributes by name; a functools.cached_property that filled itself in is no side effect."""
    cls = type(thing)
    cached = (key for key in vars(thing)) if hasattr(thing, "__dict__") else ()
    plain = [key for key in cached if not isinstance(getattr(cls, key, None), functools.cached_property)]
    return {key: getattr(thing, key, _MISSING) for key in (*plain, *_slots(cls))}


def _slots(cls: type) -> list[str]:
    names = [n for c in cls.__mro__ for n in _as_tuple(c.__dict__.get("__slots__", ()))]
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _from_library(cls: type) -> bool:
    root = cls.__module__.partition(".")[0]
    return root in ("torch", "numpy", "builtins") or (root in sys.stdlib_module_names and root != "__main__")


def _default_names(function: FunctionType) -> list[str]:
    code, count = function.__code__, len(function.__defaults__ or ())
    return list(code.co_varnames[code.co_argcount - count : code.co_argcount])


def _nested(code: CodeType) -> Iterator[CodeType]:
    """`code` and the code of functions defined inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _nested(inner)


def _mentioned(code: CodeType) -> list[str]:
    """Names of globals that `code` may read, in order (attribute names are among them, harmlessly)."""
    return list(dict.fromkeys(name for inner in _nested(code) for name in inner.co_names))
