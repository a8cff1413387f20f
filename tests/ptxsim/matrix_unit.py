"""One tcgen05.mma as PTX text: operands from bytes that the test lays out, D as tensor memory holds it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxsim.run.launch import Result, Shape, launch
from ptxsim.run.timing import Timing
from ptxsim.state.memory import HostMemory

LANES = 128
A_AT, SFA_AT, SFB_AT = 400, 300, 304
"""Columns of tensor memory with A and the scale factors; D is at 0."""

TEXT = """
.version 9.1
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 image, .param .u64 rows, .param .u64 out)
{
    .reg .pred %p<8>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<16>;
    .shared .align 1024 .b8 mem[SIZE];
    .shared .align 8 .b8 bar[8];
    .shared .align 4 .b8 where[4];
    ld.param.b64 %rd1, [image];
    ld.param.b64 %rd2, [rows];
    ld.param.b64 %rd3, [out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, mem;
    mov.u32 %r3, bar;
    mov.u32 %r4, where;
    setp.eq.u32 %p1, %r1, 0;
    shr.u32 %r5, %r1, 5;
    setp.ne.u32 %p2, %r5, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    mul.lo.u32 %r6, %r1, 4;
FILL:
    cvt.u64.u32 %rd4, %r6;
    add.s64 %rd5, %rd1, %rd4;
    ld.global.b32 %r7, [%rd5];
    add.u32 %r8, %r2, %r6;
    st.shared.b32 [%r8], %r7;
    add.u32 %r6, %r6, 512;
    setp.lt.u32 %p3, %r6, SIZE;
    @%p3 bra FILL;
    fence.proxy.async.shared::cta;
    @%p2 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 512;
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r9, [%r4];
    and.b32 %r10, %r1, 96;
    shl.b32 %r10, %r10, 16;
    add.u32 %r11, %r9, %r10;
    mul.wide.u32 %rd6, %r1, 32;
    add.s64 %rd7, %rd2, %rd6;
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd7];
    ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%rd7+16];
    add.u32 %r12, %r11, A_AT;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12], {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    shr.u32 %r13, %r2, 4;
    cvt.u64.u32 %rd8, %r13;
    add.u32 %r14, %r9, SFA_AT;
    add.u32 %r15, %r9, SFB_AT;
    add.u32 %r16, %r9, A_AT;
    mov.b64 %rd9, A_DESC;
    add.s64 %rd9, %rd9, %rd8;
    mov.b64 %rd10, B_DESC;
    add.s64 %rd10, %rd10, %rd8;
    mov.b64 %rd11, SFA_DESC;
    add.s64 %rd11, %rd11, %rd8;
    mov.b64 %rd12, SFB_DESC;
    add.s64 %rd12, %rd12, %rd8;
    mov.b32 %r17, SHAPE;
    setp.ne.u32 %p4, %r9, %r9;
    setp.eq.u32 %p5, %r9, %r9;
STATEMENTS
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r3], 0;
    @!%p6 bra WAIT;
    mul.wide.u32 %rd13, %r1, ROW;
    add.s64 %rd14, %rd3, %rd13;
READ
    bar.sync 0;
    @%p2 bra DONE;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 512;
DONE:
    ret;
}
"""
SCALES_COPY = "\n".join(
    f"    @%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [{to}], {of};"
    for to, of in (("%r14", "%rd11"), ("%r15", "%rd12"))
)


@dataclass(frozen=True)
class Product:
    """`opcode` and what follows its first four operands; `left` and `right` are uint8 [rows, 32] as the ISA
    lays out one instruction's K, `scales` two uint8 [32, 16]. `columns` are those of D that are read."""

    opcode: str
    shape: int
    left: NDArray[np.uint8]
    right: NDArray[np.uint8]
    scales: tuple[NDArray[np.uint8], ...] = ()
    a_in_tensor: bool = False
    columns: int = 64
    statements: str = ""
    """Statements executed instead of two MMAs, of which the second adds to the first."""

    def run(self, timing: str = "eager", seed: int = 0) -> tuple[NDArray[np.uint32], Result]:
        """D as uint32 [128 lanes, columns], and what the launch did."""
        parts, image, places = [planes(self.left), planes(self.right), *self.scales], b"", []
        for part in parts:
            places.append(len(image))
            image += part.tobytes()
        image = image.ljust(-(-len(image) // 512) * 512, b"\0")
        sources = [np.frombuffer(image, np.uint8).copy(), np.zeros((LANES, 32), np.uint8)]
        sources[1][: len(self.left)] = self.left
        out = np.zeros((LANES, self.columns), np.uint32)
        text = TEXT.replace("STATEMENTS", self._statements()).replace("READ", _reads(self.columns))
        places += [0] * (4 - len(places))
        rows = len(self.left), len(self.right), 32, 32
        for name, place, count in zip(
            ("SFA_DESC", "SFB_DESC", "A_DESC", "B_DESC"), (*places[2:], *places[:2]), (*rows[2:], *rows[:2])
        ):
            text = text.replace(name, str(descriptor(place, count)))
        for name, value in (
            ("SFA_AT", SFA_AT),
            ("SFB_AT", SFB_AT),
            ("A_AT", A_AT),
            ("SIZE", len(image)),
            ("SHAPE", self.shape),
            ("ROW", 4 * self.columns),
        ):
            text = text.replace(name, str(value))
        parameters = struct.pack("<3Q", *(x.ctypes.data for x in (*sources, out)))
        shape = Shape((1, 1, 1), (LANES, 1, 1))
        result = launch(text, "k", shape, parameters, HostMemory(), Timing(timing, seed))
        assert result.fault is None, result.fault
        return out, result

    def _statements(self) -> str:
        if self.statements:
            return self.statements
        left = "[%r16]" if self.a_in_tensor else "%rd9"
        factors = ", [%r14], [%r15]" if self.scales else ""
        lines = [SCALES_COPY] if self.scales else []
        head = f"    @%p1 {self.opcode} [%r9], {left}, %rd10, %r17{factors}"
        return "\n".join((*lines, f"{head}, %p4;", f"{head}, %p5;"))


def planes(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """K-major without swizzle: the first 16 bytes of all rows, then the second ones."""
    return np.ascontiguousarray(rows.reshape(len(rows), -1, 16).swapaxes(0, 1))


def descriptor(at: int, rows: int) -> int:
    """Matrix descriptor relative to the start of the image: version 1, 128 bytes from 8 rows to the next."""
    return at >> 4 | (rows * 16 >> 4) << 16 | (128 >> 4) << 32 | 1 << 46


def _reads(columns: int) -> str:
    lines = []
    for start in range(0, columns, 8):
        registers = ", ".join(f"%r{30 + i}" for i in range(8))
        lines.append(f"    add.u32 %r18, %r11, {start};")
        lines.append(f"    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{registers}}}, [%r18];")
        lines.append("    tcgen05.wait::ld.sync.aligned;")
        for half in (0, 4):
            four = ", ".join(f"%r{30 + half + i}" for i in range(4))
            lines.append(f"    st.global.v4.b32 [%rd14+{4 * (start + half)}], {{{four}}};")
    return "\n".join(lines)
