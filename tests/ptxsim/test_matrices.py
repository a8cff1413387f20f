"""ldmatrix, stmatrix, movmatrix and mma.sync, element by element as the figures of the PTX ISA place them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import at, execute, instruction, kinds, machine, reg, vector, written

from ptxsim.isa.table import Unmodelled, translate
from ptxsim.state.window import SHARED_WINDOW
from ptxsim.watch.findings import Fault

LANES = range(32)


def halves(word: Any) -> list[int]:
    return [int(word) & 0xFFFF, int(word) >> 16]


# --- 8x8 matrices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("generic", [False, True])
def test_ldmatrix(number: int, trans: str, generic: bool) -> None:
    cluster = machine()
    written(cluster)
    warp, shared = cluster.warps[0], cluster.ctas[0].shared.data
    shared[:] = np.random.randint(0, 256, 4096)
    rows = 16 + np.random.permutation(255)[:32] * 16
    address = reg("b64" if generic else "b32", 9)
    (warp.u64 if generic else warp.u32)[9][:] = rows - 16 + (SHARED_WINDOW if generic else 0)
    opcode = f"ldmatrix.sync.aligned.m8n8.x{number}{trans}{'' if generic else '.shared'}.b16"
    execute(warp, opcode, vector("b32", *range(number)), at(address, 16))
    elements = shared.view(np.uint16)
    for matrix in range(number):
        for lane in LANES:
            want = []
            for column in (2 * (lane % 4), 2 * (lane % 4) + 1):
                i, j = (column, lane // 4) if trans else (lane // 4, column)
                want.append(int(elements[rows[8 * matrix + i] // 2 + j]))
            assert halves(warp.u32[matrix][lane]) == want
    assert kinds(cluster) == []


def unpacked(row: np.ndarray, bits: int) -> list[int]:
    """16 elements of 4 or 6 bits, one after another from the first byte on."""
    whole = int.from_bytes(row.tobytes(), "little")
    return [whole >> bits * i & (1 << bits) - 1 for i in range(16)] if bits else row.tolist()


BYTES = [("m16n16", "b8", 0, number) for number in (1, 2)]
for type_, bits_ in (("b8x16.b4x16_p64", 4), ("b8x16.b6x16_p32", 6)):
    BYTES += [("m16n16", type_, bits_, number) for number in (1, 2)]
    BYTES += [("m8n16", type_, bits_, number) for number in (1, 2, 4)]


@pytest.mark.parametrize(("shape", "type", "bits", "number"), BYTES)
def test_ldmatrix_of_bytes(shape: str, type: str, bits: int, number: int) -> None:
    """Lane 4 i + j has elements 4 j to 4 j + 3 of row i; squares are transposed, and have 8 more rows."""
    square = shape == "m16n16"
    cluster = machine()
    written(cluster)
    warp, shared = cluster.warps[0], cluster.ctas[0].shared.data
    shared[:] = np.random.randint(0, 256, 4096)
    rows = np.random.permutation(256)[:32] * 16
    warp.u32[9][:] = rows
    high = 16 if square else 8
    registers = range(number * high // 8)
    opcode = f"ldmatrix.sync.aligned.{shape}.x{number}{'.trans' * square}.shared.{type}"
    execute(warp, opcode, vector("b32", *registers), at(reg("b32", 9)))
    for matrix in range(number):
        stored = [unpacked(shared[at_ : at_ + 16], bits) for at_ in rows[high * matrix :][:high]]
        for half in range(high // 8):
            for lane in LANES:
                i = lane // 4 + 8 * half
                want = [
                    stored[j][i] if square else stored[i][j] for j in range(lane % 4 * 4, lane % 4 * 4 + 4)
                ]
                word = int(warp.u32[matrix * high // 8 + half][lane])
                assert list(word.to_bytes(4, "little")) == want
    assert kinds(cluster) == []


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix(number: int, trans: str) -> None:
    cluster = machine()
    warp, shared = cluster.warps[0], cluster.ctas[0].shared.data
    want = shared.copy()
    rows = np.random.permutation(256)[:32] * 16
    warp.u32[9][:] = rows
    for register in range(number):
        warp.u32[register][:] = np.random.randint(0, 2**32, 32, np.uint32)
    execute(
        warp,
        f"stmatrix.sync.aligned.m8n8.x{number}{trans}.shared.b16",
        at(reg("b32", 9)),
        vector("b32", *range(number)),
    )
    for matrix in range(number):
        for lane in LANES:
            for column, value in zip((2 * (lane % 4), 2 * (lane % 4) + 1), halves(warp.u32[matrix][lane])):
                i, j = (column, lane // 4) if trans else (lane // 4, column)
                want.view(np.uint16)[rows[8 * matrix + i] // 2 + j] = value
    assert (shared == want).all()
    known = cluster.ctas[0].shadow.writer.reshape(-1, 4) >= 0
    assert (known.all(axis=1) == np.isin(np.arange(256) * 16, rows[: 8 * number])).all()


@pytest.mark.parametrize("number", [1, 2, 4])
def test_stmatrix_of_bytes(number: int) -> None:
    """Matrices of 16 x 8 bytes, whose lanes hold what they hold of accumulators, are stored transposed."""
    cluster = machine()
    warp, shared = cluster.warps[0], cluster.ctas[0].shared.data
    want, rows = shared.copy(), np.random.permutation(256)[:32] * 16
    warp.u32[9][:] = rows
    for register in range(number):
        warp.u32[register][:] = np.random.randint(0, 2**32, 32, np.uint32)
    opcode = f"stmatrix.sync.aligned.m16n8.x{number}.trans.shared.b8"
    execute(warp, opcode, at(reg("b32", 9)), vector("b32", *range(number)))
    for matrix in range(number):
        for lane in LANES:
            for byte in range(4):
                row, column = lane // 4 + 8 * (byte // 2), 2 * (lane % 4) + byte % 2
                want[rows[8 * matrix + column] + row] = int(warp.u32[matrix][lane]) >> 8 * byte & 255
    assert (shared == want).all()


def test_movmatrix() -> None:
    warp = machine().warps[0]
    warp.u32[1][:] = np.random.randint(0, 2**32, 32, np.uint32)
    execute(warp, "movmatrix.sync.aligned.m8n8.trans.b16", reg("b32", 0), reg("b32", 1))
    for lane in LANES:
        for half in (0, 1):
            row, column = 2 * (lane % 4) + half, lane // 4  # of the source
            assert halves(warp.u32[0][lane])[half] == halves(warp.u32[1][4 * row + column // 2])[column % 2]


def test_watched_and_checked() -> None:
    cluster = machine(threads=64)
    first, second = cluster.warps
    for warp in cluster.warps:
        warp.u32[9][:] = np.arange(32) * 16
    execute(first, "stmatrix.sync.aligned.m8n8.x1.shared.b16", at(reg("b32", 9)), vector("b32", 0), line=1)
    execute(second, "ldmatrix.sync.aligned.m8n8.x1.shared.b16", vector("b32", 0), at(reg("b32", 9)), line=2)
    assert kinds(cluster) == ["race"]
    execute(first, "ldmatrix.sync.aligned.m8n8.x2.shared.b16", vector("b32", 0, 1), at(reg("b32", 9)), line=3)
    assert kinds(cluster) == ["race", "uninitialised"]
    first.u32[9][3] += 8
    with pytest.raises(Fault, match="misaligned"):
        execute(first, "ldmatrix.sync.aligned.m8n8.x1.shared.b16", vector("b32", 0), at(reg("b32", 9)))
    most, opcode = np.arange(32) < 31, "ldmatrix.sync.aligned.m8n8.x1.shared.b16"
    with pytest.raises(Fault, match="without lanes 31"):
        execute(first, opcode, vector("b32", 0), at(reg("b32", 9)), mask=most)


# --- mma ----------------------------------------------------------------------------------------------------

SMALL = [0.0, 1.0, -1.0, 2.0, -0.5, 1.5, 3.0, -4.0]
CODES = {
    "f16": [int(np.float16(x).view(np.uint16)) for x in SMALL],
    "bf16": [int(np.float32(x).view(np.uint32)) >> 16 for x in SMALL],
    "tf32": [int(np.float32(x).view(np.uint32)) | 0x1ABC for x in SMALL],
    "e4m3": [0x00, 0x38, 0xB8, 0x40, 0xB0, 0x3C, 0x44, 0xC8],
    "e5m2": [0x00, 0x3C, 0xBC, 0x40, 0xB8, 0x3E, 0x42, 0xC4],
}
"""Bits of SMALL; the low bits of tf32 do not count."""
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


def operand(rows: int, depth: int, kind: str) -> tuple[Any, Any]:
    """Raw elements [rows, depth] and what they mean."""
    if kind in ("s8", "u8"):
        raw = np.random.randint(0, 256, (rows, depth))
        return raw, np.where((raw > 127) & (kind == "s8"), raw - 256, raw).astype(float)
    which = np.random.randint(0, 8, (rows, depth))
    return np.array(CODES[kind])[which], np.array(SMALL)[which]


def scatter(warp: Any, first: int, raw: Any, kind: str, is_a: bool) -> int:
    """Place raw elements in registers from `first` on; returns how many."""
    per = 32 // BITS[kind]
    number = raw.size * BITS[kind] // 1024
    for register in range(number):
        for lane in LANES:
            word = 0
            for i in range(per):
                row = lane // 4 + (8 * (register % 2) if is_a else 0)
                column = per * (lane % 4) + i + 4 * per * (register // 2 if is_a else register)
                word |= int(raw[row, column]) << (BITS[kind] * i)
            warp.u32[first + register][lane] = word
    return number


SHAPES = [
    ("f16", "f16", 16),
    ("f16", "f16", 8),
    ("bf16", "bf16", 16),
    ("bf16", "bf16", 8),
    ("tf32", "tf32", 8),
]
SHAPES += [("tf32", "tf32", 4), ("e4m3", "e5m2", 32), ("e5m2", "e5m2", 32), ("e4m3", "e4m3", 16)]
SHAPES += [("s8", "s8", 32), ("u8", "s8", 32), ("s8", "u8", 16)]
FORMS = [(*shape, "s32" if shape[0] in ("s8", "u8") else "f32") for shape in SHAPES]
FORMS += [(*shape, "f16") for shape in SHAPES if shape[0] in ("f16", "e4m3", "e5m2")]


@pytest.mark.parametrize(("left", "right", "depth", "kind"), FORMS)
def test_mma(left: str, right: str, depth: int, kind: str) -> None:
    """Sums of small multiples of 1/4: exact in every accumulator, in any order."""
    warp = machine().warps[0]
    raw_a, a = operand(16, depth, left)
    raw_b, b = operand(8, depth, right)
    in_a, in_b = scatter(warp, 8, raw_a, left, True), scatter(warp, 16, raw_b, right, False)
    c = np.random.randint(-50, 50, (16, 8))
    in_c = 2 if kind == "f16" else 4
    view = {"s32": warp.s32, "f32": warp.f32}.get(kind)
    for lane in LANES:
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            if view is None:
                warp.u32[24 + i // 2].view(np.float16)[2 * lane + i % 2] = c[row, column]
            else:
                view[24 + i][lane] = c[row, column]
    opcode = f"mma.sync.aligned.m16n8k{depth}.row.col.{kind}.{left}.{right}.{kind}"
    registers = [range(in_c), range(8, 8 + in_a), range(16, 16 + in_b), range(24, 24 + in_c)]
    execute(warp, opcode, *(vector("b32", *r) for r in registers))
    want = a @ b.T + c
    for lane in LANES:
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            got = warp.u32[i // 2].view(np.float16)[2 * lane + i % 2] if view is None else view[i][lane]
            assert float(got) == want[row, column], (lane, i)


def test_mma_of_integers_saturates_where_told() -> None:
    warp = machine().warps[0]
    for register in range(8, 20):
        warp.u32[register][:] = 0x7F7F7F7F
    for saturate, want in ((".satfinite", 2**31 - 1), ("", 2**31 - 1 + 32 * 127 * 127 - 2**32)):
        for register in range(24, 28):
            warp.s32[register][:] = 2**31 - 1
        execute(
            warp,
            f"mma.sync.aligned.m16n8k32.row.col{saturate}.s32.s8.s8.s32",
            *(vector("b32", *r) for r in (range(4), range(8, 12), range(16, 18), range(24, 28))),
        )
        assert (warp.s32[3] == want).all()


FOUR, TWO = vector("b32", 0, 1, 2, 3), vector("b32", 0, 1)


@pytest.mark.parametrize(
    ("opcode", "operands"),
    [
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16", (FOUR, at(reg("b32", 9)))),
        ("ldmatrix.sync.aligned.m16n16.x1.shared.b8", (TWO, at(reg("b32", 9)))),
        ("stmatrix.sync.aligned.m16n8.x2.shared.b8", (at(reg("b32", 9)), TWO)),
        ("ldmatrix.sync.aligned.m8n16.x2.trans.shared.b8x16.b6x16_p32", (TWO, at(reg("b32", 9)))),
        ("ldmatrix.sync.aligned.m8n16.x2.shared.b8", (TWO, at(reg("b32", 9)))),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", (FOUR, TWO, TWO, FOUR)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32", (FOUR, FOUR, TWO, FOUR)),
        ("mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16", (TWO, FOUR, TWO, TWO)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16", (FOUR, FOUR, TWO, FOUR)),
        ("mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", (FOUR, FOUR, TWO, FOUR)),
        ("mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32", (FOUR, FOUR, TWO, FOUR)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", (FOUR, TWO, TWO, FOUR)),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32", (FOUR, FOUR, TWO, FOUR)),
        ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", (FOUR, FOUR, TWO, FOUR)),
    ],
)
def test_what_is_not_modelled_raises(opcode: str, operands: Any) -> None:
    with pytest.raises(Unmodelled):
        translate(instruction(opcode, *operands))
