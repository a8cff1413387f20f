"""One wgmma instruction, or two, on numbers of any size: how the tensor core adds shows in fp32 results."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.utils.hopper_helpers as sm90
import torch
from cuda.bindings import driver as cuda
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from torch import Tensor

from kernels.case import Case, compile_for, generator
from kernels.launch import ELEMENTS, fake

ROWS = 64


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    columns: int
    depth: int = 16


class Product:
    """C [64, n] fp32 = A [64, k] B [n, k]^T by one warpgroup, which brings both to shared memory itself."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.kind = shape, ELEMENTS[shape.dtype]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream) -> None:
        k = OperandMajorMode.K
        product = sm90.make_trivial_tiled_mma(
            self.kind,
            self.kind,
            k,
            k,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(ROWS, self.shape.columns),
        )
        self.device(a, b, c, product).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def device(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, product: cute.TiledMma) -> None:
        lane = cute.arch.thread_idx()[0]
        mine = product.get_slice(lane)
        tile = (ROWS, self.shape.columns, self.shape.depth)
        row_major, allocator = LayoutEnum.ROW_MAJOR, SmemAllocator()
        layouts = (
            make(row_major, tile, self.kind, 1) for make in (sm90.make_smem_layout_a, sm90.make_smem_layout_b)
        )
        a_shared, b_shared = (
            allocator.allocate_tensor(self.kind, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in layouts
        )
        self.fill(a_shared, a, lane)
        self.fill(b_shared, b, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        a_parts = product.make_fragment_A(mine.partition_A(a_shared))
        b_parts = product.make_fragment_B(mine.partition_B(b_shared))
        sums = cute.make_rmem_tensor(mine.partition_shape_C(tile[:2]), Float32)
        atom = cute.make_mma_atom(product.op)
        warpgroup.fence()
        for step in cutlass.range_constexpr(self.shape.depth * self.kind.width // 256):
            atom.set(warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(atom, sums, a_parts[None, None, step, 0], b_parts[None, None, step, 0], sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.autovec_copy(sums, mine.partition_C(c))

    @cute.jit
    def fill(self, shared: cute.Tensor, source: cute.Tensor, lane: cutlass.Int32) -> None:
        for i in range(lane, cute.size(source), 128):
            row, column = i // self.shape.depth, i % self.shape.depth
            shared[row, column, 0] = source[row, column]


def case(shape: Shape, spread: int) -> Case:
    """Elements have exponents from -spread to spread."""

    def elements(rows: int, seed: int) -> Tensor:
        random = generator(seed)
        size = (rows, shape.depth)
        exponent = torch.randint(-spread, spread + 1, size, generator=random)
        return torch.ldexp(torch.randn(size, generator=random), exponent).to(shape.dtype)

    def inputs() -> tuple[Tensor, Tensor]:
        return elements(ROWS, 1), elements(shape.columns, 2)

    def outputs() -> tuple[Tensor]:
        return (torch.full((ROWS, shape.columns), torch.nan),)

    def error(a: Tensor, b: Tensor) -> tuple[Tensor]:
        """The ISA promises no order and no rounding: what fits fp32 addition of truncated terms; the sums of
        8-bit products keep fewer bits, and hardware truncates both terms and sum (docs/simulator.md)."""
        kept = 20 if shape.dtype.itemsize == 2 else 11
        return ((a.double().abs() @ b.double().abs().T) * 2.0**-kept,)

    return Case(
        name=f"product_{str(shape.dtype).removeprefix('torch.')}_n{shape.columns}_k{shape.depth}_{spread}",
        archs=("sm_90a",),
        build=lambda arch: compile_for(arch, Product(shape), *map(fake, (*inputs(), *outputs()))),
        inputs=inputs,
        outputs=outputs,
        expected=lambda a, b: (a.double() @ b.double().T,),
        error=error,
    )


F16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CASES = (
    case(Shape(BF16, 8), 0),
    case(Shape(BF16, 8), 12),
    case(Shape(F16, 16), 0),
    case(Shape(F16, 16), 5),
    case(Shape(BF16, 64, 64), 4),
    case(Shape(E4M3, 8, 32), 0),
    case(Shape(E4M3, 16, 128), 2),
    case(Shape(E5M2, 8, 32), 4),
)
