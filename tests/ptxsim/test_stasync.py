"""st.async, red.async and tcgen05.cp: values, what waiters may rely on, faults, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from planted import run

from ptxsim.isa.table import Unmodelled

TIMINGS = ("eager", "late", "random")
ASYNC = """
    st.shared.b32 [%r4], 1000;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    bar.sync 0;
    BODY
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r5, [%r4];
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r5;
"""
STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4], %r1, [bar];"
ADD = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r3], %r1, [bar];"
THREADS = np.arange(64)


@pytest.mark.parametrize("timing", TIMINGS)
def test_stores_arrive_with_their_barrier(timing: str) -> None:
    result, out = run(ASYNC.replace("BODY", STORE), timing=timing)
    assert not result.findings and (out.numpy() == THREADS).all()


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.u32", 1000 + THREADS.sum()),
        ("add.s32", 1000 + THREADS.sum()),
        ("max.s32", 1000),
        ("min.u32", 0),
        ("or.b32", 1000 | 63),
        ("inc.u32", 63),
    ],
)
def test_reductions_of_one_word_by_all_threads(timing: str, operation: str, expected: int) -> None:
    body = ADD.replace("add.u32", operation)
    if operation == "inc.u32":  # from 1000 to 0, and then 63 times one more
        body = body.replace("%r1,", "63,")
    result, out = run(ASYNC.replace("BODY", body), timing=timing)
    assert not result.findings
    assert out[0] == expected and (out[1:] == 1000).all()


def test_reading_before_the_barrier_is_a_race() -> None:
    body = ASYNC.replace("BODY", STORE).replace("@!%p3 bra WAIT;", "").replace("mbarrier.try_wait", "// ")
    assert "race" in {finding.kind for finding in run(body)[0].findings}


FENCE = "    fence.proxy.async.shared::cta;\n"
OUT = f"""
    @!%p1 bra END;
{FENCE}    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END:
"""


@pytest.mark.parametrize("timing", TIMINGS)
def test_tma_reads_what_was_stored_after_a_proxy_fence(timing: str) -> None:
    """The fence must follow the wait: when the stores are issued, their data is not there yet."""
    waited = ASYNC.replace("BODY", STORE).partition("    ld.shared")[0]
    result, out = run(waited + OUT, timing=timing)
    assert not result.findings and (out.numpy() == THREADS).all()
    unfenced = OUT.replace(FENCE, "")
    for body in (waited + unfenced, waited.replace("WAIT:", f"{FENCE}WAIT:") + unfenced):
        found = {finding.kind for finding in run(body, timing=timing)[0].findings}
        assert found == {"missing proxy fence"}


@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        ("[%r4]", "[%r4+4096]", "out of bounds"),
        ("[%r4]", "[%r4+2]", "misaligned"),
        ("[bar]", "[%r3]", "barrier"),
    ],
)
def test_faults(right: str, wrong: str, kind: str) -> None:
    result, _ = run(ASYNC.replace("BODY", STORE.replace(right, wrong)))
    assert result.fault is not None and result.fault.kind == kind


@pytest.mark.parametrize(
    "instruction",
    [
        STORE.replace(".shared::cluster", ""),
        STORE.replace("weak", "release"),
        STORE.replace(".b32", ".b16"),
        STORE.replace(".b32", ".v2.b32"),
        ADD.replace("add.u32", "add.f32"),
        ADD.replace("add.u32", "and.u32"),
    ],
)
def test_what_is_not_modelled_raises(instruction: str) -> None:
    with pytest.raises(Unmodelled):
        run(instruction)


# --- tcgen05.cp ---------------------------------------------------------------------------------------------

# 16 rows of 32 bytes; the last words of the buffer take the address of tensor memory.
COPY = """
    and.b32 %r4, %r2, 60;
    mad.lo.s32 %r4, %r4, 8, %r3;
    st.shared.v4.b32 [%r4], {%r1, %r1, %r1, %r1};
    st.shared.v4.b32 [%r4+16], {%r2, %r2, %r2, %r2};
    mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [buffer+1016], 32;
    ld.shared.b32 %r5, [buffer+1016];
    shr.u32 %r6, %r3, 4;
    cvt.u64.u32 %rd2, %r6;
    or.b64 %rd2, %rd2, 0x400800080000;
    @!%p1 bra ISSUED;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r5], %rd2;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
ISSUED:
"""
TAKE = """
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
    tcgen05.fence::after_thread_sync;
"""
FREE = """
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r5];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
"""


def kinds(body: str, timing: str = "eager") -> set[str]:
    return {finding.kind for finding in run(body, "sm_100a", 32, timing)[0].findings}


@pytest.mark.parametrize("timing", TIMINGS)
def test_copies_are_over_when_a_commit_says_so(timing: str) -> None:
    assert not kinds(COPY + TAKE + FREE, timing)
    assert kinds(COPY + FREE, timing) & {"race", "uninitialised"}


def test_copies_read_through_the_asynchronous_proxy() -> None:
    assert kinds(COPY.replace("fence.proxy.async.shared::cta;", "") + TAKE + FREE) == {"missing proxy fence"}


def test_copies_stay_within_the_allocation() -> None:
    assert kinds(COPY.replace("warpx4 [%r5]", "warpx4 [%r5+32]") + TAKE + FREE) == {"tensor memory"}


def test_one_commit_too_many_is_a_misused_barrier() -> None:
    """While the phase still awaits bytes, the second arrival is one too many."""
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];\n"
    expect = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16;\n"
    assert kinds(COPY.replace(commit, expect + 2 * commit) + TAKE + FREE) == {"barrier"}
