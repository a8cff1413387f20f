"""Matrices across the lanes of a warp: ldmatrix, stmatrix, movmatrix and mma.sync (PTX ISA, "Warp Level
Matrix Multiply-Accumulate Instructions"). units/fragments.py says which lane holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, locate, space_of
from ptxsim.isa.operands import Read, Write, items_of, read, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, Unmodelled, translates
from ptxsim.ptx.nodes import Instruction, Operand
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


def _gather(gets: Sequence[Read], warp: Warp) -> NDArray[np.uint32]:
    """uint32 [registers, 32]."""
    return np.stack([get(warp) for get in gets])


def _scatter(puts: Sequence[Write], warp: Warp, words: NDArray[np.uint32]) -> None:
    for put, values in zip(puts, words):
        put(warp, values, None)


# --- between shared memory and registers --------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A kind of matrix that ldmatrix loads: its rows of 16 bytes, and how many registers of each lane it
    takes."""

    rows: int
    registers: int


HALVES, BYTES, SQUARES = Matrix(8, 1), Matrix(8, 1), Matrix(16, 2)
KINDS = {"m8n8": HALVES, "m8n16": BYTES, "m16n16": SQUARES}
UNPACKED = {"b4x16_p64": 4, "b6x16_p32": 6}
"""Bits of elements that are spread to bytes, each in the low bits of its own."""


@translates("ldmatrix")
def ldmatrix(instruction: Instruction, form: Form) -> Step:
    """r, [p]: as many lanes as it has rows give the addresses of each matrix's rows; the first matrix goes to
    the first registers. Bytes are transposed in squares of 16 and only there."""
    registers, kind = items_of(instruction.operands[0]), KINDS[form.one_of(*KINDS)]
    count, bits = len(registers) // kind.registers, UNPACKED.get(form.one_of(*UNPACKED), 0)
    where, turn = locate(instruction.operands[1]), "trans" in form.flags
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


@translates("stmatrix")
def stmatrix(instruction: Instruction, form: Form) -> Step:
    """[p], r: as ldmatrix, the other way. Matrices of 16 x 8 bytes are transposed: 8 rows of 16 bytes."""
    registers = items_of(instruction.operands[1])
    plain = partial(fragments.stmatrix, transposed="trans" in form.flags)
    store = fragments.stmatrix_tall if "m16n8" in form.flags else plain
    where = locate(instruction.operands[0])
    access = Accessor(instruction, space_of(instruction))
    gets, rows = [read(r, "b32") for r in registers], ROWS * len(registers)

    def step(warp: Warp, mask: Mask) -> None:
        _all_lanes(warp, mask, instruction)
        matrices = store(_gather(gets, warp))
        access.store(warp, where(warp)[:rows], matrices.reshape(rows, ROW_BYTES).view(np.uint32))

    return step


@translates("movmatrix")
def movmatrix(instruction: Instruction, form: Form) -> Step:
    d, a = write(instruction.operands[0], "b32"), read(instruction.operands[1], "b32")

    def step(warp: Warp, mask: Mask) -> None:
        _all_lanes(warp, mask, instruction)
        d(warp, fragments.movmatrix(a(warp)), None)

    return step


# --- multiply-accumulate ------------------------------------------------------------------------------------

_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


@translates("mma")
def mma(instruction: Instruction, form: Form) -> Step:
    """d, a, b, c of mma.sync.aligned.m16n8kK.row.col.<types of D, A, B, C>: D = A B + C.

    Sums are exact for integers and made in float32 else; units/matmul.py says how far silicon may be from
    that.
    """
    (kind, left, right, _), saturate = form.types, "satfinite" in form.flags
    depth = int(instruction.parts[3].partition("k")[2])
    a = fragments.multiplicand_a(depth, BITS[left])
    b = fragments.multiplicand_b(depth, BITS[right])
    c = fragments.accumulator(8, BITS[kind])
    registers = [items_of(operand) for operand in instruction.operands]
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
