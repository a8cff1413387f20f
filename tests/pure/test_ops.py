"""A row of ops.py is all that an elementwise operation takes: no stage has a list of its own to add it to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa4flex.codegen import text
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.emit import emit_forward
from fa4flex.codegen.evaluate import evaluate
from fa4flex.codegen.expr import apply, const, sym, to_float
from fa4flex.codegen.ops import OPS, Operation
from fa4flex.errors import InputError
from fa4flex.kernels.fwd_sm90.config import Config

ASINH = """
import math
import sys

from fa4flex.codegen.ops import OPS

assert not {"torch", "cutlass", "sympy"} & set(sys.modules)
import operation_domains

OPS["asinh"] = row = operation_domains.asinh(operation_domains.stable)

from types import SimpleNamespace

import torch

import fa4flex
from fa4flex.codegen import text
from fa4flex.codegen.analyze.bounds import Bounds, bounds
from fa4flex.codegen.analyze.rules import real
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.emit import emit_backward, emit_forward
from fa4flex.codegen.evaluate import Captured
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.plan.work import score_cost

table = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)


def mod(score, b, h, q_idx, kv_idx):
    return -2.0 * torch.asinh(score) + table[h, kv_idx].arcsinh()


attn = fa4flex.compile(score_mod=mod)
q, k, v = (torch.randn(1, 2, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
scores = -2.0 * (q @ k.mT / math.sqrt(8)).asinh() + table.asinh()[:, None]
leaves, dout = (q, k, v, table), torch.randn(1, 2, 24, 8, dtype=torch.float64)
out, expected = attn(q, k, v), scores.softmax(-1) @ v
torch.testing.assert_close(out, expected)
for mine, theirs in zip(
    torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
):
    torch.testing.assert_close(mine, theirs)

facts = attn.program.facts
assert text.parse(text.dump(facts.score)) == (facts.score,) and "asinh(score)" in str(facts.score)
assert score_cost(facts.score) >= (3, 20)
asinh = facts.score.args[0].args[1]
(found,) = bounds([asinh], {"score": Bounds(real(-1.0), real(2.0))}, Tables(Captured()))
assert -0.8814 < found.lo < -0.8813 and 1.4436 < found.hi < 1.4437

problem = {"in_range": True, "wide_index": False, "positive_scale": True, "mask_form": "none"}
plan = SimpleNamespace(
    problem=SimpleNamespace(**problem, gradients=()),
    target=SimpleNamespace(name="sm_90a"),
            module="fa4flex.kernels.fwd_sm90",
            copies=True,
    config=lambda: Config(128, 128, 128, 128),
)
for emit in (emit_forward, emit_backward):
    source = emit(facts, plan).text
    assert "log1p(" in source and " asinh(" not in source, source

import test_gradient
import test_operation_domains

assert row in test_gradient.FUNCTIONS and row in test_operation_domains.ROWS
test_gradient.test_operation(row)
for by in (test_operation_domains.evaluated, test_operation_domains.by_flex):
    test_operation_domains.test_values(row, by)
"""


def test_a_row_is_an_operation() -> None:
    """Traced, evaluated, differentiated, bounded, costed, emitted, read back from text, and tested."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ASINH], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["int", "float", "bool"])
def test_devices_compute_every_operation(kind: str) -> None:
    values = {
        "float": (sym("score"), to_float(sym("kv")), to_float(sym("q"))),
        "int": (sym("q"), sym("kv"), sym("b")),
        "bool": tuple(apply("lt", sym(a), sym(b)) for a, b in (("q", "kv"), ("kv", "b"), ("h", "q"))),
    }[kind]
    given = {"in_range": True, "wide_index": False, "positive_scale": True, "mask_form": "none"}
    plan = SimpleNamespace(
        problem=SimpleNamespace(**given),
        target=SimpleNamespace(name="sm_90a"),
        module="fa4flex.kernels.fwd_sm90",
        copies=True,
        config=lambda: Config(128, 128, 128, 128),
    )
    for op, row in OPS.items():
        root = apply("mul", sym("score"), to_float(apply(op, *values[: row.arity])))
        module = emit_forward(Facts(root), plan).text  # raises NotImplementedError where there is no code
        if row.device and (row.takes, row.arity) == ("float", 1):
            assert f"{row.device}(" in module, module


def test_names_are_not_shared() -> None:
    names = [name for row in OPS.values() for name in row.torch]
    assert len(names) == len(set(names)) and all(name == row.name for name, row in OPS.items())


@pytest.mark.parametrize("row", [row for row in OPS.values() if row.odd], ids=lambda row: row.name)
def test_odd(row: Operation) -> None:
    x = torch.linspace(0, 1, 50)
    function = getattr(torch, row.torch[0])
    assert torch.equal(function(-x), -function(x))


@pytest.mark.parametrize("op", [name for name, row in OPS.items() if row.fold is not None])
def test_constants_fold_to_what_they_are_at_run_time(op: str) -> None:
    row = OPS[op]
    values = {"int": (6, 2), "bool": (True, False), "float": (0.75, 2.0)}.get(row.takes, (7, -2))
    if op in ("shl", "shr"):
        values = (-9, 3)
    args = [const(x) for x in values[: row.arity]]
    symbols = dict(zip(("q", "kv"), map(torch.tensor, values)))
    folded = apply(op, *args)
    assert folded.op == "const"
    named = [sym(name) for name in list(symbols)[: row.arity]]
    if row.takes == "float":  # symbols but the score are ints
        named = [sym("score"), *args[1:]]
        symbols = {"score": torch.tensor(values[0], dtype=torch.float64)}
    if row.takes == "bool":
        named = [apply("eq", x, const(1)) for x in named]
        symbols = {name: x.long() for name, x in symbols.items()}
    (value,) = evaluate([apply(op, *named)], symbols, dtype=torch.float64)
    assert torch.as_tensor(value).item() == pytest.approx(folded.value, rel=1e-15)


def test_the_number_of_arguments_is_checked() -> None:
    for op, count in (("tanh", 2), ("add", 1), ("where", 2)):
        with pytest.raises(TypeError, match=f"{op} takes {OPS[op].arity} arguments; got {count}"):
            apply(op, *[sym("score")] * count)
    written = text.dump(apply("tanh", sym("score")))
    with pytest.raises(InputError, match="tanh takes 1 arguments; got 2"):
        text.parse(written.replace("[0]", "[0,0]", 1))
