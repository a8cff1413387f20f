"""Scalar operations of kernels against Python and torch, on a CPU; and that they compile for sm_90a."""

from __future__ import annotations

import itertools
from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor
from hook_runner import fake, without_approximations

from fa4flex.codegen.emit.printer import functions
from fa4flex.codegen.ops import OPS
from fa4flex.kernels.common import math

CONSTANTS = (1, 3, 7, 10, 1000)
SIDES = ("left", "right")
ROWS = tuple(row for row in OPS.values() if row.arity == 1 and row.gives in ("same", "float") and row.device)
UNARY = (*(row.device for row in ROWS), "reciprocal", "signum", "to_float16", "to_bfloat16")


@cute.jit
def divisions(out: cute.Tensor, pairs: cute.Tensor) -> None:
    for i in range(pairs.shape[0]):
        x, d = pairs[i, 0], pairs[i, 1]
        out[i, 0] = math.divided(x, math.divisor(d))
        out[i, 1] = math.floor_div(x, d)
        out[i, 2] = math.trunc_div(x, d)


@cute.jit
def by_constants(out: cute.Tensor, numbers: cute.Tensor) -> None:
    for i in range(numbers.shape[0]):
        for j in cutlass.range_constexpr(len(CONSTANTS)):
            out[i, j, 0] = math.floor_div(numbers[i], CONSTANTS[j])
            out[i, j, 1] = math.floor_div(numbers[i], -CONSTANTS[j])
            out[i, j, 2] = math.natural_div(math.absolute(numbers[i]), CONSTANTS[j])


@cute.jit
def of_extents(out: cute.Tensor, numbers: cute.Tensor) -> None:
    for i in range(numbers.shape[0]):
        lacking = numbers[i] - Int32(out.shape[1])
        out[i, 0] = math.floor_div(lacking, 13)
        out[i, 1] = math.floor_div(lacking, Int32(out.shape[1]))


@cute.jit
def searches(out: cute.Tensor, table: cute.Tensor, needles: cute.Tensor) -> None:
    for i in range(needles.shape[0]):
        for row in range(table.shape[0]):
            out[i, row, 0] = math.search_left(table, (row,), needles[i], True)
            out[i, row, 1] = math.search_right(table, (row,), needles[i], False)


@cute.jit
def erfs(out: cute.Tensor, x: cute.Tensor) -> None:
    for i in range(x.shape[0]):
        out[i] = math.erf(x[i])


def call(function: Any, *arguments: tuple[Any, torch.Tensor]) -> None:
    with without_approximations():
        compiled = cute.compile(
            function, *(fake(dtype, x.ndim) for dtype, x in arguments), options="--enable-tvm-ffi"
        )
    compiled(*(x for _, x in arguments))


def test_divisions_by_run_time_numbers() -> None:
    """All small pairs, and numbers up to the ends of int32, by divisors of every size and sign."""
    ends = [
        2**31 - 1,
        2**31 - 2,
        2**30,
        65536,
        65535,
        -(2**31) + 1,
        -65536,
        12345678,
        *torch.randint(2**31, (40,)),
    ]
    numbers = [*range(-40, 41), *map(int, ends)]
    divisors = [d for d in (*range(-9, 10), 64, 1000, 65537, 2**30, 2**31 - 1, -1000, -(2**31) + 1) if d]
    pairs = torch.tensor(list(itertools.product(numbers, divisors)), dtype=torch.int32)
    out = torch.zeros(len(pairs), 3, dtype=torch.int32)
    call(divisions, (Int32, out), (Int32, pairs))
    x, d = pairs.long().unbind(-1)
    for column, mode in enumerate(("floor", "floor", "trunc")):
        wrong = out[:, column] != torch.div(x, d, rounding_mode=mode)
        assert not wrong.any(), f"{mode}: {pairs[wrong][:5].tolist()} gave {out[wrong, column][:5].tolist()}"


def test_divisions_by_constants() -> None:
    numbers = torch.cat([torch.arange(-50, 50), torch.randint(-(2**31) + 1, 2**31, (50,))]).int()
    out = torch.zeros(len(numbers), len(CONSTANTS), 3, dtype=torch.int32)
    call(by_constants, (Int32, out), (Int32, numbers))
    x, d = numbers.long()[:, None], torch.tensor(CONSTANTS)
    assert torch.equal(out.long(), torch.stack([x // d, x // -d, x.abs() // d], -1))


def test_divisions_of_what_depends_on_extents() -> None:
    """Extents of tensors, by themselves, divide towards zero."""
    numbers = torch.arange(-30, 30).int()
    out = torch.zeros(len(numbers), 5, dtype=torch.int32)
    call(of_extents, (Int32, out), (Int32, numbers))
    assert torch.equal(out[:, :2], torch.stack([(numbers - 5) // 13, (numbers - 5) // 5], -1))


def test_searches() -> None:
    """Repeated elements, and needles below, between, on and above them."""
    table = torch.randint(0, 12, (3, 17)).sort(-1).values.int()
    needles = torch.arange(-2, 15).int()
    out = torch.zeros(len(needles), 3, 2, dtype=torch.int32)
    call(searches, (Int32, out), (Int32, table), (Int32, needles))
    wide = needles.expand(3, -1).contiguous()
    for column, side in enumerate(SIDES):
        assert torch.equal(out[:, :, column].T, torch.searchsorted(table, wide, side=side).int())


def test_erf() -> None:
    x = torch.cat([torch.linspace(-6, 6, 2001), torch.tensor([0.0, torch.inf, -torch.inf])])
    out = torch.zeros_like(x)
    call(erfs, (Float32, out), (Float32, x))
    exact = torch.erf(x.double())
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-22).all()


def test_rows_name_functions_that_there_are() -> None:
    assert not [name for name in functions() if not hasattr(math, name)]


@cute.kernel
def every_function(out: cute.Tensor, x: cute.Tensor, names: cutlass.Constexpr) -> None:
    i = cute.arch.thread_idx()[0]
    for j in cutlass.range_constexpr(len(names)):
        out[j, i] = getattr(math, names[j])(x[i])
    out[len(names), i] = math.divide(x[i], x[i + 1]) + math.power(x[i], x[i + 1]) + math.atan2(x[i], x[i + 1])
    either = math.is_nan(x[i]) | math.is_inf(x[i]) | Boolean(False)
    out[len(names) + 1, i] = math.where(either, math.minimum(x[i], x[i + 1]), math.maximum(x[i], x[i + 1]))


@cute.jit
def launch(out: cute.Tensor, x: cute.Tensor, names: cutlass.Constexpr) -> None:
    every_function(out, x, names).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_all_functions_compile_for_hopper(tmp_path: Any) -> None:
    assert math.FAST, "what a GPU runs is compiled with its approximations"
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir={tmp_path}"
    tensors = (
        make_fake_tensor(Float32, (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1)),
        make_fake_tensor(Float32, (cute.sym_int32(),), (1,)),
    )
    compiled = cute.compile(launch, *tensors, UNARY, options=options)
    ptx = compiled.__ptx__
    assert "tanh.approx.f32" in ptx and "ex2.approx.ftz.f32" in ptx and "rcp.approx" in ptx
