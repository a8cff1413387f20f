"""Nested jagged tensors in, nested tensors out: beside packed calls and the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SMS, leaf
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import InputError, UnsupportedError, Varlen, reference
from fa4flex.variants import causal

LENGTHS = (3, 0, 7, 5)
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def nested(values: Tensor, cu: Tensor, heads_first: bool = True, lengths: Tensor | None = None) -> Tensor:
    made = torch.nested.nested_tensor_from_jagged(values, cu, lengths)
    return made.transpose(1, 2) if heads_first else made


def packed(cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_tokens, k_tokens = int(cu_q[-1]), int(cu_k[-1])
    return (
        leaf(q_tokens, HEADS, WIDTH),
        leaf(k_tokens, KV_HEADS, WIDTH),
        leaf(k_tokens, KV_HEADS, WIDTH + 4),
    )


def tokens(x: Tensor, heads_first: bool) -> Tensor:
    return x.values().transpose(0, 1) if heads_first else x.values()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("self_attention", [True, False], ids=["one_offsets", "two_offsets"])
def test_output_and_gradients_of_each_sequence(layout: str, self_attention: bool) -> None:
    first = layout == "bhsd"
    cu_q = offsets(*LENGTHS)
    cu_k = cu_q if self_attention else offsets(4, 2, 9, 1)
    qkv = packed(cu_q, cu_k)
    table = leaf(len(LENGTHS), HEADS)
    limits = torch.tensor([2, 1, 6, 3])

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[b, h] * (q_idx - kv_idx)

    def few(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < limits[b]

    attn = fa4flex.compile(biased, few, layout=layout)
    q, k, v = (nested(x, cu, first) for x, cu in zip(qkv, (cu_q, cu_k, cu_k), strict=True))
    out, lse = attn(q, k, v, return_lse=True)
    assert out.shape[:-1] == q.shape[:-1] and out.shape[-1] == WIDTH + 4
    assert lse.shape[:2] == (len(LENGTHS), HEADS) and lse.offsets() is cu_q
    assert out.offsets() is cu_q

    ranges = reference.sequence_ranges(cu_q), reference.sequence_ranges(cu_k)
    expected, expected_lse = reference.varlen(qkv, ranges, biased, few)
    torch.testing.assert_close(lse.values(), expected_lse)
    torch.testing.assert_close(tokens(out, first), expected)
    inputs = *qkv, table
    weights = torch.randn_like(expected)
    got = torch.autograd.grad((tokens(out, first) * weights).sum(), inputs)
    want = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(got, want)


def test_equals_the_packed_call_without_copies() -> None:
    cu = offsets(*LENGTHS)
    qkv = tuple(x.detach() for x in packed(cu, cu))
    attn = fa4flex.compile(mask=causal)
    out, lse = attn(*(nested(x, cu) for x in qkv), return_lse=True)
    expected, expected_lse = attn(*qkv, varlen=Varlen(cu), return_lse=True)
    assert torch.equal(tokens(out, True), expected) and torch.equal(lse.values(), expected_lse)
    direct = fa4flex.attention(*(nested(x, cu) for x in qkv), mask=causal)
    assert torch.equal(tokens(direct, True), expected)
    values = tokens(nested(qkv[0], cu), True)
    assert values.data_ptr() == qkv[0].data_ptr() and values.stride() == qkv[0].stride()


def test_gradients_reach_nested_leaves() -> None:
    rows = [torch.randn(n, HEADS, WIDTH, dtype=torch.float64) for n in (3, 6)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    y = x.transpose(1, 2)
    fa4flex.attention(y, y, y, mask=causal).values().sum().backward()
    assert x.grad is not None and x.grad.is_nested

    single = [r.clone().requires_grad_() for r in rows]
    for r in single:
        z = r.transpose(0, 1)[None]
        reference.attention(z, z, z, mask=causal)[0].sum().backward()
    for got, want in zip(x.grad.unbind(), single, strict=True):
        torch.testing.assert_close(got, want.grad)


def test_nested_by_equal_offsets_of_its_own() -> None:
    cu, other = offsets(*LENGTHS), offsets(3, 1, 6, 5)
    qkv = packed(cu, cu)
    q, k = nested(qkv[0], cu), nested(qkv[1], cu)
    same = fa4flex.attention(q, k, nested(qkv[2], cu))
    torch.testing.assert_close(fa4flex.attention(q, k, nested(qkv[2], cu.clone())).values(), same.values())
    with pytest.raises(InputError, match="different offsets"):
        fa4flex.attention(q, k, nested(qkv[2], other))


def test_sequences_with_holes() -> None:
    padded = leaf(3, 6, HEADS, WIDTH)
    used = torch.tensor([2, 6, 4])
    x = torch.nested.narrow(padded, 1, torch.zeros(3, dtype=torch.int64), used, layout=torch.jagged)
    y = x.transpose(1, 2)
    out = fa4flex.attention(y, y, y)
    assert out.shape == y.shape
    weights = torch.randn(6, HEADS, WIDTH, dtype=torch.float64)
    wanted = []
    for n, length in enumerate(used.tolist()):
        z = padded[n : n + 1, :length].transpose(1, 2)
        wanted.append(reference.attention(z, z, z)[0][0].transpose(0, 1))
    got = [out.values().transpose(0, 1)[6 * n : 6 * n + length] for n, length in enumerate(used.tolist())]
    torch.testing.assert_close(got, wanted)
    sums = [sum((part * weights[: len(part)]).sum() for part in parts) for parts in (got, wanted)]
    torch.testing.assert_close(*(torch.autograd.grad(s, padded)[0] for s in sums))


def test_holes_before_the_first_token_are_refused() -> None:
    padded = torch.randn(2, 6, HEADS, WIDTH)
    x = torch.nested.narrow(padded, 1, torch.tensor([1, 0]), torch.tensor([3, 3]), layout=torch.jagged)
    y = x.transpose(1, 2)
    with pytest.raises(UnsupportedError, match="first sequence starts at token 1"):
        fa4flex.attention(y, y, y)


def test_an_output_function_sees_the_sequence() -> None:
    cu = offsets(*LENGTHS)
    qkv = tuple(x.detach() for x in packed(cu, cu))
    gate = torch.rand(len(LENGTHS), dtype=torch.float64)

    def gated(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
        return out * gate[b]

    out = fa4flex.attention(*(nested(x, cu) for x in qkv), output_mod=gated)
    plain = fa4flex.attention(*qkv, varlen=Varlen(cu))
    torch.testing.assert_close(tokens(out, True), plain * gate.repeat_interleave(cu.diff())[:, None, None])


def test_what_does_not_fit_is_refused_in_words() -> None:
    cu = offsets(*LENGTHS)
    q, k, v = (nested(x, cu) for x in packed(cu, cu))
    with pytest.raises(
        InputError, match=r"(?s)k of shape .* beside nested tensors.*nested_tensor_from_jagged"
    ):
        fa4flex.attention(q, torch.randn(4, 2, 7, WIDTH), v)
    with pytest.raises(InputError, match=r"(?s)q of shape .*layout bhsd.*q.transpose"):
        fa4flex.attention(q.transpose(1, 2), k, v)
    with pytest.raises(InputError, match=r"(?s)layout bshd.*layout='bhsd'"):
        fa4flex.attention(q, k, v, layout="bshd")
    with pytest.raises(UnsupportedError, match="varlen= with nested tensors"):
        fa4flex.attention(q, k, v, varlen=Varlen(cu))
    few = offsets(3, 7)
    kv = [nested(torch.randn(10, KV_HEADS, WIDTH), few) for _ in range(2)]
    with pytest.raises(InputError, match="q nests 4 sequences, k nests 2"):
        fa4flex.attention(q, *kv)
    flat = nested(torch.randn(15, HEADS * WIDTH), cu, heads_first=False)
    for layout, turned in (("bhsd", r"\.transpose\(1, 2\)"), ("bshd", "$")):
        with pytest.raises(InputError, match=rf"q\.unflatten\(-1, \(heads, channels\)\){turned}"):
            fa4flex.attention(flat, flat, flat, layout=layout)


def test_in_a_compiled_function() -> None:
    cu = offsets(*LENGTHS)
    qkv = packed(cu, cu)
    attn = fa4flex.compile(mask=causal)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2) * 2

    out = block(*(nested(x, cu, heads_first=False) for x in qkv))
    expected = attn(*qkv, varlen=Varlen(cu)) * 2
    torch.testing.assert_close(out.values(), expected)
    got, want = (torch.autograd.grad(x.sum(), qkv) for x in (out.values(), expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chunks_of_a_projection_with_statistics(layout: str, compiled: bool) -> None:
    """Values of a chunk have the strides of the whole; statistics and their gradients are nested as well."""
    first = layout == "bhsd"
    cu, sinks = offsets(*LENGTHS), leaf(HEADS)
    x, project = leaf(sum(LENGTHS), 12), torch.nn.Linear(12, 3 * HEADS * WIDTH, dtype=torch.float64)
    attn = fa4flex.compile(mask=causal, sinks=sinks, layout=layout)

    def block(x: Tensor) -> tuple[Tensor, Any]:
        parts = [part.unflatten(-1, (HEADS, WIDTH)) for part in project(x).chunk(3, -1)]
        return attn(
            *[part.transpose(1, 2) if first else part for part in parts], return_aux=("lse", "entropy")
        )

    torch._dynamo.reset()
    run = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    out, aux = run(nested(x, cu, heads_first=False))
    assert out.offsets() is cu or compiled
    assert aux.lse.shape[:2] == aux.entropy.shape[:2] == (len(LENGTHS), HEADS)
    qkv = tuple(part.unflatten(-1, (HEADS, WIDTH)) for part in project(x).chunk(3, -1))
    ranges = reference.sequence_ranges(cu)
    expected, expected_lse = reference.varlen(qkv, (ranges, ranges), None, causal, sinks=sinks)
    got, want = (tokens(out, first), aux.lse.values()), (expected, expected_lse)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(expected), torch.randn(HEADS, sum(LENGTHS), dtype=torch.float64)
    inputs = x, sinks, *project.parameters()
    sums = [(a * weights[0]).sum() + (b * weights[1]).sum() for a, b in (got, want)]
    torch.testing.assert_close(*(torch.autograd.grad(total, inputs) for total in sums))


def test_dropout_drops_the_pairs_of_the_packed_call() -> None:
    cu = offsets(*LENGTHS)
    qkv = tuple(x.detach() for x in packed(cu, cu))
    attn = fa4flex.compile(mask=causal, dropout=fa4flex.Dropout(0.4, seed=7))
    assert torch.equal(tokens(attn(*(nested(x, cu) for x in qkv)), True), attn(*qkv, varlen=Varlen(cu)))


@pytest.mark.slow
def test_on_a_simulated_gpu() -> None:
    cu = offsets(20, 0, 45)
    qkv = tuple(torch.randn(65, 2, 64).bfloat16().requires_grad_() for _ in range(3))
    attn = fa4flex.compile(mask=causal)
    with ptxsim.device("sm_90a", sms=SMS) as gpu:
        out = tokens(attn(*(nested(x, cu) for x in qkv)), True)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, qkv, dout)
    assert not gpu.findings and gpu.results
    ranges = [reference.sequence_ranges(cu)] * 2
    expected = reference.varlen(qkv, (ranges[0], ranges[1]), None, causal)[0]
    want = torch.autograd.grad(expected, qkv, dout.double())
    for x, exact in zip((out, *got), (expected, *want), strict=True):
        torch.testing.assert_close(x.double(), exact.double(), atol=0.05, rtol=0.05)
