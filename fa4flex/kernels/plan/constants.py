"""Constants of the model that chooses among kernels (model.py): what chips reach, as measured. Data only.

A row is measured on one chip, in one run of benchmarks/choice_regret.py, and fitted by its --fit. A chip
without a row has those of another one, scaled by data sheets, and explanations say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fa4flex.kernels.plan.target import SM90A, TARGETS, Target


@dataclass(frozen=True)
class Rates:
    """Rates that kernels of one pass reach, in clocks of a multiprocessor but for the first and the last.

    exposed   share of a step's exponentials and fp32 arithmetic that no product hides
    masked    more for a step in which the mask is evaluated
    once      of a tile: what its beginning and end add to its steps
    error     relative error of a difference that is predicted between two candidates: smaller ones are not
              believed, and the candidate that is listed first is taken
    """

    exposed: float
    masked: float
    once: float
    error: float


@dataclass(frozen=True)
class Constants:
    """chip             as Target has it
    multiprocessors  of the chip that was measured
    clock            that it sustains, Hz
    memory           bytes per second that kernels reach which read or write and do little else
    l2               bytes per clock that the L2 cache gives each multiprocessor where all of them read
    adding           reads that one addition to the cache takes the time of, per byte
    launch           seconds that one more kernel takes, however short
    forward, backward   rates of the passes
    origin           where the numbers are from, in words
    """

    chip: str
    multiprocessors: int
    clock: float
    memory: float
    l2: float
    adding: float
    launch: float
    forward: Rates
    backward: Rates
    origin: str

    def of(self, direction: str) -> Rates:
        return self.forward if direction == "forward" else self.backward


H200 = Constants(
    chip="H200",
    multiprocessors=132,
    clock=1.75e9,
    memory=4.2e12,
    l2=40.0,
    adding=2.3,
    launch=3e-6,
    forward=Rates(exposed=0.6, masked=500, once=2000, error=0.08),
    backward=Rates(exposed=0.42, masked=1300, once=4400, error=0.015),
    origin="fitted by hand to the tables of docs/notes, 2026-11-22 to 28",
)

ROWS = (H200,)
"""Chips that were measured."""


@lru_cache(maxsize=64)
def constants_of(target: Target) -> Constants:
    """The row of a chip; without one, that of its family, or of an H200, with clock, memory and cache scaled
    by what data sheets say, and an origin that says so."""
    row = next((one for one in ROWS if one.chip == target.chip), None)
    if row is None:
        known = _target_of(ROWS[0])
        row = replace(
            ROWS[0],
            chip=target.chip,
            clock=ROWS[0].clock * target.clock / known.clock,
            memory=ROWS[0].memory * target.hbm_bytes_per_second / known.hbm_bytes_per_second,
            origin=f"those of an {ROWS[0].chip}, scaled by data sheets: this chip was not measured",
        )
    if row.multiprocessors == target.multiprocessors:
        return row
    share = row.multiprocessors / target.multiprocessors
    return replace(row, multiprocessors=target.multiprocessors, l2=row.l2 * share)


def _target_of(row: Constants) -> Target:
    return next((target for target in TARGETS if target.chip == row.chip), SM90A)
