"""Runs the warps of resident clusters, one at a time, each until it must wait or gives way."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.errors import SimulatorError
from ptxsim.isa.bulk import BULK, store_queue
from ptxsim.isa.table import Act, Wait
from ptxsim.run.program import WORTH_PLANNING, Block, Program, acting
from ptxsim.run.registers import RegisterWatch
from ptxsim.run.timing import Timing
from ptxsim.run.undefined import UndefinedWatch
from ptxsim.state.cta import Cluster, Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.state.waiting import Waiting
from ptxsim.watch.findings import Fault, Finding

TURN = 4096
"""Blocks after which a warp that neither waits nor signals is taken to be spinning."""
SPINS = 16
"""Turns' worth of blocks that each warp may execute without anything changing, before all count as
hanging."""


class Scheduler:
    """`together` of the clusters of a launch run at a time; further ones are let in when those that run wait
    for something that only they can do."""

    def __init__(self, program: Program, timing: Timing, waiting: Waiting, together: int = 1) -> None:
        self.program, self.timing, self.together = program, timing, together
        self._coming = waiting
        self._resident: list[Cluster] = []
        self._ready: list[Warp] = []
        self._waiting: dict[Warp, Wait] = {}
        self._idle: dict[Warp, int] = {}
        """Blocks that each warp executed since anything changed, without waiting."""
        self._gave_up_at = -1
        self._retired = 0
        """Number of changes in clusters that are over."""
        self.registers = RegisterWatch(program)
        self.undefined = UndefinedWatch(program)
        self.executed: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        """Number of times that (warp index, CTA rank, block) was executed."""
        self.turns: list[tuple[int, int, int, int, int]] = []
        """(cluster, CTA rank, warp, from, to): in blocks executed so far, for the timeline."""
        self.time = 0

    def run(self) -> None:
        """To the end of all clusters. Raises Fault."""
        self._fill()
        while self._resident:
            self._wake()
            if self._ready:
                self._turn(self.timing.next(self._candidates()))
            else:
                self._unblock()

    # --- turns ----------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Warp]:
        """The ready warps, without those that spun a whole turn more than another one since anything changed:
        what they spin on may be set by just that one, and a timing may prefer them for ever."""
        if not self._idle:
            return self._ready
        most = self._least_idle() + TURN
        return [warp for warp in self._ready if self._idle.get(warp, 0) < most]

    def _least_idle(self) -> int:
        return min(self._idle.get(warp, 0) for warp in self._ready)

    def _turn(self, warp: Warp) -> None:
        self._ready.remove(warp)
        started, before = self.time, self._changes()
        result = self._advance(warp)
        warp.cta.launch.time = self.time
        self.turns.append((warp.cta.cluster.number, warp.cta.rank, warp.index, started, self.time))
        if isinstance(result, Wait):
            self._waiting[warp] = result
        elif warp.groups:
            self._ready.append(warp)
        elif not any(other.groups for other in warp.cta.cluster.warps):
            self._retire(warp.cta.cluster)
            return
        looping = bool(warp.groups) and result in ("spun", "yield")
        if looping and self._changes() == before:
            self._idle[warp] = self._idle.get(warp, 0) + self.time - started
            if self._least_idle() >= SPINS * TURN:
                self._idle.clear()
                self._unblock()
        else:
            self._idle.clear()
        landing = self.timing.lands_now(warp.cta.cluster.units)
        if landing is not None:
            warp.cta.cluster.units.land(landing)

    def _advance(self, warp: Warp) -> Wait | str:
        """Run a warp until it waits, gives way ("yield"), spins ("spun") or is done ("done")."""
        blocks, executed, watch = self.program.blocks, self.executed, self.registers.needed
        index, rank, undefined = warp.index, warp.cta.rank, self.undefined
        stuck: dict[int, Wait] = {}
        for _ in range(TURN):
            group = self._group(warp, stuck)
            if isinstance(group, Wait):
                return group
            pc, mask = group
            block = blocks[pc]
            executed[index, rank, pc] += 1
            self.time += 1
            if watch:
                self.registers.check(warp, block)
            if block.orders_lanes and warp.lanes.entries:
                warp.lanes.clear(warp.cta.cluster.order.clocks[warp.agent], warp.agent)
            follow = undefined.needed and undefined.concerns(warp, block)
            if block.act is None:
                if follow:
                    undefined.steps(warp, block, mask)
                elif mask is None and block.runs > WORTH_PLANNING:
                    for step in block.planned:
                        step(warp, None)
                else:
                    block.runs += mask is None
                    self._steps(warp, block, mask)
                self._follow(warp, block, pc, mask)
                if not warp.groups:
                    self._left(warp, block)
                    return "done"
                continue
            if follow:
                undefined.act(warp, block, mask)
            act, guard = block.act
            lanes, any = acting(warp, guard, mask)
            wait = _acts(act, warp, lanes, block) if any else None
            if wait is not None:
                stuck[pc] = wait
                continue
            stuck.clear()
            self._move(warp, pc, block.stop)
            if act.signals:
                warp.cta.cluster.units.landings += 1
            if self.timing.gives_way(act.signals):
                return "yield"
        return "spun"

    def _group(self, warp: Warp, stuck: dict[int, Wait]) -> tuple[int, Mask] | Wait:
        """The lanes to run next: those furthest behind that do not wait, or why none can run."""
        groups = warp.groups
        if len(groups) == 1:
            ((pc, lanes),) = groups.items()
            return stuck.get(pc, (pc, None if warp.whole else lanes))
        for pc in sorted(groups):
            if pc in stuck:
                continue
            block = self.program.blocks[pc]
            if not block.together or self._all_here(warp, block, groups[pc]):
                return pc, groups[pc]
        if stuck:
            return next(iter(stuck.values()))
        where = ", ".join(
            f"{int(lanes.sum())} lanes at {self.program.kernel.body[pc]}" for pc, lanes in groups.items()
        )
        raise Fault(Finding("divergence", f"the lanes of {warp} wait for each other: {where}"))

    def _all_here(self, warp: Warp, block: Block, lanes: NDArray[Any]) -> bool:
        if block.members is None:
            return bool((lanes == warp.live).all())
        named = int(block.members(warp)[lanes][0])
        wanted = (named >> np.arange(LANES) & 1).astype(np.bool_) & warp.live
        return bool((lanes | ~wanted).all())

    def _steps(self, warp: Warp, block: Block, mask: Mask) -> None:
        for step, guard in block.steps:
            if guard is None:
                step(warp, mask)
                continue
            lanes, any = acting(warp, guard, mask)
            if any:
                step(warp, lanes)

    # --- control flow ---------------------------------------------------------------------------------------

    def _follow(self, warp: Warp, block: Block, pc: int, mask: Mask) -> None:
        if block.jump is None:
            return self._move(warp, pc, block.stop)
        target, guard = block.jump
        lanes, any = acting(warp, guard, mask)
        if not any:
            return self._move(warp, pc, block.stop)
        if lanes is None or lanes is mask:
            return self._move(warp, pc, target)
        here = warp.groups.pop(pc)
        stay = here & ~lanes
        if stay.any():
            _join(warp, block.stop, stay)
        if target is None:
            warp.leave(lanes)
        else:
            _join(warp, target, lanes)
        return None

    def _move(self, warp: Warp, pc: int, target: int | None) -> None:
        lanes = warp.groups.pop(pc)
        if target is None or target >= len(self.program.kernel.body):
            warp.leave(lanes)
        else:
            _join(warp, target, lanes)

    def _left(self, warp: Warp, block: Block) -> None:
        """A warp has exited: barriers no longer wait for it."""
        cta = warp.cta
        self.registers.left(warp)
        stores = warp.started.get(BULK)
        if stores is not None and stores.unwaited():
            text = (
                f"{warp} exits while shared memory may still be read by a bulk store that it did not wait for"
            )
            cta.launch.findings.add(Finding("unfinished", text, stores.unwaited()[0].instruction))
        if not cta.living_threads():
            cta.end(block.body[-1], [store_queue(one) for one in cta.warps if BULK in one.started])
        for meeting in (*cta.meetings.values(), cta.cluster.meeting):
            meeting.look(cta.must_come(meeting))
        cta.cluster.units.landings += 1

    # --- waiting --------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        awake = [warp for warp, wait in self._waiting.items() if wait.ready()]
        for warp in awake:
            del self._waiting[warp]
            self._ready.append(warp)

    def _unblock(self) -> None:
        """Nobody can go on: land an operation, let a try_wait answer false, let the next cluster in, or give
        up."""
        pending = [cluster for cluster in self._resident if cluster.units.pending]
        if pending:
            cluster = self.timing.whose(pending)
            waits = [wait for warp, wait in self._waiting.items() if warp.cta.cluster is cluster]
            cluster.units.land(self.timing.forced(cluster.units, waits))
            return
        peeking = [warp for warp, wait in self._waiting.items() if wait.limited]
        if peeking and self._gave_up_at != self._changes():
            self._gave_up_at = self._changes()
            for warp in peeking:
                warp.gives_up = True
                del self._waiting[warp]
                self._ready.append(warp)
        elif not self._admit():
            raise Fault(Finding("hang", self._who_waits()))

    def _who_waits(self) -> str:
        lines = [f"{warp} waits for {wait.what}" for warp, wait in self._waiting.items()]
        lines += [f"{warp} keeps looping at {self._place(warp)}" for warp in self._ready]
        return "nobody can go on:\n    " + "\n    ".join(lines)

    def _place(self, warp: Warp) -> str:
        return ", ".join(str(self.program.kernel.body[pc]) for pc in warp.groups)

    def _changes(self) -> int:
        return self._retired + sum(cluster.units.landings for cluster in self._resident)

    # --- clusters -------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        cluster = self._coming.start()
        if cluster is None:
            return False
        cluster.units.eager = self.timing.eager
        self._resident.append(cluster)
        self._ready += cluster.warps
        return True

    def _fill(self) -> None:
        while len(self._resident) < self.together and self._admit():
            pass

    def _retire(self, cluster: Cluster) -> None:
        """All its warps have exited: what is on its way lands, and what should be empty is looked at."""
        for operation in list(cluster.units.pending):
            cluster.units.land(operation)
        cluster.check_left()
        cluster.ctas.clear()  # their memory is not needed any more
        self._resident.remove(cluster)
        self._retired += cluster.units.landings + 1
        self._idle.clear()
        self._fill()


def _acts(act: Act, warp: Warp, lanes: Mask, block: Block) -> Wait | None:
    """Execute an act. What its operands describe and no unit can follow is a fault of the kernel."""
    warp.acting = lanes
    try:
        return act.run(warp, lanes)
    except SimulatorError as error:
        text = f"{warp} gives what cannot be carried out: {error}"
        raise Fault(Finding("misuse", text, block.body[0])) from error


def _join(warp: Warp, pc: int, lanes: NDArray[Any]) -> None:
    others = warp.groups.get(pc)
    warp.groups[pc] = lanes if others is None else others | lanes
