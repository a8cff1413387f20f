"""Lanes of one warp that meet in shared memory: reported unless an instruction orders them in between."""

from __future__ import annotations

import pytest
from planted import run

from ptxsim import Finding

OWN, NEXT = "[%r4]", "[%r5]"
SYNC = "bar.warp.sync -1;"
READ = f"""
    xor.b32 %r5, %r4, 4;
    st.shared.b32 {OWN}, %r1;
    {SYNC}
    ld.shared.b32 %r6, {NEXT};
"""
OVERWRITE = f"""
    xor.b32 %r5, %r4, 4;
    st.shared.b32 {OWN}, %r1;
    {SYNC}
    st.shared.b32 {NEXT}, %r2;
"""
TAKE = f"""
    xor.b32 %r5, %r4, 4;
    st.shared.b32 {OWN}, %r1;
    bar.sync 0;
    ld.shared.b32 %r6, {NEXT};
    {SYNC}
    st.shared.b32 {OWN}, %r2;
"""
BY_ONE = f"""
    @%p1 st.shared.b32 [%r3], %r1;
    {SYNC}
    @%p2 ld.shared.b32 %r6, [%r3];
"""
WIDE = f"""
    shl.b32 %r5, %r1, 4;
    add.s32 %r5, %r3, %r5;
    st.shared.v4.b32 [%r5], {{%r1, %r1, %r1, %r1}};
    {SYNC}
    ld.shared.b32 %r6, {OWN};
"""


def findings(body: str, threads: int = 32) -> list[Finding]:
    return run(body, threads=threads)[0].findings


@pytest.mark.parametrize("body", [READ, OVERWRITE, TAKE, BY_ONE, WIDE])
def test_a_dropped_sync_is_found(body: str) -> None:
    assert not findings(body)
    (found,) = findings(body.replace(SYNC, ""))
    assert found.kind == "lanes" and found.instruction is not None and found.other is not None
    line, before = found.instruction.line, found.other.line
    assert before < line and found.instruction.opcode.startswith(("ld.shared", "st.shared"))


def test_text_says_which_lanes() -> None:
    (found,) = findings(BY_ONE.replace(SYNC, ""))
    assert "lane 1 reads what lane 0 wrote" in str(found) and "shared memory at 0x400" in str(found)
    assert found.times == 1


@pytest.mark.parametrize(
    "ordering",
    [
        "bar.sync 0;",
        "shfl.sync.bfly.b32 %r7, %r1, 1, 31, -1;",
        "vote.sync.any.pred %p3, %p1, -1;",
        "elect.sync %r7|%p3, -1;",
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        "fence.proxy.async; bar.warp.sync 0xffffffff;",
    ],
)
def test_instructions_that_order_lanes(ordering: str) -> None:
    assert not [found for found in findings(READ.replace(SYNC, ordering)) if found.kind == "lanes"]


@pytest.mark.parametrize("other", ["fence.proxy.async;", "membar.cta;", "mov.b32 %r7, %r1;"])
def test_instructions_that_do_not(other: str) -> None:
    assert [found.kind for found in findings(READ.replace(SYNC, other))] == ["lanes"]


def test_own_places_and_the_same_values_need_no_order() -> None:
    assert not findings(f"st.shared.b32 {OWN}, %r1; ld.shared.b32 %r6, {OWN}; st.shared.b32 {OWN}, %r6;")
    assert not findings("mov.b32 %r6, 7; st.shared.b32 [%r3], %r6; st.shared.b32 [%r3], %r6;")
    assert not findings(f"st.volatile.shared.b32 {OWN}, %r1; ld.volatile.shared.b32 %r6, {OWN};")
