"""Keys and values that differ in heads, on a GPU: outputs, gradients, decoding and pages, against the oracle.

pytest tests/numeric/test_cuda_kv_heads.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_cases import plain
from cuda_cases import DEVICE
from helpers import worst
from torch import Tensor

import fa4flex
from fa4flex import Paging, reference
from fa4flex.variants import alibi, causal, sliding_window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.skipif(DEVICE is None, reason="needs a CUDA device of compute capability 9.0"),
]

HEADS = ((8, 4, 2), (8, 2, 4), (8, 8, 1), (14, 7, 2), (32, 16, 8), (12, 4, 6))
"""Heads of queries, of keys and of values."""

DIMS = ((64, 64), (64, 128), (128, 128), (192, 128), (256, 256))
COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "alibi, window": {"mask": sliding_window(70), "score_mod": alibi},
}


def drawn(heads: tuple[int, int, int], lengths: tuple[int, int], dims: tuple[int, int]) -> list[Tensor]:
    sizes = zip(heads, (lengths[0], lengths[1], lengths[1]), (dims[0], *dims), strict=True)
    return [torch.randn(2, *size, dtype=torch.bfloat16) for size in sizes]


def judged(found: list[Tensor], same: list[Tensor], exact: list[Tensor], where: str) -> None:
    """At most twice the error of plain PyTorch, or a rounding of the largest."""
    for i, (x, y, z) in enumerate(zip(found, same, exact, strict=True)):
        want = z.to(x.device)
        limit = max(2 * worst(y, want)[0], 2**-8 * want.abs().max().item())
        assert worst(x, want)[0] <= limit, f"{where}: result {i}"


def passes(attend: Any, qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Output and gradients."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_both_passes(heads: tuple[int, int, int], dims: tuple[int, int]) -> None:
    for (name, composition), lengths in zip(
        COMPOSED.items(), ((130, 300), (257, 257), (65, 40)), strict=True
    ):
        qkv = drawn(heads, lengths, dims)
        dout = torch.randn(2, heads[0], lengths[0], dims[1], dtype=torch.bfloat16)
        found = passes(fa4flex.compile(**composition), qkv, dout)
        same = passes(lambda *qkv, c=composition: plain(c, *qkv)[0], qkv, dout)
        with torch.device("cpu"):
            wide = [x.cpu().double() for x in qkv]
            exact = passes(lambda *x, c=composition: reference.attention(*x, **c)[0], wide, dout.cpu())
        judged(found, same, exact, f"{name}, {heads}, {dims}")


def in_pages(x: Tensor, pages: int, page_size: int) -> Tensor:
    """Keys or values [B, H, S, D] as pages [B * pages, page_size, H, D], one sequence after another."""
    rows = x.transpose(1, 2)
    more = rows.new_zeros(rows.shape[0], pages * page_size - rows.shape[1], *rows.shape[2:])
    return torch.cat((rows, more), 1).unflatten(1, (pages, page_size)).flatten(0, 1)


@pytest.mark.parametrize("page_size", [0, 1, 16, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decoding(heads: tuple[int, int, int], page_size: int) -> None:
    """Contiguous keys, and pages of few and of many."""
    q, k, v = drawn(heads, (1, 900), (64, 64))
    attn, paging, given = fa4flex.compile(mask=causal), None, [k, v]
    if page_size:
        pages = -(-900 // page_size)
        order = torch.randperm(2 * pages)
        given = [in_pages(x, pages, page_size)[order.argsort()] for x in (k, v)]
        used = torch.tensor([900, 900], dtype=torch.int32)
        paging = Paging(order.view(2, pages).to(torch.int32), used)
    with torch.no_grad():
        out = attn(q, *given, paging=paging)
        same = plain({"mask": causal}, q, k, v)[0]
    with torch.device("cpu"):
        exact = reference.attention(q.cpu(), k.cpu(), v.cpu(), mask=causal)[0]
    judged([out], [same], [exact], f"{heads}, pages of {page_size}")
