"""cp.async: what lands, when it may be relied on, and what is reported otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import at, execute, instruction, kinds, machine, reg, some_lanes, written

from ptxsim.isa.table import Unmodelled, Wait, translate
from ptxsim.ptx.nodes import Imm
from ptxsim.state.barriers import MBarrier
from ptxsim.state.cta import Cluster
from ptxsim.watch.findings import Fault
from ptxsim.watch.order import ASYNC, Access

LANES = range(32)
TARGET, SOURCE, AMOUNT, IGNORE = reg("b32", 0), reg("b64", 0), reg("b32", 1), reg("pred", 0)


class Copying:
    """Lane i copies source[16 i:] to shared[1024 + 16 i:]."""

    def __init__(self, eager: bool = False, threads: int = 32) -> None:
        self.cluster: Cluster = machine(threads=threads)
        self.cluster.units.eager = eager
        self.source = np.random.randint(0, 256, 4096).astype(np.uint8)
        self.cluster.launch.memory.register("source", self.source.ctypes.data, 4096, self.source)
        self.shared = self.cluster.ctas[0].shared.data
        self.warp = self.cluster.warps[0]
        self.begin = -(-self.source.ctypes.data // 16) * 16 - self.source.ctypes.data
        for warp in self.cluster.warps:
            warp.u64[0][:] = self.source.ctypes.data + self.begin + np.arange(32) * 16
            warp.u32[0][:] = 1024 + np.arange(32) * 16

    def copy(
        self, size: int = 16, *more: Any, opcode: str = "cp.async.ca.shared.global", **kwargs: Any
    ) -> None:
        execute(self.warp, opcode, at(TARGET), at(SOURCE), Imm(size), *more, **kwargs)

    def wait(self, left: int, mask: Any = None) -> Wait | None:
        return execute(self.warp, "cp.async.wait_group", Imm(left), mask=mask, line=90)

    def commit(self, mask: Any = None) -> None:
        execute(self.warp, "cp.async.commit_group", mask=mask)

    def load(self, warp: Any = None) -> None:
        execute(warp or self.warp, "ld.shared.b32", reg("b32", 5), at(TARGET), line=80)

    def land(self, wait: Wait | None) -> None:
        """Lands what the wait is for, as late timing does."""
        assert wait is not None and not wait.ready()
        (operation,) = self.cluster.units.signalling(wait.on)
        self.cluster.units.land(operation)
        assert wait.ready()

    def row(self, lane: int, memory: str = "shared") -> list[int]:
        if memory == "shared":
            return self.shared[1024 + 16 * lane :][:16].tolist()  # type: ignore[no-any-return]
        return self.source[self.begin + 16 * lane :][:16].tolist()  # type: ignore[no-any-return]


POISON = [0xA5] * 16

# --- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("partial", [False, True])
def test_copies_of_all_sizes(size: int, partial: bool) -> None:
    it, lanes = Copying(eager=True), some_lanes() if partial else np.ones(32, bool)
    cache = "cg" if size == 16 else "ca"
    it.copy(size, opcode=f"cp.async.{cache}.shared.global.L2::128B", mask=lanes if partial else None)
    for lane in LANES:
        want = it.row(lane, "source")[:size] + POISON[size:] if lanes[lane] else POISON
        assert it.row(lane) == want


@pytest.mark.parametrize("size", [4, 8, 16])
def test_missing_bytes_are_zeros(size: int) -> None:
    it = Copying(eager=True)
    it.warp.u32[1][:] = amounts = np.random.randint(0, size + 1, 32)
    it.warp.u64[0][amounts == 0] = 0  # nothing is read there
    it.copy(size, AMOUNT, reg("b64", 7), opcode="cp.async.ca.shared::cta.global.L2::cache_hint")
    for lane in LANES:
        amount = int(amounts[lane])
        assert it.row(lane) == it.row(lane, "source")[:amount] + [0] * (size - amount) + POISON[size:]


def test_an_ignored_source_gives_zeros() -> None:
    it = Copying(eager=True)
    it.warp.pred[0][:] = ignored = some_lanes()
    it.warp.u64[0][ignored] = 0
    it.copy(16, IGNORE)
    for lane in LANES:
        assert it.row(lane) == ([0] * 16 if ignored[lane] else it.row(lane, "source"))


def test_the_source_is_read_when_the_copy_lands() -> None:
    it = Copying()
    it.copy()
    assert it.row(3) == POISON
    it.source[:] = 7
    it.cluster.units.land(it.cluster.units.pending[0])
    assert it.row(3) == [7] * 16


def test_registers_may_change_under_a_copy() -> None:
    """The addresses and amounts of a copy are those of its issue."""
    it = Copying()
    it.warp.u32[1][:] = 12
    it.copy(16, AMOUNT)
    for register in (it.warp.u64[0], it.warp.u32[0], it.warp.u32[1]):
        register[:] = 0
    it.cluster.units.land(it.cluster.units.pending[0])
    for lane in LANES:
        assert it.row(lane) == it.row(lane, "source")[:12] + [0] * 4


# --- groups -------------------------------------------------------------------------------------------------


def test_waiting_for_all_but_the_newest_groups() -> None:
    it = Copying()
    for line in range(3):
        it.copy(line=line + 1)
        it.copy(line=line + 11)
        it.commit()
    first = [operation.instruction.line for operation in it.cluster.units.pending]
    assert first == [1, 11, 2, 12, 3, 13]
    assert it.wait(3) is None
    it.land(it.wait(2))
    assert [operation.instruction.line for operation in it.cluster.units.pending] == first[2:]
    assert it.wait(2) is None
    it.commit()  # an empty group
    assert it.wait(3) is None
    it.land(it.wait(1))
    assert it.cluster.units.pending == []
    assert it.wait(0) is None


def test_wait_all_needs_no_commit() -> None:
    it = Copying()
    it.copy()
    assert it.wait(0) is None
    it.land(execute(it.warp, "cp.async.wait_all"))
    assert execute(it.warp, "cp.async.wait_all") is None
    it.load()
    assert kinds(it.cluster) == []


def test_groups_belong_to_lanes() -> None:
    it, low = Copying(), np.arange(32) < 16
    it.copy(mask=low, line=1)
    it.copy(mask=~low, line=2)
    it.commit(mask=low)
    it.commit(mask=~low)
    assert it.wait(1) is None
    it.land(it.wait(0, mask=low))
    assert [operation.instruction.line for operation in it.cluster.units.pending] == [2]
    assert it.wait(0, mask=low) is None
    it.land(it.wait(0))


# --- order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [False, True])
def test_reading_before_waiting_is_a_race(eager: bool) -> None:
    it = Copying(eager)
    written(it.cluster)
    it.copy()
    it.commit()
    it.load()
    if not eager:
        it.land(it.wait(0))
    assert kinds(it.cluster) == ["race"]


@pytest.mark.parametrize("eager", [False, True])
def test_reading_after_waiting_is_not(eager: bool) -> None:
    it = Copying(eager)
    it.load()
    assert kinds(it.cluster) == ["uninitialised"]
    for _ in range(2):
        it.copy()
        it.commit()
    if not eager:
        it.land(it.wait(0))
    assert it.wait(0) is None
    it.load()
    assert kinds(it.cluster) == ["uninitialised"]
    assert it.warp.u32[5].tolist() == it.shared[1024:].view(np.uint32)[: 32 * 4 : 4].tolist()


def test_what_is_waited_for_leaves_later_copies_unknown() -> None:
    it = Copying(eager=True)
    it.copy()
    it.commit()
    it.warp.u32[0][:] += 1024
    it.copy()
    it.commit()
    assert it.wait(1) is None
    it.warp.u32[0][:] -= 1024
    it.load()
    assert kinds(it.cluster) == []
    it.warp.u32[0][:] += 1024
    it.load()
    assert kinds(it.cluster) == ["race"]


def test_a_copy_over_what_another_warp_reads() -> None:
    it = Copying(threads=64)
    written(it.cluster)
    it.load(it.cluster.warps[1])
    it.copy()
    it.cluster.units.land(it.cluster.units.pending[0])
    assert kinds(it.cluster) == ["race"]


@pytest.mark.parametrize("fenced", [False, True])
def test_tma_must_not_see_it_without_a_proxy_fence(fenced: bool) -> None:
    it, order = Copying(eager=True), None
    it.copy()
    it.commit()
    assert it.wait(0) is None
    order = it.cluster.order
    if fenced:
        order.fence_proxy(it.warp.agent)
    number = order.add(
        Access(order.agent("bulk copies"), 1, ASYNC, "bulk copy", instruction("cp.async.bulk"))
    )
    it.cluster.ctas[0].shadow.read(number, slice(256, 300), order.clocks[it.warp.agent])
    assert kinds(it.cluster) == ([] if fenced else ["missing proxy fence"])


# --- mbarriers ----------------------------------------------------------------------------------------------


def barrier(it: Copying, count: int) -> MBarrier:
    cta = it.cluster.ctas[0]
    made = it.cluster.order.warp_access(it.warp.agent, instruction("mbarrier.init.shared.b64"))
    found = cta.mbarriers[64] = MBarrier(0, 64, count, it.cluster.capacity, made)
    found.users.update(warp.agent for warp in it.cluster.warps)
    return found


def arrive(it: Copying, noinc: str = "", mask: Any = None) -> None:
    execute(it.warp, f"cp.async.mbarrier.arrive{noinc}.shared.b64", at(Imm(64)), mask=mask)


def test_arriving_when_the_copies_have_landed() -> None:
    it, lanes = Copying(threads=64), some_lanes()
    full = barrier(it, int(lanes.sum()))
    it.copy(mask=lanes)
    arrive(it, ".noinc", mask=lanes)
    it.copy(line=5)
    assert full.pending == full.count and not full.over(0)
    (arrival,) = it.cluster.units.signalling(full)
    it.cluster.units.land(arrival)
    assert full.over(0)
    assert [operation.instruction.line for operation in it.cluster.units.pending] == [5]
    other = it.cluster.warps[1]
    it.cluster.order.acquire(other.agent, full.passed)
    other.u32[0][~lanes] = other.u32[0][lanes][0]
    it.load(other)
    assert kinds(it.cluster) == []


def test_without_noinc_the_arrivals_come_on_top() -> None:
    it = Copying()
    full = barrier(it, 1)
    it.copy()
    arrive(it)
    assert full.pending == 33
    full.arrive(1, it.cluster.order.release(it.warp.agent), 2)
    assert not full.over(0)
    for operation in list(it.cluster.units.pending):
        it.cluster.units.land(operation)
    assert full.over(0) and full.pending == 1


def test_reading_without_the_barrier_is_a_race() -> None:
    it = Copying(eager=True, threads=64)
    barrier(it, 32)
    it.copy()
    arrive(it, ".noinc")
    it.load(it.cluster.warps[1])
    assert kinds(it.cluster) == ["race"]


def test_too_many_arrivals_and_no_barrier() -> None:
    it = Copying(eager=True)
    with pytest.raises(Fault, match="none is initialised"):
        arrive(it)
    barrier(it, 31)
    with pytest.raises(Fault, match="32 arrivals where 31"):
        arrive(it, ".noinc")


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("target", "out of bounds"),
        ("source", "out of bounds"),
        ("alignment", "misaligned"),
        ("amount", "misuse"),
    ],
)
def test_faults(what: str, kind: str) -> None:
    it = Copying(eager=True)
    it.warp.u32[1][:] = 16
    if what == "target":
        it.warp.u32[0][5] = 4096
    elif what == "source":
        it.warp.u64[0][5] = 64
    elif what == "alignment":
        it.warp.u64[0][5] += 8
    else:
        it.warp.u32[1][5] = 17
    with pytest.raises(Fault) as caught:
        it.copy(16, AMOUNT)
    assert caught.value.finding.kind == kind


def test_partial_reads_are_checked_too() -> None:
    it = Copying(eager=True)
    it.warp.u32[1][:] = 3
    it.warp.u64[0][:] += 2
    with pytest.raises(Fault, match="misaligned"):
        it.copy(4, AMOUNT)


@pytest.mark.parametrize(
    ("opcode", "operands"),
    [
        ("cp.async.cg.shared.global", (at(TARGET), at(SOURCE), Imm(8))),
        ("cp.async.ca.shared.global", (at(TARGET), at(SOURCE), Imm(32))),
        ("cp.async.ca.global.shared", (at(SOURCE), at(TARGET), Imm(8))),
        ("cp.async.ca.shared.global.L3::64B", (at(TARGET), at(SOURCE), Imm(8))),
        ("cp.async.ca.shared.global", (at(TARGET), at(SOURCE), Imm(8), AMOUNT, IGNORE)),
        ("cp.async.wait_group", (Imm(32),)),
        ("cp.async.wait_group.read", (Imm(0),)),
        ("cp.async.mbarrier.arrive.shared::cluster.b64", (at(TARGET),)),
    ],
)
def test_what_is_not_modelled_raises(opcode: str, operands: Any) -> None:
    with pytest.raises(Unmodelled):
        translate(instruction(opcode, *operands))
