"""Cluster launch control: blocks that take over those that have not started, by themselves and as the
forward kernel's schedule."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable

import pytest
import torch
from blackwell import BF16, FEW, PACKED, TIMINGS, Call, Sizes, drawn, packed

import fa4flex
import ptxsim
from fa4flex import Schedule
from ptxsim import Result, Shape, launch
from ptxsim.run.timing import Timing

BLOCKS = 12
TAKING = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry taking(.param .u64 out)
{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    .reg .b128 %rq<2>;
    .shared .align 16 .b8 answer[16];
    .shared .align 8 .b8 bar[8];
    ld.param.b64 %rd1, [out];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, 0;
    mbarrier.init.shared::cta.b64 [bar], 1;
    fence.proxy.async.shared::cta;
TAKE:
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    atom.global.add.u32 %r3, [%rd3], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [answer], [bar];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], %r2;
    @!%p1 bra WAIT;
    xor.b32 %r2, %r2, 1;
    ld.shared.v2.b64 {%rd4, %rd5}, [answer];
    mov.b128 %rq1, {%rd4, %rd5};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %rq1;
    @!%p2 bra LAST;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r4, %r5, _}, %rq1;
    fence.proxy.async.shared::cta;
    bra TAKE;
LAST:
    ret;
}
"""
"""One thread per block counts up the number of each block that it stands for."""


def take(text: str, timing: tuple[str, int] = ("eager", 0)) -> tuple[Result, list[int]]:
    out = torch.zeros(BLOCKS, dtype=torch.int32)
    parameters, shape = struct.pack("<Q", out.data_ptr()), Shape((BLOCKS, 1, 1), (1, 1, 1))
    result = launch(text, "taking", shape, parameters, timing=Timing(*timing))
    return result, out.tolist()


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_every_block_is_stood_for_once(timing: tuple[str, int]) -> None:
    result, found = take(TAKING, timing)
    assert not result.findings and found == [1] * BLOCKS


@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        ("@!%p2 bra LAST;", "", "launch control"),
        ("@!%p2 bra LAST;", "@!%p2 bra TAKE;", "launch control"),
        ("[answer], [bar];", "[answer+8], [bar];", "misaligned"),
        ("[bar], 16;", "[bar], 32;", "hang"),
    ],
)
def test_what_goes_wrong_is_found(right: str, wrong: str, kind: str) -> None:
    assert right in TAKING
    result, _ = take(TAKING.replace(right, wrong), ("late", 0))
    assert kind in {finding.kind for finding in result.findings}, result.findings


ASKED = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r4, %r5, _}, %rq1;"
GUARD = "@!%p2 bra LAST;"


def changed(between: str) -> str:
    """Asks for the CTA before it knows whether there is one, as CUTLASS's schedulers do."""
    assert TAKING.count(ASKED) == TAKING.count(GUARD) == 1
    return TAKING.replace(ASKED, "").replace(GUARD, f"{ASKED} {between} {GUARD}")


READ = "add.s64 %rd4, %rd1, %rd4; ld.global.b32 %r7, [%rd4];"
HARMLESS = {
    "nothing": "",
    "arithmetic": "add.u32 %r6, %r1, %r4; mul.wide.u32 %rd4, %r6, 4;",
    "selected": f"selp.b32 %r6, %r1, 0, %p2; mul.wide.u32 %rd4, %r6, 4; {READ}",
    "and false": "setp.lt.u32 %p3, %r1, 12; and.pred %p3, %p3, %p2; @%p3 ld.global.b32 %r7, [%rd1];",
    "overwritten": "mov.u32 %r4, %r1; mov.u32 %r4, 0; setp.eq.u32 %p3, %r4, 0; @%p3 bra ON; ON:",
}
"""Uses of the answer to a refused request that are allowed: nothing depends on it."""
HARMFUL = {
    "branches": "setp.lt.u32 %p3, %r1, 12; @!%p3 bra LAST;",
    "guards": "setp.lt.u32 %p3, %r1, 12; @%p3 ld.global.b32 %r7, [%rd1];",
    "addresses": f"and.b32 %r6, %r1, 0; mul.wide.u32 %rd4, %r6, 4; {READ}",
    "stores": "st.shared.b32 [answer], %r1;",
    "hands out": "shfl.sync.idx.b32 %r6, %r1, 0, 31, -1;",
    "waits": "and.b32 %r6, %r4, 0; bar.sync %r6;",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_undefined_may_be_there(name: str) -> None:
    result, found = take(changed(HARMLESS[name]))
    assert not result.findings and found == [1] * BLOCKS


@pytest.mark.parametrize("name", HARMFUL)
def test_uses_of_what_is_undefined_are_reported(name: str) -> None:
    result, _ = take(changed(HARMFUL[name]))
    kinds = {finding.kind for finding in result.findings}
    assert "launch control" in kinds, result.findings
    (one,) = [finding for finding in result.findings if finding.kind == "launch control"]
    assert "undefined" in one.text and one.other is not None and "get_first_ctaid" in one.other.opcode


def test_an_answer_is_waited_for() -> None:
    """A block that does not wait takes what lies there for the answer."""
    early = TAKING.replace("@!%p1 bra WAIT;", "").replace("try_wait", "test_wait")
    assert "uninitialised" in {finding.kind for t in TIMINGS for finding in take(early, t)[0].findings}


# --- the forward kernel -------------------------------------------------------------------------------------

ASKING = Schedule(next_tile="launch_control")
CALLS: dict[str, Callable[[], Call]] = {
    "causal": functools.partial(drawn, FEW["causal"], Sizes(1, 2, 1, 600, 600).wide(64), schedule=ASKING),
    "pairs": functools.partial(drawn, FEW["dense"], Sizes(1, 2, 1, 1100, 200).wide(128), schedule=ASKING),
    "packed": functools.partial(packed, PACKED["causal"], (128, 128), BF16, schedule=ASKING),
    "packed, used": functools.partial(packed, PACKED["alibi causal"], (96, 96), BF16, True, ASKING),
}


def forward(name: str, timings: list[tuple[str, int]]) -> None:
    call, first = CALLS[name](), None
    for timing, seed in timings:
        print(f"{name}: {timing} {seed}")
        found = call.run(timing, seed)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), "not the same bits"


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_schedule_of_launch_control_is_right(name: str) -> None:
    forward(name, [random.choice([t for t in TIMINGS if t[0] == kind]) for kind in ("late", "random")])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CALLS)
def test_a_schedule_of_launch_control_is_right_under_every_timing(name: str) -> None:
    forward(name, list(TIMINGS))


@pytest.mark.parametrize("seed", range(2))
def test_every_tile_is_stored_once(seed: int) -> None:
    """TMA stores write as many bytes as the output has, from fewer CTAs than tiles and without a counter."""
    sizes = Sizes(1, 2, 2, 1024, 128).wide(64)
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (sizes.q_len, sizes.kv_len, sizes.kv_len))
    attn = fa4flex.compile(mask=fa4flex.variants.causal, schedule=ASKING)
    with torch.no_grad(), ptxsim.device("sm_100a", seed, "random") as gpu:
        attn(q, k, v)
    (result,) = gpu.results
    assert not result.findings and result.traffic["TMA bytes out"] == q.numel() * 2
    assert result.shape.grid == (2 * sizes.q_len // 256, 1, 1)
