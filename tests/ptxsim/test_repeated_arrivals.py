"""Arrivals at a cluster's barrier by warps that exit, and by warps that did not wait for the one before."""

from __future__ import annotations

import pytest

from ptxsim import Shape, launch
from ptxsim.run.launch import Result
from ptxsim.run.timing import Timing

TIMINGS = (("eager", 0), *((name, seed) for name in ("late", "random") for seed in range(4)))
KERNEL = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry pairs()
{
    .reg .pred %p<4>;
    .reg .b32 %r<6>;
    .shared .align 8 .b8 bar[8];
    .shared .align 4 .b8 told[4];
    mov.u32 %r1, %tid.x;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r1, 32;
    FIRST
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    SECOND
    WAITS
    @%p2 mbarrier.arrive.shared::cta.b64 _, [bar];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}
"""
ARRIVE, WAIT = "barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.aligned;"
RELEASE = "barrier.cluster.arrive.aligned;"


def run(timing: tuple[str, int], first: str = ARRIVE, second: str = ARRIVE, waits: str = WAIT) -> Result:
    shape = Shape((2, 1, 1), (64, 1, 1), cluster=(2, 1, 1))
    text = KERNEL.replace("FIRST", first).replace("SECOND", second).replace("WAITS", waits)
    return launch(text, "pairs", shape, b"", timing=Timing(*timing))


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
@pytest.mark.parametrize("waits", (WAIT, 2 * WAIT), ids=("one wait", "two waits"))
def test_the_second_arrival_counts_for_the_next_round(waits: str, timing: tuple[str, int]) -> None:
    """Effects before it, such as the initialisation of an mbarrier, are known after the first wait."""
    result = run(timing, waits=waits)
    (finding,) = result.findings
    assert finding.kind == "barrier" and "again before it has waited" in finding.text
    assert finding.times == 4 and result.fault is None


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_a_second_arrival_of_some_warps_completes_nothing(timing: tuple[str, int]) -> None:
    """Warps 1 come twice in the first round; it is not complete before the warps come that initialise."""
    result = run(timing, first=f"setp.ge.u32 %p3, %r1, 32; @%p3 {ARRIVE}")
    assert {finding.kind for finding in result.findings} == {"barrier"} and result.fault is None


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_a_wait_tells_of_its_own_round_alone(timing: tuple[str, int]) -> None:
    """The mbarrier is initialised after the arrivals that warps 1 wait for, maybe before they look."""
    result = run(timing, second="", waits=WAIT + "@%p1 " + ARRIVE + "@%p1 " + WAIT)
    assert {"race", "barrier"} & {finding.kind for finding in result.findings}


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
@pytest.mark.parametrize(("first", "kinds"), ((RELEASE, {"barrier"}), (ARRIVE, {"barrier", "race"})))
def test_a_wait_tells_of_the_round_before(first: str, kinds: set[str], timing: tuple[str, int]) -> None:
    """A round that warps came to without a wait for the one before hands on what that one gathered: where
    this one's arrivals are relaxed, what was written before the first arrivals is known after the wait."""
    result = run(
        timing,
        first="@%p1 st.shared.b32 [told], %r1;" + first,
        waits=WAIT + "@%p2 ld.shared.b32 %r2, [told];",
    )
    assert {finding.kind for finding in result.findings} == kinds and result.fault is None


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_warps_that_exit_no_longer_have_to_come(timing: tuple[str, int]) -> None:
    """Warps 1 arrive and exit; warps 0 initialise before they arrive, so that nobody may have gone on."""
    result = run(timing, first=f"setp.ge.u32 %p3, %r1, 32; @%p3 {ARRIVE} @%p3 ret;")
    assert not result.findings and result.fault is None


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
@pytest.mark.parametrize("leaves", ("", ARRIVE), ids=("before", "after arriving"))
def test_a_warp_that_exits_completes_nothing(leaves: str, timing: tuple[str, int]) -> None:
    """The last of three warps exits at once, and no barrier is complete before the first one comes."""
    text = (
        KERNEL.replace("FIRST", f"setp.ge.u32 %p3, %r1, 64; @!%p3 bra STAYS; {leaves} ret; STAYS:")
        .replace("SECOND", ARRIVE)
        .replace("WAITS", WAIT)
    )
    shape = Shape((2, 1, 1), (96, 1, 1), cluster=(2, 1, 1))
    result = launch(text, "pairs", shape, b"", timing=Timing(*timing))
    assert not result.findings and result.fault is None


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_blocks_that_are_no_whole_warps(timing: tuple[str, int]) -> None:
    text = KERNEL.replace("FIRST", "").replace("SECOND", ARRIVE).replace("WAITS", WAIT)
    shape = Shape((2, 1, 1), (40, 1, 1), cluster=(2, 1, 1))
    result = launch(text, "pairs", shape, b"", timing=Timing(*timing))
    assert not result.findings and result.fault is None
