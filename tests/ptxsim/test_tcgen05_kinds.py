"""tcgen05.mma of every kind, as compiled kernels issue it, against products in float64.

The formats are decoded here from their bits: sign, exponent, fraction.
"""

from __future__ import annotations

import numpy as np
import pytest
from matrix_unit import Product
from numpy.typing import NDArray

from ptxsim.isa.table import Unmodelled

Codes = NDArray[np.int64]
FLOATS = {
    "e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1),
    "tf32": (8, 10, 127), "f16": (5, 10, 15), "bf16": (8, 7, 127),
}  # fmt: skip
"""Bits of exponent and fraction, and the bias."""
NUMBERS = {"f16": {"f16": 0, "bf16": 1}, "tf32": {"tf32": 2}, "i8": {"u8": 0, "s8": 1}}
NUMBERS["f8f6f4"] = NUMBERS["mxf8f6f4"] = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
NUMBERS["mxf4"] = NUMBERS["mxf4nvf4"] = {"e2m1": 1}
"""Types in the instruction descriptor."""
DEPTH = {"f16": 16, "tf32": 8, "i8": 32, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


def width(type: str) -> int:
    return 8 if type[1:] == "8" else 1 + sum(FLOATS[type][:2])


def draw(type: str, shape: tuple[int, ...]) -> Codes:
    """Codes of finite numbers; those of 16 and 19 bits near 1, so that sums stay exact."""
    codes = np.random.randint(0, 1 << width(type), shape)
    if type not in FLOATS:
        return codes
    exponent, fraction, bias = FLOATS[type]
    if width(type) > 8:
        near = np.random.randint(bias - 2, bias + 3, shape) << fraction
        return np.random.randint(0, 2, shape) << (exponent + fraction) | near | codes & 0xF << (fraction - 4)
    special = {"e4m3": 0x7F, "e5m2": 0x7C}.get(type)
    return codes if special is None else np.where(codes & 0x7F >= special, codes & 0x80, codes)


def value(type: str, codes: Codes) -> NDArray[np.float64]:
    if type == "u8":
        return codes.astype(np.float64)
    if type == "s8":
        return np.where(codes >= 128, codes - 256, codes).astype(np.float64)
    exponent, fraction, bias = FLOATS[type]
    e, f = codes >> fraction & (1 << exponent) - 1, codes & (1 << fraction) - 1
    normal, tiny = (1 + f / 2.0**fraction) * 2.0 ** (e - bias), f / 2.0**fraction * 2.0 ** (1 - bias)
    magnitude = np.where(e > 0, normal, tiny)
    return np.where(codes >> (exponent + fraction) & 1, -magnitude, magnitude)


def rows(kind: str, type: str, codes: Codes, in_tensor: bool = False) -> NDArray[np.uint8]:
    """32 bytes of each row, as the ISA packs elements in shared memory, or in tensor memory."""
    found = np.zeros((len(codes), 32), np.uint8)
    for r, row in enumerate(codes.tolist()):
        if kind.startswith("mxf4"):
            whole = sum(code << 4 * i for i, code in enumerate(row))
        elif width(type) in (4, 6) and in_tensor:
            whole = sum(code << (8 * i + (2 if width(type) == 4 else 0)) for i, code in enumerate(row))
        elif width(type) in (4, 6):
            whole = sum(code << (128 * (i // 16) + width(type) * (i % 16)) for i, code in enumerate(row))
        elif type == "tf32":
            whole = sum((code << 13 | 0x1ABC) << 32 * i for i, code in enumerate(row))
        else:
            whole = sum(code << width(type) * i for i, code in enumerate(row))
        found[r] = np.frombuffer(whole.to_bytes(32, "little"), np.uint8)
    return found


def shape(kind: str, types: tuple[str, str], m: int, n: int) -> int:
    a, b = (NUMBERS[kind][type] for type in types)
    sums = 0 if kind.startswith("mx") else (2 if kind == "i8" else 1) << 4
    return m >> 4 << 24 | n >> 3 << 17 | b << 10 | a << 7 | sums


PLAIN = (
    ("tf32", "tf32", "tf32"),
    ("i8", "u8", "s8"),
    ("f8f6f4", "e4m3", "e5m2"),
    ("f8f6f4", "e2m3", "e3m2"),
    ("f8f6f4", "e2m1", "e4m3"),
    ("f8f6f4", "e3m2", "e2m1"),
    ("f16", "bf16", "bf16"),
)


@pytest.mark.parametrize("a_in_tensor", (False, True), ids=("shared", "tensor"))
@pytest.mark.parametrize(("kind", "a", "b"), PLAIN)
def test_kinds(kind: str, a: str, b: str, a_in_tensor: bool) -> None:
    left, right = draw(a, (128, DEPTH[kind])), draw(b, (64, DEPTH[kind]))
    opcode = f"tcgen05.mma.cta_group::1.kind::{kind}.collector::a::discard"
    product = Product(
        opcode, shape(kind, (a, b), 128, 64), rows(kind, a, left, a_in_tensor), rows(kind, b, right),
        a_in_tensor=a_in_tensor,
    )  # fmt: skip
    found, result = product.run()
    assert not result.findings
    expected = 2 * value(a, left) @ value(b, right).T
    kept = found.view(np.int32) if kind == "i8" else found.view(np.float32)
    near = 2.0**-20 * (np.abs(value(a, left)) @ np.abs(value(b, right)).T)
    assert (np.abs(kept - expected) <= (0 if kind == "i8" else near)).all()


def place(m: int, n: int, row: int, column: int) -> tuple[int, int]:
    """Lane and column of d[row, column] of tcgen05.mma.ws: layouts E, G and of 128 rows."""
    each = n * m // 128
    return row + m * (column // each), column % each


@pytest.mark.parametrize("a_in_tensor", (False, True), ids=("shared", "tensor"))
@pytest.mark.parametrize("m", (32, 64, 128))
def test_weight_stationary(m: int, a_in_tensor: bool) -> None:
    left, right = draw("bf16", (m, 16)), draw("bf16", (64, 16))
    stored = rows("f16", "bf16", left)
    product = Product(
        "tcgen05.mma.ws.cta_group::1.kind::f16.collector::b1::fill",
        shape("f16", ("bf16", "bf16"), m, 64),
        np.tile(stored, (128 // m, 1)) if a_in_tensor else stored,
        rows("f16", "bf16", right),
        a_in_tensor=a_in_tensor,
        columns=64 * m // 128,
    )
    found, result = product.run()
    assert not result.findings
    expected = 2 * value("bf16", left) @ value("bf16", right).T
    for row in range(m):
        for column in range(64):
            lane, at = place(m, 64, row, column)
            assert found.view(np.float32)[lane, at] == expected[row, column]


SCALED = (
    ("mxf8f6f4", "e4m3", "e2m1", "", 32),
    ("mxf8f6f4", "e2m3", "e5m2", ".block32", 32),
    ("mxf8f6f4", "e3m2", "e4m3", ".scale_vec::1X", 32),
    ("mxf4", "e2m1", "e2m1", "", 32),
    ("mxf4", "e2m1", "e2m1", ".scale_vec::2X", 32),
    ("mxf4nvf4", "e2m1", "e2m1", ".block16", 16),
    ("mxf4nvf4", "e2m1", "e2m1", ".scale_vec::2X", 32),
)


@pytest.mark.parametrize(("kind", "a", "b", "blocks", "size"), SCALED)
def test_block_scaling(kind: str, a: str, b: str, blocks: str, size: int) -> None:
    """Scale factors of another byte of their column for A than for B, where a cell has several."""
    m, n, k = 128, 96, DEPTH[kind]
    count = k // size
    left, right = draw(a, (m, k)), draw(b, (n, k))
    first, second = (4 - count, 0)
    tables, factors = [], []
    for lines, byte in ((m, first), (n, second)):
        codes = (
            np.random.randint(100, 140, (lines, count)) if size == 32 else draw("e4m3", (lines, count)) & 0x7F
        )
        factors.append(2.0 ** (codes - 127.0) if size == 32 else value("e4m3", codes))
        table = np.full((32, 4, 4), 0xFF, np.uint8)
        for line in range(lines):
            table[line % 32, line // 32, byte : byte + count] = codes[line]
        tables.append(table.reshape(32, 16))
    bits = shape(kind, (a, b), m, n) | (size == 32) << 23 | first << 29 | second << 4
    opcode = f"tcgen05.mma.cta_group::1.kind::{kind}.block_scale{blocks}"
    product = Product(opcode, bits, rows(kind, a, left), rows(kind, b, right), tuple(tables), columns=96)
    found, result = product.run("late", 1)
    assert not result.findings
    of_a, of_b = (x.repeat(size, axis=1) for x in factors)
    one, other = value(a, left) * of_a, value(b, right) * of_b
    near = 2.0**-21 * (np.abs(one) @ np.abs(other).T)
    assert (np.abs(found.view(np.float32) - 2 * one @ other.T) <= near).all()


def test_scaled_accumulator() -> None:
    """scale-input-d: the second product is added to an eighth of the first."""
    left, right = draw("f16", (128, 16)), draw("f16", (64, 16))
    head = "    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r9], %rd9, %rd10, %r17"
    product = Product(
        "", shape("f16", ("f16", "f16"), 128, 64), rows("f16", "f16", left), rows("f16", "f16", right),
        statements=f"{head}, %p4;\n{head}, {{0, 0, 0, 0}}, %p5, 3;",
    )  # fmt: skip
    found, _ = product.run()
    assert np.array_equal(found.view(np.float32), 1.125 * value("f16", left) @ value("f16", right).T)


@pytest.mark.parametrize(
    ("opcode", "why"),
    (
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale", "scale_vec::4X"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16", "block16"),
        ("tcgen05.mma.cta_group::1.kind::mxf4", "modifiers"),
        ("tcgen05.mma.ws.cta_group::2.kind::f16", "modifiers"),
        ("tcgen05.mma.cta_group::1.kind::f16.collector::b0::fill", "collector::b0::fill"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16", "sp"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift", "ashift"),
    ),
)
def test_what_is_not_known_is_named(opcode: str, why: str) -> None:
    scales = (np.zeros((32, 16), np.uint8),) * (2 if "block_scale" in opcode else 0)
    empty = np.zeros((128, 32), np.uint8)
    with pytest.raises(Unmodelled, match=why):
        Product(opcode, 0, empty, empty, scales).run()


@pytest.mark.parametrize(("format", "type"), (("b4x16_p64", "e2m1"), ("b6x16_p32", "e3m2")))
def test_copies_that_decompress(format: str, type: str) -> None:
    """tcgen05.cp of padded elements makes them an A that a product takes from tensor memory."""
    left, right = draw(type, (128, 32)), draw("e4m3", (64, 32))
    product = Product(
        "",
        shape("f8f6f4", (type, "e4m3"), 128, 64),
        rows("f8f6f4", type, left),
        rows("f8f6f4", "e4m3", right),
        statements=f"    @%p1 tcgen05.cp.cta_group::1.128x256b.b8x16.{format} [%r16], %rd9;\n"
        "    @%p1 tcgen05.mma.cta_group::1.kind::f8f6f4 [%r9], [%r16], %rd10, %r17, %p4;",
    )  # fmt: skip
    found, result = product.run("random", 3)
    assert not result.findings
    one, other = value(type, left), value("e4m3", right)
    near = 2.0**-21 * (np.abs(one) @ np.abs(other).T)
    assert (np.abs(found.view(np.float32) - one @ other.T) <= near).all()
