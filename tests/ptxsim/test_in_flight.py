"""Operations in flight keep the values that their operands had when they were issued."""

from __future__ import annotations

import pytest
from planted import run

from ptxsim.ptx.nodes import Instruction
from ptxsim.state.operation import Operation, Units

TIMINGS = ("eager", "late", "random")
COPY = """
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r6, 4;
    st.global.b32 [%rd3], %r1;
    cp.async.ca.shared.global [%r4], [%rd3], 4, %r6;
    mov.u64 %rd3, 0;
    mov.u32 %r6, 0;
    mov.u32 %r5, %r4;
    mov.u32 %r4, 0;
    cp.async.wait_all;
    ld.shared.b32 %r7, [%r5];
    add.s64 %rd3, %rd1, %rd2;
    add.s32 %r7, %r7, 100;
    st.global.b32 [%rd3], %r7;
"""
LANES = """
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    shl.b32 %r5, %r1, 4;
    cvt.u64.u32 %rd2, %r5;
    add.s64 %rd3, %rd1, %rd2;
    add.s32 %r6, %r3, %r5;
    st.global.b32 [%rd3], %r1;
    st.shared.b32 [%r6], 100;
    fence.proxy.async;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;
    bar.sync 0;
    setp.lt.u32 %p2, %r1, 4;
    @%p2 BULK [%r6], [%rd3], 16, [bar];
    mov.u64 %rd3, 0;
    mov.u32 %r5, %r6;
    mov.u32 %r6, 0;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r7, [%r5];
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    bar.sync 0;
    st.global.b32 [%rd3], %r7;
"""
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_copy_keeps_its_registers(timing: str) -> None:
    result, out = run(COPY, timing=timing)
    assert not result.findings and out.tolist() == list(range(100, 164))


@pytest.mark.parametrize("timing", TIMINGS)
def test_bulk_copies_of_several_lanes_keep_their_registers(timing: str) -> None:
    result, out = run(LANES.replace("BULK", BULK), threads=16, timing=timing)
    assert not result.findings and out[:16].tolist() == [0, 1, 2, 3] + [100] * 12


STEPS = """
    @!%p1 bra READY;
    mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32;
READY:
    bar.sync 0;
    mul.lo.u32 %r5, %r1, 16;
    add.s32 %r6, %r3, %r5;
    setp.lt.u32 %p2, %r1, 2;
    @%p2 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r6], [bar];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r7, [%r3];
    ld.shared.b32 %r7, [%r3+16];
"""


@pytest.mark.parametrize("timing", TIMINGS)
def test_requests_of_several_lanes_keep_where_their_answers_go(timing: str) -> None:
    """Two lanes ask at once: each answer is written to its own place."""
    result, _ = run(STEPS, "sm_100a", 32, timing)
    assert not result.findings


def test_waiters_find_operations_by_what_they_signal() -> None:
    """The object itself counts, not what equals it; the order is that of issue, until they have landed."""
    units, instruction = Units(), Instruction("cp.async", (), 1)
    units.eager = False
    one: list[int] = []
    other: list[int] = []
    issued = [
        Operation(instruction, lambda: None, signals, "queue")
        for signals in ((one,), (other, one), (), (one, one))
    ]
    for operation in issued:
        units.submit(operation)
    assert units.signalling(one) == [issued[0], issued[1], issued[3]]
    assert units.signalling(other) == [issued[1]] and not units.signalling(None)
    units.land(issued[1])
    assert units.pending == issued[2:]
    assert units.signalling(one) == [issued[3]] and not units.signalling(other)
