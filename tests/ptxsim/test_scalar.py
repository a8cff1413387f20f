"""Integers, bits and logic, against plain Python integers lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lanes import apply, as_type, fill, held, signed, words
from machine import execute, machine, reg

from ptxsim.isa.table import Unmodelled, translate
from ptxsim.ptx.nodes import Imm, Instruction

INTEGERS = [f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64)]
WORDS = ["u32", "s32", "u64", "s64"]


def check(opcode: str, result: str, types: str, function: Callable[..., int], *limits: int) -> None:
    """The instruction on random registers of `types` gives function(numbers) modulo the result's width.
    `limits` bound operands, 0 for none."""
    names = types.split()
    for _ in range(4):
        columns = [words(int(name[1:])) for name in names]
        for i, limit in enumerate(limits):
            if limit:
                columns[i] = [v % limit for v in columns[i]]
        found = apply(opcode, result, *zip(names, columns))
        for lane in range(32):
            numbers = [as_type(column[lane], name) for column, name in zip(columns, names)]
            want = function(*numbers) % (1 << int(result[1:]))
            assert found[lane] == want, (opcode, numbers, found[lane], want)


def unmodelled(opcode: str, *operands: Any) -> None:
    with pytest.raises(Unmodelled):
        translate(Instruction(opcode, operands, 1))


def clamp(x: int, type: str) -> int:
    width = int(type[1:])
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if type[0] == "s" else (0, (1 << width) - 1)
    return min(max(x, low), high)


# --- integer arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", INTEGERS)
def test_sums_and_extremes(type: str) -> None:
    both = f"{type} {type}"
    check(f"add.{type}", type, both, lambda a, b: a + b)
    check(f"sub.{type}", type, both, lambda a, b: a - b)
    check(f"min.{type}", type, both, min)
    check(f"max.{type}", type, both, max)
    check(f"sad.{type}", type, f"{both} {type}", lambda a, b, c: c + abs(a - b))
    if type[0] == "s":
        check(f"abs.{type}", type, type, abs)
        check(f"neg.{type}", type, type, lambda a: -a)


def test_saturation_and_relu() -> None:
    check("add.sat.s32", "s32", "s32 s32", lambda a, b: clamp(a + b, "s32"))
    check("sub.sat.s32", "s32", "s32 s32", lambda a, b: clamp(a - b, "s32"))
    check("min.relu.s32", "s32", "s32 s32", lambda a, b: max(min(a, b), 0))
    check("max.relu.s32", "s32", "s32 s32", lambda a, b: max(a, b, 0))
    check("mad.hi.sat.s32", "s32", "s32 s32 s32", lambda a, b, c: clamp((a * b >> 32) + c, "s32"))


@pytest.mark.parametrize("type", INTEGERS)
def test_products(type: str) -> None:
    width = int(type[1:])
    both, three = f"{type} {type}", f"{type} {type} {type}"
    check(f"mul.lo.{type}", type, both, lambda a, b: a * b)
    check(f"mul.hi.{type}", type, both, lambda a, b: a * b >> width)
    check(f"mad.lo.{type}", type, three, lambda a, b, c: a * b + c)
    check(f"mad.hi.{type}", type, three, lambda a, b, c: (a * b >> width) + c)
    if width < 64:
        wide = f"{type[0]}{2 * width}"
        check(f"mul.wide.{type}", wide, both, lambda a, b: a * b)
        check(f"mad.wide.{type}", wide, f"{both} {wide}", lambda a, b, c: a * b + c)


@pytest.mark.parametrize("type", ["u32", "s32"])
def test_products_of_24_bits(type: str) -> None:
    def cut(x: int) -> int:
        return signed(x, 24) if type == "s32" else x % (1 << 24)

    check(f"mul24.lo.{type}", type, f"{type} {type}", lambda a, b: cut(a) * cut(b))
    check(f"mul24.hi.{type}", type, f"{type} {type}", lambda a, b: cut(a) * cut(b) >> 16)
    three = f"{type} {type} {type}"
    check(f"mad24.lo.{type}", type, three, lambda a, b, c: cut(a) * cut(b) + c)
    check(f"mad24.hi.{type}", type, three, lambda a, b, c: (cut(a) * cut(b) >> 16) + c)
    if type == "s32":

        def saturating(a: int, b: int, c: int) -> int:
            return clamp(signed(cut(a) * cut(b) >> 16, 32) + c, "s32")

        check("mad24.hi.sat.s32", type, three, saturating)


@pytest.mark.parametrize("type", INTEGERS)
def test_division_truncates(type: str) -> None:
    def quotient(a: int, b: int) -> int:
        if b == 0:
            return -1  # open in the ISA; what Nvidia's routine gives
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    check(f"div.{type}", type, f"{type} {type}", quotient)
    check(f"rem.{type}", type, f"{type} {type}", lambda a, b: a - b * quotient(a, b) if b else a)


def test_pairs_of_halves() -> None:
    def halves(function: Callable[[int, int], int], kind: str) -> Callable[[int, int], int]:
        def both(a: int, b: int) -> int:
            low, high = (
                function(as_type(a >> s, f"{kind}16"), as_type(b >> s, f"{kind}16")) % 65536 for s in (0, 16)
            )
            return high << 16 | low

        return both

    for kind in "us":
        check(f"add.{kind}16x2", "b32", "b32 b32", halves(lambda a, b: a + b, kind))
        check(f"min.{kind}16x2", "b32", "b32 b32", halves(min, kind))
        check(f"max.{kind}16x2", "b32", "b32 b32", halves(max, kind))
    check("min.relu.s16x2", "b32", "b32 b32", halves(lambda a, b: max(min(a, b), 0), "s"))
    check("max.relu.s16x2", "b32", "b32 b32", halves(lambda a, b: max(a, b, 0), "s"))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", "us")
def test_carries(bits: int, kind: str) -> None:
    """Sums, differences and products of four words, made of instructions on one word."""
    type, count = f"{kind}{bits}", 4
    warp = machine().warps[0]
    rows = [[words(bits) for _ in range(count)] for _ in range(2)]
    index = iter(range(1, 30))
    a, b, c = ([reg(f"b{bits}", next(index)) for _ in range(count)] for _ in range(3))
    for registers, columns in zip((a, b), rows):
        for register, column in zip(registers, columns):
            fill(warp, register.type, register.index, column)

    def whole(columns: list[list[int]], lane: int) -> int:
        return sum(column[lane] << bits * i for i, column in enumerate(columns))

    for name, function in (("add", int.__add__), ("sub", int.__sub__)):
        for i in range(count):
            opcode = name + ("c" if i else "") + (".cc" if i < count - 1 else "") + f".{type}"
            execute(warp, opcode, c[i], a[i], b[i])
        got = [held(warp, r.type, r.index) for r in c]
        for lane in range(32):
            want = function(whole(rows[0], lane), whole(rows[1], lane)) % (1 << bits * count)
            assert whole(got, lane) == want, name


def test_a_product_of_two_words_each() -> None:
    """The ISA's own example of madc: [c3 c2 c1 c0] = [a1 a0] * [b1 b0]."""
    warp = machine().warps[0]
    rows = [words(32) for _ in range(4)]
    a0, a1, b0, b1, c0, c1, c2, c3 = (reg("u32", i) for i in range(8))
    for i, row in enumerate(rows):
        fill(warp, "u32", i, row)
    zero = Imm(0)
    for opcode, operands in (
        ("mul.lo.u32", (c0, a0, b0)),
        ("mul.hi.u32", (c1, a0, b0)),
        ("mad.lo.cc.u32", (c1, a1, b0, c1)),
        ("madc.hi.u32", (c2, a1, b0, zero)),
        ("mad.lo.cc.u32", (c1, a0, b1, c1)),
        ("madc.hi.cc.u32", (c2, a0, b1, c2)),
        ("addc.u32", (c3, zero, zero)),
        ("mad.lo.cc.u32", (c2, a1, b1, c2)),
        ("madc.hi.u32", (c3, a1, b1, c3)),
    ):
        execute(warp, opcode, *operands)
    got = [held(warp, "u32", 4 + i) for i in range(4)]
    for lane in range(32):
        want = (rows[1][lane] << 32 | rows[0][lane]) * (rows[3][lane] << 32 | rows[2][lane])
        assert sum(column[lane] << 32 * i for i, column in enumerate(got)) == want


def test_carry_of_lanes_outside_the_mask_stays() -> None:
    warp = machine().warps[0]
    fill(warp, "u32", 1, [2**32 - 1] * 32)
    execute(warp, "add.cc.u32", reg("u32", 0), reg("u32", 1), Imm(1))
    mask = np.arange(32) < 16
    execute(warp, "add.cc.u32", reg("u32", 0), Imm(1), Imm(1), mask=mask)
    execute(warp, "addc.u32", reg("u32", 0), Imm(0), Imm(0))
    assert held(warp, "u32", 0) == [0] * 16 + [1] * 16


def test_byte_dot_products() -> None:
    def parts(x: int, kind: str, width: int) -> list[int]:
        return [as_type(x >> s, f"{kind}{width}") for s in range(0, 32, width)]

    for p, q in ("uu", "us", "su", "ss"):

        def four(a: int, b: int, c: int) -> int:
            return c + sum(x * y for x, y in zip(parts(a, p, 8), parts(b, q, 8)))  # noqa: B023

        check(f"dp4a.{p}32.{q}32", "b32", "u32 u32 u32", four)
        for mode, start in (("lo", 0), ("hi", 2)):

            def two(a: int, b: int, c: int) -> int:
                return c + sum(x * y for x, y in zip(parts(a, p, 16), parts(b, q, 8)[start:]))  # noqa: B023

            check(f"dp2a.{mode}.{p}32.{q}32", "b32", "u32 u32 u32", two)


# --- bit fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 64])
def test_counts_and_reversal(bits: int) -> None:
    source = f"u{bits}"
    check(f"popc.b{bits}", "u32", source, lambda a: a.bit_count())
    check(f"clz.b{bits}", "u32", source, lambda a: bits - a.bit_length())
    check(f"brev.b{bits}", source, source, lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    for kind in "us":

        def found(a: int, amount: bool) -> int:
            position = (~a if a < 0 else a).bit_length() - 1
            return position if position < 0 or not amount else bits - 1 - position

        check(f"bfind.{kind}{bits}", "u32", f"{kind}{bits}", lambda a: found(a, False))
        check(f"bfind.shiftamt.{kind}{bits}", "u32", f"{kind}{bits}", lambda a: found(a, True))


@pytest.mark.parametrize("type", WORDS)
def test_field_extraction(type: str) -> None:
    width = int(type[1:])

    def extract(a: int, b: int, c: int) -> int:
        start, length, msb = b & 255, c & 255, width - 1
        a %= 1 << width
        sign = 0 if type[0] == "u" or not length else a >> min(start + length - 1, msb) & 1
        got = [(a >> start + i & 1) if i < length and start + i <= msb else sign for i in range(width)]
        return sum(bit << i for i, bit in enumerate(got))

    check(f"bfe.{type}", type, f"{type} u32 u32", extract)
    check(f"bfe.{type}", type, f"{type} u32 u32", extract, 0, width + 4, width + 4)


@pytest.mark.parametrize("bits", [32, 64])
def test_field_insertion(bits: int) -> None:
    def insert(a: int, b: int, c: int, d: int) -> int:
        start, length = c & 255, d & 255
        for i in range(length):
            if start + i < bits:
                b = b & ~(1 << start + i) | (a >> i & 1) << start + i
        return b

    check(f"bfi.b{bits}", f"u{bits}", f"u{bits} u{bits} u32 u32", insert)
    check(f"bfi.b{bits}", f"u{bits}", f"u{bits} u{bits} u32 u32", insert, 0, 0, bits + 4, bits + 4)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_masks_and_extension(mode: str) -> None:
    def mask(a: int, b: int) -> int:
        if mode == "clamp":
            return 0 if a >= 32 else ((1 << min(b, 32)) - 1) << a
        return ((1 << b % 32) - 1) << a % 32

    def extend(a: int, b: int, kind: str) -> int:
        count = min(b, 32) if mode == "clamp" else b % 32
        low = a % (1 << count)
        return signed(low, count) if kind == "s" and count else low

    check(f"bmsk.{mode}.b32", "u32", "u32 u32", mask)
    check(f"bmsk.{mode}.b32", "u32", "u32 u32", mask, 40, 40)
    for kind in "us":
        check(f"szext.{mode}.{kind}32", "u32", "u32 u32", lambda a, b, k=kind: extend(a, b, k), 0, 40)
        check(f"szext.{mode}.{kind}32", "u32", "u32 u32", lambda a, b, k=kind: extend(a, b, k))


def test_nth_set_bit() -> None:
    def find(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else -1
        position, count = base, abs(offset) - 1
        while 0 <= position < 32:
            if mask >> position & 1:
                if count == 0:
                    return position
                count -= 1
            position += 1 if offset > 0 else -1
        return -1

    check("fns.b32", "u32", "u32 u32 s32", find, 0, 32, 5)
    check("fns.b32", "u32", "u32 u32 s32", find, 0, 32)
    columns = [words(32), [v % 32 for v in words(32)], [(v % 12) - 6 for v in words(32)]]
    got = apply("fns.b32", "u32", *zip(("u32", "u32", "s32"), columns))
    assert got == [find(*row) % 2**32 for row in zip(*columns)]


# --- logic and shifts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits: int) -> None:
    type = f"u{bits}"
    check(f"and.b{bits}", type, f"{type} {type}", lambda a, b: a & b)
    check(f"or.b{bits}", type, f"{type} {type}", lambda a, b: a | b)
    check(f"xor.b{bits}", type, f"{type} {type}", lambda a, b: a ^ b)
    check(f"not.b{bits}", type, type, lambda a: ~a)
    check(f"cnot.b{bits}", type, type, lambda a: a == 0)
    for limits in ((), (0, bits + 3)):
        check(f"shl.b{bits}", type, f"{type} u32", lambda a, b: a << min(b, bits), *limits)
        check(f"shr.b{bits}", type, f"{type} u32", lambda a, b: a >> min(b, bits), *limits)
        check(f"shr.u{bits}", type, f"{type} u32", lambda a, b: a >> min(b, bits), *limits)
        check(f"shr.s{bits}", f"s{bits}", f"s{bits} u32", lambda a, b: a >> min(b, bits), *limits)
    for amount in (0, 3, bits - 1, bits, bits + 7, 2**32 - 1):
        values = words(bits)
        got = apply(f"shr.s{bits}", type, (f"s{bits}", values), Imm(amount))
        assert got == [(signed(v, bits) >> min(amount, bits)) % (1 << bits) for v in values]
        got = apply(f"shl.b{bits}", type, (type, values), Imm(amount))
        assert got == [(v << min(amount, bits)) % (1 << bits) for v in values]


def test_logic_of_predicates() -> None:
    p, q = ([bool(x) for x in np.random.rand(32) < 0.5] for _ in range(2))
    for name, function in (("and", bool.__and__), ("or", bool.__or__), ("xor", bool.__xor__)):
        assert apply(f"{name}.pred", "pred", ("pred", p), ("pred", q)) == [function(*x) for x in zip(p, q)]
    assert apply("not.pred", "pred", ("pred", p)) == [not x for x in p]


@pytest.mark.parametrize("table", [0x00, 0x80, 0x40, 0xFE, 0x1A, 0x96, 0xFF, 0xE8])
def test_three_input_logic(table: int) -> None:
    rows = [words(32) for _ in range(3)]

    def look(a: int, b: int, c: int) -> int:
        return sum(
            (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
        )

    want = [look(*row) for row in zip(*rows)]
    sources = [("b32", row) for row in rows]
    assert apply("lop3.b32", "b32", *sources, Imm(table)) == want
    q = [bool(x) for x in np.random.rand(32) < 0.5]
    for name in ("or", "and"):
        d, p = apply(f"lop3.{name}.b32", ("b32", "pred"), *sources, Imm(table), ("pred", q))
        assert d == want
        assert p == [(x != 0) | y if name == "or" else (x != 0) & y for x, y in zip(want, q)]


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts(mode: str) -> None:
    def amount(c: int) -> int:
        return min(c, 32) if mode == "clamp" else c % 32

    def left(a: int, b: int, c: int) -> int:
        return (b << 32 | a) << amount(c) >> 32

    def right(a: int, b: int, c: int) -> int:
        return (b << 32 | a) >> amount(c)

    for limits in ((), (0, 0, 40)):
        check(f"shf.l.{mode}.b32", "u32", "u32 u32 u32", left, *limits)
        check(f"shf.r.{mode}.b32", "u32", "u32 u32 u32", right, *limits)


# selector c[1:0] and the source bytes of d.b3 ... d.b0, from PTX ISA 9.7.9.7
PERMUTATIONS = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


def test_byte_permutation() -> None:
    def pick(a: int, b: int, sources: list[int]) -> int:
        octets = (b << 32 | a).to_bytes(8, "little")
        got = [octets[s & 7] if s < 8 else 255 * (octets[s & 7] >> 7) for s in sources]
        return int.from_bytes(bytes(got), "little")

    def generic(a: int, b: int, c: int) -> int:
        return pick(a, b, [c >> s & 15 for s in (0, 4, 8, 12)])

    check("prmt.b32", "u32", "u32 u32 u32", generic)
    for mode, rows in PERMUTATIONS.items():
        chosen = [[int(x) for x in row[::-1]] for row in rows]
        check(f"prmt.b32.{mode}", "u32", "u32 u32 u32", lambda a, b, c, of=chosen: pick(a, b, of[c & 3]))
    for selector in (0x5410, 0x7632, 0x0123, 0x9FB8, np.random.randint(1 << 16)):
        a, b = words(32), words(32)
        got = apply("prmt.b32", "u32", ("u32", a), ("u32", b), Imm(int(selector)))
        assert got == [generic(x, y, int(selector)) for x, y in zip(a, b)]


def test_what_is_not_known_is_refused() -> None:
    r, d, h = reg("b32", 1), reg("b64", 1), reg("b16", 1)
    for opcode, operands in (
        ("min.s32", (r, r, r, r)),
        ("add.sat.u32", (r, r, r)),
        ("add.s8x4", (r, r, r)),
        ("add.nonsense.s32", (r, r, r)),
        ("mul.s32", (r, r, r)),
        ("mul.wide.s64", (d, d, d)),
        ("shl.s32", (r, r, r)),
        ("shf.l.b32", (r, r, r, r)),
        ("and.b32", (r, r, h)),
        ("popc.b16", (r, h)),
        ("bfe.b32", (r, r, r, r)),
        ("lop3.b32", (r, r, r, r, r)),
    ):
        with pytest.raises(Unmodelled):
            translate(Instruction(opcode, operands, 1))
