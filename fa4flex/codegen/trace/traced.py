"""Result of tracing a mod: its expression, the user's lines, and the numbers that became constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from fa4flex.codegen.expr import Expr, make, rewritten
from fa4flex.errors import Origin

ModKind = Literal["score", "mask", "output", "dropout"]

SIGNATURES: dict[ModKind, tuple[str, ...]] = {
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask": ("b", "h", "q_idx", "kv_idx"),
    "output": ("out", "b", "h", "q_idx", "d_idx"),
}
"""Parameters of functions by kind."""


@dataclass(frozen=True)
class Pinned:
    """A captured number that is a constant of the program, because the mod looked at its value in `where`."""

    name: str
    value: int | float
    where: Origin | None


@dataclass(frozen=True)
class Traced:
    """A mod as an expression: a bool for a mask, a float for a score or an output. `origins`: lines of the
    user's code. In an output function's, sym("score") is the output and sym("kv") the channel."""

    name: str
    kind: ModKind
    root: Expr
    origins: Mapping[Expr, Origin] = field(compare=False, repr=False)
    pinned: tuple[Pinned, ...] = ()

    def renumbered(self, tensors: Mapping[int, int], scalars: Mapping[int, int]) -> Traced:
        """The same function with other slot numbers."""
        memo: dict[Expr, Expr] = {}
        root = renumber(self.root, tensors, scalars, memo)
        origins = {memo[node]: line for node, line in self.origins.items() if node in memo}
        return replace(self, root=root, origins=MappingProxyType(origins))


def renumber(
    node: Expr, tensors: Mapping[int, int], scalars: Mapping[int, int], memo: dict[Expr, Expr]
) -> Expr:
    """`node` with its slots renumbered; `memo` carries what earlier calls rewrote."""

    def renumbered(inner: Expr, args: tuple[Expr, ...]) -> Expr:
        value = inner.value
        if inner.op == "search":
            value = tensors[value[0]], value[1]
        elif inner.op in ("load", "scalar"):
            value = (tensors if inner.op == "load" else scalars)[value]
        return make(inner.op, args, value, inner.kind)

    return rewritten(node, renumbered, memo)
