"""A block's barriers on the device: shared memory, initialisation and handles, of the rows of its table."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any

from cutlass import Boolean, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

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


def any_of(named: NamedRow, predicate: Boolean, unit: Any = 0) -> Boolean:
    """Arrive at a named barrier and wait for all others, to learn whether the predicate is true of some
    thread."""
    found = _any_of(Int32(named.at(unit)), Int32(named.threads), Int32(predicate))
    return cute.arch.make_warp_uniform(found) != 0


@dsl_user_op
def _any_of(number: Int32, threads: Int32, given: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [x.ir_value(loc=loc, ip=ip) for x in (number, threads, given)],
            "{ .reg .pred mine, some; setp.ne.b32 mine, $3, 0;"
            " barrier.cta.red.or.pred some, $1, $2, mine; selp.b32 $0, 1, 0, some; }",
            "=r,r,r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def arrive(named: NamedRow, unit: Any = 0, stage: Any = 0) -> None:
    """Arrive at a named barrier, without waiting."""
    cute.arch.barrier_arrive(barrier_id=named.at(unit, stage), number_of_threads=named.threads)
