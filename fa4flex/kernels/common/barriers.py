"""A block's barriers on the device: shared memory, initialisation and handles, of the rows of its table."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any

from cutlass import Int64, cute

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow


class Pipes:
    """Handles of barriers by the names of their rows, the first mbarrier of a row; or of rings by
    the names of these."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def room(table: BarrierTable) -> Any:
    """Shared memory of all mbarriers."""
    return cute.struct.MemRange[Int64, table.count]


def mbarriers(table: BarrierTable, storage: Any) -> dict[str, cute.Pointer]:
    """The first mbarrier of each row."""
    first = storage.barriers.data_ptr()
    return {name: first + offset for name, offset in table.offsets.items()}


def pipes_of(first: dict[str, cute.Pointer], **rings: Any) -> Pipes:
    """Handles. first: mbarriers of all rows; rings: handles of their own, in place of the rows of a ring."""
    others = {name: x for name, x in first.items() if name.rpartition("_")[0] not in rings}
    # A value that roles take into loops and branches has to be a frozen dataclass.
    return make_dataclass("Pipes", [*rings, *others], bases=(Pipes,), frozen=True)(**rings, **others)


def initialise(table: BarrierTable, storage: Any) -> None:
    """A warp's: all that no pipeline of the library initialises."""
    first = storage.barriers.data_ptr()
    with cute.arch.elect_one():
        for place, count in table.initialised:
            cute.arch.mbarrier_init(first + place, count)
    cute.arch.mbarrier_init_fence()


def sync(named: NamedRow, unit: Any = 0, stage: Any = 0) -> None:
    """Arrive at a named barrier, and wait for all others."""
    cute.arch.barrier(barrier_id=named.at(unit, stage), number_of_threads=named.threads)


def arrive(named: NamedRow, unit: Any = 0, stage: Any = 0) -> None:
    """Arrive at a named barrier, without waiting."""
    cute.arch.barrier_arrive(barrier_id=named.at(unit, stage), number_of_threads=named.threads)
