"""Matrices across the lanes of a warp: ldmatrix, stmatrix, movmatrix and mma.sync (PTX ISA, "Warp Level
Matrix Multiply-Accumulate Instructions"). units/fragments.py says which lane holds what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, locate, space_of
from ptxsim.isa.operands import Read, Write, read, write
from ptxsim.isa.table import Step, Unmodelled, translates
from ptxsim.ptx.nodes import Instruction, Operand, Vector
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask
from ptxsim.units import fragments, packing
from ptxsim.units.matmul import multiply_add
from ptxsim.units.numbers import BITS, decode
from ptxsim.watch.findings import Fault, Finding

ROWS, ROW_BYTES = 8, 16
"""Rows, and bytes of a row, of an 8x8 matrix of 16-bit elements."""


def _all_lanes(warp: Warp, mask: Mask, instruction: Instruction) -> None:
    """An .aligned instruction needs the whole warp (it is undefined where a lane has exited)."""
    if mask is not None and not mask.all():
        absent = ", ".join(str(lane) for lane in np.flatnonzero(~mask))
        raise Fault(Finding("misuse", f"{warp} executes it without lanes {absent}", instruction))


def _registers(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _gather(gets: Sequence[Read], warp: Warp) -> NDArray[np.uint32]:
    """uint32 [registers, 32]."""
    return np.stack([get(warp) for get in gets])


def _scatter(puts: Sequence[Write], warp: Warp, words: NDArray[np.uint32]) -> None:
    for put, values in zip(puts, words):
        put(warp, values, None)


# --- between shared memory and registers --------------------------------------------------------------------


def _matrices(instruction: Instruction, registers: Operand) -> tuple[tuple[Operand, ...], bool]:
    """The registers, one per matrix, and whether it is transposed. Of all shapes 8x8 of 16 bits only."""
    given = set(instruction.modifiers)
    counts = [int(part[1]) for part in given if re.fullmatch("x[124]", part)]
    known = {"sync", "aligned", "m8n8", "b16", "trans", "shared", "shared::cta"} | {f"x{n}" for n in counts}
    found = _registers(registers)
    if given - known or not {"sync", "aligned", "m8n8", "b16"} <= given or counts != [len(found)]:
        raise Unmodelled(instruction)
    return found, "trans" in given


def _tall(instruction: Instruction, registers: Operand) -> tuple[Operand, ...]:
    """The registers, one per matrix of 16 x 8 bytes."""
    found = _registers(registers)
    wanted = {"sync", "aligned", "m16n8", "trans", "b8", f"x{len(found)}"}
    if set(instruction.modifiers) - {"shared", "shared::cta"} != wanted or len(found) not in (1, 2, 4):
        raise Unmodelled(instruction)
    return found


@dataclass(frozen=True)
class Matrix:
    """A kind of matrix that ldmatrix loads: its rows of 16 bytes, and how many registers of each lane it
    takes."""

    rows: int
    registers: int
    most: int
    """Matrices of one instruction."""


HALVES, BYTES, SQUARES = Matrix(8, 1, 4), Matrix(8, 1, 4), Matrix(16, 2, 2)
KINDS = {"m8n8": HALVES, "m8n16": BYTES, "m16n16": SQUARES}
UNPACKED = {"b4x16_p64": 4, "b6x16_p32": 6}
"""Bits of elements that are spread to bytes, each in the low bits of its own."""


@translates("ldmatrix")
def ldmatrix(instruction: Instruction) -> Step:
    """r, [p]: as many lanes as it has rows give the addresses of each matrix's rows; the first matrix goes to
    the first registers. Bytes are transposed in squares of 16 and only there."""
    given, registers = instruction.modifiers, _registers(instruction.operands[0])
    kind = KINDS.get(next((m for m in given if m in KINDS), ""), HALVES)
    count = next((int(m[1]) for m in given if re.fullmatch("x[124]", m)), 0)
    bits = next((UNPACKED[m] for m in given if m in UNPACKED), 0)
    if kind is HALVES:
        _matrices(instruction, instruction.operands[0])
    else:
        _check_bytes(instruction, kind, bits)
    if len(registers) != count * kind.registers or count > kind.most:
        raise Unmodelled(instruction, f"{len(registers)} registers for {count} matrices")
    where, turn = locate(instruction.operands[1], instruction), "trans" in given
    access = Accessor(instruction, space_of(instruction))
    puts, rows = [write(r, "b32") for r in registers], kind.rows * count

    def step(warp: Warp, mask: Mask) -> None:
        _all_lanes(warp, mask, instruction)
        found = access.load(warp, where(warp)[:rows], 4, ROW_BYTES // 4).view(np.uint8)
        if kind is HALVES:
            words = fragments.ldmatrix(found.reshape(-1, ROWS, ROW_BYTES), turn)
        else:
            found = packing.gathered(found, bits) if bits else found
            matrices = found.reshape(count, kind.rows, ROW_BYTES)
            turned = matrices.swapaxes(1, 2) if turn else matrices
            words = np.ascontiguousarray(turned).view(np.uint32).reshape(len(puts), -1)
        _scatter(puts, warp, words)

    return step


def _check_bytes(instruction: Instruction, kind: Matrix, bits: int) -> None:
    """Squares of bytes or of unpacked elements are transposed, rows of unpacked elements are not."""
    given = set(instruction.modifiers)
    known = {"sync", "aligned", "m8n16", "m16n16", "shared", "shared::cta", "x1", "x2", "x4"}
    types = {"b8x16", *(name for name, width in UNPACKED.items() if width == bits)} if bits else {"b8"}
    wanted = {"sync", "aligned", *types} | ({"trans"} if kind is SQUARES else set())
    if given - known - wanted or not wanted <= given or (kind is BYTES and not bits):
        raise Unmodelled(instruction)


@translates("stmatrix")
def stmatrix(instruction: Instruction) -> Step:
    """[p], r: as ldmatrix, the other way. Matrices of 16 x 8 bytes are transposed: 8 rows of 16 bytes."""
    if instruction.has("m16n8"):
        registers, store = _tall(instruction, instruction.operands[1]), fragments.stmatrix_tall
    else:
        registers, turn = _matrices(instruction, instruction.operands[1])
        store = partial(fragments.stmatrix, transposed=turn)
    where = locate(instruction.operands[0], instruction)
    access = Accessor(instruction, space_of(instruction))
    gets, rows = [read(r, "b32") for r in registers], ROWS * len(registers)

    def step(warp: Warp, mask: Mask) -> None:
        _all_lanes(warp, mask, instruction)
        matrices = store(_gather(gets, warp))
        access.store(warp, where(warp)[:rows], matrices.reshape(rows, ROW_BYTES).view(np.uint32))

    return step


@translates("movmatrix")
def movmatrix(instruction: Instruction) -> Step:
    if instruction.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise Unmodelled(instruction)
    d, a = write(instruction.operands[0], "b32"), read(instruction.operands[1], "b32")

    def step(warp: Warp, mask: Mask) -> None:
        _all_lanes(warp, mask, instruction)
        d(warp, fragments.movmatrix(a(warp)), None)

    return step


# --- multiply-accumulate ------------------------------------------------------------------------------------

_DEPTHS = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8)} | dict.fromkeys(
    ("e4m3", "e5m2", "s8", "u8"), (16, 32)
)
"""The K of m16n8kK, by type of A."""
_FAMILIES = ({"f16"}, {"bf16"}, {"tf32"}, {"e4m3", "e5m2"}, {"s8", "u8"})
"""Types that may meet as A and B."""
_SUMS = {"s8": ("s32",), "u8": ("s32",), "bf16": ("f32",), "tf32": ("f32",)}
"""Types of C and D by that of A; f16 and f32 for the others."""
_EXTRAS = {"s8": {"satfinite"}, "u8": {"satfinite"}, "e4m3": {"kind::f8f6f4"}, "e5m2": {"kind::f8f6f4"}}
_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


@translates("mma")
def mma(instruction: Instruction) -> Step:
    """d, a, b, c of mma.sync.aligned.m16n8kK.row.col.<types of D, A, B, C>: D = A B + C.

    Sums are exact for integers and made in float32 else; units/matmul.py says how far silicon may be from
    that.
    """
    (kind, left, right), depth, saturate = _types(instruction)
    a = fragments.multiplicand_a(depth, BITS[left])
    b = fragments.multiplicand_b(depth, BITS[right])
    c = fragments.accumulator(8, BITS[kind])
    registers = [_registers(operand) for operand in instruction.operands]
    if [len(r) for r in registers] != [c.registers, a.registers, b.registers, c.registers]:
        raise Unmodelled(instruction, "another number of registers than the shape has")
    puts = [write(r, "b32") for r in registers[0]]
    get_a, get_b, get_c = (_matrix(r, f) for r, f in zip(registers[1:], (a, b, c)))
    dtype = _DTYPES[kind]

    def step(warp: Warp, mask: Mask) -> None:
        _all_lanes(warp, mask, instruction)
        rows, columns, before = decode(left, get_a(warp)), decode(right, get_b(warp)), get_c(warp).view(dtype)
        after = multiply_add(rows, columns, before, kind, saturate=saturate)
        _scatter(puts, warp, c.split(after.view(c.dtype)))

    return step


def _matrix(registers: Sequence[Operand], fragment: fragments.Fragment) -> Callable[[Warp], NDArray[Any]]:
    gets = [read(r, "b32") for r in registers]
    return lambda warp: fragment.matrix(_gather(gets, warp))


def _types(instruction: Instruction) -> tuple[tuple[str, str, str], int, bool]:
    """The types of the accumulator, of A and of B; K; whether integers saturate."""
    parts = instruction.parts
    shape = re.fullmatch(r"m16n8k(4|8|16|32)", parts[3]) if len(parts) > 9 else None
    if shape is None or parts[1:3] != ("sync", "aligned") or parts[4:6] != ("row", "col"):
        raise Unmodelled(instruction)
    depth, extra = int(shape[1]), set(parts[6:-4])
    result, left, right, addend = parts[-4:]
    if (
        not any({left, right} <= family for family in _FAMILIES)
        or depth not in _DEPTHS[left]
        or result != addend
        or result not in _SUMS.get(left, ("f16", "f32"))
        or extra - _EXTRAS.get(left, set())
    ):
        raise Unmodelled(instruction)
    return (result, left, right), depth, "satfinite" in extra
