"""Token simulation of a pipeline: every role takes steps, in any order, until all are done or none can go on.

Barriers follow the hardware's rules: an mbarrier counts arrivals and bytes and waits compare a parity bit; a
named barrier counts threads. Copies end at any later moment. A product reads its stages from its start until
its role has waited for it. What the simulation finds, some timing of the chip can do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fa4flex.codegen.plan.fault import PlanError
from fa4flex.codegen.plan.pipeline import PRODUCTS, WARPGROUP, Event, Pipeline, Ring, Role

Pick = Callable[[int], int]
"""Which of n steps comes next: a number below n."""


def round_robin() -> Pick:
    """Everyone in turn."""
    turn = 0

    def pick(n: int) -> int:
        nonlocal turn
        turn += 1
        return turn % n

    return pick


def at_random(seed: int) -> Pick:
    return random.Random(seed).randrange


def simulate(pipeline: Pipeline, key_tiles: Sequence[int], pick: Pick) -> int:
    """Run tiles of queries with these numbers of key tiles (each at least 1). Returns the number of steps.

    Raises PlanError for a deadlock, for a stage that is overwritten or freed while it is needed or read
    before it is there, and for a copy, product or turn that is left over at the end.
    """
    machine = _Machine(pipeline, list(key_tiles))
    steps = 0
    while True:
        ready = machine.ready()
        if not ready:
            break
        machine.take(ready[pick(len(ready))])
        steps += 1
    machine.require_finished()
    return steps


def _fault(what: str, expected: str, fix: str) -> PlanError:
    return PlanError(what, expected, fix)


@dataclass
class Mbarrier:
    """An arrival barrier in shared memory: a phase ends when its arrivals and its bytes have come."""

    arrivals: int
    phases: int = 0
    arrived: int = 0
    bytes_due: int = 0

    def arrive(self, count: int, expect_bytes: int = 0) -> None:
        self.arrived += count
        self.bytes_due += expect_bytes
        self._complete()

    def bring(self, count: int) -> None:
        self.bytes_due -= count
        self._complete()

    def _complete(self) -> None:
        if self.arrived >= self.arrivals and self.bytes_due == 0:
            self.phases += 1
            self.arrived -= self.arrivals

    def passed(self, phase: int) -> bool:
        """What try_wait.parity tells of the phase with this number: the parity bit has turned."""
        return self.phases % 2 != phase % 2


@dataclass
class _Stage:
    full: Mbarrier
    empty: Mbarrier
    tile: int | None = None
    copies_left: int = 0
    needed_by: set[str] = field(default_factory=set)


@dataclass
class _Named:
    threads: int
    arrived: int = 0
    phases: int = 0

    def arrive(self) -> int:
        """Adds a warpgroup; returns the phase it arrived in."""
        phase = self.phases
        self.arrived += WARPGROUP
        if self.arrived >= self.threads:
            self.arrived -= self.threads
            self.phases += 1
        return phase


@dataclass
class _Actor:
    role: Role
    events: list[Event]
    at: int = 0
    held: set[tuple[str, int]] = field(default_factory=set)
    products: list[Event] = field(default_factory=list)
    written: bool = False
    storing: int | None = None
    asleep_in: int | None = None
    """Phase of the named barrier that this role has arrived at and waits for."""


class _Machine:
    def __init__(self, pipeline: Pipeline, key_tiles: list[int]) -> None:
        self.pipeline = pipeline
        self.actors = [_Actor(role, role.run(key_tiles)) for role in pipeline.roles]
        self.readers = {
            ring.name: {a.role.name for a in self.actors if _waits_for(a.role, ring)}
            for ring in pipeline.rings
        }
        self.stages = {ring.name: [_stage(ring) for _ in range(ring.stages)] for ring in pipeline.rings}
        self.named = {barrier.name: _Named(barrier.threads) for barrier in pipeline.barriers}
        self.copies: list[tuple[_Stage, int]] = []

    def ready(self) -> list[_Actor | int]:
        """What could come next: a step of each role that is not blocked, or the end of copy i under way."""
        free = [a for a in self.actors if a.at < len(a.events) and self._may(a, a.events[a.at])]
        return [*free, *range(len(self.copies))]

    def take(self, choice: _Actor | int) -> None:
        if isinstance(choice, int):
            self._land(choice)
        else:
            self._step(choice)

    def require_finished(self) -> None:
        stuck = [a for a in self.actors if a.at < len(a.events)]
        if stuck:
            where = "; ".join(f"{a.role.name}: {a.events[a.at]}" for a in stuck)
            raise _fault(f"deadlock: {where}", "every role ends", "look at what each of them waits for")
        for actor in self.actors:
            if actor.products or actor.written or actor.storing is not None:
                raise _fault(f"{actor.role.name} ends too early", "products and stores waited for", "wait")
        turns = sum(b.arrived for name, b in self.named.items())
        opened = WARPGROUP * sum(e.action == "give" for a in self.actors for e in a.role.opening)
        if turns != opened:
            raise _fault(
                f"{turns} threads are left at named barriers", f"{opened}, the one turn", "pass it on once"
            )

    # --- what blocks --------------------------------------------------------------------------------

    def _may(self, actor: _Actor, event: Event) -> bool:
        if event.action in ("acquire", "wait"):
            stage, phase = self._use(event)
            # A stage that was never used counts as freed in the phase before the first one.
            return stage.empty.passed(phase - 1) if event.action == "acquire" else stage.full.passed(phase)
        if actor.asleep_in is not None:
            return self.named[event.target].phases > actor.asleep_in
        return True

    def _use(self, event: Event) -> tuple[_Stage, int]:
        """The stage that use number `tile` of a ring takes, and which of its phases that is."""
        stages = self.stages[event.target]
        if not stages:
            raise _fault(f"ring {event.target} has no stage", "at least 1", "give it one")
        return stages[event.tile % len(stages)], event.tile // len(stages)

    # --- what happens -------------------------------------------------------------------------------

    def _step(self, actor: _Actor) -> None:
        event = actor.events[actor.at]
        if event.action in ("take", "sync") and actor.asleep_in is None:
            actor.asleep_in = self.named[event.target].arrive()
            return
        actor.asleep_in = None
        actor.at += 1
        handler = getattr(self, f"_{event.action}", None)
        if handler is not None:
            handler(actor, event)

    def _load(self, actor: _Actor, event: Event) -> None:
        stage, _ = self._use(event)
        ring = self.pipeline.ring(event.target)
        if stage.needed_by or stage.copies_left:
            raise _fault(
                f"{event.target} tile {event.tile} overwrites tile {stage.tile}",
                f"nobody needs it; {sorted(stage.needed_by) or 'a copy'} still does",
                "let the producer wait until all consumers have freed the stage",
            )
        stage.tile, stage.needed_by, stage.copies_left = (
            event.tile,
            set(self.readers[event.target]),
            len(ring.copies),
        )
        stage.full.arrive(1, ring.transaction_bytes)
        self.copies += [(stage, size) for size in ring.copies]

    def _land(self, i: int) -> None:
        stage, size = self.copies.pop(i)
        stage.copies_left -= 1
        stage.full.bring(size)

    def _wait(self, actor: _Actor, event: Event) -> None:
        actor.held.add((event.target, event.tile))

    def _release(self, actor: _Actor, event: Event) -> None:
        stage, _ = self._use(event)
        reading = [p for p in actor.products for use in _reads(p, actor) if use == (event.target, event.tile)]
        over_queries = event.target.startswith("q") and self.pipeline.staging == "queries"
        staged = over_queries and (actor.storing is not None or actor.written)
        if reading or staged:
            raise _fault(
                f"{actor.role.name} frees {event.target} tile {event.tile} in use",
                "freed after its product or store has read it",
                "wait for the product or store first",
            )
        if (event.target, event.tile) not in actor.held:
            raise _fault(
                f"{actor.role.name} frees {event.target} tile {event.tile}, which it never had",
                "a wait for the tile first",
                "wait for its full barrier before it is read and freed",
            )
        actor.held.discard((event.target, event.tile))
        stage.needed_by.discard(actor.role.name)
        stage.empty.arrive(actor.role.warps)

    def _issue(self, actor: _Actor, event: Event) -> None:
        if "q" in PRODUCTS[event.target] and not any(name.startswith("q") for name, _ in actor.held):
            raise _fault(
                f"{actor.role.name} multiplies queries before they are there", "a wait", "wait for q"
            )
        for name, tile in _reads(event, actor):
            stage = self._use(Event("wait", name, tile))[0]
            if (name, tile) not in actor.held or stage.tile != tile or stage.copies_left:
                raise _fault(
                    f"{actor.role.name} multiplies {name} tile {tile} before it is there",
                    "a wait for the tile, and all its bytes",
                    "wait for its full barrier first, and announce all its bytes",
                )
        actor.products.append(event)

    def _finish(self, actor: _Actor, event: Event) -> None:
        """Products end in the order in which they were issued, as wgmma groups do."""
        key = (event.target, event.tile)
        while actor.products:
            oldest = actor.products.pop(0)
            if (oldest.target, oldest.tile) == key:
                return
        raise _fault(
            f"{actor.role.name} waits for {event.target} {event.tile}", "a product under way", "issue it"
        )

    def _give(self, actor: _Actor, event: Event) -> None:
        self.named[event.target].arrive()

    def _write(self, actor: _Actor, event: Event) -> None:
        if actor.products:
            raise _fault(
                f"{actor.role.name} writes out during a product", "all products done", "wait for them"
            )
        if actor.storing is not None:
            raise _fault(
                f"{actor.role.name} writes out over a store", "the last store read", "drain it first"
            )
        over_queries = self.pipeline.staging == "queries"
        if over_queries and not any(name.startswith("q") for name, _ in actor.held):
            raise _fault(
                f"{actor.role.name} writes out over queries it has freed", "still held", "free later"
            )
        actor.written = True

    def _store(self, actor: _Actor, event: Event) -> None:
        if not actor.written:
            raise _fault(
                f"{actor.role.name} stores what it has not written", "written before", "write it first"
            )
        actor.storing, actor.written = event.tile, False

    def _drain(self, actor: _Actor, event: Event) -> None:
        actor.storing = None


def _stage(ring: Ring) -> _Stage:
    return _Stage(Mbarrier(ring.full_arrivals), Mbarrier(ring.empty_arrivals))


def _waits_for(role: Role, ring: Ring) -> bool:
    return any(e.action == "wait" and e.target == ring.name for part in role.parts.values() for e in part)


def _reads(product: Event, actor: _Actor) -> list[tuple[str, int]]:
    """The uses of rings that a product reads: its key tile, and the queries that the role waited for."""
    queries = [use for use in actor.held if use[0].startswith("q")]
    keys = [(name, product.tile) for name in PRODUCTS[product.target] if name != "q"]
    return keys + (queries if "q" in PRODUCTS[product.target] else [])
