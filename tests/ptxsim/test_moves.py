"""Comparisons, selection, moves and addresses, against plain Python numbers lane by lane."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from exact import flush, sample, value
from lanes import apply, as_type, fill, held, signed, words
from machine import execute, machine, reg

from ptxsim.isa.table import Unmodelled, translate
from ptxsim.ptx.nodes import Discard, Imm, Instruction, Negated, Pair, Special, Symbol, Vector
from ptxsim.state.window import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW

INTEGERS = [f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64)]


# --- comparison and selection -------------------------------------------------------------------------------

ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def compare(name: str, a: Any, b: Any) -> bool:
    """Numbers by a comparison of integers, or of floats with NaN among them."""
    unordered = any(isinstance(x, float) and math.isnan(x) for x in (a, b))
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name in UNSIGNED:
        name = UNSIGNED[name]
    if name not in ORDERS:
        return unordered or ORDERS[name[:-1]](a, b)
    return not unordered and ORDERS[name](a, b)


@pytest.mark.parametrize("type", [*INTEGERS, "b16", "b32", "b64"])
def test_integer_comparisons(type: str) -> None:
    names = ["eq", "ne"] if type[0] == "b" else [*ORDERS, *(UNSIGNED if type[0] == "u" else ())]
    width = int(type[1:])
    kind = type.replace("b", "u")
    for name in names:
        a, b = words(width), words(width)
        b = [x if np.random.rand() < 0.3 else y for x, y in zip(a, b)]
        want = [compare(name, as_type(x, kind), as_type(y, kind)) for x, y in zip(a, b)]
        assert apply(f"setp.{name}.{type}", "pred", (type, a), (type, b)) == want
        true = [0xFFFFFFFF * x for x in want]
        assert apply(f"set.{name}.u32.{type}", "u32", (type, a), (type, b)) == true
        assert apply(f"set.{name}.f32.{type}", "f32", (type, a), (type, b)) == [0x3F800000 * x for x in want]


@pytest.mark.parametrize("type", ["f32", "f64", "f16", "bf16"])
def test_float_comparisons(type: str) -> None:
    names = [*ORDERS, *(f"{name}u" for name in ORDERS), "num", "nan"]
    for name in names:
        a, b = sample(type), sample(type)
        b = [x if np.random.rand() < 0.3 else y for x, y in zip(a, b)]
        kind = type if type in ("f32", "f64") else "b16"
        want = [compare(name, value(x, type), value(y, type)) for x, y in zip(a, b)]
        assert apply(f"setp.{name}.{type}", "pred", (kind, a), (kind, b)) == want, name
        if type in ("f32", "f16"):
            want = [
                compare(name, value(flush(x, type), type), value(flush(y, type), type)) for x, y in zip(a, b)
            ]
            assert apply(f"setp.{name}.ftz.{type}", "pred", (kind, a), (kind, b)) == want, name


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
def test_comparisons_combined(combine: str) -> None:
    join = {"and": bool.__and__, "or": bool.__or__, "xor": bool.__xor__}[combine]
    a, b = words(32), words(32)
    c = [bool(x) for x in np.random.rand(32) < 0.5]
    truth = [signed(x, 32) < signed(y, 32) for x, y in zip(a, b)]
    p, q = apply(f"setp.lt.{combine}.s32", ("pred", "pred"), ("s32", a), ("s32", b), ("pred", c))
    assert p == [join(x, y) for x, y in zip(truth, c)]
    assert q == [join(not x, y) for x, y in zip(truth, c)]
    inverted = Negated(reg("pred", 3))
    warp = machine().warps[0]
    fill(warp, "s32", 1, a)
    fill(warp, "s32", 2, b)
    fill(warp, "pred", 3, c)
    execute(warp, f"setp.lt.{combine}.s32", reg("pred", 0), reg("s32", 1), reg("s32", 2), inverted)
    assert held(warp, "pred", 0) == [join(x, not y) for x, y in zip(truth, c)]
    execute(warp, "setp.lt.s32", Pair(Discard(), reg("pred", 1)), reg("s32", 1), reg("s32", 2))
    assert held(warp, "pred", 1) == [not x for x in truth]
    got = apply(f"set.lt.{combine}.u32.s32", "u32", ("s32", a), ("s32", b), ("pred", c))
    assert got == [0xFFFFFFFF * join(x, y) for x, y in zip(truth, c)]


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_comparisons_of_pairs(type: str) -> None:
    rows = [[sample(type) for _ in range(2)] for _ in range(2)]
    a, b = ([high << 16 | low for low, high in zip(*row)] for row in rows)
    want = [
        [compare("le", value(x, type), value(y, type)) for x, y in zip(rows[0][half], rows[1][half])]
        for half in (0, 1)
    ]
    assert apply(f"setp.le.{type}x2", ("pred", "pred"), ("b32", a), ("b32", b)) == want
    ones = {"f16": 0x3C00, "bf16": 0x3F80}[type]
    for result, true in ((f"{type}x2", ones), ("u32", 0xFFFF)):
        got = apply(f"set.le.{result}.{type}x2", "b32", ("b32", a), ("b32", b))
        assert got == [true * high << 16 | true * low for low, high in zip(*want)]


@pytest.mark.parametrize("type", ["b16", "u16", "s32", "f32", "b32", "f64", "b64"])
def test_selection(type: str) -> None:
    width = int(type[1:])
    a, b = words(width), words(width)
    p = [bool(x) for x in np.random.rand(32) < 0.5]
    assert apply(f"selp.{type}", type, (type, a), (type, b), ("pred", p)) == [
        x if y else z for x, y, z in zip(a, p, b)
    ]
    c = words(32)
    got = apply(f"slct.{type}.s32", type, (type, a), (type, b), ("s32", c))
    assert got == [x if signed(k, 32) >= 0 else y for x, y, k in zip(a, b, c)]
    c = sample("f32")
    got = apply(f"slct.{type}.f32", type, (type, a), (type, b), ("f32", c))
    assert got == [x if value(k, "f32") >= 0 else y for x, y, k in zip(a, b, c)]
    got = apply(f"slct.ftz.{type}.f32", type, (type, a), (type, b), ("f32", c))
    assert got == [x if value(flush(k, "f32"), "f32") >= 0 else y for x, y, k in zip(a, b, c)]


def test_selection_of_literals() -> None:
    p = [bool(x) for x in np.random.rand(32) < 0.5]
    b = words(32)
    got = apply("selp.f32", "b32", Imm(-math.inf), ("b32", b), ("pred", p))
    assert got == [0xFF800000 if x else y for x, y in zip(p, b)]
    assert apply("selp.b32", "b32", Imm(-1), Imm(0), ("pred", p)) == [0xFFFFFFFF * x for x in p]


# --- moves and addresses ------------------------------------------------------------------------------------


def test_moves() -> None:
    for type in ("b16", "u32", "f32", "s64", "f64"):
        values = words(int(type[1:]))
        assert apply(f"mov.{type}", type, (type, values)) == values
    assert apply("mov.b32", "b32", Imm(1.5)) == [0x3FC00000] * 32
    assert apply("mov.f64", "b64", Imm(-2.0)) == [0xC000000000000000] * 32
    assert apply("mov.b32", "b32", Imm(-8388608)) == [0xFF800000] * 32
    assert apply("mov.pred", "pred", Imm(-1)) == [True] * 32
    assert apply("mov.u32", "u32", Special("%laneid")) == list(range(32))
    assert apply("mov.u16", "u16", Special("%tid.x")) == list(range(32))
    assert apply("mov.b32", "b32", Symbol("buffer", 12)) == [256 + 12] * 32
    assert apply("mov.u64", "u64", Symbol("buffer")) == [256] * 32
    p = [bool(x) for x in np.random.rand(32) < 0.5]
    assert apply("mov.pred", "pred", ("pred", p)) == p


@pytest.mark.parametrize("whole, count", [(16, 2), (32, 2), (32, 4), (64, 2), (64, 4)])
def test_vectors(whole: int, count: int) -> None:
    each = whole // count
    items = [reg(f"b{each}", 1 + i) for i in range(count)]
    mask = np.arange(32) % 3 == 0
    for chosen in (None, mask):
        warp = machine().warps[0]
        columns = [words(each) for _ in range(count)]
        old = words(whole)
        for item, column in zip(items, columns):
            fill(warp, item.type, item.index, column)
        fill(warp, f"b{whole}", 20, old)
        execute(warp, f"mov.b{whole}", reg(f"b{whole}", 20), Vector(tuple(items)), mask=chosen)
        packed = [sum(v << each * i for i, v in enumerate(row)) for row in zip(*columns)]
        inside = [True] * 32 if chosen is None else list(chosen)
        assert held(warp, f"b{whole}", 20) == [x if m else y for x, y, m in zip(packed, old, inside)]
        source = words(whole)
        fill(warp, f"b{whole}", 21, source)
        execute(warp, f"mov.b{whole}", Vector((Discard(), *items[1:])), reg(f"b{whole}", 21), mask=chosen)
        assert held(warp, items[0].type, 1) == columns[0]
        for i in range(1, count):
            new = [x >> each * i & ((1 << each) - 1) for x in source]
            want = [x if m else y for x, y, m in zip(new, columns[i], inside)]
            assert held(warp, items[i].type, 1 + i) == want


def test_vectors_of_128_bits() -> None:
    warp, mask = machine().warps[0], np.arange(32) < 20
    columns = [words(64), words(64)]
    for i, column in enumerate(columns):
        fill(warp, "b64", i, column)
    q, pair = reg("b128", 1), Vector((reg("b64", 0), reg("b64", 1)))
    execute(warp, "mov.b128", q, pair, mask=mask)
    assert warp.u128[1][:20, 0].tolist() == columns[0][:20]
    assert warp.u128[1][:20, 1].tolist() == columns[1][:20]
    assert not warp.u128[1][20:].any()
    execute(warp, "mov.b128", reg("b128", 2), q)
    four = [reg("b32", i) for i in range(4)]
    execute(warp, "mov.b128", Vector(tuple(four)), reg("b128", 2))
    assert held(warp, "b32", 2)[:20] == [v & 0xFFFFFFFF for v in columns[1][:20]]
    assert held(warp, "b32", 1)[:20] == [v >> 32 for v in columns[0][:20]]
    execute(warp, "mov.b128", reg("b128", 3), Vector(tuple(four)))
    assert np.array_equal(warp.u128[3], warp.u128[1])


def test_generic_addresses() -> None:
    offsets = [int(x) for x in np.random.randint(0, 4096, 32)]
    generic = apply("cvta.shared.u64", "u64", ("u64", offsets))
    assert generic == [SHARED_WINDOW | x for x in offsets]
    assert apply("cvta.to.shared::cluster.u64", "u64", ("u64", generic)) == offsets
    local = apply("cvta.local.u64", "u64", ("u64", offsets))
    assert apply("cvta.to.local.u64", "u64", ("u64", local)) == offsets
    for space in ("global", "param", "param::entry", "const"):
        assert apply(f"cvta.{space}.u64", "u64", ("u64", offsets)) == offsets
        assert apply(f"cvta.to.{space}.u64", "u64", ("u64", offsets)) == offsets
    assert apply("cvta.shared.u64", "u64", Symbol("buffer", 4)) == [SHARED_WINDOW | 260] * 32
    assert set(local) == {LOCAL_WINDOW | x for x in offsets}


def test_which_space() -> None:
    addresses = [
        0x7F0000001000,
        LOCAL_WINDOW | 8,
        SHARED_WINDOW | 64,
        SHARED_WINDOW | 1 << RANK_SHIFT | 64,
    ] * 8
    for space, want in (
        ("global", [True, False, False, False]),
        ("local", [False, True, False, False]),
        ("shared", [False, False, True, False]),
        ("shared::cta", [False, False, True, False]),
    ):
        assert apply(f"isspacep.{space}", "pred", ("u64", addresses)) == want * 8
    warp = machine(ctas=2).warps[0]
    fill(warp, "u64", 1, addresses)
    execute(warp, "isspacep.shared::cluster", reg("pred", 0), reg("u64", 1))
    assert held(warp, "pred", 0) == [False, False, True, True] * 8


def test_what_is_not_known_is_refused() -> None:
    r, d, p = reg("b32", 1), reg("b64", 1), reg("pred", 1)
    for opcode, operands in (
        ("setp.lt.b32", (p, r, r)),
        ("setp.lo.s32", (p, r, r)),
        ("setp.eq.ne.s32", (p, r, r)),
        ("setp.eq.s32", (p, r, r, p)),
        ("setp.eq.f16", (Pair(p, p), reg("b16", 1), reg("b16", 2))),
        ("selp.pred", (p, p, p, p)),
        ("mov.b32", (r, d)),
        ("mov.b32", (r, Vector((r, r)))),
        ("mov.b32", (Vector((r, r)), Vector((r, r)))),
        ("mov.u32", (r, Special("%unheard_of"))),
        ("isspacep.param", (p, d)),
        ("cvta.shared.u32", (r, r)),
    ):
        with pytest.raises(Unmodelled):
            translate(Instruction(opcode, operands, 1))
