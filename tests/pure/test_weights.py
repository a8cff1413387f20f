"""Elementwise weights and their slopes, of backward kernels: the same values in fewer operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.codegen.emit.weights import shortened
from fa4flex.codegen.evaluate import evaluate
from fa4flex.codegen.expr import Expr, apply, const, nodes, rebuild, rewritten
from fa4flex.kernels.plan.specialize import brief
from fa4flex.variants import relu_squared, sigmoid_attention, silu_attention

F = torch.nn.functional
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "relu, squared": lambda s: F.relu(s) ** 2,
    "clamp, squared": lambda s: torch.clamp(s, 0.0, 3.0) ** 2 / 7.0,
    "clamp, cubed": lambda s: torch.clamp(s, 0.0, 3.0) ** 3,
    "clamp from elsewhere": lambda s: torch.clamp(s - 0.5, 0.0, 3.0) ** 2,
    "clamp that is no floor": lambda s: torch.clamp(s, -1.0, 3.0) ** 2,
    "relu6": F.relu6,
    "minimum": lambda s: torch.minimum(s, torch.ones_like(s) * 3.0) * s,
    "infinite at 0": lambda s: torch.where(s <= 0.0, 0.0, torch.sqrt(s)) * F.relu(s),
    "silu": F.silu,
    "silu / 3": lambda s: F.silu(s) / 3.0,
    "silu, squared": lambda s: F.silu(s) ** 2,
    "sigmoid": torch.sigmoid,
    "sigmoid, squared": lambda s: torch.sigmoid(s) ** 2,
    "gelu": F.gelu,
    "gelu by tanh": lambda s: F.gelu(s, approximate="tanh"),
    "square": lambda s: s * s,
    "exponential": torch.exp,
}
VARIANTS = {"sigmoid": sigmoid_attention, "silu": silu_attention, "relu squared": relu_squared}
LIMITS = (0.0, 1.0, 3.0, 3.5, 2.0**40)


def program_of(normalizer: Any) -> Any:
    return fa4flex.compile(normalizer=normalizer).program


def known_operations(x: Expr) -> Expr:
    """The same by operations of mods."""

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op == "shared":
            return args[0]
        if node.op == "saturated":
            line = apply("add", apply("mul", args[0], args[1]), args[2])
            kept = apply("minimum", apply("maximum", line, const(0.0)), const(1.0))
            return apply("where", apply("eq", line, line), kept, const(0.0))
        return rebuild(node, args)

    return rewritten(x, change)


def scores() -> Tensor:
    """Numbers of every size, and those next to where functions bend."""
    ends = torch.tensor(LIMITS, dtype=torch.float32)
    infinity = torch.tensor(float("inf"))
    near = torch.cat([ends, torch.nextafter(ends, infinity), torch.nextafter(ends, -infinity)])
    drawn = torch.randn(2_000) * torch.logspace(-20, 15, 2_000)
    return torch.cat([near, -near, drawn, torch.randn(2_000) * 2]).float()


def largest_error(found: Any, true: Tensor) -> float:
    found = torch.as_tensor(found).double().expand_as(true)
    finite = true.isfinite() & (true.abs() < 1e37)
    size = true.abs().clamp(min=1e-6)  # x - x^2 is a difference
    return float(((found - true).abs() / size)[finite].max())


@pytest.mark.parametrize("name", [*FUNCTIONS, *VARIANTS])
def test_values_stay(name: str, seed: int) -> None:
    """In float64, as the same expressions; ties and what is beyond limits too."""
    normalizer = VARIANTS.get(name) if name in VARIANTS else None
    if name in FUNCTIONS:
        function = FUNCTIONS[name]
        normalizer = fa4flex.Normalizer.elementwise(lambda s, b, h, q_idx, kv_idx: function(s))
    facts = program_of(normalizer).facts
    before = facts.score, facts.gradient.by_score
    after = tuple(map(known_operations, shortened(*before)))
    symbols = {"score": scores().double(), "kv_len": 100, "b": 0, "h": 0, "q": 0, "kv": 0, "q_len": 100}
    pairs = zip(*(evaluate(x, symbols, dtype=torch.float64) for x in (after, before)), strict=True)
    for mine, true in pairs:
        true = torch.as_tensor(true).double().expand(symbols["score"].shape)
        assert largest_error(mine, true) < 1e-9


def test_selections_of_zeros_go() -> None:
    _, slope = shortened(*(lambda f: (f.score, f.gradient.by_score))(program_of(relu_squared).facts))
    found = [x.op for x in nodes(slope) if "score" in x.free and x.args]
    assert not {"where", "eq", "le", "maximum", "minimum"} & set(found)
    assert found.count("saturated") == 2


def test_a_slope_has_the_weight_in_it() -> None:
    """The slope of x sigmoid(x) is sigmoid(x) + x sigmoid(x) (1 - sigmoid(x))."""
    facts = program_of(silu_attention).facts
    weight, slope = shortened(facts.score, facts.gradient.by_score)
    shared = [x.args[0] for x in nodes(slope) if x.op == "shared"]
    assert shared == [weight]


def test_what_may_be_infinite_stays_selected() -> None:
    """0 times infinity would be no number."""

    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(s <= 0.0, 0.0, torch.sqrt(s)) * torch.clamp(s, min=0.0)

    facts = program_of(fa4flex.Normalizer.elementwise(mod)).facts
    _, slope = shortened(facts.score, facts.gradient.by_score)
    (value,) = evaluate([known_operations(slope)], {"score": torch.tensor([-1.0, 0.0])})
    assert torch.equal(torch.as_tensor(value), torch.zeros(2))


def test_which_weights_are_brief() -> None:
    def of(function: Any) -> bool:
        return brief(program_of(fa4flex.Normalizer.elementwise(function)).facts)

    assert all(brief(program_of(variant).facts) for variant in VARIANTS.values())
    assert of(lambda s, b, h, q_idx, kv_idx: F.gelu(s, approximate="tanh"))
    assert not of(lambda s, b, h, q_idx, kv_idx: F.gelu(s)), "erf is long"
    assert not of(lambda s, b, h, q_idx, kv_idx: torch.log1p(s * s)), "log1p branches"
    assert not of(lambda s, b, h, q_idx, kv_idx: torch.sigmoid(s + q_idx)), "an index"
    assert not brief(fa4flex.compile().program.facts), "a softmax"
