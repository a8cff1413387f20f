"""Partial results of splits of the keys for each row, in one vector of float32: outputs, then
log-sum-exps, then entropies where these are wanted."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, Int64, cute


class Parts(NamedTuple):
    """Results of splits of the keys for one row: log-sum-exps (split), outputs (split, width), and how many
    splits there are: perhaps fewer than there is room for; entropies (split), or None."""

    log_sums: cute.Tensor
    outputs: cute.Tensor
    count: Int32
    entropies: cute.Tensor | None = None


def row_number(arguments: Any, b: Int32, h: Int32, q: Int32) -> Int32:
    """The number of a row among all of a call."""
    _, length, heads, _ = arguments.out.shape
    return (b * heads + h) * length + q


def rows_of(arguments: Any) -> Int32:
    """Rows of a call."""
    batch, length, heads, _ = arguments.out.shape
    return Int32(batch * heads * length)


def outputs(arguments: Any) -> cute.Tensor:
    """[split, row, width], each divided by its own sum."""
    rows, width = rows_of(arguments), arguments.out.shape[3]
    # Strides of 32 bits would wrap where there are many rows.
    row, split = (cute.assume(n * width, divby=8) for n in (Int64(1), Int64(rows)))
    layout = cute.make_layout((arguments.splits, rows, width), stride=(split, row, 1))
    return cute.make_tensor(arguments.workspace.iterator, layout)


def log_sums(arguments: Any) -> cute.Tensor:
    """[split, row], natural logarithms of the sums; -inf where a split has no key for a row."""
    return _numbers(arguments, arguments.out.shape[3])


def entropies(arguments: Any) -> cute.Tensor:
    """[split, row], in nats; 0 where a split has no key for a row."""
    return _numbers(arguments, arguments.out.shape[3] + 1)


def _numbers(arguments: Any, before: Int32) -> cute.Tensor:
    """[split, row], behind so many numbers of each."""
    rows = rows_of(arguments)
    start = arguments.workspace.iterator + Int64(arguments.splits) * rows * before
    return cute.make_tensor(start, cute.make_layout((arguments.splits, rows), stride=(Int64(rows), 1)))


def parts_of(arguments: Any, number: Int32, splits: Int32) -> Parts:
    """The splits of row `number`."""
    more = None if arguments.entropy is None else entropies(arguments)[None, number]
    return Parts(log_sums(arguments)[None, number], outputs(arguments)[None, number, None], splits, more)
