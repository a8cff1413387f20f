"""Writes of a launch to global memory that it meets again: ordered, it is no finding; unordered, it is."""

from __future__ import annotations

import struct

import pytest
import torch
from planted import LOAD, STORE, WORDS, text

from ptxsim import Result, Shape, launch
from ptxsim.run.timing import Timing

TIMINGS = ("eager", "late", "random")
ADDRESS = "cvt.u64.u32 %rd2, %r2;\n    add.s64 %rd3, %rd1, %rd2;\n"
FILL = f"{ADDRESS}    st.global.b32 [%rd3], %r1;\n"
READ_ALL = f"{ADDRESS}    xor.b32 %r7, %r2, 128;\n    cvt.u64.u32 %rd2, %r7;\n    add.s64 %rd3, %rd1, %rd2;\n"
READ_ALL += "    ld.global.b32 %r6, [%rd3];\n"
"""Each warp reads the other one's half."""
CTA = "mov.u32 %r5, %ctaid.x;\nsetp.eq.u32 %p3, %r5, 0;\n"
PASS_ON = (
    CTA
    + """
    @%p3 bra FIRST;
LOOK:
    ACQUIRE %r6, [%rd1+128];
    setp.ne.s32 %p3, %r6, 7;
    @%p3 bra LOOK;
    AFTER
    bra END;
FIRST:
    @%p1 st.global.b32 [%rd1], 5;
    RELEASE
    @%p1 SET [%rd1+128], 7;
END:
"""
)
"""CTA 0 writes and sets a flag, CTA 1 goes on from there."""
TAKE = "@%p1 st.global.b32 [%rd1], 6;"


def passed_on(acquire: str, release: str, sets: str, after: str = TAKE) -> str:
    body = PASS_ON.replace("ACQUIRE", acquire).replace("RELEASE", release)
    return body.replace("SET ", f"{sets} ").replace("AFTER", after)


RELEASED = ("ld.acquire.gpu.global.b32", "", "st.release.gpu.global.b32")
FENCED = ("ld.acquire.gpu.global.b32", "fence.acq_rel.gpu;", "st.relaxed.gpu.global.b32")
PROXY = "fence.proxy.async;"
BULK_LOAD = LOAD.replace("WAIT", "LANDED")
BULK_STORE = STORE.replace("END", "STORED")
RIGHT: dict[str, tuple[str, int]] = {
    "a barrier between writes": (
        "@%p1 st.global.b32 [%rd1], 1; bar.sync 0; @!%p2 st.global.b32 [%rd1], 2;",
        1,
    ),
    "the same value twice": ("st.global.b32 [%rd1], 1;", 2),
    "a barrier before reading": (f"{FILL} bar.sync 0; {READ_ALL}", 1),
    "updates of all CTAs": ("red.global.add.u32 [%rd1], 1;", 2),
    "a copy after a proxy fence": (f"{FILL} {PROXY} bar.sync 0; {BULK_LOAD}", 1),
    "a bulk store waited for": (BULK_STORE.replace(".read 0", " 0") + f"bar.sync 0; {READ_ALL}", 1),
    "a flag between CTAs": (passed_on(*RELEASED), 2),
    "a fence and a flag between CTAs": (passed_on(*FENCED), 2),
    "a copy behind a flag": (passed_on(*RELEASED, after=f"@!%p2 bra END; {PROXY} {BULK_LOAD}"), 2),
}
"""Bodies and the CTAs that execute them."""
WRONG: dict[str, tuple[str, int, str]] = {
    "no barrier between writes": ("@%p1 st.global.b32 [%rd1], 1; @!%p2 st.global.b32 [%rd1], 2;", 1, "race"),
    "values of two CTAs": (f"{CTA} st.global.b32 [%rd1], %r5;", 2, "race"),
    "no barrier before reading": (f"{FILL} {READ_ALL}", 1, "race"),
    "an update of what is stored": (
        "@%p1 st.global.b32 [%rd1], 3; @!%p2 red.global.add.u32 [%rd1], 1;",
        1,
        "race",
    ),
    "a copy without a proxy fence": (f"{FILL} bar.sync 0; {BULK_LOAD}", 1, "missing proxy fence"),
    "a bulk store whose source was read": (f"{BULK_STORE} bar.sync 0; {READ_ALL}", 1, "race"),
    "a flag without a release": (passed_on(*RELEASED[:2], "st.relaxed.gpu.global.b32"), 2, "race"),
    "a flag without an acquire": (passed_on("ld.relaxed.gpu.global.b32", *RELEASED[1:]), 2, "race"),
    "a copy behind a flag alone": (
        passed_on(*RELEASED, after=f"@!%p2 bra END; {BULK_LOAD}"),
        2,
        "missing proxy fence",
    ),
}


def run(body: str, ctas: int, timing: Timing) -> Result:
    out = torch.full((2 * WORDS,), -1, dtype=torch.int32)
    shape, parameters = Shape((ctas, 1, 1), (64, 1, 1)), struct.pack("<Q", out.data_ptr())
    return launch(text(body), "planted", shape, parameters, timing=timing, together=ctas)


def kinds(body: str, ctas: int, timing: str) -> set[str]:
    result = run(body, ctas, Timing(timing, int(torch.randint(1000, ()))))
    assert result.fault is None
    return {finding.kind for finding in result.findings}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_is_no_finding(name: str, timing: str) -> None:
    assert not kinds(*RIGHT[name], timing)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", WRONG)
def test_what_nothing_orders_is_found(name: str, timing: str) -> None:
    body, ctas, kind = WRONG[name]
    assert kinds(body, ctas, timing) == {kind}


STARVED = {Timing("late", seed).starved: seed for seed in range(1000)}
"""A seed for each choice of the warp that only runs when no other can."""


SETS = "st.relaxed.gpu.global.b32"
SPINNING = passed_on("ld.relaxed.gpu.global.b32", "", SETS, after="")


def test_who_spins_on_a_flag_lets_the_one_come_that_sets_it() -> None:
    """Whoever is starved, and with warps of both CTAs that spin."""
    assert sorted(STARVED) == list(range(64))
    for seed in STARVED.values():
        assert run(SPINNING, 2, Timing("late", seed)).fault is None, f"Timing('late', {seed})"


def test_to_spin_on_what_nobody_sets_is_a_hang() -> None:
    fault = run(SPINNING.replace(f"@%p1 {SETS} [%rd1+128], 7;", ""), 2, Timing("late", 1)).fault
    assert fault is not None and fault.kind == "hang" and fault.text.count("keeps looping") == 2
