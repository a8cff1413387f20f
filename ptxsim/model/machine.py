"""One multiprocessor per CTA of a cluster, simulated in time: warps issue in order, pipes and ports serve one
after another, mbarriers complete phases.

Four sub-cores issue one warp instruction a clock each; warp w is on sub-core w % 4. A warp waits until its
operands are there, its pipe is free and its barrier has completed a phase. Tensor core, copy engine, shared
memory and tensor memory are servers with a rate; what MMAs read and copies write shares the 128 bytes a
clock of shared memory with the warps.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ptxsim.model import events as ev
from ptxsim.model.chip import SUBCORES, Chip
from ptxsim.model.flow import Register
from ptxsim.model.lower import Lowering, Op, Piece
from ptxsim.model.recorder import Trace, WarpTrace
from ptxsim.state.registers import LANES

BIN = 64
"""Clocks over which what happened is summed up."""
CHUNK = 1024
"""Bytes of a copy that take their turn at shared memory at once."""


Bins = dict[int, float]
"""Clocks by bin."""


def bins() -> Bins:
    return defaultdict(float)


def spread(counts: Bins, start: float, stop: float) -> None:
    """Count the clocks from `start` to `stop` in their bins."""
    while start < stop:
        index = int(start) // BIN
        end = min(stop, (index + 1) * BIN)
        counts[index] += end - start
        start = end


@dataclass(eq=False)
class Server:
    """Does one thing after another. `busy` counts clocks by bin."""

    rate: float
    free: float = 0.0
    busy: Bins = field(default_factory=bins)

    def serve(self, now: float, amount: float) -> float:
        """Clock at which it is done with an amount that is asked for now."""
        start = max(now, self.free)
        self.free = start + amount / self.rate
        spread(self.busy, start, self.free)
        return self.free


@dataclass(eq=False)
class Phases:
    """An mbarrier, or a named barrier: `pending` of `count` arrivals and `bytes` are awaited."""

    count: int = 0
    pending: int = 0
    bytes: int = 0
    done: int = 0
    since: list[float] = field(default_factory=list)
    """Clock at which each phase was completed."""
    waiting: list[tuple[Walker, int, float]] = field(default_factory=list)
    """(warp, number of phases it waits for, since when)"""


@dataclass(eq=False)
class Subcore:
    next: float = 0.0
    units: dict[str, float] = field(default_factory=dict)
    busy: dict[str, Bins] = field(default_factory=dict)
    issued: Bins = field(default_factory=bins)


@dataclass(eq=False)
class Processor:
    """Units that the warps of one CTA share."""

    subcores: list[Subcore]
    shared: Server
    loads: list[Server]
    stores: list[Server]
    copies: Server
    tensor: Server
    queue: deque[ev.Multiplied | ev.Committed] = field(default_factory=deque)
    running: bool = False


@dataclass(eq=False)
class Walker:
    """A warp on its way through its trace."""

    trace: WarpTrace
    pieces: list[Piece]
    home: Processor
    subcore: Subcore
    piece: int = 0
    at: int = 0
    """Index of the next instruction of the piece."""
    ready: dict[Register, float] = field(default_factory=dict)
    """Clock at which each register is ready."""
    stored: float = 0.0
    loaded: float = 0.0
    """Clock at which its accesses to tensor memory are over."""
    bulk: list[float] = field(default_factory=list)
    """Clock at which each of its bulk stores is over."""
    cluster_round: int = 0
    """The round of the cluster's barrier that it came to last."""
    held: dict[str, Bins] = field(default_factory=dict)
    """Clocks it did not issue, by cause and bin."""
    issued: Bins = field(default_factory=bins)
    times: list[float] = field(default_factory=list)
    """Clocks at which it issued."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Spans of waiting at barriers."""
    end: float = 0.0
    """Clock at which it was done."""

    def wait(self, cause: str, since: float, until: float) -> None:
        """It does not issue from one clock to another."""
        spread(self.held.setdefault(cause, bins()), since, until)
        if cause in ("barriers", "synchronisation"):
            self.spans.append((since, until))


class Machine:
    """A chip's multiprocessors, one for each CTA of a trace's cluster, from the launch on."""

    def __init__(self, trace: Trace, chip: Chip) -> None:
        self.chip, self.trace = chip, trace
        lowering = Lowering(trace.kernel, chip, LANES * len(trace.warps) // trace.ctas)
        self.processors = [_processor(chip) for _ in range(trace.ctas)]
        self.walkers = []
        for warp in trace.warps:
            home = self.processors[warp.rank]
            core = home.subcores[warp.index % SUBCORES]
            self.walkers.append(Walker(warp, list(lowering.pieces(warp)), home, core))
        self.barriers: dict[ev.Key, Phases] = {}
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self.multiplied: list[tuple[float, float, int]] = []
        """(start, end, flops of the CTA) of each MMA of CTA 0."""
        self.marks: dict[int, list[float]] = {}
        """Clocks at which CTA 0 issued each MMA instruction, by its index in the kernel's body."""
        self.flops_at: dict[int, list[float]] = {}
        self.flops = 0.0
        """FLOPs of CTA 0."""

    def run(self) -> float:
        """To the end of all warps, which it returns in clocks."""
        for walker in self.walkers:
            if walker.pieces:
                self.at(0.0, partial(self._step, walker))
        heap = self._heap
        while heap:
            now, _, action = heapq.heappop(heap)
            action(now)
        stuck = [w.trace for w in self.walkers if w.piece < len(w.pieces)]
        assert not stuck, f"the trace cannot be replayed: {stuck[0]} waits for ever"
        return max(walker.end for walker in self.walkers)

    def at(self, time: float, action: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, action))

    # --- warps ----------------------------------------------------------------------------------------------

    def _step(self, walker: Walker, now: float) -> None:
        """Issue the warp's next instruction, or come back when that may be possible."""
        piece, events = walker.pieces[walker.piece]
        if walker.at == len(piece.ops):
            self._next_piece(walker, now)
            return
        op = piece.ops[walker.at]
        ready, subcore, cost = walker.ready, walker.subcore, op.cost
        when = now
        for register in op.reads:
            time = ready.get(register, 0.0)
            if time > when:
                when = time
        cause = "results"
        unit = subcore.units.get(cost.unit, 0.0) if cost.unit else 0.0
        if unit > when:
            when, cause = unit, cost.unit
        if when <= now and subcore.next > now:
            when, cause = subcore.next, "issue"
        if when > now:
            walker.wait(cause, now, when)
            self.at(when, partial(self._step, walker))
            return
        event = events.get(op.index)
        if event is not None and self._holds(walker, event, now):
            return
        self._issue(walker, op, now)
        if event is not None:
            for one in event if isinstance(event, tuple) else (event,):
                if self._does(walker, op, one, now):
                    walker.at += 1
                    return
        walker.at += 1
        self.at(subcore.next, partial(self._step, walker))

    def _next_piece(self, walker: Walker, now: float) -> None:
        piece, _ = walker.pieces[walker.piece]
        for register, roots in piece.renamed:
            walker.ready[register] = max([walker.ready.get(r, 0.0) for r in roots] or [0.0])
        walker.piece, walker.at = walker.piece + 1, 0
        if walker.piece < len(walker.pieces):
            self._step(walker, now)
        else:
            walker.end = now

    def _issue(self, walker: Walker, op: Op, now: float) -> None:
        cost, subcore, home = op.cost, walker.subcore, walker.home
        subcore.next = now + cost.issues
        subcore.issued[int(now) // BIN] += cost.issues
        walker.issued[int(now) // BIN] += cost.issues
        walker.times.append(now)
        if cost.unit:
            subcore.units[cost.unit] = now + cost.hold
            spread(subcore.busy.setdefault(cost.unit, bins()), now, now + cost.hold)
        done = now + cost.latency
        if cost.port:
            core = walker.trace.index % SUBCORES
            if cost.port == "shared":
                done = home.shared.serve(now, cost.bytes) + cost.latency
            elif cost.port == "tensor load":
                done = walker.loaded = home.loads[core].serve(now, cost.bytes) + cost.latency
            else:
                walker.stored = home.stores[core].serve(now, cost.bytes) + self.chip.tensor_store_latency
        for register in op.writes:
            walker.ready[register] = done

    def _holds(self, walker: Walker, event: ev.Event, now: float) -> bool:
        """True if a fence has to wait for the warp's own accesses; it is then tried again."""
        until = now
        if isinstance(event, ev.Fenced):
            until = walker.stored if event.stores else walker.loaded
        elif isinstance(event, ev.Drained) and len(walker.bulk) > event.left:
            until = walker.bulk[len(walker.bulk) - event.left - 1]
        if until > now:
            walker.wait("tensor memory" if isinstance(event, ev.Fenced) else "stores", now, until)
            self.at(until, partial(self._step, walker))
        return until > now

    def _does(self, walker: Walker, op: Op, event: ev.Event, now: float) -> bool:
        """Effects of an instruction beyond its warp. True where the warp now waits for others."""
        chip, rank = self.chip, walker.trace.rank
        match event:
            case ev.Made(key, count):
                self.barriers[key] = Phases(count, count)
            case ev.Arrived(key, arrivals, size):
                self._arrive_later(now + chip.arrive_latency, rank, key, arrivals, size)
            case ev.Awaited(key, phases):
                return self._await(walker, self.barriers[key], phases, now, chip.wait_latency)
            case ev.Met():
                return self._meet(walker, event, now)
            case ev.Loaded(copies):
                for to, size, key in copies:
                    self.at(now + chip.tma_latency, partial(self._copy, to, size, key))
            case ev.Stored(size):
                walker.bulk.append(walker.home.shared.serve(now, size) + chip.tma_latency)
            case ev.Multiplied() | ev.Committed():
                if isinstance(event, ev.Multiplied) and rank == 0:
                    self.marks.setdefault(op.index, []).append(now)
                    self.flops_at.setdefault(op.index, []).append(self.flops)
                    self.flops += event.flops / event.group
                walker.home.queue.append(event)
                if not walker.home.running:
                    walker.home.running = True
                    self.at(now + chip.mma_latency, partial(self._tensor, rank))
        return False

    # --- barriers -------------------------------------------------------------------------------------------

    def _arrive_later(self, time: float, rank: int, key: ev.Key, arrivals: int, size: int) -> None:
        remote = self.chip.remote_latency if key[0] != rank else 0
        self.at(time + remote, lambda now: self._arrive(key, arrivals, size, now))

    def _arrive(self, key: ev.Key, arrivals: int, size: int, now: float) -> None:
        """`size` bytes more are expected, or fewer where it is negative."""
        barrier = self.barriers[key]
        barrier.pending -= arrivals
        barrier.bytes += size
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.pending = barrier.count
            self._complete(barrier, now)

    def _complete(self, barrier: Phases, now: float) -> None:
        barrier.done += 1
        barrier.since.append(now)
        still = []
        latency = self.chip.wait_latency if barrier.count else self.chip.named_latency
        for walker, phases, since in barrier.waiting:
            if barrier.done >= phases:
                walker.wait("barriers", since, now)
                walker.wait("synchronisation", now, now + latency)
                self.at(now + latency, partial(self._step, walker))
            else:
                still.append((walker, phases, since))
        barrier.waiting = still

    def _await(self, walker: Walker, barrier: Phases, phases: int, now: float, latency: int) -> bool:
        if barrier.done >= phases:
            walker.wait("synchronisation", now, now + latency)
            self.at(now + latency, partial(self._step, walker))
        else:
            barrier.waiting.append((walker, phases, now))
        return True

    def _meet(self, walker: Walker, event: ev.Met, now: float) -> bool:
        barrier = self.barriers.setdefault(event.key, Phases())
        if event.comes:
            walker.cluster_round = barrier.done + 1
            mine = barrier.done + 1
            barrier.pending += event.count
            if barrier.pending >= event.threads:
                barrier.pending = 0
                self._complete(barrier, now)
        else:
            mine = walker.cluster_round
        return event.stays and self._await(walker, barrier, mine, now, self.chip.named_latency)

    # --- copies and MMAs ------------------------------------------------------------------------------------

    def _copy(self, to: int, size: int, key: ev.Key, now: float) -> None:
        """Bytes come from L2 and are written to shared memory, in chunks."""
        home, done = self.processors[to], now
        for start in range(0, size, CHUNK):
            done = home.copies.serve(now, min(CHUNK, size - start))
            self.at(done, partial(_write, home.shared, min(CHUNK, size - start)))
        self._arrive_later(done + CHUNK / self.chip.shared_bytes, to, key, 0, -size)

    def _tensor(self, rank: int, now: float) -> None:
        """The tensor core takes the next of its queue."""
        home = self.processors[rank]
        while home.queue and isinstance(home.queue[0], ev.Committed):
            for key in home.queue.popleft().keys:  # type: ignore[union-attr]
                self._arrive_later(now + self.chip.commit_latency, rank, key, 1, 0)
        if not home.queue:
            home.running = False
            return
        job = home.queue.popleft()
        assert isinstance(job, ev.Multiplied)
        group = [home] if job.group == 1 else self.processors[rank & ~1 : (rank & ~1) + 2]
        flops = job.flops / job.group / (2 if job.narrow else 1)
        done = now
        for one in group:
            done = max(done, one.tensor.serve(now, flops), one.shared.serve(now, job.shared))
        for one in group:
            one.tensor.free = done
        if home is self.processors[0]:
            self.multiplied.append((now, done, int(job.flops / job.group)))
        self.at(done + self.chip.mma_gap, partial(self._tensor, rank))


def _write(memory: Server, size: int, now: float) -> None:
    memory.serve(now, size)


def _processor(chip: Chip) -> Processor:
    return Processor(
        [Subcore() for _ in range(SUBCORES)],
        Server(chip.shared_bytes),
        [Server(chip.tensor_load_bytes / SUBCORES) for _ in range(SUBCORES)],
        [Server(chip.tensor_store_bytes / SUBCORES) for _ in range(SUBCORES)],
        Server(chip.tma_bytes),
        Server(chip.mma_flops),
    )
