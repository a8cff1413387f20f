"""The time of a backward pass: its main kernel, and those before and after it. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa4flex.kernels.plan.constants import constants_of
from fa4flex.kernels.plan.l2 import sections_of_queries
from fa4flex.kernels.plan.model import Launch, Predicted, Units, predict
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.walks import Form, Walk, by_keys

HALF, SUM = 2, 4
"""Bytes of an element of a tensor, and of a sum."""


class Heads(NamedTuple):
    """A call as a backward pass sees it: sequences, query heads, heads of keys, and lengths, of packed
    sequences their average."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int


MANY = 64
"""Batch entries of the calls that choices are settled for, of as many queries as keys: tiles of all
multiprocessors, many times over."""


def many(heads: int, group: int, length: int) -> Heads:
    """Such a call."""
    return Heads(MANY, heads, max(heads // group, 1), length, length)


@dataclass(frozen=True)
class BackwardTime:
    """The model of the time of a backward kernel, but for sizes.

    form           which pairs the mask allows
    tile           queries per step, and keys of a tile
    widths         of q and k, and of v and the output
    units          of a step
    in_sections    heads come in sections, one tile of keys of all of them after the other
    packed         sequences lie one after another
    sums           dQ is added up in memory, and leaves it by a kernel of its own
    clears         the kernel clears most of these sums itself
    ctas           of a tile of keys
    """

    target: Target
    form: Form
    tile: tuple[int, int]
    widths: tuple[int, int]
    units: Units
    in_sections: bool
    packed: bool = False
    sums: bool = True
    clears: bool = False
    ctas: int = 1

    def predict(self, size: Heads, parts: int = 1) -> Predicted:
        """The time of a call, with the query heads that share keys in so many parts."""
        return _predict(self, size, parts)

    def walk(self, size: Heads) -> Walk:
        return by_keys(self.form, size.q_len, size.kv_len, *self.tile)


def _predict(time: BackwardTime, size: Heads, parts: int) -> Predicted:
    constants = constants_of(time.target)
    batch, heads, kv_heads, q_len, _ = size
    met, pairs = heads // max(kv_heads * parts, 1), batch * kv_heads * parts
    sections = 1
    if time.in_sections and time.packed:
        # Tiles of one sequence come after those of another: each is a section.
        sections = sections_of_queries(kv_heads * parts, q_len, _row_bytes(time) * met) * batch
    elif time.in_sections:
        sections = sections_of_queries(pairs, q_len, _row_bytes(time) * met)
    walk = time.walk(size)
    # A section has one tile after the other of all its pairs; without any, those of a pair come together.
    together = -(-pairs // sections) if time.in_sections else 1
    running = min(pairs, max(time.target.multiprocessors / max(walk.tiles, 1), together))
    # Of queries and sums that tiles come back to, the cache holds some; sums come from memory and go there.
    live = max(running * met * q_len * _row_bytes(time), 1)
    missed = max(1 - time.target.l2_bytes / live, 0) * (time.units.read + 2 * time.units.added)
    launch = Launch(
        pairs,
        walk,
        met,
        sections,
        even=time.form != "causal",
        moved=_moved(time, size) + missed * walk.steps * met * pairs,
        around=_moved_around(time, size, parts),
        kernels=1 + time.sums + (parts > 1),
    )
    rates = constants.backward
    target = time.target if time.ctas == 1 else time.target.leaving(time.target.multiprocessors // 2)
    return predict(launch, time.units, rates.exposed, rates, constants, target)


def _row_bytes(time: BackwardTime) -> int:
    """Bytes of Q, dO and sums of dQ of a query."""
    d, dv = time.widths
    return HALF * (d + dv) + SUM * d


def _moved(time: BackwardTime, size: Heads) -> float:
    """Bytes of the main kernel: Q, dO and sums of dQ, K and V, dK and dV."""
    d, dv = time.widths
    keys = size.batch * size.kv_heads * size.kv_len * 2 * HALF * (d + dv)
    return size.batch * size.heads * size.q_len * _row_bytes(time) + keys


def _moved_around(time: BackwardTime, size: Heads, parts: int) -> float:
    """Bytes that kernels before and after the main one move: out and dO read, sums cleared, then read and
    written as dQ; and dK and dV of parts, written and read."""
    d, dv = time.widths
    rows = size.batch * size.heads * size.q_len
    moved = rows * 2 * HALF * dv
    if time.sums:
        moved += rows * d * (SUM + HALF) + rows * d * SUM * (not time.clears)
    if parts > 1:
        moved += 2 * size.batch * size.kv_heads * parts * size.kv_len * (d + dv) * HALF
    return moved
