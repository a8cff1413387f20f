"""Copies of the tensor memory accelerator: boxes between a tensor in global memory and shared memory.

PTX ISA "Tensors" (bounding box, out of boundary access, .tile::gather4 and .tile::scatter4, swizzling modes),
"cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor". A dense box is uint8 [box bytes] with dimension 0
fastest; in shared memory it has that order, swizzled by absolute address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import invalid, unmodelled
from ptxsim.units.numbers import encode
from ptxsim.units.reduction import DTYPES, reduce
from ptxsim.units.swizzle import CHUNK, permutation
from ptxsim.units.tensormap import TensorMap

__all__ = [
    "Box",
    "TensorMap",
    "box_at",
    "from_shared",
    "gathered",
    "load",
    "load_box",
    "store",
    "store_box",
    "to_shared",
]

Bytes = NDArray[np.uint8]
_CHUNK_TYPE = np.dtype(f"V{CHUNK}")


class Memory(Protocol):
    def window(self, address: int, size: int) -> Bytes:
        """Global memory [address, address + size), a writable view. Raises where not all of it is mapped."""
        ...


@dataclass(frozen=True)
class Box:
    """A box at its place: which part of it lies in the tensor.

    Dimensions are slowest first and the last one counts bytes: the dense box has `shape`; the slices
    `inside` of it are in the tensor, from global `address` on, with `strides` in bytes. Nothing is inside
    where `empty`.
    """

    shape: tuple[int, ...]
    inside: tuple[slice, ...]
    address: int
    strides: tuple[int, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.inside)

    @property
    def empty(self) -> bool:
        return any(part.stop <= part.start for part in self.inside)

    def view(self, memory: Memory) -> Bytes:
        """The part inside the tensor as it lies in global memory, uint8 of shape `extents`: write to it to
        store."""
        extents = self.extents
        size = 1 + sum((extent - 1) * stride for extent, stride in zip(extents, self.strides))
        return np.ndarray(extents, np.uint8, memory.window(self.address, size), 0, self.strides)

    def rows(self) -> tuple[NDArray[np.int64], int]:
        """Rows of the part inside the tensor: their global addresses along dimension 0, int64, and the bytes
        of each."""
        if self.empty:
            return np.zeros(0, np.int64), 0
        *outer, row = self.extents
        starts = np.array([self.address], np.int64)
        for extent, stride in zip(outer[::-1], self.strides[-2::-1]):
            if extent > 1:
                starts = np.add.outer(np.arange(extent, dtype=np.int64) * stride, starts).reshape(-1)
        return starts, row


def box_at(tensor: TensorMap, coordinates: Sequence[int]) -> Box:
    """The box whose first element is at these coordinates, signed, dimension 0 first. Raises InputError
    unless there is one for each dimension."""
    if len(coordinates) != tensor.rank:
        raise invalid(
            f"{len(coordinates)} coordinates of a tensor of rank {tensor.rank}", "one for each dimension"
        )
    bits, steps = tensor.bits, tensor.steps or (1,) * tensor.rank
    row = slice(max(0, -coordinates[0]), min(tensor.box[0], tensor.dims[0] - coordinates[0]))
    address = tensor.address + (coordinates[0] + row.start) * bits // 8
    shape, inside = [tensor.box[0] * bits // 8], [slice(row.start * bits // 8, row.stop * bits // 8)]
    for at, dim, extent, stride, step in zip(
        coordinates[1:], tensor.dims[1:], tensor.extents[1:], tensor.strides[1:], steps[1:]
    ):
        start = max(0, -(at // step))
        address += (at + start * step) * stride
        shape.append(extent)
        inside.append(slice(start, min(extent, -((at - dim) // step))))
    strides = [stride * step for stride, step in zip(tensor.strides[:0:-1], steps[:0:-1])]
    return Box(tuple(shape[::-1]), tuple(inside[::-1]), _wrapped(address), (*strides, 1))


def _wrapped(address: int) -> int:
    """Its low 64 bits, signed: maps of ragged tensors have strides that lead around all of memory, so that
    coordinates which end a sequence in one dimension cancel in another one."""
    return (address + (1 << 63)) % (1 << 64) - (1 << 63)


def gathered(tensor: TensorMap, coordinates: Sequence[int]) -> tuple[Box, ...]:
    """The four rows of .tile::gather4 and .tile::scatter4, at {column, row 0, row 1, row 2, row 3}; each is
    a box of one row. Raises InputError unless the tensor has rank 2 and the box one row."""
    if tensor.rank != 2 or tensor.box[1] != 1 or len(coordinates) != 5:
        given = f"{len(coordinates)} coordinates, rank {tensor.rank}, box {tensor.box}"
        raise invalid(f".tile::gather4 or scatter4 of {given}", "5 coordinates, rank 2, a box of one row")
    column, *rows = coordinates
    return tuple(box_at(tensor, (column, row)) for row in rows)


def load_box(tensor: TensorMap, coordinates: Sequence[int], memory: Memory) -> Bytes:
    """The dense box, a copy; elements outside the tensor are zero."""
    return load(tensor, box_at(tensor, coordinates), memory)


def load(tensor: TensorMap, box: Box, memory: Memory) -> Bytes:
    """Load one box as load_box does: uint8 [bytes of the box]."""
    if box.extents == box.shape:
        dense = np.empty(box.shape, np.uint8)
    elif tensor.nan:
        dense = np.resize(_NAN, box.shape)
    else:  # np.resize joins as many arrays as there are bytes
        dense = np.zeros(box.shape, np.uint8)
    if not box.empty:
        dense[box.inside] = box.view(memory)
    flat = dense.reshape(-1)
    if tensor.element.startswith("tf32"):
        # what lies outside is not rounded
        inside = np.zeros(box.shape, np.bool_)
        inside[box.inside] = not box.empty
        rounded = encode("tf32", flat.view(np.float32)).view(np.uint8)
        return np.where(inside.reshape(-1), rounded, flat)
    return _with_gaps(flat, tensor.bits * 2) if tensor.padded else flat


_NAN = np.array([0xF7, 0x7F], np.uint8)
"""NaN that an H100 fills with, in f16, bf16, f32, tf32 and f64 alike."""
_GAP = 0xA5
"""Bytes between groups and rows. An H100 leaves alone what lies behind short rows; nothing can rely on it."""


def _with_gaps(dense: Bytes, group: int) -> Bytes:
    """Groups of `group` bytes, each at the beginning of 16; the ISA does not say what the gaps hold."""
    groups = dense.reshape(-1, group)
    return np.pad(groups, ((0, 0), (0, CHUNK - group)), constant_values=_GAP).reshape(-1)


def store_box(
    tensor: TensorMap, coordinates: Sequence[int], dense: Bytes, memory: Memory, reduction: str | None = None
) -> None:
    """Writes a dense box to the tensor, or combines it with what is there by .add, .min, .max, .inc, .dec,
    .and, .or or .xor; elements outside the tensor are dropped. Raises UnsupportedError for a reduction that
    its type does not have."""
    store(tensor, box_at(tensor, coordinates), dense, memory, reduction)


def store(tensor: TensorMap, box: Box, dense: Bytes, memory: Memory, reduction: str | None = None) -> None:
    """Store one box as store_box does: uint8 [bytes of the box]. tf32 is not rounded, as on an H100."""
    if tensor.padded:
        raise unmodelled(f"a store by a tensor map of {tensor.element}", "loads of padded elements")
    if box.empty:
        return
    new, old = dense.reshape(box.shape)[box.inside], box.view(memory)
    if reduction is not None:
        type = _reduced_type(tensor, reduction)
        kept, arriving = (np.ascontiguousarray(part).view(DTYPES[type]) for part in (old, new))
        new = reduce(reduction, type, kept, arriving).view(np.uint8)
    old[...] = new


def _reduced_type(tensor: TensorMap, reduction: str) -> str:
    element = tensor.element.removeprefix("t").removesuffix(".ftz")
    if element not in DTYPES or element == "f64":
        raise unmodelled(
            f"cp.reduce.async.bulk.tensor.{reduction} of {tensor.element}", "integers, f16, bf16, f32"
        )
    bitwise = reduction in ("and", "or", "xor") and element[0] in "us"
    return f"b{element[1:]}" if bitwise else element


# --- shared memory ------------------------------------------------------------------------------------------


def to_shared(tensor: TensorMap, address: int, dense: Bytes) -> Bytes:
    """The dense box as shared memory [address, address + its bytes) holds it. `address` counts from the
    start of the CTA's window. Raises InputError unless it is a multiple of the swizzle's span."""
    if not tensor.swizzle.bits:
        return dense
    if tensor.short:
        gap = tensor.swizzle.span - tensor.row_bytes
        rows = dense.reshape(-1, tensor.row_bytes)
        dense = np.pad(rows, ((0, 0), (0, gap)), constant_values=_GAP).reshape(-1)
    order = permutation(tensor.swizzle, address, len(dense))
    return dense.view(_CHUNK_TYPE)[order].view(np.uint8)


def from_shared(tensor: TensorMap, address: int, image: Bytes) -> Bytes:
    """The dense box that shared memory holds as `image` from `address` on: the inverse of to_shared. Raises
    UnsupportedError where rows do not fill their lines."""
    if tensor.short:
        raise unmodelled(f"a store of rows of {tensor.row_bytes} bytes with {tensor.swizzle}", "whole lines")
    return to_shared(tensor, address, np.ascontiguousarray(image))
