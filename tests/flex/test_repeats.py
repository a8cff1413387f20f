"""Repeated calls through torch's flex_attention: what is kept, and each change that it must notice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from repeated import (
    LAID_OUT,
    Counts,
    Held,
    Looks,
    S,
    engines_of_a_test,
    graph_of,
    kept,
    qkv,
    repeated,
    right,
    served,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
from fa4flex import variants as v
from fa4flex.runtime.cuda.known import MOST_KNOWN, MOST_OF_ONE
from fa4flex.runtime.flex import engine as engines
from fa4flex.runtime.flex.compiled import Graph, Run


@pytest.fixture(autouse=True)
def kept_by_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as Dynamo captured them."""
    engines_of_a_test(monkeypatch)
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda module, *_, **__: module.forward)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


# --- what is served -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_a_repeated_call_goes_past_dynamo(layout: str, counts: Counts) -> None:
    held = Held()
    attn, given = repeated(held, layout=layout)
    before = counts.now
    right(attn, given, held)
    right(attn, [torch.randn_like(x) for x in given], held)
    assert counts.now == before


def test_narrow_heads_are_padded_here_too(counts: Counts) -> None:
    attn = fa4flex.compile(mask=v.causal, backend="flex")
    given = [x[..., :6].contiguous() for x in qkv()]
    for _ in range(4):
        torch.testing.assert_close(attn(*given), fa4flex.compile(mask=v.causal)(*given))
    assert counts.entered == 2


def bias_in_place(held: Held) -> None:
    held.bias.normal_()


def another_bias(held: Held) -> None:
    held.bias = torch.randn(2, S)


def ids_in_place(held: Held) -> None:
    held.ids[70:] += 1


def other_ids(held: Held) -> None:
    held.ids = torch.arange(S) // 30


def ids_elsewhere(held: Held) -> None:
    held.ids.data = torch.arange(S) // 30


def another_cap(held: Held) -> None:
    held.cap = 0.25


SERVED: dict[Callable[[Held], None], tuple[int, int]] = {
    bias_in_place: (0, 0), another_bias: (0, 0), another_cap: (0, 0),
    ids_in_place: (0, 1), other_ids: (0, 1), ids_elsewhere: (0, 1),
}  # fmt: skip
"""Changes of what was captured, and how often each enters Dynamo and makes a block mask."""


@pytest.mark.parametrize("change", SERVED, ids=lambda x: x.__name__)
def test_what_was_captured_is_read_again(change: Callable[[Held], None], counts: Counts) -> None:
    held = Held()
    attn, given = repeated(held)
    old, (entered, masks) = attn(*given), counts.now
    change(held)
    right(attn, given, held)
    assert not torch.equal(attn(*given), old)
    assert (counts.entered - entered, counts.masks - masks) == SERVED[change]


def test_a_number_of_the_mask_makes_another_block_mask(counts: Counts) -> None:
    held = Held()
    attn, given = repeated(held)
    old, masks = attn(*given), counts.masks
    held.window = 3
    right(attn, given, held)
    assert counts.masks == masks + 1 and not torch.equal(attn(*given), old)


def test_numbers_that_are_equal_once_are_told_apart_later(counts: Counts) -> None:
    """Also those that equal a length: torch makes one input of what is one tensor."""
    held = Held()
    first, second, window = 2.0, 2.0, S
    score = lambda s, b, h, q_idx, kv_idx: s * first + second * h  # noqa: E731
    mask = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < window) & (q_idx * first >= kv_idx)  # noqa: E731
    attn, plain = (fa4flex.compile(score, mask, backend=x) for x in ("flex", "auto"))  # type: ignore[arg-type]
    given = qkv()
    for change in (None, "first", "second", "window"):
        first = 1.0 if change == "first" else first
        second = 5.0 if change == "second" else second
        window = 9 if change == "window" else window
        for _ in range(3):
            torch.testing.assert_close(attn(*given), plain(*given))
    assert all(graph_of(one) is not None for one in kept(attn)) and held is not None


def test_a_number_that_proofs_read_is_compared() -> None:
    """An index that stayed within its tensor may pass its end now, where the mask hides the pair."""
    shift, bias = 0, torch.randn(2, S)
    score = lambda s, b, h, q_idx, kv_idx: s + bias[h, kv_idx + shift]  # noqa: E731
    mask = lambda b, h, q_idx, kv_idx: kv_idx + shift < S  # noqa: E731
    attn, plain = (fa4flex.compile(score, mask, backend=x) for x in ("flex", "auto"))  # type: ignore[arg-type]
    given = qkv()
    for shift in (0, 0, 0, 5, 0):  # noqa: B007
        torch.testing.assert_close(attn(*given), plain(*given))


def test_a_module_s_parameter_is_read_again(counts: Counts) -> None:
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    score = lambda s, b, h, q_idx, kv_idx: s * layer.weight[h, 0] + layer.bias[h] * kv_idx  # noqa: E731
    attn, plain = (fa4flex.compile(score, v.causal, backend=x) for x in ("flex", "auto"))  # type: ignore[arg-type]
    given = qkv()
    for _ in range(3):
        attn(*given)
    for step in range(2):
        if step:
            layer.weight = torch.nn.Parameter(torch.randn(2, 2), requires_grad=False)
        else:
            layer.weight.data.normal_()
        before = counts.entered
        torch.testing.assert_close(attn(*given), plain(*given))
        assert counts.entered == before
    layer.requires_grad_()
    assert attn(*given).requires_grad


# --- what is not -------------------------------------------------------------------------------------------


class Seen(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Dispatched.seen += 1
        return function(*args, **(kwargs or {}))


LOOKS: dict[str, Looks] = {
    **LAID_OUT,
    "dtype": lambda x: [y.double() for y in x],
    "requires_grad": lambda x: [x[0].clone().requires_grad_(), *x[1:]],
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_other_looks_are_not_served(name: str) -> None:
    held = Held()
    attn, given = repeated(held)
    changed = LOOKS[name](given)
    assert served(attn, given) and not served(attn, changed)
    right(attn, changed, held)
    assert attn(*changed).requires_grad is (name == "requires_grad")


CALLS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.5},
    "sinks": {"sinks": torch.randn(2)},
    "lse": {"return_lse": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_other_options_of_a_call_are_not_served(name: str) -> None:
    held = Held()
    attn, given = repeated(held)
    for _ in range(3):
        right(attn, given, held, **CALLS[name])
        right(attn, given, held)


def test_captured_tensors_of_other_looks_are_not_served() -> None:
    held = Held()
    attn, given = repeated(held)
    held.bias = torch.randn(2, S, dtype=torch.float64)
    right(attn, given, held)
    held.bias = torch.randn(S, 2).t()
    right(attn, given, held)
    held.bias = torch.randn(2, S, requires_grad=True)
    right(attn, given, held)
    out = attn(*given)
    assert torch.autograd.grad(out.sum(), held.bias)[0].abs().max() > 0
    with torch.no_grad():
        assert not attn(*given).requires_grad


def test_grad_mode_is_compared(counts: Counts) -> None:
    """With inputs that require gradients, and with those that do not."""
    held = Held()
    attn, given = repeated(held)
    needing = [x.clone().requires_grad_() for x in given]
    for _ in range(3):
        with torch.no_grad():
            assert not attn(*needing).requires_grad
        assert attn(*needing).requires_grad
    before = counts.entered
    with torch.no_grad():
        right(attn, given, held)
    assert counts.entered == before + 1


def test_autocast_is_compared() -> None:
    held = Held()
    attn, given = repeated(held)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert attn(*given).dtype == torch.bfloat16
        assert attn(*given).dtype == torch.float32


def test_modes_are_compared(counts: Counts) -> None:
    """A dispatch mode sees the operator, and a function mode what Dynamo lets it see."""
    held = Held()
    attn, given = repeated(held)
    wanted, before, Dispatched.seen = attn(*given), counts.entered, 0
    with Dispatched():
        torch.testing.assert_close(attn(*given), wanted)
    assert Dispatched.seen
    with Seen():
        torch.testing.assert_close(attn(*given), wanted)
    assert counts.entered > before
    with torch.inference_mode():
        assert attn(*given).is_inference()
    assert not attn(*given).is_inference()


def test_transforms_and_tangents_are_no_repetition() -> None:
    held = Held()
    attn, given = repeated(held)
    mapped = torch.func.vmap(attn)(*[x[None] for x in given])[0]
    torch.testing.assert_close(mapped, attn(*given))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], torch.randn_like(given[0]))
        assert not served(attn, [dual, *given[1:]])


def test_global_state_is_compared(counts: Counts) -> None:
    held = Held()
    attn, given = repeated(held)
    before = counts.entered
    torch.use_deterministic_algorithms(True)
    try:
        right(attn, given, held)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts.entered == before + 1
    right(attn, given, held)
    assert counts.entered == before + 1


@pytest.mark.parametrize("name", ("_stream", "_capturing"))
def test_another_stream_and_captures_make_block_masks(
    name: str, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    attn, given = repeated(held)
    before = counts.now
    monkeypatch.setattr(engines, name, lambda q: 1)
    right(attn, given, held)
    assert counts.now == (before[0], before[1] + 1)


def test_a_block_map_has_to_fit() -> None:
    blocks = fa4flex.BlockMap.from_dense(torch.rand(4, 4) < 0.7, 50, S, S)
    attn, plain = (fa4flex.compile(blocks=blocks, backend=x) for x in ("flex", "auto"))  # type: ignore[arg-type]
    given = qkv()
    for _ in range(4):
        torch.testing.assert_close(attn(*given), plain(*given))
    assert len(kept(attn)) == 1
    with pytest.raises(fa4flex.errors.StateError):
        attn(*[x[:, :, :150].contiguous() for x in given])
    again = fa4flex.BlockMap.from_dense(torch.rand(4, 4) < 0.7, 50, 190, 190)
    with pytest.raises(fa4flex.errors.StateError):
        attn(*given, blocks=again)


# --- what is kept -------------------------------------------------------------------------------------------


def test_no_tensor_is_kept_alive() -> None:
    held = Held()
    _attn, given = repeated(held)
    gone = [weakref.ref(x) for x in (*given, held.bias, held.ids)]
    given.clear()
    held.bias = held.ids = None  # type: ignore[assignment]
    gc.collect()
    assert all(x() is None for x in gone)


def test_few_are_kept(counts: Counts) -> None:
    """Calls of all lengths, and of one length with other strides, each of which is another call."""
    held = Held()
    attn, given = repeated(held)
    for length in range(100, 100 + MOST_KNOWN + 2):
        for _ in range(3):
            right(attn, [x[:, :, :length].contiguous() for x in given], held)
    lengths = [one.ready.shape.q_len for one in kept(attn)]
    assert lengths == [*range(100, 100 + MOST_KNOWN + 2)][: -MOST_KNOWN - 1 : -1]
    attn, given = repeated(held)
    for gap in range(2 * MOST_OF_ONE):
        room = [torch.cat([x, x[:, :, :gap]], 2) for x in given]
        for _ in range(3):
            right(attn, [x[:, :, :S] for x in room], held)
    assert len(kept(attn)) == MOST_OF_ONE


def test_attentions_of_one_program_have_ways_of_their_own(counts: Counts) -> None:
    """Layers of a model that differ in what they captured."""
    layers = [Held() for _ in range(18)]
    attended = [repeated(held) for held in layers]
    before = counts.now
    for held, (attn, given) in zip(layers, attended, strict=True):
        right(attn, given, held)
    assert counts.now == before


def test_what_no_graph_is_told_of() -> None:
    """A tensor given twice, an input or a result from elsewhere, two graphs; sizes stay as they are."""
    q, k, out = torch.randn(2), torch.randn(2), torch.randn(2)
    run = Run(lambda *given: [given[1] - given[2], given[0]], (4, k, q), [out, 4])
    graph = Graph.of(run, (q, k, None), (out, None, None))
    assert graph is not None and graph.holds()
    first, second = torch.randn(2), torch.randn(2)
    found = graph((first, second, None))
    assert torch.equal(found[0], second - first) and found[1:] == (None, None)
    assert Graph.of(run, (q, k, q), (out, None, None)) is None
    assert Graph.of(run, (q, None, None), (out, None, None)) is None
    assert Graph.of(run, (q, k, None), (q, None, None)) is None
    with Seen():
        assert Graph.of(run, (q, k, None), (out, None, None)) is None


def test_other_functions_are_not_served() -> None:
    attn, given = repeated(Held())
    recent = attn._caller.recent  # type: ignore[union-attr]
    other = fa4flex.compile(mask=v.causal, backend="flex").variant
    assert recent is not None
    assert recent.serve(other, tuple(given), None, None, None, ()) is None  # type: ignore[arg-type]
