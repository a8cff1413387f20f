"""Lanes of one warp that meet in memory, or speak for one another: reported unless they are ordered."""

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
MINE = """
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd2, %rd1, %rd3;
    xor.b64 %rd3, %rd2, 4;
"""
"""%rd2 is this thread's word of the output, %rd3 its neighbour's."""
COPIED = f"""{MINE}
    xor.b32 %r5, %r4, 4;
    cp.async.ca.shared.global {OWN}, [%rd2], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    {SYNC}
    ld.shared.b32 %r6, {NEXT};
"""
COPIED_OVER = f"""{MINE}
    xor.b32 %r5, %r4, 4;
    st.shared.b32 {OWN}, %r1;
    bar.sync 0;
    ld.shared.b32 %r6, {NEXT};
    {SYNC}
    cp.async.ca.shared.global {OWN}, [%rd2], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
"""
GLOBAL = f"{MINE} st.global.b32 [%rd2], %r1;\n{SYNC}\n ld.global.b32 %r6, [%rd3];"
GLOBAL_OVER = f"{MINE} st.global.b32 [%rd2], %r1;\n{SYNC}\n st.global.b32 [%rd3], %r2;"
READ_BY_STORE = f"""
    st.shared.b32 {OWN}, %r1;
    fence.proxy.async.shared::cta;
    {SYNC}
    @!%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END:
"""
OVER_STORE = f"""{READ_BY_STORE.replace(SYNC, "bar.sync 0;")}
    {SYNC}
    st.shared.b32 {OWN}, %r2;
"""


def handed(before: str, after: str, meanwhile: str = "") -> str:
    """Warp 0 does what is `before` an arrival of its first lane, warp 1 what is `after` that."""
    return f"""{MINE}
    st.shared.b32 {OWN}, %r1;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    bar.sync 0;
    @!%p2 bra WAIT;
    {before}
    {SYNC}
    {meanwhile}
    @%p1 mbarrier.arrive.shared::cta.b64 _, [bar];
    bra END;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
    {after}
END:
"""


WRITE_OWN, READ_OTHERS = f"st.shared.b32 {OWN}, %r2;", "ld.shared.b32 %r6, [%r4+-128];"
HANDED = {
    "written": handed(WRITE_OWN, READ_OTHERS),
    "written, and a wait for something else": handed(
        WRITE_OWN, READ_OTHERS, "mbarrier.test_wait.parity.shared::cta.b64 %p3, [bar], 1;"
    ),
    "read": handed(f"ld.shared.b32 %r6, {OWN};", "st.shared.b32 [%r4+-128], %r2;"),
    "in global memory": handed("st.global.b32 [%rd2], %r1;", "ld.global.b32 %r6, [%rd2+-128];"),
    "copied": handed(
        f"cp.async.ca.shared.global {OWN}, [%rd2], 4; cp.async.commit_group; cp.async.wait_group 0;",
        READ_OTHERS,
    ),
}


def findings(body: str, threads: int = 32) -> list[Finding]:
    return run(body, threads=threads)[0].findings


@pytest.mark.parametrize(
    "body", [READ, OVERWRITE, TAKE, BY_ONE, WIDE, COPIED, COPIED_OVER, GLOBAL, GLOBAL_OVER]
)
def test_a_dropped_sync_is_found(body: str) -> None:
    assert not findings(body)
    (found,) = findings(body.replace(SYNC, ""))
    assert found.kind == "lanes" and found.instruction is not None and found.other is not None
    line, before = found.instruction.line, found.other.line
    assert before < line and found.instruction.opcode.startswith(("ld.", "st.", "cp.async"))


@pytest.mark.parametrize("name", HANDED)
def test_a_lane_does_not_speak_for_others(name: str) -> None:
    assert not findings(HANDED[name], 64)
    (found,) = findings(HANDED[name].replace(SYNC, ""), 64)
    assert found.kind == "lanes" and "of which another lane has signalled than did it" in str(found)


@pytest.mark.parametrize("body", [READ_BY_STORE, OVER_STORE])
def test_bulk_stores_by_one_lane(body: str) -> None:
    assert not findings(body)
    assert {found.kind for found in findings(body.replace(SYNC, ""))} == {"lanes"}


def test_what_a_lane_may_say() -> None:
    """What it wrote itself; what all lanes wrote alike; and what all lanes arrive for."""
    one = handed(f"{WRITE_OWN}\n @%p1 st.shared.b32 [%r3+512], 1;", "ld.shared.b32 %r6, [%r3+512];")
    assert not findings(one.replace(SYNC, ""), 64)
    alike = handed("st.shared.b32 [%r3+512], 1;", "ld.shared.b32 %r6, [%r3+512];")
    assert not findings(alike.replace(SYNC, ""), 64)
    every = (
        handed(WRITE_OWN, READ_OTHERS)
        .replace("[bar], 1;", "[bar], 32;")
        .replace("@%p1 mbarrier.a", "mbarrier.a")
    )
    assert not findings(every.replace(SYNC, ""), 64)


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


@pytest.mark.parametrize(
    "other",
    [
        "fence.proxy.async;",
        "membar.cta;",
        "mov.b32 %r7, %r1;",
        "cp.async.bulk.commit_group;",
        "cp.async.wait_all;",
        "nanosleep.u32 20;",
    ],
)
def test_instructions_that_do_not(other: str) -> None:
    assert [found.kind for found in findings(READ.replace(SYNC, other))] == ["lanes"]


def test_own_places_and_the_same_values_need_no_order() -> None:
    assert not findings(f"st.shared.b32 {OWN}, %r1; ld.shared.b32 %r6, {OWN}; st.shared.b32 {OWN}, %r6;")
    assert not findings("mov.b32 %r6, 7; st.shared.b32 [%r3], %r6; st.shared.b32 [%r3], %r6;")
    assert not findings(f"st.volatile.shared.b32 {OWN}, %r1; ld.volatile.shared.b32 %r6, {OWN};")
