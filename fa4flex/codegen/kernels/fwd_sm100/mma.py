"""tcgen05.mma in runs: one lane issues all instructions of a product, one right after the other.

The library's own product elects a lane for each instruction, and computes its descriptors anew behind the
branch that this is. The tensor core then waits for the warp that feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import BFloat16, Boolean, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

MMA_K = 16
"""Keys, or elements of a head, that one instruction multiplies."""


@dataclass(frozen=True)
class Product:
    """What all instructions of a product have in common. rows: of the result, over all CTAs; columns of it;
    a_in_tensor_memory: else A is in shared memory; b_along_columns: B lies in memory along the columns of the
    result, else along what is summed over."""

    kind: Any
    ctas: int
    rows: int
    columns: int
    a_in_tensor_memory: bool
    b_along_columns: bool

    @property
    def descriptor(self) -> int:
        """PTX ISA, "instruction descriptor" of kind::f16; results are float32."""
        bf16 = int(self.kind is BFloat16)
        types = 1 << 4 | bf16 << 7 | bf16 << 10
        return types | self.b_along_columns << 16 | self.columns // 8 << 17 | self.rows // 16 << 24

    def issue(
        self, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, steps: range, add: Boolean | bool
    ) -> None:
        """acc = a b, or acc += a b with `add`, over these instructions. a, b: (M or N, M or N, K)."""
        result = Int32(acc.iterator.toint())
        with cute.arch.elect_one():
            for k in steps:
                self._step(result, a[None, None, k].iterator, b[None, None, k].iterator, add)
                add = True

    def _step(self, result: Int32, a: Any, b: Any, add: Boolean | bool) -> None:
        left = Int32(a.toint()) if self.a_in_tensor_memory else tcgen05.smem_descriptor_to_int(a)
        right = tcgen05.smem_descriptor_to_int(b)
        instruction = f"tcgen05.mma.cta_group::{self.ctas}.kind::f16"
        _mma((result, left, right, Int32(Boolean(add))), instruction, self.descriptor)


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
