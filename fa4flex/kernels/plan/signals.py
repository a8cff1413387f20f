"""Signals of warps at barriers: as the graph of a pipeline has them, to be compared with what a kernel did.

A graph is proved, a kernel is written by hand; a kernel that does what its graph says, role by role, has what
was proved. `expected` turns the events of a role into signals, in order; `rows_of` reads from a run how many
tiles, and key tiles of each, a block took; `difference` finds the first signal that is not the graph's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fa4flex.kernels.plan.topology import WARPGROUP, Barrier, Event, Events, Ring, Role, Topology

Does = Literal["wait", "arrive", "expect", "copy", "send", "commit", "sync", "give"]
EVERYONE, CLUSTER = "all threads", "cluster"
"""Barriers that no graph has: roles begin behind one, and CTAs of a pair end together."""


@dataclass(frozen=True)
class Signal:
    """Act of a warp at a barrier.

    parity    of the phase that a wait is for
    amount    bytes that are expected, copied or sent; or arrivals; or threads that come to a named barrier
    maybe     what the data says may leave it out
    again     it may be repeated: what was there is asked for again
    """

    does: Does
    at: str
    parity: int | None = None
    amount: int = 0
    maybe: bool = False
    again: bool = False

    def __str__(self) -> str:
        parity = "" if self.parity is None else f", parity {self.parity}"
        return f"{self.does} {self.at}{parity}" + (f", {self.amount}" if self.amount else "")

    def is_like(self, other: Signal) -> bool:
        mine, others = ((s.does, s.at, s.parity, s.amount) for s in (self, other))
        return mine == others


@dataclass(frozen=True)
class Difference:
    """`found` is not `expected`, as the signal of this number of a warp of a role; None is the end."""

    role: str
    warp: int
    number: int
    expected: Signal | None
    found: Signal | None
    before: tuple[Signal, ...]

    def __str__(self) -> str:
        told = [f"{self.role}, warp {self.warp}, signal {self.number}:"]
        told += [f"    after      {signal}" for signal in self.before[-3:]]
        told += [f"    expected   {self.expected or 'the end'}", f"    found      {self.found or 'the end'}"]
        return "\n".join(told)


# --- mbarriers -----------------------------------------------------------------------------------------


def arrivals_of(topology: Topology) -> dict[str, int]:
    """Arrivals that complete a phase, by the names of all mbarriers."""
    results: dict[str, int] = {}
    for ring in topology.rings:
        for stage in range(ring.stages):
            for warp in range(WARPGROUP if ring.per_warp else 1):
                if not ring.full_of:
                    results[ring_barrier(ring, "full", stage, warp)] = ring.full_arrivals * ring.lanes
                if not ring.shares_empty:
                    results[ring_barrier(ring, "empty", stage, warp)] = ring.empty_arrivals
    for barrier in topology.mbarriers:
        for stage in range(barrier.stages):
            for warp in range(WARPGROUP if barrier.per_warp else 1):
                results[own_barrier(barrier, stage, warp)] = barrier.counted
    return results


def ring_barrier(ring: Ring, side: str, stage: int, warp: int = 0) -> str:
    name = ring.full_of if ring.full_of and side == "full" else ring.name
    return _own(f"{name} {side}" + (f" {stage}" if ring.stages > 1 else ""), ring.per_warp, warp)


def own_barrier(barrier: Barrier, use: int, warp: int = 0) -> str:
    """Name of the mbarrier that a use of a barrier takes."""
    stage = f" {use % barrier.stages}" if barrier.stages > 1 else ""
    return _own(barrier.name + stage, barrier.per_warp, warp)


def _own(name: str, per_warp: bool, warp: int) -> str:
    return f"{name} of warp {warp}" if per_warp else name


# --- what a graph expects ------------------------------------------------------------------------------


def expected(topology: Topology, role: Role, warp: int, key_tiles: list[int]) -> list[Signal]:
    """Signals of one warp of a role, which takes tiles with these numbers of key tiles."""
    events = [event for event in role.run(key_tiles) if not (warp and event.leads)]
    signals = (signal for event in events for signal in _signals(topology, role, warp, event))
    return [*_begin(topology), *signals, *_end(topology)]


def idle(topology: Topology) -> list[Signal]:
    """Signals of a warp without a role."""
    return [*_begin(topology), *_end(topology)]


def _begin(topology: Topology) -> list[Signal]:
    return _end(topology) or [Signal("sync", EVERYONE)]


def _end(topology: Topology) -> list[Signal]:
    pair = any(role.cta for role in topology.roles)
    return [Signal("give", CLUSTER), Signal("sync", CLUSTER)] if pair else []


def _signals(topology: Topology, role: Role, warp: int, event: Event) -> Iterator[Signal]:
    named = {barrier.name: barrier for barrier in topology.barriers}
    rings = {ring.name: ring for ring in topology.rings}
    own = {barrier.name: barrier for barrier in topology.mbarriers}
    if event.target in named and event.action in ("take", "sync", "give"):
        barrier = named[event.target]
        stage = f" {event.tile % barrier.stages}" if barrier.stages > 1 else ""
        does: Does = "give" if event.action == "give" else "sync"
        yield Signal(does, event.target + stage, amount=barrier.threads, maybe=event.maybe)
    elif event.target in rings:
        yield from _of_ring(topology, rings[event.target], warp, event)
    elif event.target in own:
        guard = own[event.target]
        at = own_barrier(guard, event.tile, warp)
        if event.action == "commit":
            yield Signal("commit", at)
        elif event.action == "arrive" and guard.sent and role.cta != guard.cta:
            yield Signal("send", at, amount=guard.sent)
        elif event.action == "arrive":
            yield Signal("arrive", at, amount=guard.lanes)
        elif event.action == "await":
            if guard.sent:
                yield Signal("expect", at, amount=guard.sent * guard.senders)
            yield Signal("wait", at, event.tile // guard.stages & 1, again=event.again)


def _of_ring(topology: Topology, ring: Ring, warp: int, event: Event) -> Iterator[Signal]:
    stage, phase = event.tile % ring.stages, event.tile // ring.stages
    full, empty = (ring_barrier(ring, side, stage, warp) for side in ("full", "empty"))
    if event.action == "acquire":
        yield Signal("wait", empty, (phase - 1) & 1)
    elif event.action == "wait" and not ring.full_of:
        yield Signal("wait", full, phase & 1, maybe=event.maybe, again=event.again)
    elif event.action == "load":
        if not ring.full_of and not any(role.uses("announce", ring.name) for role in topology.roles):
            others = sum(r.transaction_bytes for r in topology.rings if r.full_of == ring.name)
            yield Signal("expect", full, amount=ring.transaction_bytes + others, maybe=event.maybe)
        yield from (Signal("copy", full, amount=size, maybe=event.maybe) for size in ring.copies)
        if event.maybe:  # it hands the stage over without a copy instead
            yield Signal("arrive", full, amount=1, maybe=True)
    elif event.action == "announce":
        yield Signal("expect", full, amount=ring.transaction_bytes)
    elif event.action == "fill":
        yield Signal("arrive", full, amount=ring.lanes)
    elif event.action == "release":
        yield Signal("arrive", empty, amount=1)
    elif event.action == "commit":
        yield Signal("commit", empty)


# --- what a run was ------------------------------------------------------------------------------------


def rows_of(topology: Topology, results: Sequence[Signal]) -> list[int]:
    """Numbers of key tiles of the tiles that a block took, from what the first role did. Where that is not
    the graph's, those of which it is longest."""
    role = topology.roles[0]
    if any(event.ahead for event in role.first):  # a block has one tile, of which the end has other events
        fitting = (
            n
            for n in range(len(results))
            if difference("", 0, expected(topology, role, 0, [n]), results) is None
        )
        return [next(fitting, 0)]
    letters: dict[tuple[str, str, int], str] = {}

    def word(signals: Sequence[Signal]) -> str:
        kinds = ((s.does, _stageless(s.at), s.amount) for s in signals)
        return "".join(letters.setdefault(kind, chr(ord("0") + len(letters))) for kind in kinds)

    def part(events: Events) -> str:
        return word([s for e in events for s in _signals(topology, role, 0, e)])

    first, body, last, empty = (part(events) for events in (role.first, role.body, role.last, role.empty))
    told, at = word(results), len(word(_begin(topology)) + part(role.opening))
    begun = f"{re.escape(first)}(?:{re.escape(body)})*"
    tile = re.compile(f"(?P<some>{begun}{re.escape(last)})|{re.escape(empty)}")

    def count(length: int) -> int:
        return 1 + (length - len(first)) // max(len(body), 1)

    rows: list[int] = []
    while (match := tile.match(told, at)) and match.end() > at:
        rows.append(count(match.end() - at - len(last)) if match["some"] else 0)
        at = match.end()
    unfinished = re.compile(begun).match(told, at)
    more = count(unfinished.end() - at) if unfinished else 0
    longer = [rows, *([*rows, more + i] for i in (0, 1))]
    return max(longer, key=lambda some: _alike(expected(topology, role, 0, some), results))


def _stageless(name: str) -> str:
    return re.sub(r"(full|empty) \d+$", r"\1", name)


def _alike(these: Sequence[Signal], those: Sequence[Signal]) -> tuple[int, int]:
    """Number of signals that are alike from the start on; fewer that follow are better."""
    count = next(
        (i for i, (a, b) in enumerate(zip(these, those)) if not a.is_like(b)), min(len(these), len(those))
    )
    return count, -abs(len(these) - len(those))


def difference(
    role: str, warp: int, expected: Sequence[Signal], results: Sequence[Signal]
) -> Difference | None:
    """The first signal that is not the graph's; None where all are."""
    again = {s.at for s in expected if s.again}
    seen: dict[str, int | None] = {}
    i = 0
    for number, signal in enumerate(results):
        coming = i
        while _is_left_out(expected[coming : coming + 2], results[number : number + 2]):
            coming += 1
        if coming < len(expected) and expected[coming].is_like(signal):
            seen[signal.at] = signal.parity
            i = coming + 1
        elif not (signal.does == "wait" and signal.at in again and seen.get(signal.at) == signal.parity):
            next_one = expected[coming] if coming < len(expected) else None
            return Difference(role, warp, number, next_one, signal, tuple(results[:number]))
    left = next((s for s in expected[i:] if not s.maybe), None)
    return None if left is None else Difference(role, warp, len(results), left, None, tuple(results))


def _is_left_out(expected: Sequence[Signal], results: Sequence[Signal]) -> bool:
    """True if the first of these was left out. A wait is repeated later: there, what follows tells."""
    if not expected or not expected[0].maybe:
        return False
    seen = 2 if expected[0].does == "wait" else 1
    return not all(a.is_like(b) for a, b in zip(expected[:seen], results[:seen]))
