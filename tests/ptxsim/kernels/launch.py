"""Small kernels of one input and one output tensor, whose whole body is one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cuda.bindings import driver as cuda
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from kernels.case import BOTH, Case, compile_for

ELEMENTS = {
    torch.int16: cutlass.Int16,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.uint8: cutlass.Uint8,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
    torch.float64: cutlass.Float64,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float8_e5m2: cutlass.Float8E5M2,
}


@dataclass(frozen=True)
class Grid:
    """Threads of a CTA, CTAs, and CTAs of a cluster."""

    threads: int = 32
    blocks: int = 1
    cluster: int = 1


class Small:
    """Runs `body(x, y)`, a function that cute.jit has decorated."""

    def __init__(self, body: Callable[[Any, Any], None], grid: Grid) -> None:
        self.body, self.grid = body, grid

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        self.device(x, y).launch(
            grid=[self.grid.blocks, 1, 1],
            block=[self.grid.threads, 1, 1],
            cluster=[self.grid.cluster, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def device(self, x: cute.Tensor, y: cute.Tensor) -> None:
        self.body(x, y)


def fake(tensor: Tensor) -> Any:
    """The same type, sizes and strides, known when compiled."""
    kind = ELEMENTS[tensor.dtype]
    return make_fake_tensor(kind, tuple(tensor.shape), tensor.stride(), assumed_align=16)


def case(
    body: Callable[[Any, Any], None],
    x: Callable[[], Tensor],
    y: Callable[[], Tensor],
    expected: Callable[[Tensor], Tensor],
    grid: Grid = Grid(),
    archs: tuple[str, ...] = BOTH,
    name: str = "",
) -> Case:
    """A case, of the body's name if none is given. `expected` makes of x what y is after the launch."""
    return Case(
        name=name or body.__name__,
        archs=archs,
        build=lambda arch: compile_for(arch, Small(body, grid), fake(x()), fake(y())),
        inputs=lambda: (x(),),
        outputs=lambda: (y(),),
        expected=lambda given: (expected(given),),
    )


def numbers(*shape: int, seed: int = 0) -> Callable[[], Tensor]:
    """Random int32 numbers of the whole range."""
    random = torch.Generator()
    return lambda: torch.randint(-(2**31), 2**31, shape, generator=random.manual_seed(seed)).int()


def poison(*shape: int, dtype: torch.dtype = torch.int32) -> Callable[[], Tensor]:
    """Tensor of a number that no kernel writes."""
    return lambda: torch.full(shape, -12345, dtype=dtype)
