"""Codes of 8 bits and their scales, as kernels that multiply codes read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.transfer import reordered
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.plan.keys import TILE

HALVES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
"""Dtypes of values that are no codes."""


def coded_views(arguments: Arguments, qk: str, transposed: bool) -> Arguments:
    """The arguments with bytes of e4m3 as such, and with transposed values as [B, S, H, D] or packed [T, H,
    D], along whose first mode but the batch they lie in memory."""
    changes: dict[str, Any] = {}
    if qk != "int8":
        changes = {name: _recast(getattr(arguments, name)) for name in ("q", "k")}
    if transposed:
        modes = [0, 3, 1, 2] if cute.rank(arguments.v) == 4 else [2, 0, 1]
        changes["v"] = reordered(_recast(arguments.v), modes)
    made: Arguments = arguments._replace(**changes)
    return made


def _recast(x: cute.Tensor) -> cute.Tensor:
    """Bytes as e4m3."""
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Float8E4M3FN), x.layout)


def at_tiles(work: Work, arguments: Arguments) -> Work:
    """The same tile of queries, with keys where transposed values of its packed sequence begin: at a whole
    tile of scales."""
    return work._replace(kv_offset=arguments.first_tiles[work.b] * TILE)


def of_query(given: cute.Tensor, head: Any, q: Int32) -> Float32:
    """Number of a query of [B, H, S], or packed [H, T]; past the end, the last one's. head: what has b, h,
    q_offset and q_len."""
    q = cutlass.max(cutlass.min(q, head.q_len - 1), Int32(0))
    if cute.rank(given) == 3:
        return given[head.b, head.h, q]
    return given[head.h, head.q_offset + q]


@dataclass(frozen=True)
class KeyScales:
    """Scales of the tiles of keys of a head, of which those of the sequence begin at `first`."""

    scales: cute.Tensor
    first: Int32

    @classmethod
    def of(cls, arguments: Arguments, b: Int32, kv_head: Int32) -> KeyScales:
        if arguments.first_tiles is not None:
            return cls(arguments.k_scale[kv_head, None], arguments.first_tiles[b])
        return cls(arguments.k_scale[b, kv_head, None], Int32(0))

    def at(self, kv_first: Int32) -> Float32:
        """Scale of the tile that has this key; past the end, the last one's."""
        place, last = self.first + kv_first // TILE, Int32(cute.size(self.scales)) - 1
        return self.scales[cutlass.max(cutlass.min(place, last), Int32(0))]


def channel_pair(given: cute.Tensor | None, channel: Int32) -> list[Float32] | None:
    """Numbers of this channel and the next; of padding, those of the last ones."""
    if given is None:
        return None
    pairs = cute.logical_divide(given, cute.make_layout(2))
    two = cute.make_rmem_tensor((2,), Float32)
    last = Int32(cute.size(given)) // 2 - 1
    cute.autovec_copy(pairs[None, select_(channel // 2 < last, channel // 2, last)], two)
    return [two[0], two[1]]
