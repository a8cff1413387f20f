"""Query heads that share a KV head, and tiles of queries with it, on a GPU: against the fp64 oracle.

pytest tests/numeric/test_cuda_rows_of_groups.py -n 8
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import DEVICE, F16, ON_A_GPU, Sizes, check, compiled, judge, judge_exact_lse, plain, run
from torch import Tensor

from fa4flex import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.skipif(DEVICE is None, reason="needs a CUDA device of compute capability 9.0"),
]

HEADS = ((16, 8), (16, 4), (8, 1), (16, 1), (64, 1), (6, 2))
"""Query heads, and KV heads; of groups of 3 and of 64, each head has tiles of its own."""

DIMS = ((64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
LENGTHS = ((1, 300), (31, 129), (33, 1), (65, 64), (127, 128), (129, 257), (1537, 333))
"""Queries and keys; of the last, rows of a group end a few rows into a tile."""


@pytest.mark.parametrize("dims", DIMS, ids=lambda d: f"d{d[0]}v{d[1]}")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_lengths(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    for q_len, kv_len in LENGTHS:
        check(Sizes(2, *heads, q_len, kv_len).wide(*dims), {})


@pytest.mark.skipif(not ON_A_GPU, reason="is about multiprocessors")
def test_more_tiles_than_multiprocessors() -> None:
    for dtype in (torch.bfloat16, F16):
        check(Sizes(4, 16, 4, 1537, 1537, 128, 128, dtype), {})


def tokens_first(sizes: Sizes) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in sizes.qkv()]


def among_others(sizes: Sizes) -> list[Tensor]:
    """Every second head, some rows and half of the columns of larger tensors."""
    return [
        torch.randn(x.shape[0], 2 * x.shape[1], x.shape[2] + 9, 2 * x.shape[3], dtype=x.dtype)[
            :, ::2, 5 : 5 + x.shape[2], : x.shape[3]
        ]
        for x in sizes.qkv()
    ]


def one_projection(sizes: Sizes) -> list[Tensor]:
    """q, k and v as slices of one tensor [b, s, q heads and both kinds of KV heads, d]."""
    heads = sizes.heads, sizes.kv_heads, sizes.kv_heads
    fused = torch.randn(sizes.batch, sizes.q_len, sum(heads), sizes.dim, dtype=sizes.dtype)
    return [x.transpose(1, 2) for x in fused.split(heads, 2)]


@pytest.mark.parametrize("form", [tokens_first, among_others, one_projection])
def test_strides(form: Any) -> None:
    sizes = Sizes(2, 8, 2, 330, 330).wide(128)
    q, k, v = form(sizes)
    check(sizes, {}, (q, k, v))


def test_ratios_and_lengths_take_turns() -> None:
    """Calls of one Attention, by the ways that repeated calls take."""
    attn = compiled()
    for _ in range(4):
        for heads, lengths in (
            ((8, 2), (300, 70)),
            ((8, 4), (300, 70)),
            ((8, 2), (301, 70)),
            ((8, 8), (9, 70)),
        ):
            q, k, v = Sizes(2, *heads, *lengths).qkv()
            for _ in range(3):
                found, exact = run(attn, q, k, v), reference.attention(q, k, v)
                judge(found, exact, plain(q, k, v, {}))
                judge_exact_lse(found[1], exact[1])


@pytest.mark.skipif(not ON_A_GPU, reason="captures a CUDA graph")
def test_a_graph_replays_with_new_numbers() -> None:
    attn = compiled()
    q, k, v = Sizes(2, 8, 2, 193, 300).wide(128).qkv()
    with torch.no_grad():
        attn(q, k, v, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attn(q, k, v, return_lse=True)
        for _ in range(3):
            for x in (q, k, v):
                x.normal_()
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            judge((out, lse), reference.attention(q, k, v), plain(q, k, v, {}))
