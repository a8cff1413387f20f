"""Functions of floats as hooks compute them on devices, over their rows' whole domains, against float64.

The simulator rounds approximate instructions exactly: tests/ptxsim/test_approx.py says what a chip may do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, cute, range_constexpr
from cutlass.cute.runtime import make_fake_tensor
from hook_runner import LOG2_E, at_pair, rates
from kernels.case import compile_for
from operation_domains import asinh, cancelling, inputs, lacking, of_floats, stable, worst
from torch import Tensor

import ptxsim
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.emit import emit_forward
from fa4flex.codegen.expr import apply, load, sym
from fa4flex.codegen.ops import OPS, Formula, Operation
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.fwd_sm90.config import Config

THREADS = 128
FACTOR = 1.5
"""Ulps that a hook's factor may add, by which its value is multiplied later."""


def hooks_of(row: Operation) -> Hooks:
    """Hooks of a score mod that is the function, of an element of a table and of the score, if it has two
    arguments."""
    problem = {"in_range": True, "wide_index": False, "positive_scale": True, "mask_form": "none"}
    plan: Any = SimpleNamespace(
        problem=SimpleNamespace(**problem),
        target=SimpleNamespace(name="sm_90a"),
        module="fa4flex.kernels.fwd_sm90",
        config=lambda: Config(128, 128, 128, 128),
    )
    score = sym("score")
    args = (score,) if row.arity == 1 else (load(0, (sym("kv"),), "float"), score)
    hooks: Hooks = emit_forward(Facts(apply(row.name, *args)), plan).namespace()["HOOKS"]
    return hooks


def value_and_factor(hooks: Hooks, at: At) -> tuple[Any, Any]:
    """A score's value, and what kernels multiply it by, log2(e) included."""
    if hooks.uniform is not None:
        at = at.but(uniform=hooks.uniform(at))
    value = at.score if hooks.score is None else hooks.score.element(rates(hooks.score, at))
    return value, at.scale * LOG2_E if hooks.factor is None else hooks.factor(at)


class Functions:
    """Values and factors [rows, 2, N] of hooks, at scores x[i] and elements table[i]."""

    def __init__(self, rows: list[Operation]) -> None:
        self.hooks = [hooks_of(row) for row in rows]

    @cute.jit
    def __call__(self, x: cute.Tensor, table: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        self.device(x, table, y).launch(
            grid=[x.shape[1] // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def device(self, x: cute.Tensor, table: cute.Tensor, y: cute.Tensor) -> None:
        i = Int32(cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
        for j in range_constexpr(len(self.hooks)):
            hooks = self.hooks[j]
            at = At(0, 0, 1, x.shape[1], 1, Float32(1.0), (table[j, None],), (), False)
            at = at_pair(at, Int32(0), i, 0)
            at = at.but(score=x[j, i])
            value, factor = value_and_factor(hooks, at)
            y[j, 0, i], y[j, 1, i] = Float32(value), Float32(factor)


def values(rows: list[Operation], given: list[list[Tensor]], arch: str) -> list[Tensor]:
    """Each row's values at its arguments, by one launch."""
    most = max(len(xs[0]) for xs in given)
    count = -(-most // THREADS) * THREADS
    x, table = (torch.ones(len(rows), count) for _ in range(2))
    for j, xs in enumerate(given):
        x[j, : len(xs[-1])], table[j, : len(xs[0])] = xs[-1], xs[0]
    y = torch.zeros(len(rows), 2, count)
    columns = cute.sym_int32(divisibility=THREADS)
    fakes = [make_fake_tensor(Float32, (len(rows), columns), (cute.sym_int64(), 1)) for _ in range(2)]
    results = make_fake_tensor(Float32, (len(rows), 2, columns), (cute.sym_int64(), cute.sym_int64(), 1))
    with ptxsim.device(arch) as gpu:
        compile_for(arch, Functions(rows), *fakes, results)(x, table, y)
    assert len(gpu.results) == 1 and not gpu.findings, gpu.report()
    found = (y[:, 0].double() * y[:, 1].double() / LOG2_E).float()
    return [one[: len(xs[0])] for one, xs in zip(found, given, strict=True)]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_functions(arch: str) -> None:
    rows = [row for row in of_floats() if not lacking(row)]
    given = [inputs(row) for row in rows]
    found = values(rows, given, arch)
    wrong = [worst(row, xs, got, FACTOR) for row, xs, got in zip(rows, given, found, strict=True)]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("formula", [stable, cancelling])
def test_a_row_is_tested_by_itself(formula: Formula, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that cancels near 0 is noticed, and one that does not passes."""
    monkeypatch.setitem(OPS, "asinh", asinh(formula))
    (row,) = (row for row in of_floats() if row.name == "asinh")
    xs = inputs(row)
    (got,) = values([row], [xs], "sm_90a")
    wrong = worst(row, xs, got, FACTOR)
    assert not wrong if formula is stable else "asinh(" in wrong and "inf ulps" not in wrong, wrong
