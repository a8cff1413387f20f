"""The model: how long a launch of a kernel would take, in closed form. Data only.

A step is as long as the busiest unit of a multiprocessor is busy (tensor cores, special functions and fp32
arithmetic, shared memory, its share of the L2 cache), and a share of exponentials and fp32 arithmetic that no
product hides: warpgroups take turns, each waits for its own scores. This is the model of overlapping
phases behind FlashAttention-3 (Shah et al. 2024, section 3) and FlashAttention-4. A tile is its steps, and
what its beginning and end add.

Tiles are list-scheduled: a multiprocessor that is done takes the next one. Of equal tiles that are whole
waves. Tiles under a causal mask have 1 to `longest` steps, and come longest first within a section of heads,
one section after the other (l2.py). When the last section begins, multiprocessors still have a third of a
longest tile to do on average, as lengths are even between none and the longest; so it begins
work * (sections - 1) / sections - longest / 3 after the first, and the launch ends a longest tile later, or
when all work is done. Beside list scheduling itself, counted tile by tile, that is within 10 %, and mostly 3.
"""

from __future__ import annotations

from typing import NamedTuple

from fa4flex.kernels.plan.constants import Constants, Rates
from fa4flex.kernels.plan.walks import Walk

SHARED_BYTES = 128
"""Bytes of shared memory that a multiprocessor reads or writes in a clock."""


class Units(NamedTuple):
    """Clocks that one step keeps each unit of a multiprocessor busy, but for the last two: bytes.

    special   ex2 and the like
    fp32      slots of fp32 arithmetic
    read, added   of the L2 cache
    """

    tensor: float
    special: float
    fp32: float
    shared: float
    read: float
    added: float = 0


class Launch(NamedTuple):
    """A launch, as far as its time follows from it.

    heads      that are walked alike: of all batch entries
    walk       of one of them
    heads_met  how often a tile is walked, one time after the other: query heads that a block's keys meet
    sections   of heads
    even       tiles are equally long
    moved      bytes that it reads and writes at least once
    around     bytes that kernels before and after it move
    kernels    before and after it
    """

    heads: int
    walk: Walk
    heads_met: int = 1
    sections: int = 1
    even: bool = True
    moved: float = 0
    around: float = 0
    kernels: int = 0


class Predicted(NamedTuple):
    """seconds   of the launch, with what runs before and after it
    step      clocks of a step
    busy      share of the time in which multiprocessors have a tile
    limit     the unit that a step waits for
    shortest  seconds if all of them had a tile until the end
    """

    seconds: float
    step: float
    busy: float
    limit: str
    shortest: float


class Step(NamedTuple):
    """A step of a kernel, wherever it runs.

    clocks   of the busiest unit but the L2 cache
    limit    that unit
    exposed  clocks of exponentials and arithmetic that nothing hides
    asked    bytes of the L2 cache; those that are added count by Constants.adding
    """

    clocks: float
    limit: str
    exposed: float
    asked: float


def step_of(units: Units, exposed: float, adding: float) -> Step:
    """The step of a kernel. exposed: share of exponentials and arithmetic that products do not hide;
    adding: see Constants."""
    busy = {
        "tensor cores": units.tensor,
        "special functions": units.special,
        "fp32 arithmetic": units.fp32,
        "shared memory": units.shared,
    }
    limit = max(busy, key=busy.__getitem__)
    hidden = exposed * (units.special + units.fp32)
    return Step(busy[limit], limit, hidden, units.read + adding * units.added)


def makespan(tiles: int, work: float, longest: float, workers: int, sections: int, even: bool) -> float:
    """The end of the last of so many tiles, of `work` together, in its unit. See the module."""
    if even:
        return -(-tiles // workers) * longest
    if tiles <= workers:
        return longest
    each = work / workers
    return max(each, longest, each - each / sections + longest * 2 / 3)


def predict(launch: Launch, one: Step, rates: Rates, constants: Constants, workers: int) -> Predicted:
    """The time of a launch of a kernel, whose step is `one`, on so many multiprocessors."""
    heads, (tiles, steps, most, masked), met, sections, even, moved, around, kernels = launch
    # The cache gives the same to few multiprocessors as to all.
    cached = one.asked * min(max(heads * tiles, 1), workers) / (constants.l2 * workers)
    slowest, limit = (one.clocks, one.limit) if one.clocks >= cached else (cached, "L2 cache")
    step = slowest + one.exposed
    once, crossed = rates.once, met * masked * rates.masked
    work = heads * (tiles * once + met * steps * step + crossed)
    longest = most * met * step + once + crossed / (tiles or 1)
    clock, memory = constants.clock, moved / constants.memory
    main = makespan(heads * tiles, work, longest, workers, sections, even) / clock
    taken = main if main >= memory else memory
    rest = around / constants.memory + (kernels + 1) * constants.launch
    full = work / (workers * clock)
    return Predicted(taken + rest, step, full / taken, limit if main >= memory else "memory", full + rest)
