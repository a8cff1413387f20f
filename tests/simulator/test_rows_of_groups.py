"""Query heads that share a KV head share tiles of queries too, on simulated Hopper GPUs: right in every
timing, and nothing found."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import cutlass
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from helpers import SMS, Width, no_worse, widths, worst
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Schedule, reference
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.fwd_sm90.rows import Rows, rows_of

TIMINGS = (("eager", 0), ("late", 1), ("random", 2))

Heads = tuple[int, int]
"""Query heads, and KV heads."""

CASES: dict[str, tuple[Heads, tuple[int, int], Width]] = {
    "2 heads": ((8, 4), (127, 130), 64),
    "2 heads, wide values apart": ((8, 4), (129, 33), (192, 128)),
    "4 heads, few rows in the last tile": ((8, 2), (193, 65), 128),
    "4 heads, one key": ((8, 2), (33, 1), 64),
    "4 heads, queries of one box": ((8, 2), (17, 129), 128),
    "8 heads": ((8, 1), (31, 129), 256),
    "16 heads": ((16, 1), (33, 127), 96),
    "16 heads, one tile": ((16, 1), (11, 100), 64),
}
"""Heads, queries and keys, widths."""

IN_EVERY_RUN = "4 heads, few rows in the last tile"


def drawn(
    heads: Heads, lengths: tuple[int, int], width: Width, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [batch, heads, length, width]. Rows of a head lie among those of others, with room between
    heads that is NaN: what is read or written there by mistake is seen."""
    batch, (wide, wide_v) = 2, widths(width)

    def apart(count: int, length: int, columns: int) -> Tensor:
        room = torch.full((batch, length, count + 1, columns + 8), math.nan, dtype=dtype)
        one = room[:, :, 1:, :columns]
        return one.copy_(torch.randn(one.shape)).transpose(1, 2)

    return apart(heads[0], lengths[0], wide), *(apart(heads[1], lengths[1], n) for n in (wide, wide_v))


def run(attn: Any, qkv: tuple[Tensor, ...], timing: str, seed: int, sms: int = SMS) -> tuple[Any, Any, Any]:
    """out, lse and the launch."""
    with torch.no_grad(), ptxsim.device("sm_90a", seed, timing, sms=sms) as gpu:
        out, lse = attn(*qkv, return_lse=True)
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    (result,) = gpu.results
    assert not result.remarks
    return out, lse, result


def judge(found: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """At most twice plain PyTorch's error, each head of each sequence being a draw."""
    q, k, v = qkv
    out, lse = found
    exact, exact_lse = reference.attention(*(x.double() for x in qkv))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    errors = [
        [worst(got[b, h], exact[b, h]) for b in range(q.shape[0]) for h in range(q.shape[1])]
        for got in (out, plain)
    ]
    no_worse(*errors)
    assert (lse.double() - exact_lse).abs().max() <= 1e-5 * max(1.0, exact_lse.abs().max().item())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == IN_EVERY_RUN else pytest.mark.slow) for x in CASES]
)
def test_rows_of_a_group(name: str) -> None:
    heads, lengths, width = CASES[name]
    qkv, attn = drawn(heads, lengths, width), fa4flex.compile()
    for timing, seed in TIMINGS:
        out, lse, _ = run(attn, qkv, timing, seed)
        judge((out, lse), qkv)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_there_are_as_many_tiles_as_rows_of_a_group_fill(layout: Any) -> None:
    """772 rows of each of 2 KV heads are 7 tiles of 128; 193 rows of each of 8 heads would be 2. In a
    dtype of its own: launches keep the number of multiprocessors that they were made for."""
    q, k, v = (x.contiguous() for x in drawn((8, 2), (193, 70), 128, torch.float16))
    qkv = q, k, v
    given = qkv if layout == "bhsd" else tuple(x.transpose(1, 2).contiguous() for x in qkv)
    out, lse, result = run(fa4flex.compile(layout=layout), given, "random", random.randrange(99), sms=132)
    assert result.shape.grid == (2 * 2 * 7, 1, 1)
    judge((out if layout == "bhsd" else out.transpose(1, 2), lse), qkv)


@cute.jit
def put_grid(
    found: cute.Tensor,
    q: cute.Tensor,
    kv: cute.Tensor,
    rows: cutlass.Constexpr[Rows],
    ordered: cutlass.Constexpr,
) -> None:
    grid = rows.grid(SimpleNamespace(q=q, k=kv, v=kv, loader=None), ordered)
    for i, number in enumerate((grid.tiles, grid.heads, grid.batch, grid.group)):
        found[i] = number


@pytest.mark.parametrize(
    ("group", "keys", "ordered", "grid"),
    [
        (1, 512 << 10, False, (2, 16, 32, 1)),
        (4, 512 << 10, False, (7, 4, 32, 1)),
        (1, 512 << 10, True, (2, 16, 32, 8)),
        (4, 512 << 10, True, (7, 4, 32, 2)),
        (4, 512 << 14, True, (7, 4, 32, 1)),
        (4, 512, True, (7, 4, 32, 128)),
    ],
)
def test_sections_have_as_many_heads_of_keys(
    group: int, keys: int, ordered: bool, grid: tuple[int, ...]
) -> None:
    """32 x 16:4 heads of 193 queries; L2 holds the keys and values of two, at 16 MiB each."""
    found = torch.zeros(4, dtype=torch.int32)
    q = torch.empty(32, 193, 16, 8, dtype=torch.bfloat16)
    kv = torch.empty(1, 1, 4, 8, dtype=torch.bfloat16).expand(32, keys, 4, 8)
    rows = rows_of(Config(64, 64, 128, 128, group=group))
    put_grid(from_dlpack(found), from_dlpack(q), from_dlpack(kv), rows, ordered)
    assert tuple(found.tolist()) == grid


@pytest.mark.slow
def test_tiles_in_another_order_and_from_a_counter() -> None:
    """Sections of the order have KV heads for pairs."""
    for schedule in (Schedule(order="longest_first"), Schedule(next_tile="counter", tile=(64, 64))):
        qkv = drawn((8, 2), (97, 70), 64)
        out, lse, _ = run(fa4flex.compile(schedule=schedule), qkv, "random", random.randrange(99))
        judge((out, lse), qkv)


@pytest.mark.slow
def test_calls_of_other_ratios_and_lengths_take_turns() -> None:
    """One Attention: kernels are made for a ratio, and serve all lengths of it."""
    attn = fa4flex.compile()
    calls = [
        ((8, 2), (40, 70)),
        ((8, 4), (40, 70)),
        ((8, 2), (41, 70)),
        ((8, 8), (40, 33)),
        ((8, 4), (90, 9)),
    ]
    for heads, lengths in (*calls, *calls):
        qkv = drawn(heads, lengths, 64)
        out, lse, _ = run(attn, qkv, "random", random.randrange(99))
        judge((out, lse), qkv)
