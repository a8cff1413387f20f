"""Registers of a warp, and which of its 32 lanes an instruction acts for.

Each file of registers is a numpy array [registers, 32], with a view for every type that instructions read it
as: `f32[7]` and `u32[7]` share the bits of the eighth 32-bit register.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 32
ONE_LANE = np.eye(LANES, dtype=np.bool_)
"""Masks of single lanes."""
Mask = NDArray[np.bool_] | None
"""Lanes that an instruction acts for, bool [32] with at least one set; None is all 32."""

POISON = 0xA5
"""Every byte of a register nobody wrote: a large odd value in any type, the same in each run."""

PACKED = {"f32x2": ("u64", "f4"), "b32x2": ("u64", "u4"), "f16x2": ("u32", "f2"), "bf16x2": ("u32", "u2")}
PACKED |= {"u16x2": ("u32", "u2"), "s16x2": ("u32", "i2"), "b16x2": ("u32", "u2"), "b16x4": ("u64", "u2")}
PACKED |= {"u8x4": ("u32", "u1"), "s8x4": ("u32", "i1"), "b8x2": ("u16", "u1"), "b8x4": ("u32", "u1")}
"""A packed type: the view that holds it, and the numpy type of its elements."""

EVERYONE = list(range(LANES))


def lanes_of(mask: Mask) -> list[int]:
    """The numbers of the lanes that take part."""
    return EVERYONE if mask is None else mask.nonzero()[0].tolist()


class Rows(dict[int, NDArray[Any]]):
    """Single registers of a table, made when they are first asked for: most are only used many at a time."""

    def __init__(self, table: NDArray[Any]) -> None:
        super().__init__()
        self.table = table

    def __missing__(self, index: int) -> NDArray[Any]:
        row = self[index] = self.table[index]
        return row


class Registers:
    """pred[i] is bool [32]; u16 s16 f16, u32 s32 f32, u64 s64 f64 are arrays [32] over shared bits; u128[i]
    is uint64 [32, 2], the low half first. `tables` has all registers of a view at once: [registers, 32]."""

    def __init__(self, counts: dict[int, int]) -> None:
        """`counts` are numbers of registers by the width of their file in bits."""
        self.tables: dict[str, NDArray[Any]] = {}
        self.add_view("pred", np.zeros((counts.get(1, 0), LANES), np.bool_))
        self.add_view("u128", np.zeros((counts.get(128, 0), LANES, 2), np.uint64))
        for bits in (16, 32, 64):
            storage = np.full((counts.get(bits, 0), LANES * bits // 8), POISON, np.uint8)
            for kind, letter in zip("usf", "uif"):
                self.add_view(f"{kind}{bits}", storage.view(f"{letter}{bits // 8}"))

    def add_view(self, name: str, table: NDArray[Any]) -> None:
        """Another way to see the registers of a file."""
        self.tables[name] = table
        setattr(self, name, Rows(table))

    def table(self, name: str) -> NDArray[Any]:
        """All registers of a file in a view or as a packed type: [registers, elements]."""
        found = self.tables.get(name)
        if found is None:
            view, element = PACKED[name]
            self.add_view(name, self.tables[view].view(element))
            return self.tables[name]
        return found

    pred: Rows
    u16: Rows
    s16: Rows
    f16: Rows
    u32: Rows
    s32: Rows
    f32: Rows
    u64: Rows
    s64: Rows
    f64: Rows
    u128: Rows
