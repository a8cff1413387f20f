"""wgmma: matrix multiplication by a warpgroup, on Hopper (PTX ISA, "Asynchronous Warpgroup Level Matrix
Multiply-Accumulate Instructions"). Each warp computes its own 16 of the 64 rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4flex.simulator.isa.asynchronous import Errand, groups
from fa4flex.simulator.isa.operands import Read, read
from fa4flex.simulator.isa.table import Act, Unmodelled, Wait, translates
from fa4flex.simulator.isa.together import rows_of
from fa4flex.simulator.ptx.nodes import Imm, Instruction, Operand, Reg, Vector
from fa4flex.simulator.state.cta import Cta, Warp
from fa4flex.simulator.state.operation import Operation
from fa4flex.simulator.state.registers import Mask
from fa4flex.simulator.units import descriptors, matmul, numbers, wgmma
from fa4flex.simulator.units.descriptors import Major
from fa4flex.simulator.watch.findings import Finding

KIND = "wgmma groups"
ROWS = 16
"""Rows of D per warp."""
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f32": 32, "s32": 32}


@dataclass(frozen=True)
class Shape:
    """m64n`n`k`k`: D of `d`, A of `a`, B of `b`. Scales of -1 negate."""

    n: int
    k: int
    d: str
    a: str
    b: str
    a_scale: int
    b_scale: int
    a_major: Major
    b_major: Major


@dataclass(frozen=True)
class Multiply:
    """One wgmma.mma_async, decoded: registers of D, where A and B are, whether D is added to."""

    shape: Shape
    d: tuple[Reg, ...]
    a: tuple[Reg, ...] | Read
    b: Read
    accumulate: Read

    @cached_property
    def registers(self) -> tuple[tuple[int, int], ...]:
        kept = self.a if isinstance(self.a, tuple) else ()
        return tuple((r.file, r.index) for r in (*self.d, *kept))

    @cached_property
    def rows(self) -> tuple[Any, Any]:
        """Rows of D, and of A if it lies in registers, in the table of 32-bit registers."""
        kept = self.a if isinstance(self.a, tuple) else self.d
        return rows_of([r.index for r in self.d]), rows_of([r.index for r in kept])


@translates("wgmma.mma_async")
def mma_async(instruction: Instruction) -> Act:
    multiply = _decode(instruction)

    def run(warp: Warp, mask: Mask) -> None:
        keys = multiply.registers
        if not warp.fenced or not warp.unfenced.isdisjoint(keys):
            text = f"{warp} gives wgmma registers that were used after the last wgmma.fence"
            warp.cta.launch.findings.add(Finding("missing fence", text, instruction))
        who = f"wgmma of {warp}"
        errand = Errand.in_queue(warp, who, f"a wgmma of {warp}", instruction)
        a = multiply.a if isinstance(multiply.a, tuple) else int(multiply.a(warp)[0])
        b, adds = int(multiply.b(warp)[0]), bool(multiply.accumulate(warp)[0])
        kind = groups(warp, KIND)

        def land() -> None:
            _multiply(warp, multiply, a, b, adds, errand)

        warp.busy.update(dict.fromkeys(keys, instruction))
        operation = Operation(instruction, land, (kind,), ("wgmma", warp.agent), keys)
        warp.cta.cluster.units.submit(operation)
        kind.add(0, operation, errand)

    return Act(run)


def _multiply(
    warp: Warp, what: Multiply, a: tuple[Reg, ...] | int, b: int, adds: bool, errand: Errand
) -> None:
    shape, row, table = what.shape, warp.index % 4 * ROWS, warp.tables["u32"]
    if isinstance(a, tuple):
        registers = table[what.rows[1]]
        left = numbers.decode(shape.a, wgmma.multiplicand(BITS[shape.a]).matrix(registers))
    else:
        left = operand(warp.cta, descriptors.decode_wgmma(a), shape.a_major, 64, shape, shape.a, errand)
        left = left[row : row + ROWS]
    right = operand(warp.cta, descriptors.decode_wgmma(b), shape.b_major, shape.n, shape, shape.b, errand)
    if shape.a_scale * shape.b_scale < 0:
        left = -left
    fragment = wgmma.accumulator(shape.n, BITS[shape.d])
    before = fragment.matrix(table[what.rows[0]]).view(_ACCUMULATORS[shape.d]) if adds else None
    after = matmul.multiply_add(np.ascontiguousarray(left), np.ascontiguousarray(right), before, shape.d)
    table[what.rows[0]] = fragment.split(after.view(fragment.dtype))
    warp.cta.cluster.traffic["MMA multiply-adds"] += ROWS * shape.n * shape.k


_ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def operand(
    cta: Cta,
    where: descriptors.MatrixDescriptor,
    major: Major,
    rows: int,
    shape: Shape,
    type: str,
    errand: Errand,
) -> NDArray[np.float32]:
    """float32 [rows, k] of an operand in shared memory, read by `errand`."""
    raw = numbers.raw_dtype(type)
    chunks = descriptors.touched(where, major, rows, shape.k, raw.itemsize)
    # The four warps of a warpgroup read an operand once together; each counts its share.
    errand.reads_chunks(cta, chunks, rows * shape.k * raw.itemsize // 4)
    found = descriptors.operand(where, major, rows, shape.k, raw, cta.shared.data)
    return numbers.decode(type, found)


@translates("wgmma.fence")
def fence(instruction: Instruction) -> Act:
    def run(warp: Warp, mask: Mask) -> None:
        warp.fenced = True
        warp.unfenced.clear()

    return Act(run)


@translates("wgmma.commit_group")
def commit_group(instruction: Instruction) -> Act:
    def run(warp: Warp, mask: Mask) -> None:
        groups(warp, KIND).commit(_FIRST_LANE, instruction.line)

    return Act(run)


@translates("wgmma.wait_group")
def wait_group(instruction: Instruction) -> Act:
    left = read(instruction.operands[0], "u32")

    def run(warp: Warp, mask: Mask) -> Wait | None:
        kind = groups(warp, KIND)
        wait = kind.wait(warp, _FIRST_LANE, int(left(warp)[0]), KIND, instruction.line)
        if wait is None:
            under_way = kind.unwaited()
            warp.busy = {key: o.instruction for o in under_way for key in o.holds}
        return wait

    return Act(run)


_FIRST_LANE = np.arange(32) == 0
"""A warp's wgmmas are counted once, for its first lane."""


def _decode(instruction: Instruction) -> Multiply:
    match = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16|s32)\.(\w+)\.(\w+)", instruction.opcode
    )
    if match is None or match[4] not in BITS or match[5] not in BITS:
        raise Unmodelled(instruction)
    d, a, b, accumulate, *rest = instruction.operands
    immediate = [int(o.value) for o in rest if isinstance(o, Imm)]
    in_registers = isinstance(a, Vector)
    scales = immediate[:2] if match[3] != "s32" else [1, 1]
    transposed = immediate[2:] if match[3] != "s32" else []
    if in_registers:
        transposed = [0, *transposed]
    majors: list[Major] = ["MN" if t else "K" for t in (*transposed, 0, 0)]
    shape = Shape(int(match[1]), int(match[2]), *match.groups()[2:], *scales, *majors[:2])  # type: ignore[arg-type]
    return Multiply(
        shape,
        _registers(d, instruction),
        _registers(a, instruction) if in_registers else read(a, "u64"),
        read(b, "u64"),
        read(accumulate, "pred"),
    )


def _registers(operand: Operand, instruction: Instruction) -> tuple[Reg, ...]:
    items = operand.items if isinstance(operand, Vector) else ()
    found = tuple(r for r in items if isinstance(r, Reg))
    if not found or len(found) != len(items) or found[0].file != 32:
        raise Unmodelled(instruction, "operands that are no 32-bit registers")
    return found
