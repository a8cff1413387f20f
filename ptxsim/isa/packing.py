"""cvt to and from packed formats, and cvt.pack. PTX ISA 9.7.9.21 and 9.7.9.22.

Not modelled: scale factors (.scaled::n2::ue8m0) of these formats, and stochastic rounding (.rs), of which
stochastic.py has that to bf16x2; fixed_point.py has s2f6.
"""

from __future__ import annotations

import numpy as np

from ptxsim.isa.formats import FORMATS, decode_scale, encode, encode_scale, f16_bits
from ptxsim.isa.lanewise import Function, elementwise, lanewise, target, value
from ptxsim.isa.operands import Array
from ptxsim.isa.rounding import SINGLE, rectified, single
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.ptx.nodes import Instruction, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.units.numbers import decode

_HALF_PAIRS = ("f16x2", "bf16x2")
_SMALL_PAIRS = {"e4m3x2": 8, "e5m2x2": 8, "e3m2x2": 8, "e2m3x2": 8, "e2m1x2": 4}
"""Bits between the two numbers of a pair."""
PACKED_FORMATS = {*_HALF_PAIRS, *_SMALL_PAIRS, "ue8m0x2"}


def packed_conversion(ins: Instruction, form: Form) -> Step:
    """The first operand, or the upper half of a packed one, goes to the upper half of the result."""
    to, of = form.types
    if to == "ue8m0x2":
        return _to_scales(ins, form, of)
    if of == "ue8m0x2":
        return _widening(ins, to, 8, decode_scale)
    if to in _SMALL_PAIRS:
        return _to_small(ins, form, to, of)
    return _from_small(ins, form, to, of) if of in _SMALL_PAIRS else _singles_to_halves(ins, form, to)


# --- two fp32 numbers to two halves -------------------------------------------------------------------------


def _singles_to_halves(ins: Instruction, kind: Form, to: str) -> Step:
    mode = kind.one_of("rn", "rz")
    if to == "bf16x2" and kind.flags == {"rn"}:
        return _nearest_bf16(ins)
    name, relu, finite = to.removesuffix("x2"), "relu" in kind.flags, "satfinite" in kind.flags
    plain = to == "f16x2" and kind.flags == {"rn"}

    def convert(a: Array, b: Array) -> Array:
        both = np.empty(2 * LANES, np.float32)
        both[0::2], both[1::2] = b, a
        if plain:
            return f16_bits(both)
        values = rectified(both) if relu else both
        return encode(values.astype(np.float64), FORMATS[name], mode, finite)

    return lanewise(ins, "b16x2", ("f32", "f32"), convert)


def _every(pattern: int) -> int:
    return int.from_bytes(pattern.to_bytes(4, "little") * LANES, "little")


_LAST_KEPT, _NEARLY_HALF = _every(1), _every(0x7FFF)
_UPPER, _LOWER = _every(0xFFFF0000), _every(0x0000FFFF)


def _nearest_bf16(ins: Instruction) -> Step:
    """cvt.rn.bf16x2.f32, which every attention kernel lives on. A register is one integer of 1024 bits here,
    as in rounding.py: the bits shifted out carry into those kept, and no number's sum reaches the next
    lane."""
    a, b, d = value(ins, 1, "b32"), value(ins, 2, "b32"), target(ins, 0, "b32")
    single, whole = SINGLE[LANES], int.from_bytes
    magnitude, above_infinity, signs = single.magnitude, single.above_infinity, single.signs

    def step(warp: Warp, mask: Mask) -> None:
        high, low = whole(a(warp).tobytes(), "little"), whole(b(warp).tobytes(), "little")
        if ((high & magnitude) + above_infinity | (low & magnitude) + above_infinity) & signs:
            d(warp, _with_nan(a(warp)) << np.uint32(16) | _with_nan(b(warp)), mask)
            return
        high += (high >> 16 & _LAST_KEPT) + _NEARLY_HALF
        low += (low >> 16 & _LAST_KEPT) + _NEARLY_HALF
        bits = (high & _UPPER | low >> 16 & _LOWER).to_bytes(4 * LANES, "little")
        d(warp, np.frombuffer(bits, np.uint32), mask)

    return elementwise(ins, step, "b32", ("b32", "b32"), _many_nearest_bf16)


def _many_nearest_bf16(a: Array, b: Array) -> Array:
    """The same of any number of registers, with numpy calls."""
    low, high = _rounded_bf16(b), _rounded_bf16(a)
    high &= np.uint32(0xFFFF0000)
    low >>= np.uint32(16)
    return high | low


def _rounded_bf16(bits: Array) -> Array:
    """The nearest bf16 numbers in the upper halves; the lower ones are what is left over."""
    if single(bits).any_nan(bits.view(np.float32)):
        return _with_nan(bits) << np.uint32(16)
    last_kept = bits >> np.uint32(16) & np.uint32(1)
    last_kept += bits
    last_kept += np.uint32(0x7FFF)
    return last_kept


def _with_nan(bits: Array) -> Array:
    return encode(bits.view(np.float32).astype(np.float64), FORMATS["bf16"]).astype(np.uint32)


# --- 8, 6 and 4 bits ----------------------------------------------------------------------------------------


def _to_small(ins: Instruction, kind: Form, to: str, of: str) -> Step:
    """To nearest, the largest number for what is too large."""
    form, relu, shift = FORMATS[to.removesuffix("x2")], "relu" in kind.flags, _SMALL_PAIRS[to]

    def codes(values: Array) -> Array:
        return encode(rectified(values) if relu else values, form, "rn", finite=True)

    return _narrowing(ins, of, shift, codes)


def _to_scales(ins: Instruction, kind: Form, of: str) -> Step:
    mode, finite = kind.one_of("rz", "rp"), "satfinite" in kind.flags
    return _narrowing(ins, of, 8, lambda values: encode_scale(values, mode, finite))


def _narrowing(ins: Instruction, of: str, shift: int, codes: Function) -> Step:
    """Two numbers, in two fp32 operands or one packed one, to codes of `shift` bits."""
    kind = _small_register(ins, 0)
    if of == "f32":
        return lanewise(
            ins,
            kind,
            ("f32", "f32"),
            lambda a, b: codes(a.astype(np.float64)) << shift | codes(b.astype(np.float64)),
        )
    half = of.removesuffix("x2")

    def convert(pairs: Array) -> Array:
        both = codes(decode(half, pairs).astype(np.float64))
        return both[1::2] << shift | both[0::2]

    return lanewise(ins, kind, ("b16x2",), convert)


def _from_small(ins: Instruction, kind: Form, to: str, of: str) -> Step:
    """Exact. NaN is 0x7FFF."""
    name, relu, shift = of.removesuffix("x2"), "relu" in kind.flags, _SMALL_PAIRS[of]
    finite = "satfinite" in kind.flags

    def values(codes: Array) -> Array:
        wide = decode(name, codes.astype(np.uint8)).astype(np.float64)
        return rectified(wide) if relu else wide

    return _widening(ins, to, shift, values, finite)


def _widening(ins: Instruction, to: str, shift: int, values: Function, finite: bool = False) -> Step:
    """Two codes of `shift` bits to two halves."""
    form = FORMATS[to.removesuffix("x2")]

    def convert(codes: Array) -> Array:
        both = np.empty(2 * LANES, np.uint16)
        both[0::2], both[1::2] = codes & ((1 << shift) - 1), codes >> shift & ((1 << shift) - 1)
        return encode(values(both), form, "rn", finite)

    return lanewise(ins, "b16x2", (_small_register(ins, 1),), convert)


def _small_register(ins: Instruction, index: int) -> str:
    """The type to access a register of 8 or 16 bits, or a wider one, with."""
    operand = ins.operands[index]
    return f"b{operand.file}" if isinstance(operand, Reg) else "b16"


# --- cvt.pack -----------------------------------------------------------------------------------------------

_LIMITS = {f"{kind}{bits}": (kind, bits) for kind in "us" for bits in (2, 4, 8, 16)}


@translates("cvt.pack")
def pack(ins: Instruction, form: Form) -> Step:
    """d, a, b or d, a, b, c: two s32 clamped to a narrow type, a above b, and above them the low bits of
    c."""
    kind, bits = _LIMITS[ins.modifiers[2]]
    third = ("b32",) if bits < 16 else ()
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s" else (0, (1 << bits) - 1)
    field = (1 << bits) - 1

    def convert(a: Array, b: Array, *c: Array) -> Array:
        upper, lower = (np.clip(x, low, high).astype(np.int64) & field for x in (a, b))
        result = upper << bits | lower
        return result | c[0].astype(np.int64) << 2 * bits if c else result

    return lanewise(ins, "b32", ("s32", "s32", *third), convert)
