"""Weights with a logistic function: how they are written, what their formulas lose, and which kernels take
them by groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fa4flex
from fa4flex.codegen.build import build
from fa4flex.codegen.emit.logistic import by_groups, way_of
from fa4flex.codegen.emit.lower import Lowering
from fa4flex.variant import compose
from fa4flex.variants import causal, relu_squared, sigmoid_attention, silu_attention

BIAS = torch.zeros(4)

ALIKE: dict[str, Callable[[Any, Any], Any]] = {
    "sigmoid": lambda s, h: torch.sigmoid(s),
    "written out": lambda s, h: 1 / (1 + torch.exp(-s)),
    "reciprocal": lambda s, h: torch.reciprocal(torch.exp(-s) + 1),
    "base two": lambda s, h: 1 / (1 + torch.exp2(-s)),
    "silu": lambda s, h: torch.nn.functional.silu(s),
    "quotient": lambda s, h: s / (1 + torch.exp(-s)),
    "scaled": lambda s, h: torch.sigmoid(2 * s) * 0.25,
    "biased": lambda s, h: torch.sigmoid(s + BIAS[h]),
    "biased, written out": lambda s, h: 3 / (1 + torch.exp(4 - s)),
    "with a part beside": lambda s, h: torch.sigmoid(s - 7) + s * 1e-3,
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "two": lambda s, h: torch.sigmoid(s) + torch.sigmoid(s - 1),
    "another quotient": lambda s, h: 1 / (2 + torch.exp(-s)),
    "of no score": lambda s, h: s * torch.sigmoid(BIAS[h]),
    "none": lambda s, h: torch.relu(s),
}


def normalizer(function: Callable[[Any, Any], Any]) -> Any:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(score, h)

    return fa4flex.Normalizer.elementwise(mod)


def module(kind: Any, arch: str = "sm_90a", stage: str = "forward", **problem: Any) -> str:
    return fa4flex.compile(mask=causal, normalizer=kind).source(stage, arch=arch, **problem)


@pytest.mark.parametrize("name", ALIKE)
def test_all_spellings_are_one_function(name: str) -> None:
    text = module(normalizer(ALIKE[name]))
    assert text.count("at.logistic(") == 1
    assert "exp2" not in text and "divide" not in text
    way = "SMALL" if "biased" in name or "beside" in name else "EVEN"
    assert f"Pointwise(score, logistic={way})" in text


def test_a_weight_that_reads_an_element_of_each_pair_is_as_it_was() -> None:
    table = torch.zeros(7)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + BIAS[h]) * table[(q_idx + 2 * kv_idx) % 7]

    def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + BIAS[h]) * table[(q_idx - kv_idx).abs() % 7]

    assert "at.logistic(" not in module(fa4flex.Normalizer.elementwise(mod))
    assert "at.logistic(" in module(fa4flex.Normalizer.elementwise(near))


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_are_as_they_were(name: str) -> None:
    assert "at.logistic(" not in module(normalizer(OTHERS[name]))


@pytest.mark.parametrize("kind", [relu_squared(), sigmoid_attention(), silu_attention()])
def test_kernels_that_see_no_groups_have_no_logistic_function(kind: Any) -> None:
    assert "at.logistic(" not in module(kind, "sm_100a")
    assert "at.logistic(" not in module(kind, stage="backward")


def test_a_half_precision_weight_has_no_tanh() -> None:
    """Its error is above what rounding to float16 costs."""
    assert "at.logistic(" not in module(silu_attention(), dtype="float16")
    assert "logistic=SMALL" in module(sigmoid_attention(), dtype="float16")


def test_a_product_costs_one_multiplication() -> None:
    """The number of keys and the half are in the coefficient."""
    text = module(silu_attention())
    (score,) = re.findall(r"^def score\(at\):\n((?:    .*\n)+)", text, re.MULTILINE)
    assert len([line for line in score.splitlines() if "*" in line]) == 2


@pytest.mark.parametrize("name", [*ALIKE])
def test_the_meaning_stays(name: str, seed: int) -> None:
    """The lowered weight, with the logistic function in float64, is the function."""
    root = lowered(ALIKE[name])
    scale, x = 0.37, float(torch.randn(()) * 4)
    true = ALIKE[name](torch.tensor(x * scale, dtype=torch.float64), 0)
    assert math.isclose(value(root, x, scale), float(true), rel_tol=1e-9)


def lowered(function: Callable[[Any, Any], Any]) -> Any:
    facts = build(compose(normalizer=normalizer(function))).facts
    root = by_groups(facts.score, Lowering(True, False, {}), "bfloat16")
    assert root is not None
    return root


def value(node: Any, score: float, scale: float) -> float:
    args = [value(a, score, scale) for a in node.args]
    match node.op:
        case "sym":
            return {"score": score, "h": 0.0}[node.value]
        case "const":
            return float(node.value)
        case "scalar":
            assert node.value == -1
            return scale
        case "load":
            return 0.0
        case "reciprocal":
            return 1 / args[0]
        case "logistic" if node.value == "SMALL":
            return 1 / (1 + 2 ** -args[0])
        case "logistic":
            return args[1] * (1 + math.tanh(args[0]))
    return {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a,
    }[node.op](*args)  # fmt: skip


def test_ways_are_those_of_the_kernel() -> None:
    logistic = pytest.importorskip("fa4flex.kernels.common.logistic")
    for function in (ALIKE["silu"], ALIKE["biased"]):
        assert hasattr(logistic, way_of(lowered(function)))


# --- errors of the formulas ---------------------------------------------------------------------------------


def rounding_costs(x: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Largest change of a function where x is rounded to bfloat16."""
    half = 2.0 ** (np.floor(np.log2(np.abs(x))) - 8)
    return np.maximum(*(np.abs(function(x + step) - function(x)) for step in (half, -half)))


def test_small_values_lose_less_than_bfloat16_rounds() -> None:
    logistic = pytest.importorskip("fa4flex.kernels.common.logistic")
    y = np.linspace(-126, logistic.SMALL.below, 100_001)
    e = 2.0**y
    error = np.abs((e - e * e) * (1 + 2.0**-y) - 1)
    assert error.max() <= 2**-10.99


@pytest.mark.parametrize("weight", [lambda x: 1 / (1 + np.exp(-x)), lambda x: x / (1 + np.exp(-x))])
def test_tanh_loses_little_beside_rounding_of_the_score(weight: Any) -> None:
    """The instruction is within 2^-11 of its value. Its error and that of a rounded weight are at most twice
    what it costs to round score and weight, as PyTorch does at bfloat16."""
    logistic = pytest.importorskip("fa4flex.kernels.common.logistic")
    h = np.linspace(logistic.EVEN.above, -0.7, 10_001)
    x = 2 * h
    exact = weight(x)
    factor = exact * (1 + np.exp(-x)) / 2
    worst, rounded = np.abs(factor * np.tanh(h)) * 2**-11, np.abs(exact) * 2**-9
    assert (worst + rounded <= 2 * (rounding_costs(x, weight) + rounded)).all()
