"""Tensor maps that a kernel changes (PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy").

Where the fields lie was read from what an H100 writes (units/tensormap.py); sm_100a has more values for some.
Stores to a map and copies of one are stores like any other here; fence.proxy.tensormap orders nothing that is
not ordered already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptxsim.isa.access import Accessor, locate, space_of
from ptxsim.isa.mbarriers import cta_and_offset
from ptxsim.isa.operands import read
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Unmodelled, translates
from ptxsim.ptx.nodes import WIDTHS, Imm, Instruction
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask
from ptxsim.watch.findings import Fault, Finding

SIZE, USED = 128, 64
"""Bytes of a tensor map, and its alignment; and those that say something. The others are copied and not
watched: CuTe DSL leaves them as they are where it brings a map to shared memory."""


@dataclass(frozen=True)
class Field:
    """`bits` bits of the map from bit `at` on, in a word of 32; `each` bits further for each dimension.

    What is stored is the new value less `less`, without its low `drops` bits; the values are `least` to
    `most`.
    """

    at: int
    bits: int
    least: int
    most: int
    each: int = 0
    dimensions: int = 0
    less: int = 0
    drops: int = 0


FIELDS = {
    "global_address": Field(0, 64, 0, 2**64 - 1),
    "rank": Field(64 + 4, 3, 0, 4),
    "box_dim": Field(8 * 55, 8, 1, 256, each=8, dimensions=5, less=1),
    "global_dim": Field(8 * 32, 32, 1, 2**32 - 1, each=32, dimensions=5, less=1),
    "global_stride": Field(8 * 12, 32, 0, 2**40 - 16, each=32, dimensions=4, drops=4),
    "element_stride": Field(8 * 52, 3, 1, 8, each=3, dimensions=5, less=1),
    "elemtype": Field(64 + 7, 4, 0, 15),
    "interleave_layout": Field(64 + 11, 2, 0, 2),
    "swizzle_mode": Field(64 + 13, 2, 0, 3),
    "swizzle_atomicity": Field(64 + 19, 2, 0, 3),
    "fill_mode": Field(64 + 15, 1, 0, 1),
}
STRIDE_ABOVE = 8 * 28
"""Bit from which the upper 4 bits of each stride lie."""
TYPES = {code: (code, 0) for code in range(11)} | {
    11: (7, 1),
    12: (8, 1),
    13: (11, 0),
    14: (12, 0),
    15: (13, 0),
}
"""Element types as the map has them, and whether they round to tf32, by the instruction's numbers."""
ROUNDS = 64 + 16


@translates("tensormap.replace.tile")
def replace(instruction: Instruction, form: Form) -> Act:
    """[map], new value; or [map], dimension, new value."""
    name = instruction.modifiers[2]
    field, (where, *rest) = FIELDS[name], instruction.operands
    dimension = int(rest[0].value) if field.dimensions and isinstance(rest[0], Imm) else 0
    if field.dimensions and not 0 <= dimension < field.dimensions:
        raise Unmodelled(instruction, f"dimension {dimension}")
    address, given = locate(where), read(rest[-1], f"u{WIDTHS[form.type]}")
    access = Accessor(instruction, space_of(instruction))

    def run(warp: Warp, mask: Mask) -> None:
        lanes = slice(None) if mask is None else mask
        for at, value in zip(address(warp)[lanes], given(warp)[lanes]):
            for bit, width, part in _parts(warp, instruction, name, dimension, int(value)):
                _put(access, warp, int(at), bit, width, part)

    return Act(run)


def _parts(
    warp: Warp, instruction: Instruction, name: str, dimension: int, value: int
) -> list[tuple[int, int, int]]:
    """(first bit, bits, what they become) for each piece of the map that changes."""
    field = FIELDS[name]
    if not field.least <= value <= field.most or value % (1 << field.drops):
        legal = f"{field.least} to {field.most} are legal"
        text = f"{warp} sets .{name} of a tensor map to {value}; {legal}"
        raise Fault(Finding("misuse", text, instruction))
    at, stored = field.at + field.each * dimension, (value - field.less) >> field.drops
    match name:
        case "global_address":
            return [(0, 32, stored & 0xFFFFFFFF), (32, 32, stored >> 32)]
        case "global_stride":
            return [(at, 32, stored & 0xFFFFFFFF), (STRIDE_ABOVE + 4 * dimension, 4, stored >> 32)]
        case "elemtype":
            code, rounds = TYPES[value]
            return [(at, 4, code), (ROUNDS, 1, rounds)]
        case _:
            return [(at, field.bits, stored)]


def _put(access: Accessor, warp: Warp, at: int, bit: int, width: int, part: int) -> None:
    """Sets bits of the map at an address. They may reach from one word into the next."""
    first, last = bit // 32, (bit + width - 1) // 32
    addresses = np.array([at + 4 * word for word in range(first, last + 1)], np.int64)
    words = access.load(warp, addresses, 4, 1)
    whole = int.from_bytes(words.astype("<u4").tobytes(), "little")
    shift = bit - 32 * first
    whole = whole & ~(((1 << width) - 1) << shift) | part << shift
    changed = np.frombuffer(whole.to_bytes(4 * len(addresses), "little"), "<u4").reshape(-1, 1)
    access.store(warp, addresses, changed)


@translates("tensormap.cp_fenceproxy")
def copy(instruction: Instruction, form: Form) -> Act:
    """[global], [shared], 128: all lanes copy a map together."""
    target, source = (locate(operand) for operand in instruction.operands[:2])
    takes, puts = Accessor(instruction, "shared"), Accessor(instruction, "global")

    def run(warp: Warp, mask: Mask) -> None:
        words = 8 * np.arange(USED // 8)
        start, end = int(_first(source(warp), mask)), int(_first(target(warp), mask))
        for at in (start, end):
            if at % SIZE:
                text = f"{warp} copies a tensor map at {at:#x}, which is no multiple of {SIZE}"
                raise Fault(Finding("misaligned", text, instruction))
        puts.store(warp, end + words, takes.load(warp, start + words, 8, 1))
        cta, offset = cta_and_offset(takes, warp, start)
        rest = cta.shared.window(offset, SIZE)[USED:]
        puts.store(warp, end + USED + words, rest.view(np.uint64).reshape(-1, 1))

    return Act(run)


def _first(values: np.ndarray, mask: Mask) -> int:
    return int(values[0] if mask is None else values[mask][0])
