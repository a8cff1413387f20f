"""The operators that make classes of blocks or units from lists: by a kernel, or by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.contents import validating
from fa4flex.primitives import block_lists
from fa4flex.primitives.block_parts import listed
from fa4flex.runtime.cuda import block_lists as kernels
from fa4flex.runtime.flex.choice import by_kernels


def block_classes(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    columns: int,
) -> Tensor:
    """Classes, uint8 [B or 1, H or 1, R, columns], of the blocks in lists as in `BlockMap.from_counts`."""
    lists = counts, indices, full_counts, full_indices
    if by_kernel(counts):
        return kernels.block_classes(lists, columns)
    return block_lists.block_classes(lists, columns)


def by_kernel(counts: Tensor) -> bool:
    """True if a kernel makes classes of lists that are where these counts are."""
    return by_kernels(counts) and not validating()


def block_classes_fake(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    columns: int,
) -> Tensor:
    """Shape and dtype of what `block_classes` returns."""
    block_lists.check_lists((counts, indices, full_counts, full_indices))
    return counts.new_empty((*counts.shape, columns), dtype=torch.uint8)


def listed_units(ids: Tensor, counts: Tensor | None, columns: int) -> Tensor:
    """Classes, uint8 [B or 1, H, R, columns], of units: 1 of those that rows of ids list."""
    made = kernels.listed_units(ids, counts, columns) if by_kernels(ids) else None
    return listed(ids, counts, columns).to(torch.uint8) if made is None else made


def listed_units_fake(ids: Tensor, counts: Tensor | None, columns: int) -> Tensor:
    """Shape and dtype of what `listed_units` returns."""
    return ids.new_empty((*ids.shape[:3], columns), dtype=torch.uint8)
