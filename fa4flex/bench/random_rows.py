"""Rows drawn at random: problems that nobody has named. One seed gives the same rows on every host."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fa4flex.bench.suites import Row, Target
from fa4flex.errors import InputError

KINDS = ("dense", "packed", "masks")
WIDTHS = "64,128"

TOKENS = 200, 20_000
"""Least and greatest length."""
PACKED_TOKENS, SEQUENCES = (1_000, 32_768), (2, 64)
"""Tokens of all packed sequences of a row, and how many these are. Errors are judged over all pairs of
tokens, which takes some seconds at the greatest number."""
MOST_GROUP, MOST_HEADS, BATCHES = 16, 64, 7
"""Query heads per KV head; query heads; and how many powers of two a batch is drawn from."""
WINDOWS, PREFIXES, DOCUMENTS = (32, 8192), (32, 8192), (2, 32)
MOST_BYTES = 2 * 2**30
"""Bytes of q, k, v and the output of a row in 16 bits. Peers have copies in their own layouts, and backward
passes an output, gradients and sums in float32 each: some 20 times as much, which fits into 80 GB."""
MOST_FLOPS = 2e13
"""FLOPs of a pass over the whole square (half of it if causal): 40 ms at 500 TFLOP/s."""

TARGETS = {"dense": (0.98, 0.97), "packed": (0.95, 0.95), "masks": (1.0, 1.0)}
"""Least speed over that of the best peer in a row, forward and backward, by kind."""


@dataclass(frozen=True)
class Width:
    """Widths of heads: of q and k, and of v where it differs (else 0)."""

    head_dim: int
    value_dim: int = 0

    def __str__(self) -> str:
        return f"{self.head_dim}:{self.value_dim}" if self.value_dim else str(self.head_dim)


@dataclass(frozen=True)
class Drawing:
    """Request for random rows: all that decides which they are, and so what a report has to say of them.

    rows    of each kind: the passes of one problem are two rows, forward first
    widths  head widths, each as likely as the others
    """

    seed: int
    rows: int
    kinds: tuple[str, ...] = ("dense",)
    widths: tuple[Width, ...] = (Width(64), Width(128))

    def drawn(self) -> list[Row]:
        """All rows, in the order of their numbers, with which their names begin; kinds in turns."""
        return [self.row(number) for number in range(self.rows * len(self.kinds))]

    def kind(self, named: int) -> str:
        return self.kinds[named % len(self.kinds)]

    def row(self, named: int) -> Row:
        """Row of a number. It depends neither on the other rows nor on how many there are."""
        number, kind = named // len(self.kinds), self.kind(named)
        dice = Dice(random.Random(f"{self.seed} {kind} {number // 2}"))
        row = replace(_DRAW[kind](dice, self.widths), backward=number % 2 == 1)
        least = TARGETS[kind][row.backward]
        return replace(row, name=f"{named} {described(row)}", targets=(Target("best", least),))


@dataclass(frozen=True)
class Dice:
    """Source of numbers. It asks for nothing but fractions, and divides: results are equal to the bit on
    every host and every version of Python."""

    source: random.Random

    def below(self, count: int) -> int:
        """One of 0 .. count - 1, all as likely."""
        return int(self.source.random() * count)

    def among(self, least: int, most: int) -> int:
        """One of least .. most, n with a probability that goes as 1 / n: as likely in each octave. A number
        that all are as likely to be is taken with that probability, or else drawn again."""
        while True:
            drawn = least + self.below(most - least + 1)
            if self.source.random() * drawn < least:
                return drawn


# --- kinds --------------------------------------------------------------------------------------------------


def _heads(dice: Dice) -> tuple[int, int]:
    """Query heads and KV heads: half of the ratios are powers of two, the others any up to MOST_GROUP."""
    group = 2 ** dice.below(5) if dice.below(2) else 1 + dice.below(MOST_GROUP)
    kv_heads = dice.among(1, MOST_HEADS // group)
    return group * kv_heads, kv_heads


def _length(dice: Dice) -> int:
    """Any length; one in four is a multiple of 128."""
    length = dice.among(*TOKENS)
    return -(-length // 128) * 128 if dice.below(4) == 0 and length <= TOKENS[1] - 128 else length


def _dense(dice: Dice, widths: Sequence[Width]) -> Row:
    length, width = _length(dice), widths[dice.below(len(widths))]
    heads, kv_heads = _heads(dice)
    mask = ("causal", "full")[dice.below(2)]
    row = Row("", 2 ** dice.below(BATCHES), heads, length, width.head_dim, mask)
    return bounded(replace(row, kv_heads=kv_heads, value_dim=width.value_dim))


def _packed(dice: Dice, widths: Sequence[Width]) -> Row:
    tokens, width = dice.among(*PACKED_TOKENS), widths[dice.below(len(widths))]
    heads, kv_heads = _heads(dice)
    row = Row("", 1, heads, tokens, width.head_dim, "packed", sequences=dice.among(*SEQUENCES))
    return bounded(replace(row, kv_heads=kv_heads, value_dim=width.value_dim))


def _masks(dice: Dice, widths: Sequence[Width]) -> Row:
    """A dense row under a window, a prefix of half of the length at most, or documents."""
    row = _dense(dice, widths)
    mask, sizes, most = (
        ("sliding", WINDOWS, row.length),
        ("prefix", PREFIXES, row.length // 2),
        ("document", DOCUMENTS, row.length),
    )[dice.below(3)]
    return replace(row, mask=mask, mask_size=dice.among(sizes[0], min(sizes[1], most)))


_DRAW = dict(zip(KINDS, (_dense, _packed, _masks)))


def bounded(row: Row) -> Row:
    """The row with as many entries of its batch as MOST_BYTES and MOST_FLOPS let it have; with fewer heads
    where one entry is too many, in the same ratio as long as there is a KV head."""
    most = min(MOST_BYTES / bytes_of(replace(row, batch=1)), MOST_FLOPS / flops_of(replace(row, batch=1)))
    if most >= 1:
        return replace(row, batch=min(row.batch, int(most)))
    if kv_heads := int(row.kv_heads * most):
        return replace(row, batch=1, kv_heads=kv_heads, heads=row.group * kv_heads)
    return bounded(replace(row, batch=1, kv_heads=1, heads=max(1, int(row.heads * most))))


def bytes_of(row: Row) -> int:
    """Bytes of q, k, v and the output, 16 bits each."""
    return 2 * row.batch * row.length * (row.heads + row.kv_heads) * (row.head_dim + row.values)


def flops_of(row: Row) -> float:
    """FLOPs of the backward pass, with five products, over all pairs; half of them under a causal mask."""
    products = 2 * (3 * row.head_dim + 2 * row.values)
    return products * row.batch * row.heads * row.length**2 * (0.5 if row.mask != "full" else 1.0)


# --- names --------------------------------------------------------------------------------------------------


def described(row: Row) -> str:
    """Words for a row that say all of its problem, such as `backward causal b4 h28:4 s4096 d128`."""
    width = Width(row.head_dim, row.value_dim)
    size = row.mask_size or ""
    tokens = f"n{row.sequences} t{row.length}" if row.sequences else f"b{row.batch} s{row.length}"
    which = "backward" if row.backward else "forward"
    return f"{which} {row.mask}{size} {tokens} h{row.heads}:{row.kv_heads} d{width}"


def widths_of(text: str) -> tuple[Width, ...]:
    """Widths of a list such as "64,192:128". Raises InputError for one that no kernel takes."""
    widths = []
    for word in text.split(","):
        parts = word.split(":")
        if len(parts) > 2 or not all(x.isdecimal() and 8 <= int(x) <= 256 and int(x) % 8 == 0 for x in parts):
            expected = "multiples of 8 up to 256, such as 64,128,192:128"
            raise InputError(f"--widths {text!r}", expected, "leave it out for 64,128")
        numbers = [int(x) for x in parts]
        widths.append(Width(*numbers) if len(set(numbers)) == len(numbers) else Width(numbers[0]))
    return tuple(widths)


def chosen(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """Rows by number, by a pattern of their names, or else by a part of them. Raises InputError for a word
    that fits none."""
    found: set[str] = set()
    for word in wanted:
        names = _fitting([row.name for row in rows], word)
        if not names:
            expected = f"numbers up to {len(rows) - 1}, or parts of names such as {rows[0].name!r}"
            raise InputError(f"--only {word!r}", expected, "give the seed, kinds and widths of the first run")
        found.update(names)
    return [row for row in rows if not wanted or row.name in found]


def _fitting(names: Sequence[str], word: str) -> list[str]:
    if word.isdecimal():
        return [name for name in names if name.split()[0] == word]
    return [x for x in names if fnmatch.fnmatchcase(x, word)] or [x for x in names if word in x]
