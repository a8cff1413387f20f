"""Token simulation of a pipeline: every role takes steps, in any order, until all are done or none can go on.

Barriers follow the hardware's rules: an mbarrier counts arrivals and bytes and waits compare a parity bit; a
named barrier counts threads. Copies and stores end at any later moment; products are executed one by one, in
order, at any later moment, and use their operands and their result until then.

Beside what happens, a run finds what could happen: it knows which steps hand-overs order
(happens_before.py). Each arrival must be sure to fall into its own phase, each wait to see no other phase's
parity, and each use of memory to come after those it depends on. Where all of that holds, no step's outcome
depends on the order in which steps were picked, so one run stands for all of them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.happens_before import Kind, Known, Memory, Place, Trace
from fa4flex.kernels.plan.signals import own_barrier
from fa4flex.kernels.plan.topology import WARP, Event, NamedBarrier, Product, Ring, Role, Rows, Topology

Pick = Callable[[int], int]
"""Choice among n steps of the next one: a number below n."""


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


def simulate(topology: Topology, key_tiles: Sequence[int], pick: Pick) -> int:
    """Run tiles of queries with these numbers of key tiles (0 only where roles have events for it). Returns
    the number of steps.

    Raises PlanError for a deadlock, for memory that is overwritten, freed or read while another may still use
    it or before its content is there, for a barrier whose waiter may see the parity of another phase, and for
    a copy, product, content or arrival that is left over at the end.
    """
    return len(trace(topology, key_tiles, pick).steps)


@lru_cache(maxsize=256)
def prove(topology: Topology) -> None:
    """PlanError unless counts and sums fit, and a short row of key tiles, and one that goes twice round the
    rings, run to their end. Tensor memory is shared there as its map says. One interleaving costs up to a
    tenth of a second, of a pair of CTAs a third, once per pipeline; tests try many."""
    check_counts(topology)
    twice = 2 * max(ring.stages for ring in topology.rings) + 1
    empty = [0] * any(role.empty for role in topology.roles)
    works = [[1], [twice], *[[none] for none in empty]] if topology.one_tile else [[*empty, 1, *empty, twice]]
    if any(event.continuing is not None for role in topology.roles for event in role.opening):
        works.append([twice])  # a first row with no row before it
    for pipeline in dict.fromkeys((topology, topology.least)):
        for rows in works:
            simulate(pipeline, rows, round_robin())


def trace(topology: Topology, key_tiles: Sequence[int], pick: Pick) -> Trace:
    """The same, and what happened."""
    machine = _Machine(topology, list(key_tiles))
    while True:
        ready = machine.ready()
        if not ready:
            break
        ready[pick(len(ready))]()
    machine.require_finished()
    return machine.trace


@dataclass
class Mbarrier:
    """An arrival barrier in shared memory: a phase ends when its arrivals and its bytes have come. `of`: the
    name without its stage. `over`: what is known once each phase has ended."""

    arrivals: int
    name: str = ""
    of: str = ""
    phases: int = 0
    arrived: int = 0
    bytes_due: int = 0
    known: Known = Known()
    over: list[Known] = field(default_factory=list)

    def arrive(self, count: int, expect_bytes: int = 0, known: Known = Known()) -> None:
        self.arrived += count
        self.bytes_due += expect_bytes
        self._complete(known)

    def bring(self, count: int, known: Known = Known()) -> None:
        self.bytes_due -= count
        self._complete(known)

    def _complete(self, known: Known) -> None:
        self.known |= known
        if self.arrived >= self.arrivals and self.bytes_due == 0:
            self.phases += 1
            self.arrived -= self.arrivals
            self.over.append(self.known)
            self.known = Known()

    def passed(self, phase: int) -> bool:
        """Result of try_wait.parity for the phase with this number: the parity bit has turned."""
        return self.phases % 2 != phase % 2


@dataclass
class _Op:
    """An asynchronous product, or (without one) a commit, which waits for those before it. `over`: what is
    known once it is done."""

    event: Event
    known: Known
    product: Product | None = None
    over: Known | None = None


@dataclass
class _Engine:
    """Executes in order what is queued. `issued`: all products, by name and key tile."""

    name: str
    queue: list[_Op] = field(default_factory=list)
    known: Known = Known()
    issued: dict[tuple[str, int], _Op] = field(default_factory=dict)


@dataclass
class _Copy:
    """An asynchronous copy into a stage or out of one; `left` boxes of it are under way."""

    name: str
    place: Place
    number: int
    known: Known
    left: int
    owner: _Actor
    full: Mbarrier | None = None
    over: Known | None = None


@dataclass
class _Actor:
    """A role, or one warp of a role that runs apart."""

    name: str
    role: Role
    warp: int | None
    events: list[Event]
    engine: _Engine
    at: int = 0
    known: Known = Known()
    stores: list[_Copy] = field(default_factory=list)
    reading: dict[tuple[str, int], list[_Op | _Copy]] = field(default_factory=lambda: defaultdict(list))
    """Its products and stores, by what they read."""
    awaits: tuple[Mbarrier, int] | None = None
    """The barrier and phase that the event at hand waits for."""
    asleep_in: int | None = None
    """Phase of the named barrier that this role has arrived at and waits for."""

    @property
    def arrivals(self) -> int:
        return self.role.warps if self.warp is None else 1


_WAITS = ("acquire", "wait", "await")
_VERBS: dict[str, tuple[Kind, str]] = {
    "fill": ("write", "write"), "forgo": ("write", "leave out"),
    "write": ("write", "write"), "update": ("update", "rescale"),
    "read": ("read", "read"), "softmax": ("read", "read"), "clear": ("touch", "clear"),
    "allocate": ("write", "allocate"), "free": ("write", "free"),
}  # fmt: skip


def _stage_name(barrier: NamedBarrier, stage: int) -> str:
    return f"{barrier.name} {stage}" if barrier.stages > 1 else barrier.name


class _Machine:
    def __init__(self, topology: Topology, key_tiles: list[int]) -> None:
        self.topology = topology
        self.rows = Rows(tuple(key_tiles))
        self.trace = Trace()
        self.stages = dict(topology.stages)
        self.memory = Memory(
            self.trace, topology.overlaps, topology.by_warp, topology.said, self.stages.keys()
        )
        self.rings = {ring.name: ring for ring in topology.rings}
        self.guards = {barrier.name: barrier for barrier in topology.mbarriers}
        self.per_warp = {ring.name for ring in topology.rings if ring.per_warp}
        self.per_warp |= {barrier.name for barrier in topology.mbarriers if barrier.per_warp}
        self.engines: dict[str, _Engine] = {}
        self.actors = [actor for role in topology.roles for actor in self._actors(role, key_tiles)]
        self.mbarriers: dict[str, Mbarrier] = {}
        self.named = {
            _stage_name(barrier, stage): Mbarrier(barrier.threads, barrier.name)
            for barrier in topology.barriers
            for stage in range(barrier.stages)
        }
        self.meetings = {barrier.name: barrier for barrier in topology.barriers}
        self.copies: list[_Copy] = []
        self.asynchronous: set[str] = set()
        self.seen: dict[tuple[str, int, str], int] = {}
        """The step that saw a phase's end, by barrier, phase and waiter."""

    def _actors(self, role: Role, key_tiles: list[int]) -> Iterator[_Actor]:
        events = role.run(key_tiles)
        for warp in range(role.warps) if role.apart else (None,):
            name = role.name if warp is None else f"warp {warp} of {role.name}"
            kept = [e for e in events if not (warp and (e.leads or e.action in ("allocate", "free")))]
            engine = next((product.engine for product in role.products if product.engine), name)
            part = None if warp is None else role.part + warp
            yield _Actor(name, role, part, kept, self.engines.setdefault(engine, _Engine(engine)))

    @cached_property
    def waiters(self) -> dict[tuple[str, int], set[str]]:
        """Names of actors that will wait, by barrier and phase."""
        results: dict[tuple[str, int], set[str]] = defaultdict(set)
        for actor in self.actors:
            for event in actor.events:
                if event.action in _WAITS:
                    barrier, phase = self._found(actor, event)
                    results[barrier.name, phase].add(actor.name)
        return results

    def ready(self) -> list[Callable[[], None]]:
        """Steps that could come next: one of each role that is not blocked, the end of a copy under way, or
        the end of the oldest product."""
        steps: list[Callable[[], None]] = [
            partial(self._step, actor)
            for actor in self.actors
            if actor.at < len(actor.events) and self._may(actor, actor.events[actor.at])
        ]
        steps += [partial(self._land, copy) for copy in self.copies]
        return steps + [partial(self._execute, engine) for engine in self.engines.values() if engine.queue]

    def require_finished(self) -> None:
        stuck = [a for a in self.actors if a.at < len(a.events)]
        if stuck:
            waits = dict.fromkeys(f"{a.role.name}: {self._words(a.events[a.at])}" for a in stuck)
            raise PlanError(
                f"deadlock: {'; '.join(waits)}", "every role ends", "look at what each of them waits for"
            )
        for number, step in enumerate(self.trace.steps):
            if step.who in self.asynchronous and not any(a.known.bits >> number & 1 for a in self.actors):
                raise PlanError(
                    f"{step} may not be over when all roles have ended",
                    "a role that ends after it",
                    "wait for it",
                )
        self.memory.require_read()
        opened: dict[str, int] = defaultdict(int)
        for actor in self.actors:
            for event in actor.role.opening:
                if event.action in ("give", "arrive"):
                    name = self._name(actor, event.target)
                    opened[name] += actor.arrivals * (WARP if event.action == "give" else 1)
        left: dict[str, list[Mbarrier]] = defaultdict(list)
        for barrier in (*self.named.values(), *self.mbarriers.values()):
            left[barrier.of or barrier.name].append(barrier)
        for name, barriers in left.items():
            arrived, due = sum(b.arrived for b in barriers), sum(b.bytes_due for b in barriers)
            if arrived != opened[name] or due:
                raise PlanError(
                    f"{arrived} arrivals and {due} bytes are left over at {name}",
                    f"{opened[name]} and none, what was there at the start",
                    "arrive once for each phase that is waited for",
                )

    # --- barriers -----------------------------------------------------------------------------------

    def _name(self, actor: _Actor, target: str) -> str:
        return f"{target} of warp {actor.warp}" if target in self.per_warp else target

    def _mbarrier(self, name: str, arrivals: int, of: str = "") -> Mbarrier:
        return self.mbarriers.setdefault(name, Mbarrier(arrivals, name, of))

    def _stage(self, ring: Ring, number: int) -> tuple[Place, int]:
        """The stage that a use of a ring takes, and which of its phases that is."""
        if ring.stages < 1:
            raise PlanError(f"ring {ring.name} has no stage", "at least 1", "give it one")
        return (ring.name, number % ring.stages), number // ring.stages

    def _end(self, actor: _Actor, target: str, number: int, side: str) -> tuple[Mbarrier, int]:
        """The full or empty barrier of a ring's stage, or a barrier by itself, and the phase of this use."""
        name = self._name(actor, target)
        if target not in self.rings:
            guard = self.guards[target]
            staged = own_barrier(guard, number, actor.warp or 0)
            return self._mbarrier(staged, guard.arrivals, name), number // guard.stages
        ring = self.rings[target]
        (_, stage), phase = self._stage(ring, number)
        arrivals = ring.full_arrivals if side == "full" else ring.empty_arrivals
        return self._mbarrier(f"{name} {side} {stage}", arrivals), phase

    def _awaited(self, actor: _Actor, event: Event) -> tuple[Mbarrier, int]:
        if actor.awaits is None:
            actor.awaits = self._found(actor, event)
        return actor.awaits

    def _found(self, actor: _Actor, event: Event) -> tuple[Mbarrier, int]:
        barrier, phase = self._end(
            actor, event.target, event.tile, "empty" if event.action == "acquire" else "full"
        )
        # A stage that was never used counts as freed in the phase before the first one.
        return barrier, phase - (event.action == "acquire")

    def _arrive(
        self, who: str, end: tuple[Mbarrier, int], count: int, known: Known, expect_bytes: int = 0
    ) -> None:
        """Arrivals must be sure to come after the phase before theirs."""
        barrier, phase = end
        before = barrier.over[phase - 1] if 0 < phase <= barrier.phases else Known()
        if barrier.phases != phase or not known.includes(before):
            raise PlanError(
                f"{who} arrives at {barrier.name} for phase {phase}, perhaps in phase"
                f" {barrier.phases if barrier.phases != phase else phase - 1}",
                "an arrival that comes after the phase before its own",
                "wait for something that the end of that phase leads to",
            )
        barrier.arrive(count, expect_bytes, known)
        self._require_seen(barrier)

    def _require_seen(self, barrier: Mbarrier) -> None:
        """A phase may only end after everyone has seen the end of the one before."""
        phase = barrier.phases - 2
        for waiter in self.waiters.get((barrier.name, phase), ()):
            step = self.seen.get((barrier.name, phase, waiter))
            if step is None or not barrier.over[-1].bits >> step & 1:
                raise PlanError(
                    f"{waiter} may be two phases behind at {barrier.name}: phase {phase + 1} ends while it"
                    f" may still wait for phase {phase}",
                    "a phase that ends after all have seen the end of the one before",
                    "let what leads to it wait for them",
                )

    def _see(self, actor: _Actor, event: Event) -> Known:
        """Knowledge that a wait gives. The parity bit must not be that of a phase two earlier."""
        barrier, phase = self._awaited(actor, event)
        self.seen[barrier.name, phase, actor.name] = len(self.trace.steps)
        if phase < 0:
            return Known()
        sure = phase == 0 or (phase <= barrier.phases and actor.known.includes(barrier.over[phase - 1]))
        if not sure or barrier.phases <= phase:
            raise PlanError(
                f"{actor.name} may see at {barrier.name} the parity of phase {phase - 2} for that of"
                f" phase {phase}",
                "a wait that comes after the phase before",
                "wait for every phase, or for something that follows from it",
            )
        return barrier.over[phase]

    # --- what blocks --------------------------------------------------------------------------------

    def _may(self, actor: _Actor, event: Event) -> bool:
        if event.action in _WAITS:
            barrier, phase = self._awaited(actor, event)
            return barrier.passed(phase)
        if event.action == "finish":
            return self._issued(actor, event).over is not None
        if event.action == "drain":
            return all(store.over for store in self._drained(actor, event))
        if actor.asleep_in is not None:
            return self._meeting(event).phases > actor.asleep_in
        return True

    def _drained(self, actor: _Actor, event: Event) -> list[_Copy]:
        """A store, and all that were started before it."""
        named = [
            i for i, s in enumerate(actor.stores) if (s.place[0], s.number) == (event.target, event.tile)
        ]
        return actor.stores[: named[-1] + 1] if named else []

    def _meeting(self, event: Event) -> Mbarrier:
        barrier = self.meetings[event.target]
        return self.named[_stage_name(barrier, event.tile % barrier.stages)]

    def _come(self, actor: _Actor, event: Event) -> None:
        """Threads come to a named barrier, where those of the phase before must be gone."""
        barrier = self._meeting(event)
        if barrier.over and not actor.known.includes(barrier.over[-1]):
            raise PlanError(
                f"{actor.name} comes to {event.target}, perhaps before all have left it",
                "threads that come when the phase before is over",
                "wait for something that its end leads to",
            )
        barrier.arrive(WARP * actor.arrivals, known=actor.known)

    def _issued(self, actor: _Actor, event: Event) -> _Op:
        op = actor.engine.issued.get((event.target, event.tile))
        if op is None:
            raise PlanError(
                f"{actor.name} waits for {event.target} tile {event.tile}", "a product under way", "issue it"
            )
        return op

    # --- what happens -------------------------------------------------------------------------------

    def _step(self, actor: _Actor) -> None:
        event = actor.events[actor.at]
        if event.action in ("take", "sync") and actor.asleep_in is None:
            self._log(actor, event)
            actor.asleep_in = self._meeting(event).phases
            self._come(actor, event)
            return
        actor.at += 1
        known = actor.known
        if event.action in _WAITS:
            known |= self._see(actor, event)
        elif event.action in ("take", "sync") and actor.asleep_in is not None:
            known |= self._meeting(event).over[actor.asleep_in]
        elif event.action == "finish":
            known |= self._issued(actor, event).over or Known()
        elif event.action == "drain":
            for store in self._drained(actor, event):
                known |= store.over or Known()
        actor.asleep_in = actor.awaits = None
        actor.known = known
        self._log(actor, event)
        if event.action in _VERBS:
            self._use(actor, event)
        handler = getattr(self, f"on_{event.action}", None)
        if handler is not None:
            handler(actor, event)

    def _log(self, actor: _Actor, event: Event) -> None:
        actor.known = self.trace.add(actor.name, self._words(event), actor.known, actor.warp)

    def _words(self, event: Event) -> str:
        number = None if event.is_timeless else event.tile
        return f"{event.action} {self.topology.said(event.target, number)}"

    def _place(self, event: Event) -> Place:
        """Memory that is no ring has one stage, where nothing else is said."""
        ring = self.rings.get(event.target)
        stage = event.tile % self.stages.get(event.target, 1)
        return self._stage(ring, event.tile)[0] if ring else (event.target, stage)

    def _use(self, actor: _Actor, event: Event) -> None:
        kind, verb = _VERBS[event.action]
        whole = event.action in ("allocate", "free")
        number, warp = (None, None) if whole else (event.tile, actor.warp)
        self.memory.use(actor.known.latest[0], kind, verb, self._place(event), number, warp)

    def on_load(self, actor: _Actor, event: Event) -> None:
        ring = self.rings[event.target]
        end = self._end(actor, event.target, event.tile, "full")
        name, left = f"the copy of {event.target} tile {event.tile}", len(ring.copies)
        if left:
            self.copies.append(_Copy(name, self._place(event), event.tile, actor.known, left, actor, end[0]))
        self._arrive(actor.name, end, actor.arrivals, actor.known, ring.transaction_bytes)

    def on_fill(self, actor: _Actor, event: Event) -> None:
        end = self._end(actor, event.target, event.tile, "full")
        expected = self.rings[event.target].transaction_bytes
        self._arrive(actor.name, end, actor.arrivals, actor.known, expected)

    def on_forgo(self, actor: _Actor, event: Event) -> None:
        end = self._end(actor, event.target, event.tile, "full")
        self._arrive(actor.name, end, actor.arrivals, actor.known)

    def _land(self, copy: _Copy) -> None:
        """A box of a copy into a stage lands, or a store has read its stage."""
        copy.left -= 1
        known = Known()
        if not copy.left:
            self.copies.remove(copy)
            known = copy.over = self.trace.add(copy.name, "", copy.known)
            self.asynchronous.add(copy.name)
            kind: Kind = "write" if copy.full else "read"
            self.memory.use(known.latest[0], kind, kind, copy.place, copy.number)
        if copy.full:
            copy.full.bring(self.rings[copy.place[0]].copies[copy.left], known)
            self._require_seen(copy.full)

    def on_release(self, actor: _Actor, event: Event) -> None:
        place = self._place(event)
        for read in actor.reading[event.target, event.tile]:
            if read.over is None or not actor.known.includes(read.over):
                raise PlanError(
                    f"{actor.name} frees {self.topology.said(event.target, event.tile)} in use",
                    "freed after its own product or store has read it",
                    "wait for the product or store first",
                )
        self.memory.use(actor.known.latest[0], "read", "free", place, None, actor.warp)
        end = self._end(actor, event.target, event.tile, "empty")
        self._arrive(actor.name, end, actor.arrivals, actor.known)

    def on_arrive(self, actor: _Actor, event: Event) -> None:
        end = self._end(actor, event.target, event.tile, "")
        self._arrive(actor.name, end, actor.arrivals, actor.known)

    def on_issue(self, actor: _Actor, event: Event) -> None:
        product = next(product for product in actor.role.products if product.name == event.target)
        op = _Op(event, actor.known, product)
        actor.engine.queue.append(op)
        actor.engine.issued[event.target, event.tile] = op
        for operand in product.reads:
            placed = self._operand(operand, event.tile)
            actor.reading[placed.target, placed.tile].append(op)

    def on_commit(self, actor: _Actor, event: Event) -> None:
        actor.engine.queue.append(_Op(event, actor.known))

    def _execute(self, engine: _Engine) -> None:
        """The oldest product ends, or the oldest commit arrives."""
        op = engine.queue.pop(0)
        target, number = op.event.target, op.event.tile
        if op.product is None:
            end = self._end(self.actors[0], target, number, "empty")
            self._arrive(engine.name, end, 1, engine.known | op.known)
            return
        name = f"the product {target} tile {number}"
        engine.known = self.trace.add(name, "", engine.known | op.known)
        op.over = engine.known
        self.asynchronous.add(name)
        step = engine.known.latest[0]
        for operand in op.product.reads:
            placed = self._operand(operand, number)
            self.memory.use(step, "read", "multiply", self._place(placed), placed.tile)
        result = self._operand(op.product.result, number)
        kind: Kind = "write" if op.product.fresh and self.rows.starts(number) else "update"
        if op.product.result.action == "write":
            kind = "write"
        verb = "write" if kind == "write" else "add to"
        self.memory.use(step, kind, verb, self._place(result), result.tile)

    def _operand(self, operand: Event, key_tile: int) -> Event:
        placed = self.rows.place(operand, self.rows.row(key_tile), key_tile)
        assert placed is not None
        return placed

    def on_give(self, actor: _Actor, event: Event) -> None:
        self._come(actor, event)

    def on_store(self, actor: _Actor, event: Event) -> None:
        name = f"the store of {self.topology.said(event.target, event.tile)}"
        copy = _Copy(name, self._place(event), event.tile, actor.known, 1, actor)
        self.copies.append(copy)
        actor.stores.append(copy)
        actor.reading[event.target, event.tile].append(copy)
