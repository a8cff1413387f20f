"""Next tile of queries of a block, and where its sequence lies."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.key_lengths import capacity, lengths_of, used_length
from fa4flex.kernels.common.sections import Divisor, Sections, in_section, sections_of
from fa4flex.kernels.plan.l2 import L2_BYTES, MIDDLE_BYTES, MIDDLE_KEYS, SHORT_BYTES, SHORT_KEYS


class Divisors(NamedTuple):
    """Divisors of a tile's number, prepared on the host. group: heads that share a KV head. sections:
    None where all tiles of a pair come before the next."""

    tiles: Divisor
    heads: Divisor
    group: Divisor
    sections: Sections | None


class Grid(NamedTuple):
    """Map from tile numbers to (query tile, head, batch): `group` (batch, head) pairs at a time, so that
    their keys and values stay in the L2 cache, and within a group all pairs of one query tile before the
    next."""

    tiles: Int32
    heads: Int32
    batch: Int32
    group: Int32
    divisors: Divisors | None = None

    @property
    def total(self) -> Int32:
        return self.tiles * self.heads * self.batch


class Work(NamedTuple):
    """One tile of queries: `tile` of sequence (b, h), its offsets into packed tensors and its lengths."""

    tile: Int32
    h: Int32
    b: Int32
    q_offset: Int32
    kv_offset: Int32
    q_len: Int32
    kv_len: Int32
    valid: Boolean


@cute.jit
def dense_grid(
    arguments: Arguments,
    tile_m: cutlass.Constexpr,
    ordered: cutlass.Constexpr,
    short_tiles: cutlass.Constexpr = 0,
) -> Grid:
    """The grid of dense tensors. `ordered`: query tiles differ in work, and all heads of one come first, of
    as many heads as have L2_BYTES of keys and values. Of heads of few keys fewer, if `short_tiles` are given:
    as many as have SHORT_BYTES or MIDDLE_BYTES, or so many tiles, if those are more."""
    batch, q_len, heads, head_dim = arguments.q.shape
    ratio = heads // kv_heads(arguments)
    group = Int32(1)
    if const_expr(ordered):
        keys = Int64(arguments.k.shape[1])
        if const_expr(arguments.loader is not None):
            keys = capacity(arguments)
        head_bytes = keys * 2 * (head_dim + arguments.v.shape[3])
        head_bytes = cutlass.max(head_bytes, Int64(1))
        most = Int32(cutlass.min(Int64(L2_BYTES) // head_bytes, Int64(1 << 20)))
        if const_expr(short_tiles > 0):  # noqa: SIM102  one is decided when compiled, one when run
            if keys <= MIDDLE_KEYS:
                bytes_of_few = select_(keys <= SHORT_KEYS, Int64(SHORT_BYTES), Int64(MIDDLE_BYTES))
                tiles = cutlass.max(Int32(cute.ceil_div(q_len, tile_m)) * ratio, Int32(1))
                few = Int32(cutlass.min(bytes_of_few // head_bytes, Int64(1 << 20)))
                most = cutlass.min(most, cutlass.max(few, Int32(short_tiles) // tiles))
        group = halved(Int32(batch * kv_heads(arguments)), cutlass.max(most, Int32(1))) * ratio
    group = cutlass.min(group, Int32(heads * batch))
    return Grid(Int32(cute.ceil_div(q_len, tile_m)), Int32(heads), Int32(batch), group)


@cute.jit
def halved(pairs: Int32, most: Int32) -> Int32:
    """All pairs, halved until they are at most so many: sections are then of about one width. Of a narrow
    last one, the longest tiles would begin when most multiprocessors are done."""
    width = pairs
    while width > most:
        width = (width + 1) // 2
    return width


@cute.jit
def packed_grid(arguments: Arguments, tile_m: cutlass.Constexpr) -> Grid:
    """An upper bound: every sequence may end in a tile that is not full."""
    tokens, heads, _ = arguments.q.shape
    batch = arguments.cu_seqlens_q.shape[0] - 1
    return Grid(Int32(tokens // tile_m + batch), Int32(heads), Int32(1), Int32(1))


@cute.jit
def with_divisors(grid: Grid, arguments: Arguments, ordered: cutlass.Constexpr) -> Grid:
    """The same grid, by whose divisors tiles are found. `ordered`: as of `dense_grid`."""
    group = cutlass.max(grid.heads // Int32(kv_heads(arguments)), Int32(1))
    tiles, heads = cutlass.max(grid.tiles, Int32(1)), cutlass.max(grid.heads, Int32(1))
    sections = None
    if const_expr(ordered):
        sections = sections_of(tiles, heads * grid.batch, cutlass.max(grid.group, Int32(1)))
    return grid._replace(divisors=Divisors(Divisor(tiles), Divisor(heads), Divisor(group), sections))


@cute.jit
def locate(number: Int32, grid: Grid, longest_first: cutlass.Constexpr) -> tuple[Int32, Int32, Int32]:
    """(query tile, h, b) of tile `number`."""
    pair, tile = pair_and_tile(number, grid)
    if const_expr(longest_first):
        tile = grid.tiles - 1 - tile
    h, b = by_heads(pair, grid)
    return tile, h, b


@cute.jit
def pair_and_tile(number: Int32, grid: Grid) -> tuple[Int32, Int32]:
    """(pair of head and batch, tile in the order of work) of tile `number`."""
    if const_expr(grid.divisors is not None):
        if const_expr(grid.divisors.sections is not None):
            pair, tile = in_section(number, grid.divisors.sections)
        else:
            pair, tile = divmod(number, grid.divisors.tiles)
    else:
        section = grid.group * grid.tiles
        first = number // section * grid.group
        within = number % section
        # The last section holds what is left of the pairs.
        width = cutlass.min(grid.group, grid.heads * grid.batch - first)
        tile = within // width
        pair = first + within % width
    return pair, tile


@cute.jit
def by_heads(number: Int32, grid: Grid) -> tuple[Int32, Int32]:
    """(number % heads, number // heads)."""
    if const_expr(grid.divisors is not None):
        before, h = divmod(number, grid.divisors.heads)
    else:
        h, before = number % grid.heads, number // grid.heads
    return h, before


@cute.jit
def dense_work(number: Int32, grid: Grid, arguments: Arguments, longest_first: cutlass.Constexpr) -> Work:
    tile, h, b = locate(number, grid, longest_first)
    return _dense_tile(arguments, tile, h, b, Boolean(True))


def _dense_tile(arguments: Arguments, tile: Int32, h: Int32, b: Int32, valid: Boolean) -> Work:
    q_len, kv_len = lengths_of(arguments, b)
    return Work(tile, h, b, Int32(0), Int32(0), q_len, kv_len, valid)


def with_lengths(work: Work, arguments: Arguments) -> Work:
    """A tile that was handed over, with lengths that all tiles have in common as these are known: what is
    read instead takes registers."""
    alike = cute.rank(arguments.q) == 4 and not any(
        x is not None for x in (arguments.loader, arguments.seqused_q, arguments.seqused_k)
    )
    return _dense_tile(arguments, work.tile, work.h, work.b, work.valid) if alike else work


@cute.jit
def find_sequence(
    wanted: Int32, cu_seqlens: cute.Tensor, used: cute.Tensor | None, rows: cutlass.Constexpr
) -> tuple[Int32, Int32, Boolean]:
    """(tile of its sequence, sequence, whether there is one) of tile number `wanted`, tiles having so many
    rows: 32 sequences at a time, one per lane."""
    sequences = Int32(cu_seqlens.shape[0] - 1)
    lane = cute.arch.lane_idx()
    b, before = Int32(0), Int32(0)
    found = Boolean(False)
    while b < sequences and not found:
        mine = b + lane
        tiles = Int32(0)
        if mine < sequences:
            length = cu_seqlens[mine + 1] - cu_seqlens[mine]
            if const_expr(used is not None):
                length = cutlass.min(length, used[mine])
            tiles = cute.ceil_div(length, rows)
        upto = tiles
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=0)
            upto = select_(lane >= (1 << step), upto + other, upto)
        past = cute.arch.popc(cute.arch.vote_ballot_sync(before + upto <= wanted))
        found = past < 32
        whole = cute.arch.shuffle_sync(upto, cutlass.max(past - 1, Int32(0)))
        before = before + select_(past > 0, whole, Int32(0))
        b = b + past
    return wanted - before, cutlass.min(b, sequences - 1), b < sequences


@cute.jit
def packed_work(
    number: Int32,
    grid: Grid,
    arguments: Arguments,
    queries: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
) -> Work:
    """The sequence that holds query tile `number // heads`, of so many queries. `longest_first`: its tiles
    come from the last to the first, so that the last ones of a launch are short."""
    h, wanted = by_heads(number, grid)
    cu_q, used = arguments.cu_seqlens_q, arguments.seqused_q
    tile, b, valid = find_sequence(wanted, cu_q, used, queries)
    work = packed_tile(arguments, tile, h, b, valid)
    if const_expr(longest_first):
        work = work._replace(tile=cute.ceil_div(work.q_len, queries) - 1 - tile)
    return work


@cute.jit
def ordered_work(number: Int32, grid: Grid, arguments: Arguments) -> Work:
    """All heads of a tile one after another: they read the same rows of the order, and near keys."""
    h, entry = by_heads(number, grid)
    b, tile = (cute.arch.make_warp_uniform(arguments.order[entry, i]) for i in range(2))
    if const_expr(arguments.cu_seqlens_q is not None):
        sequences = Int32(arguments.cu_seqlens_q.shape[0] - 1)
        work = packed_tile(arguments, tile, h, cutlass.min(b, sequences - 1), b < sequences)
    else:
        batch = Int32(arguments.q.shape[0])
        work = _dense_tile(arguments, tile, h, cutlass.min(b, batch - 1), b < batch)
    return work


def packed_tile(arguments: Arguments, tile: Int32, h: Int32, b: Int32, valid: Boolean) -> Work:
    cu_q, cu_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    if arguments.loader is not None:
        q_offset, kv_offset = cu_q[b], Int32(0)
        q_len, kv_len = cu_q[b + 1] - q_offset, used_length(arguments, b)
    else:
        q_offset, kv_offset = cu_q[b], cu_k[b]
        q_len, kv_len = cu_q[b + 1] - q_offset, cu_k[b + 1] - kv_offset
    if const_expr(arguments.seqused_q is not None):
        q_len = cutlass.min(q_len, arguments.seqused_q[b])
    if const_expr(arguments.seqused_k is not None):
        kv_len = cutlass.min(kv_len, arguments.seqused_k[b])
    return Work(tile, h, b, q_offset, kv_offset, q_len, kv_len, valid)


@cute.jit
def put_statistic(statistic: cute.Tensor, work: Work, q: Int32, value: Float32) -> None:
    """Write the statistic of row `q` of a sequence to [B, H, S], or packed [H, T]."""
    if const_expr(cute.rank(statistic) == 3):
        statistic[work.b, work.h, q] = value
    else:
        statistic[work.h, work.q_offset + q] = value
