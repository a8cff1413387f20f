"""Dropout in registers: which pairs are kept, by the hash that fa4flex/primitives/dropout.py defines.

A hash is of a row, a number of 32 bits of a query, and a group, one of the keys kv and kv ^ 8. A thread's
accumulators hold both: next to each other along the keys of a forward pass, and as two rows of transposed
scores. Per hash that is one wide product of both, two exclusive ors, one more product, and an exclusive or;
per pair a comparison and a selection; and a shift for the half that lies below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute, select_
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4flex.kernels.common.hooks import At, Dropped
from fa4flex.kernels.common.math import load_wide

ROW_START, KEY_START = 0x243F6A88, 0x85A308D3
ROW_STEP, KEY_STEP = 0x9E3779B1, 0x85EBCA77
ROW_BITS = 0x80000001
LOW_SALT, HIGH_SALT = 0x53C5CA59, 0x74743C1B
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
ONE = 1 << 16
KEYS = 16
"""Keys that 8 hashes are for."""


@dataclass(frozen=True)
class Stream:
    """Dropout of one head of one sequence.

    rows, groups   what steps of queries, and of groups of keys, are added to
    bound          the threshold, in the upper half
    remaining      1 / (1 - rate), 0 where nothing is kept
    """

    rows: Uint32
    groups: Uint32
    bound: Uint32
    remaining: Float32

    @staticmethod
    def of(dropped: Dropped, at: At) -> Stream:
        seed = load_wide(at.operands[dropped.seed], (), False)
        words = Uint32(seed), Uint32(seed >> Int64(32)), Uint32(at.b), Uint32(at.h)
        threshold = Int32(at.scalars[dropped.threshold])
        return Stream(
            _chain(ROW_START, words),
            _chain(KEY_START, words),
            Uint32(threshold) << Uint32(16),
            remaining(threshold),
        )

    def row(self, q: Int32) -> Uint32:
        """The number of a query."""
        return (self.rows + Uint32(q) * Uint32(ROW_STEP)) | Uint32(ROW_BITS)

    def group(self, first: Int32, lane: Int32) -> Uint32:
        """The number of key first + lane; `first` is a multiple of KEYS, and lane less than half of it."""
        return self.groups + Uint32((first >> 1) + lane) * Uint32(KEY_STEP)

    def keeps(self, row: Uint32, group: Uint32) -> tuple[Boolean, Boolean]:
        """True for keys that are kept, of a group's first and second."""
        bits = _hash(row, group)
        return (bits << Uint32(16)) >= self.bound, bits >= self.bound


def remaining(threshold: Int32) -> Float32:
    """Factor of what is kept."""
    left = (ONE - threshold).to(Float32)
    return select_(threshold < ONE, Float32(float(ONE)) / left, Float32(0.0))


@dataclass(frozen=True)
class RowDropout:
    """Dropout of a thread's rows of a tile of scores, whose columns lie as in Hopper's accumulators: of each
    8 keys the two from `lane` on."""

    stream: Stream
    rows: tuple[Uint32, ...]
    lane: Int32

    @staticmethod
    def of(dropped: Dropped | None, at: At, queries: tuple[Int32, ...], lane: Int32) -> RowDropout | None:
        if dropped is None:
            return None
        stream = Stream.of(dropped, at)
        return RowDropout(stream, tuple([stream.row(q) for q in queries]), lane)

    def apply(self, weights: cute.Tensor, kv_first: Int32) -> None:
        """weights (row, column) of a tile from key `kv_first` on: those that are dropped become 0."""
        base = self.stream.group(kv_first, self.lane)
        for c in range(0, cute.size(weights, mode=[1]), 4):
            for even in range(2):
                group = base + Uint32((2 * c + even) * KEY_STEP & 0xFFFFFFFF)
                for r, row in enumerate(self.rows):
                    kept = self.stream.keeps(row, group)
                    for column, stays in zip((c + even, c + 2 + even), kept, strict=True):
                        weights[r, column] = select_(stays, weights[r, column], Float32(0.0))


@dataclass(frozen=True)
class LaneDropout:
    """Dropout of one row, all columns of which a lane has, as tensor memory hands them out."""

    stream: Stream
    row: Uint32

    @staticmethod
    def of(dropped: Dropped | None, at: At, q: Int32) -> LaneDropout | None:
        if dropped is None:
            return None
        stream = Stream.of(dropped, at)
        return LaneDropout(stream, stream.row(q))

    def kept(self, weights: list[Float32], first: Int32) -> list[Float32]:
        """Weights of keys from `first` on, a multiple of KEYS, of which there is a whole number of so many:
        those that are dropped are 0."""
        base, kept = self.stream.group(first, Int32(0)), list(weights)
        for c in range(0, len(weights), KEYS):
            for lane in range(KEYS // 2):
                group = base + Uint32((c // 2 + lane) * KEY_STEP & 0xFFFFFFFF)
                places = c + lane, c + lane + KEYS // 2
                for at, stays in zip(places, self.stream.keeps(self.row, group), strict=True):
                    kept[at] = select_(stays, kept[at], Float32(0.0))
        return kept


@dataclass(frozen=True)
class ColumnDropout:
    """Dropout of transposed scores: a thread's two rows are keys kv and kv + 8, which share hashes.

    In a backward pass P' is what weights were before dropout, and Z the factor that dropout gives each:
    dV = (P Z)' dO, and dS = P (Z dP - delta), as delta, the sum of dO O, is that of P Z dP.
    """

    stream: Stream
    group: Uint32

    @staticmethod
    def of(dropped: Dropped | None, at: At, first_key: Int32) -> ColumnDropout | None:
        """first_key: the first of a thread's two."""
        if dropped is None:
            return None
        stream, lane = Stream.of(dropped, at), first_key & (KEYS // 2 - 1)
        return ColumnDropout(stream, stream.group(first_key - lane, lane))

    def apply(self, p: cute.Tensor, ds: cute.Tensor, deltas: cute.Tensor, columns: Columns) -> None:
        """p and ds (row, column) hold P' and dP', and become P' Z and dS'. deltas: less delta, of these
        columns."""
        base = self.stream.rows + Uint32(columns.q_first) * Uint32(ROW_STEP)
        for c, query in enumerate(columns.queries):
            row = (base + Uint32(query * ROW_STEP & 0xFFFFFFFF)) | Uint32(ROW_BITS)
            for r, stays in enumerate(self.stream.keeps(row, self.group)):
                at = r, columns.first + c
                factor = select_(stays, self.stream.remaining, Float32(0.0))
                ds[at] = p[at] * (ds[at] * factor + deltas[c])
                p[at] = p[at] * factor


@dataclass(frozen=True)
class KeyDropout:
    """Dropout of transposed scores of one key, as tensor memory hands them out. Another lane has the key that
    shares its hashes. up: how far its half of a hash is to be shifted."""

    stream: Stream
    group: Uint32
    up: Uint32

    @staticmethod
    def of(dropped: Dropped | None, at: At, key: Int32) -> KeyDropout | None:
        if dropped is None:
            return None
        stream, lane = Stream.of(dropped, at), key & (KEYS // 2 - 1)
        group = stream.group(key & -KEYS, lane)
        return KeyDropout(stream, group, Uint32(16 - 2 * (key & (KEYS // 2))))

    def apply(self, p: cute.Tensor, q_first: Int32) -> tuple[cute.Tensor, Uint32]:
        """P' of up to 32 queries, with zeros for those that are dropped; and the bits of those that stay."""
        count = cute.size(p)
        used, word = cute.make_rmem_tensor((count,), Float32), Uint32(0)
        base = self.stream.rows + Uint32(q_first) * Uint32(ROW_STEP)
        for c in range(count):
            row = (base + Uint32(c * ROW_STEP & 0xFFFFFFFF)) | Uint32(ROW_BITS)
            stays = (_hash(row, self.group) << self.up) >= self.stream.bound
            used[c] = select_(stays, p[c], Float32(0.0))
            word = select_(stays, word | Uint32(1 << c), word)
        return used, word

    def factor(self, word: Uint32, c: int) -> Float32:
        """Factor of dP' of a query, of the bits of those that stay."""
        return select_((word & Uint32(1 << c)) != Uint32(0), self.stream.remaining, Float32(0.0))


def remaining_of(dropped: Dropped | None, scalars: Any) -> Float32 | None:
    """Factor of what is kept; None without dropout."""
    return None if dropped is None else remaining(Int32(scalars[dropped.threshold]))


class Columns(NamedTuple):
    """Columns of a thread from number `first` on: queries q_first + queries[c]."""

    first: int
    q_first: Int32
    queries: tuple[int, ...]


@dsl_user_op
def _hash(row: Uint32, group: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The 32 bits of a row and a group. Written out: the compiler would do what is between both products in
    64 bits, and the second product, of three multiplications, with it."""
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [x.ir_value(loc=loc, ip=ip) for x in (row, group)],
            "{ .reg .b64 product; .reg .b32 low, high;"
            " mul.wide.u32 product, $1, $2; mov.b64 {low, high}, product;"
            f" xor.b32 low, low, {LOW_SALT:#x}; xor.b32 high, high, {HIGH_SALT:#x};"
            " mul.wide.u32 product, low, high; mov.b64 {low, high}, product;"
            " xor.b32 $0, low, high; }",
            "=r,r,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def _chain(start: int, words: tuple[Any, ...]) -> Uint32:
    x = Uint32(start)
    for word in words:
        x = x ^ word
        for shift, factor in MIX:
            x = (x ^ (x >> Uint32(shift))) * Uint32(factor)
        x = x ^ (x >> Uint32(16))
    return x
