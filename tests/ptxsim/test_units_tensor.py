"""Tensor memory: transfers and copies lane by lane, and multiply-accumulates in every layout of D and A."""

from __future__ import annotations

import numpy as np
import pytest

from ptxsim.errors import InputError, UnsupportedError
from ptxsim.units import accumulators, tensor
from ptxsim.units.accumulators import Accumulator, Operation
from ptxsim.units.numbers import decode, encode

CELL = {
    "32x32b": lambda t, r: (t, r),
    "16x64b": lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
    "16x128b": lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
    "16x256b": lambda t, r: (t // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (t % 4) + 8 * (r // 4)),
    "16x32bx2": lambda t, r: (t % 16, r),
}
"""Lane and word of register r of thread t, from the figures of "Data Movement Shape"."""
PER_ACCESS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def cells() -> np.ndarray:
    return np.random.randint(0, 1 << 32, (128, 512), dtype=np.uint64).astype(np.uint32)


def test_addresses() -> None:
    assert tensor.split_address(96 << 16 | 511) == (96, 511)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("number", (1, 4, 32))
@pytest.mark.parametrize("shape", CELL)
def test_loads_and_stores_cell_by_cell(shape: str, number: int, packed: bool) -> None:
    split = int(np.random.randint(0, 100)) if shape == "16x32bx2" else None
    move = tensor.transfer(shape, number, packed, split)
    assert move.registers == PER_ACCESS[shape] * number
    lane = 32 * int(np.random.randint(4)) + (16 * int(np.random.randint(2)) if shape.startswith("16") else 0)
    column = int(np.random.randint(0, 513 - move.width - (split or 0)))
    memory = cells()
    new = np.random.randint(0, 1 << 32, (move.registers, 32), dtype=np.uint64).astype(np.uint32)
    expected, stored = np.zeros_like(new), memory.copy()
    touched = np.zeros((128, 512), bool)
    for t in range(32):
        for r in range(move.registers):
            row, word = CELL[shape](t, r)
            at = column + (2 if packed else 1) * word + (split if split is not None and t >= 16 else 0)
            if packed:
                low, high = (int(memory[lane + row, at + i]) & 0xFFFF for i in range(2))
                expected[r, t] = low | high << 16
                for i in range(2):
                    stored[lane + row, at + i] = (
                        int(stored[lane + row, at + i]) & 0xFFFF0000 | int(new[r, t]) >> 16 * i & 0xFFFF
                    )
                touched[lane + row, at : at + 2] = True
            else:
                expected[r, t] = memory[lane + row, at]
                stored[lane + row, at] = new[r, t]
                touched[lane + row, at] = True
    address = lane << 16 | column
    assert np.array_equal(move.load(memory, address), expected)
    listed = np.zeros_like(touched)
    for region in move.regions(address):
        listed[region.lanes, region.columns] = True
    assert np.array_equal(listed, touched)
    if split is None or split >= move.width:  # overlapping halves of a store would race
        move.store(memory, address, new)
        assert np.array_equal(memory, stored)


def test_transfers_that_are_refused() -> None:
    for arguments in (("16x256b", 64), ("32x32b", 3), ("16x32bx2", 2), ("32x32b", 2, False, 16)):
        with pytest.raises(InputError):
            tensor.transfer(*arguments)
    with pytest.raises(UnsupportedError, match="64x64b"):
        tensor.transfer("64x64b", 1)
    for address in (97 << 16, 500, 128 << 16):
        with pytest.raises(InputError, match="128 lanes and 512 columns"):
            tensor.transfer("32x32b", 16).load(cells(), address)


COPIES = {
    ("128x256b", None): (128, 8, lambda row: [row]),
    ("128x128b", None): (128, 4, lambda row: [row]),
    ("4x256b", None): (4, 8, lambda row: [32 * row]),
    ("64x128b", "warpx2::02_13"): (64, 4, lambda row: [row, row + 64]),
    ("64x128b", "warpx2::01_23"): (64, 4, lambda row: [row + 32 * (row // 32), row + 32 * (row // 32) + 32]),
    ("32x128b", "warpx4"): (32, 4, lambda row: [row, row + 32, row + 64, row + 96]),
}


@pytest.mark.parametrize(("shape", "multicast"), COPIES)
def test_copies_row_by_row(shape: str, multicast: str | None) -> None:
    rows, columns, lanes = COPIES[shape, multicast]
    copy = tensor.copy(shape, multicast)
    assert (copy.rows, copy.columns) == (rows, columns)
    source = np.random.randint(0, 1 << 32, (rows, columns), dtype=np.uint64).astype(np.uint32)
    memory = cells()
    expected, column = memory.copy(), int(np.random.randint(0, 500))
    for row in range(rows):
        for lane in lanes(row):
            expected[lane, column : column + columns] = source[row]
    copy.store(memory, column, source)
    assert np.array_equal(memory, expected)
    touched = {lane for row in range(rows) for lane in lanes(row)}
    listed = [lane for region in copy.regions(column) for lane in range(128)[region.lanes]]
    assert sorted(listed) == sorted(touched)


def test_copies_that_are_refused() -> None:
    for shape, multicast in (
        ("64x128b", None),
        ("32x128b", "warpx2::02_13"),
        ("128x128b", "b8x16.b6x16_p32"),
    ):
        with pytest.raises(UnsupportedError, match=r"tcgen05\.cp"):
            tensor.copy(shape, multicast)
    with pytest.raises(InputError, match="512 columns"):
        tensor.copy("128x128b").store(cells(), 509, np.zeros((128, 4), np.uint32))


# --- multiply-accumulate ------------------------------------------------------------------------------------


def place(m: int, n: int, cta_group: int, lane: int, row: int, column: int) -> tuple[int, int]:
    """Lane and column of d[row, column] of one CTA: layouts A, B, D, F of the ISA."""
    if (m, cta_group) == (64, 1):
        return 32 * (row // 16) + row % 16 + lane, column
    if (m, cta_group) == (128, 2):
        return row + 64 * (column // (n // 2)), column % (n // 2)
    return row, column


FORMS = ((128, 1, 0), (64, 1, 0), (64, 1, 16), (256, 2, 0), (128, 2, 0))


@pytest.mark.parametrize("type", ("f32", "f16", "s32"))
@pytest.mark.parametrize(("m", "cta_group", "lane"), FORMS)
def test_mma_in_every_layout(m: int, cta_group: int, lane: int, type: str) -> None:
    n, rows, column = 32, m // cta_group, int(np.random.randint(0, 480))
    a, b = (np.random.randint(-3, 4, shape).astype(np.float32) for shape in ((rows, 16), (n, 16)))
    old = np.random.randint(-9, 10, (rows, n))
    disabled = np.random.rand(128) < 0.1
    memory = cells()
    before = memory.copy()
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[type]
    d = Accumulator(lane << 16 | column, m, n, type, cta_group)
    d.write(memory, old.astype(dtype))
    accumulators.execute(memory, d, (a,), b, Operation(accumulate=True, disabled=disabled))
    expected = old + a @ b.T
    touched = np.zeros((128, 512), bool)
    for row in range(rows):
        for k in range(n):
            at, offset = place(m, n, cta_group, lane, row, k)
            cell = memory[at, column + offset : column + offset + 1]
            touched[at, column + offset] = True
            value = cell.view(dtype)[0]
            assert value == (old if disabled[at] else expected)[row, k]
            if type == "f16":
                assert cell[0] >> 16 == before[at, column + offset] >> 16, "the upper half is left alone"
    assert np.array_equal(memory[~touched], before[~touched])
    for region in d.regions():
        assert touched[region.lanes, region.columns].all()
        touched[region.lanes, region.columns] = False
    assert not touched.any()
    accumulators.execute(memory, d, (a,), b, Operation(accumulate=False))
    assert np.array_equal(d.read(memory), a @ b.T)


@pytest.mark.parametrize(("m", "cta_group", "lane"), FORMS)
def test_a_from_tensor_memory(m: int, cta_group: int, lane: int) -> None:
    rows, memory, column = m // cta_group, cells(), 100
    raw = encode("bf16", np.random.randn(2, rows, 16).astype(np.float32))
    for half in range(2):
        for row in range(rows):
            for k in range(16):
                at, _ = place(m, 2, cta_group, lane, row, half)
                shift, cell = 16 * (k % 2), int(memory[at, column + k // 2])
                memory[at, column + k // 2] = cell & ~(0xFFFF << shift) | int(raw[half, row, k]) << shift
    copies = accumulators.multiplicand(memory, lane << 16 | column, m, cta_group)
    duplicated = (m, cta_group) == (128, 2)
    assert len(copies) == (2 if duplicated else 1)
    for half, found in enumerate(copies):
        assert np.array_equal(np.ascontiguousarray(found).view(np.uint16), raw[half if duplicated else 1])
    a = tuple(decode("bf16", np.ascontiguousarray(found).view(np.uint16)) for found in copies)
    b = np.random.randn(32, 16).astype(np.float32)
    d = Accumulator(lane << 16 | 200, m, 32, "f32", cta_group)
    accumulators.execute(memory, d, a, b, Operation(accumulate=False))
    expected = a[0] @ b.T
    if duplicated:  # the upper half of the columns is computed from the second copy
        expected[:, 16:] = a[1] @ b[16:].T
    assert np.allclose(d.read(memory), expected, atol=1e-5)
    listed = sum(
        (r.lanes.stop - r.lanes.start) * 8
        for r in accumulators.multiplicand_regions(lane << 16, m, cta_group)
    )
    assert listed == rows * 8 * len(copies)


def test_mma_addresses_that_are_refused() -> None:
    for m, cta_group, lane in ((128, 1, 16), (64, 1, 32), (256, 2, 1), (96, 1, 0)):
        with pytest.raises(InputError):
            Accumulator(lane << 16, m, 64, "f32", cta_group).regions()
    with pytest.raises(InputError, match="512 columns"):
        Accumulator(480, 128, 64, "f32", 1).regions()
