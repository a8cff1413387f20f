"""Calls that patch_sdpa serves besides plain ones: other ranks, causal biases, nested tensors, compiled code
and torch's modules, beside the oracle and torch's own function."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fa4flex
from fa4flex import reference
from fa4flex.integrations.sdpa import SERVED

OWN = F.scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")


@pytest.fixture
def finite_masks() -> None:
    """No model is under test."""


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The function as a module calls it: looked up at each call."""
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def graph(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


WAYS = pytest.mark.parametrize("way", [lambda f: f, graph], ids=["eager", "compiled"])
SLOW_IN_GRAPHS = pytest.mark.parametrize(
    "way", [lambda f: f, pytest.param(graph, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)


def agree(out: Tensor, expected: Tensor, inputs: Any) -> None:
    """Outputs and gradients are equal but for rounding of float64."""
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(expected)
    got, want = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
    torch.testing.assert_close(got, want)


def served(way: Any, *arguments: Any, **options: Any) -> Tensor:
    run = way(sdpa)
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out: Tensor = run(*arguments, **options)
    assert patch.calls == {SERVED: 1}
    return out


# --- shapes -------------------------------------------------------------------------------------------------

LEADING = {
    "none": ((), (), ()),
    "heads": ((4,), (4,), (4,)),
    "heads of one key": ((4,), (1,), (1,)),
    "batch of one key": ((3, 4), (1, 4), (1, 4)),
    "batch of one query": ((1, 4), (3, 4), (3, 4)),
    "batch and heads of one key": ((3, 4), (1, 1), (1, 1)),
    "batch of one value": ((3, 4), (3, 4), (1, 4)),
    "five": ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
    "six, of one key head": ((2, 1, 3, 4), (2, 1, 3, 1), (2, 1, 3, 1)),
}


@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
@SLOW_IN_GRAPHS
def test_any_leading_dimensions(way: Any, leading: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (leaf(*lead, *rows) for lead, rows in zip(leading, ((5, 8), (7, 8), (7, 6)), strict=True))
    agree(served(way, q, k, v, is_causal=True), OWN(q, k, v, is_causal=True), (q, k, v))


@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("of_each", [True, False], ids=["whole", "repeated"])
def test_masks_of_any_leading_dimensions(lead: tuple[int, ...], of_each: bool) -> None:
    q, k, v = leaf(*lead, 5, 8), leaf(*lead, 7, 8), leaf(*lead, 7, 8)
    shape = (*lead, 5, 7) if of_each else (5, 7)
    allowed = torch.rand(shape) > 0.4
    agree(served(lambda f: f, q, k, v, allowed), OWN(q, k, v, allowed), (q, k, v))
    bias = leaf(*shape)
    agree(served(lambda f: f, q, k, v, bias), OWN(q, k, v, bias), (q, k, v, bias))


def test_groups_of_heads_without_a_batch() -> None:
    q, k, v = leaf(6, 5, 8), leaf(2, 7, 8), leaf(2, 7, 8)
    options = {"enable_gqa": True, "scale": 0.3}
    agree(served(lambda f: f, q, k, v, **options), OWN(q, k, v, **options), (q, k, v))


def draw() -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], dict[str, Any]]:
    """Tensors, arguments of a call, and what the oracle is given for them."""
    batch, kv_heads, group, q_len, kv_len = (int(torch.randint(1, n, ())) for n in (4, 4, 4, 40, 40))
    heads = kv_heads * group
    qkv = leaf(batch, heads, q_len, 16), leaf(batch, kv_heads, kv_len, 16), leaf(batch, kv_heads, kv_len, 8)
    options: dict[str, Any] = {"enable_gqa": True, "scale": float(torch.rand(())) + 0.1}
    kind = int(torch.randint(4, ()))
    sizes = zip((batch, heads, q_len, kv_len), torch.rand(4).tolist(), strict=True)
    shape = tuple(n if keep < 0.6 else 1 for n, keep in sizes)
    mod: dict[str, Any] = {}
    if kind == 1:
        options["is_causal"] = True
        mod["mask"] = lambda b, h, i, j: i >= j
    elif kind > 1 and max(shape) > 1:
        table = torch.rand(shape) > 0.5 if kind == 2 else leaf(*shape)
        options["mask"] = table
        whole = table.expand(batch, heads, q_len, kv_len)
        mod = {"mask": lambda b, h, i, j: whole[b, h, i, j]}
        if kind == 3:
            mod = {"score_mod": lambda s, b, h, i, j: s + whole[b, h, i, j]}
    return qkv, options, mod


@pytest.mark.parametrize("_", range(6))
def test_draws_beside_the_oracle(_: int) -> None:
    qkv, options, mod = draw()
    out = served(lambda f: f, *qkv, **options)
    expected, _lse = reference.attention(*qkv, **mod, scale=options["scale"])
    agree(out, expected, [x for x in (*qkv, options.get("mask")) if x is not None and x.requires_grad])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_less_exact_than_torchs_own(dtype: torch.dtype) -> None:
    """The error is at most twice that of torch's function of the same dtype, and a rounding of the output."""
    q, k, v = (torch.randn(2, 4, 48, 16).to(dtype) for _ in range(3))
    bias = torch.randn(4, 48, 48).to(dtype)
    exact, _ = reference.attention(q, k, v, lambda s, b, h, i, j: s + bias.double()[h, i, j])
    errors = [
        (x.double() - exact).abs().max() for x in (served(lambda f: f, q, k, v, bias), OWN(q, k, v, bias))
    ]
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps * exact.abs().max()


# --- torch's causal biases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 7), (7, 5), (6, 6)])
@SLOW_IN_GRAPHS
def test_causal_biases(way: Any, made: Any, q_len: int, kv_len: int) -> None:
    q, k, v = leaf(2, 4, q_len, 8), leaf(2, 4, kv_len, 8), leaf(2, 4, kv_len, 8)
    bias = made(q_len, kv_len)
    shift = kv_len - q_len if made is causal_lower_right else 0
    expected = reference.attention(q, k, v, mask=lambda b, h, i, j: j <= i + shift)[0]
    agree(served(way, q, k, v, bias), expected, (q, k, v))


def test_a_causal_bias_that_is_left_to_torch_is_torchs() -> None:
    """torch recognises its function by what stands in its place."""
    q, k, v = (leaf(2, 4, 6, 8) for _ in range(3))
    wide, bias = leaf(2, 4, 6, 9), causal_lower_right(6, 6)
    expected = torch.tril(torch.ones(6, 6, dtype=torch.bool))
    with fa4flex.patch_sdpa() as patch, pytest.warns(UserWarning, match="tensors on cpu"):
        inside = F.scaled_dot_product_attention
        torch.testing.assert_close(sdpa(q, k, v, bias), OWN(q, k, v, expected))
        assert F.scaled_dot_product_attention is inside
        with pytest.raises(RuntimeError):
            sdpa(wide, k, v, bias)
        assert F.scaled_dot_product_attention is inside
        with pytest.raises(ValueError, match="should not be used with causal"):
            sdpa(q, k, v, bias, is_causal=True)
    assert patch.calls.total() == 3 and SERVED not in patch.calls and F.scaled_dot_product_attention is OWN


class Recognising(Tensor):
    """A subclass that finds torch's function by its place."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            cls.during()
            return "recognised"
        return super().__torch_function__(function, types, args, kwargs)

    during: Callable[[], None] = staticmethod(lambda: None)


@pytest.mark.filterwarnings("ignore:scaled_dot_product_attention runs")
def test_subclasses_recognise_torchs_function_whatever_happens_meanwhile(monkeypatch: Any) -> None:
    x = torch.randn(2, 4, 6, 8).as_subclass(Recognising)
    patch = fa4flex.patch_sdpa(cpu=True)
    ours = F.scaled_dot_product_attention
    assert sdpa(x, x, x) == "recognised" and F.scaled_dot_product_attention is ours
    monkeypatch.setattr(Recognising, "during", staticmethod(patch.remove))
    assert sdpa(x, x, x) == "recognised" and F.scaled_dot_product_attention is OWN

    again: list[Any] = []
    monkeypatch.setattr(
        Recognising, "during", staticmethod(lambda: again.append(fa4flex.patch_sdpa(cpu=True)))
    )
    with fa4flex.patch_sdpa(cpu=True):
        assert sdpa(x, x, x) == "recognised" and F.scaled_dot_product_attention is ours
    again.pop().remove()
    assert F.scaled_dot_product_attention is OWN

    monkeypatch.setattr(Recognising, "during", staticmethod(lambda: None))
    results: list[Any] = []
    with fa4flex.patch_sdpa(cpu=True):
        threads = [
            threading.Thread(target=lambda: results.extend(sdpa(x, x, x) for _ in range(50)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["recognised"] * 200 and F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is OWN


# --- nested tensors -----------------------------------------------------------------------------------------

Q_LENGTHS, K_LENGTHS = (3, 1, 7, 2), (4, 2, 9, 1)


def jagged(heads: int, lengths: tuple[int, ...], width: int = 8) -> Tensor:
    rows = [torch.randn(n, heads, width, dtype=torch.float64) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def nested_block(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)


def by_sequence(qkv: tuple[Tensor, Tensor, Tensor], **how: Any) -> Tensor:
    """Packed outputs of the oracle, sequence by sequence."""
    parts = zip(*(x.unbind() for x in qkv), strict=True)
    outs = [reference.attention(*(x.transpose(0, 1)[None] for x in part), **how)[0] for part in parts]
    return torch.cat([x[0].transpose(0, 1) for x in outs])


def agree_nested(out: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> None:
    values = out.values()
    torch.testing.assert_close(values, expected)
    weights = torch.randn_like(expected)
    got, want = (torch.autograd.grad((x * weights).sum(), leaves) for x in (values, expected))
    torch.testing.assert_close([x.values() for x in got], [x.values() for x in want])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@SLOW_IN_GRAPHS
def test_nested_tensors(way: Any, kv_heads: int, is_causal: bool) -> None:
    q = jagged(4, Q_LENGTHS)
    shape = q.values().shape[0], kv_heads, 8
    k, v = (
        torch.nested.nested_tensor_from_jagged(
            torch.randn(shape, dtype=torch.float64), q.offsets()
        ).requires_grad_()
        for _ in range(2)
    )
    run = way(nested_block)
    options = {"is_causal": is_causal, "scale": 0.4, "enable_gqa": kv_heads > 1}
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = run(q, k, v, **options)
    assert patch.calls == {SERVED: 1} and out.shape == q.shape and out.layout is torch.jagged
    mask = (lambda b, h, i, j: i >= j) if is_causal else None
    agree_nested(out, by_sequence((q, k, v), mask=mask, scale=0.4), (q, k, v))


def test_nested_keys_of_other_lengths_and_what_torch_gives() -> None:
    q, k = jagged(4, Q_LENGTHS), jagged(4, K_LENGTHS)
    v = torch.nested.nested_tensor_from_jagged(
        torch.randn(sum(K_LENGTHS), 4, 8, dtype=torch.float64), k.offsets()
    ).requires_grad_()
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = nested_block(q, k, v)
    assert patch.calls == {SERVED: 1}
    agree_nested(out, by_sequence((q, k, v)), (q, k, v))
    own = OWN(*(x.detach().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(out.values(), own.values())


@WAYS
def test_nested_projections_are_read_as_they_lie(way: Any) -> None:
    """Chunks of one projection have strides of their own; torch has no kernel for them on a CPU."""
    project = nn.Linear(12, 3 * 4 * 8, dtype=torch.float64)
    x = torch.nested.nested_tensor(
        [torch.randn(n, 12, dtype=torch.float64) for n in Q_LENGTHS], layout=torch.jagged, requires_grad=True
    )

    def heads(x: Tensor) -> tuple[Tensor, ...]:
        return tuple([part.unflatten(-1, (4, 8)) for part in project(x).chunk(3, -1)])

    run = way(lambda x: nested_block(*heads(x), is_causal=True).flatten(-2))
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = run(x)
    assert patch.calls == {SERVED: 1} and out.shape[-1] == 32
    q, k, v = heads(x)
    expected = by_sequence((q, k, v), mask=lambda b, h, i, j: i >= j).flatten(-2)
    agree_nested(out, expected, (x,))


@pytest.mark.filterwarnings("ignore:scaled_dot_product_attention runs")
def test_nested_tensors_that_are_torchs() -> None:
    q, other = jagged(4, Q_LENGTHS).transpose(1, 2), jagged(4, K_LENGTHS).transpose(1, 2)
    alone = jagged(4, Q_LENGTHS).transpose(1, 2)

    def reason(*qkv: Tensor, **options: Any) -> str:
        with fa4flex.patch_sdpa(cpu=True) as patch:
            try:
                expected: Any = OWN(*qkv, **options)
            except Exception as error:
                expected = error
            if isinstance(expected, Exception):
                with pytest.raises(type(expected)):
                    F.scaled_dot_product_attention(*qkv, **options)
            else:
                got = F.scaled_dot_product_attention(*qkv, **options)
                assert torch.equal(got.values(), expected.values())
        ((words, count),) = patch.calls.items()
        assert count == 1
        return words

    assert "a mask of nested tensors" in reason(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool))
    assert "several offsets" in reason(q, q, alone)
    assert "is_causal" in reason(q, other, other, is_causal=True)
    assert "several batches" in reason(*(jagged(4, n).transpose(1, 2) for n in ((3, 2), (3,), (3,))))
    assert "beside others" in reason(q, torch.randn(4, 4, 5, 8), q)
    padded = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    lengths = torch.tensor([2, 6])
    holes = torch.nested.narrow(padded, 1, torch.zeros(2, dtype=torch.int64), lengths, layout=torch.jagged)
    assert "holes" in reason(*[holes.transpose(1, 2)] * 3)


@pytest.mark.filterwarnings("ignore:scaled_dot_product_attention runs")
def test_tokens_first_means_what_it_means_to_torch() -> None:
    """torch takes the tokens of [B, ragged, H, D] for a batch, whose call comes here again."""
    q = jagged(4, Q_LENGTHS)
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = sdpa(q, q, q)
    assert patch.calls == {SERVED: 1, "nested tensors that are not [B, heads, ragged, channels]": 1}
    torch.testing.assert_close(out.values(), OWN(q, q, q).values())


# --- torch.compile ------------------------------------------------------------------------------------------

SHAPES = [None, (2, 4, 5, 7), (2, 1, 1, 7), (1, 4, 5, 1), (5, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("floating", [False, True], ids=["map", "bias"])
def test_masks_in_graphs(shape: tuple[int, ...] | None, floating: bool) -> None:
    q, k, v = leaf(2, 4, 5, 8), leaf(2, 2, 7, 8), leaf(2, 2, 7, 8)
    options = {"enable_gqa": True, "scale": 0.3}
    mask = None
    if shape is not None:
        mask = leaf(*shape) if floating else torch.rand(shape) > 0.4
    inputs = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    agree(served(graph, q, k, v, mask, **options), OWN(q, k, v, mask, **options), inputs)


def test_graphs_follow_patches_lengths_and_contents() -> None:
    run, allowed = graph(lambda q, k, v, m: sdpa(q, k, v, m) * 2), torch.rand(5, 7) > 0.4
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    expected = OWN(q, k, v, allowed) * 2
    torch.testing.assert_close(run(q, k, v, allowed), expected)
    with fa4flex.patch_sdpa(cpu=True) as patch:
        torch.testing.assert_close(run(q, k, v, allowed), expected)
        assert patch.calls == {SERVED: 1}
        run(q, k, v, allowed)
        assert patch.calls == {SERVED: 1}  # counted when it was traced
        allowed.logical_not_()
        torch.testing.assert_close(run(q, k, v, allowed), OWN(q, k, v, allowed) * 2)
        for n in (9, 12, 20):
            k2, v2 = (
                torch.randn(2, 4, n, 8, dtype=torch.float64),
                torch.randn(2, 4, n, 8, dtype=torch.float64),
            )
            m2 = torch.rand(5, n) > 0.4
            torch.testing.assert_close(run(q, k2, v2, m2), OWN(q, k2, v2, m2) * 2)
        assert patch.calls[SERVED] <= 3  # lengths became dynamic
    before = dict(patch.calls)
    torch.testing.assert_close(run(q, k, v, allowed), OWN(q, k, v, allowed) * 2)
    with fa4flex.patch_sdpa() as other, pytest.warns(UserWarning, match="cpu=True"):
        assert torch.equal(run(q, k, v, allowed), OWN(q, k, v, allowed) * 2)
    assert dict(patch.calls) == before and SERVED not in other.calls


@pytest.mark.filterwarnings("ignore:scaled_dot_product_attention runs")
def test_what_is_torchs_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))

    def reason(function: Callable[..., Any], *arguments: Any) -> str:
        expected = function(*arguments)
        with fa4flex.patch_sdpa(cpu=True) as patch:
            torch.testing.assert_close(graph(function)(*arguments), expected)
        assert SERVED not in patch.calls
        (words,) = patch.calls
        return words

    def ruled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return sdpa(q, k, v)

    assert "sdpa_kernel" in reason(ruled_out, q, k, v)
    assert "elements" in reason(sdpa, q[:, :, :0], k, v)
    assert "transforms" in reason(torch.vmap(sdpa), q[None], k[None], v[None])

    def refuses(*_: Any, **__: Any) -> Any:
        raise fa4flex.UnsupportedError("a width of 1024", "512", "use less")

    monkeypatch.setattr("fa4flex.integrations.sdpa_calls.attention", refuses)
    assert "a width of 1024" in reason(sdpa, q, k, v, torch.rand(6, 6) > 0.4)


def test_kernels_are_asked_before_a_graph_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph cannot hand on what no kernel is for, as an eager call does."""
    from fa4flex.integrations import sdpa_calls

    refused = sdpa_calls._refused
    assert "float32" in str(refused("torch.float32", 64, 64))
    assert "head_dim=60" in str(refused("torch.bfloat16", 60, 60))
    assert "heads of 320" in str(refused("torch.float16", 320, 320))
    assert [refused("torch.bfloat16", n, n) for n in (64, 128, 256)] == [None] * 3
    monkeypatch.setattr(sdpa_calls.launch, "by_kernels", lambda *_: True)
    q = torch.randn(2, 4, 6, 60).bfloat16()
    with fa4flex.patch_sdpa() as patch, pytest.warns(UserWarning, match="head_dim=60"):
        torch.testing.assert_close(graph(sdpa)(q, q, q), OWN(q, q, q))
    assert SERVED not in patch.calls


def test_gradients_of_wide_heads_are_torchs_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have one pass of them, and the other would be slow."""
    from fa4flex.integrations import sdpa_calls

    monkeypatch.setattr(sdpa_calls.launch, "by_kernels", lambda *_: True)
    q = torch.randn(1, 2, 6, 320, dtype=torch.bfloat16, requires_grad=True)
    with fa4flex.patch_sdpa() as patch, pytest.warns(UserWarning, match="gradients of wide heads"):
        torch.testing.assert_close(sdpa(q, q, q), OWN(q, q, q))
    assert SERVED not in patch.calls


def test_dropout_in_graphs() -> None:
    q, k, v = leaf(2, 4, 40, 8), leaf(2, 4, 60, 8), torch.eye(60, dtype=torch.float64).expand(2, 4, -1, -1)
    weights = served(graph, q, k, v, dropout_p=0.5)
    kept = weights != 0
    assert 0.45 < kept.double().mean() < 0.55
    torch.testing.assert_close(weights, kept * OWN(q, k, v) * 2)


# --- what is said -------------------------------------------------------------------------------------------


def test_each_reason_is_said_once() -> None:
    q = torch.randn(1, 2, 5, 8)
    with fa4flex.patch_sdpa() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            sdpa(q, q, q)
            sdpa(q.to("meta"), q.to("meta"), q.to("meta"))
    assert [str(w.message) for w in seen] == [
        "scaled_dot_product_attention runs torch's own function under fa4flex.patch_sdpa: no kernels for "
        f"tensors on {device}. Patch.calls counts such calls; this is said once"
        for device in ("cpu, which patch_sdpa(cpu=True) serves", "meta")
    ]
    assert all(w.filename == __file__ for w in seen)
    assert set(patch.calls.values()) == {3}


def test_calls_that_are_served_say_nothing() -> None:
    q = torch.randn(1, 2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served(lambda f: f, q, q, q)


# --- torch's modules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "causal", "is_causal", "padding", "both", "per head"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(kind: str, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    x = (x if batch_first else x.transpose(0, 1)).requires_grad_()
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    options: dict[str, Any] = {
        "none": {},
        "causal": {"attn_mask": causal},
        "is_causal": {"attn_mask": causal, "is_causal": True},
        "padding": {"key_padding_mask": padding},
        "both": {
            "attn_mask": causal,
            "key_padding_mask": torch.zeros_like(padding).double().masked_fill(padding, -torch.inf),
        },
        "per head": {"attn_mask": torch.randn(8, 6, 6, dtype=torch.float64)},
    }[kind]
    expected = layer(x, x, x, need_weights=False, **options)[0]
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = layer(x, x, x, need_weights=False, **options)[0]
    assert patch.calls == {SERVED: 1}
    agree(out, expected, (x, *layer.parameters()))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        how: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, **how)
        self.decoder = nn.TransformerDecoderLayer(32, 4, 64, **how)
        self.causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.decoder(y, self.encoder(x), tgt_mask=self.causal, tgt_is_causal=True)
        return out


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_transformers(training: bool) -> None:
    model, x, y = Layers().train(training), leaf(2, 6, 32), leaf(2, 9, 32)
    expected = model(x, y)
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = model(x, y)
    assert patch.calls == {SERVED: 3}
    agree(out, expected, (x, y, *model.parameters()))


def test_modules_that_graphs_have_whole_keep_torchs_and_say_so() -> None:
    """Graphs, and what is kept of them on disk, would not tell with which function they were made."""
    model, x, y = Layers(), leaf(2, 6, 32), leaf(2, 9, 32)
    expected = model(x, y)
    run = graph(model)
    with (
        fa4flex.patch_sdpa(cpu=True) as patch,
        pytest.warns(UserWarning, match=r"torch.nn.MultiheadAttention"),
    ):
        out = run(x, y)
    assert SERVED not in patch.calls
    agree(out, expected, (x, y, *model.parameters()))


class SelfAttention(nn.Module):
    """A user's own module, as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


@WAYS
def test_modules_of_users(way: Any) -> None:
    model, x = nn.Sequential(SelfAttention(), SelfAttention()), leaf(2, 6, 32)
    expected = model(x)
    run = way(model)
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = run(x)
    assert patch.calls == {SERVED: 2}
    agree(out, expected, (x, *model.parameters()))


def test_torchs_module_in_one_kernel_keeps_it() -> None:
    """Evaluation without gradients goes by one function in C++, which no patch reaches."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 6, 32)
    with torch.no_grad(), fa4flex.patch_sdpa(cpu=True) as patch:
        out = layer(x)
    with torch.no_grad():
        assert torch.equal(out, layer(x)) and not patch.calls
