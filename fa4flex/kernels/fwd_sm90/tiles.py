"""Tiles: how many queries and keys a block multiplies at once, as a table.

The shapes are those of FlashAttention-3 (Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention
with Asynchrony and Low-precision", section 4 and its published kernels): long tiles of keys make few, large
products; the output's accumulator leaves fewer registers for scores as heads grow wider.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.registers import Need, consumer_need, split_registers
from fa4flex.kernels.fwd_sm90.roles import barrier_table
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.paging import in_boxes, producing, readable, too_many_boxes
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.work import Work, is_plain

Pair = tuple[int, int]
WIDTHS = (64, 96, 128, 160, 192, 256)
"""Widths that a tile in shared memory may have: those that swizzle in whole blocks of 32 or 64 columns."""

STAGES = (2, 1)
"""Tiles of K, and as many of V, in flight: two hide the copy of one behind the products of the other."""

SHARING = (3, 2)
"""Blocks of one warpgroup that share a multiprocessor, best first: the softmax of one runs under the products
of others."""

KEYS_IN_FLIGHT = (192, 128)
"""Keys of the tiles of K, and as many of V, in flight of each of these, best first."""

SHARED_WIDEST = 128
"""Widest heads of such blocks: two of wider ones have no room for two stages."""

NARROW = 64
"""Widest heads of which tiles may have 192 queries, and are found by divisors: short tiles are what such
divisions and waits for queries are much of."""

AHEAD = 96
"""Widest heads of which tiles under a mask, some of them short, wait long for their queries."""


@dataclass(frozen=True)
class Tiles:
    """tile_m queries and tile_n keys per step; head_dim and head_dim_v as padded in shared memory; q_stages
    tiles of queries in flight; bytes of an element of q and k, and of v; blocks that share a
    multiprocessor."""

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    q_stages: int = 1
    itemsize: int = 2
    v_itemsize: int = 2
    blocks: int = 1

    @property
    def transposed(self) -> bool:
        """True if values have a row of keys per channel, as products of 8 bits read them."""
        return self.v_itemsize == 1

    @property
    def values(self) -> tuple[int, int]:
        """Rows and columns of a tile of values."""
        n, dv = self.tile_n, self.head_dim_v
        return (dv, n) if self.transposed else (n, dv)

    @property
    def consumers(self) -> int:
        """Consumer warpgroups: each owns 64 rows."""
        return self.tile_m // 64

    @property
    def narrow(self) -> bool:
        return self.width <= NARROW

    @property
    def width(self) -> int:
        """Columns of the wider of both."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def capacity(self, target: Target) -> int:
        """Bytes of shared memory that a block may have."""
        return target.shared_memory_of(self.blocks)

    def shares(self, problem: Problem, kv_stages: int, target: Target) -> bool:
        """True if the output takes no memory of its own: it is staged where the queries lie, or not at all.
        With memory of its own, the next queries come while the output leaves."""
        if not staged(problem):
            return True
        if self.itemsize < OUT_BYTES or not may_share(self.head_dim, self.head_dim_v):
            return False
        sizes = self._sizes(problem, kv_stages)
        apart = lay_out(sizes, {}, barrier_table(self, kv_stages, problem.uneven).used, target)
        return apart.total > self.capacity(target)

    def memory(self, problem: Problem, kv_stages: int, target: Target, dynamic: bool | None = None) -> Memory:
        """The shared-memory map with this many tiles of K and of V in flight. `dynamic`: the next tile is
        handed over in it; None: as plans do by default, where tiles differ in work."""
        dynamic = problem.uneven if dynamic is None else dynamic
        sizes = ({"next": NUMBER * HANDED} if dynamic else {}) | self._sizes(problem, kv_stages)
        aliased = "out" in sizes and self.shares(problem, kv_stages, target)
        alias = {"out": "q"} if aliased else {}
        memory = lay_out(sizes, alias, barrier_table(self, kv_stages, dynamic).used, target)
        return replace(memory, capacity=self.capacity(target))

    def _sizes(self, problem: Problem, kv_stages: int) -> dict[str, int]:
        size = self.itemsize
        sizes = {
            "q": tile_bytes(self.tile_m, self.head_dim, size) * self.q_stages,
            "k": tile_bytes(self.tile_n, self.head_dim, size) * kv_stages,
            "v": tile_bytes(self.tile_n, self.head_dim_v, self.v_itemsize) * kv_stages,
        }
        if staged(problem):
            sizes["out"] = tile_bytes(self.tile_m, self.head_dim_v, OUT_BYTES)
        return sizes


OUT_BYTES = 2
"""Bytes of an element of an output that is staged."""


def staged(problem: Problem) -> bool:
    """True if the output leaves by TMA, from shared memory. Rows of ragged batches end within tiles, and
    float32 takes twice the room: those go straight from registers to global memory. Its sectors of 32 bytes
    are what four lanes have of a float32 row next to each other."""
    return problem.lengths == "dense" and not problem.wide_output


def may_share(head_dim: int, head_dim_v: int) -> bool:
    """True if the output may be staged where the queries lie: one warpgroup stores its rows while another
    multiplies its queries, so each one's output starts where its own queries do, and must fit there."""
    return head_dim_v <= head_dim


LITTLE_CODE = (128, 64)
"""Tile of scores that read much for each pair: half as many keys are half as much code in each step, which
the compiler takes less than half as long for, and reads are as many."""

MOST_PAGED = 128
"""Queries per tile where keys lie in pages."""


@dataclass(frozen=True)
class Row:
    """For heads up to (head_dim, head_dim_v): tiles in order of preference where the score is used as it is
    (`plain`) and where hooks run per pair (`hooked`)."""

    head_dim: int
    head_dim_v: int
    plain: tuple[Pair, ...]
    hooked: tuple[Pair, ...]


# 64: three consumer warpgroups have 160 registers each, so heavier hooks fall back to two with 240.
# 96: 192 queries would leave 160 registers for scores, probabilities and 48 of output: too few.
# 128: longer tiles fit where no hook needs registers, but none was faster (docs/notes/forward_sm90.md).
# 160, 192, 256: the output takes 80 to 128 registers, and K and V of two stages most of the memory.
# Where v is wider than q, the output needs memory of its own, and what is left may hold fewer keys.
TABLE = (
    Row(64, 64, ((192, 128), (128, 128)), ((192, 128), (128, 128))),
    Row(96, 96, ((128, 128),), ((128, 128), (128, 96))),
    Row(128, 128, ((128, 128),), ((128, 128), (128, 96))),
    Row(160, 160, ((128, 128), (128, 112)), ((128, 128), (128, 112), (128, 96))),
    Row(192, 128, ((128, 128), (128, 112)), ((128, 128), (128, 112), (128, 96))),
    Row(192, 192, ((128, 112), (128, 96)), ((128, 112), (128, 96))),
    Row(256, 256, ((128, 80), (128, 64)), ((128, 64),)),
)

_OF_SCALES = ((128, 128), (128, 64))
CODES_TABLE = (
    Row(64, 64, ((192, 128), *_OF_SCALES), ((192, 128), *_OF_SCALES)),
    Row(192, 128, _OF_SCALES, _OF_SCALES),
    Row(256, 256, _OF_SCALES, _OF_SCALES),
)
"""Tiles of codes: keys of one have one scale, so that they divide the keys of a scale."""


@dataclass(frozen=True)
class Choice:
    """Tiles, stages and why."""

    tiles: Tiles
    kv_stages: int
    reasons: tuple[str, ...]


def pad(width: int) -> int:
    """The width of the tile in shared memory that holds rows this wide; TMA fills the rest with zeros."""
    return next(w for w in WIDTHS if w >= width)


def candidates(problem: Problem, plain: bool) -> tuple[Pair, ...]:
    """The (queries, keys) for this problem, those first that were measured most: one where scores read much,
    else those of the table; where keys lie in pages, those of few boxes, or by rows."""
    table = TABLE if problem.keys.codes is None else CODES_TABLE
    row = next(r for r in table if r.head_dim >= problem.head_dim and r.head_dim_v >= problem.head_dim_v)
    pairs = row.plain if plain else (LITTLE_CODE,) if problem.many_reads else row.hooked
    if problem.keys.loaded:
        fitting = (pair for pair in pairs if _for_pages(problem, pair))
        return tuple(sorted(fitting, key=lambda pair: too_many_boxes(problem, pair[1])))
    return pairs


def _for_pages(problem: Problem, pair: Pair) -> bool:
    """True if producers can look pages up for such tiles: beside three consumers they have too few
    registers."""
    if pair[0] > MOST_PAGED:
        return False
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    boxed = in_boxes(problem, pair[1]) and readable(problem, widths)
    return boxed or producing(problem, pair[1]) == "gathering"


def choose(request: ForwardRequest) -> tuple[Choice, ...]:
    """The user's tile where it is legal, else those of the table that may be taken, in its order: the first
    one whose estimate of registers fits, and others with as many keys whose estimate does, which differ in
    rows.

    Raises UnsupportedError for a tile that the chip's instructions, registers or shared memory do not have.
    """
    problem, work, target = request.problem, request.work, request.target
    if request.schedule.tile is not None:
        return (_honour(problem, work, target, request.schedule.tile),)
    shared = _of_blocks(problem, work, target)
    if shared is not None:
        return (shared,)
    reasons: list[str] = []
    over: dict[int, Choice] = {}
    found: list[Choice] = []
    for pair in candidates(problem, is_plain(request.facts, problem)):
        tiles, need, limit = _try(pair, problem, work)
        stages = STAGES[0]
        memory = tiles.memory(problem, stages, target)
        if memory.total > target.shared_memory:
            reasons.append(
                f"not {_name(pair)}: {memory.total} bytes of shared memory of {target.shared_memory}"
            )
        elif need.total > limit:
            reasons.append(f"not {_name(pair)}: {need.explain()} registers of {limit}")
            over.setdefault(need.total - limit, Choice(tiles, stages, ()))
        elif not found or pair[1] == found[0].tiles.tile_n:
            why = "as scores read much" if pair == LITTLE_CODE and problem.many_reads else "by the table"
            fits = f"{_name(pair)} {why}: {need.explain()} registers of {limit}"
            ahead = _with_queries_ahead(tiles, problem, stages, target)
            found.append(Choice(ahead, stages, (*reasons, fits)))
    return tuple(found) or (_over(over, reasons, problem),)


def _of_blocks(problem: Problem, work: Work, target: Target) -> Choice | None:
    """Tiles that no edge of a map's blocks cuts, of as many blocks per multiprocessor as registers and shared
    memory have room for. None for other masks, keys in pages and codes, wide heads, and hooks that take too
    many registers."""
    wide = max(problem.head_dim, problem.head_dim_v) > SHARED_WIDEST
    if problem.blocks is None or wide or problem.keys.loaded or problem.keys.codes is not None:
        return None
    pair = problem.blocks
    for blocks in SHARING[work.loads >= 1 :]:  # beside loads of pairs, three spill
        one, need, limit = _try(pair, problem, work, blocks)
        stages = _shared_stages(one, problem, target)
        if stages is not None and need.total <= limit:
            why = f"{_name(pair)}, as a map has blocks of these edges: {need.explain()} registers of {limit}"
            return Choice(_with_queries_ahead(one, problem, stages, target), stages, (why,))
    return None


def _shared_stages(tiles: Tiles, problem: Problem, target: Target) -> int | None:
    """Stages that leave the output room of its own, so that the next queries come while it leaves; else the
    most that fit, or None."""
    stages = [keys // tiles.tile_n for keys in KEYS_IN_FLIGHT]
    fitting = [s for s in stages if tiles.memory(problem, s, target).total <= tiles.capacity(target)]
    apart = (s for s in fitting if not (staged(problem) and tiles.shares(problem, s, target)))
    return next(apart, fitting[0] if fitting else None)


def _over(over: dict[int, Choice], reasons: list[str], problem: Problem) -> Choice:
    """The tile that is the least over its registers. Raises UnsupportedError where there is none."""
    if not over:
        raise UnsupportedError(
            f"pages of {problem.keys.together} keys or a multiple, and heads of {problem.head_dim}",
            "keys of a tile in copies that one warp starts",
            "nothing: pages are gathered instead",
        )
    best = over[min(over)]
    least = f"{_name((best.tiles.tile_m, best.tiles.tile_n))} is the least over; it may spill"
    return replace(best, reasons=(*reasons, least))


def _name(pair: Pair) -> str:
    return f"{pair[0]} x {pair[1]}"


def _try(pair: Pair, problem: Problem, work: Work, blocks: int = 1) -> tuple[Tiles, Need, int]:
    sizes = {"itemsize": problem.itemsize, "v_itemsize": problem.v_itemsize, "blocks": blocks}
    tiles = Tiles(*pair, pad(problem.head_dim), pad(problem.head_dim_v), **sizes)
    need = consumer_need(tiles.tile_n, tiles.head_dim_v, work, problem.keys.codes)
    limit = split_registers(tiles.consumers, producer_computes(problem, work), blocks).consumer
    return tiles, need, limit


def producer_computes(problem: Problem, work: Work) -> bool:
    """True if the producer finds key tiles in block tables or from rows' spans, sequences in lengths, or keys
    in page tables."""
    found = problem.mask_form == "tables" or problem.lengths == "packed" or problem.keys.loaded
    return found or work.row_ends > 0


def _with_queries_ahead(tiles: Tiles, problem: Problem, kv_stages: int, target: Target) -> Tiles:
    """Tiles of narrow heads, under a mask also of heads up to AHEAD, of which the next one's queries come
    during this one where lengths are dense, if the output then has room of its own; others as they are."""
    widest = AHEAD if problem.uneven else NARROW
    more = replace(tiles, q_stages=2 if tiles.width <= widest else 1)
    fits = more.memory(problem, kv_stages, target).total <= more.capacity(target)
    dense = staged(problem) and not problem.keys.loaded
    return more if dense and fits and not more.shares(problem, kv_stages, target) else tiles


def _stages(tiles: Tiles, problem: Problem, target: Target) -> int | None:
    """The most stages that fit, or None."""
    fitting = (s for s in STAGES if tiles.memory(problem, s, target).total <= target.shared_memory)
    return next(fitting, None)


def _honour(problem: Problem, work: Work, target: Target, wanted: Pair) -> Choice:
    _require_legal(wanted, target)
    if problem.keys.loaded and not _for_pages(problem, wanted):
        raise UnsupportedError(
            f"tile={wanted} with pages of {problem.keys.together} keys or a multiple",
            f"at most {MOST_PAGED} queries, and keys of a tile in copies that one warp starts",
            "nothing: pages are gathered instead",
        )
    tiles, need, limit = _try(wanted, problem, work)
    if need.accumulators > limit:
        raise UnsupportedError(
            f"tile={wanted}: scores, probabilities and output take {need.accumulators} registers per thread",
            f"at most {limit} with {tiles.consumers} consumer warpgroups",
            f"use fewer keys per tile, or one of {_offers(problem)}",
        )
    kv_stages = _stages(tiles, problem, target)
    if kv_stages is None:
        tiles.memory(problem, STAGES[-1], target).check()  # raises, with every region in the message
    assert kv_stages is not None
    reasons = [f"{_name(wanted)}: the schedule asks for it"]
    if need.total > limit:
        reasons.append(f"it may spill: {need.explain()} registers, of {limit}")
    if kv_stages < STAGES[0]:
        reasons.append(f"{kv_stages} stage: more do not fit in shared memory, so copies are not hidden")
    return Choice(tiles, kv_stages, tuple(reasons))


def _require_legal(wanted: Pair, target: Target) -> None:
    tile_m, tile_n = wanted
    legal_m = [target.mma_rows * n for n in range(1, target.most_consumers + 1)]
    if tile_m not in legal_m:
        raise UnsupportedError(
            f"tile={wanted}: a consumer warpgroup multiplies {target.mma_rows} queries on {target.name}",
            f"{legal_m} queries",
            f"use tile=({min(legal_m, key=lambda m: abs(m - tile_m))}, {tile_n}), or leave it at None",
        )
    if tile_n % target.key_step or not 0 < tile_n <= target.most_keys:
        nearest = min(max(round(tile_n / target.key_step), 1) * target.key_step, target.most_keys)
        raise UnsupportedError(
            f"tile={wanted}: {tile_n} keys are no shape of a matrix instruction of {target.name}",
            f"a multiple of {target.key_step} up to {target.most_keys}",
            f"use tile=({tile_m}, {nearest}), or leave it at None",
        )


def _offers(problem: Problem) -> list[Pair]:
    return sorted(set(candidates(problem, True) + candidates(problem, False)))
