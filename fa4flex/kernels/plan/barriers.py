"""Barriers of a block as rows of one table per pipeline: shared memory, initialisation and handles
(common/barriers.py), and the rings, barriers and places of the pipeline's graph are made of them.

A row is an mbarrier by name, or as many of them as there are units, stages and warps; a ring has a row for
its full and one for its empty barriers. They lie in shared memory in the order of the table. A barrier more
is a row more, and its uses in roles and in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any

from fa4flex.kernels.plan.pairs import NAMED_APART, at
from fa4flex.kernels.plan.topology import WARP, WARPGROUP, Barrier, NamedBarrier, Ring


@dataclass(frozen=True)
class Per:
    """Units that have a barrier each: `units` of them, by number; or the block, where that is 0; of each
    unit, a barrier per stage; and each warp of a warpgroup its own, `by_warp`."""

    units: int = 0
    stages: int = 1
    by_warp: bool = False

    @property
    def count(self) -> int:
        return max(self.units, 1) * self.stages * len(self.warps)

    @property
    def names(self) -> tuple[str, ...]:
        """Ends of a name, one for each unit."""
        return tuple(f" {unit}" for unit in range(self.units)) or ("",)

    @property
    def warps(self) -> tuple[str, ...]:
        return tuple(f" of warp {warp}" for warp in range(WARPGROUP)) if self.by_warp else ("",)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(f" {stage}" for stage in range(self.stages)) if self.stages > 1 else ("",)


BLOCK = Per()


@dataclass(frozen=True)
class Row:
    """mbarriers of one name.

    arrivals         complete a phase: of warps, each of which arrives as one, and of products
    by               kinds of roles that arrive
    meaning          of a complete phase
    per              units that have one each
    ring             the graph's ring whose stages are full, or empty, as the name ends; "" for none
    lanes            of a warp that arrive, in kernels
    sent, senders    as a Barrier of the graph has them
    first            of a pair of CTAs, both use the first one's
    exchanged        of a pair of CTAs, it is the other one's ring
    library          the library's pipeline initialises it, and is the handle
    used             False: there is room for it
    """

    name: str
    arrivals: int
    by: str
    meaning: str
    per: Per = BLOCK
    ring: str = ""
    lanes: int = 1
    sent: int = 0
    senders: int = 0
    first: bool = False
    exchanged: bool = False
    library: bool = False
    used: bool = True

    @property
    def side(self) -> str:
        """Side of a ring: full or empty."""
        return self.name.rpartition("_")[2] if self.ring else ""

    @property
    def counted(self) -> int:
        """Arrivals that kernels count."""
        return self._barrier("", 0).counted

    def barriers(self, cta: int) -> Iterator[Barrier]:
        """Barriers of the graph, where they guard no ring."""
        yield from (self._barrier(at(self.name + unit, cta), cta) for unit in self.per.names)

    def places(self, cta: int) -> Iterator[str]:
        """Names of the graph's barriers as they lie in memory; "" for what is not used."""
        if not self.used or (self.first and cta):
            yield from [""] * self.per.count
            return
        name, side = (self.ring, f" {self.side}") if self.ring else (self.name, "")
        cta = 1 - cta if self.exchanged else cta
        for unit in self.per.names:
            for stage in self.per.stage_names:
                yield from (f"{at(name + unit, cta)}{side}{stage}{warp}" for warp in self.per.warps)

    def _barrier(self, name: str, cta: int) -> Barrier:
        per_warp = self.per.by_warp
        sent = self.sent, self.senders
        return Barrier(name, self.arrivals, self.meaning, per_warp, *sent, self.lanes, cta, self.per.stages)


def tile_ring(
    name: str, stages: int, freed: int, by: tuple[str, str], gather_warps: int = 0, first: bool = False
) -> tuple[Row, Row]:
    """Rows of a ring of tiles, a pipeline of the library's. by: roles that fill and that free a stage, which
    takes `freed` arrivals; a copy fills it, or so many warps that gather rows; first: of a pair of CTAs, the
    first one's full barriers count the bytes of both."""
    filled, freeing = by
    per, lanes = Per(stages=stages), WARP if gather_warps else 1
    full = Row(f"{name}_full", gather_warps or 1, filled, "a tile has come", per, name, lanes, first=first)
    empty = Row(f"{name}_empty", freed, freeing, "it is no longer needed", per, name)
    return replace(full, library=True), replace(empty, library=True)


@dataclass(frozen=True)
class NamedRow:
    """Named barriers of one name: number of the first, and threads that come in a phase. Of `units`, each has
    its own, one number after the other; of `stages`, likewise, `apart` numbers after the one before."""

    name: str
    number: int
    threads: int
    meaning: str
    units: int = 0
    stages: int = 1
    apart: int = 1

    def at(self, unit: Any = 0, stage: Any = 0) -> Any:
        """Number of a unit's barrier for a stage."""
        return self.number + self.apart * stage + unit

    def barriers(self, cta: int) -> Iterator[NamedBarrier]:
        """Barriers of the graph."""
        for unit, name in enumerate(Per(self.units).names):
            number = self.number + unit + NAMED_APART * cta
            yield NamedBarrier(at(self.name + name, cta), number, self.threads, self.stages, self.apart)


@dataclass(frozen=True)
class BarrierTable:
    """Barriers of a block. paired: the full and the empty one of a stage are initialised together, and not
    all full ones first."""

    rows: tuple[Row, ...]
    named: tuple[NamedRow, ...] = ()
    paired: bool = False

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def count(self) -> int:
        """Number of mbarriers that there is room for."""
        return sum(row.per.count for row in self.rows)

    @property
    def used(self) -> int:
        """Number of those that are used."""
        return sum(row.per.count for row in self.rows if row.used)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Number of mbarriers that lie before those of a row."""
        counts = accumulate((row.per.count for row in self.rows), initial=0)
        return dict(zip((row.name for row in self.rows), counts))

    @property
    def initialised(self) -> Iterator[tuple[int, int]]:
        """Places, and arrivals that complete a phase, of mbarriers that kernels initialise, in order."""
        own = (row for row in self.rows if not row.library and row.arrivals)
        for _, rows in groupby(own, key=lambda row: row.ring or row.name):
            sides = [
                [(self.offsets[row.name] + i, row.counted) for i in range(row.per.count)] for row in rows
            ]
            yield from chain.from_iterable(zip(*sides) if self.paired else sides)

    # --- the graph -------------------------------------------------------------------------------------

    def places(self, cta: int = 0) -> tuple[str, ...]:
        """Names of the graph's mbarriers as they lie in a CTA's memory."""
        return tuple(name for row in self.rows for name in row.places(cta))

    def barriers(self, cta: int = 0) -> tuple[Barrier, ...]:
        """Those that guard no ring."""
        rows = (row for row in self.rows if row.used and not row.ring and not (row.first and cta))
        return tuple(barrier for row in rows for barrier in row.barriers(cta))

    @property
    def shared(self) -> set[str]:
        """Names of the graph's mbarriers of which both CTAs of a pair use the first one's."""
        rows = [row for row in self.rows if row.first]
        own = {barrier.name for row in rows if not row.ring for barrier in row.barriers(0)}
        return own | {name for row in rows for name in row.places(0)}

    def named_barriers(self, cta: int = 0) -> tuple[NamedBarrier, ...]:
        return tuple(barrier for row in self.named for barrier in row.barriers(cta))

    def ring(
        self, name: str, stage_bytes: int, copies: tuple[int, ...] = (), unit: int | None = None
    ) -> Ring:
        """A ring by its name, or that of a unit, whose stages copies of these bytes fill, or the warps that
        arrive. Without a row of empty barriers, it is filled once."""
        sides = {row.side: row for row in self.rows if row.ring == name}
        full, empty = sides["full"], sides.get("empty")
        return Ring(
            name if unit is None else f"{name} {unit}",
            full.per.stages,
            stage_bytes,
            copies,
            sum(copies),
            empty.arrivals if empty else 0,
            full.arrivals,
            per_warp=full.per.by_warp,
            once=empty is None,
            lanes=full.lanes,
        )
