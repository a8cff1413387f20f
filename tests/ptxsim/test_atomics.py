"""atom and red against lanes that act one after the other, in plain Python and exact fractions."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from machine import at, execute, instruction, kinds, machine, reg, some_lanes, vector, written

from ptxsim.isa.table import Act, Unmodelled, translate
from ptxsim.ptx.nodes import Discard, Imm
from ptxsim.state.cta import Cluster
from ptxsim.state.window import RANK_SHIFT, SHARED_WINDOW
from ptxsim.watch.findings import Fault

LANES = range(32)
ADDRESS = reg("b64", 0)


# --- where things are ---------------------------------------------------------------------------------------


class Place:
    """64 cells of `size` bytes in global, shared or another CTA's shared memory."""

    def __init__(self, space: str, size: int) -> None:
        self.space, self.size = space, size
        self.cluster = machine(ctas=2)
        written(self.cluster, 0)
        written(self.cluster, 1)
        self.warp = self.cluster.ctas[0].warps[0]
        if space in ("global", "generic global"):
            self.kept = np.zeros(64 * size + 64, np.uint8)
            self.base = -(-self.kept.ctypes.data // 64) * 64
            self.bytes = self.kept[self.base - self.kept.ctypes.data :][: 64 * size]
        else:
            rank = 1 if space == "shared::cluster" else 0
            self.base = 128 + (rank << RANK_SHIFT) + (SHARED_WINDOW if space == "generic shared" else 0)
            self.bytes = self.cluster.ctas[rank].shared.data[128 : 128 + 64 * size]

    @property
    def modifier(self) -> str:
        return "" if self.space.startswith("generic") else f".{self.space}"

    def point(self, cells: Any) -> None:
        self.warp.u64[0][:] = [self.base + int(cell) * self.size for cell in cells]


SPACES = ["global", "generic global", "shared", "generic shared", "shared::cluster"]


def cells(how: str) -> Any:
    """Cell that each lane takes, of 64."""
    if how == "apart":
        return np.random.permutation(64)[:32]
    return np.full(32, np.random.randint(64)) if how == "one" else np.random.randint(0, 6, 32)


# --- integers -----------------------------------------------------------------------------------------------


def integer(op: str, kind: str, old: int, b: int, c: int) -> int:
    """All are unsigned bits; signed ones are ordered by their values."""
    bits = int(kind[1:])
    top = 1 << bits

    def value(x: int) -> int:
        return x - top if kind[0] == "s" and x >> (bits - 1) else x

    match op:
        case "add":
            return (old + b) % top
        case "min" | "max":
            return (min if op == "min" else max)(old, b, key=value)
        case "inc":
            return 0 if old >= b else old + 1
        case "dec":
            return b if old == 0 or old > b else old - 1
        case "exch":
            return b
        case "cas":
            return c if old == b else old
    return {"and": old & b, "or": old | b, "xor": old ^ b}[op]


INTEGER_FORMS = [(op, kind) for op in ("add", "min", "max") for kind in ("u32", "s32", "u64", "s64")]
INTEGER_FORMS += [(op, kind) for op in ("and", "or", "xor", "exch", "cas") for kind in ("b32", "b64")]
INTEGER_FORMS += [("inc", "u32"), ("dec", "u32"), ("cas", "b16")]


@pytest.mark.parametrize(("op", "kind"), INTEGER_FORMS)
@pytest.mark.parametrize("how", ["apart", "shared by some", "one"])
def test_integers(op: str, kind: str, how: str) -> None:
    size = int(kind[1:]) // 8
    place = Place(str(np.random.choice(SPACES)), size)
    warp, dtype = place.warp, np.dtype(f"u{size}")
    file = {2: warp.u16, 4: warp.u32, 8: warp.u64}[size]
    memory = place.bytes.view(dtype)
    small = op in ("inc", "dec", "cas")
    memory[:] = np.random.randint(0, 4 if small else 2**62, 64).astype(dtype)
    memory[:] |= np.random.randint(0, 1 if small else 2, 64).astype(dtype) << dtype.type(8 * size - 1)
    where, mask = cells(how), some_lanes()
    place.point(where)
    for i in (1, 2):
        file[i][:] = np.random.randint(0, 4 if small else 2**62, 32).astype(dtype)
    file[3][:] = 77
    want, found = [int(x) for x in memory], [77] * 32
    for lane in np.flatnonzero(mask):
        found[lane] = want[where[lane]]
        want[where[lane]] = integer(op, kind, found[lane], int(file[1][lane]), int(file[2][lane]))
    operands = [reg(kind, 3), at(ADDRESS), reg(kind, 1)] + ([reg(kind, 2)] if op == "cas" else [])
    execute(warp, f"atom{place.modifier}.{op}.{kind}", *operands, mask=mask)
    assert memory.tolist() == want
    assert file[3].tolist() == found
    assert kinds(place.cluster) == []
    if op not in ("exch", "cas"):
        execute(warp, f"red.release.gpu{place.modifier}.{op}.{kind}", *operands[1:], mask=mask)
        for lane in np.flatnonzero(mask):
            want[where[lane]] = integer(op, kind, want[where[lane]], int(file[1][lane]), 0)
        assert memory.tolist() == want


@pytest.mark.parametrize("op", ["exch", "cas"])
def test_128_bits(op: str) -> None:
    place, where = Place(str(np.random.choice(SPACES)), 16), cells("shared by some")
    warp, memory = place.warp, place.bytes.view(np.uint64).reshape(64, 2)
    memory[:] = np.random.randint(0, 2, (64, 2))
    place.point(where)
    for i in (1, 2):
        warp.u128[i][:] = np.random.randint(0, 2, (32, 2))
    want, found = [tuple(row) for row in memory.tolist()], []
    for lane in LANES:
        found.append(want[where[lane]])
        b, c = tuple(warp.u128[1][lane].tolist()), tuple(warp.u128[2][lane].tolist())
        want[where[lane]] = b if op == "exch" else c if found[-1] == b else found[-1]
    sources = [reg("b128", 1)] + ([reg("b128", 2)] if op == "cas" else [])
    execute(warp, f"atom{place.modifier}.{op}.b128", reg("b128", 3), at(ADDRESS), *sources)
    assert [tuple(row) for row in memory.tolist()] == want
    assert [tuple(row) for row in warp.u128[3].tolist()] == found


# --- floats -------------------------------------------------------------------------------------------------

FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def decoded(bits: int, kind: str) -> float:
    """Exactly: all formats fit in a double."""
    if kind == "bf16":
        return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
    code, letter = {"f16": ("<H", "<e"), "f32": ("<I", "<f"), "f64": ("<Q", "<d")}[kind]
    return float(struct.unpack(letter, struct.pack(code, bits))[0])


def rounded(value: Fraction, kind: str) -> int:
    """Bits of the nearest number, ties to even; an exact zero is positive."""
    exponents, fraction = FORMATS[kind]
    sign, magnitude = (1 if value < 0 else 0) << (exponents + fraction), abs(value)
    bias = (1 << (exponents - 1)) - 1
    if not magnitude:
        return 0
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, 1 - bias)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - fraction)
    code = round(magnitude / quantum) + ((exponent + bias - 1) << fraction)
    return sign | min(code, ((1 << exponents) - 1) << fraction)


def added(a: int, b: int, kind: str, flush: bool) -> int:
    exponents, fraction = FORMATS[kind]
    top = 1 << (exponents + fraction)

    def flushed(bits: int) -> int:
        return bits & top if flush and not bits & (top - 1) >> fraction << fraction else bits

    a, b = flushed(a), flushed(b)
    x, y = decoded(a, kind), decoded(b, kind)
    if math.isnan(x) or math.isnan(y) or (math.isinf(x) and x == -y):
        return {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}[kind]
    if math.isinf(x) or math.isinf(y):
        return a if math.isinf(x) else b
    if x == 0 and y == 0:
        return a & b
    return flushed(rounded(Fraction(x) + Fraction(y), kind))


def some_bits(kind: str, shape: Any) -> Any:
    """Numbers near each other, subnormal ones, huge ones and special ones."""
    exponents, fraction = FORMATS[kind]
    dtype = np.dtype(f"u{(exponents + fraction + 1) // 8}")
    top = 1 << (exponents + fraction)
    one, infinity = ((1 << (exponents - 1)) - 1) << fraction, ((1 << exponents) - 1) << fraction
    near = np.random.randint(one - (3 << fraction), one + (3 << fraction), shape, np.int64)
    picks = [near, np.random.randint(0, 2 << fraction, shape, np.int64), infinity - 1 - near % 16]
    if kind != "f64":
        picks.append(np.random.choice([infinity, infinity + 1, 0, one], shape))
    odds = [0.5, 0.3] + [0.2 / (len(picks) - 2)] * (len(picks) - 2)
    chosen = np.choose(np.random.choice(len(picks), shape, p=odds), picks)
    return (chosen.astype(np.uint64) | np.random.choice([0, top], shape).astype(np.uint64)).astype(dtype)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("space", SPACES)
def test_adding_floats(kind: str, space: str) -> None:
    place = Place(space, {"f32": 4, "f64": 8}.get(kind, 2))
    warp, file = place.warp, {2: place.warp.u16, 4: place.warp.u32, 8: place.warp.u64}[place.size]
    flush, noftz = kind == "f32" and "global" in space, ".noftz" if "16" in kind else ""
    for how in ("apart", "apart", "shared by some", "one"):
        memory = place.bytes.view(f"u{place.size}")
        memory[:], where = some_bits(kind, 64), cells(how)
        file[1][:] = some_bits(kind, 32)
        place.point(where)
        want, found = [int(x) for x in memory], []
        for lane in LANES:
            found.append(want[where[lane]])
            want[where[lane]] = added(want[where[lane]], int(file[1][lane]), kind, flush)
        execute(warp, f"atom{place.modifier}.add{noftz}.{kind}", reg(kind, 2), at(ADDRESS), reg(kind, 1))
        assert [hex(x) for x in memory.tolist()] == [hex(x) for x in want]
        assert file[2].tolist() == found


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("form", ["x2", "v2", "v4", "v8", "x2 v2", "x2 v4"])
def test_packed_and_vectors(op: str, kind: str, form: str) -> None:
    """Each element by itself. Zeros of different sign and NaN are left to units/reduction's own tests."""
    count = int(form[-1]) if "v" in form else 1
    type, each = (f"{kind}x2", 4) if "x2" in form else (kind, 2)
    if form == "x2" and op != "add":
        with pytest.raises(Unmodelled):
            translate(instruction(f"red.global.{op}.noftz.{type}", at(ADDRESS), reg(type, 1)))
        return
    place = Place("global", count * each)
    warp, file = place.warp, place.warp.u32 if each == 4 else place.warp.u16
    memory, where = place.bytes.view(np.uint16).reshape(64, -1), cells("shared by some")
    memory[:] = np.random.randint(1, 0x7000, memory.shape)
    given = np.random.randint(1, 0x7000, (32, memory.shape[1])).astype(np.uint16)
    for i in range(count):
        file[1 + i][:] = given.view(f"u{each}")[:, i]
    place.point(where)
    want, found = memory.tolist(), []
    for lane in LANES:
        old = want[where[lane]]
        found.append(old)
        pairs = zip(old, given[lane].tolist())
        if op == "add":
            want[where[lane]] = [added(a, b, kind, False) for a, b in pairs]
        else:
            want[where[lane]] = [(min if op == "min" else max)(a, b) for a, b in pairs]
    vectors = f".v{count}" if count > 1 else ""
    results = vector(type, *range(11, 11 + count)) if count > 1 else reg(type, 11)
    sources = vector(type, *range(1, 1 + count)) if count > 1 else reg(type, 1)
    execute(warp, f"atom.global{vectors}.{type}.{op}.noftz", results, at(ADDRESS), sources)
    assert memory.tolist() == want
    got = np.stack([file[11 + i] for i in range(count)], 1).view(np.uint16)
    assert got.tolist() == found


def test_vectors_of_f32() -> None:
    place = Place("global", 16)
    memory, warp = place.bytes.view(np.float32).reshape(64, 4), place.warp
    memory[:], where = np.random.randn(64, 4), cells("apart")
    for i in range(4):
        warp.f32[1 + i][:] = np.random.randn(32)
    want = memory.copy()
    for lane in LANES:
        for i in range(4):
            want[where[lane], i] += warp.f32[1 + i][lane]
    place.point(where)
    policy = reg("b64", 7)
    execute(warp, "red.global.add.L2::cache_hint.v4.f32", at(ADDRESS), vector("f32", 1, 2, 3, 4), policy)
    assert (memory == want).all()


# --- operands, order, findings ------------------------------------------------------------------------------


def test_literals_and_nowhere() -> None:
    place = Place("global", 4)
    place.bytes.view(np.int32)[:] = 5
    place.point(np.arange(32))
    execute(place.warp, "atom.acq_rel.gpu.global.add.s32", Discard(), at(ADDRESS), Imm(-7))
    assert place.bytes.view(np.int32).tolist() == [-2] * 32 + [5] * 32
    place.bytes.view(np.float32)[:] = 0.5
    execute(place.warp, "red.global.add.f32", at(ADDRESS), Imm(1.25))
    assert place.bytes.view(np.float32)[:32].tolist() == [1.75] * 32


def is_act(opcode: str, source: Any = None) -> tuple[bool, bool]:
    made = translate(instruction(opcode, reg("b32", 0), at(ADDRESS), source or reg("b32", 1)))
    return (isinstance(made, Act), isinstance(made, Act) and made.signals)


def test_which_let_other_warps_take_their_turn() -> None:
    assert is_act("atom.shared.add.u32") == (False, False)
    assert is_act("atom.relaxed.cta.shared::cta.add.u32") == (False, False)
    assert is_act("atom.release.cta.shared.add.u32") == (True, True)
    assert is_act("atom.global.add.u32") == (True, True)
    assert is_act("atom.add.u32") == (True, True)
    assert is_act("atom.acquire.gpu.global.exch.b32") == (True, False)
    assert is_act("atom.acquire.gpu.global.add.u32", Imm(0)) == (True, False)


def test_only_real_changes_count_as_progress() -> None:
    place = Place("global", 4)
    place.point(np.zeros(32, int))
    place.warp.u32[1][:], place.warp.u32[2][:] = 1, 2
    units, operands = place.cluster.units, [reg("b32", 0), at(ADDRESS), reg("b32", 1), reg("b32", 2)]
    before = units.landings
    execute(place.warp, "atom.global.cas.b32", *operands)
    assert units.landings == before
    place.bytes[:4] = 1, 0, 0, 0
    execute(place.warp, "atom.global.cas.b32", *operands)
    assert units.landings == before + 1


def two_warps() -> tuple[Cluster, Any, Any]:
    cluster = machine(threads=64)
    written(cluster)
    for warp in cluster.warps:
        warp.u32[0][:], warp.u32[1][:] = 128, 1
    return cluster, *cluster.warps


def test_updates_of_two_warps_do_not_race_with_each_other_but_with_plain_accesses() -> None:
    cluster, first, second = two_warps()
    update = ("red.shared.add.u32", at(reg("b32", 0)), reg("b32", 1))
    cluster.ctas[0].shared.data[128:132] = 0
    execute(first, *update, line=1)
    execute(second, *update, line=2)
    assert kinds(cluster) == []
    assert cluster.ctas[0].shared.data[128] == 64
    execute(first, "ld.shared.b32", reg("b32", 2), at(reg("b32", 0)), line=3)
    assert kinds(cluster) == ["race"]
    cluster, first, second = two_warps()
    execute(first, "st.shared.b32", at(reg("b32", 0)), reg("b32", 1), line=3)
    execute(second, *update, line=4)
    assert kinds(cluster) == ["race"]


def test_updating_what_nobody_wrote() -> None:
    cluster = machine()
    warp = cluster.warps[0]
    warp.u32[0][:] = 128
    execute(warp, "atom.shared.exch.b32", reg("b32", 2), at(reg("b32", 0)), Imm(3))
    assert kinds(cluster) == []
    warp.u32[0][:] = 256
    execute(warp, "red.shared.add.u32", at(reg("b32", 0)), Imm(3))
    assert kinds(cluster) == ["uninitialised"]


@pytest.mark.parametrize(
    ("address", "kind"), [(4096, "out of bounds"), (4090, "misaligned"), (1 << 25, "out of bounds")]
)
def test_bad_addresses(address: int, kind: str) -> None:
    warp = machine(ctas=2).warps[0]
    warp.u32[0][:] = address
    with pytest.raises(Fault) as caught:
        execute(warp, "red.shared::cluster.add.u32", at(reg("b32", 0)), Imm(3))
    assert caught.value.finding.kind == kind


@pytest.mark.parametrize(
    ("opcode", "operands"),
    [
        ("atom.shared.v2.f32.add", (vector("f32", 0, 1), at(ADDRESS), vector("f32", 2, 3))),
        ("atom.global.add.b32", (reg("b32", 1), at(ADDRESS), reg("b32", 2))),
        ("atom.global.min.f32", (reg("f32", 1), at(ADDRESS), reg("f32", 2))),
        ("atom.global.exch.b16", (reg("b16", 1), at(ADDRESS), reg("b16", 2))),
        ("atom.global.inc.u64", (reg("b64", 1), at(ADDRESS), reg("b64", 2))),
        ("atom.global.add.noftz.f32", (reg("f32", 1), at(ADDRESS), reg("f32", 2))),
        ("atom.global.nand.b32", (reg("b32", 1), at(ADDRESS), reg("b32", 2))),
        ("atom.global.cas.b32", (reg("b32", 1), at(ADDRESS), reg("b32", 2))),
        ("red.global.exch.b32", (at(ADDRESS), reg("b32", 2))),
        ("red.global.v8.f32.add", (at(ADDRESS), vector("f32", *range(8)))),
        ("red.global.v4.f32.add", (at(ADDRESS), vector("f32", *range(2)))),
        ("red.async.relaxed.cluster.add.u32", (at(ADDRESS), reg("b32", 2), at(ADDRESS))),
    ],
)
def test_what_is_not_modelled_raises(opcode: str, operands: Any) -> None:
    with pytest.raises(Unmodelled):
        translate(instruction(opcode, *operands))
