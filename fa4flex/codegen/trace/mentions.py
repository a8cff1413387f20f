"""Names that code mentions, and the code that a class brings along.

Of an object that a mod captured only the attributes that some code mentions by name can matter, unless the
code looks attributes up by computed names. So a mod that is a method of a large module depends on few of the
module's tensors and numbers.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from fa4flex.codegen.trace.origin import is_library

_BY_COMPUTED_NAME = frozenset((
    "getattr", "setattr", "hasattr", "vars", "dir", "globals", "locals", "eval", "exec", "attrgetter",
    "methodcaller", "__dict__", "__getattribute__", "parameters", "named_parameters", "buffers",
    "named_buffers", "children", "named_children", "modules", "named_modules", "state_dict", "get_parameter",
    "get_buffer", "get_submodule", "_parameters", "_buffers", "_modules", "asdict", "astuple", "fields",
    "AttributeError", "suppress",
))  # fmt: skip
"""Names whose mention means that any attribute may be read, or be there or not."""

_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or",
    "xor", "matmul",
)  # fmt: skip
_OTHERS = (
    "call", "getitem", "getattr", "getattribute", "get", "len", "iter", "next", "contains", "bool", "int",
    "float", "index", "missing", "enter", "exit", "neg", "pos", "abs", "invert", "round", "lt", "le", "eq",
    "ne", "gt", "ge", "torch_function", "array",
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


@lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Names that `code` looks up among globals, and among builtins where there is none."""
    steps = (step for inner in nested(code) for step in dis.get_instructions(inner))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname == "LOAD_GLOBAL"))


def all_attributes(names: frozenset[str]) -> bool:
    """True if code that mentions these names may read any attribute."""
    return not names.isdisjoint(_BY_COMPUTED_NAME)


def from_library(cls: type) -> bool:
    """True for classes of torch, numpy, Python and its standard library."""
    base = cls.__module__.partition(".")[0]
    return base in ("torch", "numpy", "builtins") or (base in sys.stdlib_module_names and base != "__main__")


def is_users_module(module: ModuleType) -> bool:
    """True for modules of the user's and of installed packages, with or without a file, rather than those of
    Python, torch, numpy and fa4flex."""
    base = module.__name__.partition(".")[0]
    if base in ("torch", "numpy", "fa4flex"):
        return False
    file = vars(module).get("__file__")
    return not is_library(file) if file else base == "__main__" or base not in sys.stdlib_module_names


def from_torch(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "torch"


def asks_for_modes(module: ModuleType, name: str) -> bool:
    """True for functions of torch that tell a mode or a flag of the process."""
    asks = name.startswith(("is_", "are_", "get_", "current_", "initial_")) or name == "flags"
    return asks and from_torch(module) and not hasattr(torch.Tensor, name) and name not in _OF_ARGUMENTS


_OF_ARGUMENTS = frozenset(("is_tensor", "is_storage", "get_default_dtype"))


@lru_cache(maxsize=4096)
def imported(code: CodeType, package: str | None) -> tuple[str, ...]:
    """Modules that `code` imports, those that they lie in among them, and what it imports from them, be it a
    module or not, as "module:name"."""
    results: dict[str, None] = {}
    for inner in nested(code):
        level: int = 0
        names: Any = None
        for step in dis.get_instructions(inner):
            if step.opname == "IMPORT_NAME":
                base = importlib.util.resolve_name("." * level + step.argval, package or "")
                parts = base.split(".")
                results |= dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)))
                results |= dict.fromkeys(f"{base}:{one}" for one in names or ())
            elif step.opname.startswith("LOAD_"):
                level, names = (names if isinstance(names, int) else 0), step.argval
    return tuple(results)


def class_code(cls: type, names: frozenset[str]) -> Iterator[tuple[type, str]]:
    """Members of the user's classes above `cls` that are functions, or run one, where code with these names
    reads them of an instance: their class and name."""
    for base in cls.__mro__:
        if from_library(base):
            continue
        for name, member in vars(base).items():
            if (name in names or name in _OPERATORS) and _runs(member):
                yield base, name


def function_in(member: Any) -> FunctionType | None:
    """The function that a member of a class runs; None for a descriptor of the user's."""
    for kind, name in _WRAPPERS.items():
        if isinstance(member, kind):
            return function_in(getattr(member, name))
    return member if isinstance(member, FunctionType) else None


_WRAPPERS: dict[type, str] = {
    staticmethod: "__func__", classmethod: "__func__", property: "fget", functools.cached_property: "func"
}  # fmt: skip
"""Members of classes that wrap one function, and the attribute which that is."""


def steps_to_function(member: Any) -> tuple[str, ...]:
    """Attributes that lead from what a class gives for a member to the function that it runs."""
    if isinstance(member, staticmethod):  # the function itself
        return steps_to_function(member.__func__)
    for kind, name in _WRAPPERS.items():
        if isinstance(member, kind):
            return name, *steps_to_function(getattr(member, name))
    return ()


def _runs(member: Any) -> bool:
    own = hasattr(type(member), "__get__") and not from_library(type(member))
    return own or function_in(member) is not None


def users_alone(cls: type) -> bool:
    """True for a class of modules that has none of torch's above it but the one of all modules."""
    return not any(from_library(base) for base in cls.__mro__ if base not in (torch.nn.Module, object))
