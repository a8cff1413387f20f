"""tcgen05.mma: the matrix unit of Blackwell (PTX ISA, "tcgen05.mma", "tcgen05.mma.ws", "tcgen05.commit").

Matrix multiplications, copies (tcgen05_copy.py) and commits of a CTA are one queue: they end in the order in
which they were issued. Hints at the collector buffers change no value. Not modelled: sparse A, shifted A
(.ashift), and masks for columns of B that are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, locate
from ptxsim.isa.asynchronous import Errand, chunk_granules, submit
from ptxsim.isa.mbarriers import barrier_at, cta_and_offset, guarded
from ptxsim.isa.operands import Read, items_of, read
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Unmodelled, translates
from ptxsim.isa.tcgen05 import Cells, granules, must_be_allocated
from ptxsim.ptx.nodes import Address, Imm, Instruction, Operand, Vector
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.registers import Mask, lanes_of
from ptxsim.state.window import RANK_SHIFT
from ptxsim.units import accumulators, descriptors, numbers, packing, scales, tensor
from ptxsim.units import instruction as idesc
from ptxsim.watch.shadow import distinct

BLOCKS = {"block16": 16, "block32": 32}
BLOCKS |= {f"scale_vec::{count}X": 0 for count in (1, 2, 4)}
"""Elements that share a scale factor; .scale_vec counts factors of a row instead."""


@dataclass(frozen=True)
class Kind:
    """Kind of product that an instruction's modifiers ask for: `block` is 0 without block scaling."""

    name: str
    group: int
    ws: bool
    block: int

    @classmethod
    def of(cls, form: Form) -> Kind:
        name = next(flag for flag in form.flags if flag.startswith("kind::")).removeprefix("kind::")
        group = 2 if "cta_group::2" in form.flags else 1
        block = _block(name, form.one_of(*BLOCKS)) if "block_scale" in form.flags else 0
        return cls(name, group, "ws" in form.flags, block)

    def shape(self, bits: int) -> idesc.InstructionDescriptor:
        """The instruction descriptor of these bits."""
        return idesc.decode(bits, self.name, self.group, self.ws, self.block)


def _block(kind: str, size: str) -> int:
    """Elements that share a factor, by the modifier or the kind's default."""
    if not size:
        return next(iter(idesc.BLOCKS[kind]))
    return BLOCKS[size] or idesc.DEPTH[kind] // int(size[-2])


@dataclass(frozen=True)
class Operands:
    d: Read
    a: Read
    a_in_tensor: bool
    b: Read
    shape: Read
    adds: Read
    halvings: int
    scales: tuple[Read, ...]
    """Addresses of the scale factors of A and B; none without block scaling."""
    disabled: tuple[Read, ...]
    """Words whose bits name lanes of D that stay as they are, 4 for each CTA; none where the instruction has
    none."""
    zeros: Read | None
    """Descriptor of the columns of B that are zero, of .ws."""


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
    halvings: int
    scales: tuple[int, ...]
    disabled: tuple[int, ...]


@translates("tcgen05.mma")
def mma(instruction: Instruction, form: Form) -> Act:
    kind = Kind.of(form)
    operands = _operands(instruction, kind)

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            if operands.zeros is not None and int(operands.zeros(warp)[lane]) >> NON_ZERO_MASK & 1:
                raise Unmodelled(instruction, "a mask of columns of B that are zero")
            job = Job(
                kind.shape(int(operands.shape(warp)[lane])),
                kind.group,
                int(operands.d(warp)[lane]),
                int(operands.a(warp)[lane]),
                operands.a_in_tensor,
                int(operands.b(warp)[lane]),
                bool(operands.adds(warp)[lane]),
                operands.halvings,
                tuple(int(factor(warp)[lane]) for factor in operands.scales),
                tuple(int(word(warp)[lane]) for word in operands.disabled),
            )
            errand = Errand.in_queue(warp, matrix_unit(warp), f"a tcgen05.mma of {warp}", instruction)
            land = partial(_land, warp, job, errand, instruction)
            submit(warp, instruction, land, (), matrix_unit(warp))

    return Act(run)


NON_ZERO_MASK = 39
"""Bit of a zero-column mask descriptor; where it is 0 no column is masked."""


def _operands(instruction: Instruction, kind: Kind) -> Operands:
    """d, a, b, descriptor, and then: two scale factors and a predicate; or perhaps lanes that are disabled, a
    predicate, and perhaps by how much D is scaled or, with .ws, a mask descriptor."""
    d, a, b, shape, *rest = instruction.operands
    factors: list[Operand] = []
    if kind.block:
        factors, rest = rest[:2], rest[2:]
    disabled = [rest.pop(0)] if rest and isinstance(rest[0], Vector) else []
    adds, *last = rest
    halvings = int(last[0].value) if last and isinstance(last[0], Imm) and not kind.ws else 0
    if not 0 <= halvings <= 15:
        raise Unmodelled(instruction, f"D scaled by 2**-{halvings}; 0 to 15 are legal")
    in_tensor = isinstance(a, Address)
    return Operands(
        locate(d),
        locate(a) if in_tensor else read(a, "u64"),
        in_tensor,
        read(b, "u64"),
        read(shape, "u32"),
        read(adds, "pred"),
        halvings,
        tuple(locate(factor) for factor in factors),
        tuple(read(word, "u32") for word in items_of(disabled[0])) if disabled else (),
        read(last[0], "u64") if last and kind.ws else None,
    )


def matrix_unit(warp: Warp) -> str:
    return f"the matrix unit of CTA {warp.cta.rank}"


def pair_of(warp: Warp, group: int) -> list[Cta]:
    """The CTA, or both of its pair, the even one first."""
    first = warp.cta.rank & ~1
    return [warp.cta] if group == 1 else warp.cta.cluster.ctas[first : first + 2]


def _land(warp: Warp, job: Job, errand: Errand, instruction: Instruction) -> None:
    """Multiply. With two CTAs, A's and D's rows are split between them, and B's rows likewise."""
    shape, ctas = job.shape, pair_of(warp, job.group)
    columns = shape.n // job.group
    right = np.concatenate(
        [_from_shared(c, job.b, shape.b_major, columns, shape.b_type, shape, errand) for c in ctas]
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
    warp.cta.cluster.traffic["MMA multiply-adds"] += shape.m * shape.n * shape.k


@lru_cache(maxsize=4096)
def _chunks(
    bits: int, major: descriptors.Major, rows: int, k: int, itemsize: int, granule: int
) -> NDArray[np.intp]:
    """The granules of shared memory that an operand lies in."""
    where = descriptors.decode_tcgen05(bits)
    return chunk_granules(descriptors.touched(where, major, rows, k, itemsize), granule)


_BYTE = np.dtype(np.uint8)


def _from_shared(
    cta: Cta,
    bits: int,
    major: descriptors.Major,
    rows: int,
    type: str,
    shape: idesc.InstructionDescriptor,
    errand: Errand,
) -> NDArray[np.float32]:
    where, packed = descriptors.decode_tcgen05(bits), packing.is_packed(shape.kind, type)
    raw, k = (_BYTE, idesc.ROW_BYTES) if packed else (numbers.raw_dtype(type), shape.k)
    errand.moves(cta, rows * idesc.ROW_BYTES)
    found = descriptors.operand(where, major, rows, k, raw, cta.shared.data)
    chunks = _chunks(bits, major, rows, k, raw.itemsize, cta.launch.granule)
    cta.shadow.read(errand.number, chunks, errand.clock)
    return packing.from_shared(shape.kind, type, found) if packed else numbers.decode(type, found)


def _a_from_tensor(
    cta: Cta, job: Job, errand: Errand, instruction: Instruction
) -> tuple[NDArray[np.float32], ...]:
    shape = job.shape
    regions, where = _multiplicand(job.a, shape.m, job.group, shape.ws)
    must_be_allocated(cta, regions, "tcgen05.mma", instruction)
    cta.tensor_shadow.read(errand.number, where, errand.clock)
    if numbers.raw_dtype(shape.a_type).itemsize < 4:
        _must_be_packed(cta, where, errand)
    found = accumulators.multiplicand(cta.tensor, job.a, shape.m, job.group, shape.ws)
    return tuple(packing.from_tensor(shape.kind, shape.a_type, words) for words in found)


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
    if job.scales:
        _read_scales(cta, job, errand, instruction)
    if job.adds:
        cta.tensor_shadow.read(errand.number, where, errand.clock)
    cta.tensor_shadow.write(errand.number, where, errand.clock)
    if job.scales:
        addresses = job.scales[0], job.scales[1]
        parts = scales.quarters(cta.tensor, job.shape, addresses, left, right, job.group)
        accumulators.execute_scaled(cta.tensor, accumulator, parts, job.adds)
        return
    what = accumulators.Operation(job.adds, job.halvings, job.shape.saturate, _disabled(job, cta))
    accumulators.execute(cta.tensor, accumulator, left, right, what)


def _read_scales(cta: Cta, job: Job, errand: Errand, instruction: Instruction) -> None:
    halves = 2 if job.shape.m // job.group == 64 else 1
    for address, count in zip(job.scales, (job.shape.m // job.group, job.shape.n // halves)):
        regions, where = _factors(address, count)
        must_be_allocated(cta, regions, "tcgen05.mma", instruction)
        cta.tensor_shadow.read(errand.number, where, errand.clock)


@lru_cache(maxsize=4096)
def _factors(address: int, count: int) -> Cells:
    regions = (scales.factors_region(address, count),)
    return regions, granules(regions)


@lru_cache(maxsize=4096)
def _multiplicand(address: int, m: int, group: int, ws: bool) -> Cells:
    regions: tuple[tensor.Region, ...] = accumulators.multiplicand_regions(address, m, group, ws)
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
def commit(instruction: Instruction, form: Form) -> Act:
    """An arrival on the mbarrier after all that this CTA's matrix unit was given before."""
    where, access = locate(instruction.operands[0]), Accessor(instruction, "shared")
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
