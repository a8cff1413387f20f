"""Lifting: a copy of the user's function in which captured numbers are proxies.

Closure cells, default arguments, referenced globals, functools.partial arguments, attributes of a bound
`self`, and the containers among them are copied with every int and float replaced by a Number. Nested
functions are lifted too. The originals are never touched; what the mod stores into the copies shows up in
`Lifter.check_unchanged`.

On the way every thing gets the path along which it was found, and what must stay as it is becomes a guard.
"""

from __future__ import annotations

import dis
import functools
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import (
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy
import torch
from torch import Tensor

from fa4flex.codegen.trace.attributes import MISSING, class_data, slots_of, stored_in
from fa4flex.codegen.trace.dispatch import registered
from fa4flex.codegen.trace.functions import applying, is_apply
from fa4flex.codegen.trace.mentions import (
    from_library,
    is_users_module,
    mentioned,
    nested,
    users_alone,
)
from fa4flex.codegen.trace.origin import first_line, is_library
from fa4flex.codegen.trace.paths import INT64, Path
from fa4flex.codegen.trace.pins import LEFT_ALONE, STORES, Pins
from fa4flex.codegen.trace.questions import kind, length
from fa4flex.codegen.trace.snapshot import plain
from fa4flex.codegen.trace.value import Number, plain_number
from fa4flex.errors import Origin, TraceError

MAX_ITEMS = 1024
"""Containers longer than this keep their numbers as constants."""
MAX_OBJECTS, MAX_DEPTH = 20_000, 50
"""Beyond these, what the mod captured is used as it is, and the trace serves one call."""
_STAND_INS = {"len": length, "type": kind}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_CONTAINERS = (
    torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential, torch.nn.ParameterList,
    torch.nn.ParameterDict,
)  # fmt: skip
"""Modules whose operators read attributes that no code mentions."""


@dataclass
class _Globals:
    """A module's globals, copied once for all its functions; `before` is what the copy should still hold."""

    copy: dict[str, Any]
    before: dict[str, Any]
    lifted: set[str]


class Lifter(Pins):
    """Copies a callable; numbers named in `constant` (all of them, if `freeze`) stay plain numbers.

    Of objects only attributes in `names` are looked at. `mentioned` are the names that the code which was
    found mentions: where there are new ones among them, lifting begins again with these. Modules that the
    lifted function calls are added to `called`, by id: it depends on more where they were there before.
    """

    def __init__(self, constant: set[str], freeze: bool, names: frozenset[str], called: set[int]) -> None:
        super().__init__(names)
        self.constant, self.freeze = constant, freeze
        self.called = called
        self.numbers: dict[str, tuple[int | float, Path]] = {}
        self._memo: dict[int, Any] = {}
        self._entire: set[int] = set()
        """Modules, and their stores, of which each attribute may be read, by id."""
        self._depth = 0
        self._codes: list[CodeType] = []
        self._spaces: dict[int, _Globals] = {}
        self._watched: list[tuple[str, str, Callable[[], dict[Any, Any]], dict[Any, Any]]] = []

    def lift(self, thing: Any, name: str, path: Path) -> Any:
        """A copy of `thing` with proxies for its numbers; `name` is what the user would call it."""
        if isinstance(thing, torch.SymBool):
            thing = bool(thing)
        if type(thing) in (int, float) or isinstance(thing, (numpy.number, torch.SymInt, torch.SymFloat)):
            return self._number(thing, name, path)
        if thing is None or (isinstance(thing, (bool, *LEFT_ALONE)) and not is_apply(thing)):
            return self._as_it_is(thing, path)
        if id(thing) in self._memo:
            if id(thing) in self._first:
                self._guard("same", path, self._first[id(thing)])
            return self._memo[id(thing)]
        if len(self._memo) > MAX_OBJECTS or self._depth > MAX_DEPTH:
            self.opaque = self.opaque or f"more than {MAX_OBJECTS} objects, or {MAX_DEPTH} inside each other"
            return thing
        self._alive.append(thing)  # ids in the memo must not be reused
        self._memo[id(thing)], self._first[id(thing)] = thing, path
        self._depth += 1
        lifted = self._copy(thing, name, path)
        self._depth -= 1
        self._memo[id(thing)] = lifted
        return lifted

    def _number(self, given: Any, name: str, path: Path) -> Any:
        value = given.item() if isinstance(given, numpy.number) else plain_number(given)
        if name in self.numbers:
            name = next(
                f"{name}#{i}" for i in range(2, len(self.numbers) + 3) if f"{name}#{i}" not in self.numbers
            )
        of_numpy = isinstance(given, numpy.number)
        self.numbers[name] = (value, path.result("item")) if of_numpy else (given, path)
        # An infinite or NaN constant is structure (-inf masks), not a parameter that varies.
        varies = isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < INT64
        if self.freeze or name in self.constant or not varies:
            self._as_it_is(given, path)
            return type(value)(given) if type(given) in (torch.SymInt, torch.SymFloat) else value
        self._guard("type", path, type(given))
        return Number(value, {name: value})

    def _copy(self, thing: Any, name: str, path: Path) -> Any:
        if isinstance(thing, Tensor):
            return self._tensor(thing, name, path)
        if is_apply(thing):
            self._guard("type", path, type(thing))
            self._guard("is", path.attribute("__self__"), thing.__self__)
            self._guard("equal", path.attribute("__name__"), "apply")
            return applying(thing.__self__)
        if isinstance(thing, FunctionType):
            return self._function(thing, path)
        if isinstance(thing, MethodType):
            function = self.lift(thing.__func__, name, path.attribute("__func__"))
            return MethodType(function, self.lift(thing.__self__, name, path.attribute("__self__")))
        if isinstance(thing, functools.partial):
            return self._partial(thing, name, path)
        if isinstance(thing, (list, tuple, dict, set)):
            return self._container(thing, name, path)
        if isinstance(thing, ModuleType):
            return self._module(thing, name, path)
        if isinstance(thing, type):
            return self._class(thing, name, path)
        return self._object(thing, name, path)

    # --- functions ----------------------------------------------------------------------------------

    def _function(self, function: FunctionType, path: Path) -> Any:
        lowering = registered(function)
        library = is_library(function.__code__.co_filename)
        if lowering is not None:
            self._guard("is", path, function)
            return lowering
        self._guard("code", path, function.__code__)
        if function is os.getenv:
            self._environment()
        if library and not function.__closure__:
            return function
        cells, fresh = self._cells(function, path)
        namespace = function.__globals__ if library else self._space(function).copy
        lifted = FunctionType(function.__code__, namespace, function.__name__, None, cells)
        self._memo[id(function)] = lifted  # before its contents: a function may refer to itself
        self._codes.append(function.__code__)
        self._code(function)
        lifted.__qualname__, lifted.__module__ = function.__qualname__, function.__module__
        read = self._looked_at(function.__dict__)
        for key, x in function.__dict__.items():
            inner = path.attribute("__dict__").item(key)
            lifted.__dict__[key] = self.lift(x, key, inner) if callable(x) or key in read else x
        self._nothing_more(function, path)
        self._defaults(function, lifted, path)
        for name, original, cell in fresh:
            self._fill(name, original, cell)
        if not library:
            self._lift_globals(function, path)
        return lifted

    def _defaults(self, function: FunctionType, lifted: FunctionType, path: Path) -> None:
        positional, keyword = function.__defaults__, function.__kwdefaults__
        if positional:
            inside = path.attribute("__defaults__")
            self._guard("length", inside, len(positional))
            named = zip(positional, _default_names(function), strict=True)
            lifted.__defaults__ = tuple(self.lift(x, n, inside.item(i)) for i, (x, n) in enumerate(named))
        if keyword:
            inside = path.attribute("__kwdefaults__")
            lifted.__kwdefaults__ = {key: self.lift(x, key, inside.item(key)) for key, x in keyword.items()}

    def _cells(
        self, function: FunctionType, path: Path
    ) -> tuple[tuple[CellType, ...], list[tuple[str, CellType, Path]]]:
        """Copies of the closure's cells, one per original, shared as it was; and which are new."""
        cells, fresh = [], []
        freevars = function.__code__.co_freevars
        for at, (name, original) in enumerate(zip(freevars, function.__closure__ or (), strict=True)):
            here = path.attribute("__closure__").item(at)
            if id(original) not in self._memo:
                self._memo[id(original)], self._first[id(original)] = CellType(), here
                self._alive.append(original)
                fresh.append((name, original, path.cell(at)))
            else:
                self._guard("same", here, self._first[id(original)])
            cells.append(self._memo[id(original)])
        return tuple(cells), fresh

    def _fill(self, name: str, original: CellType, path: Path) -> None:
        cell: CellType = self._memo[id(original)]
        try:
            contents = original.cell_contents
        except ValueError:
            self.opaque = self.opaque or f"the closure variable {name}, which nothing was assigned to"
            return
        cell.cell_contents = lifted = self.lift(contents, name, path)
        self._watch("the closure variable", "STORE_DEREF", lambda: {name: cell.cell_contents}, {name: lifted})

    def _space(self, function: FunctionType) -> _Globals:
        original = function.__globals__
        if id(original) not in self._spaces:
            seen = {**_STAND_INS, **original}
            space = self._spaces[id(original)] = _Globals(dict(seen), seen, set())
            self._alive.append(original)
            self._watch("the global variable", "STORE_GLOBAL", lambda: space.copy, space.before)
        return self._spaces[id(original)]

    def _lift_globals(self, function: FunctionType, path: Path) -> None:
        space, inside = self._space(function), path.attribute("__globals__")
        for name in mentioned(function.__code__):
            if name in function.__globals__ and name not in space.lifted:
                space.lifted.add(name)
                lifted = self.lift(function.__globals__[name], name, inside.item(name))
                space.copy[name] = space.before[name] = lifted
        self._no_globals(function, inside)

    def _watch(
        self, what: str, instruction: str, now: Callable[[], dict[Any, Any]], before: dict[Any, Any]
    ) -> None:
        self._watched.append((what, instruction, now, before))

    def _partial(self, thing: functools.partial[Any], name: str, path: Path) -> functools.partial[Any]:
        self._guard("type", path, type(thing))
        self._guard("length", path.attribute("args"), len(thing.args))
        self._guard("keys", path.attribute("keywords"), tuple(thing.keywords))
        args = (
            self.lift(x, f"{name}.args[{i}]", path.attribute("args").item(i))
            for i, x in enumerate(thing.args)
        )
        named = path.attribute("keywords")
        keywords = {key: self.lift(x, key, named.item(key)) for key, x in thing.keywords.items()}
        return functools.partial(self.lift(thing.func, name, path.attribute("func")), *args, **keywords)

    # --- containers and objects -----------------------------------------------------------------------

    def _container(self, thing: Any, name: str, path: Path) -> Any:
        if len(thing) > MAX_ITEMS:
            return self._as_it_is(thing, path)
        if type(thing) is dict:
            return self._dictionary(thing, name, path)
        if type(thing) is list:
            self._guard("type", path, list)
            self._guard("length", path, len(thing))
            items: list[Any] = []
            self._memo[id(thing)] = items
            items.extend(self.lift(x, f"{name}[{i}]", path.item(i)) for i, x in enumerate(thing))
            self._watch(
                f"the list {name}", "STORE_SUBSCR", lambda: dict(enumerate(items)), dict(enumerate(items))
            )
            return items
        if type(thing) is tuple and plain(thing):
            return self._as_it_is(thing, path)
        if type(thing) is tuple or hasattr(thing, "_fields"):
            self._guard("type", path, type(thing))
            self._guard("length", path, len(thing))
            fields = getattr(thing, "_fields", None)
            names = [f"{name}.{f}" for f in fields] if fields else [f"{name}[{i}]" for i in range(len(thing))]
            lifted = [
                self.lift(x, n, path.item(i)) for i, (x, n) in enumerate(zip(thing, names, strict=True))
            ]
            return type(thing)(*lifted) if hasattr(thing, "_fields") else tuple(lifted)
        return self._as_it_is(thing, path)

    def _dictionary(self, thing: dict[Any, Any], name: str, path: Path) -> Any:
        of_module = name.endswith(STORES)
        entire = not of_module or id(thing) in self._entire
        read = thing if entire else self._looked_at(thing)
        copy: dict[Any, Any] = {}
        self._memo[id(thing)] = copy
        if entire or self.names is None:
            self._guard("type", path, dict)
            self._guard("keys", path, tuple(thing))
        for key, x in thing.items():
            copy[key] = x
            if key in read:
                copy[key] = self.lift(x, key if of_module else f"{name}[{key!r}]", path.item(key))
        self._watch(f"the dictionary {name}", "STORE_SUBSCR", lambda: copy, dict(copy))
        return copy

    def _module(self, thing: ModuleType, name: str, path: Path) -> Any:
        """A copy of a module of the user's or of an installed package; a library's is used as it is."""
        if not is_users_module(thing) or type(thing) is not ModuleType:
            self._pin_module(thing, name, path)
            return thing
        self._guard("type", path, ModuleType)
        clone = ModuleType(thing.__name__)
        self._memo[id(thing)] = clone
        clone.__dict__.update(thing.__dict__)
        self._nothing_more(thing, path)
        for key in self._looked_at(thing.__dict__):
            clone.__dict__[key] = self.lift(thing.__dict__[key], f"{name}.{key}", path.attribute(key))
        compute = thing.__dict__.get("__getattr__")
        if compute is not None:

            def computed(key: str) -> Any:
                self.opaque = self.opaque or f"{name}.{key}, which its module computes"
                return compute(key)

            clone.__dict__["__getattr__"] = computed
        return clone

    def _object(self, thing: Any, name: str, path: Path) -> Any:
        """A shallow clone of an instance of a user's class or an nn.Module; others are used as they are."""
        cls = type(thing)
        if cls is SimpleNamespace:
            return self._namespace(thing, name, path)
        slots = slots_of(cls)
        # A copy of an object with a finaliser would release the original's resources when it dies.
        plain = cls.__new__ is object.__new__ and not hasattr(cls, "__del__")
        plain = plain and bool(slots or hasattr(thing, "__dict__"))
        if not plain or (from_library(cls) and not isinstance(thing, torch.nn.Module)):
            if hasattr(thing, "__wrapped__"):
                self._guard("is", path, thing)
                self._pin(thing.__wrapped__, name, path.attribute("__wrapped__"))
                return thing
            return self._as_it_is(thing, path)
        self._guard("type", path, cls)
        clone = object.__new__(cls)
        self._memo[id(thing)] = clone
        prefix = "" if name in ("", "mod") else f"{name}."
        self._class_code(cls)
        own = getattr(thing, "__dict__", {})
        clone.__dict__.update(own) if own else None
        self._nothing_more(thing, path)
        if isinstance(thing, torch.nn.Module):
            self._torch_module(thing, clone, path)
        for key in own if id(thing) in self._entire else self._looked_at(own):
            stored = path.attribute("__dict__").item(key) if hasattr(cls, key) else path.attribute(key)
            clone.__dict__[key] = self.lift(own[key], prefix + key, stored)
        for key in slots:
            if hasattr(thing, key):
                object.__setattr__(
                    clone, key, self.lift(getattr(thing, key), prefix + key, path.attribute(key))
                )
            else:
                self._guard("unset", path, key)
        asked = self._asks_for_class(cls)
        for key, x in class_data(cls, self._names(cls)).items():
            if asked:
                self._pin(x, prefix + key, Path(None, "constant", cls).attribute(key))
            if key not in own and key not in slots and hasattr(clone, "__dict__"):
                clone.__dict__[key] = self.lift(x, prefix + key, path.attribute(key))
        call = vars(cls).get("__call__")
        if isinstance(call, FunctionType):
            self._codes.append(call.__code__)
        self._watch("an attribute of the mod", "STORE_ATTR", lambda: stored_in(clone), stored_in(clone))
        return clone

    def _torch_module(self, module: torch.nn.Module, clone: Any, path: Path) -> None:
        """Note whether a module is called. If it is, its forward and its hooks run, and code of torch's own
        modules, which may read any of their attributes."""
        own, cls, called = vars(module), type(module), id(module) in self.called
        if isinstance(module, _CONTAINERS) or (called and not users_alone(cls)):
            self._entire.update(map(id, (module, *(own[store] for store in STORES if store in own))))
        if called:
            for hooks in _HOOKS:
                self._guard("keys", path.attribute(hooks), tuple(own[hooks]))
            for base in (base for base in cls.__mro__ if "forward" in vars(base) and not from_library(base)):
                self._member(cls, base, "forward")
            if "forward" in own:
                clone.__dict__["forward"] = self.lift(own["forward"], "forward", path.attribute("forward"))
            else:
                self._guard("absent", path.attribute("__dict__"), "forward")

        noted, key = self.called, id(module)
        this: Any = weakref.ref(clone)  # a cycle would hold parameters

        def call(*args: Any, **kwargs: Any) -> Any:
            noted.add(key)
            return cls._call_impl(this(), *args, **kwargs)

        clone.__dict__["_call_impl"] = call

    def _namespace(self, thing: SimpleNamespace, name: str, path: Path) -> Any:
        self._guard("type", path, SimpleNamespace)
        self._nothing_more(thing, path)
        clone = SimpleNamespace()
        self._memo[id(thing)] = clone
        clone.__dict__.update(
            {key: self.lift(x, f"{name}.{key}", path.attribute(key)) for key, x in vars(thing).items()}
        )
        self._watch("an attribute of the mod", "STORE_ATTR", lambda: stored_in(clone), stored_in(clone))
        return clone

    # --- after the call -------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Raise if the mod stored into a global, a closure variable, a container or an object it captured."""
        for what, instruction, now, before in self._watched:
            after = now()
            changed = [k for k in {**before, **after} if after.get(k, MISSING) is not before.get(k, MISSING)]
            if changed:
                raise TraceError(
                    given=f"the mod changes {what}: {', '.join(map(str, changed))}",
                    expected="a mod without side effects: it runs once per (query, key) pair, in any order",
                    fix="return the value, or compute it outside the mod",
                    where=self._storing_line(instruction, changed[0]),
                )

    def _storing_line(self, instruction: str, name: Any) -> Origin | None:
        for code in self._codes:
            for inner in nested(code):
                line = inner.co_firstlineno
                for step in dis.get_instructions(inner):
                    line = step.starts_line or line
                    if step.opname == instruction and step.argval in (name, None):
                        return Origin(inner.co_filename, line)
        return first_line(self._codes[0]) if self._codes else None


def _default_names(function: FunctionType) -> list[str]:
    code, count = function.__code__, len(function.__defaults__ or ())
    return list(code.co_varnames[code.co_argcount - count : code.co_argcount])
