"""Generated hooks, run on a CPU as a kernel runs them: uniform, row, column, diagonal, pair, then the score.

The host function is compiled without a launch, over tensors in generic memory: it is native code of the CPU.
Approximations that only a GPU has are replaced (`math.FAST`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from fa4flex.codegen.evaluate import Captured
from fa4flex.kernels.common import math
from fa4flex.kernels.common.folds import folds_of
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise

LOG2_E = 1.4426950408889634
DTYPES = {
    torch.float32: Float32, torch.float64: cutlass.Float64, torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16, torch.int64: Int64, torch.int32: Int32, torch.int16: cutlass.Int16,
    torch.int8: cutlass.Int8, torch.uint8: Uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A dense problem; results are [batch, heads, q_len, kv_len]."""

    batch: int
    heads: int
    q_len: int
    kv_len: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.kv_len

    def symbols(self) -> dict[str, Any]:
        """Index tensors that broadcast, and lengths."""
        found = {
            name: torch.arange(size).view([-1 if i == place else 1 for i in range(4)])
            for place, (name, size) in enumerate(zip(("b", "h", "q", "kv"), self.shape, strict=True))
        }
        return {**found, "q_len": self.q_len, "kv_len": self.kv_len, "num_heads": self.heads}


@contextmanager
def without_approximations() -> Iterator[None]:
    math.FAST = False
    try:
        yield
    finally:
        math.FAST = True


def on_device(tensor: Tensor) -> Tensor:
    """A captured tensor as a launch passes it: bools as bytes, a 0-d one with one element."""
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def fake(dtype: Any, rank: int, even_rows: bool = False) -> Any:
    """`even_rows` promises that the last stride is 1 and that rows begin at multiples of two elements."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    strides = [cute.sym_int64(divisibility=2 if even_rows else 1) for _ in range(rank)]
    if even_rows:
        strides[-1] = 1
    align = dtype.width // 8 * (2 if even_rows else 1)
    memory = cutlass.AddressSpace.generic
    return make_fake_tensor(dtype, shape, tuple(strides), memspace=memory, assumed_align=align)


def rates(pointwise: Pointwise, at: At) -> At:
    """`at` with the values that the row, column, diagonal and pair hooks of a function return there."""
    blind = at.but(score=None)
    found = {
        name: hook(blind)
        for name in ("row", "column", "diagonal")
        if (hook := getattr(pointwise, name)) is not None
    }
    if pointwise.pair is not None:
        found["pair"] = pointwise.pair(blind.but(**found))
    if pointwise.folds:
        (found["folds"],) = folds_of(pointwise.folds, [blind.but(**found)])
    return at.but(**found)


def modified(hooks: Hooks, at: At) -> Any:
    """log2(e) times the modified score; NaN where the factor is not positive, as it must be."""
    factor = at.scale * LOG2_E if hooks.factor is None else hooks.factor(at)
    if hooks.start is not None:
        at = at.but(score=at.score + hooks.start.element(rates(hooks.start, at.but(score=None))))
    if hooks.score is not None and hooks.score.logistic is not None:
        at = at.but(logistic=hooks.score.logistic.exact)
    y = at.score if hooks.score is None else hooks.score.element(rates(hooks.score, at))
    if hooks.elementwise:
        return Float32(y)
    return math.where(factor > 0.0, Float32(y) * factor, Float32(math.NAN))


def allowed(hooks: Hooks, at: At) -> Any:
    """Mask of a pair: 1 if it takes part, else 0."""
    taken = Boolean(True)
    if hooks.mask is not None:
        taken = hooks.mask.element(rates(hooks.mask, at))
    if hooks.spans is not None:
        taken = Boolean(False)
        for lo, hi in hooks.spans(at):
            above = Boolean(True) if lo is None else at.kv >= lo
            taken = taken | (above & (Boolean(True) if hi is None else at.kv < hi))
    return math.where(taken, Int32(1), Int32(0))


def uniform(hooks: Hooks, at: At) -> At:
    return at if hooks.uniform is None else at.but(uniform=hooks.uniform(at))


def at_pair(at: At, q: Any, kv_base: Any, step: int) -> At:
    """`at` for one query and the key kv_base + step."""
    ahead = step + 3
    kv, offset_base = kv_base + step, kv_base - q - 3
    at = at.but(q=q, q_float=Float32(q))
    at = at.but(kv=kv, kv_float=Float32(kv), kv_base=kv_base, kv_base_float=Float32(kv_base), kv_step=step)
    at = at.but(offset=kv - q, offset_float=Float32(kv - q), offset_step=ahead)
    return at.but(offset_base=offset_base, offset_base_float=Float32(offset_base))


@cute.jit
def visit(
    scores: cute.Tensor,
    taken: cute.Tensor,
    operands: tuple,  # type: ignore[type-arg]
    scalars: tuple,  # type: ignore[type-arg]
    scale: Float32,
    hooks: cutlass.Constexpr,
    guard: cutlass.Constexpr,
) -> None:
    batch, heads, q_len, kv_len = taken.shape
    for b in range(batch):
        for h in range(heads):
            for q in range(q_len):
                for pair in range((kv_len + 1) // 2):
                    for step in cutlass.range_constexpr(2):
                        kv = pair * 2 + step
                        if kv < kv_len:
                            place = At(b, h, q_len, kv_len, heads, scale, operands, scalars, guard)
                            place = at_pair(uniform(hooks, place), q, pair * 2, step)
                            place = place.but(score=scores[b, h, q, kv])
                            scores[b, h, q, kv] = modified(hooks, place)
                            taken[b, h, q, kv] = Uint8(allowed(hooks, place))


def run(
    hooks: Hooks,
    raw: Tensor,
    captured: Captured,
    scale: float = 1.0,
    guard: bool = True,
    wide: bool = False,
    even_rows: bool = False,
) -> tuple[Tensor, Tensor]:
    """raw [B, H, Q, KV] -> the modified scores in natural units, and bool: which pairs take part."""
    operands = tuple(map(on_device, captured.operands))
    scalars = tuple(float(x) if isinstance(x, float) else int(x) for x in captured.scalars)
    integer = Int64 if wide else Int32
    scores, taken = raw.clone(), torch.zeros(raw.shape, dtype=torch.uint8)
    with without_approximations(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Argument (operands|scalars)")  # of empty tuples
        compiled = cute.compile(
            visit,
            fake(Float32, 4),
            fake(Uint8, 4),
            tuple(fake(DTYPES[x.dtype], x.ndim, even_rows) for x in operands),
            tuple(Float32(x) if isinstance(x, float) else integer(x) for x in scalars),
            Float32(scale),
            hooks,
            guard,
            options="--enable-tvm-ffi",
        )
    compiled(scores, taken, operands, scalars, scale)
    return scores if hooks.elementwise else scores / LOG2_E, taken.bool()
