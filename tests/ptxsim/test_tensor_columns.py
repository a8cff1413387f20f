"""Columns of tensor memory and operands of tcgen05.mma that are the wrong ones, or met too early."""

from __future__ import annotations

import pytest
from planted import run

from ptxsim import Result, Shape, launch
from ptxsim.run.timing import Timing

TIMINGS = [("eager", 0), ("late", 1), *(("random", seed) for seed in range(3))]
REGISTERS = ", ".join(f"%r{i}" for i in range(20, 36))
KERNEL = f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry columns()
{{
    .reg .pred %p<6>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<6>;
    .shared .align 128 .b8 a[4096];
    .shared .align 128 .b8 b[512];
    .shared .align 128 .b8 spare[4096];
    .shared .align 8 .b8 bar[16];
    .shared .align 8 .b8 slot[8];
    mov.u32 %r1, %tid.x;
    setp.eq.u32 %p1, %r1, 0;
    setp.lt.u32 %p2, %r1, 32;
    setp.ne.s32 %p4, %r1, %r1;
    shl.b32 %r2, %r1, 4;
    mov.u32 %r3, a;
    add.u32 %r4, %r3, %r2;
    mov.u32 %r5, b;
    add.u32 %r6, %r5, %r2;
    mov.b32 %r7, 0;
    st.shared.v4.b32 [%r4], {{%r7, %r7, %r7, %r7}};
    st.shared.v4.b32 [%r4+2048], {{%r7, %r7, %r7, %r7}};
    @%p2 st.shared.v4.b32 [%r6], {{%r7, %r7, %r7, %r7}};
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    @%p1 mbarrier.init.shared::cta.b64 [bar+8], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    @!%p2 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 64;
ALLOCATED:
    fence.proxy.async;
    bar.sync 0;
    ld.shared.b32 %r10, [slot];
    and.b32 %r11, %r1, 96;
    shl.b32 %r11, %r11, 16;
    add.u32 %r11, %r11, %r10;
    shr.u32 %r8, %r3, 4;
    or.b32 %r8, %r8, 0x00800000;
    mov.b32 %r9, 0x4008;
    mov.b64 %rd1, {{%r8, %r9}};
    shr.u32 %r8, %r5, 4;
    or.b32 %r8, %r8, 0x00100000;
    mov.b32 %r9, 0x4008;
    mov.b64 %rd2, {{%r8, %r9}};
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd1, %rd2, 0x08040010, %p4;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
FIRST:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra FIRST;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{REGISTERS}}}, [%r11];
    tcgen05.wait::ld.sync.aligned;
    bar.sync 0;
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r10+16], %rd1, %rd2, 0x08040010, %p4;
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd1, %rd2, 0x08040010, %p4;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar+8];
SECOND:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar+8], 0;
    @!%p3 bra SECOND;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{REGISTERS}}}, [%r11+16];
    tcgen05.wait::ld.sync.aligned;
    bar.sync 0;
    @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
    ret;
}}
"""
MMA = "tcgen05.mma.cta_group::1.kind::f16"
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{REGISTERS}}}"
FIRST = "FIRST:\n    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;\n    @!%p3 bra FIRST;\n"
SECOND = FIRST.replace("FIRST", "SECOND").replace("[bar]", "[bar+8]")
WAITED = "    tcgen05.wait::ld.sync.aligned;\n    bar.sync 0;\n    @%p1"
FIRST_PRODUCT = f"%r9}};\n    @%p1 {MMA} [%r10],"
D = "[%r10+16], %rd1, %rd2, 0x08040010"
OVER = f"    @%p1 {MMA} [%r10+24], %rd1, %rd2, 0x08040010, %p4;\n"
A_STRIDE = "or.b32 %r8, %r8, 0x00800000;\n    mov.b32 %r9, "
WRONG = {
    "columns that nobody wrote": (f"{LOAD}, [%r11];", f"{LOAD}, [%r11+16];", "uninitialised"),
    "some columns that nobody wrote": (f"{LOAD}, [%r11];", f"{LOAD}, [%r11+1];", "uninitialised"),
    "a product elsewhere": (FIRST_PRODUCT, FIRST_PRODUCT.replace("[%r10]", "[%r10+32]"), "uninitialised"),
    "a sum with what nobody wrote": (f"{D}, %p4", f"{D}, 1", "uninitialised"),
    "D for A": (f"{MMA} [%r10+16], %rd1,", f"{MMA} [%r10+16], [%r10],", "misread"),
    "a product not waited for": (FIRST, "", "race"),
    "a later product not waited for": (SECOND, "", "race"),
    "loads that may still read": (WAITED, "    bar.sync 0;\n    @%p1", "race"),
    "no barrier before the next product": (WAITED, WAITED.replace("bar.sync 0;", ""), "race"),
    "a product over columns that are loaded": (SECOND, SECOND + OVER, "race"),
    "a stride twice as large": (f"{A_STRIDE}0x4008", f"{A_STRIDE}0x4010", "uninitialised"),
    "a leading stride twice as large": ("0x00800000", "0x01000000", "uninitialised"),
    "an operand beyond shared memory": (f"{A_STRIDE}0x4008", f"{A_STRIDE}0x4400", "misuse"),
    "columns that are not allocated": (f"{LOAD}, [%r11+16];", f"{LOAD}, [%r11+56];", "tensor memory"),
    "columns that do not exist": (f"{LOAD}, [%r11+16];", f"{LOAD}, [%r11+504];", "misuse"),
    "lanes that do not exist": (f"{MMA} [%r10+16]", f"{MMA} [%r10+65536]", "misuse"),
}
"""Replacements, and the kind of finding."""


def kinds(kernel: str, timing: tuple[str, int]) -> set[str]:
    result: Result = launch(kernel, "columns", Shape((1, 1, 1), (128, 1, 1)), b"", timing=Timing(*timing))
    return {finding.kind for finding in result.findings}


timings = pytest.mark.parametrize("timing", TIMINGS, ids=str)


@timings
def test_the_right_columns(timing: tuple[str, int]) -> None:
    assert not kinds(KERNEL, timing)


@timings
@pytest.mark.parametrize("name", WRONG)
def test_wrong_columns(name: str, timing: tuple[str, int]) -> None:
    right, wrong, kind = WRONG[name]
    assert KERNEL.count(right) == 1
    found = kinds(KERNEL.replace(right, wrong), timing)
    assert kind in found or (timing[0] != "eager" and found)


FREE = "    @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;\n"


@timings
def test_columns_that_were_freed(timing: tuple[str, int]) -> None:
    """Uses after it was freed are found, and the launch goes on: the columns hold what they held."""
    kernel = KERNEL.replace(FREE, "").replace(f"    {LOAD}, [%r11+16];", f"{FREE}    {LOAD}, [%r11+16];")
    result = launch(kernel, "columns", Shape((1, 1, 1), (128, 1, 1)), b"", timing=Timing(*timing))
    assert result.fault is None
    assert any("which were freed" in str(finding) for finding in result.findings)


LANES_OF_WARPS = """
    @!%p2 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [bar], 32;
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r5, [bar];
    and.b32 %r7, %r1, 96;
    shl.b32 %r7, %r7, 16;
    add.u32 %r8, %r5, %r7;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r1};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r6;
    bar.sync 0;
    @!%p2 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
END:
"""


@pytest.mark.parametrize("spoilt", ["tcgen05.st", "tcgen05.ld"])
def test_lanes_of_another_warp(spoilt: str) -> None:
    """They are reported, and the warp reaches its own."""
    result, out = run(LANES_OF_WARPS, "sm_100a")
    assert not result.findings and out.tolist() == list(range(64))
    line = next(line for line in LANES_OF_WARPS.splitlines() if line.strip().startswith(spoilt))
    result, out = run(LANES_OF_WARPS.replace(line, line.replace("[%r8]", "[%r5]")), "sm_100a")
    assert [finding.kind for finding in result.findings] == ["tensor memory"]
    assert "warp 1 of CTA 0 accesses lane 0" in str(result.findings[0])
    assert out.tolist() == list(range(64))
