"""Calls whose results and tangents one kernel computes: which these are, what they return, and their
gradients. A stand-in for the kernel computes in float64 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import cumulative
from torch import Tensor
from torch.autograd import forward_ad

import fa4flex
from fa4flex import reference
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.errors import UnsupportedError
from fa4flex.runtime import compute
from fa4flex.runtime.cuda import tangents as launching
from fa4flex.runtime.cuda.launches.ready_tangents import Pushed, Tangents
from fa4flex.runtime.cuda.tangents import run_tangents
from fa4flex.runtime.derived import together
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.launch import call_of
from fa4flex.variants import causal, sliding_window, softcap

SLOPES = torch.rand(4, dtype=torch.float64)
SINKS = torch.randn(4, dtype=torch.float64)


def learned(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.tanh(score * SLOPES[h])


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, causal": {"score_mod": softcap(2.0), "mask": causal},
    "captured": {"score_mod": learned},
    "sinks": {"mask": causal, "sinks": SINKS},
}
Function = Callable[..., Any]


def formula(composition: dict[str, Any]) -> Function:
    return lambda *x: reference.attention(*x, **composition)


def drawn() -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v, and tangents."""
    sizes = (4, 5, 8), (2, 7, 8), (2, 7, 6)
    x, t = ([torch.randn(2, *size, dtype=torch.float64) for size in sizes] for _ in range(2))
    return x, t


def by_gradients(function: Function, x: Any, t: Any) -> list[Tensor]:
    """Results and tangents: J t is the gradient of <J' u, t> by u."""
    with torch.enable_grad():
        inputs = [y.detach().requires_grad_() for y in x]
        results = function(*inputs)
        units = [torch.zeros_like(y).requires_grad_() for y in results]
        pulled = torch.autograd.grad(results, inputs, units, create_graph=True)
        moved = [torch.zeros_like(y) if move is None else move for y, move in zip(inputs, t)]
        pushed = torch.autograd.grad(pulled, units, moved)
    return [y.detach() for y in (*results, *pushed)]


class Kernel:
    """Stand-in for `run_tangents`: calls are kept, and computed by a formula; by nothing where that is
    None."""

    def __init__(self, function: Function | None) -> None:
        self.function = function
        self.moved: list[tuple[str, ...]] = []

    def __call__(self, engine: Any, call: Any, tangents: Tangents) -> Pushed | None:
        self.moved.append(tangents.moved)
        if self.function is None:
            return None
        qkv = call.q, call.kv.k, call.kv.v
        with ThreadPoolExecutor(1) as elsewhere:  # transforms are those of a thread
            return Pushed(*elsewhere.submit(by_gradients, self.function, qkv, tangents).result())


def backward(program: Any, call: Any, gradients: Any, needs: Any) -> list[Tensor]:
    """The CPU's backward pass, of what a kernel saves."""
    upstream, (out, lse) = gradients
    saved = out, lse, lse, (lse > -torch.inf).to(lse.dtype)
    return compute.backward(program, call, (upstream, saved), needs)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """The stand-in, without a formula; calls of CPU tensors look for it."""
    here = SimpleNamespace(on_gpu=lambda q: True, backward=backward)
    one = Kernel(None)
    with patch.object(together, "compute", here), patch.object(together, "run_tangents", one):
        yield one


def attend(composition: dict[str, Any]) -> Function:
    attn = fa4flex.compile(**composition)
    return lambda *x: attn(*x, return_lse=True)


def dual(function: Function, x: Any, t: Any) -> Any:
    with forward_ad.dual_level():
        results = [
            forward_ad.unpack_dual(y)
            for y in function(*[forward_ad.make_dual(y, move) for y, move in zip(x, t)])
        ]
        return [y.primal for y in results], [y.tangent for y in results]


def same(found: Any, true: Any) -> None:
    for mine, exact in zip(found, true, strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("push", [torch.func.jvp, dual], ids=["jvp", "dual"])
def test_results_and_tangents(kind: str, push: Any, kernel: Kernel) -> None:
    kernel.function = formula(KINDS[kind])
    x, t = drawn()
    results, moves = push(attend(KINDS[kind]), tuple(x), tuple(t))
    assert kernel.moved == [("q", "k", "v")]
    same([*results, *moves], by_gradients(formula(KINDS[kind]), x, t))
    assert not any(y.requires_grad for y in (*results, *moves))


def test_tangents_of_some(kernel: Kernel) -> None:
    kernel.function = formula({})
    (q, k, v), t = drawn()
    _, tangents = torch.func.jvp(lambda k: attend({})(q, k, v), (k,), (t[1],))
    assert kernel.moved == [("k",)]
    same(tangents, by_gradients(formula({}), (q, k, v), (None, t[1], None))[2:])


def test_packed_sequences(kernel: Kernel) -> None:
    cu = cumulative([3, 5]), cumulative([4, 6])
    x = [torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((8, 4), (10, 2), (10, 2))]
    t = [torch.randn_like(y) for y in x]

    def by_sequences(*x: Tensor) -> Any:
        parts = [
            reference.attention(*[y[a:b].transpose(0, 1)[None] for y, (a, b) in zip(x, spans)], mask=causal_)
            for spans in (((0, 3), (0, 4), (0, 4)), ((3, 8), (4, 10), (4, 10)))
        ]
        return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([y[0] for _, y in parts], 1)

    causal_ = fa4flex.as_mask(causal)
    kernel.function = by_sequences
    attn, varlen = fa4flex.compile(mask=causal), fa4flex.Varlen(*cu)
    function = lambda *x: attn(*x, varlen=varlen, return_lse=True)  # noqa: E731
    results, tangents = torch.func.jvp(function, tuple(x), tuple(t))
    assert len(kernel.moved) == 1
    same([*results, *tangents], by_gradients(by_sequences, x, t))
    true = gradients(by_sequences, x, t, of_tangents=True)
    same(gradients(function, x, t, of_tangents=True), true)


def gradients(
    function: Function, x: Any, t: Any, of_tangents: bool, again: bool = False, every: bool = True
) -> Any:
    """Gradients of a number of all results, by q, k and v, and by the tangents where it reads these."""
    inputs, moves = ([y.detach().requires_grad_() for y in z] for z in (x, t))
    results, tangents = torch.func.jvp(function, tuple(inputs), tuple(moves))
    read = [*results[: None if every else 1], *(tangents if of_tangents else ())]
    loss = sum((y.sin() * 1.5).sum() for y in read)
    by = [*inputs, *(moves if of_tangents else ())]
    first = torch.autograd.grad(loss, by, create_graph=again)  # type: ignore[arg-type]
    if not again:
        return first
    return torch.autograd.grad(sum(y.square().sum() for y in first), by)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_tangents", [False, True], ids=["results", "tangents"])
def test_gradients(kind: str, of_tangents: bool, kernel: Kernel) -> None:
    kernel.function = formula(KINDS[kind])
    x, t = drawn()
    found = gradients(attend(KINDS[kind]), x, t, of_tangents)
    assert kernel.moved == [("q", "k", "v")]
    same(found, gradients(formula(KINDS[kind]), x, t, of_tangents))


def test_results_that_nothing_reads(kernel: Kernel) -> None:
    kernel.function = formula({})
    x, t = drawn()
    same(gradients(attend({}), x, t, False, every=False), gradients(formula({}), x, t, False, every=False))


@pytest.mark.parametrize("of_tangents", [False, True], ids=["results", "tangents"])
def test_second_derivatives(of_tangents: bool, kernel: Kernel) -> None:
    composition = KINDS["softcap, causal"]
    kernel.function = formula(composition)
    x, t = drawn()
    found = gradients(attend(composition), x, t, of_tangents, again=True)
    same(found, gradients(formula(composition), x, t, of_tangents, again=True))


def test_gradients_of_captured_tensors_and_sinks(kernel: Kernel) -> None:
    slopes, sinks = SLOPES.clone().requires_grad_(), SINKS.clone().requires_grad_()

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score * slopes[h])

    composition = {"score_mod": mod, "sinks": sinks}
    kernel.function = formula({"score_mod": learned, "sinks": SINKS})
    x, t = drawn()

    def of_both(function: Function) -> Any:
        results, tangents = torch.func.jvp(function, tuple(x), tuple(t))
        return torch.autograd.grad(sum(y.sin().sum() for y in (*results, *tangents)), [slopes, sinks])

    same(of_both(attend(composition)), of_both(formula(composition)))
    assert len(kernel.moved) == 1


# --- calls that are no kernel's -----------------------------------------------------------------------------


def test_without_a_kernel(kernel: Kernel) -> None:
    """A call without a kernel is computed block by block, with gradients and without."""
    x, t = drawn()
    results, tangents = torch.func.jvp(attend({}), tuple(x), tuple(t))
    same([*results, *tangents], by_gradients(formula({}), x, t))
    same(gradients(attend({}), x, t, True), gradients(formula({}), x, t, True))
    assert len(kernel.moved) == 2


def nested(x: Any, t: Any) -> Any:
    return torch.func.jvp(lambda *x: torch.func.jvp(attend({}), x, tuple(t))[1], tuple(x), tuple(t))


def mapped(x: Any, t: Any) -> Any:
    function = lambda *x: torch.func.jvp(attend({}), x[:3], x[3:])  # noqa: E731
    return torch.func.vmap(function)(*[y.unsqueeze(0) for y in (*x, *t)])


def within(x: Any, t: Any) -> Any:
    return torch.func.grad(lambda q: torch.func.jvp(attend({}), (q, *x[1:]), tuple(t))[1][0].sum())(x[0])


def of_captured(x: Any, t: Any) -> Any:
    def function(slopes: Tensor, q: Tensor) -> Any:
        return fa4flex.compile(lambda s, b, h, i, j: s * slopes[h])(q, *x[1:])

    return torch.func.jvp(function, (SLOPES, x[0]), (SLOPES, t[0]))


def of_sinks(x: Any, t: Any) -> Any:
    function = lambda sinks, q: fa4flex.compile(sinks=sinks)(q, *x[1:])  # noqa: E731
    return torch.func.jvp(function, (SINKS, x[0]), (SINKS, t[0]))


@pytest.mark.parametrize("call", [nested, mapped, within, of_captured, of_sinks], ids=lambda f: f.__name__)
def test_calls_that_it_is_not_asked_for(call: Any, kernel: Kernel) -> None:
    call(*drawn())
    assert not kernel.moved


def test_on_a_cpu() -> None:
    one = Kernel(None)
    with patch.object(together, "run_tangents", one):
        x, t = drawn()
        torch.func.jvp(attend({}), tuple(x), tuple(t))
    assert not one.moved


# --- launches -----------------------------------------------------------------------------------------------


class Launches:
    """Stand-in for `_make_ready`: a launch that says which it is; none where `refuses`."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.made = 0

    def __call__(self, engine: Any, call: Any, given: Tangents) -> Any:
        self.made += 1
        if self.refuses:
            raise UnsupportedError("a kernel", "none", "nothing")
        number = self.made
        launch = lambda call, tangents: number  # noqa: E731
        return type(
            "Ready", (), {"reach": Reach(), "until": None, "answers": (), "__call__": staticmethod(launch)}
        )()


def asked(launches: Launches, **composition: Any) -> Callable[..., Any]:
    """A function of q, k, v and tangents: what is launched for them."""
    now = fa4flex.compile(**composition)._calling()
    engine = now.prepared.engine

    def run(*x: Tensor | None) -> Any:
        q, k, v, *moves = x
        assert q is not None and k is not None and v is not None
        call = call_of(now, q, Contiguous(k, v), None, ("lse",))
        with patch.object(launching, "_make_ready", launches):
            return run_tangents(engine, call, Tangents(*moves))

    return run


def test_launches_are_found_by_looks() -> None:
    """One serves tangents that look alike, of any lengths; what has none, or TMA cannot read, has another."""
    run = asked(Launches(), mask=sliding_window(17))
    x = [torch.randn(1, 2, 64, 64).bfloat16() for _ in range(6)]
    longer = [torch.randn(2, 2, 96, 64).bfloat16() for _ in range(6)]
    assert [run(*x), run(*x), run(*longer)] == [1, 1, 1]
    assert run(*x[:5], None) == 2 and run(*x[:4], None, None) == 3 and run(*x[:5], None) == 2
    shifted = torch.randn(64 * 64 * 2 + 1).bfloat16()[1:].view(1, 2, 64, 64)
    assert run(*x[:5], shifted) == 4 and run(*x) == 1
    assert run(*[y.half() for y in x]) == 5


def test_calls_without_a_kernel_are_kept() -> None:
    launches = Launches(refuses=True)
    run = asked(launches, mask=sliding_window(18) & causal)
    x = [torch.randn(1, 2, 64, 64).bfloat16() for _ in range(6)]
    assert run(*x) is None and run(*x) is None and launches.made == 1
