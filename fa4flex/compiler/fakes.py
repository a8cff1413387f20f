"""Stand-ins for arguments, from what their rows say they look like.

Extents are 32-bit, strides 64-bit, so that offsets into large tensors do not wrap. Extents that must agree
are one symbol: the compiled function checks them, along with ranks, dtypes, devices and alignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.plan.lengths import row_block
from fa4flex.kernels.plan.looks import (
    KV_HEADS,
    Array,
    Blocks,
    Captured,
    Columns,
    Dimension,
    Given,
    Heads,
    Look,
    Number,
    Parts,
    Rows,
    Scales,
)
from fa4flex.primitives.heads import ALIKE

if TYPE_CHECKING:
    from fa4flex.compiler.signature import Signature
    from fa4flex.kernels.plan.problem import Problem

WIDE_COPY = 16
"""Bytes that base addresses and strides of what TMA reads and writes are multiples of, as it demands."""

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "int8": cutlass.Int8,
    "int16": cutlass.Int16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "uint8": cutlass.Uint8,
    "uint16": cutlass.Uint16,
    "uint32": cutlass.Uint32,
    "uint64": cutlass.Uint64,
    "bool": cutlass.Uint8,  # torch stores a bool in a byte; kernels see the byte
}


class Fakes:
    """Stand-ins for one launch, in which extents of one name are one symbol."""

    def __init__(self, problem: Problem, signature: Signature, config: Any) -> None:
        self.problem, self.signature, self.config = problem, signature, config
        self.packed = problem.lengths == "packed"
        self._extents: dict[str, Any] = {}

    def of(self, look: Look) -> Any:
        """None for captured values of which there are none."""
        match look:
            case Heads():
                return self._heads(look)
            case Array(dtype, dims, unit, together):
                return fake_plain(DTYPES[dtype], self._shape(dims), unit, together)
            case Given(name, dims):
                wide = name in self.signature.wide
                return fake_plain(Int64 if wide else Int32, self._shape(dims), unit=False)
            case Rows(dims, dtype, pieces):
                element, together = getattr(self.config, dtype), self.config.together if pieces else 1
                unit = together > 1 or not pieces
                return fake_plain(DTYPES[element], self._shape(dims), unit, together)
            case Scales(dims):
                return fake_plain(Float32, self._shape(dims), unit=False)
            case Columns(heads, width, length):
                shape = self._shape(("batch", heads, getattr(self.problem, width), length))
                return fake_plain(cutlass.Uint8, shape, together=WIDE_COPY)
            case Blocks(length):
                return self._blocks(length)
            case Number(kind):
                return {"float": Float32, "int": Int32, "address": Int64}[kind](1)
            case Parts():
                return self._parts(look)
            case Captured(what):
                makers = {
                    "tensors": self._operands, "numbers": self._numbers, "gradients": self._gradients,
                    "pieces": self._pieces, "written": self._written,
                }  # fmt: skip
                return makers[what]() or None

    def _extent(self, name: Dimension) -> Any:
        if isinstance(name, int):
            return name
        if name == "sequences" and not self.packed:
            name = "batch"
        if name in KV_HEADS and self.problem.shares == ALIKE:
            name = "kv_heads"
        if name not in self._extents:
            self._extents[name] = cute.sym_int32()
        return self._extents[name]

    def _shape(self, dims: tuple[Dimension, ...]) -> tuple[Any, ...]:
        return tuple(self._extent(name) for name in dims if not (self.packed and name == "batch"))

    def _heads(self, look: Heads) -> Any:
        heads_first = self.signature.heads_first and not self.packed
        order = (look.heads, look.length) if heads_first else (look.length, look.heads)
        width, element = getattr(self.problem, look.width), DTYPES[getattr(self.problem, look.dtype)]
        first = "pages" if look.cached and self.problem.keys.loaded else "batch"
        shape = self._shape((first, *order, width))
        strides = [cute.sym_int64(divisibility=WIDE_COPY * 8 // element.width) for _ in shape[:-1]]
        return make_fake_tensor(element, shape, (*strides, 1), assumed_align=WIDE_COPY)

    def _blocks(self, length: str) -> Any:
        shape = self._shape(("batch", "q_heads", length))
        rows = row_block(self.config.tile_m)
        strides = [cute.sym_int64(divisibility=rows) for _ in shape[:-1]]
        return make_fake_tensor(Float32, shape, (*strides, 1), assumed_align=WIDE_COPY)

    def _parts(self, look: Parts) -> Any:
        arguments = (
            self.of(array) if look.present(name, self.problem) else None for name, array in look.arrays
        )
        return named("Parts", look.names)(*arguments)

    def _operands(self) -> tuple[Any, ...]:
        """Rows that are even in elements are read in pairs of them."""
        operands, signature = self.problem.operands, self.signature
        nothing = (False,) * len(operands)
        units, even = signature.unit_strides or nothing, signature.even_rows or nothing
        return tuple(
            fake_plain(DTYPES[dtype], tuple(cute.sym_int32() for _ in range(max(rank, 1))), unit, 1 + rows)
            for (dtype, rank), unit, rows in zip(operands, units, even, strict=True)
        )

    def _numbers(self) -> tuple[Any, ...]:
        integer = Int64 if self.problem.wide_index else Int32
        return tuple(Float32(1.0) if kind == "float" else integer(1) for kind in self.signature.scalars)

    def _pieces(self) -> tuple[Any, ...]:
        slots = {one.slot for one in self.config.piecewise}
        operands = enumerate(self.problem.operands)
        return tuple([_in_pieces(dtype, rank, slot in slots) for slot, (dtype, rank) in operands])

    def _written(self) -> tuple[Any, ...]:
        parts = 2 if self.packed else 3
        return tuple([_in_pieces(x.dtype, x.rank if x.index else parts, x.pieces) for x in self.config.sums])

    def _gradients(self) -> tuple[Any, ...]:
        """Rows of 16-bit ones may be written by the copy engine."""
        results = []
        for slot, adding in self.problem.gradients:
            dtype, rank = self.problem.operands[slot]
            pairs = adding == "once in pairs"
            shape = tuple(cute.sym_int32() for _ in range(1 + max(rank, 1)))
            results.append(fake_plain(DTYPES[dtype] if pairs else Float32, shape, together=8 if pairs else 1))
        return tuple(results)


def _in_pieces(dtype: str, rank: int, pieces: bool) -> Any:
    """Tensor of any shape whose rows are read or written in pieces of 16 bytes, or in single elements."""
    element = DTYPES[dtype]
    shape = tuple([cute.sym_int32() for _ in range(max(rank, 1))])
    return fake_plain(element, shape, pieces, WIDE_COPY * 8 // element.width if pieces else 1)


def fake_plain(element: Any, shape: tuple[Any, ...], unit: bool = True, together: int = 1) -> Any:
    """Any strides, the last of which is 1 if `unit`; aligned to `together` of its elements, as all its rows
    then are."""
    strides = [cute.sym_int64(divisibility=together) for _ in shape]
    if unit:
        strides[-1] = 1
    align = element.width // 8 * together
    return make_fake_tensor(element, shape, tuple(strides), assumed_align=align)
