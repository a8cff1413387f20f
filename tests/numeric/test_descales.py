"""Tensors of 8 bits that others rounded: what they stand for with scales of all kinds, and attention."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from helpers import cumulative
from torch import Tensor

import fa4flex
from fa4flex import Descales, InputError, UnsupportedError, Varlen, reference
from fa4flex.variants import causal

E4M3 = torch.float8_e4m3fn
BATCH, HEADS, KV_HEADS, ROWS, KEYS = 2, 4, 2, 70, 300


def codes(dtype: torch.dtype = torch.int8, tokens: int | None = None) -> list[Tensor]:
    """q, k, v [B, H, S, D] of random codes, or packed [T, H, D]; v of e4m3."""

    def drawn(heads: int, length: int, width: int, kind: torch.dtype) -> Tensor:
        shape = (BATCH, heads, length, width) if tokens is None else (tokens, heads, width)
        if kind == torch.int8:
            return torch.randint(-127, 128, shape).to(torch.int8)
        return (torch.randn(shape) * 4).to(kind)

    return [drawn(HEADS, ROWS, 64, dtype), drawn(KV_HEADS, KEYS, 64, dtype), drawn(KV_HEADS, KEYS, 32, E4M3)]


def scale(*shape: int) -> Tensor:
    return 0.01 * torch.exp(torch.randn(shape))


def by_token(given: Any, heads: int, length: int, block: int | None) -> Tensor:
    """A scale of each token [B, H, S], by the definition of each shape."""
    result = torch.empty(BATCH, heads, length)
    for b, h, s in itertools.product(range(BATCH), range(heads), range(length)):
        if not isinstance(given, Tensor):
            result[b, h, s] = 1.0 if given is None else given
            continue
        at = (
            h if given.ndim == 0 or given.shape[min(given.ndim, 2) - 1] == heads else h // (HEADS // KV_HEADS)
        )
        where = (), (at,), (b, at), (b, at, s if block is None else s // block)
        result[b, h, s] = given[where[given.ndim]]
    return result


def shapes(heads: int, length: int, block: int | None) -> list[Any]:
    last = length if block is None else -(-length // block)
    return [None, 0.02, scale(), scale(heads), scale(BATCH, heads), scale(BATCH, heads, last)]


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("block", [None, 16, 128, 256])
def test_each_granularity(dtype: torch.dtype, block: int | None, seed: int) -> None:
    """Nothing is rounded again: numbers are the codes times their scales, to float32's last digit."""
    q, k, v = codes(dtype)
    layout: Any = random.choice(["bhsd", "bshd"])
    for n in range(6):
        of_q = random.choice([*shapes(HEADS, ROWS, block), scale(KV_HEADS), scale(BATCH, KV_HEADS)])
        of_k, of_v = shapes(KV_HEADS, KEYS, block)[n], random.choice(shapes(KV_HEADS, KEYS, block))
        given = [q, k, v] if layout == "bhsd" else [x.transpose(1, 2) for x in (q, k, v)]
        made = Descales(of_q, of_k, of_v, block).quantized(*given, layout=layout)
        exact = made.dequantize()
        for x, one, found in ((q, of_q, exact.q), (k, of_k, exact.k), (v, of_v, exact.v)):
            each = by_token(one, x.shape[1], x.shape[2], block)
            expected = x.float() * each[..., None]
            torch.testing.assert_close(found if layout == "bhsd" else found.transpose(1, 2), expected)
        assert exact.bias is None
        out, lse = fa4flex.attention(made, mask=causal, layout=layout, return_lse=True)
        of = [x if layout == "bhsd" else x.transpose(1, 2) for x in exact[:3]]
        wanted, of_rows = reference.attention(*of, mask=causal)
        assert out.dtype == torch.bfloat16
        found = out if layout == "bhsd" else out.transpose(1, 2)
        torch.testing.assert_close(found.double(), wanted, atol=2**-7 * float(wanted.abs().max()), rtol=2**-7)
        torch.testing.assert_close(lse.double(), of_rows, atol=1e-4, rtol=1e-5)


def test_scales_of_tiles_stay_those_of_tiles(seed: int) -> None:
    """Kernels want a scale of 128 keys, of channels, and values transposed."""
    q, k, v = codes()
    for of_k in (None, 0.5, scale(KV_HEADS), scale(BATCH, KV_HEADS)):
        made = Descales(k=of_k, v=of_k).quantized(q, k, v)
        assert made.k_scales == "tile" and made.k_scale.shape == (BATCH, KV_HEADS, 3)
        assert made.v_scales == "channel" and made.v.shape == (BATCH, KV_HEADS, 32, 384)
    made = Descales(k=scale(BATCH, KV_HEADS, 2), block=256).quantized(q, k, v)
    assert made.k_scales == "tile" and torch.equal(made.k_scale[..., 0], made.k_scale[..., 1])
    made = Descales(k=scale(BATCH, KV_HEADS, 5), block=64).quantized(q, k, v)
    assert made.k_scales == "token" and made.k_scale.shape == (BATCH, KV_HEADS, KEYS)
    made = Descales(v=scale(BATCH, KV_HEADS, KEYS)).quantized(q, k, v)
    assert made.v_scales == "token" and made.v.shape == v.shape


@pytest.mark.parametrize("block", [None, 16, 128])
def test_packed_tokens(block: int | None, seed: int) -> None:
    """Blocks start with each sequence; each sequence is what it is alone. Padding may hold NaN."""
    lengths = [40, 0, 130, 60]
    cu, tokens = cumulative(lengths), sum(lengths)
    used = torch.tensor([40, 0, 130, 33], dtype=torch.int32)
    q, k, v = codes(E4M3, tokens)
    last = tokens if block is None else sum(-(-n // block) for n in lengths) + 1
    for of_k in (scale(KV_HEADS), scale(4, KV_HEADS) if block is None else 0.1, scale(KV_HEADS, last)):
        of_q, of_v = scale(HEADS), scale(KV_HEADS, last)
        k8, v8 = (x.view(torch.uint8).clone() for x in (k, v))
        k8[203:], v8[203:] = 0x7F, 0x7F  # NaN
        made = Descales(of_q, of_k, of_v, block).quantized(
            q, k8.view(E4M3), v8.view(E4M3), varlen=Varlen(cu, seqused_k=used), dtype=torch.float32
        )
        assert made.dequantize().k.isfinite().all() and made.dequantize().v.isfinite().all()
        out = fa4flex.attention(made)
        first = 0
        for n, (a, b) in enumerate(itertools.pairwise(cu.tolist())):
            end, size = a + int(used[n]), block or 1
            start = a if block is None else first
            first += -(-(b - a) // size)

            def of(one: Any, x: Tensor, start: int = start, a: int = a, end: int = end, n: int = n) -> Tensor:
                rows = x[a:end].float()
                if not isinstance(one, Tensor) or one.ndim < 2:
                    return rows * (one if not isinstance(one, Tensor) else one[:, None])
                if one.shape == (4, KV_HEADS) and block is None:
                    return rows * one[n][:, None]
                each = one[:, start + torch.arange(end - a) // (block or 1)]
                return rows * each.T[..., None]

            if a == b:
                continue
            whole = (q[a:b].float() * of_q[:, None]).transpose(0, 1)[None]
            keys, values = (x.transpose(0, 1)[None] for x in (of(of_k, k), of(of_v, v)))
            wanted = reference.attention(whole, keys, values)[0][0].transpose(0, 1)
            torch.testing.assert_close(out[a:b].double(), wanted, atol=1e-5, rtol=1e-4)


def test_values_of_16_bits_stay(seed: int) -> None:
    q, k, v = codes()
    wide = torch.randn(v.shape).bfloat16()
    made = Descales(q=0.01, k=0.01).quantized(q, k, wide)
    assert made.pv == "bfloat16" and torch.equal(made.dequantize().v, wide.float())
    learned = wide.float().requires_grad_()
    out = fa4flex.attention(Descales(q=0.01, k=0.01).quantized(q, k, learned, dtype=torch.float32))
    exact = wide.double().requires_grad_()
    wanted = reference.attention(q.double() * 0.01, k.double() * 0.01, exact)[0]
    mine, theirs = (torch.autograd.grad(o.sin().sum(), x)[0] for o, x in ((out, learned), (wanted, exact)))
    torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-4)


def test_scales_are_read_at_each_call(seed: int) -> None:
    q, k, v = codes()
    of_k, of_v = scale(BATCH, KV_HEADS), scale(BATCH, KV_HEADS, KEYS)
    attn = fa4flex.compile()
    for _ in range(3):
        made = Descales(0.02, of_k, of_v).quantized(q, k, v, dtype=torch.float32)
        wanted = reference.attention(q * 0.02, k * of_k[..., None, None], v.float() * of_v[..., None])[0]
        torch.testing.assert_close(attn(made).double(), wanted, atol=1e-4, rtol=1e-4)
        made.v_scale.mul_(2)  # type: ignore[union-attr]
        torch.testing.assert_close(attn(made).double(), 2 * wanted, atol=2e-4, rtol=1e-4)
        of_k.mul_(1.5), of_v.neg_()


def test_a_nan_is_nan(seed: int) -> None:
    q, k, v = codes(E4M3)
    v.view(torch.uint8)[0, 0, 5] = 0x7F
    out = fa4flex.attention(Descales(0.1, 0.1, 0.1).quantized(q, k, v))
    assert out[0, :2].isnan().all() and not out[0, 2:].isnan().any() and not out[1].isnan().any()
    assert math.isfinite(float(out[1].float().sum()))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda q, k, v: Descales(q="1"), InputError, "a number, a float32 tensor"),
        (lambda q, k, v: Descales(k=torch.ones(2).double()), InputError, "float32"),
        (lambda q, k, v: Descales(block=0), InputError, "number of tokens"),
        (lambda q, k, v: Descales(k=-0.5), InputError, "no scale below 0"),
        (
            lambda q, k, v: Descales(q=torch.tensor([0.5, 0.5, -0.5, 1.0])).quantized(q, k, v),
            InputError,
            "q descale of -0.5",
        ),
        (lambda q, k, v: Descales(k=torch.ones(3)).quantized(q, k, v), InputError, "2 heads"),
        (lambda q, k, v: Descales(k=torch.ones(2, 2, 7)).quantized(q, k, v), InputError, "block="),
        (
            lambda q, k, v: Descales(k=torch.ones(2, 2, 6), block=64).quantized(q, k, v),
            InputError,
            "block",
        ),
        (lambda q, k, v: Descales().quantized(q, k.to(E4M3), v), UnsupportedError, "no tensor core"),
        (lambda q, k, v: Descales().quantized(q.bfloat16(), k, v), UnsupportedError, "kv_scales"),
        (lambda q, k, v: Descales().quantized(q, k, v.to(torch.int8)), UnsupportedError, "17 %"),
        (lambda q, k, v: Descales().quantized(q, k, v.to(torch.float8_e5m2)), UnsupportedError, "bfloat16"),
        (lambda q, k, v: Descales(v=2.0).quantized(q, k, v.bfloat16()), InputError, "leave v"),
        (
            lambda q, k, v: Descales().quantized(q[..., :40], k[..., :40], v),
            UnsupportedError,
            "multiple of 32",
        ),
        (lambda q, k, v: Descales().quantized(q, k[:, :, 1:], v), InputError, "as many tokens"),
        (
            lambda q, k, v: Descales(q=torch.ones(4, requires_grad=True)).quantized(q, k, v),
            UnsupportedError,
            "detach it",
        ),
        (lambda q, k, v: Descales().quantized(q, k, v, dtype=torch.float64), InputError, "dtype"),
    ],
)
def test_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(*codes())


def test_repr() -> None:
    assert repr(Descales(0.5, v=torch.ones(2), block=64)).startswith("Descales(q=0.5, v=")
    assert repr(Descales()) == "Descales()"


def test_fewer_blocks_than_sequences_have() -> None:
    q, k, v = (torch.zeros(300, heads, 64, dtype=torch.int8) for heads in (4, 2, 2))
    varlen = Varlen(torch.tensor([0, 10, 200, 300], dtype=torch.int32))
    assert Descales(k=torch.ones(2, 6), block=64).quantized(q, k, v.to(E4M3), varlen=varlen) is not None
    with pytest.raises(InputError, match="of 6 blocks of 64 tokens"):
        Descales(k=torch.ones(2, 5), block=64).quantized(q, k, v.to(E4M3), varlen=varlen)
