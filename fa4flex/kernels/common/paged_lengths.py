"""Lengths of sequences whose keys lie in pages, as kernels take them."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.faults import report


def capacity(arguments: Arguments) -> Int64:
    """Slots of a row of the page table."""
    return Int64(arguments.page_table.shape[1]) * arguments.k.shape[1]


@cute.jit
def paged_length(arguments: Arguments, b: Int32) -> Int32:
    """Keys of a sequence: what was given, but no fewer than none, and no more than its row of the table has
    slots for."""
    return possible(Int64(arguments.paged_keys[b]), capacity(arguments))


def possible(given: Int64, most: Int64) -> Int32:
    """A given number of keys, or the nearest to it from none to the most."""
    return Int32(cutlass.min(cutlass.max(given, Int64(0)), most))


@cute.jit
def check_length(arguments: Arguments, b: Int32) -> None:
    """Tell of a length that is not possible. Threads that tell of the same one say the same."""
    given, most = Int64(arguments.paged_keys[b]), capacity(arguments)
    if given < 0:
        report(arguments.faults, "paged_keys negative", (given,))
    if given > most:
        report(arguments.faults, "paged_keys beyond", (given, most))
