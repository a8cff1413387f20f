"""Sizes: the extents of a call, as plans ask about them.

A plan is made for one call and serves others. So extents are no numbers to compare: a plan asks questions,
each of which answers and narrows `valid`, the extents of all calls that get the same answers. For which calls
a plan is valid follows from what it asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fa4flex.codegen.analyze.extents import ANY, Extents, Reach, extents_of

if TYPE_CHECKING:
    from fa4flex.kernels.plan.inputs import Inputs

Answer = tuple[bool, Reach]
"""Truth of a statement about extents, and extents of which the same is true."""


T = TypeVar("T")

CELLS = (*range(64, 641, 64), 768, 1024, 1536, 2048, 3072, 4096, 8192)
"""Ends of the cells of queries in which choices are settled, of which the last one stands for all beyond."""


class Sizes:
    """Extents of the call of `inputs`; without these nothing is known, and every question is answered with
    False.

    heads    query heads; calls that a plan serves have as many
    group    query heads that share a head of keys
    valid    extents of calls that get the same answers to all questions so far
    """

    def __init__(self, inputs: Inputs | None = None) -> None:
        self.extents = None if inputs is None else extents_of(inputs.extents)
        self.heads = 1 if inputs is None else inputs.extents.heads
        self.group = 1 if inputs is None else max(self.heads // max(inputs.kv_heads, 1), 1)
        self.valid = Reach()
        self._packed = inputs is not None and inputs.lengths == "packed"
        self._parts = 2 if inputs is not None and inputs.keys_used else 1

    @property
    def q(self) -> Quantity:
        """Queries of the longest sequence, at most; of packed sequences, all together."""
        return Quantity(self, lambda extents, most: _extent(extents, 1, most))

    @property
    def batch(self) -> Quantity:
        """Batch entries, or sequences."""
        return Quantity(self, lambda extents, most: _extent(extents, 0, most))

    @property
    def kv(self) -> Quantity:
        """Keys, likewise."""
        return Quantity(self, lambda extents, most: _extent(extents, 2, most))

    @property
    def rows(self) -> Quantity:
        """Queries times the heads that share a head of keys."""
        return Quantity(self, lambda extents, most: _extent(extents, 1, most // self.group))

    @property
    def usual_keys(self) -> Quantity:
        """Keys of a sequence: of packed ones on average, and of padded ones half of the padded length."""
        if self._packed:
            return Quantity(self, _mean_keys)
        return Quantity(self, lambda extents, most: _extent(extents, 2, (most + 1) * self._parts - 1))

    def tiles(self, keys: int) -> Quantity:
        """Tiles of so many keys, of all batch entries."""
        return Quantity(self, lambda extents, most: _tiles(extents, keys, most))

    def batch_power(self) -> int:
        """The greatest power of two that is not larger than the batch, 1 at least."""
        if self.extents is None:
            return 1
        power = 1 << max(self.extents[0], 1).bit_length() - 1
        self.narrow(Reach((power if power > 1 else 0, 0, 0), (2 * power - 1, ANY, ANY)))
        return power

    def settled(self, decide: Callable[[int], T]) -> T:
        """The decision for the queries of the longest sequence: for the most of the cell in which they
        lie. It holds for all cells around it that are decided alike.

        One axis, so that a few launches serve calls of all lengths; of unknown queries, there are many.
        """
        if self.extents is None:
            return decide(CELLS[-1])
        q_len = self.extents[1]
        cell = next((i for i, end in enumerate(CELLS) if q_len <= end), len(CELLS) - 1)
        wanted, first, last = decide(CELLS[cell]), cell, cell
        while first and decide(CELLS[first - 1]) == wanted:
            first -= 1
        while last + 1 < len(CELLS) and decide(CELLS[last + 1]) == wanted:
            last += 1
        least = CELLS[first - 1] + 1 if first else 0
        most = CELLS[last] if last + 1 < len(CELLS) else ANY
        self.narrow(Reach((0, least, 0), (ANY, most, ANY)))
        return wanted

    def narrow(self, valid: Reach) -> None:
        """Note that an answer holds for these extents alone."""
        self.valid = self.valid.within(valid)


class Quantity(NamedTuple):
    """A number that follows from sizes, and whether it is at most another one."""

    sizes: Sizes
    answer: Callable[[Extents, int], Answer]

    def at_most(self, most: int) -> bool:
        """True if it is known to be this large, or smaller."""
        if self.sizes.extents is None:
            return False
        held, valid = self.answer(self.sizes.extents, most)
        self.sizes.narrow(valid)
        return held

    def more_than(self, most: int) -> bool:
        """True if it is known to be larger than this."""
        return self.sizes.extents is not None and not self.at_most(most)


def _extent(extents: Extents, place: int, most: int) -> Answer:
    """The extent at a place is at most so large."""
    held = extents[place] <= most
    least, upper = [0, 0, 0], [ANY, ANY, ANY]
    if held:
        upper[place] = most
    else:
        least[place] = most + 1
    return held, Reach((least[0], least[1], least[2]), (upper[0], upper[1], upper[2]))


def _mean_keys(extents: Extents, most: int) -> Answer:
    """Packed sequences have at most so many keys on average, rounded down."""
    batch, _, keys = extents
    limit = (most + 1) * max(batch, 1) - 1
    if keys <= limit:
        return True, Reach((batch, 0, 0), (ANY, ANY, limit))
    return False, Reach((0, 0, limit + 1), (max(batch, 1), ANY, ANY))


def _tiles(extents: Extents, tile: int, most: int) -> Answer:
    """Batch entries have at most so many tiles of keys together."""
    batch, _, keys = extents
    each = most // max(batch, 1)  # tiles of one batch entry, of which that is true
    if keys <= each * tile:
        return True, Reach((0, 0, 0), (most // each if each else ANY, ANY, each * tile))
    return False, Reach((most // (each + 1) + 1, 0, each * tile + 1), (ANY, ANY, ANY))


UNKNOWN = Sizes()
"""Sizes of which nothing is known."""
