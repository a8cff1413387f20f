"""Comparison and selection: setp set selp slct. PTX ISA 9.7.6 and 9.7.7."""

from __future__ import annotations

import numpy as np

from ptxsim.isa.formats import FORMATS
from ptxsim.isa.halves import HALVES, half_values
from ptxsim.isa.lanewise import (
    Function,
    elementwise,
    lanewise,
    target,
    target_of,
    value,
)
from ptxsim.isa.operands import Array
from ptxsim.isa.rounding import SMALLEST_NORMAL, flushed
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.ptx.nodes import WIDTHS, Instruction, Pair, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask

_ORDERED: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED: dict[str, Function] = {
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_FLOATING: dict[str, Function] = _ORDERED | {
    # ordered: false where either is NaN; with u: true
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
_COMBINE: dict[str, Function] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_FLOATS = ("f32", "f64", *HALVES)


def _comparison(form: Form) -> tuple[str, Function]:
    """The type to read operands as and a function of them, bool [32] or [64]."""
    type, ftz = form.type, "ftz" in form.flags
    table = _FLOATING if type in _FLOATS else _ORDERED | _UNSIGNED
    function = table[form.one_of(*table)]
    if type in HALVES:
        return _of_halves(type, function, ftz)
    if ftz:
        return type, lambda a, b: function(flushed(a), flushed(b))
    return type, function


def _of_halves(type: str, function: Function, ftz: bool) -> tuple[str, Function]:
    name = type.removesuffix("x2")
    smallest = 2.0 ** FORMATS[name].low if ftz else 0.0

    def compare(a: Array, b: Array) -> Array:
        return function(flushed(half_values(name, a), smallest), flushed(half_values(name, b), smallest))

    return ("b16x2" if type.endswith("x2") else "b16"), compare


@translates("setp")
def setp(ins: Instruction, form: Form) -> Step:
    """p|q, a, b or p|q, a, b, c: p = (a op b) bool c, q = !(a op b) bool c; for pairs of halves p and q are
    the two."""
    type, combine, (source, compare) = form.type, form.named["bool"], _comparison(form)
    first = ins.operands[0]
    if not isinstance(first, Pair) and not combine and not type.endswith("x2"):
        return lanewise(ins, "pred", (source, source), compare, None if type in HALVES else compare)
    p = target_of(first.first if isinstance(first, Pair) else first, "pred")
    q = target_of(first.second, "pred") if isinstance(first, Pair) else None
    a, b = value(ins, 1, source), value(ins, 2, source)
    c = value(ins, 3, "pred") if combine else None
    join = _COMBINE.get(combine, lambda t, _: t)

    def step(warp: Warp, mask: Mask) -> None:
        truth = compare(a(warp), b(warp))
        also = c(warp) if c else None
        one, other = (truth[0::2], truth[1::2]) if type.endswith("x2") else (truth, ~truth)
        answers = join(one, also), join(other, also)
        p(warp, answers[0], mask)
        if q:
            q(warp, answers[1], mask)

    return step


# what is stored for true, as bits of the result's register: 9.7.6.1 and 9.7.7.1
_TRUE = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "u16": 0xFFFF, "s16": 0xFFFF, "f32": 0x3F800000}
_TRUE |= {"f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


@translates("set")
def set_(ins: Instruction, form: Form) -> Step:
    """d, a, b or d, a, b, c: all ones or 1.0 where the comparison holds, else 0."""
    (result, type), combine, (source, compare) = form.types, form.named["bool"], _comparison(form)
    pairs = type.endswith("x2")
    true = 0xFFFF if pairs and result in ("u32", "s32") else _TRUE[result]
    kind = "b16x2" if pairs else f"b{WIDTHS[result]}"
    if not combine:
        return lanewise(ins, kind, (source, source), lambda a, b: compare(a, b) * np.uint32(true))
    join = _COMBINE[combine]

    def apply(a: Array, b: Array, c: Array) -> Array:
        return join(compare(a, b), np.repeat(c, 2) if pairs else c) * np.uint32(true)

    return lanewise(ins, kind, (source, source, "pred"), apply)


@translates("selp")
def selp(ins: Instruction, form: Form) -> Step:
    """d, a, b, c: a where c, else b."""
    type = f"b{WIDTHS[form.type]}"
    d, a, b, c = target(ins, 0, type), value(ins, 1, type), value(ins, 2, type), value(ins, 3, "pred")
    register, first = ins.operands[0], ins.operands[1]
    if not isinstance(register, Reg):
        return lanewise(ins, type, (type, type, "pred"), lambda x, y, p: np.where(p, x, y))
    result, keeps_first = value(ins, 0, type), isinstance(first, Reg) and first.index == register.index

    def step(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            d(warp, np.where(c(warp), a(warp), b(warp)), mask)
        elif keeps_first:
            np.copyto(result(warp), b(warp), where=~c(warp))
        else:
            values = result(warp)
            values[...] = b(warp)
            np.copyto(values, a(warp), where=c(warp))

    return elementwise(ins, step, type, (type, type, "pred"), lambda x, y, p: np.where(p, x, y))


@translates("slct")
def slct(ins: Instruction, form: Form) -> Step:
    """d, a, b, c: a where c >= 0, else b; b where c is NaN."""
    ftz, third, type = "ftz" in form.flags, form.type, f"b{WIDTHS[form.types[0]]}"
    least = -SMALLEST_NORMAL if ftz else 0

    def select(a: Array, b: Array, c: Array) -> Array:
        return np.where((c > least) if ftz else (c >= least), a, b)

    return lanewise(ins, type, (type, type, third), select)
