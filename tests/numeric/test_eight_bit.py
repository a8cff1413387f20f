"""Caches of 8 bits on a CPU: what they stand for with their scales, in every arrangement, exactly; gradients;
and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import InputError, KVScales, Paging, UnsupportedError, Varlen, reference
from fa4flex.primitives.kv_scales import E4M3
from fa4flex.variants import alibi, causal

B, H, HK, SQ, S, D = 3, 4, 2, 5, 40, 16


def cache() -> tuple[Tensor, Tensor]:
    return torch.randn(B, HK, S, D).to(E4M3), torch.randn(B, HK, S, D).to(E4M3)


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """[B, Hkv, S, D] in float64, from scales [Hkv], [B, Hkv] or [B, Hkv, S]."""
    if scale is None:
        return x.double()
    shape = {1: (1, HK, 1, 1), 2: (B, HK, 1, 1), 3: (B, HK, S, 1)}[scale.ndim]
    return x.double() * scale.double().view(shape)


SHAPES: dict[str, tuple[int, ...] | None] = {
    "none": None,
    "head": (HK,),
    "sequence": (B, HK),
    "token": (B, HK, S),
}


def scales_of(k_shape: str, v_shape: str) -> KVScales:
    return KVScales(*(None if SHAPES[x] is None else torch.rand(SHAPES[x]) + 0.1 for x in (k_shape, v_shape)))  # type: ignore[arg-type]


@pytest.mark.parametrize("per", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dense(per: str, dtype: torch.dtype) -> None:
    """Results are the oracle's in float64; with other queries, those of float32 maths, rounded once."""
    (k, v), scales = cache(), scales_of(per, "token")
    q = torch.randn(B, H, SQ, D).to(dtype)
    attn = fa4flex.compile(score_mod=alibi, mask=causal)
    out, lse = attn(q, k, v, kv_scales=scales, return_lse=True)
    exact, exact_lse = reference.attention(q, scaled(k, scales.k), scaled(v, scales.v), alibi, causal)
    assert out.dtype == dtype and lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    atol = 1e-12 if dtype == torch.float64 else 2**-8 * exact.abs().max().item()
    torch.testing.assert_close(out.double(), exact, atol=atol, rtol=0)
    torch.testing.assert_close(
        lse.double(), exact_lse, atol=1e-12 if dtype == torch.float64 else 1e-5, rtol=0
    )


def test_no_scales_are_ones() -> None:
    (k, v), q = cache(), torch.randn(B, H, SQ, D).bfloat16()
    ones = KVScales(torch.ones(HK), torch.ones(B, HK, S))
    assert torch.equal(fa4flex.attention(q, k, v), fa4flex.attention(q, k, v, kv_scales=ones))


def test_other_arrangements() -> None:
    """Layout bshd, packed sequences, padded ones, and pages, each with scales of its own shape."""
    (k, v), q = cache(), torch.randn(B, H, SQ, D)
    scales, attn = scales_of("token", "sequence"), fa4flex.compile(mask=causal)
    whole = attn(q, scaled(k, scales.k).float(), scaled(v, scales.v).float())

    def turned(x: Tensor) -> Tensor:
        return x.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3)

    assert scales.k is not None and scales.v is not None
    k_tokens = scales.k.transpose(1, 2)
    bshd = fa4flex.compile(mask=causal, layout="bshd")(
        q.transpose(1, 2), turned(k), turned(v), kv_scales=KVScales(k_tokens, scales.v)
    )
    torch.testing.assert_close(bshd.transpose(1, 2), whole)

    v_tokens = scales.v[:, None].expand(B, S, HK)
    cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (SQ, S))
    rows = (turned(x).view(torch.uint8).flatten(0, 1).view(E4M3) for x in (k, v))
    of_rows = KVScales(k_tokens.flatten(0, 1), v_tokens.flatten(0, 1))
    packed = attn(q.transpose(1, 2).flatten(0, 1), *rows, varlen=Varlen(cu_q, cu_k), kv_scales=of_rows)
    torch.testing.assert_close(packed.unflatten(0, (B, SQ)).transpose(1, 2), whole)

    page, used = 8, torch.tensor([S, 17, 8], dtype=torch.int32)
    order = torch.randperm(B * S // page)

    def paged(x: Tensor) -> Tensor:
        """[B, S, ...] in pages of any order."""
        bits = x.view(torch.uint8) if x.dtype == E4M3 else x
        pool = bits.flatten(0, 1).unflatten(0, (-1, page))
        return torch.empty_like(pool).index_copy_(0, order, pool).view(x.dtype)

    pools = paged(turned(k)), paged(turned(v))
    paging = Paging(order.view(B, -1).to(torch.int32), used)
    tokens = KVScales(paged(k_tokens.contiguous()), paged(v_tokens.contiguous()))
    padded = attn(q, k, v, varlen=Varlen(seqused_k=used), kv_scales=scales)
    torch.testing.assert_close(attn(q, *pools, paging=paging, kv_scales=tokens), padded)

    per_page = KVScales(torch.rand(B * S // page, HK) + 0.1, torch.rand(HK) + 0.1)
    wide = (
        pools[0].double() * per_page.k.double()[:, None, :, None],
        pools[1].double() * per_page.v.double()[:, None],
    )  # type: ignore[union-attr]
    exact = attn(q.double(), *wide, paging=paging)
    torch.testing.assert_close(attn(q.double(), *pools, paging=paging, kv_scales=per_page), exact)


def test_gradients_of_queries_and_scales() -> None:
    (k, v), q = cache(), torch.randn(B, H, SQ, D, dtype=torch.float64)
    scales = scales_of("token", "sequence")
    wanted = [x.requires_grad_() for x in (q, scales.k, scales.v) if x is not None]
    found = torch.autograd.grad(fa4flex.attention(q, k, v, kv_scales=scales, mask=causal).sum(), wanted)
    out, _ = reference.attention(q, scaled(k, scales.k), scaled(v, scales.v), None, causal)
    for a, b in zip(found, torch.autograd.grad(out.sum(), wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_by_torch() -> None:
    (k, v), q, scales = cache(), torch.randn(B, H, SQ, D), scales_of("token", "head")
    attn = fa4flex.compile(mask=causal)
    compiled = torch.compile(lambda *x: attn(*x[:3], kv_scales=KVScales(*x[3:])), backend="aot_eager")
    found = compiled(q, k, v, scales.k, scales.v)
    torch.testing.assert_close(found, attn(q, k, v, kv_scales=scales))


Q = torch.zeros(B, H, SQ, D)
K8 = torch.zeros(B, HK, S, D).to(E4M3)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "not a tensor": (lambda: KVScales(k=2.0), InputError, "k scales of .*\n.*float32 tensor"),  # type: ignore[arg-type]
    "float64": (lambda: KVScales(v=torch.ones(HK).double()), InputError, "v scales torch.float64"),
    "a number": (lambda: KVScales(v=torch.ones(())), InputError, "one to three dimensions"),
    "not scales": (
        lambda: fa4flex.attention(Q, K8, K8, kv_scales=torch.ones(HK)),  # type: ignore[arg-type]
        InputError,
        "kv_scales is a .*\n.*fa4flex.KVScales",
    ),
    "16-bit keys": (
        lambda: fa4flex.attention(Q, Q[:, :HK], Q[:, :HK], kv_scales=KVScales()),
        InputError,
        "both torch.float8_e4m3fn\n.*leave kv_scales out",
    ),
    "only keys": (lambda: fa4flex.attention(Q, K8, K8.float()), InputError, "quantise both alike"),
    "e5m2": (
        lambda: fa4flex.attention(Q, *(2 * [K8.to(torch.float8_e5m2)])),
        UnsupportedError,
        "float8_e5m2.*\n.*float8_e4m3fn.*\n.*dequantise",
    ),
    "e4m3 queries": (lambda: fa4flex.attention(Q.to(E4M3), K8, K8), UnsupportedError, "queries of bfloat16"),
    "gradients": (
        lambda: fa4flex.attention(Q, K8.clone().requires_grad_(), K8),
        UnsupportedError,
        "gradients of an 8-bit cache.*\n.*scales.*\n.*dequantise",
    ),
    "shape": (
        lambda: fa4flex.attention(Q, K8, K8, kv_scales=KVScales(torch.ones(B, HK, S + 1))),
        InputError,
        r"k scales of shape \[3, 2, 41\].*\n.*\[B, Hkv, Skv\]",
    ),
    "layout": (
        lambda: fa4flex.attention(
            *(x.transpose(1, 2) for x in (Q, K8, K8)), layout="bshd", kv_scales=KVScales(torch.ones(B, HK, S))
        ),
        InputError,
        r"\[B, Skv, Hkv\]",
    ),
    "lengths": (
        lambda: fa4flex.attention(Q, K8, K8[:, :, :-1], kv_scales=KVScales(torch.ones(HK))),
        InputError,
        "k and v differ in length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


def test_it_shows_what_it_holds() -> None:
    assert repr(KVScales(k=torch.ones(2))).startswith("KVScales(k=") and repr(KVScales()) == "KVScales()"
