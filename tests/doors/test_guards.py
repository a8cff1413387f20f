"""Guards of kept traces: of each kind a change that it alone notices, so that a guard left out gives a wrong
result; and the keys under which traces and derived tensors are found."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_captures import CLOSE, H, S, distance, formula, qkv
from torch import Tensor

import fa4flex
from fa4flex.codegen import build
from fa4flex.codegen.trace import paths
from fa4flex.codegen.trace.captures import Recipe
from fa4flex.primitives.score import as_score

Step = tuple[Callable[..., Any] | None, Callable[..., Any] | None, Any, Any]
"""A score mod, a mask, and what the dense formula adds and allows."""


class Halves:
    @staticmethod
    def apply(d: Any) -> Any:
        return d * 0.5


class Quarters:
    @staticmethod
    def apply(d: Any) -> Any:
        return d * 0.25


def times(factor: int) -> type[torch.autograd.Function]:
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, d: Any) -> Any:
            return d * factor

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * factor

    return Times


Doubles, Triples = times(2), times(3)


class Duck:
    """Object that looks like a captured tensor without being one."""

    dtype = torch.float32

    def dim(self) -> int:
        return 0

    def __mul__(self, other: Any) -> Any:
        return 0.25 * other


def slope(x: Any) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + x * (q - k)


def window(x: Any) -> Callable[..., Any]:
    return lambda b, h, q, k: q - k < x


def classes() -> Iterator[Step]:
    for cls, factor in ((Halves, 0.5), (Quarters, 0.25)):
        yield lambda s, b, h, q, k, cls=cls: s + cls.apply(q - k), None, factor * distance(), True


def types() -> Iterator[Step]:
    for x in (2, 2.5):
        yield slope(x), None, x * distance(), True


def codes() -> Iterator[Step]:
    for inner in (lambda d: d * 0.5, lambda d: d * 0.25 + 1 * abs(d)):
        yield lambda s, b, h, q, k, f=inner: s + f(q - k), None, inner(distance()), True


def sizes() -> Iterator[Step]:
    for items in ([0.5], [0.5, 0.25]):
        yield lambda s, b, h, q, k, x=items: s + sum(x) * (q - k), None, sum(items) * distance(), True


def dictionaries() -> Iterator[Step]:
    for items in ({"a": 0.5}, {"a": 0.5, "c": 0.25}):
        total = sum(items.values())
        yield lambda s, b, h, q, k, x=items: s + sum(x.values()) * (q - k), None, total * distance(), True


def lookups() -> Iterator[Step]:
    class Mod:
        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.slope() * (q - k)

        def slope(self) -> float:
            return 0.5

    mod = Mod()
    yield mod, None, 0.5 * distance(), True
    mod.slope = lambda: 0.25  # type: ignore[method-assign]
    yield mod, None, 0.25 * distance(), True


def slots() -> Iterator[Step]:
    class Mod:
        __slots__ = ("slope",)

        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + getattr(self, "slope", 0.5) * (q - k)

    mod = Mod()
    yield mod, None, 0.5 * distance(), True
    mod.slope = 0.25
    yield mod, None, 0.25 * distance(), True


def texts() -> Iterator[Step]:
    for mode, modes in (("near", ("a", "b")), ("far", ("a", "b")), ("far", ("a", "c"))):
        sign = (1 if mode == "near" else -1) * (1 if "b" in modes else 2)
        mod = lambda s, b, h, q, k, m=mode, ms=modes: (  # noqa: E731
            s + (q - k if m == "near" else k - q) * (1 if "b" in ms else 2)
        )
        yield mod, None, sign * distance(), True


def sets() -> Iterator[Step]:
    for near in ({1}, {2}):
        sign = 1 if 1 in near else -1
        mod = lambda s, b, h, q, k, near=near: s + (q - k if 1 in near else k - q)  # noqa: E731
        yield mod, None, sign * distance(), True


def ducks() -> Iterator[Step]:
    yield slope(torch.tensor(0.5)), None, 0.5 * distance(), True
    yield slope(Duck()), None, 0.25 * distance(), True


def dtypes() -> Iterator[Step]:
    for x in (torch.tensor([1, 0]), torch.tensor([True, False])):
        yield lambda s, b, h, q, k, t=x: s + (~t[h]) * (q - k), None, (~x)[:, None, None] * distance(), True


def ranks() -> Iterator[Step]:
    for x in (torch.rand(H), torch.rand(H, 3)):
        mod = lambda s, b, h, q, k, t=x: s + t[h].sum() * (q - k)  # noqa: E731
        yield mod, None, x.view(H, -1).sum(1)[:, None, None] * distance(), True


def extents() -> Iterator[Step]:
    for n in (3, 5):
        rows, columns = torch.rand(S, n), torch.rand(S, n)
        mod = lambda s, b, h, q, k, r=rows, c=columns: s + (r[q] * c[k]).sum()  # noqa: E731
        yield mod, None, rows @ columns.T, True


def derived_extents() -> Iterator[Step]:
    for n in (3, 5):
        mod = lambda s, b, h, q, k, t=torch.rand(n): s + t.flip(0).numel() * (q - k) + 0 * t.flip(0)[h]  # noqa: E731
        yield mod, None, n * distance(), True


def layouts() -> Iterator[Step]:
    for t, factor in ((torch.rand(3), 2), (torch.rand(3).to_sparse(), 3)):
        mod = lambda s, b, h, q, k, t=t: s + (3 if t.is_sparse else 2) * (q - k)  # noqa: E731
        yield mod, None, factor * distance(), True


def environments() -> Iterator[Step]:
    mod = lambda s, b, h, q, k: s + float(os.environ.get("FACTOR_OF_A_GUARD", "1")) * (q - k)  # noqa: E731
    for factor in ("2", "3"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FACTOR_OF_A_GUARD", factor)
            yield mod, None, float(factor) * distance(), True


def gradients() -> Iterator[Step]:
    for grad in (False, True):
        x = torch.rand(H, requires_grad=grad)
        factor = (2 if grad else 3) * x.detach()[:, None, None]

        def mod(s: Any, b: Any, h: Any, q: Any, k: Any, t: Tensor = x) -> Any:
            twice = t * 2
            return s + (twice if twice.requires_grad else t * 3)[h] * (q - k)

        yield mod, None, factor * distance(), True


def aliases() -> Iterator[Step]:
    one, other = torch.rand(H), torch.rand(H)
    for a, c in ((one, one), (one, other)):
        mod = lambda s, b, h, q, k, a=a, c=c: s + a[h] * (q - k) + c[h] * k  # noqa: E731
        yield mod, None, a[:, None, None] * distance() + c[:, None, None] * torch.arange(S), True


SCENARIOS: dict[str, Callable[[], Iterator[Step]]] = {
    "is": classes,
    "type": types,
    "code": codes,
    "length": sizes,
    "keys": dictionaries,
    "absent": lookups,
    "unset": slots,
    "value": sets,
    "equal": texts,
    "tensor": ducks,
    "dtype": dtypes,
    "rank": ranks,
    "extent": extents,
    "layout": layouts,
    "environment": environments,
    "grad": gradients,
    "same": aliases,
}


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store of traces, so that no test finds those of another."""
    monkeypatch.setattr(build, "_kept", type(build._kept)())


def right(scenario: Callable[[], Iterator[Step]]) -> bool:
    """True if each step gives what the dense formula gives."""
    given = qkv()
    for score, mask, bias, allowed in scenario():
        try:
            out = fa4flex.compile(score, mask)(*given)
            torch.testing.assert_close(out, formula(given, bias, allowed), **CLOSE)
        except Exception:
            return False
    return True


@pytest.mark.parametrize("kind", SCENARIOS)
def test_a_change_is_noticed(kind: str) -> None:
    assert right(SCENARIOS[kind])


@pytest.mark.parametrize("kind", SCENARIOS)
def test_nothing_else_notices_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard the same change gives a wrong result."""
    monkeypatch.setitem(paths.FAILS, kind, "False")
    assert not right(SCENARIOS[kind])


def test_the_default_dtype_is_compared() -> None:
    """Mods may ask for it, and tensors that they make have it."""
    attn = fa4flex.compile(score_mod=lambda s, b, h, q, k: s * torch.tensor(0.1))
    q, k, v = (x.detach().double() for x in qkv())
    inexact = attn(q, k, v)
    torch.set_default_dtype(torch.float64)
    try:
        exact = attn(q, k, v)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(attn(q, k, v), inexact) and not torch.equal(exact, inexact)
    score = 0.1 * q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    torch.testing.assert_close(exact, score.softmax(-1) @ v, atol=1e-12, rtol=0)


def test_which_apply_was_captured_is_guarded() -> None:
    """`apply` of a torch.autograd.Function, bound before: another class, another function, another method."""
    given, bound = qkv(), Doubles.apply

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + bound(q - k)

    def attended(by: Any) -> Tensor:
        nonlocal bound
        bound = by
        return fa4flex.compile(mod)(*given)

    functions: tuple[Any, ...] = Doubles.apply, Triples.apply, lambda d: d * 5, Doubles.apply
    for by, factor in zip(functions, (2, 3, 5, 2)):
        torch.testing.assert_close(attended(by), formula(given, factor * distance(), True), **CLOSE)
    with pytest.raises(TypeError):
        attended(Doubles.mro)


def test_every_kind_of_guard_has_a_scenario() -> None:
    assert paths.FAILS.keys() == SCENARIOS.keys() | TRACES.keys()


def infinite() -> Iterator[Any]:
    """An infinite number is part of the expression: analysis takes others for finite."""
    for x in (2.5, float("inf"), 2.5):
        yield None, window(x)


def large() -> Iterator[Any]:
    """So is an integer of more than 64 bits."""
    for x in (2, 1 << 70, 2):
        yield None, window(x)


def moved() -> Iterator[Any]:
    """Values derived from a tensor are derived where that lies."""
    for device in ("cpu", "meta", "cpu"):
        yield lambda s, b, h, q, k, t=torch.rand(H, device=device): s + (t * 2)[h], None


TRACES: dict[str, Callable[[], Iterator[Any]]] = {"finite": infinite, "int64": large, "device": moved}


@pytest.mark.parametrize("kind", TRACES)
def test_a_change_leads_to_another_trace(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = TRACES[kind]
    first, other, again = (fa4flex.compile(*mods).trace for mods in scenario())
    assert first is again and other is not first
    monkeypatch.setitem(paths.FAILS, kind, "False")
    build._kept.clear()
    first, other, again = (fa4flex.compile(*mods).trace for mods in scenario())
    assert first is other, "nothing else notices it"


# --- the keys that traces are found by ------------------------------------------------------------------


def method_of(slope: float) -> Callable[..., Any]:
    class Owner:
        factor = slope

        def mod(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.factor * (q - k)

    return Owner().mod


def twice(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 2 * s


def thrice(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 3 * s


def sloped(s: Any, b: Any, h: Any, q: Any, k: Any, x: Any = 0) -> Any:
    return s + x * (q - k)


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return abs(q - k) < 3


def past(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


class Callables:
    def __init__(self, x: float) -> None:
        self.x = x

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.x * (q - k)


class Others(Callables):
    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.x * (k - q)


PAIRS: dict[str, tuple[Any, Any]] = {
    "code": (twice, thrice),
    "class of a method": (method_of(1.0), method_of(2.0)),
    "function of a partial": (functools.partial(twice), functools.partial(thrice)),
    "class of a callable": (Callables(1.0), Others(1.0)),
    "composition": (as_score(twice) >> as_score(thrice), as_score(twice) >> as_score(twice)),
    "function and partial": (sloped, functools.partial(sloped, x=2)),
    "kind": (None, twice),
}


@pytest.mark.parametrize("name", PAIRS)
def test_code_is_told_apart(name: str) -> None:
    """Alternating, each finds its own trace again, and gives the very result of a first call."""
    given, pair = qkv(), PAIRS[name]
    alone = []
    for mod in pair:
        build._kept.clear()
        alone.append(fa4flex.compile(mod)(*given))
    assert not torch.allclose(*alone)
    build._kept.clear()
    for mod, expected in (*zip(pair, alone), *zip(pair, alone)):
        assert torch.equal(fa4flex.compile(mod)(*given), expected)
    traces = [fa4flex.compile(mod).trace for mod in (*pair, *pair)]
    assert traces[:2] == traces[2:] and traces[0] is not traces[1]


def test_masks_are_part_of_the_key() -> None:
    given = qkv()
    for mask, allowed in ((near, distance().abs() < 3), (past, distance() >= 0), (None, True)):
        for _ in range(2):
            out = fa4flex.compile(twice, mask)(*given)
            twofold = 2 * given[0], given[1], given[2]
            torch.testing.assert_close(out, formula(twofold, 0.0, allowed), **CLOSE)


# --- derived tensors ------------------------------------------------------------------------------------

COLUMNS = torch.linspace(-2, 2, S * S).view(S, S).sin()


def scaled(x: Tensor, by: float = 2.0, *, plus: float = 0.0) -> Tensor:
    return x * by + plus


def no_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.flip(0)


RECIPES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "function": (lambda x: x.cumsum(0), lambda x: x.softmax(0)),
    "library function": (lambda x: torch.fliplr(x), lambda x: torch.flipud(x)),
    "argument": (lambda x: x.roll(2, 0), lambda x: x.roll(3, 0)),
    "type of an argument": (lambda x: x.to(torch.int32) * 1, lambda x: x.to(torch.int64) * 1.5),
    "sign of zero": (lambda x: 1 / torch.full_like(x, 0.0), lambda x: 1 / torch.full_like(x, -0.0)),
    "order of arguments": (lambda x: torch.mm(x, COLUMNS), lambda x: torch.mm(COLUMNS, x)),
    "tensor": (lambda x: x @ COLUMNS, lambda x: x @ x),
    "keyword": (lambda x: x.sum(0, keepdim=True).expand(S, S), lambda x: x.sum(1, keepdim=True).expand(S, S)),
    "keyword alone": (lambda x: x.roll(shifts=2), lambda x: x.roll(shifts=3)),
    "slice": (lambda x: x[0:4].repeat(3, 1), lambda x: x[4:8].repeat(3, 1)),
    "list": (lambda x: x[[0, 1, 2] * 4], lambda x: x[[2, 1, 0] * 4]),
    "output": (lambda x: x.aminmax(dim=0)[0].expand(S, S), lambda x: x.aminmax(dim=0)[1].expand(S, S)),
    "chunk": (lambda x: x.chunk(2)[0].repeat(2, 1), lambda x: x.chunk(2)[1].repeat(2, 1)),
    "recipe inside": (lambda x: x.roll(2, 0).flip(1), lambda x: x.roll(3, 0).flip(1)),
}


def both(table: Tensor, pair: tuple[Callable[[Tensor], Tensor], ...]) -> tuple[Callable[..., Any], Tensor]:
    """A mod that reads what both functions make of the table, and what it adds to the scores."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + pair[0](table)[q, k].tanh() - 3 * pair[1](table)[q, k].tanh()

    return mod, pair[0](table).tanh() - 3 * pair[1](table).tanh()


@pytest.mark.parametrize("name", RECIPES)
def test_derived_tensors_are_told_apart(name: str) -> None:
    given, (mod, bias) = qkv(), both(torch.randn(S, S) * 3, RECIPES[name])
    attn = fa4flex.compile(mod)
    torch.testing.assert_close(attn(*given), formula(given, bias), **CLOSE)
    twin, bias = both(torch.randn(S, S), (RECIPES[name][0],) * 2)
    attn = fa4flex.compile(twin)
    torch.testing.assert_close(attn(*given), formula(given, bias), **CLOSE)
    assert len(attn.trace.operands) == 1, "what is computed twice is one tensor"


def test_derived_tensors_with_and_without_gradient_are_told_apart() -> None:
    given, table = qkv(), torch.randn(S, S, requires_grad=True)
    attn = fa4flex.compile(lambda s, b, h, q, k: s + table.flip(0)[q, k] + no_gradient(table)[q, k])
    expected = formula(given, table.flip(0) + table.detach().flip(0))
    torch.testing.assert_close(attn(*given), expected, **CLOSE)
    got = torch.autograd.grad(attn(*given).sin().sum(), table)
    wanted = torch.autograd.grad(expected.sin().sum(), table)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


COMPONENTS = {"function": 0, "arguments": 1, "output": 2, "gradient": 3}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_recipe_s_key_needs_each_component(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, one of the tests above would fail."""
    at, whole = COMPONENTS[component], Recipe.key
    monkeypatch.setattr(
        Recipe, "key", lambda recipe: tuple(x for i, x in enumerate(whole(recipe)) if i != at)
    )
    wrong = []
    for name in RECIPES:
        try:
            test_derived_tensors_are_told_apart(name)
        except (AssertionError, fa4flex.errors.InputError, RuntimeError):
            wrong.append(name)
        build._kept.clear()
    try:
        test_derived_tensors_with_and_without_gradient_are_told_apart()
    except AssertionError:
        wrong.append("gradient")
    assert {"arguments": "argument", "output": "chunk"}.get(component, component) in wrong
