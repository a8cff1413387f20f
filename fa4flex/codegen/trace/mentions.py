"""Names that code mentions, and the code that a class brings along.

Of an object that a mod captured only the attributes that some code mentions by name can matter, unless the
code looks attributes up by computed names. So a mod that is a method of a large module depends on few of the
module's tensors and numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fa4flex.codegen.trace.origin import is_library

_BY_COMPUTED_NAME = frozenset((
    "getattr", "setattr", "hasattr", "vars", "dir", "globals", "locals", "eval", "exec", "attrgetter",
    "methodcaller", "__dict__", "__getattribute__", "parameters", "named_parameters", "buffers",
    "named_buffers", "children", "named_children", "modules", "named_modules", "state_dict", "get_parameter",
    "get_buffer", "get_submodule", "_parameters", "_buffers", "_modules", "asdict", "astuple", "fields",
))  # fmt: skip
"""Names whose mention means that any attribute may be read."""

_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or",
    "xor", "matmul",
)  # fmt: skip
_OTHERS = (
    "call", "getitem", "getattr", "get", "len", "iter", "next", "contains", "bool", "int", "float", "index",
    "missing", "enter", "exit", "neg", "pos", "abs", "invert", "round", "lt", "le", "eq", "ne", "gt", "ge",
    "torch_function", "array",
)  # fmt: skip
_OPERATORS = frozenset(
    f"__{name}__" for name in (*_OTHERS, *_BINARY, *(f"{side}{name}" for name in _BINARY for side in "ri"))
)
"""Methods that a running mod reaches without mentioning their names."""


def nested(code: CodeType) -> Iterator[CodeType]:
    """`code` and the code of functions defined inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from nested(inner)


@lru_cache(maxsize=4096)
def mentioned(code: CodeType) -> tuple[str, ...]:
    """Names of globals and attributes that `code` may read, in order."""
    return tuple(dict.fromkeys(name for inner in nested(code) for name in inner.co_names))


def all_attributes(names: frozenset[str]) -> bool:
    """True if code that mentions these names may read any attribute."""
    return not names.isdisjoint(_BY_COMPUTED_NAME)


def from_library(cls: type) -> bool:
    """True for classes of torch, numpy, Python and its standard library."""
    base = cls.__module__.partition(".")[0]
    return base in ("torch", "numpy", "builtins") or (base in sys.stdlib_module_names and base != "__main__")


def is_users_module(module: ModuleType) -> bool:
    """True for modules that are neither installed packages nor part of Python or fa4flex."""
    file = getattr(module, "__file__", None)
    return file is not None and "site-packages" not in file and not is_library(file)


def class_functions(cls: type, names: frozenset[str]) -> Iterator[FunctionType]:
    """Functions of the user's classes above `cls` that code with these names can run on an instance."""
    for base in cls.__mro__:
        if from_library(base):
            continue
        for name, member in vars(base).items():
            if name in names or name in _OPERATORS:
                yield from _functions(member)


def _functions(member: Any) -> Iterator[FunctionType]:
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, (staticmethod, classmethod)):
        yield from _functions(member.__func__)
    elif isinstance(member, property):
        yield from _functions(member.fget)
    elif isinstance(member, functools.cached_property):
        yield from _functions(member.func)


def class_data(cls: type, names: frozenset[str]) -> dict[str, Any]:
    """Plain attributes of the user's classes above `cls` that code with these names can read."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if not from_library(base):
            found = {name: member for name, member in vars(base).items() if name in names} | found
    return {name: x for name, x in found.items() if _is_data(name, x)}


def _is_data(name: str, member: Any) -> bool:
    return not (callable(member) or hasattr(member, "__get__") or name.startswith("__"))
