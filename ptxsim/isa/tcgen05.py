"""tcgen05: tensor memory and the matrix unit of Blackwell (PTX ISA, "TensorCore 5th Generation Family
Instructions").

Allocation, stores and fences. Stores to tensor memory end when tcgen05.wait::st says so; tcgen05_load.py has
the loads, tcgen05_mma.py the matrix unit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, locate
from ptxsim.isa.asynchronous import Errand, groups, submit
from ptxsim.isa.operands import items_of, read
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Wait, translates
from ptxsim.isa.together import rows_of
from ptxsim.ptx.nodes import Imm, Instruction, Operand, Reg
from ptxsim.state.cta import TENSOR_BAND, TENSOR_COLUMNS, TENSOR_LANES, Cta, Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.units import tensor
from ptxsim.watch.findings import Fault, Finding

STORES = "stores to tensor memory"
SHAPES = ("16x64b", "16x128b", "16x256b", "32x32b", "16x32bx2")


def fail(kind: str, text: str, instruction: Instruction) -> Fault:
    return Fault(Finding(kind, text, instruction))


# --- allocation ---------------------------------------------------------------------------------------------


@translates("tcgen05.alloc")
def alloc(instruction: Instruction, form: Form) -> Act:
    """The lowest free columns; waits while too few are free. Writes the address to shared memory. A pair's
    CTAs allocate together: neither goes on before both have their columns (PTX ISA, tcgen05.alloc)."""
    pair = instruction.has("cta_group::2")
    where, count = locate(instruction.operands[0]), read(instruction.operands[1], "u32")
    access = Accessor(instruction, "shared")

    def run(warp: Warp, mask: Mask) -> Wait | None:
        cta, columns = warp.cta, int(count(warp)[0])
        if columns not in (32, 64, 128, 256, 512):
            raise fail(
                "tensor memory",
                f"{warp} allocates {columns} columns; 32, 64, 128, 256, 512 are legal",
                instruction,
            )
        if not cta.may_allocate:
            raise fail(
                "tensor memory", f"{warp} allocates after tcgen05.relinquish_alloc_permit", instruction
            )
        start = (_with_the_other if pair else _alone)(warp, columns, instruction)
        if isinstance(start, Wait):
            return start
        access.store(warp, where(warp)[:1], np.array([[start]], np.uint32))
        return None

    return Act(run)


def _alone(warp: Warp, columns: int, instruction: Instruction) -> int | Wait:
    cta = warp.cta
    start = _free(cta, columns)
    if start is None:
        return Wait(lambda: _free(cta, columns) is not None, f"{columns} free columns of tensor memory")
    _take(cta, start, columns, instruction)
    return start


def _with_the_other(warp: Warp, columns: int, instruction: Instruction) -> int | Wait:
    """The first column, once both CTAs of a pair have asked; the second to ask allocates for both, and may
    write to both before the first one goes on."""
    cta, other = warp.cta, warp.cta.cluster.ctas[warp.cta.rank ^ 1]
    if warp.agent not in cta.pair_requests:
        cta.pair_requested += 1
        cta.pair_requests[warp.agent] = cta.pair_requested
    number = cta.pair_requests[warp.agent]
    start = cta.pair_granted.pop(number, None)
    if start is None:
        if other.pair_requested < number:
            return Wait(
                lambda: number in cta.pair_granted, f"tcgen05.alloc of CTA {other.rank}, its pair's other one"
            )
        start, there = _free(cta, columns), _free(other, columns)
        if start is None or there is None:
            return Wait(
                lambda: _free(cta, columns) is not None and _free(other, columns) is not None,
                f"{columns} free columns of tensor memory in both CTAs of a pair",
            )
        _take(cta, start, columns, instruction)
        _take(other, there, columns, instruction)
        other.pair_granted[number] = there
    del cta.pair_requests[warp.agent]
    return start


def _take(cta: Cta, start: int, columns: int, instruction: Instruction) -> None:
    """The columns belong to the CTA from now on; what they held before is gone. Other CTAs of its
    multiprocessor do as this one does, and find no columns if it has more than its share."""
    cta.allocated[start : start + columns] = instruction.line
    held, resident = int((cta.allocated > 0).sum()), cta.launch.resident
    if held * resident > TENSOR_COLUMNS:
        text = (
            f"CTA {cta.rank} holds {held} columns; {resident} CTAs that a multiprocessor has room for share "
            f"{TENSOR_COLUMNS}: others wait until it frees them"
        )
        cta.launch.findings.add(Finding("tensor memory", text, instruction))
    cta.freed[start : start + columns] = False
    cta.tensor_shadow.forget(granules((tensor.region(0, TENSOR_LANES, start, columns),)))


def _free(cta: Cta, columns: int) -> int | None:
    for start in range(0, TENSOR_COLUMNS, columns):
        if not cta.allocated[start : start + columns].any():
            return start
    return None


@translates("tcgen05.dealloc")
def dealloc(instruction: Instruction, form: Form) -> Act:
    """All earlier uses must be known to be over: freeing counts as a write."""
    address, count = read(instruction.operands[0], "u32"), read(instruction.operands[1], "u32")

    def run(warp: Warp, mask: Mask) -> None:
        cta, start, columns = warp.cta, int(address(warp)[0]) & 0xFFFF, int(count(warp)[0])
        if not cta.allocated[start : start + columns].all():
            raise fail(
                "tensor memory",
                f"{warp} frees columns {start} to {start + columns} that are not allocated",
                instruction,
            )
        order = cta.cluster.order
        where = granules((tensor.region(0, TENSOR_LANES, start, columns),))
        order.release(warp.agent)  # what the warp issued before, and lands later, does not know of it
        cta.tensor_shadow.write(order.warp_access(warp.agent, instruction), where, order.clocks[warp.agent])
        cta.allocated[start : start + columns] = 0
        cta.freed[start : start + columns] = True
        cta.cluster.units.landings += 1

    return Act(run)


@translates("tcgen05.relinquish_alloc_permit")
def relinquish(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> None:
        warp.cta.may_allocate = False

    return Act(run)


def granules(regions: tuple[tensor.Region, ...]) -> NDArray[np.intp]:
    """The watched pieces of tensor memory in some rectangles of it."""
    found = []
    for place in regions:
        bands = np.arange(place.lanes.start // TENSOR_BAND, -(-place.lanes.stop // TENSOR_BAND))
        along = np.arange(place.columns.start, place.columns.stop)
        found.append((bands[:, None] * TENSOR_COLUMNS + along).reshape(-1))
    return found[0] if len(found) == 1 else np.concatenate(found)


def must_be_allocated(
    cta: Cta, regions: tuple[tensor.Region, ...], who: object, instruction: Instruction
) -> None:
    """A Fault where they never were; columns that the CTA has freed still hold what they held, and their use
    is a finding."""
    for place in regions:
        mine = cta.allocated[place.columns] > 0
        if mine.all():
            continue
        columns = f"columns {place.columns.start} to {place.columns.stop} of tensor memory of CTA {cta.rank}"
        if not (mine | cta.freed[place.columns]).all():
            raise fail("tensor memory", f"{who} uses {columns}, which are not all allocated", instruction)
        text = f"{who} uses {columns}, which were freed"
        cta.launch.findings.add(Finding("tensor memory", text, instruction))


# --- between registers and tensor memory --------------------------------------------------------------------


def transfer_of(instruction: Instruction, form: Form) -> tensor.Transfer:
    """The table of a .16x64b ... .32x32b shape and its repetition."""
    times = next(int(name[1:]) for name in form.named.values() if name)
    packs = bool(form.one_of("pack::16b", "unpack::16b"))
    shape, literals = form.one_of(*SHAPES), [o for o in instruction.operands[1:] if isinstance(o, Imm)]
    split = int(literals[0].value) if shape == "16x32bx2" else None
    return tensor.transfer(shape, times, packs, split)


@translates("tcgen05.st")
def st(instruction: Instruction, form: Form) -> Act:
    table = transfer_of(instruction, form)
    where = locate(instruction.operands[0])
    sources = [read(o, "u32") for o in items_of(instruction.operands[-1])]
    rows = register_rows(instruction.operands[-1])

    def run(warp: Warp, mask: Mask) -> None:
        start = place_checked(warp, table, int(where(warp)[0]), instruction)
        if rows is None:
            values = np.stack([get(warp) for get in sources])
        else:
            values = warp.tables["u32"][rows].copy()
        errand = Errand.in_queue(warp, f"{STORES} of {warp}", f"a tcgen05.st of {warp}", instruction)
        cta = warp.cta

        def land() -> None:
            cta.tensor_shadow.write(errand.number, cells_of(table, start)[1], errand.clock)
            table.store(cta.tensor, start, values)

        kind = groups(warp, STORES)
        kind.add(0, submit(warp, instruction, land, (kind,), (STORES, warp.agent)), errand)

    return Act(run)


def register_rows(operand: Operand) -> Any:
    """Rows of the table of 32-bit registers, if it is these that are named."""
    items = items_of(operand)
    named = [item.index for item in items if isinstance(item, Reg) and item.file == 32]
    return rows_of(named) if len(named) == len(items) else None


Cells = tuple[tuple[tensor.Region, ...], NDArray[np.intp]]
"""Cells of tensor memory, as rectangles and as granules."""


@lru_cache(maxsize=4096)
def cells_of(table: tensor.Transfer, start: int) -> Cells:
    return table.regions(start), granules(table.regions(start))


def place_checked(warp: Warp, table: tensor.Transfer, address: int, instruction: Instruction) -> int:
    """Address that a warp reads or writes: warp w reaches the 32 lanes from 32 * (w % 4) on. An address of
    other lanes is reported, and stands for the same ones among its own: public kernels that run on hardware
    give all warps the address of lane 0."""
    lane, _ = tensor.split_address(address)
    first = warp.index % 4 * LANES
    if lane // LANES != warp.index % 4:
        own = f"it reaches lanes {first} to {first + LANES - 1}"
        text = f"{warp} accesses lane {lane} of tensor memory; {own}"
        warp.cta.launch.findings.add(Finding("tensor memory", text, instruction))
        address += (first + lane % LANES - lane) << 16
    must_be_allocated(warp.cta, cells_of(table, address)[0], warp, instruction)
    return address


@translates("tcgen05.wait::st")
def wait_st(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> Wait | None:
        kind = groups(warp, STORES)
        kind.commit(_FIRST, instruction.line)
        return kind.wait(warp, _FIRST, 0, STORES, instruction.line)

    return Act(run)


_FIRST = np.arange(32) == 0


@translates("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(instruction: Instruction, form: Form) -> Act:
    """Order between threads comes from their barriers here; kernels are not required to have these."""
    return Act(lambda warp, mask: None)
