"""Tensor maps that the compiler's host code made, and boxes against loops over single elements."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from ptxsim.errors import InputError, UnsupportedError
from ptxsim.units import swizzle, tma
from ptxsim.units.tensormap import TensorMap

A = 0x56317C0C0A80
NO_STRIDES = (0, 0, 0, 0)


def words(
    flags: int, strides: tuple[int, ...], high: int, dims: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """The 128 bytes of a descriptor at address A: as it was recorded, but for the address."""
    strides, dims, box = ((*given, *(0,) * (5 - len(given))) for given in (strides, dims, box))
    return (
        struct.pack("<Q12I", A, flags, *strides[:4], high, *dims[:5], 0)[:52]
        + bytes((0, 0, 0, *box))
        + bytes(68)
    )


RECORDED = {
    "bf16, no swizzle": (
        words(0x00040512, (0xC,), 0, (0x5F, 0x3F), (0x1F, 0x0F)),
        TensorMap(A, "bf16", (96, 64), (2, 192), (32, 16), swizzle.NONE),
    ),
    "128B": (
        words(0x00046512, (0xC,), 0, (0x5F, 0x3F), (0x3F, 0x07)),
        TensorMap(A, "bf16", (96, 64), (2, 192), (64, 8), swizzle.B128),
    ),
    "64B": (
        words(0x00044512, (0xC,), 0, (0x5F, 0x3F), (0x1F, 0x07)),
        TensorMap(A, "bf16", (96, 64), (2, 192), (32, 8), swizzle.B64),
    ),
    "32B": (
        words(0x00042512, (0xC,), 0, (0x5F, 0x3F), (0x0F, 0x07)),
        TensorMap(A, "bf16", (96, 64), (2, 192), (16, 8), swizzle.B32),
    ),
    "128B, 32B atoms": (
        words(0x000C6512, (0xC,), 0, (0x5F, 0x3F), (0x3F, 0x07)),
        TensorMap(A, "bf16", (96, 64), (2, 192), (64, 8), swizzle.B128_ATOM32),
    ),
    "128B, 64B atoms": (
        words(0x001C6512, (0xC,), 0, (0x5F, 0x3F), (0x3F, 0x07)),
        TensorMap(A, "bf16", (96, 64), (2, 192), (64, 8), swizzle.B128_ATOM64),
    ),
    "u8": (
        words(0x00040012, (6,), 0, (0x5F, 0x3F), (0x3F, 0x0F)),
        TensorMap(A, "u8", (96, 64), (1, 96), (64, 16), swizzle.NONE),
    ),
    "i16": (
        words(0x00040092, (0xC,), 0, (0x5F, 0x3F), (0x1F, 0x0F)),
        TensorMap(A, "u16", (96, 64), (2, 192), (32, 16), swizzle.NONE),
    ),
    "f16": (
        words(0x00040312, (0xC,), 0, (0x5F, 0x3F), (0x1F, 0x0F)),
        TensorMap(A, "f16", (96, 64), (2, 192), (32, 16), swizzle.NONE),
    ),
    "i32": (
        words(0x00040112, (0x18,), 0, (0x5F, 0x3F), (0x0F, 0x0F)),
        TensorMap(A, "u32", (96, 64), (4, 384), (16, 16), swizzle.NONE),
    ),
    "f32": (
        words(0x00040392, (0x18,), 0, (0x5F, 0x3F), (0x0F, 0x0F)),
        TensorMap(A, "f32", (96, 64), (4, 384), (16, 16), swizzle.NONE),
    ),
    "tf32": (
        words(0x00050392, (0x18,), 0, (0x5F, 0x3F), (0x0F, 0x0F)),
        TensorMap(A, "tf32", (96, 64), (4, 384), (16, 16), swizzle.NONE),
    ),
    "i64": (
        words(0x00040212, (0x30,), 0, (0x5F, 0x3F), (0x07, 0x0F)),
        TensorMap(A, "u64", (96, 64), (8, 768), (8, 16), swizzle.NONE),
    ),
    "f64": (
        words(0x00040492, (0x30,), 0, (0x5F, 0x3F), (0x07, 0x0F)),
        TensorMap(A, "f64", (96, 64), (8, 768), (8, 16), swizzle.NONE),
    ),
    "rank 4": (
        words(0x00040532, (4, 0x8C, 0x1C), 0, (0x1F, 6, 2, 4), (0x0F, 3)),
        TensorMap(A, "bf16", (32, 7, 3, 5), (2, 64, 2240, 448), (16, 4, 1, 1), swizzle.NONE),
    ),
    "rank 5": (
        words(0x00040542, (4, 0x1C, 0x1A4, 0x8C), 0, (0x1F, 6, 4, 1, 2), (0x0F, 3, 1)),
        TensorMap(A, "bf16", (32, 7, 5, 2, 3), (2, 64, 448, 6720, 2240), (16, 4, 2, 1, 1), swizzle.NONE),
    ),
    "beyond 128 KiB": (
        words(0x00240512, (0xC,), 0, (0x5F, 0x7CF), (0x1F, 0x0F)),
        TensorMap(A, "bf16", (96, 2000), (2, 192), (32, 16), swizzle.NONE),
    ),
    "a stride of 3 * 2**36 bytes": (
        words(0x00240322, (0x10, 0), 0x30, (0x3F, 2, 2), (0x1F, 1)),
        TensorMap(A, "f16", (64, 3, 3), (2, 256, 3 << 36), (32, 2, 1), swizzle.NONE),
    ),
    "the largest stride": (
        words(0x00240322, (0x10, 0xFFFFFFFE), 0xF0, (0x3F, 2, 2), (0x1F, 1)),
        TensorMap(A, "f16", (64, 3, 3), (2, 256, (1 << 40) - 32), (32, 2, 1), swizzle.NONE),
    ),
}
"""Descriptors that CuTe DSL 4.8.1 made for tensors of known shape, and what they describe."""


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_descriptors(name: str) -> None:
    descriptor, expected = RECORDED[name]
    assert TensorMap.decode(descriptor) == expected
    assert TensorMap.decode(expected.encode()) == expected
    without_hint = bytearray(descriptor)
    without_hint[10] &= 0xDF
    assert expected.encode() == bytes(without_hint)


FLAGS = 0x00040512


@pytest.mark.parametrize(
    ("change", "named"),
    (
        ((8, FLAGS ^ 3), "mode 1"),
        ((8, FLAGS | 1 << 11), "interleave"),
        ((8, FLAGS | 3 << 13 | 2 << 19), "atomicity 2"),
        ((8, FLAGS | 1 << 22), "flags"),
        ((8, FLAGS | 15 << 7), "element type 15"),
        ((8, FLAGS | 1 << 16), "element type 10"),
        ((60, 1), "bytes 60-63"),
    ),
)
def test_fields_that_are_not_modelled_are_named(change: tuple[int, int], named: str) -> None:
    descriptor = bytearray(RECORDED["bf16, no swizzle"][0])
    struct.pack_into("<I", descriptor, *change)
    with pytest.raises(UnsupportedError, match=named):
        TensorMap.decode(bytes(descriptor))


def test_what_the_isa_forbids() -> None:
    good = RECORDED["bf16, no swizzle"][1]
    for field in ({"box": (4, 16)}, {"address": A + 8}):
        with pytest.raises(InputError, match="a multiple of 16"):
            TensorMap.decode(TensorMap(**{**good.__dict__, **field}).encode())
    with pytest.raises(InputError, match="rank 6"):
        TensorMap.decode(words(FLAGS | 5 << 4, NO_STRIDES, 0, (0,), (0x1F,)))


# --- boxes --------------------------------------------------------------------------------------------------


class Memory:
    """Global memory: `size` random bytes at address A, all of it mapped."""

    def __init__(self, size: int) -> None:
        self.bytes = np.random.randint(0, 256, size).astype(np.uint8)

    def window(self, address: int, size: int) -> np.ndarray:
        assert address >= A and address + size <= A + len(self.bytes), "unmapped"
        return self.bytes[address - A :][:size]


def random_tensor() -> TensorMap:
    """A rank, element, box and strides with gaps, small enough to loop over."""
    rank = int(np.random.randint(1, 6))
    element, size = [("u8", 1), ("bf16", 2), ("f32", 4), ("u64", 8)][np.random.randint(4)]
    dims = tuple(int(d) for d in np.random.randint(1, 9, rank))
    inner = int(np.random.randint(1, 4)) * 16 // size
    dims = (int(np.random.randint(1, 64)), *dims[1:])
    strides, step = [size], dims[0] * size
    for dim in dims[1:]:
        step = -(-step // 16) * 16 + 16 * int(np.random.randint(0, 2))
        strides.append(step)
        step *= dim
    box = (inner, *(int(b) for b in np.random.randint(1, 5, rank - 1)))
    return TensorMap(A, element, dims, tuple(strides), box, swizzle.NONE)


def elements(tensor: TensorMap, at: tuple[int, ...]) -> Iterator[tuple[int, int | None]]:
    """For every element of the box in dense order: its offset there, and in the tensor or None outside, in
    bytes."""
    for place, index in enumerate(product(*(range(extent) for extent in reversed(tensor.box)))):
        coordinates = [c + i for c, i in zip(at, reversed(index))]
        inside = all(0 <= c < dim for c, dim in zip(coordinates, tensor.dims))
        source = sum(c * stride for c, stride in zip(coordinates, tensor.strides))
        yield place * tensor.bits // 8, source if inside else None


def span(tensor: TensorMap) -> int:
    return sum((dim - 1) * stride for dim, stride in zip(tensor.dims, tensor.strides)) + tensor.bits // 8


@pytest.mark.parametrize("case", range(25))
def test_loads_and_stores_element_by_element(case: int) -> None:
    tensor = random_tensor()
    at = tuple(int(np.random.randint(-box, dim + 1)) for box, dim in zip(tensor.box, tensor.dims))
    memory, size = Memory(span(tensor)), tensor.bits // 8
    before = memory.bytes.copy()
    expected = np.zeros(tensor.box_bytes, np.uint8)
    dense = np.random.randint(0, 256, tensor.box_bytes).astype(np.uint8)
    stored = before.copy()
    for place, source in elements(tensor, at):
        if source is not None:
            expected[place : place + size] = before[source : source + size]
            stored[source : source + size] = dense[place : place + size]
    loaded = tma.load_box(tensor, at, memory)
    assert np.array_equal(loaded, expected)
    loaded[:] = 0
    assert np.array_equal(memory.bytes, before), "the load must be a copy"
    tma.store_box(tensor, at, dense, memory)
    assert np.array_equal(memory.bytes, stored)


@pytest.mark.parametrize("case", range(10))
def test_rows_are_the_bytes_touched(case: int) -> None:
    tensor = random_tensor()
    at = tuple(int(np.random.randint(-2, dim + 1)) for dim in tensor.dims)
    starts, row = tma.box_at(tensor, at).rows()
    touched = {int(start) + i for start in starts for i in range(row)}
    sources = [source for _, source in elements(tensor, at) if source is not None]
    assert touched == {A + source + i for source in sources for i in range(tensor.bits // 8)}


def test_a_box_outside_touches_no_memory() -> None:
    tensor = TensorMap(A, "f32", (8, 8), (4, 32), (4, 4), swizzle.NONE)
    assert not tma.load_box(tensor, (-4, 0), Memory(0)).any()
    assert not tma.load_box(tensor, (0, 8), Memory(0)).any()
    tma.store_box(tensor, (8, 0), np.ones(64, np.uint8), Memory(0))


REDUCTIONS = {
    ("add", "u32"): lambda old, new: (old + new) % 2**32,
    ("add", "f32"): lambda old, new: float(np.float32(old) + np.float32(new)),
    ("min", "s32"): min,
    ("max", "u64"): max,
    ("max", "s64"): max,
    ("and", "u32"): lambda old, new: old & new,
    ("xor", "u64"): lambda old, new: old ^ new,
    ("or", "s32"): lambda old, new: old | new,
    ("inc", "u32"): lambda old, new: 0 if old >= new else old + 1,
    ("dec", "u32"): lambda old, new: new if old == 0 or old > new else old - 1,
    ("add", "f16"): lambda old, new: float(np.float16(old + new)),
    ("min", "f16"): min,
}


@pytest.mark.parametrize(("operation", "element"), REDUCTIONS)
def test_reductions(operation: str, element: str) -> None:
    dtype = np.dtype({"f": "f", "u": "u", "s": "i"}[element[0]] + str(int(element[1:]) // 8))
    per_row = 16 // dtype.itemsize
    tensor = TensorMap(A, element, (per_row, 8), (dtype.itemsize, 16), (per_row, 4), swizzle.NONE)
    memory = Memory(8 * 16)
    values = memory.bytes.view(dtype)
    values[:] = np.random.randint(0, 9, values.shape)
    dense = np.random.randint(0, 9, 4 * per_row).astype(dtype)
    dense[:2], values[5 * per_row : 5 * per_row + 2] = 3, (3, 0)  # equal, and nothing there
    expected = values.copy()
    for i in range(3 * per_row):  # the fourth row of the box lies outside
        expected[5 * per_row + i] = REDUCTIONS[operation, element](
            values[5 * per_row + i].item(), dense[i].item()
        )
    tma.store_box(tensor, (0, 5), dense.view(np.uint8), memory, operation)
    assert np.array_equal(values, expected)


def test_bf16_adds_round_to_nearest_even_and_f32_adds_flush() -> None:
    tensor = TensorMap(A, "bf16", (8, 1), (2, 16), (8, 1), swizzle.NONE)
    memory = Memory(16)
    memory.bytes.view(np.uint16)[:] = 0x3F80  # 1
    new = np.full(8, 0x3B80, np.uint16)  # 2**-8: half of the last place of 1
    new[4:] = 0x3B81
    tma.store_box(tensor, (0, 0), new.view(np.uint8), memory, "add")
    assert list(memory.bytes.view(np.uint16)) == [0x3F80] * 4 + [0x3F81] * 4
    tensor = TensorMap(A, "f32", (4, 1), (4, 16), (4, 1), swizzle.NONE)
    memory.bytes.view(np.float32)[:] = [1e-40, -1e-40, 2e-38, 1]
    new = np.array([1, -1e-40, -1.3e-38, 1e-40], np.float32)
    tma.store_box(tensor, (0, 0), new.view(np.uint8), memory, "add")
    assert list(memory.bytes.view(np.uint32)) == [0x3F800000, 0x80000000, 0, 0x3F800000]


def test_reductions_that_types_do_not_have() -> None:
    for operation, element, size in (
        ("add", "f64", 8),
        ("min", "f32", 4),
        ("add", "s64", 8),
        ("and", "f16", 2),
        ("mul", "u32", 4),
    ):
        tensor = TensorMap(A, element, (16 // size,), (size,), (16 // size,), swizzle.NONE)
        with pytest.raises(UnsupportedError, match=operation):
            tma.store_box(tensor, (0,), np.zeros(16, np.uint8), Memory(16), operation)


TF32 = {
    0x00000001: 0x00000000, 0x00001001: 0x00002000, 0x00801000: 0x00800000, 0x3F801000: 0x3F800000,
    0x3F801001: 0x3F802000, 0x3F802FFF: 0x3F802000, 0x3F803000: 0x3F804000, 0x3FFFF000: 0x40000000,
    0x7F7FEFFF: 0x7F7FE000, 0x7F7FF000: 0x7F800000, 0x7F800000: 0x7F800000, 0x7F800001: 0x7FFFE000,
    0x7FFFF000: 0x7FFFE000, 0xFF800000: 0xFF800000, 0xFF7FFFFF: 0xFF800000, 0xE5446DD4: 0xE5446000,
}  # fmt: skip
"""Bits that an H100 loaded by a tensor map of tf32, by those in global memory."""
OUTSIDE = 0x7FF77FF7
"""Bits it filled with, by a map that asks for NaN."""


def in_shared(tensor: TensorMap, given: list[int]) -> list[int]:
    memory = Memory(4 * len(given))
    memory.bytes[:] = np.array(given, np.uint32).view(np.uint8)
    return tma.load_box(tensor, (0, 0), memory).view(np.uint32).tolist()


@pytest.mark.parametrize("nan", (False, True))
def test_tf32_is_rounded_as_an_h100_rounds_it(nan: bool) -> None:
    given = list(TF32)
    tensor = TensorMap(A, "tf32", (16, 1), (4, 64), (20, 1), swizzle.NONE, nan=nan)
    assert in_shared(tensor, given) == [*TF32.values(), *(4 * [OUTSIDE if nan else 0])]


def test_other_numbers_stay_as_they_are() -> None:
    for element in ("f32", "f32.ftz"):
        tensor = TensorMap(A, element, (16, 1), (4, 64), (16, 1), swizzle.NONE)
        assert in_shared(tensor, list(TF32)) == list(TF32)
    for element in ("f32.ftz", "tf32", "tf32.ftz"):
        tensor = TensorMap(A, element, (16, 1), (4, 64), (16, 1), swizzle.NONE)
        assert TensorMap.decode(tensor.encode()) == tensor
        memory = Memory(64)
        tma.store_box(tensor, (0, 0), np.array(list(TF32), np.uint32).view(np.uint8), memory)
        assert memory.bytes.view(np.uint32).tolist() == list(TF32), "a store rounds nothing"


@pytest.mark.parametrize(("element", "bits"), (("b4x16", 4), ("b4x16_p64", 4), ("b6x16_p32", 6)))
def test_elements_of_less_than_a_byte(element: str, bits: int) -> None:
    """A box of 128 columns and 3 rows at (128, 1), of which the last row is outside."""
    pitch = 256 * bits // 8
    tensor = TensorMap(A, element, (256, 3), (0, pitch), (128, 3), swizzle.NONE)
    assert TensorMap.decode(tensor.encode()) == tensor
    memory = Memory(3 * pitch)
    found = tma.load_box(tensor, (128, 1), memory)
    assert tensor.box_bytes == 3 * 128 * bits // 8, "gaps do not count"
    each = 16 if tensor.padded else 2 * bits
    assert found.shape == (3 * 8 * each,)
    for row in range(3):
        for group in range(8):
            start = (row + 1) * pitch + (128 + 16 * group) * bits // 8
            want = memory.bytes[start : start + 2 * bits] if row < 2 else np.zeros(2 * bits, np.uint8)
            assert np.array_equal(found[(8 * row + group) * each :][: 2 * bits], want)


def test_padded_elements_that_are_refused() -> None:
    for field in ({"box": (64, 3)}, {"address": A + 16}):
        good = TensorMap(A, "b4x16_p64", (256, 3), (0, 128), (128, 3), swizzle.NONE)
        with pytest.raises(InputError, match="b4x16_p64"):
            TensorMap.decode(TensorMap(**{**good.__dict__, **field}).encode())
    with pytest.raises(UnsupportedError, match="padded"):
        tma.store_box(good, (0, 0), np.zeros(3 * 128, np.uint8), Memory(0))


def test_traversal_strides() -> None:
    """Every second row from the second one on, and every third plane, some of them outside."""
    tensor = TensorMap(A, "u8", (16, 9, 5), (1, 16, 160), (16, 5, 6), swizzle.NONE, steps=(1, 2, 3))
    assert TensorMap.decode(tensor.encode()) == tensor
    memory = Memory(800)
    for at in ((0, 1, 1), (0, -3, -3), (0, 5, 4)):
        found = tma.load_box(tensor, at, memory).reshape(2, 3, 16)
        assert tensor.box_bytes == found.size
        for i, j in product(range(2), range(3)):
            plane, row = at[2] + 3 * i, at[1] + 2 * j
            start = 160 * plane + 16 * row
            inside = 0 <= plane < 5 and 0 <= row < 9
            want = memory.bytes[start : start + 16] if inside else np.zeros(16, np.uint8)
            assert np.array_equal(found[i, j], want)


def test_gather4_and_scatter4_move_four_rows() -> None:
    tensor = TensorMap(A, "bf16", (40, 9), (2, 96), (16, 1), swizzle.B32)
    memory = Memory(span(tensor))
    rows = (3, -1, 8, 3)
    boxes = tma.gathered(tensor, (32, *rows))
    found = np.concatenate([tma.load(tensor, box, memory) for box in boxes]).reshape(4, 32)
    for row, line in zip(rows, found):
        expected = np.zeros(32, np.uint8)
        if row >= 0:
            expected[:16] = memory.bytes[96 * row + 64 : 96 * row + 80]
        assert np.array_equal(line, expected)
    tma.store(tensor, boxes[2], np.arange(32, dtype=np.uint8), memory)
    assert list(memory.bytes[96 * 8 + 64 : 96 * 8 + 80]) == list(range(16))
    with pytest.raises(InputError, match="gather4"):
        tma.gathered(tensor, (0, 1))


# --- shared memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", (swizzle.NONE, swizzle.B32, swizzle.B64, swizzle.B128, swizzle.B128_ATOM32), ids=repr
)
def test_shared_image_is_swizzled_by_absolute_address(mode: swizzle.Swizzle) -> None:
    row = mode.span if mode.bits else 48
    tensor = TensorMap(A, "u8", (row, 100), (1, row), (row, 16), mode)
    dense = np.random.randint(0, 256, 16 * row).astype(np.uint8)
    address = 128 * int(np.random.randint(0, 50))
    shared = np.zeros(address + len(dense), np.uint8)
    for i, value in enumerate(dense):
        at = address + i
        if mode is swizzle.B128_ATOM32:
            at ^= ((at >> 7) & 3) << 5
        else:
            at ^= ((at >> 7) & {16: 0, 32: 1, 64: 3, 128: 7}[mode.span]) << 4
        shared[at] = value
    image = tma.to_shared(tensor, address, dense)
    assert np.array_equal(image, shared[address:])
    assert np.array_equal(tma.from_shared(tensor, address, image), dense)


@pytest.mark.parametrize("mode", (swizzle.B32, swizzle.B64, swizzle.B128))
def test_rows_shorter_than_a_swizzled_line(mode: swizzle.Swizzle) -> None:
    """On an H100 each row begins a line of its own; what is completed are the bytes of the rows."""
    for row in range(16, mode.span, 16):
        tensor = TensorMap(A, "u8", (96, 9), (1, 96), (row, 9), mode)
        assert TensorMap.decode(tensor.encode()) == tensor
        assert tensor.box_bytes == 9 * row
        memory = Memory(9 * 96)
        image = tma.to_shared(tensor, 1024, tma.load_box(tensor, (16, 0), memory))
        for line, column in product(range(9), range(row)):
            place = line * mode.span + column
            place ^= place >> 3 & mode.span - 16
            inside = 16 + column < 96
            assert image[place] == (memory.bytes[96 * line + 16 + column] if inside else 0)
        with pytest.raises(UnsupportedError, match=f"rows of {row} bytes"):
            tma.from_shared(tensor, 1024, image)
    with pytest.raises(InputError, match=f"at most {mode.span} bytes"):
        wide = TensorMap(A, "u8", (512, 9), (1, 512), (mode.span + 16, 9), mode)
        TensorMap.decode(wide.encode())


def test_addresses_wrap_at_64_bits() -> None:
    """Maps of ragged tensors rely on it: the rows of a sequence end where their dimension does, and two more
    dimensions lead around all of memory to where it begins."""
    most, sequence, begins, row = 1 << 30, 5, 7, 32
    dims, strides = (16, most, 2 * most - 1, 2 * most - 1), (2, row, (1 << 35) - row, row)
    tensor, memory = TensorMap(A, "bf16", dims, strides, (16, 8, 1, 1), swizzle.NONE), Memory(16 * row)
    box = tma.box_at(tensor, (0, most - sequence, most, begins + sequence))
    starts, size = box.rows()
    assert (starts.tolist(), size) == ([A + (begins + i) * row for i in range(sequence)], row)
    loaded = tma.load(tensor, box, memory).reshape(8, row)
    assert (loaded[:sequence] == memory.bytes.reshape(16, row)[begins : begins + sequence]).all()
    assert not loaded[sequence:].any()
