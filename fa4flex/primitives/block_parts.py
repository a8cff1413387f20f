"""Parts, growth and lists of classes of blocks, by operations of torch: what methods of maps do."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy
import torch
from torch import Tensor

from fa4flex.contents import checked_here
from fa4flex.errors import InputError
from fa4flex.exact import is_count
from fa4flex.primitives.base import check_device, kind_of
from fa4flex.primitives.block_lists import EMPTY, FULL, PARTIAL

_MOST = torch.iinfo(torch.int32).max
NAMES = "batch", "heads", "rows", "columns"
"""Dimensions of classes, as messages name them."""


class PastTheMap(InputError, IndexError):
    """An index that no part of a map has. Also an IndexError, which ends a loop over a map."""


def part_of(index: Any, classes: Tensor, sizes: tuple[int, int], lengths: tuple[int, int]) -> Any:
    """Classes of a part of a map, [b, h, rows, columns] as before, its lengths, and its first query and key.

    index  ints, slices, lists or integer tensors of batch and heads; ints and slices of rows and columns of
           blocks, which stay in order. An int keeps its dimension.
    """
    given = _filled(index, NAMES)
    (classes,) = _planes(given[:2], (classes,))
    rows, columns = (_in_order(one, classes.shape[axis], axis) for axis, one in enumerate(given[2:], 2))
    first = rows.start * sizes[0], columns.start * sizes[1]
    ends = (
        min(part.stop * size, length)
        for part, size, length in zip((rows, columns), sizes, lengths, strict=True)
    )
    q_len, kv_len = (end - start for end, start in zip(ends, first, strict=True))
    return classes[:, :, rows, columns], (q_len, kv_len), first


def part_of_lists(index: Any, lists: tuple[Tensor, Tensor | None], sizes: tuple[int, int]) -> Any:
    """Ids and counts of a part of lists, its number of queries, and its rows as a slice with both ends.
    sizes: queries of a row, and of all.

    index  batch and heads as in `part_of`, and an int or a slice of rows of the lists
    """
    given, (ids, counts), (queries, q_len) = _filled(index, NAMES[:3]), lists, sizes
    ids, *others = _planes(given[:2], (ids,) if counts is None else (ids, counts))
    rows = _in_order(given[2], ids.shape[2], 2)
    left = min(rows.stop * queries, q_len) - rows.start * queries
    return (ids[:, :, rows], others[0][:, :, rows] if others else None), left, rows


def _planes(given: list[Any], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Entries of the batch and heads, by an index for each, of tensors [b, h, ...] of one shape."""
    for axis, one in enumerate(given):
        here = _entries(one, tensors[0], axis)
        if isinstance(here, Tensor):
            tensors = tuple(x.index_select(axis, here) for x in tensors)
        else:
            tensors = tuple(x[here] if axis == 0 else x[:, here] for x in tensors)
    return tensors


def _filled(index: Any, names: tuple[str, ...]) -> list[Any]:
    """One index per dimension: what is left out, or stands for by `...`, is whole."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, one in enumerate(given) if one is Ellipsis]
    if len(given) - len(dots) > len(names) or len(dots) > 1:
        what = "a map" if len(names) == len(NAMES) else "lists"
        raise InputError(
            f"{what} indexed by {len(given)} indices",
            f"at most {'four' if len(names) == len(NAMES) else 'three'}, in the order {', '.join(names)} of "
            "blocks",
            "blocks[b, h, rows] is the part of rows of blocks",
        )
    whole = [slice(None)] * (len(names) - len(given) + len(dots))
    at = dots[0] if dots else len(given)
    return [*given[:at], *whole, *given[at + 1 :]]


def _in_order(one: Any, size: int, axis: int) -> slice:
    """Rows or columns of blocks as a slice with both ends."""
    if _is_int(one):
        at = _place(one, size, axis)
        return slice(at, at + 1)
    ends = (one.start, one.stop) if isinstance(one, slice) else (True,)
    if not all(x is None or _is_int(x) for x in ends) or one.step not in (None, 1):
        raise InputError(
            f"{NAMES[axis]} of blocks indexed by {one!r}",
            "an int, or a slice without a step: blocks keep their order and their places",
            f"slice the {NAMES[axis]}, or make a map of blocks.classes with BlockMap.from_dense",
        )
    start, stop, _ = one.indices(size)
    if stop <= start:
        raise PastTheMap(
            f"no {NAMES[axis]} in {one!r} of {size}", "at least one", "a map has a block of each at least"
        )
    return slice(start, stop)


def _entries(one: Any, classes: Tensor, axis: int) -> slice | Tensor:
    """Entries of the batch, or heads."""
    if isinstance(one, slice):
        if any(x is not None and not _is_int(x) for x in (one.start, one.stop, one.step)):
            raise _no_index(one, axis)
        if one.step is not None and one.step < 1:
            raise InputError(
                f"{NAMES[axis]} indexed by {one!r}", "a positive step", "list them: blocks[[2, 1, 0]]"
            )
        if not len(range(*one.indices(classes.shape[axis]))):
            raise PastTheMap(f"no {NAMES[axis]} in {one!r}", "at least one", "leave the index out for all")
        return one
    if _is_int(one):
        at = _place(one, classes.shape[axis], axis)
        return slice(at, at + 1)
    if isinstance(one, (list, tuple)):
        if not one or not all(map(_is_int, one)):
            raise _no_index(one, axis)
        one = torch.tensor([_place(x, classes.shape[axis], axis) for x in one], device=classes.device)
    if not isinstance(one, Tensor) or one.ndim != 1 or one.dtype not in (torch.int32, torch.int64):
        raise _no_index(one, axis)
    if not one.numel():
        raise _no_index(one, axis)
    check_device("an index", one, "the map", classes.device, "move the index to the map's device")
    size = classes.shape[axis]
    if not torch.compiler.is_compiling() and checked_here(one):
        for x in (int(one.min()), int(one.max())):
            _place(x, size, axis)
    return torch.where(one < 0, one + size, one)


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, numpy.integer)) and not isinstance(x, bool)


def _no_index(one: Any, axis: int) -> InputError:
    return InputError(
        f"{NAMES[axis]} indexed by {kind_of(one)}",
        "an int, a slice, a list of ints or an int32 or int64 tensor [n]",
        "e.g. blocks[0], blocks[:, 2:4] or blocks[:, [0, 3]]; where a bool tensor is true, "
        "blocks[:, which.nonzero()[:, 0]]",
    )


def _place(at: int, size: int, axis: int) -> int:
    if not -size <= at < size:
        shared = size == 1 and axis < 2
        raise PastTheMap(
            f"index {at} into {size} {NAMES[axis]}",
            f"{-size} to {size - 1}" + (f": this map is shared by all {NAMES[axis]}" if shared else ""),
            "index a shared dimension by 0, or leave it whole with :" if shared else "index what there is",
        )
    return int(at) % size


def grown(classes: Tensor, rows: int, columns: int, new: int) -> Tensor:
    """Classes of a map with more rows and columns of blocks, which have class `new`."""
    old = classes.shape[2:]
    result = classes.new_full((*classes.shape[:2], rows, columns), new)
    result[:, :, : old[0], : old[1]] = classes
    return result


def check_class(new: Any) -> int:
    """`new` as a class. Raises InputError for what is none."""
    names = {"empty": EMPTY, "partial": PARTIAL, "full": FULL}
    if not isinstance(new, str) or new not in names:
        raise InputError(f"new={new!r}", f"one of {', '.join(names)}", "new blocks are partial by default")
    return names[new]


def ascending(chosen: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Lists of the columns that are true in rows of a bool tensor [..., C]: counts int32 [...] and ids int32
    [..., capacity], ascending, then -1. Of rows with more than `capacity` the lowest are listed."""
    places = chosen.cumsum(-1) - 1
    places = torch.where(chosen, places, capacity).clamp(max=capacity)  # one more column takes the rest
    columns = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device).expand_as(chosen)
    ids = torch.full((*chosen.shape[:-1], capacity + 1), -1, dtype=torch.int32, device=chosen.device)
    ids = ids.scatter(-1, places, columns)[..., :capacity].contiguous()
    return chosen.sum(-1).clamp(max=capacity).to(torch.int32), ids


def listed(ids: Tensor, counts: Tensor | None, columns: int) -> Tensor:
    """bool [..., columns]: what rows of ids [..., cap] list among their first `counts`. Ids outside of the
    columns list nothing, and what is listed twice is listed."""
    live = (ids >= 0) & (ids < columns)
    if counts is not None:
        live = live & (torch.arange(ids.shape[-1], device=ids.device) < counts.unsqueeze(-1))
    places = torch.where(live, ids, columns).long()  # one more column takes the rest
    result = torch.zeros(*ids.shape[:-1], columns + 1, dtype=torch.bool, device=ids.device)
    return result.scatter(-1, places, True)[..., :columns]


def padded(rows: Any) -> Tensor:
    """Nested lists of ids, [R], [H][R] or [B][H][R] lists of ints, as int32 with -1 behind each row's."""
    depth, one = 0, rows
    while isinstance(one, (list, tuple)) and one:
        one, depth = next((x for x in one if not isinstance(x, (list, tuple)) or x), one[0]), depth + 1
        if depth > 4:
            break
    depth += isinstance(one, (list, tuple)) and not one  # a list without blocks
    if not isinstance(rows, (list, tuple)) or not 2 <= depth <= 4:
        raise InputError(
            f"lists of blocks as {kind_of(rows)}",
            "a list of ints for each row of blocks: [R], [H][R] or [B][H][R] lists",
            "e.g. BlockMap.from_lists([[0], [0, 1]], 128), or an integer tensor with -1 behind each list",
        )
    while depth < 4:
        rows, depth = [rows], depth + 1
    shape = len(rows), len(rows[0]), len(rows[0][0])
    if any(len(heads) != shape[1] or any(len(x) != shape[2] for x in heads) for heads in rows):
        raise InputError(
            "lists of blocks with other numbers of rows for other heads",
            f"{shape[2]} rows for each of {shape[1]} heads",
            "an empty list stands for a row without blocks",
        )
    width = max([1, *(len(row) for heads in rows for head in heads for row in head)])
    for x in (x for heads in rows for head in heads for row in head for x in row):
        if not isinstance(x, Integral) or isinstance(x, bool) or abs(int(x)) > _MOST:
            raise InputError(
                f"{x!r} in a list of blocks", "ints that int32 holds", "list key blocks by their numbers"
            )
    flat = [[*row, *[-1] * (width - len(row))] for heads in rows for head in heads for row in head]
    return torch.tensor(flat, dtype=torch.int32).view(*shape, width)


def check_longer(name: str, old: int, new: Any, what: str = "a map") -> int:
    """`new` as a length of a grown map, or of grown lists. Raises InputError for a shorter one."""
    if not is_count(new) or new < old:
        columns = ", columns" * (what == "a map")
        raise InputError(
            f"{name}={new!r} for {what} of {name}={old}",
            f"an int of {old} or more",
            f"slice {what} for fewer: blocks[:, :, rows{columns}]",
        )
    return int(new)


def unfit(name: str, number: int, wanted: int, expected: str) -> InputError:
    """Error for a map of another batch, or of other heads, than a call's."""
    noun = "batch entries" if name == "batch" else name
    return InputError(
        f"a block map with {number} {noun} for inputs with {wanted}",
        expected,
        _refitted(name, number, wanted),
    )


def _refitted(name: str, number: int, wanted: int) -> str:
    """Advice for a map of another batch, or of other heads, than a call's."""
    made = f"make the map with {wanted} {'batch entries' if name == 'batch' else name}"
    index = "" if name == "batch" else ":, "
    if number > wanted:
        return f"{made}, or take a part of it: blocks[{index}:{wanted}]"
    if wanted % number:
        return made
    if name == "heads":
        return f"{made}, or say that its heads are those of keys: blocks.for_query_heads({wanted})"
    part = f"blocks.classes.repeat_interleave({wanted // number}, 0)"
    return f"{made}, or change its classes: dataclasses.replace(blocks, classes={part})"
