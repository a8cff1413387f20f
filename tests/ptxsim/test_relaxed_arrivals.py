"""A relaxed arrival at an mbarrier tells what a fence before it has released, and nothing else."""

from __future__ import annotations

import pytest

from ptxsim import Shape, launch
from ptxsim.run.timing import Timing

KERNEL = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry tells()
{
    .reg .pred %p<4>;
    .reg .b32 %r<6>;
    .shared .align 8 .b8 bar[8];
    .shared .align 4 .b8 told[4];
    mov.u32 %r1, %tid.x;
    setp.eq.u32 %p1, %r1, 0;
    setp.lt.u32 %p2, %r1, 32;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    bar.sync 0;
    @!%p2 bra READS;
    @%p1 st.shared.b32 [told], %r1;
    FENCE
    @%p1 mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];
    bra DONE;
READS:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra READS;
    ld.shared.b32 %r2, [told];
DONE:
    ret;
}
"""


@pytest.mark.parametrize("timing", (("eager", 0), ("late", 1), ("random", 1)), ids=str)
@pytest.mark.parametrize(
    "fence", ("fence.acq_rel.cta;", "fence.release.sync_restrict::shared::cta.cluster;", "")
)
def test_fences_before_relaxed_arrivals(fence: str, timing: tuple[str, int]) -> None:
    shape = Shape((1, 1, 1), (64, 1, 1))
    result = launch(KERNEL.replace("FENCE", fence), "tells", shape, b"", timing=Timing(*timing))
    assert {finding.kind for finding in result.findings} == (set() if fence else {"race"})
