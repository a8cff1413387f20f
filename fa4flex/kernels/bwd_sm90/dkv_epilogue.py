"""Epilogue of dK and dV for a tile of keys: from a warpgroup's registers by way of shared memory, whole rows,
by the copy engine or by threads."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, cute
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.bwd_sm90.config import KEYS, Config, swizzle
from fa4flex.kernels.bwd_sm90.resources import Shared, keys_of, swizzled_rows, transposed
from fa4flex.kernels.bwd_sm90.roles import STORED
from fa4flex.kernels.common.backward import KeyWork, token_of
from fa4flex.kernels.common.barriers import sync
from fa4flex.kernels.common.transfer import partition

WIDE = 8
"""Elements of 16 bits that a thread stores at once."""


def staged_sums(
    config: Config, shared: Shared, dk: cute.Tensor, dv: cute.Tensor, w: Int32
) -> tuple[cute.Tensor, ...]:
    """Shared memory in which a warpgroup leaves dK and dV, (64 keys, columns): where K and V were; or, where
    the next ones are coming then, its share of dS and its part of a tile of dQ; or, where dS is too small,
    its parts of the tiles of dQ, which may be one."""
    kinds, sums = (shared.k.element_type, shared.v.element_type), (dk, dv)
    if config.dk_by_ds:
        rows = _rows(shared.ds, kinds[0], dk, config.consumers)[None, None, w]
        return rows, _rows(shared.dq[None, w, 0], kinds[1], dv, 1)[None, None, 0]
    memories, parts, part = [shared.k, shared.v], config.consumers, w
    if config.persistent:
        memories = [shared.dq[None, w, i % config.dq_stages] for i in range(2)]
    if config.persistent or config.split == "products":
        parts, part = 1, 0
    return tuple(
        _rows(x, kind, acc, parts)[None, None, part]
        for x, kind, acc in zip(memories, kinds, sums, strict=True)
    )


def _rows(memory: cute.Tensor, kind: Any, acc: cute.Tensor, parts: int) -> cute.Tensor:
    """(64 keys, columns, part), swizzled."""
    width = 2 * cute.size(acc)
    layout = swizzled_rows(kind, (KEYS, width, parts), swizzle(width, width))
    there = cute.cosize(memory.layout) * memory.element_type.width
    assert cute.cosize(layout) * kind.width <= there, "dK or dV needs more memory than it is given"
    return cute.make_tensor(cute.recast_ptr(memory.iterator, layout.inner, dtype=kind), layout.outer)


def put(
    mma: cute.TiledMma, narrowed: cute.Tensor, rows: cute.Tensor, lane: Int32, transposes: bool = False
) -> None:
    """Registers of a product, or of its transpose, in 16 bits, to shared memory."""
    order = LayoutEnum.COL_MAJOR if transposes else LayoutEnum.ROW_MAJOR
    atom = sm90.sm90_get_smem_store_op(order, rows.element_type, Float32)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(lane)
    cute.copy(copy, copy.retile(narrowed), copy.partition_D(transposed(rows) if transposes else rows))


@cute.jit
def store_by_copies(
    config: cutlass.Constexpr[Config],
    stores: cutlass.Constexpr[tuple[Any, ...]],
    staged: cutlass.Constexpr[tuple[cute.Tensor, ...]],
    work: KeyWork,
    number: Int32,
    lane: Int32,
    w: Int32,
) -> None:
    """Stores what warpgroup w staged, the sequence's 64 keys of this number, by its first warp, which does
    not wait for it."""
    cute.arch.fence_proxy("async.shared", space="cta")
    sync(STORED, w)
    if cute.arch.make_warp_uniform(lane // 32) == 0:
        for store, rows in zip(stores, staged, strict=True):
            width = cute.size(rows, mode=[1])
            whole = keys_of(config, store.tma_tensor, work, work.part)
            tiles = cute.local_tile(whole, (KEYS, width), (None, None))
            stage = cute.make_tensor(rows.iterator, cute.append(rows.layout, cute.make_layout(1)))
            from_shared, to_global = partition(store, stage, tiles)
            cute.copy(store.atom, from_shared[None, 0], to_global[(None, number, 0)])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def store_by_threads(
    targets: cutlass.Constexpr[tuple[cute.Tensor, ...]],
    staged: cutlass.Constexpr[tuple[cute.Tensor, ...]],
    work: KeyWork,
    first_key: Int32,
    columns: tuple[Int32 | int, ...],
    lane: Int32,
    w: Int32,
) -> None:
    """Stores what warpgroup w staged of dK and dV, 16 bytes at a time, from these keys and columns on."""
    sync(STORED, w)
    # Read, and addressed, before the first branch: behind it, each piece would take that long by itself.
    found = []
    for target, rows, start in zip(targets, staged, columns, strict=True):
        pieces = cute.size(rows, mode=[1]) // WIDE
        for i in cutlass.range_constexpr(KEYS * pieces // 128):
            row, piece = (i * 128 + lane) // pieces, (i * 128 + lane) % pieces
            key, column = first_key + row, start + piece * WIDE
            taken = cute.make_rmem_tensor((WIDE,), rows.element_type)
            source = cute.logical_divide(rows[row, None], cute.make_layout(WIDE))[None, piece]
            cute.autovec_copy(source, taken)
            token = token_of(target, work.b, work.kv_offset, key, work.part)
            there = cute.logical_divide(token, cute.make_layout(WIDE))[None, column // WIDE]
            found.append((key < work.kv_len and column < target.shape[-1], taken, there))
    for i in cutlass.range_constexpr(len(found)):
        wanted, taken, there = found[i]
        if wanted:
            cute.autovec_copy(taken, there)
