"""The time of a backward pass: its main kernel, and those before and after it. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fa4flex.kernels.plan.constants import Constants, constants_of
from fa4flex.kernels.plan.kernel_time import HALF, Heads, KernelTime
from fa4flex.kernels.plan.l2 import sections_of_queries
from fa4flex.kernels.plan.model import Launch, Predicted, Step, predict, step_of
from fa4flex.kernels.plan.walks import by_keys

SUM = 4
"""Bytes of an element of a sum."""


@dataclass(frozen=True)
class BackwardTime(KernelTime):
    """The model of the time of a backward kernel, but for sizes. Its steps have a tile of keys each.

    in_sections    heads come in sections, one tile of keys of all of them after the other
    packed         sequences lie one after another
    sums           dQ is added up in memory, and leaves it by a kernel of its own
    clears         the kernel clears most of these sums itself
    ctas           of a tile of keys
    """

    in_sections: bool
    packed: bool = False
    sums: bool = True
    clears: bool = False
    ctas: int = 1

    def predict(self, size: Heads, parts: int = 1) -> Predicted:
        """The time of a call, with the query heads that share keys in so many parts."""
        return next(self.predictions(size, (parts,)))

    def predictions(self, size: Heads, numbers: Iterable[int]) -> Iterator[Predicted]:
        """The same for several numbers of parts, one after the other, as they are asked for."""
        return _predictions(self, size, numbers)

    @cached_property
    def kernel(self) -> Kernel:
        """All that is the same for all calls."""
        constants = constants_of(self.target)
        d, dv = self.widths
        workers = max(self.target.multiprocessors // self.ctas, 1)
        return Kernel(
            constants,
            step_of(self.units, constants.backward.exposed, constants.adding),
            workers,
            row_bytes=HALF * (d + dv) + SUM * d,
            missed=self.units.read + 2 * self.units.added,
        )


class Kernel(NamedTuple):
    """Numbers of a model that no call changes.

    constants  of the chip
    step       of the kernel
    workers    multiprocessors, or pairs of them
    row_bytes  of Q, dO and sums of dQ of a query
    missed     bytes of a step that come from memory and go there where the L2 cache holds none
    """

    constants: Constants
    step: Step
    workers: int
    row_bytes: int
    missed: float


def _predictions(time: BackwardTime, size: Heads, numbers: Iterable[int]) -> Iterator[Predicted]:
    constants, step, workers, row_bytes, missed = time.kernel
    batch, heads, kv_heads, q_len, kv_len = size
    walk, (d, dv) = by_keys(time.form, q_len, kv_len, *time.tile), time.widths
    even, in_sections, multiprocessors = time.form != "causal", time.in_sections, time.target.multiprocessors
    rows, keys = batch * heads * q_len, batch * kv_heads * kv_len * (d + dv) * HALF
    # The main kernel moves Q, dO and sums of dQ, K and V, dK and dV; those before and after it read out and
    # dO, clear sums, then read and write them as dQ; dK and dV of parts are written and read.
    moved, around = rows * row_bytes + 2 * keys, rows * 2 * HALF * dv
    if time.sums:
        around += rows * d * (SUM + HALF) + rows * d * SUM * (not time.clears)
    at_once = multiprocessors / max(walk.tiles, 1)
    rates, l2_bytes = constants.backward, time.target.l2_bytes
    for parts in numbers:
        met, pairs = heads // max(kv_heads * parts, 1), batch * kv_heads * parts
        bytes_met, sections, together = q_len * met * row_bytes, 1, 1
        if in_sections:
            # Tiles of one packed sequence come after those of another: each is a section.
            sequences, apart = (batch, kv_heads * parts) if time.packed else (1, pairs)
            sections = sections_of_queries(apart, bytes_met) * sequences
            # A section has one tile after the other of all its pairs; without any, a pair's come together.
            together = -(-pairs // sections)
        # Of queries and sums that tiles come back to, the cache holds some; other sums come from memory, and
        # go there.
        live = min(pairs, max(at_once, together)) * bytes_met
        again = (1 - l2_bytes / live) * missed * walk.steps * met * pairs if live > l2_bytes else 0.0
        kernels = 1 + time.sums + (parts > 1)
        more = 2 * keys * parts if parts > 1 else 0
        launch = Launch(pairs, walk, met, sections, even, moved + again, around + more, kernels)
        yield predict(launch, step, rates, constants, workers)
