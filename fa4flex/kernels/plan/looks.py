"""Looks of arguments: dtypes, dimensions and strides that a compiled pass is told of, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Dimension = str | int
"""Name of an extent, which is the same number wherever it is named; or a number."""

KV_HEADS = ("k_heads", "v_heads")
"""Names of the heads of k and of v: both are "kv_heads" where these are as many."""


@dataclass(frozen=True)
class Heads:
    """[batch, heads, length, width], [batch, length, heads, width] as calls have it, or packed [length,
    heads, width], in pieces of 16 bytes; kernels read [batch, length, heads, width]. width and dtype are
    attributes of Problem. Where a loader finds keys, those that are `cached` have pages for batch and slots
    for length, packed or not."""

    length: str
    heads: str
    width: str
    dtype: str = "dtype"
    cached: bool = False


@dataclass(frozen=True)
class Array:
    """Tensor of any strides, the last of which is 1 if `unit`. Packed calls leave "batch" out. Its address is
    one of `together` elements."""

    dtype: str
    dims: tuple[Dimension, ...]
    unit: bool = True
    together: int = 1


@dataclass(frozen=True)
class Rows:
    """Tensor of any strides, in pieces of `together` elements of its config, or if not `pieces` in single
    ones. dtype is a field of the config. Packed calls leave "batch" out."""

    dims: tuple[str, ...]
    dtype: str = "dtype"
    pieces: bool = True


@dataclass(frozen=True)
class Blocks:
    """float32 [batch, q_heads, length], packed [q_heads, length], in whole blocks of rows."""

    length: str


@dataclass(frozen=True)
class Given:
    """Lengths or pages as a call brings them: int32, or int64 where a signature names it; any stride."""

    name: str
    dims: tuple[Dimension, ...]


@dataclass(frozen=True)
class Scales:
    """float32 scales of a cache, of any strides."""

    dims: tuple[Dimension, ...]


@dataclass(frozen=True)
class Columns:
    """e4m3 [batch, heads, width, length], a row for each channel, in pieces of 16 bytes; packed calls leave
    batch out. width is an attribute of Problem."""

    heads: str
    width: str
    length: str


@dataclass(frozen=True)
class Number:
    """Number that is passed by value: "float" of 32 bits, "int" of 32, or an "address"."""

    kind: Literal["float", "int", "address"] = "float"


@dataclass(frozen=True)
class Parts:
    """Several arrays in one named tuple. when: whether a problem has those that it does not always have."""

    arrays: tuple[tuple[str, Array], ...]
    when: tuple[tuple[str, Callable[[Any], bool]], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.arrays)

    def present(self, name: str, problem: Any) -> bool:
        return dict(self.when).get(name, lambda _: True)(problem)


@dataclass(frozen=True)
class Captured:
    """Captured values, in a tuple that is None where there are none: "tensors" and the tables of intervals,
    "numbers", or the "gradients" of tensors, as [copies, shape...]. Of output functions: tensors, some of
    which are read in "pieces" of 16 bytes, and the gradients that are "written", as the config says."""

    what: Literal["tensors", "numbers", "gradients", "pieces", "written"]


Look = Heads | Rows | Array | Given | Scales | Columns | Blocks | Number | Parts | Captured
