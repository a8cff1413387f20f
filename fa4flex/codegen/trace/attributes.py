"""Attributes that captured objects and their classes hold."""

from __future__ import annotations

import functools
from typing import Any

from fa4flex.codegen.trace.mentions import from_library

MISSING = object()
"""Stand-in for an attribute, or an entry, that is not there."""


def class_data(cls: type, names: frozenset[str]) -> dict[str, Any]:
    """Plain attributes of the user's classes above `cls` that code with these names can read."""
    results: dict[str, Any] = {}
    for base in cls.__mro__:
        if not from_library(base):
            results = {name: member for name, member in vars(base).items() if name in names} | results
    return {name: x for name, x in results.items() if _is_data(name, x)}


def _is_data(name: str, member: Any) -> bool:
    return not (callable(member) or hasattr(member, "__get__") or name.startswith("__"))


def slots_of(cls: type) -> list[str]:
    names = [n for c in cls.__mro__ for n in _as_tuple(c.__dict__.get("__slots__", ()))]
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def stored_in(thing: Any) -> dict[str, Any]:
    """Attributes by name; a functools.cached_property that filled itself in is no side effect."""
    cls = type(thing)
    cached = (key for key in vars(thing)) if hasattr(thing, "__dict__") else ()
    plain = [key for key in cached if not isinstance(getattr(cls, key, None), functools.cached_property)]
    return {key: getattr(thing, key, MISSING) for key in (*plain, *slots_of(cls))}
