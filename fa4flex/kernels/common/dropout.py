"""Dropout in registers: which pairs are kept, by the hash that fa4flex/primitives/dropout.py defines.

A hash is of a row, a number of queries q and q ^ 8, and a group, one of keys kv and kv ^ 8. A thread's
accumulators hold all four pairs, as rows and columns of a forward pass and as columns and rows of transposed
scores. Per hash that are a product, a permutation of bytes and a wide product. Weights are dropped once they
are rounded, two in a register: a permutation takes the bytes of both, as signed numbers of 16 bits, and one
minimum makes of both weights themselves or 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, cute, select_
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4flex.codegen.keep import KEY_START, KEY_STEP, MIX, ROW_START, ROW_STEP
from fa4flex.kernels.common.hooks import At, Dropped
from fa4flex.kernels.common.math import load_wide
from fa4flex.primitives.dropout import ONE

ORDER = 0x1302
"""Bytes of a product by which it is multiplied."""
HALF = 8
"""Distance of the two queries, and of the two keys, that share hashes."""
BLOCK = 2 * HALF
"""Queries, or keys, that have HALF numbers."""
MIDDLE = 16
"""First bit of a hash that is a pair's."""
KEPT = 0x7F80
"""Added to a byte and the threshold, it gives a negative number of 16 bits for pairs that are dropped, and
for others one above all weights."""


class Word(NamedTuple):
    """A register, and which of its bytes is a pair's."""

    register: Uint32
    byte: int


@dataclass(frozen=True)
class Stream:
    """Dropout of one head of one sequence.

    rows, keys     what steps of queries, and of keys, are added to
    offset         what is added to products of both
    threshold      of ONE
    """

    rows: Uint32
    keys: Uint32
    offset: Uint32
    threshold: Int32

    @staticmethod
    def of(dropped: Dropped, at: At) -> Stream:
        seed = load_wide(at.operands[dropped.seed], (), False)
        words = Uint32(seed), Uint32(seed >> Int64(32)), Uint32(at.b), Uint32(at.h)
        rows, keys = _chain(ROW_START, words), _chain(KEY_START, words)
        threshold = Int32(at.scalars[dropped.threshold])
        odd = Uint32(1)
        return Stream(rows | odd, keys | odd, _mix(rows ^ keys), threshold)

    def row(self, q: Int32) -> Uint32:
        """Number of queries q and q ^ HALF."""
        return self.rows + _pair(q) * Uint32(ROW_STEP)

    def group(self, kv: Int32) -> Uint32:
        """Number of keys kv and kv ^ HALF."""
        return self.keys + _pair(kv) * Uint32(KEY_STEP)

    def product(self, row: Uint32, group: Uint32) -> Uint32:
        """Number that a hash is made of."""
        return row * group + self.offset

    @property
    def bounds(self) -> Uint32:
        """KEPT and the threshold, twice."""
        return Uint32(KEPT + self.threshold) * Uint32(0x10001)

    @property
    def remaining(self) -> Float32:
        """1 / (1 - rate), 0 where nothing is kept."""
        return remaining(self.threshold)


def remaining(threshold: Int32) -> Float32:
    """Factor of what is kept."""
    left = (ONE - threshold).to(Float32)
    return select_(threshold < ONE, Float32(float(ONE)) / left, Float32(0.0))


def number(offset: int) -> int:
    """Number of an offset from a multiple of BLOCK, or of HALF of it, among pairs."""
    return offset // BLOCK * HALF + offset % HALF


@dataclass(frozen=True)
class RowDropout:
    """Dropout of a thread's two rows of a tile of weights, whose columns lie as in Hopper's accumulators: of
    each 8 keys the two from `lane` on. rows: numbers, one where both share hashes. shifts: of rows that do
    not, first bits of their bytes in a hash."""

    stream: Stream
    rows: tuple[Uint32, ...]
    shifts: tuple[Uint64, ...]
    bounds: Uint32
    lane: Int32

    @staticmethod
    def of(
        dropped: Dropped | None, at: At, query: Int32, offsets: tuple[int, ...], lane: Int32
    ) -> RowDropout | None:
        """Rows of queries query + offsets. Where the second is HALF, the first is in the first half of a
        BLOCK."""
        if dropped is None:
            return None
        stream = Stream.of(dropped, at)
        if offsets == (0, HALF):
            return RowDropout(stream, (stream.row(query),), (), stream.bounds, lane)
        queries = [query + offset for offset in offsets]
        rows = tuple([stream.row(q) for q in queries])
        return RowDropout(stream, rows, tuple([_shift(q) for q in queries]), stream.bounds, lane)

    def apply(self, weights: cute.Tensor, kv_first: Int32) -> None:
        """weights of 16 bits, an operand of a product, of a tile from key `kv_first` on: those that are
        dropped become 0."""
        pairs = cute.recast_tensor(weights, Int32)
        group = self.stream.group(kv_first + self.lane)
        for i, row in enumerate(self.rows):
            x = self.stream.product(row, group)
            for block in range(cute.size(pairs) // 4):
                steps = [(block * HALF + odd) * KEY_STEP for odd in range(2)]
                hashes = [_hash(row, x, step) for step in steps]
                for r in (i,) if self.shifts else range(2):
                    words = [self.word(bits, r) for bits in hashes]
                    for half in range(2):
                        at = 4 * block + 2 * half + r
                        pairs[at] = kept(pairs[at], words, half, self.bounds)

    def word(self, bits: Uint64, r: int) -> Word:
        """Bytes of row r with a group's two keys."""
        if self.shifts:
            return Word(Uint32(bits >> self.shifts[r]), 0)
        return Word(_high(bits), 0) if r else Word(Uint32(bits), MIDDLE // 8)


@dataclass(frozen=True)
class LaneDropout:
    """Dropout of one row, all columns of which a lane has, as tensor memory hands them out."""

    stream: Stream
    row: Uint32
    shift: Uint64
    bounds: Uint32

    @staticmethod
    def of(dropped: Dropped | None, at: At, q: Int32) -> LaneDropout | None:
        if dropped is None:
            return None
        stream = Stream.of(dropped, at)
        return LaneDropout(stream, stream.row(q), _shift(q), stream.bounds)

    def apply(self, weights: cute.Tensor, first: Int32) -> None:
        """weights of 16 bits, two in a register, of keys from `first` on, a multiple of BLOCK, of which there
        is a whole number of so many: those that are dropped become 0."""
        pairs = cute.recast_tensor(weights, Int32)
        x = self.stream.product(self.row, self.stream.group(first))
        for block in range(0, cute.size(pairs), HALF):
            for pair in range(HALF // 2):
                words = [
                    Word(Uint32(_hash(self.row, x, step * KEY_STEP) >> self.shift), 0)
                    for step in (block + 2 * pair, block + 2 * pair + 1)
                ]
                for half in range(2):
                    at = block + half * HALF // 2 + pair
                    pairs[at] = kept(pairs[at], words, half, self.bounds)


@dataclass(frozen=True)
class ColumnDropout:
    """Dropout of transposed scores: a thread's two rows are keys kv and kv + HALF, which share hashes.

    With Z the factor that dropout gives each weight, dV = (P Z)' dO, and dS = P (Z dP - delta), as delta, the
    sum of dO O, is that of P Z dP. Before, log-sum-exps and deltas of rows were changed (`changed`) so that P
    has the factor of what is kept, and delta is without it. So dS is P (dP - delta) or P (- delta).
    group: the keys' number; start: the product of it and of query 0.
    """

    group: Uint32
    start: Uint32
    bounds: Uint32

    @staticmethod
    def of(dropped: Dropped | None, at: At, first_key: Int32) -> ColumnDropout | None:
        """first_key: the first of a thread's two, in the first half of a BLOCK."""
        if dropped is None:
            return None
        stream = Stream.of(dropped, at)
        group = stream.group(first_key)
        return ColumnDropout(group, stream.product(stream.rows, group), stream.bounds)

    def apply(self, weights: cute.Tensor, columns: Columns) -> None:
        """weights of 16 bits, an operand of a product, of these columns: those that are dropped become 0."""
        pairs, offsets = cute.recast_tensor(weights, Int32), columns.queries
        x = self.start + _pair(columns.q_first) * Uint32(ROW_STEP) * self.group
        hashes: dict[int, Uint64] = {}
        for c in range(0, len(offsets), 2):
            two = [number(q) for q in offsets[c : c + 2]]
            for n in two:
                if n not in hashes:
                    hashes[n] = _hash(self.group, x, n * ROW_STEP)
            later = offsets[c] % BLOCK >= HALF
            words = [
                Word(_high(hashes[n]), 0) if later else Word(Uint32(hashes[n]), MIDDLE // 8) for n in two
            ]
            for r in range(2):
                at = columns.first + c + r
                pairs[at] = kept(pairs[at], words, r, self.bounds)

    def gradients(
        self, p: cute.Tensor, ds: cute.Tensor, weights: cute.Tensor, deltas: cute.Tensor, columns: Columns
    ) -> None:
        """ds (row, column), dP' less deltas, becomes dS'. p are P', and weights those of them that are
        kept; deltas: less delta, of these columns."""
        pairs, float16 = cute.recast_tensor(weights, Int32), weights.element_type.__name__ != "BFloat16"
        for c in range(0, len(columns.queries), 2):
            for r in range(2):
                at = r, columns.first + c
                after = r, columns.first + c + 1
                moved = _where_positive(
                    pairs[columns.first + c + r], (ds[at], ds[after]), (deltas[c], deltas[c + 1]), float16
                )
                ds[at], ds[after] = p[at] * moved[0], p[after] * moved[1]


def changed(lse2: Float32, delta: Float32, threshold: Int32) -> tuple[Float32, Float32]:
    """A row's log-sum-exp of base 2, which gives weights the factor of what is kept; and less delta without
    it. Where nothing is kept, weights are 0."""
    left = (ONE - threshold).to(Float32) * Float32(1.0 / ONE)
    moved = select_(threshold < ONE, lse2 + cute.math.log2(left, fastmath=True), Float32.inf)
    return moved, delta * left


@dataclass(frozen=True)
class KeyDropout:
    """Dropout of transposed scores of one key, as tensor memory hands them out. Another lane has the key that
    shares its hashes. shift: first bit of its bytes in a hash."""

    stream: Stream
    group: Uint32
    shift: Uint64
    bound: Int32

    @staticmethod
    def of(dropped: Dropped | None, at: At, key: Int32) -> KeyDropout | None:
        if dropped is None:
            return None
        stream = Stream.of(dropped, at)
        shift = Uint64(MIDDLE + (key & HALF))
        return KeyDropout(stream, stream.group(key), shift, (ONE // 2 - stream.threshold) << 24)

    def apply(self, p: cute.Tensor, q_first: Int32) -> tuple[cute.Tensor, Uint32]:
        """P' of up to 32 queries from `q_first` on, a multiple of BLOCK, with zeros for those that are
        dropped; and the bits of those that stay."""
        count = cute.size(p)
        used, word = cute.make_rmem_tensor((count,), Float32), Uint32(0)
        x = self.stream.product(self.stream.row(q_first), self.group)
        for block in range(0, count, BLOCK):
            for lane in range(HALF):
                bits = _hash(self.group, x, number(block + lane) * ROW_STEP)
                mine = Uint32(bits >> self.shift)
                for c, up in ((block + lane, 24), (block + lane + HALF, 8)):
                    stays: Boolean = Int32(mine << Uint32(up)) < self.bound
                    used[c] = select_(stays, p[c], Float32(0.0))
                    word = select_(stays, word | Uint32(1 << c), word)
        return used, word

    def stays(self, word: Uint32, c: int) -> Boolean:
        """True for a query that is kept, of the bits of those that stay."""
        return (word & Uint32(1 << c)) != Uint32(0)


class Columns(NamedTuple):
    """Columns of a thread from number `first` on: queries q_first + queries[c], where q_first is less than
    HALF past a multiple of BLOCK."""

    first: int
    q_first: Int32
    queries: tuple[int, ...]


def kept(pair: Int32, words: list[Word], half: int, bounds: Uint32) -> Int32:
    """Two weights of 16 bits, or 0 where they are dropped. words: of each, where bytes are, of which the pair
    has the one after `half` others."""
    (first, byte), (second, _) = words
    byte += half
    return _kept(pair, first, second, bounds, 0xC480 + 0x1111 * byte)


def _pair(i: Int32) -> Uint32:
    return Uint32(((i >> 4) << 3) | (i & 7))


def _shift(q: Int32) -> Uint64:
    """First bit of a query's bytes in a hash."""
    return Uint64(MIDDLE + 2 * (q & HALF))


def _high(bits: Uint64) -> Uint32:
    return Uint32(bits >> Uint64(32))


def _asm(kind: Any, values: tuple[Any, ...], text: str, registers: str, where: dict[str, Any]) -> Any:
    """Instructions without effects besides their result: written out where the compiler would compute in 64
    bits, or compute before a loop what it then has to keep."""
    return llvm.inline_asm(
        kind,
        [x.ir_value(**where) for x in values],
        text,
        registers,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def _hash(factor: Uint32, x: Uint32, step: int, *, loc: Any = None, ip: Any = None) -> Uint64:
    """The 64 bits of x + factor * step, where x is a product of a row's and a group's number."""
    text = (
        f"{{ .reg .b32 x, y; mad.lo.u32 x, $1, {step & 0xFFFFFFFF:#x}, $2; prmt.b32 y, x, x, {ORDER:#x};"
        " mul.wide.u32 $0, x, y; }"
    )
    return Uint64(_asm(T.i64(), (factor, x), text, "=l,r,r", {"loc": loc, "ip": ip}))


@dsl_user_op
def _kept(
    pair: Int32,
    first: Uint32,
    second: Uint32,
    bounds: Uint32,
    which: int,
    *,
    loc: Any = None,
    ip: Any = None,
) -> Int32:
    text = f"{{ .reg .b32 x; prmt.b32 x, $2, $3, {which:#x}; add.s16x2 x, x, $4; min.s16x2.relu $0, x, $1; }}"
    return Int32(_asm(T.i32(), (pair, first, second, bounds), text, "=r,r,r,r,r", {"loc": loc, "ip": ip}))


def _where_positive(
    pair: Int32, there: tuple[Float32, Float32], elsewhere: tuple[Float32, Float32], float16: bool
) -> tuple[Float32, Float32]:
    """Numbers of `there` where those of 16 bits in a register are positive, else those of `elsewhere`."""
    kind = "f16x2" if float16 else "bf16x2"
    found: tuple[Float32, Float32] = cute.arch.inline_ptx(
        f"{{{{ .reg .pred p, q; .reg .b32 zero; mov.b32 zero, 0; setp.gt.{kind} p|q, {{$r0}}, zero;"
        " selp.f32 {$w0}, {$r1}, {$r2}, p; selp.f32 {$w1}, {$r3}, {$r4}, q; }}",
        write_only_types=[Float32, Float32],
        read_only_args=[pair, there[0], elsewhere[0], there[1], elsewhere[1]],
    )
    return found


def _chain(start: int, words: tuple[Any, ...]) -> Uint32:
    x = Uint32(start)
    for word in words:
        x = _mix(x ^ word)
    return x


def _mix(x: Uint32) -> Uint32:
    for shift, factor in MIX:
        x = (x ^ (x >> Uint32(shift))) * Uint32(factor)
    return x ^ (x >> Uint32(16))
