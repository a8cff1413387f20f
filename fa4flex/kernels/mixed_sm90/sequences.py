"""Sequences of a mixed batch, as a warp of each block counts them: which have few rows, in how many parts
their keys are split, and where the results of parts lie.

Nothing is written down for other blocks: they, and the kernel that merges parts, find the same numbers from
the same lengths.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.key_lengths import check_length, used_length
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.mixed_sm90.config import LEAST, MOST_SPLIT, WAVES

WHOLE = 1 << 30
"""Tiles of keys of a part where nothing is split."""

MOST = 1 << 25
"""The most that a lane's sum counts for: sums of a warp have 32 bits."""

Kind = Literal["few", "many", "merged"]
"""Things that are counted per head: parts of sequences with few rows, tiles of others, rows of which there
are several parts."""


class Counts(NamedTuple):
    """Sequences with few rows, and tiles of many, per head; the most tiles of keys of a sequence with few;
    and tiles of keys of all tiles of a kind, per head."""

    few: Int32
    many: Int32
    longest: Int32
    few_keys: Int32
    many_keys: Int32


class Totals(NamedTuple):
    """Tiles of few rows, and of many, of all heads; tiles of keys of a part; and rows to merge, per head of
    keys."""

    few: Int32
    many: Int32
    share: Int32
    merged: Int32


class Place(NamedTuple):
    """Sequence from which on the next of a kind are looked for; how many of them there are before it, per
    head; how many rows of parts, per KV head; and how many sequences that have several parts. Blocks
    take tiles in rising order, so no sequence is looked at twice."""

    b: Int32
    before: Int32
    rows: Int32
    split: Int32


class Cut(NamedTuple):
    """Part of the keys of a tile of few rows, the number of parts, and where its rows lie in the workspace:
    from row `first` on. Of the tiles that have several parts it is number `split`."""

    part: Int32
    parts: Int32
    first: Int32
    split: Int32


class Piece(NamedTuple):
    """A tile of few rows as the schedule hands it out: sequence and KV head, and the part of the keys."""

    work: Work
    cut: Cut


def start() -> Place:
    return Place(*(Int32(0) for _ in Place._fields))


class Sequences:
    """`config` has few_rows, tile_m, tile_n, workers and share."""

    def __init__(self, config: Any) -> None:
        self.config = config

    # --- one sequence -------------------------------------------------------------------------------------

    def group(self, arguments: Arguments) -> Int32:
        """Heads that share a KV head."""
        return Int32(arguments.q.shape[1]) // Int32(arguments.k.shape[2])

    def queries(self, b: Int32, arguments: Arguments) -> Int32:
        length = arguments.cu_seqlens_q[b + 1] - arguments.cu_seqlens_q[b]
        if arguments.seqused_q is not None:
            length = cutlass.min(length, arguments.seqused_q[b])
        return length

    def key_tiles(self, b: Int32, arguments: Arguments) -> Int32:
        n = self.config.tile_n
        length = used_length(arguments, b)
        return length // n + select_(length % n > 0, Int32(1), Int32(0))

    def few(self, b: Int32, arguments: Arguments) -> tuple[Boolean, Int32]:
        """(whether the sequence has few rows, and some; rows for a KV head)."""
        rows = self.queries(b, arguments) * self.group(arguments)
        return (rows > 0) & (rows <= self.config.few_rows), rows

    def parts(self, b: Int32, arguments: Arguments, share: Int32) -> tuple[Int32, Int32]:
        """(parts of the keys of a head, none if rows are many; rows)."""
        few, rows = self.few(b, arguments)
        parts = (self.key_tiles(b, arguments) + (share - 1)) // share
        return select_(few, cutlass.max(parts, Int32(1)), Int32(0)), rows

    def tiles(self, b: Int32, arguments: Arguments) -> Int32:
        """Tiles of many rows, per head."""
        few, _ = self.few(b, arguments)
        tiles = Int32(cute.ceil_div(self.queries(b, arguments), self.config.tile_m))
        return select_(few, Int32(0), tiles)

    # --- all of them --------------------------------------------------------------------------------------

    @cute.jit
    def check(self, arguments: Arguments) -> None:
        """A warp's: tell of lengths that are not possible."""
        sequences = Int32(arguments.cu_seqlens_q.shape[0] - 1)
        for b in cutlass.range(cute.arch.lane_idx(), sequences, 32, unroll=1):
            check_length(arguments, b)

    @cute.jit
    def totals(self, arguments: Arguments) -> Totals:
        """A warp's. Lengths are read once where no sequence has keys for two parts."""
        counts = self.counts(arguments)
        heads, kv_heads = Int32(arguments.q.shape[1]), Int32(arguments.k.shape[2])
        share = Int32(WHOLE)
        if arguments.splits > 1:
            if const_expr(self.config.share is None):
                share = self.even_share(counts, arguments)
            else:
                share = Int32(self.config.share)
        few, merged = counts.few, Int32(0)
        if counts.longest > share:
            few, merged, share = self.shared(arguments, share, few)
        else:
            share = Int32(WHOLE)
        return Totals(few * kv_heads, counts.many * heads, share, merged)

    @cute.jit
    def counts(self, arguments: Arguments) -> Counts:
        """Tiles of many rows are taken for causal, at the end of their keys."""
        sequences = Int32(arguments.cu_seqlens_q.shape[0] - 1)
        few, many, longest = Int32(0), Int32(0), Int32(0)
        few_keys, many_keys = Int64(0), Int64(0)
        for b in cutlass.range(cute.arch.lane_idx(), sequences, 32, unroll=4):
            taken, _ = self.few(b, arguments)
            tiles, keys = self.tiles(b, arguments), self.key_tiles(b, arguments)
            mine = select_(taken, keys, Int32(0))
            few, many = few + select_(taken, Int32(1), Int32(0)), many + tiles
            longest, few_keys = cutlass.max(longest, mine), few_keys + Int64(mine)
            many_keys = many_keys + Int64(tiles) * cutlass.max(keys - tiles // 2, Int32(1))
        few, many = (cute.arch.warp_redux_sync(x, "add") for x in (few, many))
        longest = cute.arch.warp_redux_sync(longest, "max")
        return Counts(few, many, longest, _warp_sum(few_keys), _warp_sum(many_keys))

    def even_share(self, counts: Counts, arguments: Arguments) -> Int32:
        """Tiles of keys of a part if WAVES parts of as much work are all that each multiprocessor has."""
        heads, kv_heads = (Int64(x) for x in (arguments.q.shape[1], arguments.k.shape[2]))
        work = Int64(counts.few_keys) * kv_heads + Int64(counts.many_keys) * heads
        each = work // (WAVES * self.config.workers) + 1
        return Int32(cutlass.min(cutlass.max(each, Int64(LEAST)), Int64(WHOLE)))

    @cute.jit
    def shared(self, arguments: Arguments, share: Int32, whole: Int32) -> tuple[Int32, Int32, Int32]:
        """(tiles of few rows, rows to merge, share) where some sequence has several parts. Parts for whose
        results there is no room, or no counter, are not split: no length that a call was made for has
        that."""
        sequences = Int32(arguments.cu_seqlens_q.shape[0] - 1)
        few, merged, split, rows_of_parts = Int32(0), Int32(0), Int32(0), Int64(0)
        for b in cutlass.range(cute.arch.lane_idx(), sequences, 32, unroll=4):
            parts, rows = self.parts(b, arguments, share)
            few = few + parts
            merged = merged + select_(parts > 1, rows, Int32(0))
            split = split + select_(parts > 1, Int32(1), Int32(0))
            rows_of_parts = rows_of_parts + select_(parts > 1, Int64(parts) * rows, Int64(0))
        few, merged, split = (cute.arch.warp_redux_sync(x, "add") for x in (few, merged, split))
        heads = Int32(arguments.k.shape[2])
        most = cutlass.min(capacity(arguments) // heads, Int32(MOST - 1))
        none = _warp_sum(rows_of_parts) > most
        if const_expr(self.config.share is None):
            none = none | (split > MOST_SPLIT // heads)
        if none:
            few, merged, share = whole, Int32(0), Int32(WHOLE)
        return few, merged, share

    def counted(self, kind: Kind, b: Int32, arguments: Arguments, share: Int32) -> tuple[Int32, Int32]:
        """(how many of a kind a sequence has; rows of parts)."""
        if kind == "many":
            return self.tiles(b, arguments), Int32(0)
        parts, rows = self.parts(b, arguments, share)
        split = parts > 1
        mine = parts if kind == "few" else select_(split, rows, Int32(0))
        return mine, select_(split, parts * rows, Int32(0))

    @cute.jit
    def find(
        self,
        wanted: Int32,
        at: Place,
        arguments: Arguments,
        share: Int32,
        kind: cutlass.Constexpr[Kind],
    ) -> tuple[Int32, Place]:
        """(number within its sequence, place of that) of number `wanted` of a kind: 32 sequences at a time,
        one per lane."""
        sequences = Int32(arguments.cu_seqlens_q.shape[0] - 1)
        lane = cute.arch.lane_idx()
        b, before, rows, split = at
        found = Boolean(False)
        while b < sequences and not found:
            mine = b + lane
            count, kept = Int32(0), Int32(0)
            if mine < sequences:
                count, kept = self.counted(kind, mine, arguments, share)
            upto = _running(count)
            past = cute.arch.popc(cute.arch.vote_ballot_sync(before + upto <= wanted))
            found = past < 32
            before = before + _of_lane(upto, past - 1)
            if const_expr(kind != "many"):
                rows = rows + _of_lane(_running(kept), past - 1)
                several = cute.arch.vote_ballot_sync((kept > 0) & (lane < past))
                split = split + cute.arch.popc(several)
            b = b + past
        return wanted - before, Place(cutlass.min(b, sequences - 1), before, rows, split)


def capacity(arguments: Arguments) -> Int32:
    """Rows of parts that the workspace has room for."""
    return Int32(Int64(arguments.workspace.shape[0]) // (arguments.v.shape[3] + 1))


def outputs(arguments: Arguments) -> cute.Tensor:
    """[row, width], each divided by its own sum."""
    width = arguments.v.shape[3]
    # Strides of 32 bits would wrap where there are many rows.
    step = cute.assume(Int64(width), divby=8)
    layout = cute.make_layout((capacity(arguments), width), stride=(step, 1))
    return cute.make_tensor(arguments.workspace.iterator, layout)


def log_sums(arguments: Arguments) -> cute.Tensor:
    """[row], natural logarithms of the sums; -inf where a part has no key for a row."""
    rows = capacity(arguments)
    start = arguments.workspace.iterator + Int64(rows) * arguments.v.shape[3]
    return cute.make_tensor(start, cute.make_layout(rows))


def _warp_sum(x: Int64) -> Int32:
    """The sum of the lanes' numbers, each taken for MOST at most."""
    return cute.arch.warp_redux_sync(Int32(cutlass.min(x, Int64(MOST))), "add")


@cute.jit
def _running(x: Int32) -> Int32:
    """Sum of the numbers of the lanes up to this one."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(x, offset=1 << step, mask_and_clamp=0)
        x = select_(lane >= (1 << step), x + other, x)
    return x


def _of_lane(x: Int32, lane: Int32) -> Int32:
    """The number of a lane; 0 of one before the first."""
    return select_(lane >= 0, cute.arch.shuffle_sync(x, cutlass.max(lane, Int32(0))), Int32(0))
