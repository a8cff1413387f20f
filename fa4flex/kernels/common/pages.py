"""Loader of keys in pages of a pool, by a table of each sequence's pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.faults import report
from fa4flex.kernels.common.key_loader import Wanted


class Pages(NamedTuple):
    """A sequence's row of the table, pages of the pool, slots of a page, and where faults are told."""

    row: cute.Tensor
    pages: Int32
    page_size: Int32
    faults: Int64

    @staticmethod
    def capacity(arguments: Arguments) -> Int64:
        return Int64(arguments.page_table.shape[1]) * arguments.k.shape[1]

    @staticmethod
    def of(arguments: Arguments, wanted: Wanted) -> Pages:
        pages, page_size = arguments.k.shape[:2]
        row = arguments.page_table[wanted.b, None]
        return Pages(row, Int32(pages), Int32(page_size), arguments.faults)

    @property
    def entry(self) -> Any:
        return self.row.element_type

    def entry_of(self, key: Int32) -> tuple[Any, Int32]:
        column = key // self.page_size
        return self.row[column], key - column * self.page_size

    def place(self, entry: Any, slot: Int32) -> tuple[Int32, Int32]:
        return _place(self, entry, slot)


@cute.jit
def _place(loader: cutlass.Constexpr[Pages], entry: Any, slot: Int32) -> tuple[Int32, Int32]:
    page, place = loader.pages, Int32(0)
    if entry >= 0 and entry < loader.pages:
        page = Int32(entry)
        place = slot
    else:
        report(loader.faults, "page missing", (Int64(entry), Int64(loader.pages)))
    return page, place
