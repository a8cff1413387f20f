"""Operations that must be over before a CTA exits, and the barrier of a cluster that sees to it."""

from __future__ import annotations

import struct

import pytest
import torch

from ptxsim import Result, Shape, launch
from ptxsim.run.timing import Timing

TIMINGS = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(3))]
KERNEL = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry pairs(.param .u64 out)
{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    .shared .align 128 .b8 data[512];
    .shared .align 8 .b8 bar[8];
    ld.param.b64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    xor.b32 %r3, %r2, 1;
    mov.u32 %r4, data;
    shl.b32 %r5, %r1, 2;
    add.u32 %r4, %r4, %r5;
    mapa.shared::cluster.u32 %r6, %r4, %r3;
    mov.u32 %r7, bar;
    mapa.shared::cluster.u32 %r8, %r7, %r3;
    setp.eq.u32 %p1, %r1, 0;
    st.shared.b32 [%r4], %r2;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
BODY
    ret;
}
"""
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
READ = "ld.shared::cluster.b32 %r9, [%r6];"
ARRIVE = "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];"
LOAD = """
    @!%p1 bra ON;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [data+256], [%rd1], 128, [bar];
ON:
"""
AWAIT = """
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
"""


def run(body: str, timing: tuple[str, int]) -> Result:
    given = torch.zeros(256, dtype=torch.uint8)
    parameters, shape = struct.pack("<Q", given.data_ptr()), Shape((2, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    return launch(KERNEL.replace("BODY", body), "pairs", shape, parameters, timing=Timing(*timing))


def kinds(body: str, timing: tuple[str, int]) -> set[str]:
    return {finding.kind for finding in run(body, timing).findings}


OVER = {"read": READ + MEET, "arrive": ARRIVE + MEET, "load": LOAD + AWAIT}
EARLY = {"read": READ, "arrive": ARRIVE, "load": LOAD}


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
@pytest.mark.parametrize("name", OVER)
def test_what_is_over_is_no_finding(name: str, timing: tuple[str, int]) -> None:
    assert not kinds(OVER[name], timing)


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
@pytest.mark.parametrize("name", EARLY)
def test_what_may_not_be_over_is_found(name: str, timing: tuple[str, int]) -> None:
    assert kinds(EARLY[name], timing) and kinds(EARLY[name], timing) <= {"unfinished", "exited"}


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_a_relaxed_arrival_tells_nothing(timing: tuple[str, int]) -> None:
    relaxed = MEET.replace("arrive.aligned", "arrive.relaxed.aligned")
    assert kinds(READ + relaxed, timing) == {"unfinished"}
    assert "race" in kinds("st.shared.b32 [%r4], %r1;" + relaxed + READ + MEET, timing)
    assert not kinds("st.shared.b32 [%r4], %r1;" + MEET + READ + MEET, timing)


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_arriving_twice_is_found_and_goes_on(timing: tuple[str, int]) -> None:
    twice = "barrier.cluster.arrive.aligned; " * 2 + "barrier.cluster.wait.aligned; " * 2
    result = run(twice + READ + MEET, timing)
    (finding,) = result.findings
    assert finding.kind == "barrier" and "again before it has waited" in finding.text
