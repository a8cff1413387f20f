"""Snapshots: an immutable value that equals another one only if the things that they were taken of agree."""

from __future__ import annotations

import decimal
import enum
import fractions
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy
import torch

MOST_BYTES = 1 << 20
"""Longest numpy array whose contents are compared at each call."""

_BY_IDENTITY = (type, ModuleType, enum.Enum, BaseException)
_BY_VALUE = (
    str, bytes, bool, int, complex, range, fractions.Fraction, decimal.Decimal, torch.dtype, torch.device,
    torch.layout, torch.memory_format, type(None), type(...),
)  # fmt: skip


class Opaque(Exception):
    """Something whose change cannot be noticed."""


def snapshot(x: Any) -> Any:
    """A value to compare `x` with later. Raises Opaque where a change of `x` could not be noticed.

    Floats are told apart by their text, so that NaN equals itself and 0.0 differs from -0.0.
    """
    kind = type(x)
    if kind is float or isinstance(x, float):
        return kind, repr(x)
    if isinstance(x, _BY_VALUE):
        return kind, x
    if isinstance(x, _BY_IDENTITY) or (isinstance(x, BuiltinFunctionType) and not _of_object(x)):
        return _Same(x)
    if isinstance(x, (list, tuple)):
        return kind, tuple([snapshot(item) for item in x])
    if isinstance(x, dict):
        return kind, tuple([(snapshot(key), snapshot(item)) for key, item in x.items()])
    if isinstance(x, (set, frozenset)):
        return kind, frozenset([snapshot(item) for item in x])
    if isinstance(x, slice):
        return kind, tuple([snapshot(part) for part in (x.start, x.stop, x.step)])
    if isinstance(x, numpy.generic):
        return kind, x.tobytes()
    if isinstance(x, numpy.ndarray) and x.nbytes <= MOST_BYTES and not x.dtype.hasobject:
        return kind, x.shape, x.dtype.str, x.tobytes()
    raise Opaque(f"a {kind.__module__}.{kind.__qualname__}")


def _of_object(x: BuiltinFunctionType) -> bool:
    """True for a method of an object, such as `items.count` of a list, whose result changes with that."""
    owner = x.__self__
    of_extension = type(owner).__module__.startswith("pybind11") or type(owner).__name__ == "PyCapsule"
    return not (owner is None or of_extension or isinstance(owner, (type, ModuleType, str, bytes)))


def plain(x: Any) -> bool:
    """True if `x` cannot change, and no value of its type that equals it can be told from it."""
    if type(x) is tuple:
        return all(type(item) is str for item in x)
    return x is None or type(x) in (str, bytes, bool, int, torch.dtype)


class _Same:
    """Equal to a snapshot of the very same object, which it keeps alive."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
