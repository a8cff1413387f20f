"""Extents of calls, and ranges of them for which something that was made for one call is valid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa4flex.codegen.analyze.domain import Shape

Extents = tuple[int, int, int]
"""Batch entries or sequences, query length, key length."""

ANY = 1 << 62
"""Larger than every extent."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Extents between `least` and `most`, both included."""

    least: Extents = (0, 0, 0)
    most: Extents = (ANY, ANY, ANY)

    @staticmethod
    def exactly(extents: Extents) -> Reach:
        return Reach(extents, extents)

    @property
    def exact(self) -> bool:
        """True if it holds the extents of one call alone."""
        return self.least == self.most

    def holds(self, extents: Extents) -> bool:
        (b, q, kv), (b0, q0, kv0), (b1, q1, kv1) = extents, self.least, self.most
        return q0 <= q <= q1 and kv0 <= kv <= kv1 and b0 <= b <= b1

    def within(self, other: Reach) -> Reach:
        """The extents that both have."""
        return Reach(each(max, self.least, other.least), each(min, self.most, other.most))


def extents_of(shape: Shape) -> Extents:
    return shape.batch, shape.q_len, shape.kv_len


def each(choose: Callable[..., int], a: Extents, b: Extents) -> Extents:
    """The choice between both, for each extent."""
    return choose(a[0], b[0]), choose(a[1], b[1]), choose(a[2], b[2])
