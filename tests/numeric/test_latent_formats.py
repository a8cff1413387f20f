"""Latent rows as bytes: what each format stands for, written byte by byte here, and attention over it."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from latent_bytes import row_of
from torch import Tensor

import fa4flex
from fa4flex import InputError, Latent, LatentFormat, Paging, UnsupportedError, reference
from fa4flex.variants import alibi, causal

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
B, H, SQ, S, PAGE, SCALE = 2, 4, 2, 21, 8, 192**-0.5
FORMATS = {
    "v3.2": LatentFormat.DEEPSEEK_V3_2,
    "v4": LatentFormat.DEEPSEEK_V4,
    "per tensor": LatentFormat.PER_TENSOR,
}
BYTES = {"v3.2": 656, "v4": 584, "per tensor": 576}
VALUES = {"v3.2": 512, "v4": 512, "per tensor": 512}


def pool_of(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """A pool of pages of random rows [pages, PAGE, 1, bytes], its table, and its rows in float64
    [B, S, 1, width]."""
    columns, size = -(-S // PAGE), BYTES[name]
    table = torch.randperm(2 * columns + 1)[: 2 * columns].view(B, columns)
    pool = torch.zeros(2 * columns + 1, PAGE * size, dtype=torch.uint8)
    rows = []
    for b in range(B):
        for token in range(S):
            page, slot = int(table[b, token // PAGE]), token % PAGE
            data, scales = bytes_of(name)
            in_row = 576 if name == "v4" else size
            pool[page, slot * in_row : slot * in_row + len(data)] = torch.tensor(
                list(data), dtype=torch.uint8
            )
            if name == "v4":
                at = PAGE * 576 + slot * 8
                pool[page, at : at + 8] = torch.tensor(list(scales), dtype=torch.uint8)
            rows.append(row_of(name, data, scales))
    width = len(rows[0])
    return pool.view(-1, PAGE, 1, size), table, torch.tensor(rows, dtype=torch.float64).view(B, S, 1, width)


def bytes_of(name: str) -> tuple[bytes, bytes]:
    """Bytes of a random row, and of its scales where these are apart."""
    count = {"v3.2": 512, "v4": 448, "per tensor": 576}[name]
    codes = torch.randn(count).to(E4M3).view(torch.uint8)
    rope = torch.randn(64).to(BF16).view(torch.uint8)
    if name == "v3.2":
        factors = struct.pack("<4f", *(torch.rand(4) + 0.2).tolist())
        return bytes(codes.tolist()) + factors + bytes(rope.tolist()), b""
    if name == "v4":
        factors = bytes(torch.randint(124, 130, (7,)).tolist()) + b"\xff"  # the last byte is padding
        return bytes(codes.tolist()) + bytes(rope.tolist()), factors
    return bytes(codes.tolist()), b""


def test_bytes_of_a_row() -> None:
    assert {name: form.row_bytes for name, form in FORMATS.items()} == BYTES
    assert [form.width for form in FORMATS.values()] == [576, 512, 576]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_attention_over_pages(name: str, dtype: torch.dtype) -> None:
    (pool, table, rows), used = pool_of(name), torch.tensor([S, 10])
    q = torch.randn(B, H, SQ, rows.shape[-1]).to(dtype)
    scale = torch.tensor(0.375) if name == "per tensor" else None
    latent = Latent(pool, VALUES[name], 64, FORMATS[name], scale)
    out, lse = fa4flex.attention(
        q, latent, score_mod=alibi, mask=causal, scale=SCALE, paging=Paging(table, used), return_lse=True
    )
    for b, n in enumerate(used.tolist()):
        k = rows[b : b + 1, :n].transpose(1, 2) * (1 if scale is None else 0.375)
        truth, truth_lse = reference.attention(
            q[b : b + 1].double(), k, k[..., : VALUES[name]].clone(), alibi, causal, scale=SCALE
        )
        close = 1e-12 if dtype == torch.float64 else 2**-7 * truth.abs().max().item()
        torch.testing.assert_close(out[b : b + 1].double(), truth, atol=close, rtol=0)
        torch.testing.assert_close(
            lse[b : b + 1].double(), truth_lse, atol=max(1e-4 * (dtype == BF16), 1e-12), rtol=0
        )


@pytest.mark.parametrize("name", ("v3.2", "per tensor"))
def test_other_arrangements(name: str) -> None:
    """Contiguous and packed rows are those of pages, and code that torch.compile traces gives the same."""
    pool, table, rows = pool_of(name)
    cache = torch.stack([pool[table[b]].flatten(0, 1)[:S] for b in range(B)])
    q = torch.randn(B, H, SQ, 576, dtype=torch.float64)
    attn = fa4flex.compile(mask=causal, scale=SCALE)

    def attend(q: Tensor, cache: Tensor) -> Tensor:
        return attn(q, Latent(cache, format=FORMATS[name]))

    out = attend(q, cache)
    torch.testing.assert_close(out, attn(q, Latent(rows)))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, cache), out)
    varlen = fa4flex.Varlen(torch.arange(B + 1) * SQ, torch.arange(B + 1) * S)
    packed = attn(
        q.transpose(1, 2).flatten(0, 1), Latent(cache.flatten(0, 1), format=FORMATS[name]), varlen=varlen
    )
    torch.testing.assert_close(packed.unflatten(0, (B, SQ)).transpose(1, 2), out)


def test_a_format_of_ones_own() -> None:
    """Elements of 16 bits, scales of groups of 4, padding; and the scale's gradient."""
    form = LatentFormat(((E4M3, 8, torch.float32, 4), (torch.float16, 4)), pad=4)
    assert (form.width, form.row_bytes) == (12, 8 + 8 + 8 + 4)
    codes, factors, rope = (
        torch.randn(1, 5, 1, 8).to(E4M3),
        torch.rand(1, 5, 1, 2),
        torch.randn(1, 5, 1, 4).half(),
    )
    parts = [codes, factors, rope, torch.randint(0, 256, (1, 5, 1, 4)).to(torch.uint8)]
    cache = torch.cat([x.view(torch.uint8) for x in parts], -1)
    rows = torch.cat((codes.double() * factors.double().repeat_interleave(4, -1), rope.double()), -1)
    q, scale = torch.randn(1, 2, 1, 12, dtype=torch.float64), torch.tensor([1.5], requires_grad=True)
    out = fa4flex.attention(q, Latent(cache, 8, 4, form, scale), scale=0.5)
    other = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    k = (rows * other).transpose(1, 2)
    truth, _ = reference.attention(q, k, k[..., :8], scale=0.5)
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
    (found,) = torch.autograd.grad(out.sum(), scale)
    torch.testing.assert_close(
        found.double().sum(), torch.autograd.grad(truth.sum(), other)[0], atol=1e-6, rtol=1e-6
    )


def test_nan_scales_are_nan() -> None:
    pool, table, _ = pool_of("v4")
    pool.view(-1, PAGE * 584)[:, PAGE * 576 :] = 255
    latent = Latent(pool, 512, 64, LatentFormat.DEEPSEEK_V4)
    q = torch.randn(B, H, SQ, 512)
    out = fa4flex.attention(q, latent, scale=SCALE, paging=Paging(table, torch.tensor([S, S])))
    assert out.isnan().any(-1).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_computes_with_what_bytes_stand_for(name: str) -> None:
    import ptxsim

    (pool, table, rows), used = pool_of(name), torch.tensor([S, 10], dtype=torch.int32)
    q = torch.randn(B, 2, 1, rows.shape[-1]).bfloat16()
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    latent, paging = Latent(pool, 512, 64, FORMATS[name]), Paging(table.int(), used)
    with torch.no_grad(), ptxsim.device("sm_100a"):
        out = attn(q, latent, paging=paging)
    truth = attn(q.double(), latent, paging=paging)
    assert (out.double() - truth).abs().max().item() <= 4 * 2**-8 * truth.abs().max().item()


def test_what_does_not_fit() -> None:
    cache = torch.zeros(1, 4, 1, 656, dtype=torch.uint8)
    v32, v4 = LatentFormat.DEEPSEEK_V3_2, LatentFormat.DEEPSEEK_V4
    wrong: dict[str, Any] = {
        "656 bytes": lambda: Latent(cache[..., :600], format=v32),
        "torch.uint8": lambda: Latent(cache.view(torch.int8), format=v32),
        "a scale of": lambda: Latent(cache, format=v32, scale=2.0),  # type: ignore[arg-type]
        "a scale of rows that are no bytes": lambda: Latent(torch.zeros(1, 4, 1, 576), scale=torch.ones(1)),
        "latent rows of 512 columns": lambda: Latent(cache[..., :584], 448, 32, v4),
        "in whole groups": lambda: LatentFormat(((E4M3, 10, torch.float32, 4),)),
        "0 segments": lambda: LatentFormat(()),
        "columns=64.5": lambda: LatentFormat(((torch.bfloat16, 64.5),)),  # type: ignore[arg-type]
        "pad=1.5": lambda: LatentFormat(((torch.bfloat16, 64),), pad=1.5),  # type: ignore[arg-type]
        "of shape \\[\\]": lambda: Latent(torch.tensor(1, dtype=torch.uint8), format=v32),
    }
    for told, make in wrong.items():
        with pytest.raises(InputError, match=told):
            make()
    with pytest.raises(UnsupportedError, match="without a format"):
        Latent(cache)
    q = torch.randn(1, 2, 1, 512)
    with pytest.raises(UnsupportedError, match="without pages"):
        fa4flex.attention(q, Latent(cache[..., :584], 512, 64, v4), scale=1.0)
    with pytest.raises(InputError, match="q of 512 columns, latent rows of 576"):
        fa4flex.attention(q, Latent(cache, format=v32), scale=1.0)
