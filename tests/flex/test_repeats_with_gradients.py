"""Repeated calls that need gradients: AOTAutograd's function is entered past Dynamo, and each change of what
that relies on is noticed. A CPU has no compiled kernels with gradients; all around them runs here."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from repeated import LAID_OUT, Counts, Held, Looks, S, composed, engines_of_a_test, graph_of, kept, served
from test_repeats import Dispatched, Seen
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fa4flex
from fa4flex import torch_internals
from fa4flex.runtime.flex import engine as engines
from fa4flex.runtime.flex.compiled import Graph, Run


@pytest.fixture(autouse=True)
def compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo and AOTAutograd as they are; graphs run as they were captured."""
    engines_of_a_test(monkeypatch)
    backend = aot_autograd(fw_compiler=as_captured, bw_compiler=as_captured)
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda *given, **__: backend(*given))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *given: None)
    monkeypatch.setattr(engines, "_attend", lambda made, compiled, on_cpu: made.compiled())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_captured(module: Any, examples: Any) -> Any:
    return make_boxed_func(module.forward)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def leaves(length: int = S) -> list[Tensor]:
    return [torch.randn(1, n, length, 16, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1)]


def learned() -> Held:
    held = Held()
    held.bias.requires_grad_()
    return held


def right(attn: fa4flex.Attention, given: Sequence[Tensor], held: Held) -> Tensor:
    """out, compared with our executor's, and all gradients."""
    plain = composed(held, "auto", layout=attn.variant.layout)
    wanting = [x for x in (*given, held.bias) if x.requires_grad]
    out, wanted = attn(*given), plain(*given)
    assert out.requires_grad is wanted.requires_grad is (torch.is_grad_enabled() and bool(wanting))
    torch.testing.assert_close(out, wanted)
    if out.requires_grad:
        upstream = torch.randn_like(out)
        found, expected = (torch.autograd.grad(x, wanting, upstream) for x in (out, wanted))
        torch.testing.assert_close(found, expected)
    return out


def repeated(held: Held, **options: Any) -> tuple[fa4flex.Attention, list[Tensor]]:
    attn, given = composed(held, **options), leaves()
    if options.get("layout") == "bshd":
        given = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in given]
    for _ in range(3):
        right(attn, given, held)
    (one,) = kept(attn)
    assert graph_of(one) is not None
    return attn, given


# --- what is served -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_a_repeated_call_goes_past_dynamo(layout: str, counts: Counts) -> None:
    held = learned()
    attn, given = repeated(held, layout=layout)
    before = counts.now
    right(attn, given, held)
    right(attn, [torch.randn_like(x, requires_grad=True) for x in given], held)
    right(attn, [x * 2 for x in given], held)
    assert counts.now == before


def bias_in_place(held: Held) -> None:
    with torch.no_grad():
        held.bias.normal_()


def another_bias(held: Held) -> None:
    held.bias = torch.randn(2, S, requires_grad=True)


def another_cap(held: Held) -> None:
    held.cap = 0.25


def ids_in_place(held: Held) -> None:
    held.ids[70:] += 1


def other_ids(held: Held) -> None:
    held.ids = torch.arange(S) // 30


@pytest.mark.parametrize(
    "change", (bias_in_place, another_bias, another_cap, ids_in_place, other_ids), ids=lambda x: x.__name__
)
def test_what_was_captured_is_read_again(change: Callable[[Held], None], counts: Counts) -> None:
    held = learned()
    attn, given = repeated(held)
    old, entered = attn(*given), counts.entered
    change(held)
    assert not torch.equal(right(attn, given, held), old)
    assert counts.entered == entered


@torch._functorch.config.patch(donated_buffer=False)  # with it torch refuses to run a pass twice
def test_backward_passes_belong_to_their_calls(counts: Counts) -> None:
    """Several calls before any backward pass; a pass that is run twice; gradients of some inputs alone."""
    held = learned()
    attn, given = repeated(held)
    plain, entered = composed(held, "auto"), counts.entered
    others = [torch.randn_like(x, requires_grad=True) for x in given]
    calls = [(attn(*x), plain(*x), x) for x in (given, others)]
    for _ in range(2):
        for ours, theirs, inputs in calls:
            found, wanted = (
                torch.autograd.grad(x.sum(), inputs[1], retain_graph=True) for x in (ours, theirs)
            )
            torch.testing.assert_close(found, wanted)
    assert counts.entered == entered
    (attn(*given).sum() + attn(*given).square().sum()).backward()
    found = [x.grad for x in (*given, held.bias)]
    for x in (*given, held.bias):
        x.grad = None
    (plain(*given).sum() + plain(*given).square().sum()).backward()
    torch.testing.assert_close(found, [x.grad for x in (*given, held.bias)])


def test_tensors_saved_and_then_changed_are_noticed() -> None:
    held = learned()
    attn, given = repeated(held)
    inputs = [x * 1 for x in given]
    out = attn(*inputs)
    inputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpoints_run_the_call_again(counts: Counts) -> None:
    """Hooks that are functions are called when a tensor is saved: nothing is compiled for them."""
    held = learned()
    attn, given = repeated(held)
    wanted, entered = torch.autograd.grad(attn(*given).sum(), given), counts.entered
    out = checkpoint(attn, *given, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given), wanted)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x.clone(), lambda x: x):
        out = attn(*given)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given), wanted)
    assert len(saved) >= 3 and counts.entered == entered


def test_compiled_autograd_takes_the_backward_pass(counts: Counts) -> None:
    held = learned()
    attn, given = repeated(held)
    wanted, entered = torch.autograd.grad(attn(*given).sum(), given), counts.entered
    out = attn(*given)
    assert counts.entered == entered
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.sum().backward()
    torch.testing.assert_close(tuple([x.grad for x in given]), wanted)


# --- what is not --------------------------------------------------------------------------------------------


def detached(x: list[Tensor], which: int) -> list[Tensor]:
    return [y.detach() if i == which else y for i, y in enumerate(x)]


LOOKS: dict[str, Looks] = {
    **LAID_OUT,
    "dtype": lambda x: [y.float() for y in x],
    "a parameter": lambda x: [torch.nn.Parameter(x[0].detach()), *x[1:]],
    **{f"no gradient of {name}": partial(detached, which=i) for i, name in enumerate("qkv")},
    "no gradient of any": lambda x: [y.detach() for y in x],
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_other_looks_are_not_served(name: str, counts: Counts) -> None:
    held = learned()
    attn, given = repeated(held)
    entered = counts.entered
    right(attn, LOOKS[name](given), held)
    assert counts.entered > entered
    now = counts.entered
    right(attn, given, held)
    assert counts.entered == now


@pytest.mark.parametrize(
    "bias",
    (
        lambda: torch.randn(2, S),
        lambda: torch.randn(2, S, dtype=torch.float64, requires_grad=True),
        lambda: torch.empty_strided((2, S), (1, 2)).normal_().requires_grad_(),
        lambda: torch.randn(2, S + 1, requires_grad=True),
    ),
    ids=("no gradient", "dtype", "strides", "shape"),
)
def test_captured_tensors_of_other_looks_are_not_served(bias: Callable[[], Tensor], counts: Counts) -> None:
    held = learned()
    attn, given = repeated(held)
    entered, held.bias = counts.entered, bias()
    right(attn, given, held)
    assert counts.entered > entered


def test_grad_mode_is_compared(counts: Counts) -> None:
    held = learned()
    attn, given = repeated(held)
    entered = counts.entered
    with torch.no_grad():
        right(attn, given, held)
    assert counts.entered > entered
    with torch.inference_mode():
        assert attn(*given).is_inference()
    right(attn, given, held)


class Changed:
    """Ways to change torch's state, each within a block, that Dynamo compares or obeys."""

    @staticmethod
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    @staticmethod
    def warnings_of_determinism() -> Iterator[None]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)

    @staticmethod
    def precision_of_products() -> Iterator[None]:
        # torch 2.15 tells a precision that was set from one that never was, as allow_tf32 = False leaves it.
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32" if before != "tf32" else "ieee"
        yield
        torch.backends.cuda.matmul.fp32_precision = before

    @staticmethod
    def autocast() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16):
            yield

    @staticmethod
    def autocast_elsewhere() -> Iterator[None]:
        torch.set_autocast_enabled("xpu", True)
        yield
        torch.set_autocast_enabled("xpu", False)

    @staticmethod
    def a_function_mode() -> Iterator[None]:
        with Seen():
            yield

    @staticmethod
    def a_dispatch_mode() -> Iterator[None]:
        with Dispatched():
            yield

    @staticmethod
    def hooks_that_are_graphs() -> Iterator[None]:
        pack, unpack = (torch.fx.symbolic_trace(f) for f in (lambda x: x + 0, lambda x: x * 1))
        with saved_tensors_hooks(pack, unpack):
            yield

    @staticmethod
    def a_stance() -> Iterator[None]:
        with torch.compiler.set_stance("force_eager"):
            yield


CHANGES = [x for x in vars(Changed) if not x.startswith("_")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_torch_s_state_is_compared(name: str, counts: Counts) -> None:
    """A call does not go past Dynamo in another state of torch's, and does again when that is as before."""
    held = learned()
    attn, given = repeated(held)
    (one,) = kept(attn)
    entered, change = counts.entered, getattr(Changed, name)()
    next(change)
    out = attn(*given)
    next(change, None)
    assert counts.entered > entered and kept(attn)[-1] is one
    torch.autograd.grad(out.sum(), given)
    now = counts.entered
    right(attn, given, held)
    assert counts.entered == now


def test_transforms_and_tangents_are_no_repetition(counts: Counts) -> None:
    held = learned()
    attn, given = repeated(held)
    entered = counts.entered
    seen: list[bool] = []

    def loss(q: Tensor) -> Tensor:
        seen.append(served(attn, [q, *given[1:]]))
        return q.sum()

    torch.func.grad(loss)(given[0])
    torch.func.vmap(loss)(given[0][None])
    with torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(given[0], torch.randn_like(given[0])))
        assert not served(attn, given)
    assert seen[:2] == [False, False] and counts.entered == entered


def test_hooks_that_torch_does_not_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo is asked at each call, where this torch lacks what tells of hooks."""
    attn, given = repeated(learned())
    (one,) = kept(attn)
    graph = graph_of(one)
    assert graph is not None and graph.holds()
    monkeypatch.setattr(torch_internals, "_saved_tensor_hooks", None)
    assert not graph.holds()
    run = Run(lambda *given: [given[0] * 2], (given[0],), [given[1]])
    assert Graph.of(run, (given[0],), (given[1], None, None)) is None


# --- what is kept -------------------------------------------------------------------------------------------


def test_no_tensor_and_no_graph_of_autograd_is_kept_alive() -> None:
    held = learned()
    attn, given = repeated(held)
    out = attn(*given)
    assert out.grad_fn is not None
    gone = [weakref.ref(x) for x in (*given, held.bias, held.ids, out)]
    del out
    given.clear()
    held.bias = held.ids = None  # type: ignore[assignment]
    gc.collect()
    assert all(x() is None for x in gone)
