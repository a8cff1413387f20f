"""Sizes: the extents of a call, as plans ask about them.

A plan is made for one call and serves others. So extents are no numbers to compare: a plan asks questions,
each of which answers and narrows `valid`, the extents of all calls that get the same answers. For which calls
a plan is valid follows from what it asked.

Some questions are about speed alone: another answer gives a kernel that is slower and right. These say so
(`Right`), and a plan may be made with the answers that another call got, so that a kernel which has been
compiled serves until the best one has. A question that says nothing has its true answer always: what was
forgotten is slow and never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from fa4flex.codegen.analyze.extents import ANY, Extents, Reach, extents_of

if TYPE_CHECKING:
    from fa4flex.kernels.plan.inputs import Inputs

Answer = tuple[bool, Reach]
"""Truth of a statement about extents, and extents of which the same is true."""

Right = Literal["true", "no", "any"]
"""Answers after which a plan is right for the sizes of a call: the true one; also no, for all sizes; any."""

Question = tuple[str, int]
"""A quantity by its name, and the number that it is compared with; 0 where it is asked for itself."""

Answers = tuple[tuple[Question, int], ...]
"""Questions about speed, with their answers."""

NO_ANSWERS: Answers = ()
"""Answers of no other call: all questions get their true ones."""

CELLS = (256, *range(320, 641, 64), 768, 1024, 1536, 2048, 3072, 4096, 8192)
"""Ends of the cells of queries in which choices are settled, of which the last one stands for all beyond. The
first one is wide: among so few queries the best tile changes with each 64, and calls are short."""


class Sizes:
    """Extents of the call of `inputs`; without these nothing is known, and every question is answered with
    False.

    heads    query heads; calls that a plan serves have as many
    group    query heads that share a KV head
    valid    extents of calls that get the same answers to all questions so far
    answers  to questions about speed so far
    others   answers that another call got to these, which are taken where they are right for this one
    """

    def __init__(self, inputs: Inputs | None = None, others: Answers = NO_ANSWERS) -> None:
        self.extents = None if inputs is None else extents_of(inputs.extents)
        self.heads = 1 if inputs is None else inputs.extents.heads
        self.group = 1 if inputs is None else max(self.heads // max(inputs.kv_heads, 1), 1)
        self.valid = Reach()
        self._answers: dict[Question, int] = {}
        self._others = dict(others)
        self._packed = inputs is not None and inputs.lengths == "packed"
        self._parts = 2 if inputs is not None and inputs.keys_used else 1

    @property
    def q(self) -> Quantity:
        """Queries of the longest sequence, at most; of packed sequences, all together."""
        return Quantity(self, "q", lambda extents, most: _extent(extents, 1, most))

    @property
    def batch(self) -> Quantity:
        """Batch entries, or sequences."""
        return Quantity(self, "batch", lambda extents, most: _extent(extents, 0, most))

    @property
    def kv(self) -> Quantity:
        """Keys, likewise."""
        return Quantity(self, "kv", lambda extents, most: _extent(extents, 2, most))

    @property
    def rows(self) -> Quantity:
        """Queries times the heads that share a KV head."""
        return Quantity(self, "rows", lambda extents, most: _extent(extents, 1, most // self.group))

    @property
    def usual_keys(self) -> Quantity:
        """Keys of a sequence: of packed ones on average, and of padded ones half of the padded length."""
        if self._packed:
            return Quantity(self, "usual keys", _mean_keys)
        parts = self._parts
        return Quantity(self, "usual keys", lambda extents, most: _extent(extents, 2, (most + 1) * parts - 1))

    def tiles(self, keys: int) -> Quantity:
        """Tiles of so many keys, of all batch entries."""
        return Quantity(
            self,
            f"tiles of {keys}",
            lambda extents, most: _tiles(extents, keys, most, self.valid.least[2]),
        )

    def batch_power(self) -> int:
        """The greatest power of two that is not larger than the batch, 1 at least: a measure for speed
        alone."""
        if self.extents is None:
            return 1
        power = 1 << max(self.extents[0], 1).bit_length() - 1
        valid = Reach((power if power > 1 else 0, 0, 0), (2 * power - 1, ANY, ANY))
        return self.settled(("batch power", 0), power, valid, "any")

    @property
    def answers(self) -> Answers:
        return tuple(sorted(self._answers.items()))

    def settled(self, question: Question, answer: int, valid: Reach, right: Right) -> int:
        """The answer to a question, noted: the true one, which holds for extents `valid`, or that of another
        call, which holds for all."""
        if right != "true":
            other = self._others.get(question, answer)
            if other != answer and (right == "any" or not other):
                answer, valid = other, Reach()
            self._answers[question] = answer
        self.narrow(valid)
        return answer

    def chosen(self, decide: Callable[[int], int], count: int) -> int:
        """The number of the candidate, of `count`, that `decide` takes for the queries of the longest
        sequence: for the most of the cell in which they lie. It holds for all cells around it that are
        decided alike.

        One axis, so that a few launches serve calls of all lengths; of unknown queries, there are many. All
        candidates are right.
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
        return self.settled(("candidate of", count), wanted, Reach((0, least, 0), (ANY, most, ANY)), "any")

    def narrow(self, valid: Reach) -> None:
        """Note that an answer holds for these extents alone."""
        self.valid = self.valid.within(valid)


class Quantity(NamedTuple):
    """A number that follows from sizes, and whether it is at most another one. right: after which answers a
    plan is right, which whoever asks knows, and which is tested."""

    sizes: Sizes
    name: str
    answer: Callable[[Extents, int], Answer]

    def at_most(self, most: int, right: Right = "true") -> bool:
        """True if it is known to be this large, or smaller."""
        if self.sizes.extents is None:
            return False
        held, valid = self.answer(self.sizes.extents, most)
        return bool(self.sizes.settled((self.name, most), held, valid, right))

    def more_than(self, most: int, right: Literal["true", "any"] = "true") -> bool:
        """True if it is known to be larger than this."""
        return self.sizes.extents is not None and not self.at_most(most, right)


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


def _tiles(extents: Extents, tile: int, most: int, known: int) -> Answer:
    """Batch entries have at most so many tiles of keys together. known: keys that calls have at least, by
    what was asked before; the more these are, the fewer batch entries have more tiles."""
    batch, _, keys = extents
    each = most // max(batch, 1)  # tiles of one batch entry, of which that is true
    if keys <= each * tile:
        return True, Reach((0, 0, 0), (most // each if each else ANY, ANY, each * tile))
    more = max(each + 1, -(-known // tile))
    return False, Reach((most // more + 1, 0, (more - 1) * tile + 1), (ANY, ANY, ANY))


UNKNOWN = Sizes()
"""Sizes of which nothing is known."""
