"""Lists of the blocks of each row, as torch's BlockMask and FlashAttention hold them, and the classes of
blocks that they say, by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.contents import VersionedCache, capturing, checked_here
from fa4flex.errors import InputError
from fa4flex.primitives.base import check_integers, show

EMPTY, PARTIAL, FULL = 0, 1, 2

Lists = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Counts and indices of partial blocks, then of full ones, if they are listed."""

_checked_before: VersionedCache[bool] = VersionedCache(64)
"""Lists on a device without a kernel that were checked, by torch's count: a change that it misses is checked
by nobody. It is followed all the same, and entries that do not fit are left out, as they are of lists that
are checked."""


def block_classes(lists: Lists, columns: int) -> Tensor:
    """Classes, uint8 [B or 1, H or 1, R, columns], of the blocks in lists as in `BlockMap.from_counts`, by
    operations of torch."""
    if checked_here(lists[0]) or capturing():
        return checked_classes(lists, columns)
    tensors = [x for x in lists if x is not None]
    if _checked_before.get(columns, tensors, False):
        return classes_there(lists, columns)
    made = checked_classes(lists, columns)
    _checked_before.keep(columns, tensors, True)
    return made


def checked_classes(lists: Lists, columns: int) -> Tensor:
    """The classes of lists that are checked. Raises InputError, or on a device has a later call do so."""
    counts, indices, full_counts, full_indices = lists
    classes = _listed(counts, indices, columns, "indices").to(torch.uint8) * PARTIAL
    if full_counts is None or full_indices is None:
        return classes
    full = _listed(full_counts, full_indices, columns, "full_indices")
    both = full & (classes != EMPTY)
    once = checked_tensor(classes, ~both, "BlockMap: a block is both partial and full")
    if once is None:
        raise InputError(
            f"block {_first(both)} (batch, head, row, column) is both partial and full",
            "each block in one list",
            "drop it from one of them",
        )
    return torch.where(full, FULL, once)


def _listed(counts: Tensor, indices: Tensor, columns: int, name: str) -> Tensor:
    """bool [B, H, R, C]: the blocks that a row lists."""
    counts_name = name.replace("indices", "counts")
    width = indices.shape[3]
    within = checked_tensor(
        counts, (counts >= 0) & (counts <= width), "BlockMap: a count beyond the listed blocks"
    )
    if within is None:
        raise InputError(
            f"{counts_name} from {int(counts.min())} to {int(counts.max())}",
            f"0 to {width}: {name} has {width} entries per row",
            f"give {name} room for the longest row",
        )
    live = torch.arange(width, device=counts.device) < within.unsqueeze(-1)
    inside = live & (indices >= 0) & (indices < columns)
    if (known := checked_tensor(inside, inside | ~live, "BlockMap: a key block outside the map")) is None:
        raise out_of_range(indices[live], columns, name)
    # Dead entries may hold anything: they are sent to one extra column, which is cut off.
    hits = torch.zeros(*counts.shape, columns + 1, dtype=torch.int32, device=counts.device)
    hits.scatter_add_(3, torch.where(known, indices, columns).long(), live.to(torch.int32))
    return listed_once(hits[..., :columns], name) > 0


def listed_once(hits: Tensor, name: str) -> Tensor:
    """`hits` [B, H, R, C], how often each block is listed. Raises InputError for more than once."""
    checked = checked_tensor(hits, hits <= 1, "BlockMap: a block is listed more than once")
    if checked is None:
        raise InputError(
            f"block {_first(hits > 1)} (batch, head, row, column) is listed more than once in {name}",
            "each key block once per row",
            "remove the duplicates, e.g. with torch.unique per row",
        )
    return checked


def listed_by_rows(row_starts: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """bool [R, C]: the blocks of a CSR pattern, as in `BlockMap.from_csr`. Raises InputError."""
    rows, width = shape
    check_index_tensor(row_starts, 1, "row_starts")
    check_index_tensor(columns, 1, "columns")
    if row_starts.device != columns.device:
        raise InputError(
            f"row_starts on {row_starts.device}, columns on {columns.device}",
            "one device",
            "move one of them",
        )
    lengths_of_rows = row_starts[1:] - row_starts[:-1]
    rising = (lengths_of_rows >= 0).all() & (row_starts[0] == 0)
    starts = None
    if row_starts.numel() == rows + 1:
        starts = checked_tensor(row_starts, rising, "BlockMap: row_starts that do not rise from 0")
    if starts is None:
        raise InputError(
            f"row_starts {show(row_starts)} for {rows} rows of blocks",
            f"{rows + 1} entries that start at 0 and never decrease",
            "pass crow_indices() of a CSR tensor with one row per query block",
        )
    ends = row_starts[-1] == columns.numel()
    if (starts := checked_tensor(starts, ends, "BlockMap: row_starts that end elsewhere")) is None:
        raise InputError(
            f"row_starts end at {int(row_starts[-1])}, columns has {columns.numel()} entries",
            "row_starts[-1] == len(columns)",
            "pass the matching pair of tensors",
        )
    within = (columns >= 0) & (columns < width)
    if (known := checked_tensor(within, within, "BlockMap: a key block outside the map")) is None:
        raise out_of_range(columns, width, "columns")
    # Which row an entry belongs to: how many rows have begun. What lies outside goes to one extra column.
    entries = torch.arange(columns.numel(), device=columns.device)
    row = torch.searchsorted(starts[1:].long().contiguous(), entries, right=True).clamp(max=rows - 1)
    hits = torch.zeros(rows, width + 1, dtype=torch.int32, device=columns.device)
    place = row * (width + 1) + torch.where(known, columns, width).long()
    hits.view(-1).scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
    return listed_once(hits[None, None, :, :width], "columns") > 0


def classes_there(lists: Lists, columns: int) -> Tensor:
    """The classes, without entries that are no block."""
    counts, indices, full_counts, full_indices = lists
    classes = _listed_there(counts, indices, columns).to(torch.uint8)
    if full_counts is None or full_indices is None:
        return classes
    return torch.where(_listed_there(full_counts, full_indices, columns), FULL, classes)


def _listed_there(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """bool [B, H, R, C]: the blocks that a row lists, without those that do not exist."""
    live = torch.arange(indices.shape[3], device=counts.device) < counts.unsqueeze(-1)
    place = torch.where(live & (indices >= 0) & (indices < columns), indices, columns).long()
    result = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=counts.device)
    return result.scatter_(3, place, True)[..., :columns]


def check_lists(lists: Lists) -> None:
    """Raise InputError unless dtypes, shapes and devices fit together."""
    counts, indices, full_counts, full_indices = lists
    if (full_counts is None) != (full_indices is None):
        value, missing = (
            ("full_indices", "full_counts") if full_counts is None else ("full_counts", "full_indices")
        )
        raise InputError(f"{value} without {missing}", "both, or neither", f"pass {missing} too")
    _check_list(counts, indices, "indices")
    if full_counts is None or full_indices is None:
        return
    _check_list(full_counts, full_indices, "full_indices")
    if full_counts.shape != counts.shape or full_counts.device != counts.device:
        raise InputError(
            f"partial blocks give rows {list(counts.shape)} on {counts.device}, "
            f"full blocks {list(full_counts.shape)} on {full_counts.device}",
            "the same batch, heads, rows and device",
            "build both lists from one map",
        )


def _check_list(counts: Tensor, indices: Tensor, name: str) -> None:
    counts_name = name.replace("indices", "counts")
    check_index_tensor(counts, 3, counts_name)
    check_index_tensor(indices, 4, name)
    if counts.shape != indices.shape[:3] or counts.device != indices.device:
        raise InputError(
            f"{counts_name} {list(counts.shape)} on {counts.device}, "
            f"{name} {list(indices.shape)} on {indices.device}",
            "counts [B, H, R] and indices [B, H, R, C'] on one device",
            "pass the matching pair of tensors",
        )


def check_index_tensor(tensor: Tensor, rank: int, name: str) -> None:
    check_integers(name, tensor)
    if tensor.ndim != rank:
        raise InputError(
            f"{name} of rank {tensor.ndim}, shape {list(tensor.shape)}",
            f"rank {rank}",
            "add or drop dimensions",
        )


def out_of_range(live: Tensor, columns: int, name: str) -> InputError:
    """Error for indices of which one is below 0, or at least `columns`."""
    wrong = int(live.min()) if int(live.min()) < 0 else int(live.max())
    return InputError(
        f"key block {wrong} in {name}",
        f"0 to {columns - 1}: kv_len has {columns} blocks",
        "check block_size and kv_len; indices count blocks, not tokens",
    )


def checked_tensor(x: Tensor, condition: Tensor, message: str) -> Tensor | None:
    """`x` to go on with, None if it is seen that `condition` is not true everywhere. On a device nobody waits
    to know: a later call tells. A compiled graph looks when it runs, if what is returned is used."""
    if torch.compiler.is_compiling():
        return torch.ops.fa4flex.required(x, condition, message)
    if checked_here(condition):
        return x if condition.all() else None
    later.require_at_each_replay(condition, message)
    return x


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())
