"""Instructions on bit fields: popc clz bfind fns brev bfe bfi bmsk szext. PTX ISA 9.7.1.14 to 9.7.1.22."""

from __future__ import annotations

import numpy as np

from ptxsim.isa.lanewise import element_type, lanewise
from ptxsim.isa.operands import Array
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.ptx.nodes import WIDTHS, Instruction
from ptxsim.state.registers import LANES

_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)), bitorder="little")


def bit_length(values: Array) -> Array:
    """The position after the highest one bit, int64; 0 for 0. `values` are u32 or u64."""
    if values.dtype.itemsize == 4:
        return np.frexp(values.astype(np.float64))[1].astype(np.int64)
    upper, lower = (values >> np.uint64(32)).astype(np.float64), values.astype(np.uint32).astype(np.float64)
    return np.where(upper > 0, np.frexp(upper)[1] + 32, np.frexp(lower)[1]).astype(np.int64)


def ones(count: Array, dtype: np.dtype[np.unsignedinteger]) -> Array:
    """Words whose lowest `count` bits are ones; all of them from the word's width on."""
    width = dtype.itemsize * 8
    inside = np.minimum(count, width - 1).astype(dtype)
    return np.where(count >= width, ~dtype.type(0), (dtype.type(1) << inside) - dtype.type(1))


@translates("popc")
def popc(ins: Instruction, form: Form) -> Step:
    return lanewise(ins, "u32", (form.type,), np.bitwise_count)


@translates("clz")
def clz(ins: Instruction, form: Form) -> Step:
    type = form.type
    return lanewise(ins, "u32", (type,), lambda a: WIDTHS[type] - bit_length(a))


@translates("bfind")
def bfind(ins: Instruction, form: Form) -> Step:
    type, amount = form.type, "shiftamt" in form.flags
    top = WIDTHS[type] - 1

    def find(a: Array) -> Array:
        positions = (
            bit_length((np.where(a < 0, ~a, a) if type[0] == "s" else a).view(f"u{a.dtype.itemsize}")) - 1
        )
        found = top - positions if amount else positions
        return np.where(positions < 0, -1, found)

    return lanewise(ins, "u32", (type,), find)


@translates("fns")
def fns(ins: Instruction, form: Form) -> Step:
    """The position of the n-th one bit, counting from a base upwards or downwards."""

    def find(mask: Array, base: Array, offset: Array) -> Array:
        bits = np.unpackbits(mask.view(np.uint8).reshape(LANES, 4), axis=1, bitorder="little").astype(bool)
        position = np.arange(32)
        start, count = base[:, None].astype(np.int64), offset[:, None].astype(np.int64)
        inside = np.where(count > 0, position >= start, position <= start) & bits
        up = np.cumsum(inside, axis=1)
        rank = np.where(count > 0, up, up[:, -1:] - up + 1)
        hit = inside & (rank == np.abs(count))
        hit = np.where(count == 0, bits & (position == start), hit)
        return np.where(hit.any(axis=1), hit.argmax(axis=1), -1)

    return lanewise(ins, "u32", ("u32", "u32", "s32"), find)


@translates("brev")
def brev(ins: Instruction, form: Form) -> Step:
    type = form.type
    size = WIDTHS[type] // 8

    def reverse(a: Array) -> Array:
        octets = a.view(np.uint8).reshape(LANES, size)[:, ::-1]
        return np.ascontiguousarray(_REVERSED[octets]).view(a.dtype)[:, 0]

    return lanewise(ins, type, (type,), reverse)


@translates("bfe")
def bfe(ins: Instruction, form: Form) -> Step:
    type = form.type
    unsigned, width = element_type(f"u{WIDTHS[type]}"), WIDTHS[type]

    def extract(a: Array, b: Array, c: Array) -> Array:
        start, length = (b & 0xFF).astype(np.int64), (c & 0xFF).astype(np.int64)
        bits = a.view(unsigned)
        shifted = np.where(start >= width, 0, bits >> np.minimum(start, width - 1).astype(unsigned))
        field = ones(length, unsigned)
        if type[0] == "u":
            return shifted.astype(unsigned) & field
        last = np.minimum(start + length - 1, width - 1).clip(0).astype(unsigned)
        sign = ((bits >> last) & unsigned.type(1)).astype(bool) & (length > 0)
        field &= ones(np.maximum(width - start, 0), unsigned)
        return ((shifted.astype(unsigned) & field) | np.where(sign, ~field, unsigned.type(0))).view(a.dtype)

    return lanewise(ins, type, (type, "u32", "u32"), extract)


@translates("bfi")
def bfi(ins: Instruction, form: Form) -> Step:
    type = form.type
    dtype, width = element_type(type), WIDTHS[type]

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        start, length = (c & 0xFF).astype(np.int64), (d & 0xFF).astype(np.int64)
        shift = np.minimum(start, width - 1).astype(dtype)
        field = np.where(start >= width, dtype.type(0), ones(length, dtype) << shift)
        return (b & ~field) | ((a << shift) & field)

    return lanewise(ins, type, (type, type, "u32", "u32"), insert)


@translates("bmsk")
def bmsk(ins: Instruction, form: Form) -> Step:
    """Ones from bit a on, b of them."""
    clamp, word = "clamp" in form.flags, np.dtype(np.uint32)

    def mask(a: Array, b: Array) -> Array:
        start, count = (a & 31).astype(np.uint32), (b if clamp else b & 31).astype(np.int64)
        result = ones(count, word) << start
        return np.where(a >= 32, np.uint32(0), result) if clamp else result

    return lanewise(ins, "b32", ("u32", "u32"), mask)


@translates("szext")
def szext(ins: Instruction, form: Form) -> Step:
    type, clamp = form.type, "clamp" in form.flags

    def extend(a: Array, b: Array) -> Array:
        count = np.minimum(b, 32) if clamp else b & 31
        kept = ones(count.astype(np.int64), np.dtype(np.uint32))
        if type == "u32":
            return a & kept
        sign = (a >> ((count - np.uint32(1)) & 31)) & 1
        return (a & kept) | np.where((sign == 1) & (count > 0), ~kept, np.uint32(0))

    return lanewise(ins, "u32", ("u32", "u32"), extend)
