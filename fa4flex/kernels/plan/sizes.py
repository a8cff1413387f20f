"""Sizes: the extents of a call, as plans ask about them.

A plan is made for one call and serves others. So extents are no numbers to compare: a plan asks questions,
each of which answers and narrows `valid`, the extents of all calls that get the same answers. For which calls
a plan is valid follows from what it asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fa4flex.codegen.analyze.extents import ANY, Extents, Reach, extents_of

if TYPE_CHECKING:
    from fa4flex.kernels.plan.inputs import Inputs

BATCH, QUERIES, KEYS = range(3)
"""Places in Extents."""


class Sizes:
    """Extents of the call of `inputs`; without these nothing is known, and every question is answered with
    False."""

    def __init__(self, inputs: Inputs | None = None) -> None:
        self._inputs = inputs
        self.valid = Reach()
        """Extents of calls that get the same answers to all questions so far."""

    @property
    def extents(self) -> Extents | None:
        return None if self._inputs is None else extents_of(self._inputs.extents)

    @property
    def heads(self) -> int:
        """Query heads; calls that a plan serves have as many."""
        return 1 if self._inputs is None else self._inputs.extents.heads

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return 1 if self._inputs is None else max(self.heads // max(self._inputs.kv_heads, 1), 1)

    @property
    def batch(self) -> Extent:
        """Batch entries, or sequences."""
        return Extent(self, BATCH)

    @property
    def q(self) -> Extent:
        """Queries of the longest sequence, at most; of packed sequences, all together."""
        return Extent(self, QUERIES)

    @property
    def kv(self) -> Extent:
        """Keys, likewise."""
        return Extent(self, KEYS)

    @property
    def rows(self) -> Extent:
        """Queries times the heads that share a head of keys."""
        return Extent(self, QUERIES, times=self.group)

    @property
    def usual_keys(self) -> Quantity:
        """Keys of a sequence: of packed ones on average, and of padded ones half of the padded length."""
        if self._inputs is not None and self._inputs.lengths == "packed":
            return MeanKeys(self)
        return Extent(self, KEYS, parts=2 if self._inputs is not None and self._inputs.keys_used else 1)

    def tiles(self, keys: int) -> Tiles:
        """Tiles of so many keys, of all batch entries."""
        return Tiles(self, keys)

    def narrow(self, valid: Reach) -> None:
        """Note that an answer holds for these extents alone."""
        self.valid = self.valid.within(valid)


class Quantity(ABC):
    """A number that follows from extents, and does not shrink as queries or keys grow."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def at_most(self, most: int) -> bool:
        """True if it is known to be this large, or smaller."""
        if self._sizes.extents is None:
            return False
        held, valid = self._side(self._sizes.extents, most)
        self._sizes.narrow(valid)
        return held

    def more_than(self, most: int) -> bool:
        """True if it is known to be larger than this."""
        return self._sizes.extents is not None and not self.at_most(most)

    @abstractmethod
    def _side(self, extents: Extents, most: int) -> tuple[bool, Reach]:
        """True if it is at most this large, and extents of which the same is true."""


class Extent(Quantity):
    """One of the extents, multiplied by `times` and divided by `parts`, rounded down."""

    def __init__(self, sizes: Sizes, place: int, times: int = 1, parts: int = 1) -> None:
        super().__init__(sizes)
        self._place, self._times, self._parts = place, times, parts

    def _side(self, extents: Extents, most: int) -> tuple[bool, Reach]:
        limit = ((most + 1) * self._parts - 1) // self._times
        held = extents[self._place] <= limit
        return held, self._between(0, limit) if held else self._between(limit + 1, ANY)

    def power_of_two(self) -> int:
        """The greatest power of two that is not larger, 1 at least."""
        if self._sizes.extents is None:
            return 1
        power = 1 << max(self._sizes.extents[self._place], 1).bit_length() - 1
        self._sizes.narrow(self._between(power if power > 1 else 0, 2 * power - 1))
        return power

    def _between(self, least: int, most: int) -> Reach:
        lower, upper = [0, 0, 0], [ANY, ANY, ANY]
        lower[self._place], upper[self._place] = least, most
        return Reach(tuple(lower), tuple(upper))  # type: ignore[arg-type]


class MeanKeys(Quantity):
    """Keys of packed sequences on average, rounded down."""

    def _side(self, extents: Extents, most: int) -> tuple[bool, Reach]:
        batch, _, keys = extents
        limit = (most + 1) * max(batch, 1) - 1
        if keys <= limit:
            return True, Reach((batch, 0, 0), (ANY, ANY, limit))
        return False, Reach((0, 0, limit + 1), (max(batch, 1), ANY, ANY))


class Tiles(Quantity):
    """Tiles of so many keys, of all batch entries."""

    def __init__(self, sizes: Sizes, keys: int) -> None:
        super().__init__(sizes)
        self._keys = keys

    def _side(self, extents: Extents, most: int) -> tuple[bool, Reach]:
        batch, _, keys = extents
        each = most // max(batch, 1)  # of one batch entry, of which that is true
        if keys <= each * self._keys:
            return True, Reach((0, 0, 0), (most // each if each else ANY, ANY, each * self._keys))
        return False, Reach((most // (each + 1) + 1, 0, each * self._keys + 1), (ANY, ANY, ANY))


UNKNOWN = Sizes()
"""Sizes of which nothing is known."""
