"""Tensor maps: the 128 bytes that describe a tensor in global memory and the box that a copy moves.

PTX ISA "Tensor-map" calls them opaque. This encoding was read from the descriptors that the compiler's host
code makes for tensors with known properties; its codes are those of the ISA's table "Tensormap new_val
validity" (tensormap.replace).

    bytes 0-7     address
    bytes 8-11    bits 0-1: 2, tiled mode; 4-6: rank - 1; 7-10: element type; 11-12: interleave;
                  13-15: swizzling mode; 16: with type f32, tf32; 18: 1; 19-20: swizzle atomicity;
                  21: L2 promotion
    bytes 12-27   strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits
    bytes 28-31   their high bits, 4 each
    bytes 32-51   sizes of dimensions 0 to 4, less 1
    bytes 52-54   traversal strides, 0 for all 1
    bytes 55-59   sizes of the box, less 1
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from fa4flex.simulator.units.errors import invalid, unmodelled
from fa4flex.simulator.units.swizzle import B32, B64, B128, B128_ATOM32, B128_ATOM64, NONE, Swizzle

ELEMENTS = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "s32",
    4: "u64",
    5: "s64",
    6: "f16",
    7: "f32",
    9: "f64",
    10: "bf16",
}
"""Element types by code. Those that flush subnormals (8, 12) and those of 4 and 6 bits (13-15) are not
modelled."""
SIZES = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "s32": 4,
    "u64": 8,
    "s64": 8,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "tf32": 4,
    "f64": 8,
}
"""Bytes of an element."""
SWIZZLES = {(0, 0): NONE, (1, 0): B32, (2, 0): B64, (3, 0): B128, (3, 1): B128_ATOM32, (3, 3): B128_ATOM64}
"""Swizzles by mode and atomicity. 32-byte atoms with a flip of 8 bytes (3, 2) and the 96-byte mode (4) are
not modelled."""
_LAYOUT = struct.Struct("<Q11I3s5BI")
_TF32, _ALWAYS = 1 << 16, 1 << 18
_KNOWN = 0x3CFFF3 | _TF32
"""Bits of bytes 8-11 whose meaning is known; bit 21 has no effect on what is copied."""


@dataclass(frozen=True)
class TensorMap:
    """Dimension 0, whose elements are contiguous, comes first. `dims` and `box` count elements, `strides`
    are bytes (strides[0] is the size of an element)."""

    address: int
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle

    @classmethod
    def decode(cls, descriptor: bytes) -> TensorMap:
        """What the 128 bytes say; only the first 64 count. Raises UnsupportedError that names the field
        which is not modelled, InputError for what the ISA forbids."""
        return _decode(bytes(descriptor[:64]))

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def itemsize(self) -> int:
        return SIZES[self.element]

    @cached_property
    def box_bytes(self) -> int:
        """What a copy completes on its mbarrier, however much of the box lies outside the tensor."""
        return prod(self.box) * self.itemsize

    def encode(self) -> bytes:
        """128 bytes that decode to this, the last 64 zero."""
        mode, atomicity = next(key for key, swizzle in SWIZZLES.items() if swizzle == self.swizzle)
        element = "f32" if self.element == "tf32" else self.element
        code = next(code for code, name in ELEMENTS.items() if name == element)
        flags = 2 | (self.rank - 1) << 4 | code << 7 | mode << 13 | _ALWAYS | atomicity << 19
        flags |= _TF32 if self.element == "tf32" else 0
        unused = [0] * (5 - self.rank)
        strides = [stride >> 4 for stride in self.strides[1:]] + unused
        high = sum((stride >> 32) << (4 * i) for i, stride in enumerate(strides))
        dims, box = ([size - 1 for size in sizes] + unused for sizes in (self.dims, self.box))
        low = [stride & 0xFFFFFFFF for stride in strides]
        return _LAYOUT.pack(self.address, flags, *low, high, *dims, b"", *box, 0) + bytes(64)


@lru_cache(maxsize=4096)
def _decode(head: bytes) -> TensorMap:
    address, flags, *words, traversal, box0, box1, box2, box3, box4, rest = _LAYOUT.unpack(head)
    element = _check_flags(flags)
    if any(traversal):
        raise unmodelled(f"tensor map with traversal strides {traversal.hex()}", "traversal strides of 1")
    if rest:
        raise unmodelled(f"tensor map with {rest:#x} in bytes 60-63", "0 there")
    rank = ((flags >> 4) & 7) + 1
    size = SIZES[element]
    strides = [(low | ((words[4] >> (4 * i)) & 15) << 32) << 4 for i, low in enumerate(words[:4])]
    result = TensorMap(
        address,
        element,
        dims=tuple(dim + 1 for dim in words[5 : 5 + rank]),
        strides=(size, *strides[: rank - 1]),
        box=tuple(extent + 1 for extent in (box0, box1, box2, box3, box4)[:rank]),
        swizzle=SWIZZLES[(flags >> 13) & 7, (flags >> 19) & 3],
    )
    _check_box(result)
    return result


def _check_flags(flags: int) -> str:
    """The element type; raises for any field of bytes 8-11 that is not modelled."""
    code, interleave, swizzle = (flags >> 7) & 15, (flags >> 11) & 3, ((flags >> 13) & 7, (flags >> 19) & 3)
    if flags & 3 != 2:
        raise unmodelled(
            f"tensor map of mode {flags & 3} (im2col, or no tensor map)", "tiled tensor maps (mode 2)"
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
    if flags & ~_KNOWN or not flags & _ALWAYS:
        raise unmodelled(f"tensor map with flags {flags:#x}", "bit 18 set, and bits 2-3, 17 and 22-31 zero")
    if code not in ELEMENTS or (flags & _TF32 and ELEMENTS[code] != "f32"):
        raise unmodelled(f"tensor map of element type {code}", f"{ELEMENTS}")
    return "tf32" if flags & _TF32 else ELEMENTS[code]


def _check_box(tensor: TensorMap) -> None:
    row = tensor.box[0] * tensor.itemsize
    if row % 16:
        raise invalid(f"tensor map with a box of {row} bytes along dimension 0", "a multiple of 16")
    if tensor.address % 16:
        raise invalid(f"tensor map at address {tensor.address:#x}", "a multiple of 16")
    if tensor.swizzle.bits and row != tensor.swizzle.span:
        raise unmodelled(
            f"tensor map with a box of {row} bytes along dimension 0 and {tensor.swizzle}",
            f"{tensor.swizzle.span} bytes",
        )
