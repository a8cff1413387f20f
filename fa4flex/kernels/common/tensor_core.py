"""Blackwell's tensor cores: tcgen05.mma in runs, and tiles of tensor memory.

One lane issues all instructions of a product, one right after the other. The library's own product elects a
lane for each instruction, and computes its descriptors anew behind the branch that this is. The tensor core
then waits for the warp that feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Boolean, Float32, Int32, cute, pipeline
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import TmemAllocator

from fa4flex.kernels.common.gathering_rings import GatheringTensorCoreRing, gathering, lanes_of

KINDS = {
    "Float16": ("f16", 0, 1),
    "BFloat16": ("f16", 1, 1),
    "Float8E4M3FN": ("f8f6f4", 0, 1),
    "Int8": ("i8", 1, 2),
}
"""Kind of tcgen05.mma for operands of a dtype, and the numbers of that dtype and of the result's, which is
float32 or int32 (PTX ISA, "instruction descriptor")."""

ROW_BYTES = 32
"""Bytes of a row of an operand that one instruction multiplies."""


def instruction_depth(kind: Any) -> int:
    """Elements of a row that one instruction multiplies."""
    return 8 * ROW_BYTES // int(kind.width)


class Words(NamedTuple):
    """Words of an instruction's operands: the result's, A's, none where each instruction has a place of its
    own, and B's."""

    result: Int32
    left: list[Int32]
    right: list[Int32]


@dataclass(frozen=True)
class Product:
    """Properties that all instructions of a product have in common. rows: of the result, over all CTAs;
    columns of it; a_in_tensor_memory: else A is in shared memory; b_along_columns: B lies in memory along the
    columns of the result, else along what is summed over; a_along_rows: likewise A along its rows;
    stationary: tcgen05.mma.ws, whose results of 64 rows use all lanes of tensor memory, half of the columns
    in each half of the lanes."""

    kind: Any
    ctas: int
    rows: int
    columns: int
    a_in_tensor_memory: bool
    b_along_columns: bool
    a_along_rows: bool = False
    stationary: bool = False

    @property
    def descriptor(self) -> int:
        """PTX ISA, "instruction descriptor"."""
        _, operand, result = KINDS[self.kind.__name__]
        types = result << 4 | operand << 7 | operand << 10
        majors = self.a_along_rows << 15 | self.b_along_columns << 16
        return types | majors | self.columns // 8 << 17 | self.rows // 16 << 24

    def issue(
        self,
        acc: cute.Pointer,
        a: cute.Tensor | Sequence[cute.Pointer],
        b: cute.Tensor,
        steps: range,
        add: Boolean | bool,
        zero: Int32 | int = 0,
    ) -> None:
        """acc = a b, or acc += a b with `add`, over these instructions. a, b: (M or N, M or N, K); in tensor
        memory, a may be given by where the operand of each instruction begins. In a loop, `zero` is what
        `zero_here` returns."""
        operands = self.prepared(acc, a, b, zero)
        with cute.arch.elect_one():
            self.put(operands, a, b, steps, add)

    def prepared(
        self,
        acc: cute.Pointer,
        a: cute.Tensor | Sequence[cute.Pointer],
        b: cute.Tensor,
        zero: Int32 | int = 0,
    ) -> Words:
        result, right = Int32(acc.toint()), _words(b)
        right[0] = right[0] + zero
        return Words(result, self._left(a, zero), right)

    def put(
        self,
        operands: Words,
        a: cute.Tensor | Sequence[cute.Pointer],
        b: cute.Tensor,
        steps: range,
        add: Boolean | bool,
    ) -> None:
        """Issues as `issue` does, for one lane that is elected already."""
        result, left, right = operands
        for k in steps:
            words, offset = left or [Int32(a[k].toint())], 0
            if isinstance(a, cute.Tensor):
                offset = self._columns(a, k) if self.a_in_tensor_memory else _step(a, k)
            kept = ".ws" if self.stationary else ""
            form = KINDS[self.kind.__name__][0]
            instruction = f"tcgen05.mma{kept}.cta_group::{self.ctas}.kind::{form}"
            numbers = (result, *words, *right, Int32(Boolean(add)))
            _mma(numbers, instruction, self.descriptor, [offset, _step(b, k)])
            add = True

    def _left(self, a: cute.Tensor | Sequence[cute.Pointer], zero: Int32 | int) -> list[Int32]:
        if not isinstance(a, cute.Tensor):
            return []
        words = [Int32(a.iterator.toint())] if self.a_in_tensor_memory else _words(a)
        return [words[0] + zero, *words[1:]]

    def _columns(self, a: cute.Tensor, k: int) -> int:
        """Columns of tensor memory, 32 bits wide, to step k."""
        return _step(a, k) * a.element_type.width // 32


def _step(operand: cute.Tensor, k: int) -> int:
    """Offset of step k from the first: known when the kernel is compiled, so that an address is one addition,
    and not a number that waits in a register from one product to the next."""
    offset = cute.crd2idx((0, 0, k), operand.layout)
    if not isinstance(offset, int):
        raise TypeError(f"an operand whose steps lie {operand.layout} apart, expected constants")
    return offset


def _words(operand: cute.Tensor) -> list[Int32]:
    """A shared-memory descriptor. All that differs between steps is in its low word."""
    whole = tcgen05.smem_descriptor_to_int(operand.iterator)
    return [Int32(whole), Int32(whole >> 32)]


@dataclass(frozen=True)
class Blocks:
    """A warpgroup's tile in tensor memory, (128, columns, block), as one of its threads copies it."""

    copy: Any
    memory: cute.Tensor
    shape: Any
    """Shape of the registers that hold the thread's part of a block."""

    @staticmethod
    def load(op: Any, blocks: cute.Tensor, thread: Int32) -> Blocks:
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), blocks[None, None, 0])
        mine = copy.get_slice(thread)
        shape = mine.partition_D(cute.make_identity_tensor(blocks.shape[:2])).shape
        return Blocks(copy, mine.partition_S(blocks), shape)

    @staticmethod
    def store(op: Any, blocks: cute.Tensor, thread: Int32) -> Blocks:
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), blocks[None, None, 0])
        mine = copy.get_slice(thread)
        shape = mine.partition_S(cute.make_identity_tensor(blocks.shape[:2])).shape
        return Blocks(copy, mine.partition_D(blocks), shape)

    def moved(self, columns: Int32) -> Blocks:
        """The same, so many columns on."""
        memory = cute.make_tensor(self.memory.iterator + columns, self.memory.layout)
        return Blocks(self.copy, memory, self.shape)

    def take(self, block: int, registers: cute.Tensor) -> None:
        cute.copy(self.copy, self.memory[None, None, None, block], self._shaped(registers))

    def put(self, block: int, registers: cute.Tensor) -> None:
        cute.copy(self.copy, self._shaped(registers), self.memory[None, None, None, block])

    def _shaped(self, registers: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(registers.iterator, cute.make_layout(self.shape))


def arrive_once(barrier: cute.Pointer, first: bool = False) -> None:
    """One arrival for the warp, after what all of its lanes did; `first`: at the first CTA of its pair."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, peer_cta_rank_in_cluster=0 if first else None)


@dsl_user_op
def arrive_where(condition: Boolean, barrier: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """The arrival of each lane for which the condition holds, without a branch."""
    _where(condition, [Int32(barrier.toint())], "mbarrier.arrive.shared::cta.b64 _, [$1];", loc, ip)


@dsl_user_op
def put_where(condition: Boolean, cell: cute.Pointer, x: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """x to shared memory, for each lane for which the condition holds, without a branch."""
    _where(condition, [Int32(cell.toint()), x], "st.shared::cta.f32 [$1], $2;", loc, ip)


def _where(condition: Boolean, operands: list[Any], instruction: str, loc: Any, ip: Any) -> None:
    kinds = ["f" if isinstance(x, Float32) else "r" for x in operands]
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (Boolean(condition), *operands)],
        f"@$0 {instruction}",
        ",".join(["b", *kinds, "~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def elect() -> Boolean:
    """True in one lane of the warp."""
    return Boolean(nvvm.elect_sync())


@dsl_user_op
def zero_here(i: Int32, most: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """0, as i <= most; but the compiler does not know.

    Added to the addresses of a loop's products, it keeps the compiler from computing them all before the
    loop: they fill the registers of the warp, and reading one back takes as long as adding anew.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [x.ir_value(loc=loc, ip=ip) for x in (i, most)],
            "{ .reg .pred past; setp.gt.s32 past, $1, $2; selp.b32 $0, 1, 0, past; }",
            "=r,r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def _mma(
    operands: Any, name: str, descriptor: int, offsets: list[int], *, loc: Any = None, ip: Any = None
) -> None:
    """operands: result; A, a column or two words; B, two words; whether to add."""
    in_memory = len(operands) == 5
    b, add = (2, 4) if in_memory else (3, 5)
    left = f"add.s32 la, $1, {offsets[0]};"
    if not in_memory:
        left += " mov.b64 a, {la, $2};"
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        "{ .reg .pred add; .reg .b32 la, lb; .reg .b64 a, b; "
        f"setp.ne.b32 add, ${add}, 0; {left} add.s32 lb, ${b}, {offsets[1]}; mov.b64 b, {{lb, ${b + 1}}}; "
        f"{name} [$0], {'[la]' if in_memory else 'a'}, b, {descriptor:#x}, add; }}",
        ",".join("r" * len(operands)),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def tensor_memory(
    storage: Any, allocator: int, barrier: pipeline.NamedBarrier, ctas: int = 1
) -> TmemAllocator:
    """Allocator of tensor memory of one CTA, or of a pair, which allocates and frees together. storage: with
    `columns` and `freed`; allocator: the warp that does it; barrier: for all who touch it."""
    return TmemAllocator(
        storage.columns.ptr,
        barrier_for_retrieve=barrier,
        allocator_warp_id=allocator,
        is_two_cta=ctas == 2,
        two_cta_tmem_dealloc_mbar_ptr=storage.freed.ptr,
    )


def operand_ring(
    barriers: cute.Pointer,
    operand: cute.Tensor,
    ctas: int = 1,
    cluster: cute.Layout | None = None,
    gather_warps: int = 0,
) -> pipeline.PipelineTmaUmma:
    """Stages that a TMA fills and products free; operand (instruction, M or N, K, stage) is one CTA's. Or so
    many warps gather rows there."""
    alone = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    stage = cute.select(operand.layout, mode=[0, 1, 2])
    ring = pipeline.PipelineTmaUmma.create(
        num_stages=cute.size(operand, mode=[3]),
        producer_group=lanes_of(gather_warps) if gather_warps else alone,
        consumer_group=alone,
        tx_count=0 if gather_warps else cute.size_in_bytes(operand.element_type, stage) * ctas,
        barrier_storage=barriers,
        cta_layout_vmnk=cluster,
        defer_sync=True,
    )
    return gathering(ring, GatheringTensorCoreRing) if gather_warps else ring
