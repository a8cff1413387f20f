"""Warps that write the same to the same shared memory: whatever order they take, a read finds that value."""

from __future__ import annotations

import pytest
import torch
from planted import run

import fa4flex
import ptxsim
from fa4flex import Varlen

TIMINGS = ("eager", "late", "random")
PLACE = "and.b32 %r5, %r2, 127;\n    add.s32 %r5, %r5, %r3;\n"
"""Four bytes for each lane, the same for all warps."""
BOTH = f"{PLACE}    st.shared.b32 [%r5], 0;\n"
READ = "ld.shared.b32 %r6, [%r5];\n"
COPY = """
    bar.warp.sync 0xffffffff;
    @!%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END:
"""
PROXY = "fence.proxy.async.shared::cta;"
RIGHT = {
    "each reads behind its own": f"{BOTH} {READ}",
    "a third one knows of one": (
        f"{BOTH} @%p2 bar.arrive 1, 64; @%p2 bra END; @%p3 bar.sync 1, 64; {READ} END:"
    ),
    "a copy behind a fence of one": f"{BOTH} {PROXY} {COPY} bar.sync 0;",
    "another value behind a barrier": f"{BOTH} {READ} bar.sync 0; @%p2 st.shared.b32 [%r5], 1;",
}
WRONG = {
    "different values": (f"{PLACE} st.shared.b32 [%r5], %r1; {READ}", "race"),
    "a third one knows of none": (f"{PLACE} @!%p3 st.shared.b32 [%r5], 0; @%p3 {READ}", "race"),
    "another value while it is read": (f"{BOTH} {READ} @%p2 st.shared.b32 [%r5], 1;", "race"),
    "another message of the same warp": (
        f"{PLACE} @%p2 st.shared.b32 [%r5], 0; bar.sync 0; @!%p2 {READ} @%p2 st.shared.b32 [%r5], 0;",
        "race",
    ),
    "a copy without a fence": (f"{BOTH} {COPY} bar.sync 0;", "missing proxy fence"),
}
"""%p3: warps from the third one on."""


def kinds(body: str, timing: str) -> set[str]:
    result, _ = run(f"setp.ge.u32 %p3, %r1, 64;\n    {body}", threads=96, timing=timing)
    assert result.fault is None
    return {finding.kind for finding in result.findings}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", RIGHT)
def test_the_same_value_is_no_finding(name: str, timing: str) -> None:
    assert not kinds(RIGHT[name], timing)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_agreement_is_found(name: str, timing: str) -> None:
    body, kind = WRONG[name]
    assert kind in kinds(body, timing)


@pytest.mark.parametrize("timing", TIMINGS)
def test_warpgroups_that_clear_the_same_values(timing: str) -> None:
    """Each of the Hopper forward's warpgroups clears what both read past the end of a sequence."""
    starts = torch.tensor([0, 150, 183], dtype=torch.int32)
    q, k, v = (torch.randn(183, 1, 64).bfloat16() for _ in range(3))
    with torch.no_grad(), ptxsim.device("sm_90a", int(torch.randint(1000, ())), timing) as gpu:
        out = fa4flex.compile()(q, k, v, varlen=Varlen(starts))
    assert not gpu.findings, gpu.report()
    exact = fa4flex.compile()(*(x.double() for x in (q, k, v)), varlen=Varlen(starts))
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
