"""Tensor memory that the CTAs of a pair allocate together, and one of them writes in both."""

from __future__ import annotations

import pytest

from ptxsim import Shape, launch
from ptxsim.run.timing import Timing

TIMINGS = [("eager", 0), *((name, seed) for name in ("late", "random") for seed in range(5))]
KERNEL = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry pair()
{
    .reg .pred %p<6>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<6>;
    .shared .align 128 .b8 source[2048];
    .shared .align 8 .b8 bar[8];
    .shared .align 8 .b8 slot[8];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.and.u32 %p2, %r2, 0, %p1;
    shl.b32 %r4, %r1, 6;
    mov.u32 %r3, source;
    add.u32 %r4, %r3, %r4;
    st.shared.v4.b32 [%r4], {%r1, %r1, %r1, %r1};
    st.shared.v4.b32 [%r4+16], {%r1, %r1, %r1, %r1};
    st.shared.v4.b32 [%r4+32], {%r1, %r1, %r1, %r1};
    st.shared.v4.b32 [%r4+48], {%r1, %r1, %r1, %r1};
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [slot], 32;
    ld.shared.b32 %r10, [slot];
    shr.u32 %r8, %r3, 4;
    or.b32 %r8, %r8, 0x00080000;
    mov.b32 %r9, 0x4008;
    mov.b64 %rd1, {%r8, %r9};
    @%p2 tcgen05.cp.cta_group::2.128x128b [%r10], %rd1;
    @%p2 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [bar];
    setp.ne.u32 %p4, %r2, 0;
    @%p4 bra OVER;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
OVER:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r20, %r21, %r22, %r23}, [%r10];
    tcgen05.wait::ld.sync.aligned;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r10, 32;
    ret;
}
"""


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_what_is_written_as_soon_as_one_of_them_may_go_on_stays(timing: tuple[str, int]) -> None:
    """The other one may still be on its way out of tcgen05.alloc."""
    shape = Shape((2, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    result = launch(KERNEL, "pair", shape, b"", timing=Timing(*timing))
    assert not result.findings and result.fault is None, result.findings
