"""Tensor maps: the 128 bytes that describe a tensor in global memory and the box that a copy moves.

PTX ISA "Tensor-map" calls them opaque. This encoding was read from descriptors that the compiler's host code
and the CUDA driver make for tensors with known properties, and from what tensormap.replace writes on an H100:
its codes are those of the ISA's table "Tensormap new_val validity", but for tf32 and the types of 4 and 6
bits.

    bytes 0-7     address
    bytes 8-11    bits 0-1: 2, tiled mode (0 for the driver's own); 4-6: rank - 1; 7-10: element type;
                  11-12: interleave; 13-14: swizzling mode; 15: NaN outside of the tensor; 16: rounds to tf32;
                  17-18: L2 promotion; 19-20: swizzle atomicity; 21: a tensor of 128 KiB or more
    bytes 12-27   strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits
    bytes 28-31   their high bits, 4 each
    bytes 32-51   sizes of dimensions 0 to 4, less 1
    bytes 52-54   traversal strides, less 1, 3 bits each
    bytes 55-59   sizes of the box, less 1
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from ptxsim.units.errors import invalid, unmodelled
from ptxsim.units.swizzle import B32, B64, B128, B128_ATOM32, B128_ATOM64, NONE, Swizzle

ELEMENTS = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "s32",
    4: "u64",
    5: "s64",
    6: "f16",
    7: "f32",
    8: "f32.ftz",
    9: "f64",
    10: "bf16",
    11: "b4x16",
    12: "b4x16_p64",
    13: "b6x16_p32",
}
"""Element types by code."""
BITS = {"f16": 16, "bf16": 16, "f32": 32, "f32.ftz": 32, "tf32": 32, "tf32.ftz": 32, "f64": 64}
BITS |= {
    f"{kind}{bits}": bits for kind, bits in (("u", 8), ("u", 16), *((k, b) for k in "us" for b in (32, 64)))
}
BITS |= {"b4x16": 4, "b4x16_p64": 4, "b6x16_p32": 6}
"""Bits of an element in global memory."""
PADDED = ("b4x16_p64", "b6x16_p32")
"""Types of which 16 elements take 16 bytes in shared memory, with a gap behind them."""
SWIZZLES = {(0, 0): NONE, (1, 0): B32, (2, 0): B64, (3, 0): B128, (3, 1): B128_ATOM32, (3, 3): B128_ATOM64}
"""Swizzles by mode and atomicity. 32-byte atoms with a flip of 8 bytes (3, 2) are not modelled."""
_LAYOUT = struct.Struct("<Q11I3s5BI")
_NAN, _TF32, _PROMOTED = 1 << 15, 1 << 16, 2 << 17
_KNOWN = 0x3FFFF3
"""Bits of bytes 8-11 whose meaning is known; L2 promotion and bit 21 have no effect on what is copied."""


@dataclass(frozen=True)
class TensorMap:
    """Dimension 0, whose elements are contiguous, comes first. `dims` and `box` count elements, `strides`
    are bytes (strides[0] is the size of an element, 0 where it is no whole bytes). A box takes every
    steps[i]-th element along dimension i; empty for all. `nan` fills with NaN what is outside."""

    address: int
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle
    steps: tuple[int, ...] = ()
    nan: bool = False

    @classmethod
    def decode(cls, descriptor: bytes) -> TensorMap:
        """Tensor map of the 128 bytes; only the first 64 count. Raises UnsupportedError that names the field
        which is not modelled, InputError for what the ISA forbids."""
        return _decode(bytes(descriptor[:64]))

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element in global memory."""
        return BITS[self.element]

    @property
    def padded(self) -> bool:
        """True if shared memory has gaps between groups of 16 elements."""
        return self.element in PADDED

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Elements that a copy moves along each dimension."""
        return tuple(-(-size // step) for size, step in zip(self.box, self.steps or (1,) * self.rank))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of the box in shared memory."""
        return self.box[0] if self.padded else self.box[0] * self.bits // 8

    @property
    def short(self) -> bool:
        """True if rows do not fill the lines that are swizzled: each row begins a line all the same, as an
        H100 has it."""
        return self.swizzle.bits > 0 and self.row_bytes < self.swizzle.span

    @cached_property
    def box_bytes(self) -> int:
        """Bytes that a copy completes on its mbarrier, however much of the box lies outside the tensor. Gaps
        in shared memory do not count: CUTLASS expects the bits of the elements."""
        return prod(self.extents) * self.bits // 8

    def encode(self) -> bytes:
        """128 bytes that decode to this, the last 64 zero."""
        mode, atomicity = next(key for key, swizzle in SWIZZLES.items() if swizzle == self.swizzle)
        element = self.element.replace("tf32", "f32")
        code = next(code for code, name in ELEMENTS.items() if name == element)
        flags = 2 | (self.rank - 1) << 4 | code << 7 | mode << 13 | _PROMOTED | atomicity << 19
        flags |= _TF32 if self.element != element else 0
        flags |= _NAN if self.nan else 0
        unused = [0] * (5 - self.rank)
        strides = [stride >> 4 for stride in self.strides[1:]] + unused
        high = sum((stride >> 32) << (4 * i) for i, stride in enumerate(strides))
        dims, box = ([size - 1 for size in sizes] + unused for sizes in (self.dims, self.box))
        low = [stride & 0xFFFFFFFF for stride in strides]
        steps = sum((step - 1) << (3 * i) for i, step in enumerate(self.steps)).to_bytes(3, "little")
        return _LAYOUT.pack(self.address, flags, *low, high, *dims, steps, *box, 0) + bytes(64)


@lru_cache(maxsize=4096)
def _decode(head: bytes) -> TensorMap:
    address, flags, *words, traversal, box0, box1, box2, box3, box4, rest = _LAYOUT.unpack(head)
    element = _check_flags(flags)
    if rest:
        raise unmodelled(f"tensor map with {rest:#x} in bytes 60-63", "0 there")
    rank = ((flags >> 4) & 7) + 1
    strides = [(low | ((words[4] >> (4 * i)) & 15) << 32) << 4 for i, low in enumerate(words[:4])]
    result = TensorMap(
        address,
        element,
        dims=tuple(dim + 1 for dim in words[5 : 5 + rank]),
        strides=(BITS[element] // 8, *strides[: rank - 1]),
        box=tuple(extent + 1 for extent in (box0, box1, box2, box3, box4)[:rank]),
        swizzle=SWIZZLES[(flags >> 13) & 3, (flags >> 19) & 3],
        steps=_steps(int.from_bytes(traversal, "little"), rank),
        nan=bool(flags & _NAN),
    )
    _check_box(result)
    return result


def _steps(fields: int, rank: int) -> tuple[int, ...]:
    """Traversal strides; that of dimension 0 does not count without interleave."""
    steps = (1, *(((fields >> 3 * i) & 7) + 1 for i in range(1, rank)))
    return steps if any(step > 1 for step in steps) else ()


def _check_flags(flags: int) -> str:
    """The element type; raises for any field of bytes 8-11 that is not modelled."""
    code, interleave, swizzle = (flags >> 7) & 15, (flags >> 11) & 3, ((flags >> 13) & 3, (flags >> 19) & 3)
    if flags & 3 not in (0, 2):
        raise unmodelled(
            f"tensor map of mode {flags & 3} (im2col, or no tensor map)", "tiled tensor maps (mode 0 or 2)"
        )
    if (flags >> 4) & 7 > 4:
        raise invalid(f"tensor map of rank {((flags >> 4) & 7) + 1}", "ranks 1 to 5")
    if interleave:
        raise unmodelled(f"tensor map with interleave layout {interleave}", "no interleave")
    if swizzle not in SWIZZLES:
        raise unmodelled(
            f"tensor map with swizzling mode {swizzle[0]}, atomicity {swizzle[1]}",
            f"{list(SWIZZLES.values())}",
        )
    if flags & ~_KNOWN:
        raise unmodelled(f"tensor map with flags {flags:#x}", "bits 2-3 and 22-31 zero")
    tf32 = flags & _TF32
    if code not in ELEMENTS or (tf32 and not ELEMENTS[code].startswith("f32")):
        raise unmodelled(f"tensor map of element type {code}", f"{ELEMENTS}")
    return f"t{ELEMENTS[code]}" if tf32 else ELEMENTS[code]


def _check_box(tensor: TensorMap) -> None:
    row = tensor.row_bytes
    if row % 16:
        raise invalid(f"tensor map with a box of {row} bytes along dimension 0", "a multiple of 16")
    if tensor.padded and tensor.box[0] != 128:
        raise invalid(f"tensor map of {tensor.element} with a box of {tensor.box[0]} elements", "128")
    least = 32 if tensor.padded else 16
    if tensor.address % least:
        raise invalid(f"tensor map of {tensor.element} at {tensor.address:#x}", f"a multiple of {least}")
    if tensor.swizzle.bits and row > tensor.swizzle.span:
        raise invalid(
            f"tensor map with a box of {row} bytes along dimension 0 and {tensor.swizzle}",
            f"at most {tensor.swizzle.span} bytes",
        )
