"""wgmma is one operation of a warpgroup: what its warps read, and what each knows once it has waited."""

from __future__ import annotations

import struct

import pytest
import torch

from ptxsim import Result, Shape, launch
from ptxsim.run.timing import Timing

TIMINGS = [("eager", 0), ("late", 1), *(("random", seed) for seed in range(3))]
KERNEL = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry product(.param .u64 out)
{
    .reg .pred %p<4>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<6>;
    .shared .align 128 .b8 a[2048];
    .shared .align 128 .b8 b[512];
    mov.u32 %r1, %tid.x;
    setp.eq.u32 %p1, %r1, 0;
    setp.lt.u32 %p2, %r1, 32;
    setp.ge.u32 %p3, %r1, 32;
    shl.b32 %r2, %r1, 4;
    mov.u32 %r3, a;
    add.u32 %r4, %r3, %r2;
    mov.u32 %r5, b;
    add.u32 %r6, %r5, %r2;
    mov.b32 %r7, 0;
    st.shared.v4.b32 [%r4], {%r7, %r7, %r7, %r7};
    @%p2 st.shared.v4.b32 [%r6], {%r7, %r7, %r7, %r7};
    fence.proxy.async;
    BARRIER
    shr.u32 %r8, %r3, 4;
    or.b32 %r8, %r8, 0x00400000;
    mov.b32 %r9, 8;
    mov.b64 %rd1, {%r8, %r9};
    shr.u32 %r8, %r5, 4;
    or.b32 %r8, %r8, 0x00080000;
    mov.b64 %rd2, {%r8, %r9};
    CHANGE
    wgmma.fence.sync.aligned;
    PRODUCT
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    AFTER
    ret;
}
"""
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r12, %r13, %r14, %r15}, %rd1, %rd2, 0, 1, 1, 0, 0;"
)
"""A lies in chunks of 16 bytes: those of k 0 to 7 of all 64 rows, then the others; lane i writes chunk i."""
OWN_ROWS = """
    and.b32 %r10, %r1, 96;
    shl.b32 %r10, %r10, 3;
    and.b32 %r11, %r1, 15;
    shl.b32 %r11, %r11, 4;
    add.u32 %r10, %r10, %r11;
    add.u32 %r10, %r10, %r3;
    st.shared.v4.b32 [%r10], {%r7, %r7, %r7, %r7};
"""
"""Each warp writes over k 0 to 7 of its rows."""
B = "@%p1 st.shared.b32 [%r5], %r7;"


def run(
    timing: tuple[str, int],
    after: str,
    change: str = "",
    product: str = PRODUCT,
    barrier: str = "bar.sync 0;",
) -> Result:
    parts = {"BARRIER": barrier, "CHANGE": change, "PRODUCT": product, "AFTER": after}
    text = KERNEL
    for name, part in parts.items():
        text = text.replace(f"    {name}\n", f"    {part}\n")
    out = torch.zeros(16, dtype=torch.int32)
    shape = Shape((1, 1, 1), (128, 1, 1))
    return launch(text, "product", shape, struct.pack("<Q", out.data_ptr()), timing=Timing(*timing))


def kinds(*given: object, **more: str) -> set[str]:
    return {finding.kind for finding in run(*given, **more).findings}  # type: ignore[arg-type]


timings = pytest.mark.parametrize("timing", TIMINGS, ids=str)


@timings
@pytest.mark.parametrize("after", [OWN_ROWS, B, OWN_ROWS + B], ids=["own rows of A", "B", "both"])
def test_what_is_read_may_be_overwritten_after_a_wait(timing: tuple[str, int], after: str) -> None:
    assert not kinds(timing, after)


@timings
@pytest.mark.parametrize("after", [OWN_ROWS, B], ids=["own rows of A", "B"])
def test_and_not_before(timing: tuple[str, int], after: str) -> None:
    wait = "wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;"
    early = PRODUCT + "wgmma.commit_group.sync.aligned;" + after + wait
    assert kinds(timing, "", product=early) == {"race"}


@timings
def test_warps_do_not_learn_what_others_wrote_before(timing: tuple[str, int]) -> None:
    """B is written by one warp: a barrier has to tell the others, a product they have in common does not."""
    assert kinds(timing, "", barrier="") & {"race", "uninitialised"}


@timings
@pytest.mark.parametrize(
    ("change", "product", "says"),
    [
        ("@%p3 add.u64 %rd2, %rd2, 8;", PRODUCT, "other matrix descriptors"),
        ("", f"@%p3 bra OTHER;\n{PRODUCT}\nbra NEXT;\nOTHER:\n{PRODUCT}\nNEXT:", "another wgmma"),
    ],
    ids=["descriptors", "instructions"],
)
def test_warps_that_differ(timing: tuple[str, int], change: str, product: str, says: str) -> None:
    found = [f for f in run(timing, "", change, product).findings if f.kind == "misuse"]
    assert found and all(says in finding.text for finding in found)


@timings
def test_an_operand_beyond_shared_memory(timing: tuple[str, int]) -> None:
    result = run(timing, "", "add.u64 %rd2, %rd2, 64;")
    assert result.fault is not None and "shared memory of" in str(result.fault)


@timings
def test_a_warp_that_does_not_come(timing: tuple[str, int]) -> None:
    product = f"@%p3 bra NEXT;\n{PRODUCT}\nNEXT:"
    result = run(timing, "", "", product)
    assert result.fault is not None and "1 products of its warpgroup" in str(result.fault)


@pytest.mark.parametrize("begun, saturates, expected", [
    (100, "", 100 + 32 * 127 * 127),
    (100, ".satfinite", 100 + 32 * 127 * 127),
    (2**31 - 10, "", 2**31 - 10 + 32 * 127 * 127 - 2**32),
    (2**31 - 10, ".satfinite", 2**31 - 1),
])  # fmt: skip
def test_integers_wrap_or_are_clamped(begun: int, saturates: str, expected: int) -> None:
    """All elements are 127, which 32 products of are added to what a thread has."""
    registers = "{%r12, %r13, %r14, %r15}"
    product = f"wgmma.mma_async.sync.aligned.m64n8k32{saturates}.s32.s8.s8 {registers}, %rd1, %rd2, 1;"
    parts = {
        "BARRIER": "bar.sync 0;",
        "CHANGE": "".join(f"mov.b32 %r{i}, {begun};" for i in range(12, 16)),
        "PRODUCT": product,
        "AFTER": "ld.param.u64 %rd3, [out]; @%p1 st.global.b32 [%rd3], %r12;",
    }
    text = KERNEL.replace("mov.b32 %r7, 0;", "mov.b32 %r7, 0x7f7f7f7f;")
    for name, part in parts.items():
        text = text.replace(f"    {name}\n", f"    {part}\n")
    out = torch.zeros(16, dtype=torch.int32)
    launch(text, "product", Shape((1, 1, 1), (128, 1, 1)), struct.pack("<Q", out.data_ptr()))
    assert int(out[0]) == expected
