"""Logic, shifts and byte permutation. PTX ISA 9.7.8 and 9.7.9.7."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim.isa.lanewise import (
    Function,
    element_type,
    lanewise,
    require,
    target_of,
    value,
)
from ptxsim.isa.operands import Array
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.ptx.nodes import WIDTHS, Imm, Instruction, Pair
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask

_BITWISE: dict[str, Function] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}


@translates("and", "or", "xor", "not")
def bitwise(ins: Instruction, form: Form) -> Step:
    type = form.type
    return lanewise(ins, type, (type,) * (1 if ins.name == "not" else 2), _BITWISE[ins.name])


@translates("cnot")
def cnot(ins: Instruction, form: Form) -> Step:
    return lanewise(ins, form.type, (form.type,), lambda a: a == 0)


@translates("lop3")
def lop3(ins: Instruction, form: Form) -> Step:
    """d, a, b, c, table: bit 4 a + 2 b + c of the table. With .and or .or also p = (d != 0) op q."""
    operation = form.one_of("and", "or")
    table = ins.operands[4]
    assert isinstance(table, Imm)
    require(isinstance(table.value, int) and 0 <= table.value < 256, ins, "table")
    function = _lookup(int(table.value))
    a, b, c = (value(ins, i, "b32") for i in (1, 2, 3))
    first = ins.operands[0]
    if not operation:
        d = target_of(first, "b32")
        return lambda warp, mask: d(warp, function(a(warp), b(warp), c(warp)), mask)
    assert isinstance(first, Pair)
    d, p, q = target_of(first.first, "b32"), target_of(first.second, "pred"), value(ins, 5, "pred")
    combine = _BITWISE[operation]

    def step(warp: Warp, mask: Mask) -> None:
        result = function(a(warp), b(warp), c(warp))
        answer = combine(result != 0, q(warp))
        d(warp, result, mask)
        p(warp, answer, mask)

    return step


def _lookup(table: int) -> Function:
    """The function of three words as an or of the table's minterms."""
    terms = [i for i in range(8) if table >> i & 1]

    def function(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(LANES, np.uint32)
        for term in terms:
            result |= (a if term & 4 else ~a) & (b if term & 2 else ~b) & (c if term & 1 else ~c)
        return result

    return function


# --- shifts -------------------------------------------------------------------------------------------------


@translates("shl", "shr")
def shift(ins: Instruction, form: Form) -> Step:
    """Amounts of the width and more shift everything out; the amount is u32 whatever the type."""
    left, type, amount = ins.name == "shl", form.type, ins.operands[2]
    width, dtype = WIDTHS[type], element_type(type)
    plain = np.left_shift if left else np.right_shift
    if isinstance(amount, Imm) and isinstance(amount.value, int) and 0 <= amount.value < width:
        return lanewise(ins, type, (type, type), plain)
    last, arithmetic = np.uint32(width - 1), dtype.kind == "i"

    def shifted(a: Array, b: Array) -> Array:
        result = plain(a, np.minimum(b, last).astype(dtype))
        return result if arithmetic else np.where(b > last, dtype.type(0), result)

    return lanewise(ins, type, (type, "u32"), shifted)


@translates("shf")
def funnel(ins: Instruction, form: Form) -> Step:
    """The upper word of (b:a) << c, or the lower word of (b:a) >> c."""
    left, clamp = "l" in form.flags, "clamp" in form.flags
    word = np.uint64(32)

    def shifted(a: Array, b: Array, c: Array) -> Array:
        amount = (np.minimum(c, 32) if clamp else c & 31).astype(np.uint64)
        both = b.astype(np.uint64) << word | a
        return both << amount >> word if left else both >> amount

    return lanewise(ins, "b32", ("b32", "b32", "u32"), shifted)


# --- prmt ---------------------------------------------------------------------------------------------------

_SELECTIONS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}
"""For each mode, the generic form's selectors for the four values of c's lowest bits: 9.7.9.7."""


@translates("prmt")
def permute(ins: Instruction, form: Form) -> Step:
    """Four bytes out of the eight of (b:a), as the nibbles of c say; a nibble's highest bit asks for the
    sign."""
    mode = form.named["pick"]
    selector = ins.operands[3]
    if not mode and isinstance(selector, Imm) and isinstance(selector.value, int):
        return _fixed_permute(ins, selector.value)
    table = np.array(_SELECTIONS[mode], np.uint32) if mode else None

    def picked(a: Array, b: Array, c: Array) -> Array:
        nibbles = (c if table is None else table[c & 3])[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
        octets = np.concatenate(
            (a.view(np.uint8).reshape(LANES, 4), b.view(np.uint8).reshape(LANES, 4)), axis=1
        )
        chosen = np.take_along_axis(octets, (nibbles & 7).astype(np.intp), axis=1)
        chosen = np.where(nibbles & 8, np.where(chosen & 128, 255, 0), chosen).astype(np.uint8)
        return chosen.view(np.uint32)[:, 0]

    return lanewise(ins, "b32", ("b32",) * 3, picked)


def _fixed_permute(ins: Instruction, selector: int) -> Step:
    """A literal selector: copies of whole columns of bytes."""
    a, b, d = value(ins, 1, "b32"), value(ins, 2, "b32"), target_of(ins.operands[0], "b32")
    nibbles = [selector >> shift & 15 for shift in (0, 4, 8, 12)]

    def step(warp: Warp, mask: Mask) -> None:
        octets = (a(warp).view(np.uint8), b(warp).view(np.uint8))
        result: Any = np.empty(LANES * 4, np.uint8)
        for place, nibble in enumerate(nibbles):
            column = octets[nibble >> 2 & 1][nibble & 3 :: 4]
            result[place::4] = (column >> np.uint8(7)) * np.uint8(255) if nibble & 8 else column
        d(warp, result.view(np.uint32), mask)

    return step
