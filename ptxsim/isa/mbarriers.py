"""mbarrier.*: init, inval, arrive, expect_tx, complete_tx, waits (PTX ISA, "mbarrier")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, granules, locate
from ptxsim.isa.operands import read, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Wait, translates
from ptxsim.ptx.nodes import Address, Discard, Instruction, Operand
from ptxsim.state.barriers import MBarrier, Misuse
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.state.window import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from ptxsim.watch.clock import Clock
from ptxsim.watch.findings import Fault, Finding


def relaxed_clock(warp: Warp) -> Clock:
    """Clock released by a relaxed arrival of a warp: all that a fence before it has released."""
    clock = Clock(warp.cta.cluster.capacity)
    if warp.released is not None:
        warp.released.but(warp.withheld(), warp.cta.cluster.number).teach(clock, warp.cta.cluster.number)
    return clock


def cta_and_offset(access: Accessor, warp: Warp, address: int) -> tuple[Cta, int]:
    """The CTA whose shared memory an address lies in, and where."""
    plain = address & (SHARED_WINDOW - 1)
    return access.cta(warp, plain >> RANK_SHIFT, plain & OFFSET_MASK), plain & OFFSET_MASK


def barrier_at(access: Accessor, warp: Warp, address: int) -> MBarrier:
    """The mbarrier at a shared address. A Fault where none was initialised."""
    cta, offset = cta_and_offset(access, warp, address)
    found = cta.mbarriers.get(offset)
    if found is None:
        text = f"{warp} uses an mbarrier at {offset:#x} of CTA {cta.rank}, where none is initialised"
        raise Fault(Finding("barrier", text, access.instruction))
    return found


def must_know_init(access: Accessor, warp: Warp, barrier: MBarrier) -> None:
    """A warp may use a barrier once it knows that mbarrier.init is over."""
    if warp.agent in barrier.users:
        return
    barrier.users.add(warp.agent)
    order = warp.cta.cluster.order
    if not order.known(barrier.made, order.clocks[warp.agent]):
        number = order.warp_access(warp.agent, access.instruction)
        order.report(
            "race", f"uses {barrier.place} before it knows of the initialisation", number, barrier.made
        )


def _reach(access: Accessor, warp: Warp, address: int) -> None:
    """An mbarrier of another CTA has to be there until that CTA knows of the arrival."""
    cta, offset = cta_and_offset(access, warp, address)
    if cta is not warp.cta and offset in cta.mbarriers:
        cta.reached[warp.agent] = warp.cta.cluster.order.warp_access(warp.agent, access.instruction)


_EVERYONE = np.arange(LANES)


def distinct(addresses: NDArray[Any], mask: Mask) -> Iterator[tuple[int, NDArray[Any]]]:
    """(address, its lanes) for the lanes that take part; nearly always one."""
    everyone = _EVERYONE if mask is None else mask.nonzero()[0]
    mine = addresses if mask is None else addresses[everyone]
    content, size = mine.tobytes(), mine.itemsize
    if content[size:] == content[:-size]:
        yield mine.item(0), everyone
        return
    for address in np.unique(mine):
        yield int(address), everyone[mine == address]


def guarded(access: Accessor, warp: Warp, action: Callable[[], None]) -> None:
    """Misuse of a barrier becomes a finding that ends the launch."""
    try:
        action()
    except Misuse as misuse:
        raise Fault(Finding("barrier", f"{warp}: {misuse}", access.instruction)) from None


SIZE = 8
"""Bytes of an mbarrier."""
MOST = 1 << 20
"""Neither arrivals nor bytes of a phase reach this."""


def expect(warp: Warp, barrier: MBarrier, count: int, instruction: Instruction) -> None:
    """Bytes are awaited in addition."""
    barrier.expect(count, instruction.line)
    if barrier.bytes >= MOST:
        text = f"{warp} makes {barrier.place} await {barrier.bytes} bytes; it counts up to {MOST - 1}"
        warp.cta.launch.findings.add(Finding("barrier", text, instruction))


@translates("mbarrier.init")
def init(instruction: Instruction, form: Form) -> Act:
    where, count = locate(instruction.operands[0]), read(instruction.operands[1], "u32")
    access = Accessor(instruction, "shared")

    def run(warp: Warp, mask: Mask) -> None:
        for address, lanes in distinct(where(warp), mask):
            cta, offset = cta_and_offset(access, warp, address)
            if offset % 8:
                raise Fault(
                    Finding("misaligned", f"{warp} initialises an mbarrier at {offset:#x}", instruction)
                )
            cluster = cta.cluster
            access.watch(warp, cta, np.array([offset]), 8, write=True)
            made = cluster.order.warp_access(warp.agent, instruction)
            arrivals = int(count(warp)[lanes[0]])
            if not 1 <= arrivals < MOST:
                text = f"{warp} initialises an mbarrier for {arrivals} arrivals; 1 to {MOST - 1} are legal"
                cta.launch.findings.add(Finding("barrier", text, instruction))
            new = MBarrier(cta.rank, offset, arrivals, cluster.capacity, made)
            new.users.add(warp.agent)
            cta.mbarriers[offset] = new
            cta.shadow.keep_barrier(_granules(cta, offset), alive=True)

    return Act(run)


@translates("mbarrier.inval")
def inval(instruction: Instruction, form: Form) -> Act:
    where, access = locate(instruction.operands[0]), Accessor(instruction, "shared")

    def run(warp: Warp, mask: Mask) -> None:
        for address, _ in distinct(where(warp), mask):
            cta, offset = cta_and_offset(access, warp, address)
            barrier_at(access, warp, address)
            del cta.mbarriers[offset]
            cta.shadow.keep_barrier(_granules(cta, offset), alive=False)

    return Act(run)


@translates("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(instruction: Instruction, form: Form) -> Act:
    """With .expect_tx the last operand is bytes, otherwise a count of arrivals."""
    state, operands = _state(instruction.operands)
    where, expects = locate(operands[0]), instruction.has("expect_tx")
    amount = read(operands[1], "u32") if len(operands) > 1 else None
    access, drop = Accessor(instruction, "shared"), instruction.has("arrive_drop")
    relaxed = instruction.has("relaxed")

    def run(warp: Warp, mask: Mask) -> None:
        chosen = list(distinct(where(warp), mask))
        for address, _ in chosen:
            _reach(access, warp, address)
        clock = relaxed_clock(warp) if relaxed else warp.release()
        for address, lanes in chosen:
            barrier = barrier_at(access, warp, address)
            must_know_init(access, warp, barrier)
            if state is not None:
                state(warp, np.uint64(barrier.phase), mask)
            given = 0 if amount is None else int(amount(warp)[lanes].sum(dtype=np.int64))
            if expects:
                expect(warp, barrier, given, instruction)
            count = len(lanes) if expects or amount is None else given
            if drop:
                barrier.count -= count
            guarded(access, warp, lambda: barrier.arrive(count, clock, instruction.line))  # noqa: B023

    return Act(run, signals=True)


@translates("mbarrier.expect_tx", "mbarrier.complete_tx")
def transaction(instruction: Instruction, form: Form) -> Act:
    where, amount = locate(instruction.operands[0]), read(instruction.operands[1], "u32")
    access, expects = Accessor(instruction, "shared"), instruction.has("expect_tx")

    def run(warp: Warp, mask: Mask) -> None:
        for address, lanes in distinct(where(warp), mask):
            barrier = barrier_at(access, warp, address)
            must_know_init(access, warp, barrier)
            given = int(amount(warp)[lanes].sum(dtype=np.int64))
            if expects:
                expect(warp, barrier, given, instruction)
            else:
                barrier.deliver(given)

    return Act(run)


@translates("mbarrier.try_wait", "mbarrier.test_wait")
def wait(instruction: Instruction, form: Form) -> Act:
    """try_wait is held until the phase is over; where nothing else can happen it returns false once, as
    after its time limit. test_wait answers at once."""
    done, where = write(instruction.operands[0], "pred"), locate(instruction.operands[1])
    parity = instruction.has("parity")
    phase = read(instruction.operands[2], "u32" if parity else "u64")
    access, tries = Accessor(instruction, "shared"), instruction.has("try_wait")
    acquires = not instruction.has("relaxed")

    def run(warp: Warp, mask: Mask) -> Wait | None:
        answers = np.zeros(LANES, np.bool_)
        for address, lanes in distinct(where(warp), mask):
            barrier = barrier_at(access, warp, address)
            must_know_init(access, warp, barrier)
            awaited = int(phase(warp)[lanes[0]])

            def over(barrier: MBarrier = barrier, awaited: int = awaited) -> bool:
                return barrier.over(awaited) if parity else barrier.phase != awaited

            if over():
                answers[lanes] = True
                if acquires:
                    lines = (instruction.line, *barrier.passed_lines)
                    order = warp.cta.cluster.order
                    order.acquire(warp.agent, barrier.passed, lines)
                    if warp.lanes.entries:
                        warp.lanes.learn(order, barrier.passed)
            elif tries and not warp.gives_up:
                return Wait(over, str(barrier), barrier, limited=True)
        warp.gives_up = False
        done(warp, answers, mask)
        return None

    return Act(run)


def _granules(cta: Cta, offset: int) -> NDArray[np.intp]:
    return granules(np.array([offset]), SIZE, cta.launch.granule)


def _state(operands: tuple[Operand, ...]) -> tuple[Callable[..., None] | None, tuple[Operand, ...]]:
    """The result of an arrive, where it has one, and the operands after it."""
    if isinstance(operands[0], Discard):
        return None, operands[1:]
    if isinstance(operands[0], Address):
        return None, operands
    return write(operands[0], "u64"), operands[1:]
