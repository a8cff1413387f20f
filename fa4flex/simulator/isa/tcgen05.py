"""tcgen05: tensor memory and the matrix unit of Blackwell (PTX ISA, "TensorCore 5th Generation Family
Instructions").

Matrix multiplications and commits of a CTA are one queue: they end in the order in which they were issued.
Stores to tensor memory end when tcgen05.wait::st says so; tcgen05_load.py has the loads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4flex.simulator.isa.access import Accessor, locate
from fa4flex.simulator.isa.asynchronous import Errand, chunk_granules, groups, submit
from fa4flex.simulator.isa.mbarriers import barrier_at, cta_and_offset, guarded
from fa4flex.simulator.isa.operands import Read, read
from fa4flex.simulator.isa.table import Act, Unmodelled, Wait, translates
from fa4flex.simulator.isa.together import rows_of
from fa4flex.simulator.ptx.nodes import Address, Imm, Instruction, Operand, Reg, Vector
from fa4flex.simulator.state.cta import TENSOR_BAND, TENSOR_COLUMNS, TENSOR_LANES, Cta, Warp
from fa4flex.simulator.state.registers import Mask, lanes_of
from fa4flex.simulator.state.window import RANK_SHIFT
from fa4flex.simulator.units import accumulators, descriptors, numbers, tensor
from fa4flex.simulator.units import instruction as idesc
from fa4flex.simulator.watch.findings import Fault, Finding
from fa4flex.simulator.watch.shadow import distinct

STORES = "stores to tensor memory"
SHAPES = ("16x64b", "16x128b", "16x256b", "32x32b")


def fail(kind: str, text: str, instruction: Instruction) -> Fault:
    return Fault(Finding(kind, text, instruction))


# --- allocation ---------------------------------------------------------------------------------------------


@translates("tcgen05.alloc")
def alloc(instruction: Instruction) -> Act:
    """The lowest free columns; waits while too few are free. Writes the address to shared memory. A pair's
    CTAs allocate together: neither goes on before both have their columns (PTX ISA, tcgen05.alloc)."""
    pair = instruction.has("cta_group::2")
    where, count = locate(instruction.operands[0], instruction), read(instruction.operands[1], "u32")
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
        start = _with_the_other(warp, columns, instruction.line) if pair else _free(cta, columns)
        if isinstance(start, Wait):
            return start
        if start is None:
            return Wait(lambda: _free(cta, columns) is not None, f"{columns} free columns of tensor memory")
        cta.allocated[start : start + columns] = instruction.line
        access.store(warp, where(warp)[:1], np.array([[start]], np.uint32))
        return None

    return Act(run)


def _with_the_other(warp: Warp, columns: int, line: int) -> int | Wait:
    """The first column, once both CTAs of a pair have asked; the second to ask allocates for both."""
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
        other.allocated[there : there + columns] = line
        other.pair_granted[number] = there
    del cta.pair_requests[warp.agent]
    return start


def _free(cta: Cta, columns: int) -> int | None:
    for start in range(0, TENSOR_COLUMNS, columns):
        if not cta.allocated[start : start + columns].any():
            return start
    return None


@translates("tcgen05.dealloc")
def dealloc(instruction: Instruction) -> Act:
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
        cta.tensor_shadow.write(order.warp_access(warp.agent, instruction), where, order.clocks[warp.agent])
        cta.tensor_shadow.forget(where)
        cta.allocated[start : start + columns] = 0
        cta.cluster.units.landings += 1

    return Act(run)


@translates("tcgen05.relinquish_alloc_permit")
def relinquish(instruction: Instruction) -> Act:
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
    for place in regions:
        if not cta.allocated[place.columns].all():
            columns = (
                f"columns {place.columns.start} to {place.columns.stop} of tensor memory of CTA {cta.rank}"
            )
            raise fail("tensor memory", f"{who} uses {columns}, which are not all allocated", instruction)


# --- matrix multiplication ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    d: Read
    a: Read
    a_in_tensor: bool
    b: Read
    shape: Read
    adds: Read
    disabled: tuple[Read, ...]
    """Words whose bits name lanes of D that stay as they are, 4 for each CTA; none where the instruction has
    none."""


@dataclass(frozen=True)
class Job:
    """One tcgen05.mma with its operands' values: D and A are addresses in tensor memory, or A a
    descriptor."""

    shape: idesc.InstructionDescriptor
    group: int
    d: int
    a: int
    a_in_tensor: bool
    b: int
    adds: bool
    disabled: tuple[int, ...]


@translates("tcgen05.mma")
def mma(instruction: Instruction) -> Act:
    kind = next((m[6:] for m in instruction.modifiers if m.startswith("kind::")), "")
    group = 2 if instruction.has("cta_group::2") else 1
    known = {
        f"kind::{kind}",
        f"cta_group::{group}",
        "collector",
        "a",
        "b",
        "discard",
        "fill",
        "use",
        "lastuse",
    }
    known |= {"collector::a::discard", "collector::a::fill", "collector::a::use", "collector::a::lastuse"}
    extra = set(instruction.modifiers) - known - {"mma"}
    d, a, b, shape, *disabled, adds = instruction.operands
    if extra or len(disabled) > 1 or not isinstance(adds, Reg | Imm):
        raise Unmodelled(instruction, f"modifiers {sorted(extra)}, {len(instruction.operands)} operands")
    in_tensor = isinstance(a, Address)
    operands = Operands(
        tensor_address(d, instruction),
        tensor_address(a, instruction) if in_tensor else read(a, "u64"),
        in_tensor,
        read(b, "u64"),
        read(shape, "u32"),
        read(adds, "pred"),
        tuple(read(word, "u32") for word in register_list(disabled[0], instruction)) if disabled else (),
    )

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            job = Job(
                idesc.decode(int(operands.shape(warp)[lane]), kind, group),
                group,
                int(operands.d(warp)[lane]),
                int(operands.a(warp)[lane]),
                in_tensor,
                int(operands.b(warp)[lane]),
                bool(operands.adds(warp)[lane]),
                tuple(int(word(warp)[lane]) for word in operands.disabled),
            )
            errand = Errand.in_queue(warp, matrix_unit(warp), f"a tcgen05.mma of {warp}", instruction)
            land = partial(_land, warp, job, errand, instruction)
            submit(warp, instruction, land, (), matrix_unit(warp))

    return Act(run)


def matrix_unit(warp: Warp) -> str:
    return f"the matrix unit of CTA {warp.cta.rank}"


def tensor_address(operand: Operand, instruction: Instruction) -> Read:
    where = locate(operand, instruction)
    return lambda warp: where(warp)


def _land(warp: Warp, job: Job, errand: Errand, instruction: Instruction) -> None:
    """Multiply. With two CTAs, A's and D's rows are split between them, and B's rows likewise."""
    shape, cluster = job.shape, warp.cta.cluster
    first = warp.cta.rank & ~1
    ctas = [warp.cta] if job.group == 1 else cluster.ctas[first : first + 2]
    right = np.concatenate(
        [
            _from_shared(c, job.b, shape.b_major, shape.n // job.group, shape.b_type, shape, errand)
            for c in ctas
        ]
    )
    for cta in ctas:
        if job.a_in_tensor:
            left = _a_from_tensor(cta, job, errand, instruction)
        else:
            rows = shape.m // job.group
            left = (_from_shared(cta, job.a, shape.a_major, rows, shape.a_type, shape, errand),)
        if shape.negate_a != shape.negate_b:
            left = tuple(-part for part in left)
        _accumulate(cta, job, left, right, errand, instruction)
    cluster.traffic["MMA multiply-adds"] += shape.m * shape.n * shape.k


@lru_cache(maxsize=4096)
def _chunks(
    bits: int, major: descriptors.Major, rows: int, k: int, itemsize: int, granule: int
) -> NDArray[np.intp]:
    """The granules of shared memory that an operand lies in."""
    where = descriptors.decode_tcgen05(bits)
    return chunk_granules(descriptors.touched(where, major, rows, k, itemsize), granule)


def _from_shared(
    cta: Cta,
    bits: int,
    major: descriptors.Major,
    rows: int,
    type: str,
    shape: idesc.InstructionDescriptor,
    errand: Errand,
) -> NDArray[np.float32]:
    where, raw = descriptors.decode_tcgen05(bits), numbers.raw_dtype(type)
    errand.moves(cta, rows * shape.k * raw.itemsize)
    found = descriptors.operand(where, major, rows, shape.k, raw, cta.shared.data)
    chunks = _chunks(bits, major, rows, shape.k, raw.itemsize, cta.launch.granule)
    cta.shadow.read(errand.number, chunks, errand.clock)
    return numbers.decode(type, found)


def _a_from_tensor(
    cta: Cta, job: Job, errand: Errand, instruction: Instruction
) -> tuple[NDArray[np.float32], ...]:
    shape = job.shape
    regions, where = _multiplicand(job.a, shape.m, job.group)
    must_be_allocated(cta, regions, "tcgen05.mma", instruction)
    cta.tensor_shadow.read(errand.number, where, errand.clock)
    raw = numbers.raw_dtype(shape.a_type)
    if raw.itemsize < 4:
        _must_be_packed(cta, where, errand)
    found = accumulators.multiplicand(cta.tensor, job.a, shape.m, job.group)
    return tuple(numbers.decode(shape.a_type, np.ascontiguousarray(words).view(raw)) for words in found)


def _must_be_packed(cta: Cta, where: NDArray[np.intp], errand: Errand) -> None:
    """A of 16 or 8 bits lies packed in its columns, D has a column for each element: no D is such an A."""
    order = cta.cluster.order
    for before in distinct(cta.tensor_shadow.writer[where]):
        if before >= 0 and order.accesses[before].instruction.opcode.startswith("tcgen05.mma"):
            order.report("misread", "takes the D of another product for its A", errand.number, before)


def _accumulate(
    cta: Cta,
    job: Job,
    left: tuple[NDArray[np.float32], ...],
    right: NDArray[np.float32],
    errand: Errand,
    instruction: Instruction,
) -> None:
    accumulator = accumulators.Accumulator.of(job.shape, job.d, job.group)
    regions, where = _accumulator(accumulator)
    must_be_allocated(cta, regions, "tcgen05.mma", instruction)
    if job.adds:
        cta.tensor_shadow.read(errand.number, where, errand.clock)
    cta.tensor_shadow.write(errand.number, where, errand.clock)
    what = accumulators.Operation(job.adds, 0, job.shape.saturate, _disabled(job, cta))
    accumulators.execute(cta.tensor, accumulator, left, right, what)


Cells = tuple[tuple[tensor.Region, ...], NDArray[np.intp]]
"""Cells of tensor memory, as rectangles and as granules."""


@lru_cache(maxsize=4096)
def _multiplicand(address: int, m: int, group: int) -> Cells:
    regions = accumulators.multiplicand_regions(address, m, group)
    return regions, granules(regions)


@lru_cache(maxsize=4096)
def _accumulator(accumulator: accumulators.Accumulator) -> Cells:
    return accumulator.regions(), granules(accumulator.regions())


def _disabled(job: Job, cta: Cta) -> NDArray[np.bool_] | None:
    """Lanes of a CTA that the instruction leaves alone, bool [128]."""
    if not any(job.disabled):
        return None
    first = 4 * (cta.rank % 2) if job.group == 2 else 0
    words = np.array(job.disabled[first : first + 4], np.uint32)
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)


@translates("tcgen05.commit")
def commit(instruction: Instruction) -> Act:
    """An arrival on the mbarrier after all that this CTA's matrix unit was given before."""
    where, access = locate(instruction.operands[0], instruction), Accessor(instruction, "shared")
    multicast = instruction.has("multicast::cluster")
    ranks = read(instruction.operands[1], "u16") if multicast else None

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            address = int(where(warp)[lane])
            barriers = [barrier_at(access, warp, address)]
            if ranks is not None:
                _, offset = cta_and_offset(access, warp, address)
                chosen = int(ranks(warp)[lane])
                barriers = [
                    barrier_at(access, warp, r << RANK_SHIFT | offset) for r in range(16) if chosen >> r & 1
                ]
            errand = Errand.in_queue(warp, matrix_unit(warp), f"a tcgen05.commit of {warp}", instruction)
            clock = errand.clock
            clock.epochs[errand.agent] = errand.epoch
            for barrier in barriers:
                errand.signals(warp, barrier)

            def land(barriers=barriers, clock=clock) -> None:  # type: ignore[no-untyped-def]
                for barrier in barriers:
                    guarded(access, warp, lambda: barrier.arrive(1, clock, instruction.line))  # noqa: B023

            submit(warp, instruction, land, tuple(barriers), matrix_unit(warp))

    return Act(run)


# --- between registers and tensor memory --------------------------------------------------------------------


def register_list(operand: Operand, instruction: Instruction) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if not all(isinstance(i, Reg | Imm) for i in items):
        raise Unmodelled(instruction, "operands that are no registers")
    return items


def transfer_of(instruction: Instruction) -> tensor.Transfer:
    """The table of a .16x64b ... .32x32b shape and its repetition."""
    shape = next((m for m in instruction.modifiers if m in SHAPES), None)
    times = next((int(m[1:]) for m in instruction.modifiers if m[0] == "x" and m[1:].isdigit()), None)
    packs = any(m in ("pack::16b", "unpack::16b") for m in instruction.modifiers)
    known = {"sync", "aligned", "ld", "st", "b32", shape, f"x{times}", "pack::16b", "unpack::16b"}
    if shape is None or times is None or set(instruction.modifiers) - known:
        raise Unmodelled(instruction)
    return tensor.transfer(shape, times, packs)


@translates("tcgen05.st")
def st(instruction: Instruction) -> Act:
    table = transfer_of(instruction)
    where = tensor_address(instruction.operands[0], instruction)
    sources = [read(o, "u32") for o in register_list(instruction.operands[1], instruction)]
    rows = register_rows(instruction.operands[1])

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
    items = operand.items if isinstance(operand, Vector) else (operand,)
    named = [item.index for item in items if isinstance(item, Reg) and item.file == 32]
    return rows_of(named) if len(named) == len(items) else None


@lru_cache(maxsize=4096)
def cells_of(table: tensor.Transfer, start: int) -> Cells:
    return table.regions(start), granules(table.regions(start))


def place_checked(warp: Warp, table: tensor.Transfer, address: int, instruction: Instruction) -> int:
    """The address, checked: warp w reaches the 32 lanes from 32 * (w % 4) on."""
    lane, _ = tensor.split_address(address)
    if lane // 32 != warp.index % 4:
        first = warp.index % 4 * 32
        text = f"{warp} accesses lane {lane} of tensor memory; it reaches lanes {first} to {first + 31}"
        raise fail("tensor memory", text, instruction)
    must_be_allocated(warp.cta, cells_of(table, address)[0], warp, instruction)
    return address


@translates("tcgen05.wait::st")
def wait_st(instruction: Instruction) -> Act:
    def run(warp: Warp, mask: Mask) -> Wait | None:
        kind = groups(warp, STORES)
        kind.commit(_FIRST, instruction.line)
        return kind.wait(warp, _FIRST, 0, STORES, instruction.line)

    return Act(run)


_FIRST = np.arange(32) == 0


@translates("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(instruction: Instruction) -> Act:
    """Order between threads comes from their barriers here; kernels are not required to have these."""
    return Act(lambda warp, mask: None)
