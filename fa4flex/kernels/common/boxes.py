"""Tiles of keys and values in shared memory, and the boxes of pages that make them up.

A tile is made of atoms of 8 keys and 64 columns, 1 KB, in which 128 bytes of a key are swizzled. Mostly the
atoms of a block of columns follow each other, all keys of a tile, and a box is a part of one block. Where a
box has whole rows, all blocks of 8 keys come before the next 8: products read either order, by other strides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.transfer import Transfers, Views, partition, reordered
from fa4flex.kernels.plan.memory import column_block
from fa4flex.kernels.plan.paging import COLUMNS, KEYS, Boxes

ATOM = COLUMNS * KEYS
"""Elements of an atom."""

MOST = 2**31 - 1
"""Extent of the units of a cache: no head is asked for that is not there."""


class KeyLayouts(NamedTuple):
    """Swizzled shared-memory layouts of tiles of keys and of values."""

    k: Any
    v: Any


class Layouts(NamedTuple):
    """Swizzled shared-memory layouts of q, k and v; the last mode counts warpgroups or stages."""

    q: Any
    k: Any
    v: Any


def stage_layouts(config: Any, kind: Any, boxes: Boxes | None = None) -> KeyLayouts:
    """Swizzled shared-memory layouts of k and v, whose last mode counts stages. `config` has tile_n,
    kv_stages and the widths of tiles, which boxes make up where they may have whole rows."""
    n, d, dv, stages = config.tile_n, config.head_dim, config.head_dim_v, config.kv_stages
    atoms = warpgroup.SmemLayoutAtomKind
    k_whole, v_whole = boxes.whole if boxes else (False, False)
    return KeyLayouts(
        _by_keys(atoms.K_SW128, (n, d, stages), (1, 0, 2), kind)
        if k_whole
        else sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, n, d), kind, stages),
        # values are loaded (tile_n, head_dim_v) row by row, which is an MN-major B operand
        _by_keys(atoms.MN_SW128, (dv, n, stages), (0, 1, 2), kind)
        if v_whole
        else sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (64, dv, n), kind, stages),
    )


def _by_keys(atom: Any, shape: tuple[int, ...], order: tuple[int, ...], kind: Any) -> Any:
    """The layout of tiles with all columns of 8 keys before the next 8."""
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, kind), shape, order=order)


def box_transfers(
    load: Any, arguments: Arguments, layouts: tuple[Any, Any], boxes: Boxes
) -> tuple[cpasync.TmaInfo, cpasync.TmaInfo]:
    """TMA descriptors of boxes of keys and of values in pages. layouts: of tiles in shared memory."""
    k_layout, v_layout = layouts
    k_width, v_width = cute.size(k_layout, mode=[1]), cute.size(v_layout, mode=[0])
    k_whole, v_whole = boxes.whole
    if k_whole:
        k = _rows_transfer(load, arguments.k, k_layout.inner, (boxes.rows, k_width))
    else:
        block = column_block(k_width)
        box = cute.make_layout((boxes.rows, block), stride=(block, 1))
        k = block_transfer(load, reordered(arguments.k, [1, 3, 2, 0]), k_layout.inner, box)
    if v_whole:
        v = _rows_transfer(load, arguments.v, v_layout.inner, (boxes.rows, v_width))
    else:
        block = column_block(v_width)
        box = cute.make_layout((block, boxes.rows), stride=(1, block))
        v = block_transfer(load, reordered(arguments.v, [3, 1, 2, 0]), v_layout.inner, box)
    return k, v


def block_transfer(load: Any, cache: cute.Tensor, swizzle: Any, box: cute.Layout) -> cpasync.TmaInfo:
    """The descriptor of boxes of a block of columns."""
    return cpasync.make_tiled_tma_atom(load, cache, cute.make_composed_layout(swizzle, 0, box), box.shape)


def _rows_transfer(load: Any, cache: cute.Tensor, swizzle: Any, box: tuple[int, int]) -> cpasync.TmaInfo:
    """The descriptor of boxes of whole rows."""
    shape = _box_shape(box)
    layout = cute.make_composed_layout(swizzle, 0, cute.make_layout(shape, stride=_box_stride(box)))
    return cpasync.make_tiled_tma_atom(load, _in_units(cache), layout, shape)


def _box_shape(box: tuple[int, int]) -> tuple[int, ...]:
    """Columns, keys, blocks of columns, eights of keys, and one page."""
    rows, width = box
    return COLUMNS, KEYS, width // COLUMNS, rows // KEYS, 1


def _box_stride(box: tuple[int, int]) -> tuple[int, ...]:
    width = box[1]
    return 1, COLUMNS, ATOM, KEYS * width, 0


def _in_units(cache: cute.Tensor) -> cute.Tensor:
    """[pages, page_size, Hkv, D] as (columns, 8 keys, units, eights of keys, pages). Heads are one dimension
    with blocks of columns, since there are five: units of 64 elements, and columns behind these, as a head
    may start between two."""
    pages, size = cache.shape[:2]
    page, key, _, column = cache.stride
    shape = 2 * COLUMNS, KEYS, MOST, size // KEYS, pages
    return cute.make_tensor(
        cache.iterator, cute.make_layout(shape, stride=(column, key, COLUMNS, KEYS * key, page))
    )


def box_views(
    transfers: Transfers,
    shared: tuple[cute.Tensor, cute.Tensor],
    arguments: Arguments,
    kv_head: Int32,
    boxes: Boxes,
) -> tuple[Views, Views]:
    """Views of boxes of keys and of values: of the global ones, modes after the first are number in a page,
    block of columns, page; of the shared ones number in a tile, block of columns, stage. shared: tiles
    (tile_n, D, stage) and (D, tile_n, stage)."""
    k_shared, v_shared = shared
    k_width, v_width = cute.size(k_shared, mode=[1]), cute.size(v_shared, mode=[0])
    k_whole, v_whole = boxes.whole
    if k_whole:
        k_views = _rows_views(transfers.k, k_shared, arguments.k, kv_head, (boxes.rows, k_width))
    else:
        k_views = page_views(transfers.k, k_shared, kv_head, (boxes.rows, column_block(k_width)))
    if v_whole:
        v_views = _rows_views(transfers.v, v_shared, arguments.v, kv_head, (boxes.rows, v_width))
        return k_views, v_views
    v_views = page_views(transfers.v, v_shared, kv_head, (column_block(v_width), boxes.rows))
    # Values are (D, S): blocks of columns come before boxes.
    to_shared, from_global = (
        cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1, 3])) for x in v_views
    )
    return k_views, (to_shared, from_global)


def page_views(
    transfer: cpasync.TmaInfo, shared: cute.Tensor, kv_head: Int32, tile: tuple[int, int]
) -> Views:
    """Views of boxes of this shape."""
    every = (None, None, None)
    pages = transfer.tma_tensor[None, None, kv_head, None]
    return partition(transfer, cute.local_tile(shared, tile, every), cute.local_tile(pages, tile, every))


def _rows_views(
    transfer: cpasync.TmaInfo,
    shared: cute.Tensor,
    cache: cute.Tensor,
    kv_head: Int32,
    box: tuple[int, int],
) -> Views:
    """Views of boxes of whole rows, which lie one after another in shared memory."""
    shape = _box_shape(box)
    if isinstance(cache.shape[2], tuple):  # KV heads share heads of the cache
        (share, _), (_, stride) = cache.shape[2], cache.stride[2]
        first = Int64(kv_head // share) * stride
    else:
        first = Int64(kv_head) * cache.stride[2]
    start = Int32(first % COLUMNS), 0, Int32(first // COLUMNS), 0, 0
    tiles = cute.local_tile(cute.domain_offset(start, transfer.tma_tensor), shape, (0, 0, None, None, None))
    by_box = cute.make_tensor(tiles.iterator, cute.select(tiles.layout, mode=[0, 1, 2, 3, 4, 6, 5, 7]))
    size, stages = box[0] * box[1], cute.size(shared, mode=[2])
    tile = cute.size(shared) // stages
    numbers = tile // size, 1, stages
    within = cute.make_layout((*shape, *numbers), stride=(*_box_stride(box), size, 0, tile))
    return partition(transfer, cute.make_tensor(shared.iterator, within), by_box, modes=len(shape))
