"""The pipeline: roles, what they hand to each other, and in which order each role uses it.

An mbarrier completes a phase when its arrivals and its bytes have all come (PTX ISA, mbarrier). A ring has a
full and an empty one per stage: the producer arrives on `full` and announces the bytes that its copies will
bring; consumers arrive on `empty`, one lane of every warp. Asynchronous products are executed in order: by a
tensor core that all roles share, which signals by arriving at a barrier, or role by role, which waits.

`simulate` runs the roles; `Topology.check` looks at counts and sums.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.memory import BARRIER as MBARRIER
from fa4flex.kernels.plan.memory import Memory

if TYPE_CHECKING:
    import networkx

    from fa4flex.kernels.plan.target import Target

Staging = Literal["queries", "own", "none"]
"""Staging of the output in shared memory: over the queries, in a region of its own, or none."""
Per = Literal["key", "work", "later", "block"]
"""Unit that has one use each: a key tile, a tile of queries, a key tile but the first of a row, or the
block."""
Action = Literal[
    "acquire", "load", "fill", "wait", "release",  # stages of rings, which copies load or their role fills
    "forgo",  # a stage is handed over without the copy that would fill it
    "arrive", "await",  # other mbarriers
    "announce",  # bytes that a role of the other CTA has copied here, which counts as its own arrival
    "issue", "finish", "commit", "softmax",  # products; `commit` arrives, once those issued are done
    "take", "give", "sync",  # named barriers
    "read", "write", "update", "clear", "store", "drain",  # memory; stores read it asynchronously
    "allocate", "free",  # tensor memory, by the role's first warp
]  # fmt: skip
WORDS: dict[str, str] = {
    "acquire": "wait for a free stage of {}", "load": "start the copy of {}",
    "fill": "fill {}", "forgo": "leave {} out", "wait": "wait for {}", "release": "free {}",
    "arrive": "arrive at {}", "await": "wait for {}", "announce": "announce {}",
    "issue": "start {}", "finish": "wait for {}", "commit": "signal {} when all this is done",
    "softmax": "softmax",
    "take": "await {}", "give": "pass {}", "sync": "gather at {}",
    "read": "read {}", "write": "write {}", "update": "rescale {}",
    "clear": "clear the end of {}",
    "store": "start the store of {}", "drain": "wait until {} is read",
    "allocate": "allocate {}", "free": "free {}",
}  # fmt: skip
NEXT_WORDS: dict[str, str] = {
    "acquire": "wait until the last number is read", "fill": "publish the next tile's number",
    "wait": "wait for the next tile's number", "read": "read it", "release": "let it be overwritten",
    "load": "ask for the tile of a block that has not started",
}  # fmt: skip

RECEIVE: tuple[Action, ...] = ("wait", "read", "release")
"""Actions of a reader of the next tile's number."""

WARP = 32
WARPGROUP = 4
"""Its warps."""
WIDTH = 110
"""Columns of what explains."""


@dataclass(frozen=True)
class Event:
    """`action` on `target`: a ring, a barrier, a product, or memory.

    tile, per, each    which use of it: `each` times the number of the key tile at hand (of the tile of
                       queries, of the later key tile) plus `tile`: -1 is the one before
    ahead              it is left out where there is no such tile
    ending             it is left out unless the key tile so far from the one at hand ends its row
    starting           likewise, unless that starts its row
    continuing         likewise, unless that is there and does not start its row
    staged             of named barriers with stages, it takes the one of its use
    maybe              what the data says may leave it out, for all who would come
    instead            it happens only where what may be left out is
    again              kernels may ask again for what was there: it is waited for where it is needed first
    leads              of a role that runs apart, the first warp alone does it
    """

    action: Action
    target: str = ""
    tile: int = 0
    per: Per = "key"
    each: int = 1
    ahead: bool = False
    ending: int | None = None
    starting: int | None = None
    continuing: int | None = None
    staged: bool = False
    maybe: bool = False
    again: bool = False
    leads: bool = False
    instead: bool = False

    def explain(self) -> str:
        if self.target == "next":
            return NEXT_WORDS[self.action]
        offset = self.tile // self.each
        indexed = self.per == "key" and not self.is_timeless
        index = "_j" + (f"{offset:+d}" if offset else "") if indexed else ""
        words = WORDS[self.action].format(self.target + index)
        if self.action in ("load", "issue", "finish"):
            words += " unless its tile is left out" * self.maybe
        else:
            words += " where a sequence ends" * self.maybe
        words += " if it ends a row" * (self.ending is not None)
        words += " if it starts a row" * (self.starting is not None)
        return words + " if the row goes on" * (self.continuing is not None)

    @property
    def is_timeless(self) -> bool:
        """True if its use has no number."""
        named = self.action in ("take", "give", "sync") and not self.staged
        return named or self.action in ("allocate", "free")


Events = tuple[Event, ...]


@dataclass(frozen=True)
class Rows:
    """Tiles of queries by their numbers of key tiles. Key tiles count on from one to the next."""

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    def starts(self, key_tile: int) -> bool:
        return any(sum(self.counts[:i]) == key_tile for i in range(len(self.counts)))

    def ends(self, key_tile: int) -> bool:
        return any(sum(self.counts[: i + 1]) - 1 == key_tile for i in range(len(self.counts)))

    def takes_part(self, event: Event, key_tile: int) -> bool:
        """True unless the event is left out for where the rows of key tiles begin or end."""
        ending, starting, continuing = (
            None if offset is None else key_tile + offset
            for offset in (event.ending, event.starting, event.continuing)
        )
        return (
            (ending is None or self.ends(ending))
            and (starting is None or self.starts(starting))
            and (continuing is None or (continuing < self.total and not self.starts(continuing)))
        )

    def row(self, key_tile: int) -> int:
        """The tile of queries that a key tile belongs to."""
        return next(i for i in range(len(self.counts)) if key_tile < sum(self.counts[: i + 1]))

    def place(self, event: Event, work: int, key_tile: int) -> Event | None:
        """The event at these tiles, with the number of the use as its `tile`; None where it is left out."""
        if event.instead:
            return None
        if event.is_timeless:
            return event
        base = {"key": key_tile, "work": work, "later": key_tile - work - 1, "block": 0}[event.per]
        number = event.each * base + event.tile
        total = {
            "key": self.total,
            "work": len(self.counts),
            "later": self.total - len(self.counts),
            "block": 1,
        }
        if event.ahead and number >= event.each * total[event.per]:
            return None
        return replace(event, tile=number) if self.takes_part(event, key_tile) else None


@dataclass(frozen=True)
class Product:
    """An asynchronous matrix product of a key tile.

    reads      operands, read until it is done
    result     written until it is done; "update" adds to it, with `fresh` only after the first key tile of a
               row
    engine     whatever executes products in order: a name that roles share, or "" for one per role
    """

    name: str
    reads: Events
    result: Event
    fresh: bool = False
    engine: str = ""


@dataclass(frozen=True)
class Role:
    """Role of warps, by its events: `opening` once; then per tile of queries `first` (its first key tile),
    `body` for each later one, and `last` (after the last one, whose number `tile` counts from); or `empty`,
    where there is none; `closing` once.

    warps       how many arrive when the role does; 0 for a role that never does
    products    that the role issues
    apart       its warps never wait for each other, so each runs the events by itself
    warp        the first of them in its CTA
    part        of memory of which each warp has its own part, the first of these
    cta         the one of a pair that they belong to
    """

    name: str
    warps: int
    opening: Events = ()
    first: Events = ()
    body: Events = ()
    last: Events = ()
    closing: Events = ()
    products: tuple[Product, ...] = ()
    apart: bool = False
    empty: Events = ()
    warp: int = 0
    cta: int = 0
    part: int = 0

    def run(self, key_tiles: list[int]) -> list[Event]:
        """All events for tiles of queries with these numbers of key tiles; `tile` is the number of the use:
        key tiles count on from one tile of queries to the next."""
        rows = Rows(tuple(key_tiles))
        placed = [rows.place(event, 0, 0) for event in self.opening]
        start = 0
        for work, count in enumerate(key_tiles):
            parts = [(self.first, 0), *((self.body, j) for j in range(1, count)), (self.last, count - 1)]
            if not count:
                parts = [(self.empty, 0)]
            for part, j in parts:
                placed += [rows.place(event, work, start + j) for event in part]
            start += count
        placed += [rows.place(event, len(key_tiles) - 1, start - 1) for event in self.closing]
        return [event for event in placed if event is not None]

    @property
    def parts(self) -> dict[str, Events]:
        return {name: getattr(self, name) for name in WHEN}

    @property
    def events(self) -> Events:
        return tuple(event for part in self.parts.values() for event in part)

    def uses(self, action: str, target: str) -> bool:
        return any(event.action == action and event.target == target for event in self.events)

    @property
    def least(self) -> Role:
        """The role where nothing happens that may be left out, and all that does instead."""
        parts = {
            name: tuple(replace(e, instead=False) for e in part if not e.maybe)
            for name, part in self.parts.items()
        }
        return replace(self, **parts)  # type: ignore[arg-type]

    @property
    def kind(self) -> str:
        """The name without its number: roles of one kind differ in nothing else."""
        return self.name.rstrip("0123456789 ")


@dataclass(frozen=True)
class Ring:
    """`stages` buffers of `stage_bytes` each. One copy of a tile is a few TMA boxes of `copies` bytes; where
    there are none, the producer itself fills the stage before it arrives.

    full_arrivals, transaction_bytes   complete a phase of a full barrier
    empty_arrivals                     complete a phase of an empty one
    per_warp                           each warp of the roles hands its own part over, at its own barriers
    once                               a block fills it once: nobody frees it, and there is no empty barrier
    freed_by                           the mbarrier that says so, where rings share one
    beside                             further regions that its copies fill: (name, bytes per stage)
    full_of                            the ring whose full barriers count its bytes, too, in kernels: CTAs of
                                       a pair fill theirs together
    lanes                              in kernels, so many of a warp that fills a stage arrive
    """

    name: str
    stages: int
    stage_bytes: int
    copies: tuple[int, ...]
    transaction_bytes: int
    empty_arrivals: int
    full_arrivals: int = 1
    per_warp: bool = False
    once: bool = False
    freed_by: str = ""
    beside: tuple[tuple[str, int], ...] = ()
    full_of: str = ""
    lanes: int = 1

    @property
    def shares_empty(self) -> bool:
        """True without an empty barrier of its own."""
        return self.once or bool(self.freed_by)

    @property
    def filled(self) -> int:
        """Bytes of a stage and of what comes with it."""
        return self.stage_bytes + sum(size for _, size in self.beside)

    @property
    def region(self) -> str:
        """Region of shared memory that holds the ring; the queries of all query tiles make up one."""
        return self.name.split()[0]


@dataclass(frozen=True)
class Barrier:
    """An mbarrier that guards no ring. With `per_warp`, each warp of the roles has its own. Of `stages`, uses
    take one after the other.

    sent, senders    in kernels, so many warps of the other CTA send bytes instead of arriving, and whoever
                     waits announces them
    lanes            in kernels, so many of a warp arrive
    cta              the one of a pair that it lies in
    """

    name: str
    arrivals: int
    meaning: str = ""
    per_warp: bool = False
    sent: int = 0
    senders: int = 0
    lanes: int = 1
    cta: int = 0
    stages: int = 1

    @property
    def counted(self) -> int:
        """Arrivals that kernels count: one announces the bytes of all senders."""
        return self.arrivals * self.lanes - self.senders + (self.senders > 0)


@dataclass(frozen=True)
class NamedBarrier:
    """Hardware barrier `number`; a phase completes when `threads` threads have arrived or wait. Of `stages`,
    each has its own, `apart` numbers after the one before."""

    name: str
    number: int
    threads: int
    stages: int = 1
    apart: int = 1

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self.number + stage * self.apart for stage in range(self.stages))


@dataclass(frozen=True)
class Topology:
    """Roles and what they hand to each other.

    overlaps     pairs of names that share bytes or columns
    by_warp      memory of which each warp of a role that runs `apart` touches its own rows
    stages       of memory that is no ring: (name, how many), where there are several
    places       names of mbarriers as they lie in a kernel's shared memory, for each CTA (signals.py); "" for
                 those that it has room for and does not use
    may_end      a block may find that it has no tile, and do nothing
    """

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...]
    barriers: tuple[NamedBarrier, ...]
    staging: Staging = "queries"
    mbarriers: tuple[Barrier, ...] = ()
    overlaps: tuple[tuple[str, str], ...] = ()
    by_warp: tuple[str, ...] = ()
    stages: tuple[tuple[str, int], ...] = ()
    places: tuple[tuple[str, ...], ...] = ((),)
    may_end: bool = False

    def ring(self, name: str) -> Ring:
        return next(ring for ring in self.rings if ring.name == name)

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def said(self, name: str, number: int | None) -> str:
        """The words for a use: which tile it is of, and which of the tile's uses."""
        if number is None:
            return name
        tile, use = divmod(number, self._uses.get(name, 1))
        return f"{name} tile {tile}" + (f" use {use}" if name in self._uses else "")

    @cached_property
    def _uses(self) -> dict[str, int]:
        """Number of uses per tile, for names that are used more than once."""
        return {event.target: event.each for role in self.roles for event in role.events if event.each > 1}

    @property
    def graph(self) -> networkx.DiGraph:
        """Nodes are roles, rings and barriers; edges carry arrivals and bytes."""
        import networkx

        graph = networkx.DiGraph()
        for ring in self.rings:
            graph.add_node(ring.name, kind="ring", stages=ring.stages, bytes=ring.transaction_bytes)
        for arrival in self.mbarriers:
            graph.add_node(arrival.name, kind="mbarrier", arrivals=arrival.arrivals)
        for barrier in self.barriers:
            graph.add_node(barrier.name, kind="barrier", number=barrier.number, threads=barrier.threads)
        for role in self.roles:
            graph.add_node(role.name, kind="role", warps=role.warps)
            for action, target in sorted({(e.action, e.target) for e in role.events}):
                self._connect(graph, role, action, target)
        return graph

    def _connect(self, graph: networkx.DiGraph, role: Role, action: str, target: str) -> None:
        threads = WARP * role.warps
        if action in ("load", "fill"):
            ring = self.ring(target)
            graph.add_edge(role.name, target, full=ring.full_arrivals, bytes=ring.transaction_bytes)
        elif action == "wait":
            graph.add_edge(target, role.name, stages=self.ring(target).stages)
        elif action == "release":
            graph.add_edge(role.name, target, empty=role.warps)
        elif action == "commit" and any(ring.name == target for ring in self.rings):
            graph.add_edge(role.name, target, empty=1)
        elif action in ("arrive", "commit"):
            graph.add_edge(role.name, target, arrivals=role.warps if action == "arrive" else 1)
        elif action == "await":
            graph.add_edge(target, role.name)
        elif action in ("take", "sync"):
            graph.add_edge(target, role.name, threads=threads)
        elif action == "give":
            graph.add_edge(role.name, target, threads=threads)

    def explain(self) -> str:
        """Rings and barriers with their counts, and each kind of role in words."""
        lines = [
            f"  {ring.name}: {_count(ring.stages, 'stage')} of {ring.stage_bytes} B; full after"
            f" {_count(ring.full_arrivals, 'arrival')} and {ring.transaction_bytes} B,"
            f" {_freed(ring)}" + _EACH_WARP[ring.per_warp]
            for ring in self.rings
        ]
        lines += [
            f"  {barrier.name}: {_count(barrier.arrivals, 'arrival')}{_EACH_WARP[barrier.per_warp]}:"
            f" {barrier.meaning}"
            for barrier in self.mbarriers
        ]
        told: set[str] = set()
        for role in self.roles:
            if role.kind not in told:
                told.add(role.kind)
                lines += _explain_role(role)
        if self.may_end:
            lines.append("  a block of which the keys have no part ends at once")
        return "\n".join(lines)

    @property
    def least(self) -> Topology:
        """The pipeline where nothing happens that may be left out."""
        return replace(self, roles=tuple(role.least for role in self.roles))

    @property
    def one_tile(self) -> bool:
        """True if a block has one tile of its own, and ends with it."""
        return any(ring.once for ring in self.rings)

    @property
    def mbarrier_count(self) -> int:
        """Rings have a full and an empty one per stage."""
        rings = sum((1 if ring.shares_empty else 2) * ring.stages * _copies(ring) for ring in self.rings)
        return rings + sum(barrier.stages * _copies(barrier) for barrier in self.mbarriers)

    @property
    def unused(self) -> int:
        """Number of mbarriers that a CTA has room for and does not use."""
        return sum(name == "" for places in self.places[:1] for name in places)

    def check_fits(self, memory: Memory, target: Target, unused: int = 0) -> None:
        """PlanError where the rings are not what the memory has room for, or named barriers run out. There is
        room for `unused` mbarriers beside those of the pipeline."""
        needed: Counter[str] = Counter()
        for ring in self.rings:
            needed[ring.region] += ring.stages * ring.stage_bytes
            for name, size in ring.beside:
                needed[name] += ring.stages * size
        needed["barriers"] = MBARRIER * (self.mbarrier_count + unused)
        sizes = {region.name: region.size for region in memory.regions}
        for name, size in needed.items():
            if size != sizes.get(name, 0):
                what = "mbarriers" if name == "barriers" else f"rings in region {name}"
                raise PlanError(
                    f"{what} of {size} bytes",
                    f"the {sizes.get(name, 0)} bytes of the region",
                    "lay the memory out anew",
                )
        highest = max((number for barrier in self.barriers for number in barrier.numbers), default=0)
        if highest >= target.named_barriers:
            raise PlanError(
                f"named barrier {highest}",
                f"numbers below {target.named_barriers}",
                "use fewer of them",
            )


WHEN = {
    "opening": "at the start",
    "first": "first key tile, j",
    "body": "each later one, j",
    "last": "after the last, j",
    "empty": "without any",
    "closing": "at the end",
}


def _copies(of: Ring | Barrier) -> int:
    return WARPGROUP if of.per_warp else 1


_EACH_WARP = {True: ", warp by warp", False: ""}


def _freed(ring: Ring) -> str:
    if ring.freed_by:
        return f"freed by {ring.freed_by}"
    return "never freed" if ring.once else f"empty after {_count(ring.empty_arrivals, 'arrival')}"


def _explain_role(role: Role) -> list[str]:
    lines = [f"  {role.name}:"]
    for when, part in role.parts.items():
        if part:
            words = f"{WHEN[when]}: " + ", ".join(event.explain() for event in part if not event.instead)
            lines += wrap(words, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return lines


def _count(n: int, unit: str) -> str:
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"
