"""Every error a user can see: what was given, what is expected, what to do, and where in their code.

Errors are raised deep and terse, and dressed once at the door (`fa4flex.api`). All of them derive
from `Fa4flexError`, and from the built-in exception that a PyTorch user would catch.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.text else f"{self.file}:{self.line}"


class Fa4flexError(Exception):
    """`given` and `expected` say what is wrong, `fix` what to do, `where` the user's line if known."""

    def __init__(self, given: str, expected: str, fix: str, where: Origin | None = None) -> None:
        self.given, self.expected, self.fix, self.where = given, expected, fix, where
        lines = [given, f"  expected: {expected}", f"  to fix:   {fix}"]
        if where is not None:
            lines.append(f"  at:       {where}")
        super().__init__("\n".join(lines))


class InputError(Fa4flexError, ValueError):
    """A tensor, length or option that does not fit."""


class TraceError(Fa4flexError, TypeError):
    """A mod that cannot be turned into an expression."""


class UnsupportedError(Fa4flexError, NotImplementedError):
    """A request that is meaningful but not built: says why, and the nearest legal alternative."""
