"""The producer: four warps find the keys of a list, and gather them row by row.

What the list says, and where pages lie, takes as long to come as the rows themselves: an entry is asked for
two tiles before its key is copied, and looked at one tile before, when its page is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.gathered_key_values import GatheredKeyValues, Rows
from fa4flex.kernels.common.key_loader import Wanted
from fa4flex.kernels.common.key_lookup import Places
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.lists.config import ListsConfig
from fa4flex.kernels.lists.entries import NOTHING, Entries, United
from fa4flex.kernels.lists.resources import Shared, SharedTiles
from fa4flex.kernels.lists.tiles import ListTile, Walk
from fa4flex.kernels.plan.memory import block_bytes


class Together(NamedTuple):
    """KeyLoader of keys that follow each other: a sequence is its only page, and slots are its keys, from
    `offset` on; `pages` is the number past the last sequence."""

    sequence: Int32
    pages: Int32
    offset: Int32

    @property
    def entry(self) -> Any:
        return Int32

    def entry_of(self, key: Int32) -> tuple[Any, Int32]:
        return self.sequence, self.offset + key

    def place(self, entry: Any, slot: Int32) -> tuple[Int32, Int32]:
        return entry, slot


@dataclass(frozen=True)
class Located:
    """Rows of a tile that a warp gathers, as a lookup of GatheredKeyValues: each lane has the page and the
    slot of one."""

    loader: Any
    tile_n: int
    height: int
    warp: Int32
    page: Int32
    slot: Int32

    def places(self, behind: int = 0) -> Places:
        return Places(Int32(0), ((self.page, self.slot),))

    behind = 0


@dataclass(frozen=True)
class Listed:
    """Lists and pages by which a warp's lanes find keys. row: number of a lane's row in a tile."""

    entries: Entries | United
    shared: Shared
    walk: Walk
    loader: Any
    row: Int32
    tile_n: int
    beside: bool


class Pending(NamedTuple):
    """A lane's key of a tile, on its way: the unit that was asked for times `unit`, and `within` of it more;
    NOTHING where that is NOTHING. rows: bits of the rows of the lists, of those of the tile, that list it."""

    given: Any
    unit: Int32
    within: Int32
    rows: Int32


def asked(listed: Listed, i: Int32) -> Pending:
    """A lane's key of tile i. What the list says is asked for, whether it counts or not, and nothing waits
    for it."""
    walk, nothing = listed.walk, Int32(NOTHING)
    j = i * listed.tile_n + listed.row
    entry = j // walk.unit
    # Bits behind the last entry are not there.
    kept = cutlass.max(cutlass.min(entry, walk.entries - 1), Int32(0))
    given, counts, rows = listed.entries.at(listed.shared, kept)
    there = (entry < walk.entries) & (i < walk.listed) & counts
    within = select_(there, j - entry * walk.unit, nothing)
    unit = walk.unit
    if listed.beside:
        j -= walk.listed * listed.tile_n
        near = select_(j < walk.before, j, walk.start + j - walk.before)
        within = select_(i < walk.listed, within, select_(j < walk.more, near, nothing))
        unit = select_(i < walk.listed, unit, Int32(0))
        rows = select_(i < walk.listed, rows, nothing)
    return Pending(given, unit, within, rows)


def key_of(listed: Listed, pending: Pending) -> Int32:
    """The key, or NOTHING."""
    key = Int32(pending.given) * pending.unit + pending.within
    return Int32(select_((pending.within >= 0) & (key < listed.walk.end), key, Int32(NOTHING)))


@cute.jit
def ask(listed: cutlass.Constexpr[Listed], key: Int32) -> tuple[Any, Int32]:
    """Start to read where a key lies."""
    loader = listed.loader
    entry, slot = loader.entry(loader.pages), Int32(NOTHING)
    if key >= 0:
        entry, slot = loader.entry_of(key)
    return entry, slot


@cute.jit
def place(listed: cutlass.Constexpr[Listed], entry: Any, slot: Int32) -> tuple[Int32, Int32]:
    """Page and slot of a key that was asked for; the page past the last one of none."""
    page, found = listed.loader.pages, Int32(0)
    if slot >= 0:
        page, found = listed.loader.place(entry, slot)
    return page, found


class Producer:
    first_warp = 0
    """Number of the first of the warps, in a block."""

    def __init__(self, config: ListsConfig) -> None:
        self.config = config

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        tile: ListTile,
        walk: Walk,
        entries: cutlass.Constexpr[Entries | United],
        shared: cutlass.Constexpr[SharedTiles],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        config = self.config
        lane, warp = cute.arch.lane_idx(), self.number()
        row = warp * config.height + lane % config.height
        loader = self.loader(arguments, tile)
        listed = Listed(entries, shared, walk, loader, row, config.tile_n, config.beside)
        rows = self.rows(arguments, tile, shared)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.kv_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.v_stages)
        first, pending = asked(listed, tile.first), asked(listed, tile.first + 1)
        key, seen = key_of(listed, first), first.rows
        entry, slot = ask(listed, key)
        page, slot = place(listed, entry, slot)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            later, seen_later = key_of(listed, pending), pending.rows
            entry, offset = ask(listed, later)
            pending = asked(listed, i + 2)
            self.tell(shared, pipes, k_state, (key, seen), row)
            located = Located(loader, config.tile_n, config.height, warp, page, slot)
            key_values = GatheredKeyValues(pipes.k, pipes.v, *rows, located)  # type: ignore[arg-type]
            key_values.load_keys(k_state, i)
            k_state.advance()
            key_values.load_values(v_state, i)
            v_state.advance()
            page, slot = place(listed, entry, offset)
            key, seen = later, seen_later

    def number(self) -> Int32:
        """Number of the warp among those that gather."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return warp - self.first_warp if self.first_warp else warp

    @cute.jit
    def tell(
        self,
        shared: cutlass.Constexpr[SharedTiles],
        pipes: cutlass.Constexpr[Pipes],
        state: pipeline.PipelineState,
        told: tuple[Int32, Int32],
        row: Int32,
    ) -> None:
        """Tell which keys the warp's rows of a tile are, and which rows of the lists list them."""
        cute.arch.mbarrier_wait(pipes.ids_empty + state.index, state.phase)
        if cute.arch.lane_idx() < self.config.height:
            for n in cutlass.range_constexpr(self.config.told):
                shared.ids[row, n, state.index] = told[n]
        arrive_once(pipes.ids_full + state.index)

    def loader(self, arguments: Arguments, tile: ListTile) -> Any:
        if self.config.paged:
            assert arguments.loader is not None
            wanted = Wanted(tile.b, tile.kv_head, Int32(0), tile.kv_len)
            return arguments.loader.of(arguments, wanted)
        if self.config.lengths == "packed":
            return Together(Int32(0), Int32(1), tile.kv_offset)
        return Together(tile.b, Int32(arguments.k.shape[0]), Int32(0))

    def rows(self, arguments: Arguments, tile: ListTile, shared: SharedTiles) -> tuple[Rows, Rows]:
        """Rows of keys and of values of the tile's head."""
        widths = self.config.head_dim, self.config.head_dim_v
        k, v = (
            Rows(
                pages_of(cache)[None, None, tile.kv_head, None],
                target.iterator.toint(),
                width * cache.element_type.width // 8,
                block_bytes(width),
            )
            for cache, target, width in zip((arguments.k, arguments.v), (shared.k, shared.v), widths)
        )
        return k, v


def pages_of(x: cute.Tensor) -> cute.Tensor:
    """[pages, slots, heads, width], or packed tokens as a single page."""
    return (
        x if cute.rank(x) == 4 else cute.make_tensor(x.iterator, cute.prepend(x.layout, cute.make_layout(1)))
    )
