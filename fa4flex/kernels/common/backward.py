"""Grid of the kernels of a backward pass, as a launch passes it, and the tiles of keys that its blocks
take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.common.arguments import BackwardArguments, kv_heads
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.keys import Listed, Ranges, visited_by
from fa4flex.kernels.common.next_tile import NextTile, finish, publish, receive, take
from fa4flex.kernels.common.sections import Divisor, Sections, in_section, sections_of
from fa4flex.kernels.common.transfer import Tokens
from fa4flex.kernels.common.work import find_sequence
from fa4flex.kernels.plan.l2 import L2_BYTES
from fa4flex.kernels.plan.lengths import ROW_BLOCK


class KeyGrid(NamedTuple):
    """Map from block numbers to (tile of keys, head of dK, batch): all tiles of one head before the next; or,
    where sums are ordered or tiles differ in work, by sections. group: query heads that a block's keys meet.
    parts: heads of dK per KV head, where there may be several.

    All warps of a block divide, before the roles part: by numbers that the host prepares, or each division
    would take some hundred clocks.
    """

    total: Int32
    tiles: Divisor
    heads: Divisor
    group: Int32
    sections: Sections | None
    parts: Divisor | None


class KeyWork(NamedTuple):
    """One tile of keys: `tile` of sequence (b, kv_head), the lengths, and where the sequence begins in packed
    tensors and in rows' statistics. A tile that is none has kv_len 0. part: head of dK and dV, kv_head itself
    where query heads are not shared out. group: query heads that the tile meets, from part * group on."""

    tile: Int32
    kv_head: Int32
    b: Int32
    q_len: Int32
    kv_len: Int32
    q_offset: Int32
    kv_offset: Int32
    row_offset: Int32
    group: Int32
    part: Int32

    def queries(self, head: Int32) -> Tokens:
        """A head of the sequence's queries."""
        return Tokens(self.q_offset, self.q_len, head, self.b)

    def keys(self, head: Int32) -> Tokens:
        """A head of the sequence's keys."""
        return Tokens(self.kv_offset, self.kv_len, head, self.b)


class QueryTile(NamedTuple):
    """A tile of queries of one query head."""

    head: Int32
    tile: Int32


class QueryTiles(NamedTuple):
    """Tiles of queries: `masked_count` that need the mask, then the others, Ranges or Listed; or both in one
    order, as Turns.entries, in `masked` alone."""

    masked: Any
    full: Any
    masked_count: Int32
    count: Int32


class BackwardTileScheduler:
    """The tiles of keys that a block takes; `config` has tile_m, tile_n and masked, and is `deterministic`
    where sums are ordered: then turn_rows tells how many rows of a tile take turns by themselves. ctas: that
    take a tile together. packed_sections: heads of packed sequences go in sections, too."""

    def __init__(self, config: Any, hooks: Hooks, ctas: int = 1, packed_sections: bool = False) -> None:
        self.config = config
        self.hooks = hooks
        self.ctas = ctas
        self.packed_sections = packed_sections

    @cute.jit
    def grid(self, arguments: BackwardArguments) -> KeyGrid:
        if const_expr(arguments.cu_seqlens_k is not None):
            # An upper bound: every sequence may end in a tile that is not full.
            tokens = arguments.k.shape[0]
            tiles = Int32(tokens // self.config.tile_n + arguments.cu_seqlens_k.shape[0] - 1)
            batch = Int32(1)
        else:
            batch, kv_len = arguments.k.shape[:2]
            tiles, batch = Int32(cute.ceil_div(kv_len, self.config.tile_n)), Int32(batch)
        heads, parts = Int32(kv_heads(arguments)), None
        if const_expr(arguments.dk_parts is not None):
            heads = Int32(arguments.dk_parts.shape[-2])
            parts = Divisor(heads // Int32(kv_heads(arguments)))
        group = Int32(arguments.q.shape[-2]) // heads
        pairs = heads * batch
        sections = None
        if const_expr(self.in_sections(arguments)):
            together = heads
            if const_expr(arguments.cu_seqlens_k is None or not self.ordered(arguments)):
                together = self.heads_at_a_time(arguments, heads)
            sections = sections_of(tiles, pairs, together)
        return KeyGrid(tiles * pairs, Divisor(tiles), Divisor(heads), group, sections, parts)

    def ordered(self, arguments: BackwardArguments) -> bool:
        return arguments.turns is not None

    def in_sections(self, arguments: BackwardArguments) -> bool:
        packed = arguments.cu_seqlens_k is not None
        return self.ordered(arguments) or (self.packed_sections if packed else self.config.masked)

    def heads_at_a_time(self, arguments: BackwardArguments, dk_heads: Int32) -> Int32:
        """Heads of dK, of which there are `dk_heads`, in a section. Blocks of one head that run at the same
        time wait for each other where sums are ordered; and where a mask leaves the tiles of keys of a head
        less and less work, or sequences differ in length, a head that comes last ends with its longest tiles'
        blocks alone. About as many heads run beside each other as the L2 cache holds queries and sums of: of
        a packed sequence, whose length is not known here, those of the average. Sections are of about one
        width: the long tiles of a narrow last one would begin when there is nothing left beside them."""
        *rows, heads, head_dim = arguments.q.shape
        batch, q_len = 1, rows[-1]
        if arguments.cu_seqlens_q is not None:
            q_len = cute.ceil_div(q_len, arguments.cu_seqlens_q.shape[0] - 1)
        else:
            batch = rows[0]
        row_bytes = 2 * (head_dim + arguments.v.shape[-1]) + 4 * head_dim
        head_bytes = Int64(q_len) * row_bytes * (heads // dk_heads)
        group = Int32(cutlass.min(L2_BYTES // cutlass.max(head_bytes, Int64(1)), Int64(1 << 20)))
        pairs = Int32(dk_heads * batch)
        width = cutlass.max(cutlass.min(group, pairs), Int32(1))
        sections = cutlass.max((pairs + width // 2) // width, Int32(1))
        return cutlass.max((pairs + sections - 1) // sections, Int32(1))

    def first(self) -> Int32:
        """The number of a block's first tile."""
        number = Int32(cute.arch.block_idx()[0])
        return number // self.ctas if self.ctas > 1 else number

    @cute.jit
    def walk(
        self,
        grid: KeyGrid,
        arguments: BackwardArguments,
        next_tile: cutlass.Constexpr[NextTile],
        body: cutlass.Constexpr[Callable[..., Any]],
        carry: Any,
        takes: cutlass.Constexpr[bool] = False,
    ) -> Any:
        """Calls carry = body(work, phase, carry) for each tile of a persistent block, or for the one tile of
        another; phase is 0 and 1 in turn. One warp `takes` the numbers of tiles and hands them to the
        others."""
        number, phase = self.first(), Int32(0)
        if const_expr(self.config.persistent):
            begun = cute.arch.grid_dim()[0]
            if const_expr(self.config.takes_first):
                # The first one, too: blocks wait for what tiles before theirs clear, or add, so that none may
                # wait for one that has not begun.
                begun = Int32(0)
                if const_expr(takes):
                    number = take(arguments.counters, begun)
                    publish(number, next_tile, Int32(1))
                else:
                    number = receive(next_tile, Int32(0))
            while number < grid.total:
                work = self.work(number, grid, arguments)
                carry = body(work, phase, carry)
                told = phase ^ 1 if const_expr(self.config.takes_first) else phase
                if const_expr(takes):
                    # Not before: what a block took at the start of a long tile would wait for its end.
                    number = take(arguments.counters, begun)
                    publish(number, next_tile, told ^ 1)
                else:
                    number = receive(next_tile, told)
                phase ^= 1
            if const_expr(takes):
                finish(arguments.counters, cute.arch.grid_dim()[0])
        else:
            carry = body(self.work(number, grid, arguments), phase, carry)
        return carry

    @cute.jit
    def work(self, number: Int32, grid: KeyGrid, arguments: BackwardArguments) -> KeyWork:
        """The tile of a number."""
        packed = arguments.cu_seqlens_k is not None
        last_first = self.ordered(arguments) and self.config.masked
        zero = Int32(0)
        if const_expr(grid.sections is not None):
            pair, tile = in_section(number, grid.sections)
            if const_expr(last_first and not packed):
                tile = grid.tiles.divisor - 1 - tile
        else:
            pair, tile = divmod(number, grid.tiles)
        b, part = divmod(pair, grid.heads)
        kv_head = part
        if const_expr(grid.parts is not None):
            kv_head, _ = divmod(part, grid.parts)
        if const_expr(packed):
            cu_q, cu_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
            tile, b, valid = find_sequence(tile, cu_k, arguments.seqused_k, self.config.tile_n)
            tile = Int32(select_(valid, tile, zero))
            q_len, kv_len = cu_q[b + 1] - cu_q[b], Int32(select_(valid, cu_k[b + 1] - cu_k[b], zero))
            places = cu_q[b], cu_k[b], first_row(cu_q, b)
            work = KeyWork(tile, kv_head, b, q_len, kv_len, *places, grid.group, part)
        else:
            q_len, kv_len = Int32(arguments.q.shape[1]), Int32(arguments.k.shape[1])
            work = KeyWork(tile, kv_head, b, q_len, kv_len, zero, zero, zero, grid.group, part)
        if const_expr(arguments.seqused_q is not None):
            work = work._replace(q_len=cutlass.min(work.q_len, Int32(arguments.seqused_q[b])))
        if const_expr(arguments.seqused_k is not None):
            work = work._replace(kv_len=cutlass.min(work.kv_len, Int32(arguments.seqused_k[b])))
        if const_expr(packed and last_first):
            tiles = (work.kv_len + (self.config.tile_n - 1)) // self.config.tile_n
            work = work._replace(tile=cutlass.max(tiles - 1 - work.tile, zero))
        return work

    @cute.jit
    def steps(self, work: KeyWork, arguments: BackwardArguments) -> Int32:
        """Tiles of queries to visit, of all query heads that share the block's keys."""
        count = Int32(0)
        for g in cutlass.range(work.group, unroll=1):
            count += self.queries(work, work.part * work.group + g, arguments).count
        return count

    def place(self, work: KeyWork, h: Int32, heads: Int32, arguments: BackwardArguments) -> At:
        """Hook arguments for a tile and query head, with the uniform terms."""
        at = At(
            b=Int32(work.b),  # quotients by run-time numbers have no sign: no float is made of them
            h=Int32(h),
            q_len=work.q_len,
            kv_len=work.kv_len,
            num_heads=heads,
            scale=arguments.scale,
            scale_log2=arguments.scale_log2,
            operands=tuple(arguments.operands),
            scalars=tuple(arguments.scalars),
        )
        return at if self.hooks.uniform is None else at.but(uniform=tuple(self.hooks.uniform(at)))

    def queries(self, work: KeyWork, h: Int32, arguments: BackwardArguments) -> QueryTiles:
        """The tiles of queries to visit. In a tile of keys that passes the end, all need the mask; and so
        does a tile of queries that passes the end. A tile of keys wholly past the end visits none."""
        lengths = (arguments.cu_seqlens_k, arguments.seqused_q, arguments.seqused_k)
        ragged = any(x is not None for x in lengths)
        first_key = work.tile * self.config.tile_n
        there = first_key < work.kv_len
        ends = first_key + self.config.tile_n > work.kv_len
        if not self.config.masked:
            whole = work.q_len // self.config.tile_m
            count = (work.q_len + (self.config.tile_m - 1)) // self.config.tile_m
            if ragged:
                count = select_(there, count, Int32(0))
            return QueryTiles(None, None, select_(ends, count, count - whole), count)
        if self.hooks.queries is not None:
            at = self.place(work, h, Int32(arguments.q.shape[-2]), arguments)
            seen = visited_by(self.hooks, at, first_key, self.config.tile_n, self.config.tile_m)
            some, more = (tiles.total() for tiles in seen)
            return QueryTiles(*seen, select_(ends, some + more, some), some + more)
        row = select_(there, work.tile, Int32(0)) if ragged else work.tile

        def listed(pointers: cute.Tensor, tiles: cute.Tensor) -> Listed:
            first, last = (pointers[work.b, h, row, end] for end in (0, 1))
            return Listed(tiles, first, select_(there, last - first, Int32(0)) if ragged else last - first)

        if arguments.turns is not None:
            turns = listed(arguments.turns.pointers, arguments.turns.entries)
            return QueryTiles(turns, None, Int32(0), turns.total())
        tables = arguments.tables
        assert tables is not None
        partial = listed(tables.partial_ptr, tables.partial_tiles)
        full = listed(tables.full_ptr, tables.full_tiles)
        some, more = partial.total(), full.total()
        return QueryTiles(partial, full, select_(ends, some + more, some), some + more)


@cute.jit
def query_tile_at(queries: QueryTiles, i: Int32) -> Int32:
    """Tile i of both parts; without tables, from the last to the first."""
    tile = queries.count - 1 - i
    if const_expr(queries.masked is not None and queries.full is None):
        tile = queries.masked.at(i) >> 1
    elif const_expr(isinstance(queries.masked, Ranges)):
        passed = queries.masked.total()
        tile = select_(i < passed, queries.masked.at(i), queries.full.at(i - passed))
    elif const_expr(queries.masked is not None):
        passed = queries.masked.total()
        if i < passed:
            tile = queries.masked.at(i)
        else:
            tile = queries.full.at(i - passed)
    return tile


# --- whose turn it is ---------------------------------------------------------------------------------------


def needs_mask(entry: Int32) -> Boolean:
    """True if the tile of one of Turns.entries needs the mask."""
    return (entry & 1) != 0


@cute.jit
def await_turn(
    arguments: BackwardArguments,
    work: KeyWork,
    h: Int32,
    queries: QueryTiles,
    i: Int32,
    config: Any,
    part: Int32 | int = 0,
) -> cute.Pointer:
    """A warp's: wait until all tiles of keys before this one have added to a part of tile i, turn_rows of its
    rows or as many numbers; returns its counter."""
    tile, rank = turn_at(arguments, work, queries, i)
    counter = counter_of(arguments, work, QueryTile(h, tile), config, part)
    await_rank(counter, rank, seen(counter))
    return counter


@cute.jit
def turn_at(
    arguments: BackwardArguments, work: KeyWork, queries: QueryTiles, i: Int32
) -> tuple[Int32, Int32]:
    """(tile of queries of step i, how many tiles of keys add to it before this one). Of the step after the
    last one, numbers that say nothing."""
    rank = work.tile
    if const_expr(arguments.turns.ranks is not None):
        rank = queries.masked._replace(tiles=arguments.turns.ranks).at(i)
    return query_tile_at(queries, i), rank


def counter_of(
    arguments: BackwardArguments,
    work: KeyWork,
    at: QueryTile,
    config: Any,
    part: Int32 | int = 0,
) -> cute.Pointer:
    """Counter of a part of a tile of queries."""
    done, rows = arguments.turns.done, config.turn_rows
    place = at.tile * (config.tile_m // rows) + part
    if cute.rank(done) == 3:
        return done[work.b, at.head, None].iterator + place
    return done[at.head, None].iterator + (work.row_offset // rows + place)


@cute.jit
def seen(counter: cute.Pointer) -> Int32:
    """The number of tiles of keys that have added, in a warp's first lane."""
    done = Int32(0)
    if cute.arch.lane_idx() == 0:
        done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    return done


@cute.jit
def await_rank(counter: cute.Pointer, rank: Int32, done: Int32) -> None:
    """A warp's: wait until so many tiles of keys have added. done: how many had when they were last seen."""
    if cute.arch.lane_idx() == 0:
        while done != rank:
            done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()
    # What others added, they added by the copy engine, and so does this warp.
    cute.arch.fence_proxy("async.global")


def pass_turn(counter: cute.Pointer) -> None:
    """A warp's, once what it added is in global memory."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.atomic_add(counter, Int32(1), sem="release", scope="gpu")


def backwards() -> tuple[Int32, Int32, Int32]:
    """A block's index, counted from the last one on: of kernels before and after one that takes heads in
    their order. The L2 cache then has what that one begins with, and what it ended with."""
    return tuple(n - 1 - i for i, n in zip(cute.arch.block_idx(), cute.arch.grid_dim(), strict=True))


# --- where gradients go -------------------------------------------------------------------------------------


def written(arguments: BackwardArguments) -> tuple[cute.Tensor, cute.Tensor]:
    """dK and dV as blocks write them: those that are added up afterwards, where some are."""
    if arguments.dk_parts is None:
        return arguments.dk, arguments.dv
    return arguments.dk_parts, arguments.dv_parts


# --- where a sequence lies ----------------------------------------------------------------------------------


def first_row(cu_seqlens_q: cute.Tensor, b: Int32) -> Int32:
    """First row of a sequence in packed statistics: sequences begin at multiples of ROW_BLOCK, so far apart
    that each has room for its rows, padded to a multiple of ROW_BLOCK."""
    return (cu_seqlens_q[b] // ROW_BLOCK + b) * ROW_BLOCK


@cute.jit
def sequence_of_row(row: Int32, cu_seqlens_q: cute.Tensor) -> Int32:
    """A warp's: which sequence a row of packed statistics belongs to."""
    sequences = Int32(cu_seqlens_q.shape[0] - 1)
    lane = cute.arch.lane_idx()
    begun, looked = Int32(0), Int32(0)
    while looked < sequences and begun == looked:
        mine = looked + lane
        passed = Boolean(False)
        if mine < sequences:
            passed = first_row(cu_seqlens_q, mine) <= row
        begun += cute.arch.popc(cute.arch.vote_ballot_sync(passed))
        looked += 32
    return begun - 1


def rows_of(statistic: cute.Tensor, work: KeyWork, h: Int32, width: int = 1) -> cute.Tensor:
    """A head of a sequence, of [B, H, R * width] or packed [H, R * width]."""
    if cute.rank(statistic) == 3:
        return statistic[work.b, h, None]
    first = cute.assume(Int64(work.row_offset) * width, divby=ROW_BLOCK * width)
    return cute.domain_offset((first,), statistic[h, None])


def token_of(tensor: cute.Tensor, b: Int32, offset: Int32, i: Int32, head: Int32) -> cute.Tensor:
    """Token i of a sequence that begins at `offset`, of [B, S, H, D] or packed [T, H, D]."""
    if cute.rank(tensor) == 4:
        return tensor[b, i, head, None]
    return tensor[offset + i, head, None]
