"""Resources of the roles of the Hopper kernel for latent rows: tensors of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, cute
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.transfer import tile_room
from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE, ROWS, Config


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (64, width), pieces of keys (64, 64, block and piece), and for each row maxima and
    sums (warpgroup, 64). Blocks of keys, values, and probabilities are other views of the pieces; where all
    pieces are values, probabilities have room of their own, p (64, 64, block)."""

    q: cute.Tensor
    pieces: cute.Tensor
    p: cute.Tensor | None
    maxima: cute.Tensor
    sums: cute.Tensor

    def at(self, config: Config, block: int, piece: int) -> cute.Pointer:
        """First element of a piece."""
        return self.pieces.iterator + (block * config.pieces + piece) * BLOCK * PIECE

    def keys(self, config: Config, block: int) -> cute.Tensor:
        """A block as keys: (64, width)."""
        layout = sm90.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (ROWS, BLOCK, config.head_dim), self.pieces.element_type, 1
        )
        return _view(self.at(config, block, 0), layout)

    def values(self, config: Config, block: int, unit: int) -> cute.Tensor:
        """A block as values of the columns that a warpgroup has: (columns, 64)."""
        layout = sm90.make_smem_layout_b(
            LayoutEnum.COL_MAJOR, (ROWS, config.own * PIECE, BLOCK), self.pieces.element_type, 1
        )
        return _view(self.at(config, block, unit * config.own), layout)

    def weights(self, config: Config, block: int) -> cute.Pointer:
        """First probability of a block."""
        if self.p is not None:
            return self.p.iterator + block * BLOCK * BLOCK
        return self.at(config, block, config.spare[0])

    def probabilities(self, config: Config, block: int) -> cute.Tensor:
        """Probabilities of a block: (64, 64)."""
        layout = sm90.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, (ROWS, BLOCK, BLOCK), self.pieces.element_type, 1
        )
        return _view(self.weights(config, block), layout)


def _view(first: cute.Pointer, layout: Any) -> cute.Tensor:
    return cute.make_tensor(first, cute.slice_(layout.outer, (None, None, 0)))


class Layouts(NamedTuple):
    """Swizzled layouts of q and of pieces; their last mode counts stages. p: of probabilities that have room
    of their own."""

    q: Any
    pieces: Any
    p: Any


def layouts_of(config: Config, kind: Any) -> Layouts:
    q = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, BLOCK, config.head_dim), kind, 1)
    pieces = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, BLOCK, PIECE), kind, BLOCKS * config.pieces)
    p = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, BLOCK, BLOCK), kind, BLOCKS)
    return Layouts(q, pieces, None if config.spare else p)


def members_of(layouts: Layouts, kind: Any) -> dict[str, Any]:
    """Members of a block's shared memory."""
    q, pieces, p = layouts
    return {
        "queries": tile_room(kind, cute.cosize(q)),
        "keys": tile_room(kind, cute.cosize(pieces)),
        "probabilities": tile_room(kind, 0 if p is None else cute.cosize(p)),
        "maxima": cute.struct.MemRange[Float32, BLOCKS * ROWS],
        "sums": cute.struct.MemRange[Float32, BLOCKS * ROWS],
    }


def shared_of(storage: Any, layouts: Layouts) -> Shared:
    q, pieces, p = layouts
    statistics = cute.make_layout((BLOCKS, ROWS), stride=(ROWS, 1))
    queries = storage.queries.get_tensor(q.outer, swizzle=q.inner)
    return Shared(
        queries[None, None, 0],
        storage.keys.get_tensor(pieces.outer, swizzle=pieces.inner),
        None if p is None else storage.probabilities.get_tensor(p.outer, swizzle=p.inner),
        storage.maxima.get_tensor(statistics),
        storage.sums.get_tensor(statistics),
    )
