"""Keys and values that differ in heads, on a CPU: each query head reads its own, by every door, in every
arrangement and with all derivatives, as the oracle has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import agree, close, cumulative, leaf
from torch import Tensor

import fa4flex
from fa4flex import InputError, KVScales, Paging, Sinks, UnsupportedError, Varlen, reference
from fa4flex.integrations.varlen import varlen_attn
from fa4flex.primitives.heads import ALIKE, Shares
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.launch_cache import key_of
from fa4flex.runtime.key_sources import Contiguous, KeySource, Paged
from fa4flex.variants import alibi, causal, differential, gated, sliding_window

Heads = tuple[int, int, int]
"""Query heads, heads of keys and heads of values."""

APART: tuple[Heads, ...] = ((8, 4, 2), (8, 2, 4), (8, 8, 1), (14, 7, 2), (6, 1, 6))


def drawn(heads: Heads, q_len: int = 20, kv_len: int = 33, batch: int = 2) -> list[Tensor]:
    """q, k and v, of widths 8 and 12, which require gradients."""
    hq, hk, hv = heads
    return [leaf(batch, hq, q_len, 8), leaf(batch, hk, kv_len, 8), leaf(batch, hv, kv_len, 12)]


@pytest.mark.parametrize(
    ("k", "v", "want"),
    [(4, 4, (1, 1)), (4, 2, (1, 2)), (2, 4, (2, 1)), (7, 2, (2, 7)), (6, 4, (2, 3)), (1, 5, (5, 1))],
)
def test_shares(k: int, v: int, want: tuple[int, int]) -> None:
    """KV heads are the fewest equal shares of the query heads, all of each with one head of keys and one of
    values."""
    shares, heads = Shares.of(k, v), k * v
    assert shares == want and (shares == ALIKE) == (k == v)
    assert k * shares.k == v * shares.v

    def alike(count: int) -> bool:
        pairs = {(h * count // heads, h * k // heads, h * v // heads) for h in range(heads)}
        return len(pairs) == count

    assert k * shares.k == next(n for n in range(1, heads + 1) if heads % n == 0 and alike(n))


@pytest.mark.parametrize("heads", APART, ids=str)
@pytest.mark.parametrize("lengths", [(1, 40), (3, 40), (70, 70), (150, 300)], ids=str)
@pytest.mark.parametrize("composition", [{}, {"mask": causal, "score_mod": alibi}], ids=["plain", "causal"])
def test_dense(heads: Heads, lengths: tuple[int, int], composition: dict[str, Any]) -> None:
    """Few queries and many, without score mods, which PyTorch's kernels serve, and with such."""
    qkv = drawn(heads, *lengths)
    sinks = Sinks(leaf(heads[0]))
    given = [*qkv, sinks.logits]
    found = fa4flex.compile(**composition, sinks=sinks)(*qkv, return_lse=True)
    agree(found, reference.attention(*qkv, **composition, sinks=sinks.logits), given)
    with torch.no_grad():
        out = fa4flex.compile(**composition)(*qkv)
        assert close(out, reference.attention(*qkv, **composition)[0])
    half = [x.detach().bfloat16() for x in qkv]
    exact = reference.attention(*half, **composition)[0]
    assert (fa4flex.compile(**composition)(*half).double() - exact).abs().max() <= 2**-7 * exact.abs().max()


def test_single_queries_in_float32() -> None:
    """PyTorch's own kernel for a CPU takes as many heads of both."""
    q, k, v = (x.detach().float() for x in (leaf(2, 8, 1, 16), leaf(2, 4, 50, 16), leaf(2, 2, 50, 16)))
    for layout in ("bhsd", "bshd"):
        given = (q, k, v) if layout == "bhsd" else tuple(x.transpose(1, 2) for x in (q, k, v))
        out = fa4flex.compile(mask=causal, layout=layout)(*given)
        out = out if layout == "bhsd" else out.transpose(1, 2)
        assert close(out.double(), reference.attention(q, k, v, mask=causal)[0], 1e-5)


def scattered(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Tiles here and there, others in each head."""
    return ((q // 16 + k // 16 + h) % 7 == 0) & (q % 5 != 0)


@pytest.mark.parametrize("heads", APART, ids=str)
def test_routes(heads: Heads) -> None:
    """Masks of scattered tiles, whose keys are gathered, and captured tensors with gradients."""
    qkv, table = drawn(heads, 200, 230, 1), leaf(heads[0], 460)

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[h, q - k + 230]

    for mask in (scattered, sliding_window(17)):
        found = fa4flex.compile(biased, mask)(*qkv, return_lse=True)
        agree(found, reference.attention(*qkv, biased, mask), [*qkv, table])


@pytest.mark.parametrize("heads", APART, ids=str)
def test_packed_and_padded(heads: Heads) -> None:
    lengths = [(5, 9), (0, 3), (30, 41)]
    cu_q, cu_k = (cumulative([pair[side] for pair in lengths]) for side in range(2))
    q, k, v = (
        leaf(int(cu[-1]), h, w) for cu, h, w in zip((cu_q, cu_k, cu_k), heads, (8, 8, 12), strict=True)
    )
    ranges = reference.sequence_ranges(cu_q), reference.sequence_ranges(cu_k)
    found = fa4flex.compile(mask=causal)(q, k, v, varlen=Varlen(cu_q, cu_k), return_lse=True)
    agree(found, reference.varlen((q, k, v), ranges, mask=causal), [q, k, v])

    qkv, used = drawn(heads), torch.tensor([33, 12], dtype=torch.int32)
    out = fa4flex.compile(mask=sliding_window(9))(*qkv, varlen=Varlen(seqused_k=used))
    for n, length in enumerate(used.tolist()):
        one = qkv[0][n : n + 1], *(x[n : n + 1, :, :length] for x in qkv[1:])
        assert close(out[n : n + 1], reference.attention(*one, mask=sliding_window(9))[0])


def test_nested() -> None:
    offsets = torch.tensor([0, 5, 5, 19])
    q, k, v = (leaf(19, h, w) for h, w in ((6, 8), (3, 8), (2, 12)))
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in (q, k, v)]
    out = fa4flex.compile(mask=causal)(*nested).transpose(1, 2).values()
    ranges = reference.sequence_ranges(offsets)
    agree([out], [reference.varlen((q, k, v), (ranges, ranges), mask=causal)[0]], [q, k, v])


@pytest.mark.parametrize("heads", APART, ids=str)
def test_pages(heads: Heads) -> None:
    """Pools of keys and of values have heads of their own, which are also those of 8-bit scales."""
    hq, hk, hv = heads
    table = torch.tensor([[4, 1, 0], [2, 5, 5]], dtype=torch.int32)
    used = torch.tensor([11, 7], dtype=torch.int32)
    k, v = leaf(6, 4, hk, 8), leaf(6, 4, hv, 12)
    q = leaf(2, hq, 3, 8)
    out = fa4flex.compile(mask=causal)(q, k, v, paging=Paging(table, used))
    rows = [reference.unpage(x, table, used) for x in (k, v)]
    packed = q.transpose(1, 2).flatten(0, 1), rows[0][0], rows[1][0]
    queries = [(0, 3), (3, 6)]
    exact, _ = reference.varlen(packed, (queries, rows[0][1]), mask=causal)
    agree([out], [exact.unflatten(0, (2, 3)).transpose(1, 2)], [q, k, v])

    small = [x.detach().to(torch.float8_e4m3fn) for x in (k, v)]
    scales = KVScales(torch.rand(hk) + 0.5, torch.rand(hv) + 0.5)
    out = fa4flex.compile()(q, *small, paging=Paging(table, used), kv_scales=scales)
    wide = [x.double() * s.double()[:, None] for x, s in zip(small, (scales.k, scales.v), strict=True)]
    again = fa4flex.compile()(q, *wide, paging=Paging(table, used))
    assert close(out, again)


def test_output_functions_and_merge() -> None:
    """Results of parts of the keys merge to those of all."""
    qkv, gate = drawn((8, 4, 2), kv_len=40), leaf(2, 8, 20, 12)
    found = fa4flex.compile(mask=causal, output_mod=gated(gate))(*qkv)
    agree([found], [reference.attention(*qkv, mask=causal, output_mod=gated(gate))[0]], [*qkv, gate])
    q, k, v = qkv
    attn = fa4flex.compile()
    parts = [attn(q, k[:, :, cut], v[:, :, cut], return_lse=True) for cut in (slice(13), slice(13, 40))]
    out, lse = fa4flex.merge([part[0] for part in parts], [part[1] for part in parts])
    agree([out, lse], reference.attention(q, k, v), qkv)


@pytest.mark.parametrize("heads", APART, ids=str)
def test_through_flex_attention(heads: Heads) -> None:
    qkv = [x.detach().float().requires_grad_() for x in drawn(heads)]
    attn = fa4flex.compile(alibi, causal, backend="flex")
    found = attn(*qkv, return_lse=True)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    exact = reference.attention(*wide, alibi, causal)
    upstream = [torch.randn_like(x) for x in found]
    got = [*found, *torch.autograd.grad(found, qkv, upstream)]
    want = [*exact, *torch.autograd.grad(exact, wide, [x.double() for x in upstream])]
    assert all(close(x.double(), y, 1e-5) for x, y in zip(got, want, strict=True))


def test_derivatives_of_other_kinds() -> None:
    """Tangents, second derivatives and maps over batches, as the oracle has them."""
    qkv = drawn((4, 2, 1), 5, 7)
    attn = fa4flex.compile(alibi, causal)

    def exact(*qkv: Tensor) -> Tensor:
        return reference.attention(*qkv, alibi, causal)[0]

    plain = tuple(x.detach() for x in qkv)
    tangents = tuple(torch.randn_like(x) for x in plain)
    _, got = torch.func.jvp(attn, plain, tangents)
    eps = 1e-6
    ahead, behind = (
        exact(*(x + sign * eps * t for x, t in zip(plain, tangents, strict=True))) for sign in (1, -1)
    )
    assert close(got, (ahead - behind) / (2 * eps), 1e-6)
    upstream = torch.randn_like(got)

    def twice(function: Any) -> list[Tensor]:
        first = torch.autograd.grad(function(*qkv), qkv, upstream, create_graph=True)
        return list(torch.autograd.grad(sum(x.sin().sum() for x in first), qkv))

    assert all(close(x, y, 1e-8) for x, y in zip(twice(attn), twice(exact), strict=True))
    batched = torch.func.vmap(attn)(*(x.unsqueeze(1) for x in plain))
    assert close(batched.squeeze(1), exact(*plain))
    pulled = torch.func.grad(lambda *x: (attn(*x) * upstream).sum(), argnums=(0, 1, 2))(*plain)
    assert all(close(x, y) for x, y in zip(pulled, torch.autograd.grad(exact(*qkv), qkv, upstream)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs(dynamic: bool) -> None:
    attn = fa4flex.compile(alibi, causal)
    compiled = torch.compile(lambda *qkv: attn(*qkv), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for kv_len in (21, 34):
        qkv = drawn((8, 4, 2), kv_len=kv_len)
        agree([compiled(*qkv)], [reference.attention(*qkv, alibi, causal)[0]], qkv)


def test_exported_programs() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = fa4flex.compile(alibi, causal)(q, k, v)
            return out

    qkv = [x.detach() for x in drawn((8, 2, 4))]
    program = torch.export.export(Layer(), tuple(qkv))
    assert close(program.module()(*qkv), reference.attention(*qkv, alibi, causal)[0])


def test_launches_are_told_apart_by_heads_of_values() -> None:
    """Also where keys lie in pages, whose launches are those of pages with as many slots."""
    q = torch.zeros(2, 8, 3, 64, dtype=torch.bfloat16)
    table, used = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    keys = []
    for heads in ((4, 4), (4, 2), (2, 4)):
        pools = [torch.zeros(6, h, 16, 64, dtype=torch.bfloat16) for h in heads]
        sources: list[KeySource] = [Paged(*pools, table, used), Contiguous(*(x[:2] for x in pools))]
        keys += [key_of(Call(q, kv, (), None, NO_LENGTHS, (), 1.0, True, ("lse",))) for kv in sources]
    assert None not in keys and len(set(keys)) == 6


def two_maps(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """Differential attention as its paper writes it, one head after another; causal."""
    results = []
    for h in range(q.shape[1] // 2):
        maps = []
        for head in (2 * h, 2 * h + 1):
            of_k = k[:, head * k.shape[1] // q.shape[1]]
            scores = q[:, head] @ of_k.mT / q.shape[-1] ** 0.5
            maps.append(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1))
        of_v = v[:, 2 * h * v.shape[1] // q.shape[1]]
        results.append((maps[0] - factor[h] * maps[1]) @ of_v)
    return torch.stack(results, 1)


@pytest.mark.parametrize("heads", [(4, 4, 2), (8, 4, 2), (12, 2, 1)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_differential_attention(heads: Heads, layout: Any) -> None:
    """Two maps over one head of values, with gradients of the vectors that make the factor, too."""
    hq, hk, hv = heads
    maps = differential(layer=3)
    q, k, v = leaf(2, hq, 9, 4), leaf(2, hk, 9, 4), leaf(2, hv, 9, 8)
    vectors = [leaf(hq // 2, 4) for _ in range(4)]
    factor = maps.factor(*vectors)
    first, second = ((vectors[i] * vectors[i + 1]).sum(-1).exp() for i in (0, 2))
    exact = first - second + 0.8 - 0.6 * 2.718281828459045 ** (-0.6)
    assert close(factor, exact)
    maps.check(q, k, v)
    turn = layout == "bshd"
    given = [x.transpose(1, 2) if turn else x for x in (q, k, v)]
    out = maps.subtract(fa4flex.compile(mask=causal, layout=layout)(*given), factor, heads=1 + turn)
    out = out.transpose(1, 2) if turn else out
    agree([out], [two_maps(q, k, v, exact)], [q, k, v, *vectors])


def test_what_is_no_differential_attention() -> None:
    q, k, v = torch.zeros(1, 4, 3, 4), torch.zeros(1, 4, 3, 4), torch.zeros(1, 4, 3, 8)
    with pytest.raises(InputError, match="4 heads of values of width 8"):
        differential().check(q, k, v)
    with pytest.raises(InputError, match="an even number of heads"):
        differential().subtract(torch.zeros(1, 3, 2, 8), 0.5)
    with pytest.raises(InputError, match=r"differential\(layer=0\)"):
        differential(0)


def test_refusals() -> None:
    q, k, v = (x.detach().float() for x in drawn((8, 4, 2)))
    attn = fa4flex.compile()
    with pytest.raises(InputError, match="8 query heads with 3 heads of values"):
        attn(q, k, v[:, :1].expand(-1, 3, -1, -1))
    with pytest.raises(InputError, match="8 query heads with 3 heads of keys"):
        attn(q, k[:, :3], v)
    with pytest.raises(InputError, match="8 query heads with 3 KV heads"):
        attn(q, k[:, :3], v[:, :1].expand(-1, 3, -1, -1))
    with pytest.raises(InputError, match="4 heads of keys and 2 heads of values in flex_attention"):
        fa4flex.flex_attention(q, k, v, enable_gqa=True)
    pools = torch.zeros(4, 8, 2, 8), torch.zeros(4, 8, 1, 12)
    table, used = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="pools that differ in heads"):
        new = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 1, 12)
        fa4flex.append(*new, *pools, paging=Paging(table, used))
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(InputError, match="4 heads of keys and 2 heads of values in varlen_attn"):
        varlen_attn(*packed, cumulative([20]), cumulative([33]), 20, 33, enable_gqa=True)
    with pytest.raises(InputError, match="multiple of the key-value heads"):
        reference.attention(q, k, v[:, :1].expand(-1, 3, -1, -1))
