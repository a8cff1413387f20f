"""Blackwell's tensor cores: tcgen05.mma in runs, and tiles of tensor memory.

One lane issues all instructions of a product, one right after the other. The library's own product elects a
lane for each instruction, and computes its descriptors anew behind the branch that this is. The tensor core
then waits for the warp that feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

MMA_K = 16
"""Keys, or elements of a head, that one instruction multiplies."""


@dataclass(frozen=True)
class Product:
    """What all instructions of a product have in common. rows: of the result, over all CTAs; columns of it;
    a_in_tensor_memory: else A is in shared memory; b_along_columns: B lies in memory along the columns of the
    result, else along what is summed over; a_along_rows: likewise A along its rows."""

    kind: Any
    ctas: int
    rows: int
    columns: int
    a_in_tensor_memory: bool
    b_along_columns: bool
    a_along_rows: bool = False

    @property
    def descriptor(self) -> int:
        """PTX ISA, "instruction descriptor" of kind::f16; results are float32."""
        bf16 = int(self.kind is BFloat16)
        types = 1 << 4 | bf16 << 7 | bf16 << 10
        majors = self.a_along_rows << 15 | self.b_along_columns << 16
        return types | majors | self.columns // 8 << 17 | self.rows // 16 << 24

    def issue(
        self,
        acc: cute.Pointer,
        a: cute.Tensor | Sequence[cute.Pointer],
        b: cute.Tensor,
        steps: range,
        add: Boolean | bool,
    ) -> None:
        """acc = a b, or acc += a b with `add`, over these instructions. a, b: (M or N, M or N, K); a may be
        given by where the operand of each instruction begins."""
        result = Int32(acc.toint())
        with cute.arch.elect_one():
            for k in steps:
                left = a[None, None, k].iterator if isinstance(a, cute.Tensor) else a[k]
                self._step(result, left, b[None, None, k].iterator, add)
                add = True

    def _step(self, result: Int32, a: Any, b: Any, add: Boolean | bool) -> None:
        left = Int32(a.toint()) if self.a_in_tensor_memory else tcgen05.smem_descriptor_to_int(a)
        right = tcgen05.smem_descriptor_to_int(b)
        instruction = f"tcgen05.mma.cta_group::{self.ctas}.kind::f16"
        _mma((result, left, right, Int32(Boolean(add))), instruction, self.descriptor)


@dataclass(frozen=True)
class Blocks:
    """A warpgroup's tile in tensor memory, (128, columns, block), as one of its threads copies it."""

    copy: Any
    memory: cute.Tensor
    shape: Any
    """Of the registers that hold the thread's part of a block."""

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
def _mma(operands: Any, name: str, descriptor: int, *, loc: Any = None, ip: Any = None) -> None:
    result, left, right, add = operands
    a, register = ("$1", "l") if isinstance(left, Int64) else ("[$1]", "r")
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (result, left, right, add)],
        f"{{ .reg .pred add; setp.ne.b32 add, $3, 0; {name} [$0], {a}, $2, {descriptor:#x}, add; }}",
        f"r,{register},l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
