"""Mods of one number and its indices, which chain with `>>`: score mods and output functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fa4flex.primitives.base import CONTEXT, FunctionMod, Mod, call_with

Kind = TypeVar("Kind")


class Chainable(Mod, Generic[Kind]):
    """Base of such mods: callable as `mod(number, *indices)`."""

    combined_with = ">> (then)"

    @staticmethod
    def _accepted(value: Any) -> Kind:
        """The value as one of this kind. Raises InputError."""
        raise NotImplementedError

    @staticmethod
    def _chained(first: Any, then: Any) -> Kind:
        """A chain of two of this kind."""
        raise NotImplementedError

    def __rshift__(self, other: Any) -> Kind:
        return self._chained(self, self._accepted(other))

    def __rrshift__(self, other: Any) -> Kind:
        return self._chained(self._accepted(other), self)


@dataclass(frozen=True, eq=False, repr=False)
class FunctionOfNumber(FunctionMod, Chainable[Any]):
    """A function as such a mod."""

    def __call__(self, *at: Any, **context: Any) -> Any:
        return call_with(self.mod, at, self.context, context, self)


@dataclass(frozen=True, eq=False, repr=False)
class Chained(Chainable[Any]):
    """`then(first(number))` at the same indices."""

    first: Any
    then: Any
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = (*self.first.context, *self.then.context)
        object.__setattr__(self, "context", tuple(name for name in CONTEXT if name in names))

    @property
    def parts(self) -> tuple[Mod, ...]:
        return self.first, self.then

    def __call__(self, *at: Any, **context: Any) -> Any:
        number, *indices = at
        number = call_with(self.first, (number, *indices), self.first.context, context)
        return call_with(self.then, (number, *indices), self.then.context, context)

    def __repr__(self) -> str:
        return f"({self.first!r} >> {self.then!r})"
