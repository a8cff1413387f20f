"""Functions of floats on CPUs, over their rows' whole domains, and what a row must declare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operation_domains import inputs, lacking, of_floats, worst
from torch import Tensor

from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import apply, load, sym
from fa4flex.codegen.ops import OPS, Cost, Operation
from fa4flex.runtime.flex.mods import Setting, function

ROWS = of_floats()


def evaluated(row: Operation, xs: list[Tensor]) -> Tensor:
    """The row's values by expressions in float32."""
    first = load(0, (sym("kv"),), "float")
    root = apply(row.name, *(first, sym("score"))[2 - row.arity :])
    symbols = {"kv": torch.arange(len(xs[0])), "score": xs[-1]}
    (value,) = evaluate([root], symbols, Captured((xs[0],)), torch.float32)
    return torch.as_tensor(value)


def by_flex(row: Operation, xs: list[Tensor]) -> Tensor:
    """The same by the text that torch's flex_attention is given."""
    first = load(0, (sym("kv"),), "float")
    root = apply(row.name, *(first, sym("score"))[2 - row.arity :])
    made = function("mod", ("score", "kv"), ((root, "torch.float32"),), Setting())
    names: dict[str, object] = {"torch": torch}
    exec(made.text, names)
    tables = [xs[0] for buffer in made.buffers if buffer.kind == "tensor"]
    value: Tensor = names["mod"](xs[-1], torch.arange(len(xs[0])), *tables)  # type: ignore[operator]
    return value


@pytest.mark.parametrize("by", [evaluated, by_flex])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_values(row: Operation, by: Callable[[Operation, list[Tensor]], Tensor]) -> None:
    """They are torch's own in float32, or near enough to those in float64."""
    assert not lacking(row), lacking(row)
    xs = inputs(row)
    got, own = by(row, xs), getattr(torch, row.torch[0])(*xs)
    assert torch.equal(got.nan_to_num(7.0), own.nan_to_num(7.0)) or not (wrong := worst(row, xs, got)), wrong


def test_a_row_without_a_domain_is_named() -> None:
    row = Operation("asinh", 1, "float", "float", Cost(1, 20), ("asinh",))
    assert "the row of asinh declares 0 domains for 1 arguments" in lacking(row)
    assert not any(map(lacking, ROWS)), "every row of today has one"


def test_inaccurate_values_are_noticed() -> None:
    """Cancellation near 0, a pole in the wrong place, NaN inside of the domain, and none outside."""
    tanh, log1p = OPS["tanh"], OPS["log1p"]
    (x,), (y,) = inputs(tanh), inputs(log1p)
    assert "tanh(" in worst(tanh, [x], 1 - 2 / (1 + (2 * x).exp()))
    assert "log1p(" in worst(log1p, [y], (1 + y).log())
    assert "not nan" in worst(log1p, [y], y.clamp(min=-1).log1p())
    assert "gave nan" in worst(tanh, [x], x.sinh() / x.cosh())
