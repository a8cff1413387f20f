"""Which tensors a decision was made with: the same objects, in the same memory, not changed since."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

Guards = tuple[weakref.ref[Tensor], ...]
"""References to tensors that a key names: an id may be taken again by another tensor."""


def version(x: Tensor) -> int:
    """How often torch changed x in place; it does not count changes of inference tensors."""
    return 0 if x.is_inference() else x._version


def identities(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """A part of a key: by tensor, what changes when it does."""
    return tuple([(id(x), x.data_ptr(), version(x)) for x in tensors])


def guards_of(tensors: Iterable[Tensor]) -> Guards:
    return tuple(map(weakref.ref, tensors))


def are_those(guards: Guards, tensors: Sequence[Tensor]) -> bool:
    """Whether the guards were made of these very tensors."""
    for guard, x in zip(guards, tensors, strict=True):  # noqa: SIM110, on the way of every call
        if guard() is not x:
            return False
    return True
