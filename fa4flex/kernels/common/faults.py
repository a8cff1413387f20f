"""Faults on a device: what a kernel leaves in the table of kernels/plan/faults.py, which the host reads
without waiting."""

from __future__ import annotations

from cutlass import AddressSpace, Int64, cute

from fa4flex.kernels.plan.faults import PLACES, ROWS, WORDS


def report(table: Int64, kind: str, numbers: tuple[Int64, ...]) -> None:
    """One thread's: leave a fault of this kind, with the numbers of its message. `table` is the address of
    the table, in memory that the host reads as well; that the fault is there is written last."""
    pointer = cute.make_ptr(Int64, table, AddressSpace.gmem, assumed_align=8)
    rows = cute.make_tensor(pointer, cute.make_layout((ROWS, WORDS), stride=(WORDS, 1)))
    for i, number in enumerate(numbers):
        rows[1 + PLACES[kind], 1 + i] = Int64(number)
    cute.arch.fence_acq_rel_sys()
    rows[1 + PLACES[kind], 0] = Int64(1)
    cute.arch.fence_acq_rel_sys()
    rows[0, 0] = Int64(1)
