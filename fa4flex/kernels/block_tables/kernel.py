"""Tile classes of a mask, empty, partial or full, found on the device: O(tiles) where bounds decide.

contents: a warp per part of what tables are made of compares its digest with the last one; least and greatest
          value of what depends on queries or keys alone, a warp per tile; whether pieces of what is searched
          are sorted, a warp per piece
          |  nothing more where all digests are the same
tables: a lane bounds the mask over a tile; tiles left open are asked pair by pair, by their warp, until two
        pairs differ; each row's tiles are listed in order; whether all pieces are sorted; the ends of key
        spans, a lane per row
          |  where sums are added up in one order
turns:  a lane per column counts the rows that list its tile, the last row first
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.block_tables.config import PIECE, THREADS, WARPS, Config
from fa4flex.kernels.block_tables.digest import compare_part, stale
from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.folds import folds_of
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise
from fa4flex.kernels.common.key_lengths import possible
from fa4flex.kernels.common.keys import row_spans
from fa4flex.kernels.common.pointwise import terms_of
from fa4flex.kernels.plan.arguments import BLOCK_TABLES

EMPTY, PARTIAL, FULL = 0, 1, 2
SPREAD = 8
"""Keys among the 32 pairs of a tile that are asked first."""

AT_ONCE = 8
"""Pairs that a lane asks about before its warp compares: as many reads are on their way at a time."""

LEAST, GREATEST = -(1 << 31), (1 << 31) - 1

_Arguments: Any = named("BlockTableArguments", BLOCK_TABLES.read_by("kernel"))


class BlockTableArguments(_Arguments):
    """operands, scalars: what the mask captured. q_len, kv_len: Int32, the lengths of dense calls, and the
    most that a sequence may have of others, whose own are int32 vectors: cu_seqlens_q, cu_seqlens_k [N + 1],
    seqused_q, seqused_k [N], corrected, and used_keys [N] as it was given; None where absent.
    ranges int32 [ranges, B, H, tiles] and pieces int32 [searched, B, H, pieces] are written first and then
    read. tables, turns: see Tables and Turns in kernels/common/arguments.py, one of them; a row's lists begin
    at as many elements as there are columns, times the number of rows before it. Rows of packed sequences
    stand behind each other there, a gap of less than one between two; pointers have as many for each sequence
    as one may have. turns.found: of 32 columns of a row, a bit for each that it lists, and how many it lists
    before them.
    """


class BlockTables:
    """The kernels for one Config and the hooks of one mask; `compile` takes the object itself."""

    direction = "tables"
    """Schema of its arguments."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def __call__(self, arguments: BlockTableArguments, stream: cuda.CUstream) -> None:
        rows, (batch, heads) = self.pointers(arguments).shape[2], self.maps(arguments)
        ends = Int32(0)
        if const_expr(self.config.spans):
            ends = cute.ceil_div(arguments.tables.row_ends.shape[3], 32)
        self.read_contents(arguments).launch(
            grid=self.grid_of_contents(arguments), block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )
        self.list_tiles(arguments).launch(
            grid=[cute.ceil_div(rows, WARPS) + cute.ceil_div(ends, WARPS), heads, batch],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        if const_expr(self.config.ordered):
            self.find_turns(arguments).launch(
                grid=[cute.ceil_div(self.groups(arguments), WARPS), heads, batch],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    def grid_of_contents(self, arguments: BlockTableArguments) -> list[Any]:
        """A warp for each part of contents, tile that has ranges, and piece that is compared: these two for
        each batch entry and head. Ranges differ by no batch entry and no head by which tables do not."""
        warps, heads, batch = Int32(1), Int32(1), Int32(1)
        if const_expr(len(self.config.ranges)):
            _, batch, heads, warps = arguments.ranges.shape
        if const_expr(self.config.spans):
            batch, heads = self.maps(arguments)
            warps = cutlass.max(warps, arguments.pieces.shape[3])
        parts, each = Int32(arguments.state.shape[0]) // 2, Int32(heads) * Int32(batch)
        # cute.ceil_div by a number that turns out to be 1 does not compile.
        warps = cutlass.max(Int32(warps), (parts + (each - 1)) // each)
        return [cute.ceil_div(warps, WARPS), heads, batch]

    def place(self, arguments: BlockTableArguments, b: Int32, h: Int32) -> At:
        q_len, kv_len = lengths(arguments, b)
        at = At(
            b=b,
            h=h,
            q_len=q_len,
            kv_len=kv_len,
            num_heads=arguments.num_heads,
            operands=tuple(arguments.operands),
            scalars=tuple(arguments.scalars),
        )
        if const_expr(len(self.config.ranges)):
            ends = range(2 * len(self.config.ranges))
            at = at.but(operands=at.operands + tuple(arguments.ranges[i, None, None, None] for i in ends))
        return at if self.hooks.uniform is None else at.but(uniform=tuple(self.hooks.uniform(at)))

    # --- contents ------------------------------------------------------------------------------------

    @cute.kernel
    def read_contents(self, arguments: BlockTableArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, h, b = cute.arch.block_idx()
        blocks, heads, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if arguments.turn != 0:
            part = ((b * heads + h) * blocks + block) * WARPS + warp
            compare_part(self.read(arguments), arguments.state, arguments.turn, part)
        tile, at = block * WARPS + warp, self.place(arguments, b, h)
        for i in cutlass.range_constexpr(len(self.config.ranges)):
            self.find_range(arguments, at, tile, i)
        if const_expr(self.config.spans):
            for i in cutlass.range_constexpr(len(self.config.searched)):
                self.compare_piece(arguments, at, tile, i)

    def read(self, arguments: BlockTableArguments) -> tuple[cute.Tensor, ...]:
        """Tensors that tables are made of: captured ones, and lengths."""
        a = arguments
        lengths = a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k, a.used_keys
        return *(a.operands[i] for i in self.config.read), *(x for x in lengths if x is not None)

    @cute.jit
    def find_range(
        self,
        arguments: BlockTableArguments,
        at: cutlass.Constexpr[At],
        tile: Int32,
        i: cutlass.Constexpr[int],
    ) -> None:
        """The least and greatest value of one range over a tile."""
        one, hook = self.config.ranges[i], self.hooks.ranges[i]
        along_q = one.index == "q"
        size, length = (self.config.tile[0], at.q_len) if along_q else (self.config.tile[1], at.kv_len)
        first, lane = tile * size, cute.arch.lane_idx()
        # One of the blocks of all batch entries, or heads, finds what is the same for these.
        mine = (first < length) & (one.by_batch | (at.b == 0)) & (one.by_heads | (at.h == 0))
        if mine:
            least, greatest = Int32(GREATEST), Int32(LEAST)
            for step in cutlass.range(0, size, 32, unroll=4):
                index = cutlass.min(first + cutlass.min(step + lane, size - 1), length - 1)
                value = Int32(evaluated(hook, at_index(at, along_q, index)))
                least, greatest = cutlass.min(least, value), cutlass.max(greatest, value)
            least = cute.arch.warp_redux_sync(least, "min")
            greatest = cute.arch.warp_redux_sync(greatest, "max")
            if lane == 0:
                arguments.ranges[2 * i, at.b, at.h, tile] = least
                arguments.ranges[2 * i + 1, at.b, at.h, tile] = greatest

    @cute.jit
    def compare_piece(
        self,
        arguments: BlockTableArguments,
        at: cutlass.Constexpr[At],
        piece: Int32,
        i: cutlass.Constexpr[int],
    ) -> None:
        """A warp's: whether the elements of a piece fit in 32 bits, and none is greater than the next."""
        table, lane = arguments.operands[self.config.searched[i]], cute.arch.lane_idx()
        last = Int32(table.shape[cute.rank(table) - 1]) - 1
        if piece < arguments.pieces.shape[3]:
            fits = Boolean(True)
            for step in range(0, PIECE, 32):
                places = (cutlass.min(piece * PIECE + step + lane + more, last) for more in (0, 1))
                mine, following = (
                    Int64(evaluated(self.hooks.searched[i], at_index(at, False, place))) for place in places
                )
                fits = fits & (mine <= following) & (Int64(Int32(mine)) == mine)
            fits = cute.arch.vote_ballot_sync(~fits) == 0
            if lane == 0:
                arguments.pieces[i, at.b, at.h, piece] = Int32(fits)

    # --- tables -------------------------------------------------------------------------------------

    @cute.kernel
    def list_tiles(self, arguments: BlockTableArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if stale(arguments.state, arguments.turn):
            block, h, b = cute.arch.block_idx()
            row = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
            rows = Int32(self.pointers(arguments).shape[2])
            if row < rows:
                self.list_row(arguments, self.place(arguments, b, h), row)
            if const_expr(self.config.spans):
                self.find_order(arguments, row, h, b)
                behind = row - cute.ceil_div(rows, WARPS) * WARPS
                if behind >= 0:
                    self.find_ends(arguments, self.place(arguments, b, h), behind * 32)

    @cute.jit
    def find_ends(self, arguments: BlockTableArguments, at: cutlass.Constexpr[At], first: Int32) -> None:
        """A lane's: the ends of a row's key spans."""
        q = first + cute.arch.lane_idx()
        if q < at.q_len:
            for i, (lo, hi) in enumerate(row_spans(self.hooks, at_index(at, True, q))):
                arguments.tables.row_ends[2 * i, at.b, at.h, q] = Int32(0) if lo is None else lo
                arguments.tables.row_ends[2 * i + 1, at.b, at.h, q] = hi

    @cute.jit
    def find_order(self, arguments: BlockTableArguments, row: Int32, h: Int32, b: Int32) -> None:
        """The first row's warp finds whether all pieces are sorted."""
        pieces, lane = arguments.pieces.shape[3], cute.arch.lane_idx()
        if row == 0:
            fits = Boolean(True)
            for first in cutlass.range(0, pieces, 32, unroll=1):
                for i in cutlass.range_constexpr(len(self.config.searched)):
                    fits = fits & (arguments.pieces[i, b, h, cutlass.min(first + lane, pieces - 1)] != 0)
            fits = cute.arch.vote_ballot_sync(~fits) == 0
            if lane == 0:
                arguments.tables.in_order[b, h] = Int32(fits)

    @cute.jit
    def list_row(self, arguments: BlockTableArguments, at: cutlass.Constexpr[At], row: Int32) -> None:
        """A warp's: the partial and the full tiles of a row, in order. A row past the end of its sequence has
        none."""
        lane = cute.arch.lane_idx()
        own, listed = self.sides((at.q_len, at.kv_len))
        height, size = self.sides(self.config.tile)
        columns, whole = (listed + (size - 1)) // size, listed // size
        exists = row * height < own
        columns = select_(exists, columns, Int32(0))
        place = self.place_of_row(arguments, at, row, exists)
        partial, full = Int32(0), Int32(0)
        for first in cutlass.range(0, columns, 32, unroll=1):
            column = first + lane
            kind = select_(column < columns, self.bounded(at, row, cutlass.min(column, columns - 1)), EMPTY)
            left = cute.arch.vote_ballot_sync(kind == PARTIAL)
            while left != 0:
                one = cute.arch.popc((left & -left) - 1)
                found = self.asked(at, row, first + one)
                kind = select_(lane == one, found, kind)
                left = left & (left - 1)
            # Kernels do not look at the end of a sequence in full tiles.
            kind = select_((kind == FULL) & (column >= whole), Int32(PARTIAL), kind)
            if const_expr(self.config.ordered):
                kind = select_((kind == FULL) & (row >= own // height), Int32(PARTIAL), kind)
                partial = self.put_in_order(arguments, place, column, kind, partial)
            else:
                partial, full = self.put(arguments, place, column, kind, partial, full)
        self.point(arguments, at, row, place, partial, full)

    @cute.jit
    def put(
        self,
        arguments: BlockTableArguments,
        place: Int32,
        column: Int32,
        kind: Int32,
        partial: Int32,
        full: Int32,
    ) -> tuple[Int32, Int32]:
        """A warp's: list the tiles of a lane's column each, behind so many partial and full ones of the row;
        returns how many there are then."""
        tables, lane = arguments.tables, cute.arch.lane_idx()
        first_of_row, below = place * self.room(arguments), (Int32(1) << lane) - 1
        some, all_of = (cute.arch.vote_ballot_sync(kind == x) for x in (PARTIAL, FULL))
        if kind == PARTIAL:
            tables.partial_tiles[first_of_row + partial + cute.arch.popc(some & below)] = column
        if kind == FULL:
            tables.full_tiles[first_of_row + full + cute.arch.popc(all_of & below)] = column
        return partial + cute.arch.popc(some), full + cute.arch.popc(all_of)

    @cute.jit
    def put_in_order(
        self, arguments: BlockTableArguments, place: Int32, column: Int32, kind: Int32, count: Int32
    ) -> Int32:
        """The same in one list, of which `turns.found` tells."""
        turns, lane = arguments.turns, cute.arch.lane_idx()
        some = cute.arch.vote_ballot_sync(kind != EMPTY)
        if kind != EMPTY:
            before = count + cute.arch.popc(some & ((Int32(1) << lane) - 1))
            needs_mask = select_(kind == PARTIAL, Int32(1), Int32(0))
            turns.entries[place * self.room(arguments) + before] = 2 * column + needs_mask
        if lane == 0:
            note = 2 * (place * self.groups(arguments) + column // 32)
            turns.found[note] = some
            turns.found[note + 1] = count
        return count + cute.arch.popc(some)

    @cute.jit
    def point(
        self,
        arguments: BlockTableArguments,
        at: cutlass.Constexpr[At],
        row: Int32,
        place: Int32,
        partial: Int32,
        full: Int32,
    ) -> None:
        """One lane's: the pointers of a row, to so many tiles."""
        first = place * self.room(arguments)
        if cute.arch.lane_idx() == 0:
            if const_expr(self.config.ordered):
                ends: Any = ((arguments.turns.pointers, partial),)
            else:
                ends = ((arguments.tables.partial_ptr, partial), (arguments.tables.full_ptr, full))
                if partial + full == 0:
                    # Whoever writes all rows takes one tile at least, which has to be one that there is.
                    arguments.tables.partial_tiles[first] = Int32(0)
            for pointers, count in ends:
                pointers[at.b, at.h, row, 0] = first
                pointers[at.b, at.h, row, 1] = first + count

    # --- whose turn it is -----------------------------------------------------------------------------

    @cute.kernel
    def find_turns(self, arguments: BlockTableArguments) -> None:
        cute.arch.griddepcontrol_wait()
        if stale(arguments.state, arguments.turn):
            block, h, b = cute.arch.block_idx()
            group = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
            self.count_rows(arguments, self.place(arguments, b, h), group)

    @cute.jit
    def count_rows(self, arguments: BlockTableArguments, at: cutlass.Constexpr[At], group: Int32) -> None:
        """A warp's, of 32 columns: how many later rows list the tile of each entry. Lanes read what is noted
        of as many rows at a time, and take them one by one."""
        turns, lane = arguments.turns, cute.arch.lane_idx()
        own, listed = self.sides((at.q_len, at.kv_len))
        height, size = self.sides(self.config.tile)
        rows = select_(group * 32 * size < listed, (own + (height - 1)) // height, Int32(0))
        first, count = self.place_of_row(arguments, at, Int32(0), rows > 0), Int32(0)
        for step in cutlass.range(0, rows, 32, unroll=1):
            last = rows - 1 - step
            note = 2 * ((first + cutlass.max(last - lane, Int32(0))) * self.groups(arguments) + group)
            bits, before = turns.found[note], turns.found[note + 1]
            for i in cutlass.range(cutlass.min(rows - step, Int32(32)), unroll=1):
                some = cute.arch.shuffle_sync(bits, i)
                passed = cute.arch.shuffle_sync(before, i)
                if ((some >> lane) & 1) != 0:
                    entry = passed + cute.arch.popc(some & ((Int32(1) << lane) - 1))
                    turns.ranks[(first + last - i) * self.room(arguments) + entry] = count
                    count += 1

    # --- where lists stand ------------------------------------------------------------------------------

    def sides(self, both: Any) -> Any:
        """Both of a pair for queries and keys, for the rows of the tables first and then for what these
        list."""
        return both[::-1] if self.config.by_keys else both

    def pointers(self, arguments: BlockTableArguments) -> cute.Tensor:
        """Pointers of a kind of lists."""
        return arguments.turns.pointers if self.config.ordered else arguments.tables.partial_ptr

    def maps(self, arguments: BlockTableArguments) -> tuple[Any, Any]:
        """Batch entries and heads for which tables differ."""
        both = zip(self.pointers(arguments).shape[:2], self.config.varies, strict=True)
        batch, heads = (size if varies else 1 for size, varies in both)
        return batch, heads

    def room(self, arguments: BlockTableArguments) -> Int32:
        """Tiles that a row may list."""
        longest, size = self.sides((arguments.q_len, arguments.kv_len))[1], self.sides(self.config.tile)[1]
        return cutlass.max((longest + (size - 1)) // size, Int32(1))

    def groups(self, arguments: BlockTableArguments) -> Int32:
        """Groups of 32 of these."""
        return (self.room(arguments) + 31) // 32

    def place_of_row(self, arguments: BlockTableArguments, at: At, row: Int32, exists: Boolean) -> Int32:
        """Number of a row among all that have lists; behind them where a packed sequence has no such row."""
        rows, (_, heads) = self.pointers(arguments).shape[2], self.maps(arguments)
        if self.config.lengths != "packed":
            return (at.b * heads + at.h) * rows + row
        height = self.sides(self.config.tile)[0]
        tokens = self.sides((arguments.q_len, arguments.kv_len))[0]
        begins = self.sides((arguments.cu_seqlens_q, arguments.cu_seqlens_k))[0]
        of_head = tokens // height + (Int32(begins.shape[0]) - 1)
        place = at.h * of_head + begins[at.b] // height + (at.b + row)
        return select_(exists, place, Int32(heads) * of_head)

    def corner(self, row: Int32, column: Int32) -> tuple[Int32, Int32]:
        """First query and first key of a tile."""
        q_tile, kv_tile = (column, row) if self.config.by_keys else (row, column)
        return q_tile * self.config.tile[0], kv_tile * self.config.tile[1]

    def bounded(self, at: At, row: Int32, column: Int32) -> Int32:
        """A lane's: what bounds say of a tile; PARTIAL where they leave it open."""
        at = at_pair(at, *self.corner(row, column))
        certain, possible = (Boolean(evaluated(x, at)) for x in (self.hooks.certain, self.hooks.possible))
        return select_(certain, Int32(FULL), select_(possible, Int32(PARTIAL), Int32(EMPTY)))

    @cute.jit
    def asked(self, at: cutlass.Constexpr[At], row: Int32, column: Int32) -> Int32:
        """A warp's: what a tile is by its pairs, until two of them differ: first some from all over it, which
        tells of most, then one after another."""
        (queries, keys), lane = self.config.tile, cute.arch.lane_idx()
        corner = self.corner(row, column)
        across, along = lane // SPREAD * (queries - 1) // (32 // SPREAD - 1), lane % SPREAD * (keys - 1)
        allowed = self.allowed(at, corner, across, along // (SPREAD - 1))
        some = cute.arch.vote_ballot_sync(allowed) != 0
        every = cute.arch.vote_ballot_sync(~allowed) == 0
        step = Int32(0)
        while step < queries * keys and (every or not some):
            mine, other = Boolean(False), Boolean(False)
            for i in cutlass.range_constexpr(AT_ONCE):
                place = cutlass.min(step + (i * 32 + lane), queries * keys - 1)
                allowed = self.allowed(at, corner, place // keys, place % keys)
                mine, other = mine | allowed, other | ~allowed
            some = some | (cute.arch.vote_ballot_sync(mine) != 0)
            every = every & (cute.arch.vote_ballot_sync(other) == 0)
            step += AT_ONCE * 32
        return select_(some, select_(every, Int32(FULL), Int32(PARTIAL)), Int32(EMPTY))

    def allowed(self, at: At, corner: tuple[Int32, Int32], q: Int32, kv: Int32) -> Boolean:
        """True if a pair of a tile takes part; past the end of a sequence, the last one does in its place."""
        ends = (at.q_len - 1, at.kv_len - 1)
        pair = (cutlass.min(first + i, end) for first, i, end in zip(corner, (q, kv), ends, strict=True))
        return Boolean(evaluated(self.hooks.mask, at_pair(at, *pair)))


def lengths(arguments: BlockTableArguments, b: Int32) -> tuple[Int32, Int32]:
    """Numbers of queries and keys of a batch entry, or of a sequence."""
    a = arguments
    q_len = _length(a.q_len, a.cu_seqlens_q, a.seqused_q, b)
    if a.used_keys is None:
        return q_len, _length(a.kv_len, a.cu_seqlens_k, a.seqused_k, b)
    return q_len, possible(Int64(a.used_keys[b]), Int64(a.kv_len))


def _length(most: Int32, cu: cute.Tensor | None, used: cute.Tensor | None, b: Int32) -> Int32:
    length = most if cu is None else cu[b + 1] - cu[b]
    return length if used is None else cutlass.min(length, used[b])


# --- hooks at one place -----------------------------------------------------------------------------------


def at_index(at: At, along_q: bool, index: Int32) -> At:
    """The place of one query, or of one key."""
    number = index.to(Float32)
    if along_q:
        return at.but(q=index, q_float=number)
    return at.but(kv=index, kv_float=number, kv_base=index, kv_base_float=number)


def at_pair(at: At, q: Int32, kv: Int32) -> At:
    offset = kv - q
    number = offset.to(Float32)
    at = at.but(offset=offset, offset_float=number, offset_base=offset, offset_base_float=number)
    return at_index(at_index(at, True, q), False, kv)


def evaluated(hook: Pointwise | None, at: At) -> Any:
    """A hook's value at one place, all of its rates in turn."""
    assert hook is not None
    for rate in ("row", "column", "diagonal", "pair"):
        at = at.but(**{rate: terms_of(hook, rate, at)})
    (folds,) = folds_of(hook.folds, [at])
    return hook.element(at.but(folds=folds))
