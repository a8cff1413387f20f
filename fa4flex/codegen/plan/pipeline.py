"""The pipeline: roles, the rings and barriers between them, and in which order each role uses them.

An mbarrier completes a phase when its arrivals and its bytes have all come (PTX ISA, mbarrier). A ring has a
full and an empty one per stage: the producer arrives once on `full` and announces the bytes that the copies
will bring; consumers arrive on `empty`, one lane of every warp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fa4flex.codegen.plan.fault import PlanError

if TYPE_CHECKING:
    import networkx

Staging = Literal["queries", "own", "none"]
"""Where the output passes through shared memory: over the queries, in a region of its own, or not."""
Action = Literal[
    "acquire", "load", "wait", "release",  # stages of rings
    "issue", "finish", "softmax",  # products
    "take", "give", "sync",  # named barriers
    "write", "store", "drain",  # the staged output
]  # fmt: skip
WORDS: dict[str, str] = {
    "acquire": "wait for a free stage of {}", "load": "start the copy of {}",
    "wait": "wait for {}", "release": "free {}",
    "issue": "start {}", "finish": "wait for {}", "softmax": "softmax",
    "take": "await {}", "give": "pass {}", "sync": "gather at {}",
    "write": "write {} to shared memory", "store": "start the store of {}", "drain": "wait until {} is read",
}  # fmt: skip
NEXT_WORDS: dict[str, str] = {
    "acquire": "wait until the last number is read", "load": "publish the next tile's number",
    "wait": "wait for the next tile's number", "release": "let it be overwritten",
}  # fmt: skip
PRODUCTS: dict[str, tuple[str, ...]] = {"S": ("q", "k"), "O": ("v",)}
"""Asynchronous matrix products and the regions whose stages they read: S = q k', O += P v."""

PER_WORK = ("q", "out", "next")
"""Targets, by how their names start, that are used once per tile of queries."""

WARPGROUP = 128


@dataclass(frozen=True)
class Event:
    """`action` on `target`: a ring, a product, a named barrier, or the staged output.

    `tile` counts key tiles from the one at hand, tiles of queries for q, out and next: -1 is the one
    before.
    """

    action: Action
    target: str = ""
    tile: int = 0

    def explain(self) -> str:
        if self.target == "next":
            return NEXT_WORDS[self.action]
        indexed = self.target in ("k", "v", *PRODUCTS)
        index = ("_j", "_j-1")[-self.tile] if indexed else ""
        return WORDS[self.action].format(self.target + index)


Events = tuple[Event, ...]


@dataclass(frozen=True)
class Role:
    """Who runs which events: `opening` once; then per tile of queries `first` (its first key tile), `body`
    for each later one, and `last` (after the last one, whose number `tile` counts from); `closing` once.

    `warps` is how many arrive when the role frees a stage; 0 for a role that frees none.
    """

    name: str
    warps: int
    opening: Events = ()
    first: Events = ()
    body: Events = ()
    last: Events = ()
    closing: Events = ()

    def run(self, key_tiles: list[int]) -> list[Event]:
        """All events for tiles of queries with these numbers of key tiles; `tile` is the number of the use:
        key tiles count on from one tile of queries to the next; PER_WORK counts tiles of queries."""
        events = list(self.opening)
        start = 0
        for work, count in enumerate(key_tiles):
            parts = [(self.first, 0), *((self.body, j) for j in range(1, count)), (self.last, count - 1)]
            for part, j in parts:
                events += [self._place(event, work, start + j) for event in part]
            start += count
        return events + list(self.closing)

    @staticmethod
    def _place(event: Event, work: int, j: int) -> Event:
        number = work if event.target.startswith(PER_WORK) else j
        return Event(event.action, event.target, event.tile + number)

    @property
    def parts(self) -> dict[str, Events]:
        return {name: getattr(self, name) for name in _WHEN}


@dataclass(frozen=True)
class Ring:
    """`stages` buffers of `stage_bytes` each. One copy of a tile is a few TMA boxes of `copies` bytes; where
    there are none, the producer itself writes the stage before it arrives.

    full_arrivals, transaction_bytes   complete a phase of a full barrier
    empty_arrivals                     complete a phase of an empty one
    """

    name: str
    stages: int
    stage_bytes: int
    copies: tuple[int, ...]
    transaction_bytes: int
    empty_arrivals: int
    full_arrivals: int = 1

    @property
    def region(self) -> str:
        """Of shared memory; the queries of all consumers make up one."""
        return self.name.split()[0]


@dataclass(frozen=True)
class NamedBarrier:
    """Hardware barrier `number`; a phase completes when `threads` threads have arrived or wait."""

    name: str
    number: int
    threads: int


@dataclass(frozen=True)
class Pipeline:
    """Roles and what they hand to each other."""

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...]
    barriers: tuple[NamedBarrier, ...]
    staging: Staging = "queries"

    def ring(self, name: str) -> Ring:
        return next(ring for ring in self.rings if ring.name == name)

    @property
    def graph(self) -> networkx.DiGraph:
        """Nodes are roles, rings and named barriers; edges carry arrivals and bytes."""
        import networkx

        graph = networkx.DiGraph()
        for ring in self.rings:
            graph.add_node(ring.name, kind="ring", stages=ring.stages, bytes=ring.transaction_bytes)
        for barrier in self.barriers:
            graph.add_node(barrier.name, kind="barrier", number=barrier.number, threads=barrier.threads)
        for role in self.roles:
            graph.add_node(role.name, kind="role", warps=role.warps)
            used = {(e.action, e.target) for part in role.parts.values() for e in part}
            for action, target in sorted(used):
                self._connect(graph, role, action, target)
        return graph

    def _connect(self, graph: networkx.DiGraph, role: Role, action: str, target: str) -> None:
        if action == "load":
            ring = self.ring(target)
            graph.add_edge(role.name, target, full=ring.full_arrivals, bytes=ring.transaction_bytes)
        elif action == "wait":
            graph.add_edge(target, role.name, stages=self.ring(target).stages)
        elif action == "release":
            graph.add_edge(role.name, target, empty=role.warps)
        elif action in ("take", "sync"):
            graph.add_edge(target, role.name, threads=WARPGROUP)
        elif action == "give":
            graph.add_edge(role.name, target, threads=WARPGROUP)

    def explain(self) -> str:
        """Each kind of role in words, and the rings with their counts; consumers differ only in turn."""
        lines = [
            f"  {ring.name}: {_count(ring.stages, 'stage')} of {ring.stage_bytes} B; full after"
            f" {_count(ring.full_arrivals, 'arrival')} and {ring.transaction_bytes} B,"
            f" empty after {_count(ring.empty_arrivals, 'arrival')}"
            for ring in self.rings
        ]
        for role in self.roles[:2]:
            lines.append(f"  {role.name}:")
            lines += [
                f"    {_WHEN[when]}: " + ", ".join(event.explain() for event in part)
                for when, part in role.parts.items()
                if part
            ]
        return "\n".join(lines)

    def check(self) -> None:
        """PlanError where counts and sums do not fit; `simulate` then looks at the order."""
        for ring in self.rings:
            _check_ring(ring, self.roles)
        for role in self.roles:
            _check_pairs(role)
        _check_barriers(self.barriers, self.roles)


_WHEN = {
    "opening": "at the start",
    "first": "first key tile, j",
    "body": "each later one, j",
    "last": "after the last, j",
    "closing": "at the end",
}


def _count(n: int, unit: str) -> str:
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"


# --- checks of counts and sums --------------------------------------------------------------------------


def _check_ring(ring: Ring, roles: tuple[Role, ...]) -> None:
    def require(given: int, expected: int, what: str) -> None:
        if given != expected:
            raise PlanError(f"ring {ring.name}: {what}", f"{expected}, not {given}", "make both sides equal")

    if ring.stages < 1:
        raise PlanError(f"ring {ring.name} has {ring.stages} stages", "at least 1", "give it one")
    require(ring.transaction_bytes, sum(ring.copies), "bytes announced, against bytes that its copies bring")
    if ring.copies:
        require(ring.stage_bytes, sum(ring.copies), "bytes of a stage, against bytes that its copies bring")
    loaders = [role for role in roles if any(_uses(part, "load", ring) for part in role.parts.values())]
    freers = [role for role in roles if any(_uses(part, "release", ring) for part in role.parts.values())]
    require(ring.full_arrivals, len(loaders), "arrivals that fill a stage, against roles that load it")
    require(
        ring.empty_arrivals, sum(r.warps for r in freers), "arrivals that free a stage, against warps that do"
    )


def _uses(events: Events, action: str, ring: Ring) -> bool:
    return any(event.action == action and event.target == ring.name for event in events)


_PAIRS: tuple[tuple[Action, Action], ...] = (
    ("acquire", "load"), ("wait", "release"), ("issue", "finish"),
)  # fmt: skip


def _check_pairs(role: Role) -> None:
    """Whatever a role opens it closes: the same tiles, later."""
    events = role.run([3, 1])
    for opening, closing in _PAIRS:
        open_now: Counter[tuple[str, int]] = Counter()
        for event in events:
            key = (event.target, event.tile)
            open_now[key] += (event.action == opening) - (event.action == closing)
            if open_now[key] not in (0, 1):
                word = closing if open_now[key] < 0 else opening
                raise PlanError(
                    f"{role.name}: {word} of {event.target} tile {event.tile} out of place",
                    f"each {opening} before its one {closing}",
                    "reorder the role's events",
                )
        left = sorted(key for key, n in open_now.items() if n)
        if left:
            raise PlanError(
                f"{role.name}: {opening} of {left[0][0]} tile {left[0][1]}, and no {closing}",
                f"one {closing} for each {opening}",
                f"add the missing {closing}",
            )


def _check_barriers(barriers: tuple[NamedBarrier, ...], roles: tuple[Role, ...]) -> None:
    numbers = [barrier.number for barrier in barriers]
    if len(set(numbers)) < len(numbers) or 0 in numbers:
        raise PlanError(
            f"named barriers numbered {numbers}", "different numbers, none 0 (__syncthreads)", "renumber them"
        )
    for barrier in barriers:
        # The first turn is given once, by whoever opens; then each phase has one giver and one taker.
        used = {
            (role.name, event.action)
            for role in roles
            for when, part in role.parts.items()
            for event in part
            if event.target == barrier.name and when != "opening"
        }
        threads = WARPGROUP * len(used)
        if threads != barrier.threads:
            raise PlanError(
                f"named barrier {barrier.name} of {barrier.threads} threads, where {threads} come",
                "as many threads as arrive and wait in a phase",
                "count both sides",
            )
