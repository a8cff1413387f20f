"""Tensor maps that host code asks the CUDA driver for (cuTensorMapEncodeTiled)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ptxsim.units.errors import invalid, unmodelled
from ptxsim.units.swizzle import B32, B64, B128, B128_ATOM32, B128_ATOM64, NONE
from ptxsim.units.tensormap import BITS, TensorMap

_WHOLE = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")
ELEMENTS = (*_WHOLE, "f32.ftz", "tf32", "tf32.ftz", "b4x16", "b4x16_p64", "b6x16_p32")
"""Element types by their numbers in CUtensorMapDataType."""
SWIZZLES = {0: NONE, 1: B32, 2: B64, 3: B128, 4: B128_ATOM32, 6: B128_ATOM64}
"""Swizzles by their numbers in CUtensorMapSwizzle."""
_SMALLEST, _LARGEST_BOX, _LARGEST_STEP = 16, 256, 8


def tensor_map(
    element: int, address: int, sizes: Sequence[tuple[int, ...]], interleave: int, swizzle: int, fill: int
) -> bytes:
    """128 bytes for a tensor with `sizes`: dimensions, strides of all but the first, box, traversal strides.

    Raises InputError where the driver returns an error, and UnsupportedError for what is not modelled.
    """
    dims, strides, box, steps = sizes
    if element not in range(len(ELEMENTS)):
        raise invalid(f"tensor map with elements of type {element}", "a number of CUtensorMapDataType")
    if interleave or swizzle not in SWIZZLES:
        raise unmodelled(
            f"tensor map with interleave {interleave} and swizzle {swizzle}",
            "no interleave, and swizzles 0 to 4 and 6",
        )
    if address % _SMALLEST or any(stride % _SMALLEST for stride in strides):
        raise invalid(f"tensor map at {address:#x} with strides {strides}", f"multiples of {_SMALLEST} bytes")
    if not all(1 <= size <= _LARGEST_BOX for size in box):
        raise invalid(f"tensor map with a box of {box}", f"1 to {_LARGEST_BOX} elements each")
    if not all(1 <= step <= _LARGEST_STEP for step in steps) or not all(1 <= dim <= 1 << 32 for dim in dims):
        raise invalid(f"tensor map of {dims} elements, every {steps}-th", "1 to 2^32, and steps of 1 to 8")
    name = ELEMENTS[element]
    given = (BITS[name] // 8, *strides)
    stepped = steps if max(steps) > 1 else ()
    whole = TensorMap(address, name, dims, given, box, SWIZZLES[swizzle], stepped, nan=fill == 1).encode()
    TensorMap.decode(whole)  # which refuses boxes that TMA does not take
    return whole


def read_sizes(rank: int, addresses: Sequence[int]) -> list[tuple[int, ...]]:
    """Sizes as `tensor_map` takes them, from memory."""
    kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    counts = (rank, rank - 1, rank, rank)
    return [
        tuple((kind * count).from_address(at)) if count else ()
        for kind, count, at in zip(kinds, counts, addresses, strict=True)
    ]
