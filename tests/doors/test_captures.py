"""Captured values are read anew at each call, however they were replaced; kept traces notice changes."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4flex
from fa4flex.codegen import build
from fa4flex.variants import alibi, causal, sliding_window, softcap

H, S = 2, 12
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, H, S, 8, requires_grad=True) for _ in range(3))
    return q, k, v


def formula(qkv: tuple[Tensor, ...], bias: Any = 0.0, allowed: Any = True) -> Tensor:
    """The dense formula: `bias` added to the scores, [H, 1, 1] or broadcastable."""
    q, k, v = qkv
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    scores = scores.masked_fill(~torch.as_tensor(allowed), -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


def distance() -> Tensor:
    i = torch.arange(S)
    return i[:, None] - i


# --- where captures live ------------------------------------------------------------------------------------

GLOBAL: Any = None
CONFIG = SimpleNamespace(slope=None)
SETTINGS = types.ModuleType("settings")
SETTINGS.__file__ = "/a/users/settings.py"


class Owner(nn.Module):
    class_level: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H))
        self.inner = nn.Linear(H, H, bias=False)
        self.plain: Any = None
        self.table: dict[str, Any] = {"slope": None}

    def by_parameter(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.bias[h] * (q - k)

    def by_attribute(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.plain * (q - k)

    def by_dictionary(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.table["slope"] * (q - k)

    def by_class(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.class_level * (q - k)

    def by_method(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.slope() * (q - k)

    def slope(self) -> Any:
        return GLOBAL


def read_global(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + GLOBAL * (q - k)


def read_namespace(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + CONFIG.slope * (q - k)


def read_module(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + SETTINGS.slope * (q - k)


def with_argument(s: Any, b: Any, h: Any, q: Any, k: Any, slope: Any) -> Any:
    return s + slope * (q - k)


Place = tuple[Callable[..., Any], Callable[[Any], None]]


def in_global(value: Any) -> None:
    globals()["GLOBAL"] = value


def places(start: Any) -> dict[str, Place]:
    """Mods that read a slope, by name, each with the function that puts another one into its place."""
    owner, cell, items = Owner(), start, [start]
    in_global(start)
    owner.plain = owner.table["slope"] = Owner.class_level = CONFIG.slope = SETTINGS.slope = start

    def by_cell(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + cell * (q - k)

    def by_list(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + items[0] * (q - k)

    def by_default(s: Any, b: Any, h: Any, q: Any, k: Any, slope: Any = start) -> Any:
        return s + slope * (q - k)

    def new_cell(value: Any) -> None:
        nonlocal cell
        cell = value

    bound = functools.partial(with_argument, slope=start)
    return {
        "closure": (by_cell, new_cell),
        "list": (by_list, lambda value: items.__setitem__(0, value)),
        "default": (by_default, lambda value: setattr(by_default, "__defaults__", (value,))),
        "partial": (bound, lambda value: bound.keywords.update(slope=value)),
        "global": (read_global, in_global),
        "namespace": (read_namespace, lambda value: setattr(CONFIG, "slope", value)),
        "python module": (read_module, lambda value: setattr(SETTINGS, "slope", value)),
        "attribute": (owner.by_attribute, lambda value: setattr(owner, "plain", value)),
        "dictionary": (owner.by_dictionary, lambda value: owner.table.update(slope=value)),
        "class": (owner.by_class, lambda value: setattr(Owner, "class_level", value)),
        "global of a method": (owner.by_method, in_global),
    }


VALUES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.tensor(0.25 * i, requires_grad=True),
    "float": lambda i: 0.25 * i,
    "int": lambda i: i,
    "numpy": lambda i: numpy.float64(0.25 * i),
    "bool": lambda i: bool(i % 2),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("place", places(1.0))
def test_a_replaced_value_is_read_anew(place: str, kind: str) -> None:
    given, value = qkv(), VALUES[kind]
    mod, put = places(value(1))[place]
    attn = fa4flex.compile(mod)
    for i in (1, 2, 3, 2):
        now = value(i)
        put(now)
        out = attn(*given)
        torch.testing.assert_close(
            out, formula(given, float(now.detach() if isinstance(now, Tensor) else now) * distance()), **CLOSE
        )
        if kind == "tensor":
            (got,) = torch.autograd.grad(out.sin().sum(), now)
            (expected,) = torch.autograd.grad(formula(given, now * distance()).sin().sum(), now)
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("place", places(1.0))
def test_another_type_is_traced_anew(place: str) -> None:
    given = qkv()
    mod, put = places(0.5)[place]
    attn = fa4flex.compile(mod)
    for value in (0.5, torch.tensor(0.75), 2, True, torch.tensor(3), torch.tensor(0.5, dtype=torch.float64)):
        put(value)
        torch.testing.assert_close(attn(*given), formula(given, float(value) * distance()), **CLOSE)


def test_fresh_closures_share_a_trace_and_read_their_own() -> None:
    given = qkv()

    def make(bias: Tensor, window: int) -> fa4flex.Attention:
        return fa4flex.compile(lambda s, b, h, q, k: s + bias[h], lambda b, h, q, k: q - k < window)

    calls = [(torch.randn(H), i) for i in range(1, 6)]
    made = [make(*call) for call in calls]
    assert len({attn.trace for attn in made}) == 1
    for attn, (bias, window) in zip(made, calls, strict=True):
        expected = formula(given, bias[:, None, None], distance() < window)
        torch.testing.assert_close(attn(*given), expected, **CLOSE)


def test_a_number_that_the_code_looked_at_is_guarded() -> None:
    given = qkv()
    state = SimpleNamespace(wide=2)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < 3 if state.wide > 2 else q >= k

    attn = fa4flex.compile(mask=mask)
    for wide, allowed in ((2, distance() >= 0), (3, distance() < 3), (1, distance() >= 0)):
        state.wide = wide
        torch.testing.assert_close(attn(*given), formula(given, 0.0, allowed), **CLOSE)


def test_two_captures_that_were_one_tensor_may_part() -> None:
    given, same = qkv(), torch.randn(H)

    def make(a: Tensor, c: Tensor) -> fa4flex.Attention:
        return fa4flex.compile(
            lambda s, b, h, q, k: s + a[h] * (q - k) + c[h], lambda b, h, q, k: (c[h] > 5) | (q >= k)
        )

    for a, c in ((same, same), (torch.randn(H), torch.tensor([9.0, -1.0])), (same, same)):
        allowed = (c[:, None, None] > 5) | (distance() >= 0)
        expected = formula(given, a[:, None, None] * distance() + c[:, None, None], allowed)
        torch.testing.assert_close(make(a, c)(*given), expected, **CLOSE)


def test_a_function_inside_that_changes_is_traced_anew() -> None:
    given = qkv()

    def make(inner: Callable[[Any], Any]) -> fa4flex.Attention:
        return fa4flex.compile(lambda s, b, h, q, k: s + inner(q - k))

    for inner in (lambda d: d * 0.5, lambda d: d * 0.25, abs):
        torch.testing.assert_close(make(inner)(*given), formula(given, inner(distance())), **CLOSE)


def test_what_cannot_be_watched_is_traced_at_each_call() -> None:
    given = qkv()
    counter = iter(range(1, 100))
    steps = []

    class Drawn:
        def __getattr__(self, name: str) -> Tensor:
            steps.append(next(counter))
            return torch.tensor(0.1 * steps[-1])

    drawn = Drawn()
    attn = fa4flex.compile(lambda s, b, h, q, k: s + drawn.slope * (q - k))
    for _ in range(3):
        out = attn(*given)
        torch.testing.assert_close(out, formula(given, 0.1 * steps[-1] * distance()), **CLOSE)
    assert attn.trace.reader is None


def test_derived_tensors_told_apart_by_long_numpy_indices() -> None:
    given, table = qkv(), torch.randn(2000, S)
    first = numpy.arange(2000)
    second = first.copy()
    second[1000] = 3  # numpy's repr shows the ends only
    rows = 1000

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[first][rows, k] - table[second][rows, k]

    expected = formula(given, table[1000] - table[3])
    torch.testing.assert_close(fa4flex.compile(mod)(*given), expected, **CLOSE)


def test_an_array_that_changes_is_noticed() -> None:
    given, table, index = qkv(), torch.randn(S, S), numpy.arange(S)
    attn = fa4flex.compile(lambda s, b, h, q, k: s + table[index][q, k])
    torch.testing.assert_close(attn(*given), formula(given, table), **CLOSE)
    index[:] = index[::-1].copy()
    torch.testing.assert_close(attn(*given), formula(given, table.flip(0)), **CLOSE)


# --- modules ------------------------------------------------------------------------------------------------


def trained(module: Owner, given: tuple[Tensor, ...], attn: fa4flex.Attention) -> None:
    """The module's parameter as it is now is what is read, and what receives a gradient."""
    bias = module.bias
    expected = formula(given, bias[:, None, None] * distance())
    torch.testing.assert_close(attn(*given), expected, **CLOSE)
    got = torch.autograd.grad(attn(*given).sin().sum(), bias)
    torch.testing.assert_close(got, torch.autograd.grad(expected.sin().sum(), bias), atol=1e-3, rtol=1e-3)


def test_replaced_parameters_are_read_and_trained() -> None:
    given, module = qkv(), Owner()
    attn = fa4flex.compile(module.by_parameter)
    trained(module, given, attn)
    module.load_state_dict(
        {name: torch.randn_like(x) for name, x in module.state_dict().items()}, assign=True
    )
    module.requires_grad_()
    trained(module, given, attn)
    module.bias = nn.Parameter(torch.randn(H))
    trained(module, given, attn)
    module.to_empty(device="cpu")
    with torch.no_grad():
        module.bias.normal_()
    trained(module, given, attn)


def test_a_parametrized_parameter() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    given, module = qkv(), Owner()
    attn = fa4flex.compile(lambda s, b, h, q, k: s + module.bias[h] * (q - k))
    trained(module, given, attn)
    nn.utils.parametrize.register_parametrization(module, "bias", Double())
    original = module.parametrizations.bias.original
    for _ in range(2):
        expected = formula(given, 2 * original[:, None, None] * distance())
        torch.testing.assert_close(attn(*given), expected, **CLOSE)
        got = torch.autograd.grad(attn(*given).sin().sum(), original)
        wanted = torch.autograd.grad(expected.sin().sum(), original)
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
        with torch.no_grad():
            original.normal_()


def test_functional_call() -> None:
    class Layer(Owner):
        def __init__(self) -> None:
            super().__init__()
            self.attention = fa4flex.compile(self.by_parameter)

        def forward(self, *given: Tensor) -> Tensor:
            out: Tensor = self.attention(*given)
            return out

    given, layer = qkv(), Layer()
    for _ in range(2):
        bias = torch.randn(H, requires_grad=True)
        out = torch.func.functional_call(layer, {"bias": bias}, given)
        torch.testing.assert_close(out, formula(given, bias[:, None, None] * distance()), **CLOSE)
        assert torch.autograd.grad(out.sin().sum(), bias)[0].abs().sum() > 0
    trained(layer, given, layer.attention)


def test_a_module_of_another_size_or_dtype_is_traced_anew() -> None:
    given, module = qkv(), Owner()
    attn = fa4flex.compile(lambda s, b, h, q, k: s + (module.bias * 2)[h])
    module.bias = nn.Parameter(torch.randn(5).double())
    torch.testing.assert_close(attn(*given), formula(given, 2 * module.bias[:H, None, None].float()), **CLOSE)


# --- what a trace depends on ------------------------------------------------------------------------------


def traces(attns: list[fa4flex.Attention]) -> int:
    return len({attn.trace for attn in attns})


def test_lengths_of_captured_tensors_need_no_new_trace() -> None:
    def make(length: int) -> fa4flex.Attention:
        ids = torch.zeros(length, dtype=torch.int32)
        return fa4flex.compile(mask=lambda b, h, q, k: ids[q] == ids[k])

    assert traces([make(n) for n in (3, 17, 64)]) == 1


def test_an_extent_that_the_mod_depends_on_needs_one() -> None:
    given = qkv()
    for rank in (1, 3, 5):
        rows, columns = torch.randn(S, rank), torch.randn(S, rank)
        attn = fa4flex.compile(lambda s, b, h, q, k, r=rows, c=columns: s + (r[q] * c[k]).sum())
        torch.testing.assert_close(attn(*given), formula(given, rows @ columns.T), **CLOSE)
    for length in (S, S + 4):
        table = torch.randn(length)
        attn = fa4flex.compile(lambda s, b, h, q, k, t=table: s + t[-1] * t.shape[0])
        torch.testing.assert_close(attn(*given), formula(given, table[-1] * length), **CLOSE)


def test_named_variants_share_traces() -> None:
    assert (
        traces([fa4flex.compile(softcap(c), causal & sliding_window(w)) for c, w in ((9.0, 2), (3.0, 7))])
        == 1
    )
    assert traces([fa4flex.compile(alibi(torch.rand(n))) for n in (2, 4)]) == 1


def test_kept_traces_are_bounded_and_hold_no_tensors() -> None:
    import gc
    import weakref

    def trace_one() -> weakref.ref[Tensor]:
        bias = torch.randn(H)
        fa4flex.compile(lambda s, b, h, q, k: s + (bias * 2)[h] + bias[h])
        return weakref.ref(bias)

    gone = trace_one()
    gc.collect()
    assert gone() is None
    for i in range(build.MOST_TRACES + 5):
        fa4flex.compile(lambda s, b, h, q, k, n=i: s + len([0] * n))  # a number that the code looks at
    assert max(map(len, build._kept.values())) <= build.MOST_TRACES
    assert len(build._kept) <= build.MOST_CODES


def test_registering_an_operation_is_noticed() -> None:
    given = qkv()

    def own(x: Any) -> Any:
        return x * 2

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return own(s)

    double = fa4flex.compile(mod)
    twice = 2 * given[0], given[1], given[2]
    torch.testing.assert_close(double(*given), formula(twice), **CLOSE)
    fa4flex.register_op(own, lambda x: x * 3)
    thrice = 3 * given[0], given[1], given[2]
    for attn in (fa4flex.compile(mod), double):
        torch.testing.assert_close(attn(*given), formula(thrice), **CLOSE)


def test_ints_stay_ints() -> None:
    given = qkv()
    limit = sys.maxsize
    torch.testing.assert_close(
        fa4flex.compile(mask=lambda b, h, q, k: q - k <= limit)(*given), formula(given), **CLOSE
    )
    odd = 2**53 + 1
    attn = fa4flex.compile(mask=lambda b, h, q, k: (odd != 2**53) & (q >= k))
    torch.testing.assert_close(attn(*given), formula(given, 0.0, distance() >= 0), **CLOSE)
    bits = (1 << 60) | 0b1011
    attn = fa4flex.compile(mask=lambda b, h, q, k: ((bits >> k) & 1) == 1)
    allowed = torch.tensor([bool(bits >> i & 1) for i in range(S)])
    torch.testing.assert_close(attn(*given), formula(given, 0.0, allowed.expand(S, S)), **CLOSE)


# --- tensors that a mod makes of nothing captured ----------------------------------------------------------


def stepped(rates: Tensor) -> tuple[Callable[..., Any], Tensor]:
    """A mod that makes tensors, and what it adds to scores."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.tensor([0.5, 0.25])[h] * (q - k) + (rates * torch.arange(H))[h] * k

    slopes, scaled = torch.tensor([0.5, 0.25]), rates * torch.arange(H)
    return mod, slopes[:, None, None] * distance() + scaled[:, None, None] * torch.arange(S)


def check_gradient(out: Tensor, expected: Tensor, x: Tensor) -> None:
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_tensors_made_inside(mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a first call in inference mode serve later calls with gradients, too."""
    monkeypatch.setattr(build, "_kept", type(build._kept)())
    given, rates = qkv(), torch.rand(H, requires_grad=True)
    mod, bias = stepped(rates)
    expected = formula(given, bias)
    with mode():
        attn = fa4flex.compile(mod)
        torch.testing.assert_close(attn(*given), expected, **CLOSE)
    out = attn(*given)
    torch.testing.assert_close(out, expected, **CLOSE)
    check_gradient(out, expected, rates)


@pytest.mark.parametrize("within", ("fake tensors", "a transform"))
def test_tensors_made_inside_where_operators_are_intercepted(
    within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They serve no later call."""
    monkeypatch.setattr(build, "_kept", type(build._kept)())
    given, rates = qkv(), torch.rand(H)
    mod, bias = stepped(rates)
    if within == "fake tensors":
        with FakeTensorMode(allow_non_fake_inputs=True):
            fa4flex.compile(mod)
    else:
        torch.func.grad(lambda x: (fa4flex.compile(mod), x)[1])(torch.ones(()))
    torch.testing.assert_close(fa4flex.compile(mod)(*given), formula(given, bias), **CLOSE)
    assert not any(
        map(torch._C._functorch.is_functorch_wrapped_tensor, fa4flex.compile(mod)._calling().bound.bases)
    )


def test_tensors_made_inside_a_compiled_mod() -> None:
    given, rates = qkv(), torch.rand(H, requires_grad=True)
    mod, bias = stepped(rates)
    out = torch.compile(fa4flex.compile(mod), backend="aot_eager", fullgraph=True)(*given)
    expected = formula(given, bias)
    torch.testing.assert_close(out, expected, **CLOSE)
    check_gradient(out, expected, rates)


@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_that_a_mod_makes(compiled: bool) -> None:
    """Tables without any captured tensor, and beside one; of another extent where a number is another."""
    slopes, state = torch.randn(H, requires_grad=True), SimpleNamespace(extent=S)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        ramp = torch.arange(state.extent)
        return s + ramp[q] * torch.tensor([0.5, -1.0])[h] + (slopes[:, None] * ramp)[h, k]

    def attend(*given: Tensor) -> Tensor:
        return fa4flex.attention(*given, score_mod=mod)

    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    for state.extent in (S, S + 3, S):
        given, i = qkv(), torch.arange(S)
        out = call(*given)
        bias = i[:, None] * torch.tensor([0.5, -1.0])[:, None, None] + slopes[:, None, None] * i
        torch.testing.assert_close(out, formula(given, bias), **CLOSE)
        (got,), (want,) = (torch.autograd.grad(x.sin().sum(), slopes) for x in (out, formula(given, bias)))
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
