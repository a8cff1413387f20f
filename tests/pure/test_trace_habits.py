"""The ways people write mods: each traced expression agrees with the function itself on real tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mods_fixture import BIAS, MASKS, SCORES, TABLE, Sized, Windowed
from torch import Tensor

from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr
from fa4flex.codegen.trace import Captures, Traced, register_op, trace
from fa4flex.codegen.trace.functions import apply_captured
from fa4flex.errors import TraceError

SIZES = {"b": 2, "h": 3, "q": 24, "kv": 20}


def traced_with(fn: Callable[..., Any], kind: Any) -> tuple[Traced, Captures]:
    captures = Captures()
    (traced,) = captures.finish(trace(fn, kind, captures))
    return traced, captures


def samples(count: int = 30) -> list[dict[str, Tensor]]:
    """Random points of the grid as 0-d tensors, always with the corners."""
    points = [{n: torch.randint(0, size, ()) for n, size in SIZES.items()} for _ in range(count)]
    corners = [{n: torch.tensor(0) for n in SIZES}, {n: torch.tensor(size - 1) for n, size in SIZES.items()}]
    return points + corners


def value_of(root: Expr, captures: Captures, symbols: dict[str, Any]) -> Any:
    captured = Captured(tuple(o.value() for o in captures.operands), captures.scalars)
    return evaluate([root], symbols, captured)[0]


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    traced, captures = traced_with(MASKS[name], "mask")
    for point in samples():
        expected = MASKS[name](*point.values())
        assert bool(value_of(traced.root, captures, dict(point))) == bool(expected), point


@pytest.mark.parametrize("name", SCORES)
def test_score(name: str) -> None:
    traced, captures = traced_with(SCORES[name], "score")
    for point in samples():
        score = torch.randn(())
        expected = torch.as_tensor(SCORES[name](score, *point.values())).float()
        got = torch.as_tensor(value_of(traced.root, captures, {**point, "score": score})).float()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_every_operation_named_in_the_table_is_a_torch_name() -> None:
    from fa4flex.codegen.trace.dispatch import OPERATIONS

    places = (torch, torch.Tensor, torch.nn.functional, torch.special, torch.linalg, torch.ops.aten)
    internal = {"getattr", "getitem", "rpow", "rdiv", "rfloordiv", "rmod", "type"}
    assert [n for n in OPERATIONS if n not in internal and not any(hasattr(p, n) for p in places)] == []


# --- numbers ----------------------------------------------------------------------------------------


def window(size: Any, dilation: Any = 2) -> Callable[..., Any]:
    return lambda b, h, q, k: (q - k <= size * 2 + 1) & ((q - k) % dilation == 0)


def test_a_closure_number_is_a_run_time_scalar() -> None:
    first, a = traced_with(window(100), "mask")
    second, b = traced_with(window(7, 3), "mask")
    assert first.root is second.root
    assert (a.scalars, b.scalars) == ((100, 2), (7, 3))
    assert [x.name for x in a.numbers] == ["size", "dilation"]
    assert first.pinned == ()


def test_scalars_come_from_every_place_a_number_can_hide() -> None:
    partial = functools.partial(lambda w, b, h, q, k: q - k < w, 11)
    defaulted = eval("lambda b, h, q, k, w=12: q - k < w")
    from_global = eval("lambda b, h, q, k: q - k < w", {"w": 13})
    in_dict = (lambda config: lambda b, h, q, k: q - k < config["w"])({"w": 14})
    in_tuple = (lambda pair: lambda b, h, q, k: q - k < pair[1])((1, 15))
    roots = set()
    for fn, expected in ((partial, 11), (defaulted, 12), (from_global, 13), (in_dict, 14), (in_tuple, 15)):
        traced, captures = traced_with(fn, "mask")
        assert captures.scalars == (expected,)
        roots.add(traced.root)
    assert len(roots) == 1
    assert traced_with(Windowed(16), "mask")[1].scalars == (16,)
    assert traced_with(Windowed(17).mod, "mask")[1].scalars == (17,)
    assert set(traced_with(Sized(), "mask")[1].scalars) == {3, 5, 8}


def test_two_functions_share_the_scalar_of_a_shared_variable() -> None:
    def make(n: int) -> Callable[..., Any]:
        def block(i: Any) -> Any:
            return i // n

        return lambda b, h, q, k: (block(q) == block(k)) & (q % n > 0)

    assert traced_with(make(8), "mask")[1].scalars == (8,)


def test_looking_at_a_number_pins_it_and_only_it() -> None:
    def make(steps: int, size: int) -> Callable[..., Any]:
        def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            hit = q == k
            for i in range(steps):
                hit = hit | (q - k == i * size)
            return hit

        return mod

    fn = make(3, 5)
    traced, captures = traced_with(fn, "mask")
    assert captures.scalars == (5,)
    (pinned,) = traced.pinned
    assert (pinned.name, pinned.value) == ("steps", 3)
    assert pinned.where is not None and pinned.where.text == "for i in range(steps):"
    assert traced.root is traced_with(make(3, 9), "mask")[0].root
    assert traced.root is not traced_with(make(4, 5), "mask")[0].root


def test_a_comparison_of_numbers_stays_symbolic_until_branched_on() -> None:
    symbolic = (lambda n: lambda b, h, q, k: (q < k) | (n > 3))(4)
    branching = (lambda n: lambda b, h, q, k: q < k if n > 3 else q > k)(4)
    assert traced_with(symbolic, "mask")[1].scalars == (4,)
    assert [p.name for p in traced_with(branching, "mask")[0].pinned] == ["n"]


def test_a_number_passes_isinstance() -> None:
    fn = (lambda n: lambda b, h, q, k: q < n if isinstance(n, int) else n[q])(4)
    assert traced_with(fn, "mask")[1].scalars == (4,)


def test_a_function_that_fails_on_proxies_is_traced_with_constants() -> None:
    class Picky:
        def __init__(self, n: int) -> None:
            self.n = n

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            if (0).__add__(self.n) is NotImplemented:
                raise RuntimeError("want an int")
            return q < self.n

    traced, captures = traced_with(Picky(4), "mask")
    assert captures.scalars == () and [p.value for p in traced.pinned] == [4]
    assert str(traced.root) == "q < 4"


def test_an_infinite_number_is_structure() -> None:
    fill = float("-inf")
    traced, captures = traced_with(lambda s, b, h, q, k: torch.where(q < k, fill, s), "score")
    assert captures.scalars == () and "-inf" in str(traced.root)


# --- tensors ----------------------------------------------------------------------------------------


def test_one_tensor_captured_by_score_and_mask_has_one_slot() -> None:
    table = torch.randn(24)
    captures = Captures()
    score = trace(lambda s, b, h, q, k: s + table[q] + table[k], "score", captures)
    mask = trace(lambda b, h, q, k: table[q] > table[k], "mask", captures)
    captures.finish(score, mask)
    assert [o.base for o in captures.operands] == [table]
    assert captures.operands[0].name == "table"


def test_operands_that_no_root_reads_are_dropped() -> None:
    used, unused = torch.randn(24), torch.randn(24)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        unused[q]
        return s + used[q]

    assert [o.base for o in traced_with(mod, "score")[1].operands] == [used]


def test_a_derived_operand_follows_its_base_and_carries_gradients() -> None:
    table = torch.randn(24, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (table.exp() * 2).flip(0)[q] + (table.exp() * 2).flip(0)[k]

    _, captures = traced_with(mod, "score")
    (operand,) = captures.operands
    assert operand.differentiable
    with torch.no_grad():
        table.zero_()
    assert operand.value().tolist() == [2.0] * 24
    (gradient,) = torch.autograd.grad(operand.value().sum(), table)
    assert gradient.tolist() == [2.0] * 24


def test_tracing_under_no_grad_keeps_gradients() -> None:
    table = torch.randn(24, requires_grad=True)
    with torch.no_grad():
        traced, captures = traced_with(lambda s, b, h, q, k: s + (table * 2)[q], "score")
    assert captures.operands[0].differentiable and "detach" not in str(traced.root)


def test_a_zero_dimensional_tensor_is_read_at_run_time() -> None:
    temperature = torch.tensor(2.0)
    traced, captures = traced_with(lambda s, b, h, q, k: s / temperature, "score")
    assert str(traced.root) == "score / t0[]"
    assert captures.operands[0].base is temperature


def test_context_is_passed_to_those_who_ask() -> None:
    def bottom_right(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any = None) -> Any:
        return q_idx + kv_len - q_len >= kv_idx

    assert str(traced_with(bottom_right, "mask")[0].root) == "kv <= ((q + kv_len) - q_len)"
    bound = functools.partial(bottom_right, kv_len=100)
    assert traced_with(bound, "mask")[1].scalars == (100,)


def test_notebook_code_has_lines() -> None:
    import linecache

    source = "def mod(b, h, q, k):\n    x = q - k\n    return x > 2\n"
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(True), "<cell>")
    scope: dict[str, Any] = {}
    exec(compile(source, "<cell>", "exec"), scope)
    traced, _ = traced_with(scope["mod"], "mask")
    lines = {str(node): line.text for node, line in traced.origins.items()}
    assert lines["q - kv"] == "x = q - k" and lines["2 < (q - kv)"] == "return x > 2"


def test_divmod_of_proxies_and_numbers() -> None:
    def make(n: int) -> Callable[..., Any]:
        def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            quotient, rest = divmod(q, 5)
            return (quotient == k) & (rest == divmod(n, 4)[1])

        return mod

    traced, captures = traced_with(make(7), "mask")
    assert str(traced.root) == "((q // 5) == kv) & ((q % 5) == (s0 % 4))" and captures.scalars == (7,)


def test_printing_inside_a_mod(capsys: pytest.CaptureFixture[str]) -> None:
    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        print(q - k)
        return q > k

    traced_with(mod, "mask")
    assert capsys.readouterr().out == "<traced int q - kv>\n"


# --- custom gradients and operators -------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """Rounds forward, passes the gradient through: new style."""

    @staticmethod
    def forward(x):
        return torch.round(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = 3.0

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor


class Product(torch.autograd.Function):
    """Old style, two inputs, a gradient that is not the product's."""

    @staticmethod
    def forward(ctx, x, y, power):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * 2, grad * x * 5, None


def gradient_of(root: Expr, score: Tensor) -> Tensor:
    """d root / d score by the chain rule over `with_grad`, done with autograd on a stand-in."""
    from fa4flex.codegen.analyze.gradient import score_gradient

    (slope,) = evaluate([score_gradient(root).by_score], {"score": score}, dtype=torch.float64)
    return torch.as_tensor(slope).double().expand_as(score)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda s, b, h, q, k: Straight.apply(s * 2), lambda s: torch.full_like(s, 6.0)),
        (lambda s, b, h, q, k: Product.apply(s, s * s, 1), lambda s: s * s * 2 + s * 5 * 2 * s),
    ],
)
def test_a_custom_backward_is_honoured(fn: Any, expected: Any) -> None:
    traced, _ = traced_with(fn, "score")
    score = torch.randn(7, dtype=torch.float64)
    (value,) = evaluate([traced.root], {"score": score}, dtype=torch.float64)
    torch.testing.assert_close(value, fn(score, 0, 0, 0, 0))
    torch.testing.assert_close(gradient_of(traced.root, score), expected(score))


def doubled(x: Any) -> Any:
    """A forward graph as Dynamo makes it: (outputs, saved), with grad mode off in between."""
    torch._C._set_grad_enabled(False)
    y = x * 2
    torch._C._set_grad_enabled(True)
    return (y,), (x,)


def test_graphs_of_a_function_leave_grad_mode_as_it_was() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return apply_captured(doubled, lambda grad, x: (grad * x * 7,), (s,), False)[0]

    with torch.no_grad():
        traced, _ = traced_with(mod, "score")
        assert not torch.is_grad_enabled()
    score = torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(gradient_of(traced.root, score), 7 * score)


def test_graphs_that_change_inputs_are_refused() -> None:
    with pytest.raises(TraceError, match="changes its input"):
        traced_with(
            lambda s, b, h, q, k: apply_captured(doubled, lambda *grads: grads, (s,), True)[0], "score"
        )


def test_apply_bound_before_tracing_is_intercepted() -> None:
    bound = Straight.apply
    assert "with_grad" in str(traced_with(lambda s, b, h, q, k: bound(s), "score")[0].root)
    assert Straight.apply == bound


@pytest.mark.parametrize(
    ("fn", "same"),
    [
        (lambda s, b, h, q, k: s + torch.norm(TABLE[q]), lambda s, b, h, q, k: s + TABLE[q].norm()),
        (
            lambda s, b, h, q, k: s + TABLE.index_select(0, k.view(1))[0, 1],
            lambda s, b, h, q, k: s + TABLE[k, 1],
        ),
        (
            lambda s, b, h, q, k: s + torch.index_select(TABLE, 1, k)[2, 0],
            lambda s, b, h, q, k: s + TABLE[2, k],
        ),
    ],
)
def test_other_spellings(fn: Any, same: Any) -> None:
    assert traced_with(fn, "score")[0].root is traced_with(same, "score")[0].root


def test_register_op() -> None:
    def cube(x: Any) -> Any:
        raise AssertionError("only its lowering is traced")

    register_op(cube, lambda x: x * x * x + TABLE[0, 0])
    traced, captures = traced_with(lambda s, b, h, q, k: cube(s), "score")
    assert str(traced.root) == "((score * score) * score) + t0[]"
    assert captures.operands[0].value() == TABLE[0, 0]
    register_op("made_up::double", lambda x: x * 2)
    with torch.library._scoped_library("made_up", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        doubled = traced_with(lambda s, b, h, q, k: torch.ops.made_up.double(s), "score")[0]
        default = traced_with(lambda s, b, h, q, k: torch.ops.made_up.double.default(s), "score")[0]
    assert str(doubled.root) == str(default.root) == "score * 2.0"


def test_nothing_is_left_patched() -> None:
    before = vars(torch.autograd.Function)["apply"]
    traced_with(lambda s, b, h, q, k: Straight.apply(s), "score")
    assert vars(torch.autograd.Function)["apply"] is before
    assert "classmethod" in type(before).__name__ and "fa4flex" not in str(Straight.apply)
    assert BIAS[0, 0, 0].sum().item() == BIAS[0, 0, 0].sum().item()
