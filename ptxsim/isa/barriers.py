"""Barriers of CTAs and clusters, and fences (PTX ISA, "barrier{.cta}", "barrier.cluster", "membar/fence")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from ptxsim.isa.access import Accessor
from ptxsim.isa.mbarriers import guarded, relaxed_clock
from ptxsim.isa.operands import read, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Wait, translates
from ptxsim.ptx.nodes import Instruction, Operand
from ptxsim.state.barriers import Meeting, Round
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.watch.findings import Fault, Finding

NAMED = 16
"""Barriers of a CTA."""


@translates("bar", "barrier")
def barrier(instruction: Instruction, form: Form) -> Act:
    """Threads come by whole warps. Without a count, all threads of the CTA that have not exited must come."""
    come, stays = _comes(instruction, *instruction.operands), instruction.has("sync")

    def run(warp: Warp, mask: Mask) -> Wait | None:
        if warp.ticket is None:
            come(warp, mask, None)
            if not stays:
                warp.ticket = None
                return None
        return _stay(warp, instruction.line)

    return Act(run, signals=not stays)


_REDUCED: dict[str, Callable[[Round], int | bool]] = {
    "and": lambda round: round.true == round.asked,
    "or": lambda round: round.true > 0,
    "popc": lambda round: round.true,
}


@translates("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red")
def reduction(instruction: Instruction, form: Form) -> Act:
    """A barrier that tells all who come for how many of them, for any or for all a predicate holds."""
    how, kind = form.one_of(*_REDUCED), form.type
    result, *where, given = instruction.operands
    d, value, come = write(result, kind), read(given, "pred"), _comes(instruction, *where)

    def run(warp: Warp, mask: Mask) -> Wait | None:
        if warp.ticket is None:
            come(warp, mask, value(warp) if mask is None else value(warp)[mask])
        _, round = warp.ticket  # type: ignore[misc]
        wait = _stay(warp, instruction.line)
        if wait is None:
            d(warp, _REDUCED[how](round), mask)
        return wait

    return Act(run)


@translates("barrier.cluster.arrive")
def cluster_arrive(instruction: Instruction, form: Form) -> Act:
    """An arrival before the warp has waited for the one before is reported. It counts for the barrier's next
    round, so it is held until all have come to the round before. Of two waits the first is for that round,
    as on silicon (docs/simulator.md), and so for both."""
    access, relaxed = Accessor(instruction, "shared"), instruction.has("relaxed")

    def run(warp: Warp, mask: Mask) -> Wait | None:
        meeting = warp.cta.cluster.meeting
        if warp.cluster_ticket is not None:
            _, before = warp.cluster_ticket
            if meeting.round is before:
                return Wait(lambda: meeting.round is not before, f"{meeting}, to come again", meeting)
            text = f"{warp} arrives at its cluster's barrier again before it has waited"
            warp.cta.launch.findings.add(Finding("barrier", text, instruction))
            warp.arrived_again += 1
            meeting.round.follows(before)
        _come(access, warp, meeting, None, relaxed)
        warp.cluster_ticket, warp.ticket = warp.ticket, None
        return None

    return Act(run, signals=True)


@translates("barrier.cluster.wait")
def cluster_wait(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> Wait | None:
        if warp.ticket is None:
            warp.ticket, warp.cluster_ticket = warp.cluster_ticket, None
            if warp.ticket is None and warp.arrived_again:  # was reported when it arrived
                warp.arrived_again -= 1
                return None
            if warp.ticket is None:
                text = f"{warp} waits for its cluster without having arrived"
                raise Fault(Finding("barrier", text, instruction))
        return _stay(warp, instruction.line)

    return Act(run)


@translates("fence.proxy.async")
def fence_proxy_async(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> None:
        warp.cta.cluster.order.fence_proxy(warp.agent)

    return Act(run)


@translates("fence.mbarrier_init")
def fence_mbarrier_init(instruction: Instruction, form: Form) -> Act:
    """Initialised mbarriers become visible to the other CTAs of the cluster and to asynchronous
    operations."""

    def run(warp: Warp, mask: Mask) -> None:
        order = warp.cta.cluster.order
        for cta in warp.cta.cluster.ctas:
            for found in cta.mbarriers.values():
                if order.known(found.made, order.clocks[warp.agent]):
                    found.announced = True
                    warp.announced.add(found)

    return Act(run)


@translates("fence.acq_rel", "fence.sc", "fence.acquire", "fence.release", "membar")
@translates("fence.proxy.alias", "fence.proxy.tensormap::generic")
def fence(instruction: Instruction, form: Form) -> Act:
    """Memory is sequentially consistent here: what fences order is who knows of what (watch/flags.py). Strong
    writes and relaxed arrivals after one that releases hand on what the warp knew; one that acquires takes
    over what strong reads before it have found."""
    proxy = instruction.has("proxy")
    releases = not proxy and not instruction.has("acquire")
    acquires = not proxy and not instruction.has("release")

    def run(warp: Warp, mask: Mask) -> None:
        order = warp.cta.cluster.order
        if acquires:
            for told in warp.observed:
                order.hears(warp.agent, told, instruction.line)
            warp.observed.clear()
        if releases:
            warp.released = warp.tells(instruction.line)

    return Act(run)


def _comes(
    instruction: Instruction, barrier: Operand, threads: Operand | None = None
) -> Callable[[Warp, Mask, NDArray[Any] | None], None]:
    """Comes to a named barrier, with the predicates of the threads where these are reduced."""
    number, access = read(barrier, "u32"), Accessor(instruction, "shared")
    count = None if threads is None else read(threads, "u32")

    def come(warp: Warp, mask: Mask, given: NDArray[Any] | None) -> None:
        named = int(_first(number(warp), mask))
        if named >= NAMED:
            text = f"{warp} names barrier {named}; a CTA has {NAMED}"
            raise Fault(Finding("barrier", text, instruction))
        meeting = warp.cta.meeting(named)
        if meeting.here and (meeting.round.asked > 0) != (given is not None):
            text = f"{warp} comes to {meeting}: some reduce a predicate there, others do not"
            raise Fault(Finding("barrier", text, instruction))
        if given is not None:
            meeting.round.asked += given.size
            meeting.round.true += int(given.sum())
        _come(access, warp, meeting, -(-int(_first(count(warp), mask)) // LANES) * LANES if count else None)

    return come


def _first(values: NDArray[Any], mask: Mask) -> Any:
    return values[0] if mask is None else values[mask][0]


def _come(
    access: Accessor, warp: Warp, meeting: Meeting, expected: int | None, relaxed: bool = False
) -> None:
    """Come to a barrier for so many threads, or, if None, for all that have not exited. A relaxed arrival
    tells only what a fence before it has released."""
    agent, who, line = warp.agent, str(warp), access.instruction.line
    warp.ticket = meeting, meeting.round
    if relaxed:
        clock = relaxed_clock(warp)
        meeting.round.announced |= warp.announced
    else:
        clock = warp.release()

    def come() -> None:
        if expected is None:
            meeting.come_whole(agent, who, warp.cta.must_come(meeting), clock, line)
        else:
            meeting.come(agent, who, expected, clock, line)

    guarded(access, warp, come)


def _stay(warp: Warp, line: int) -> Wait | None:
    """Wait until the round of the warp's ticket is complete, then know what all who came knew."""
    meeting, round = warp.ticket  # type: ignore[misc]
    if meeting.round is round:
        return Wait(lambda: meeting.round is not round, str(meeting), meeting)
    warp.cta.cluster.order.acquire(warp.agent, round.gathered, (line, *round.lines))
    for mbarrier in round.announced:
        mbarrier.users.add(warp.agent)
    warp.ticket = None
    return None
