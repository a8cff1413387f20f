"""TMA descriptors, and views of what they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync


@dataclass(frozen=True)
class Transfers:
    """TMA descriptors with the global tensors they move: q, k, out (S, D, H, B), v (D, S, H, B); packed
    tensors are (T, D, H) and (D, T, H)."""

    q: Any
    k: Any
    v: Any
    out: Any


def partition(
    transfer: cpasync.TmaInfo, shared: cute.Tensor, tiles: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """(shared, global) views of what a transfer moves, whose last mode counts stages and tiles."""
    return cpasync.tma_partition(
        transfer.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )


def sequence(tensor: cute.Tensor, offset: Int32, head: Int32, b: Int32, axis: int = 0) -> cute.Tensor:
    """One head of one sequence, its tokens along `axis` starting at `offset`."""
    if cute.rank(tensor) == 4:
        return tensor[None, None, head, b]
    one = tensor[None, None, head]
    return cute.domain_offset((offset, 0) if axis == 0 else (0, offset), one)
