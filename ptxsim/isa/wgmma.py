"""wgmma: matrix multiplication by a warpgroup, on Hopper (PTX ISA, "Asynchronous Warpgroup Level Matrix
Multiply-Accumulate Instructions").

Each warp computes its own 16 of the 64 rows: of A it reads these, of B everything. A warp's part relies on
what that warp knew when it issued its own; but the product is one operation of four warps, and a warp that
has waited for it knows that all four parts are over.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.asynchronous import Errand, chunk_granules
from ptxsim.isa.operands import Read, WrongOperand, items_of, read
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Wait, translates
from ptxsim.isa.together import rows_of
from ptxsim.ptx.nodes import Imm, Instruction, Operand, Reg, Vector
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.operation import Operation
from ptxsim.state.registers import Mask
from ptxsim.units import aligned, descriptors, matmul, numbers, wgmma
from ptxsim.units.descriptors import Major
from ptxsim.watch.findings import Finding

KIND = "wgmma groups"
ROWS = 16
"""Rows of A and D per warp."""
WARPS = 4
"""Warps of a warpgroup."""
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f32": 32, "s32": 32}


@dataclass(frozen=True)
class Shape:
    """m64n`n`k`k`: D of `d`, A of `a`, B of `b`. Scales of -1 negate. Integers wrap, or are clamped where it
    `saturates`."""

    n: int
    k: int
    d: str
    a: str
    b: str
    a_scale: int
    b_scale: int
    a_major: Major
    b_major: Major
    saturates: bool = False


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


@dataclass(eq=False)
class Product:
    """One wgmma.mma_async of a warpgroup: the parts of those of its warps that have issued it.

    `given` is what the first of them gave: the instruction, and descriptors of A (None in registers) and B.
    """

    given: tuple[Instruction, int | None, int]
    parts: list[tuple[Operation, Errand]] = field(default_factory=list)

    def over(self) -> bool:
        return len(self.parts) == WARPS and all(operation.landed for operation, _ in self.parts)


@dataclass(eq=False)
class Products:
    """Products of one warp: issued so far, those since its last commit, and its groups with the PTX lines of
    their commits, the oldest first."""

    issued: int = 0
    open: list[Product] = field(default_factory=list)
    groups: list[tuple[list[Product], int]] = field(default_factory=list)
    own: dict[Product, Operation] = field(default_factory=dict)
    """The warp's own parts of those that it has not waited for."""

    @classmethod
    def of(cls, warp: Warp) -> Products:
        found = warp.started.get(KIND)
        if found is None:
            found = warp.started[KIND] = cls()
        return found

    def join(self, warp: Warp, given: tuple[Instruction, int | None, int]) -> Product:
        """The product that the warp issues now, which others of its warpgroup may have issued before."""
        coming = warp.cta.products.setdefault(warp.index // WARPS, {})
        product = coming.setdefault(self.issued, Product(given))
        if len(product.parts) == WARPS - 1:
            del coming[self.issued]
        self.issued += 1
        self.open.append(product)
        return product


@translates("wgmma.mma_async")
def mma_async(instruction: Instruction, form: Form) -> Act:
    multiply = _decode(instruction, form)
    # A hundred registers: a dictionary and a set know their hashes, a sequence does not.
    users = dict.fromkeys(multiply.registers, instruction)
    keys = frozenset(users)

    def run(warp: Warp, mask: Mask) -> None:
        if not warp.fenced or not warp.unfenced.isdisjoint(keys):
            text = f"{warp} gives wgmma registers that were used after the last wgmma.fence"
            warp.cta.launch.findings.add(Finding("missing fence", text, instruction))
        who = f"wgmma of {warp}"
        errand = Errand.in_queue(warp, who, f"a wgmma of {warp}", instruction)
        a = None if isinstance(multiply.a, tuple) else int(multiply.a(warp)[0])
        b, adds = int(multiply.b(warp)[0]), bool(multiply.accumulate(warp)[0])
        mine = Products.of(warp)
        product = mine.join(warp, (instruction, a, b))
        if product.given != (instruction, a, b):
            _differs(warp, product, instruction)

        def land() -> None:
            _multiply(warp, multiply, a, b, adds, errand)

        warp.busy.update(users)
        operation = Operation(instruction, land, (product,), ("wgmma", warp.agent), users)
        product.parts.append((operation, errand))
        mine.own[product] = operation
        warp.cta.cluster.units.submit(operation)

    return Act(run)


def _differs(warp: Warp, product: Product, instruction: Instruction) -> None:
    """The warps of a warpgroup execute the same instruction with the same descriptors (PTX ISA, "wgmma.
    mma_async", "Matrix Descriptor Format")."""
    first = product.given[0]
    what = "another wgmma" if first != instruction else "other matrix descriptors"
    text = f"{warp} has {what} than a warp of its warpgroup"
    warp.cta.launch.findings.add(Finding("misuse", text, instruction, first))


def _multiply(warp: Warp, what: Multiply, a: int | None, b: int, adds: bool, errand: Errand) -> None:
    shape, table = what.shape, warp.tables["u32"]
    if a is None:
        registers = table[what.rows[1]]
        left = numbers.decode(shape.a, wgmma.multiplicand(BITS[shape.a]).matrix(registers))
    else:
        first = warp.index % WARPS * ROWS
        left = operand(warp.cta, a, shape.a_major, WARPS * ROWS, shape, errand, (first, first + ROWS))
    right = operand(warp.cta, b, shape.b_major, shape.n, shape, errand)
    if shape.a_scale * shape.b_scale < 0:
        left = -left
    fragment = wgmma.accumulator(shape.n, BITS[shape.d])
    before = fragment.matrix(table[what.rows[0]]).view(_ACCUMULATORS[shape.d]) if adds else None
    factors = np.ascontiguousarray(left), np.ascontiguousarray(right)
    if shape.a in aligned.TYPES:
        after = aligned.multiply_add(*factors, before, (shape.a, shape.b), shape.d)
    else:
        after = matmul.multiply_add(*factors, before, shape.d, saturate=shape.saturates)
    table[what.rows[0]] = fragment.split(after.view(fragment.dtype))
    warp.cta.cluster.traffic["MMA multiply-adds"] += ROWS * shape.n * shape.k


_ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def operand(
    cta: Cta,
    bits: int,
    major: Major,
    rows: int,
    shape: Shape,
    errand: Errand,
    part: tuple[int, int] | None = None,
) -> NDArray[np.float32]:
    """float32 [rows, k] of an operand in shared memory, read by `errand`: those from the first to the last of
    `part`, if it is A, of which each warp reads its own."""
    where, type = descriptors.decode_wgmma(bits), shape.b if part is None else shape.a
    raw = numbers.raw_dtype(type)
    # The four warps of a warpgroup read B once together; each counts its share.
    errand.moves(cta, rows * shape.k * raw.itemsize // WARPS)
    found = descriptors.operand(where, major, rows, shape.k, raw, cta.shared.data)
    size = rows, shape.k, raw.itemsize
    cta.shadow.read(errand.number, _granules(bits, major, size, part, cta.launch.granule), errand.clock)
    return numbers.decode(type, found if part is None else found[slice(*part)])


@lru_cache(maxsize=4096)
def _granules(
    bits: int, major: Major, size: tuple[int, int, int], part: tuple[int, int] | None, granule: int
) -> NDArray[np.intp]:
    where = descriptors.decode_wgmma(bits)
    return chunk_granules(descriptors.touched(where, major, *size, part), granule)


@translates("wgmma.fence")
def fence(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> None:
        warp.fenced = True
        warp.unfenced.clear()

    return Act(run)


@translates("wgmma.commit_group")
def commit_group(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> None:
        mine = Products.of(warp)
        mine.groups.append((mine.open, instruction.line))
        mine.open = []

    return Act(run)


@translates("wgmma.wait_group")
def wait_group(instruction: Instruction, form: Form) -> Act:
    """Until at most so many of the warp's groups are under way: then all four parts of each product in the
    others are known to be over."""
    left = read(instruction.operands[0], "u32")

    def run(warp: Warp, mask: Mask) -> Wait | None:
        mine = Products.of(warp)
        count = max(0, len(mine.groups) - int(left(warp)[0]))
        pending = [p for group, _ in mine.groups[:count] for p in group if not p.over()]
        if pending:
            what, first = f"{len(pending)} products of its warpgroup", pending[0]
            pending.reverse()
            return Wait(lambda: _all_over(pending), what, first)
        for group, line in mine.groups[:count]:
            for product in group:
                _learns(warp, product, (instruction.line, line))
                del mine.own[product]
        del mine.groups[:count]
        warp.busy = {}
        for operation in mine.own.values():
            warp.busy.update(operation.holds)
        return None

    return Act(run)


def _all_over(pending: list[Product]) -> bool:
    """True if all are over, which are taken from the end: those that are over stay so, and are not asked
    again."""
    while pending and pending[-1].over():
        pending.pop()
    return not pending


def _learns(warp: Warp, product: Product, lines: tuple[int, int]) -> None:
    order = warp.cta.cluster.order
    epochs = order.clocks[warp.agent].epochs
    for _, errand in product.parts:
        if epochs[errand.agent] < errand.epoch:
            epochs[errand.agent] = errand.epoch
            order.learns(warp.agent, lines)


def _decode(instruction: Instruction, form: Form) -> Multiply:
    n, k = instruction.parts[4].removeprefix("m64n").split("k")
    d, a, b, accumulate, *rest = instruction.operands
    immediate = [int(o.value) for o in rest if isinstance(o, Imm)]
    in_registers = isinstance(a, Vector)
    scales = immediate[:2] or [1, 1]
    transposed = [0, *immediate[2:]] if in_registers else immediate[2:]
    majors: list[Major] = ["MN" if t else "K" for t in (*transposed, 0, 0)]
    shape = Shape(int(n), int(k), *form.types, *scales, *majors[:2])  # type: ignore[arg-type]
    shape = replace(shape, saturates="satfinite" in form.flags)
    return Multiply(
        shape,
        _registers(d),
        _registers(a) if in_registers else read(a, "u64"),
        read(b, "u64"),
        read(accumulate, "pred"),
    )


def _registers(operand: Operand) -> tuple[Reg, ...]:
    found = tuple(item for item in items_of(operand) if isinstance(item, Reg))
    if found[0].file != 32:
        raise WrongOperand(f"{found[0].name} has no 32 bits")
    return found
