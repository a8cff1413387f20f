"""Gradients on the GPU against the fp64 oracle: every variant and mod of attention-gym, widths, heads,
lengths, repeats.

pytest tests/numeric/test_cuda_backward.py -n 8        compiling the kernels takes most of the time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import captured_cases
import cuda_gym
import pytest
import torch
from cuda_cases import (
    DEVICE,
    FEW,
    ON_A_GPU,
    VARIANTS,
    Composition,
    Draw,
    Sizes,
    check_gradients,
    compiled,
    cumulative,
    gradients,
    judge_gradients,
    oracle_takes,
    plain,
    plain_packed,
)
from torch import Tensor

from fa4flex import Schedule, reference
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import blockwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("on_the_device", "either_steps"),
    pytest.mark.skipif(DEVICE is None, reason="needs a CUDA device of compute capability 9.0"),
]
DRAWS = [pytest.param(draws[0], id=name) for name, draws in VARIANTS.items()]
BY_NAME = [pytest.param(draw, id=name) for name, draw in FEW.items()]
REPEATS = 1000 if ON_A_GPU else 3
LENGTHS = [(1, 1), (63, 200), (128, 129), (300, 64)]


def check_captured(
    name: str, sizes: Sizes, composition: Composition, leaves: list[Tensor], by: Any = captured_cases.plain
) -> None:
    """Gradients of captured tensors too; `by` is plain PyTorch, whose error is the measure."""
    qkv, attn = sizes.qkv(), compiled(**composition)
    rows = qkv[0].shape[:3]
    upstream = torch.randn(*rows, sizes.dim_v, dtype=sizes.dtype), torch.randn(rows)
    found = captured_cases.gradients(lambda *x: attn(*x, return_lse=True), qkv, leaves, upstream)
    captured_cases.judge(name, found, *captured_cases.measured(composition, qkv, leaves, upstream, by))


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("draw", DRAWS)
def test_variant(draw: Draw, dim: int) -> None:
    if draw.sizes(Sizes().wide(dim)).dim != dim != 64:
        pytest.skip("this variant has head dimensions of its own")
    sizes = draw.sizes(Sizes().wide(dim))
    check_gradients(sizes, draw.make(sizes))


@cuda_gym.installed
@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("key", cuda_gym.KEYS, ids=str)
def test_gym(key: cuda_gym.Key, dim: int) -> None:
    composition, _ = cuda_gym.composed(key)
    check_gradients(cuda_gym.sizes_of(key).wide(dim), composition)


@cuda_gym.installed
@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("key", cuda_gym.LEARNED, ids=str)
def test_learned_tables_of_gym(key: cuda_gym.Key, dim: int) -> None:
    composition, tables = cuda_gym.composed(key)
    for x in tables:
        x.requires_grad_()

    def by_pairs(known: Composition, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        return plain(*qkv, known)  # dot products of MLA take one pair at a time

    check_captured(key[1], cuda_gym.sizes_of(key).wide(dim), composition, tables, by_pairs)


@pytest.mark.parametrize(
    "dims", [(d, d) for d in (40, 80, 96, 112, 160, 192, 256)] + [(192, 128), (128, 256)], ids=str
)
@pytest.mark.parametrize("draw", BY_NAME)
def test_widths(draw: Draw, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them by kernels."""
    monkeypatch.delattr(blockwise, "backward_on_gpu")
    sizes = draw.sizes(Sizes().wide(*dims))
    check_gradients(sizes, draw.make(sizes))


@pytest.mark.parametrize("dims", [64, 96, 128, (128, 64)], ids=str)
@pytest.mark.parametrize("draw", BY_NAME)
def test_few_tiles(draw: Draw, dims: int | tuple[int, int]) -> None:
    """Half of the multiprocessors would be idle: kernels have 64 keys per block."""
    wide = dims if isinstance(dims, tuple) else (dims, dims)
    sizes = draw.sizes(Sizes(batch=1, heads=4, kv_heads=2).wide(*wide))
    check_gradients(sizes, draw.make(sizes))


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (7, 1), (8, 8)], ids=lambda h: f"{h[0]}-{h[1]}")
@pytest.mark.parametrize(
    "lengths", [(1, 1), (63, 200), (128, 129), (300, 64)], ids=lambda n: f"{n[0]}x{n[1]}"
)
def test_heads_and_lengths(heads: tuple[int, int], lengths: tuple[int, int]) -> None:
    draw = VARIANTS["causal"][0]
    sizes = draw.sizes(Sizes(1, *heads, *lengths))
    check_gradients(sizes, draw.make(sizes))


def test_keys_and_values_repeat_bit_for_bit() -> None:
    """Only dq is summed up by several blocks."""
    draw = VARIANTS["causal"][0]
    sizes = draw.sizes(Sizes())
    attn, qkv = compiled(**draw.make(sizes)), sizes.qkv()
    shape = qkv[0].shape[:3]
    upstream = torch.randn(*shape, sizes.dim_v, dtype=sizes.dtype), torch.randn(shape)
    first = gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream)
    for _ in range(20):
        again = gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("name", captured_cases.CASES)
def test_captured(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of captured tensors too, by the kernel."""
    monkeypatch.delattr(blockwise, "backward_on_gpu")
    grid = captured_cases.Grid(2, 4, 517, 701)
    composition, leaves = captured_cases.CASES[name](grid)
    check_captured(name, Sizes(*grid[:2], 2, *grid[2:]).wide(dim), composition, leaves)


@pytest.mark.parametrize("name", ["dense", "causal", "tables"])
def test_ordered_sums_repeat_bit_for_bit(name: str) -> None:
    """A thousand times on a GPU, and they are right."""
    sizes = FEW[name].sizes(Sizes())
    composition = FEW[name].make(sizes)
    attn, qkv = compiled(**composition, schedule=Schedule(deterministic=True)), sizes.qkv()
    upstream = torch.randn(*qkv[0].shape).bfloat16(), torch.randn(qkv[0].shape[:3])
    first = gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream)
    wide = [x.double() for x in qkv]
    exact = gradients(lambda *x: reference.attention(*x, **composition), wide, upstream)
    judge_gradients(first, exact, gradients(lambda *x: plain(*x, composition), qkv, upstream))
    for _ in range(REPEATS):
        again = gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream)
        assert all(map(torch.equal, again, first))


@pytest.mark.skipif(not ON_A_GPU, reason="is about blocks of a GPU that wait for each other")
@pytest.mark.parametrize("name", ["dense", "causal"])
def test_ordered_sums_of_many_blocks(name: str) -> None:
    """More blocks than run at the same time, of few and of many heads: nobody waits for ever."""
    attn = compiled(**FEW[name].make(Sizes()), schedule=Schedule(deterministic=True))
    for batch, heads, length in ((1, 1, 32768), (4, 32, 2048)):
        qkv = Sizes(batch, heads, heads, length, length, 64, 64).qkv()
        upstream = torch.randn_like(qkv[0]), torch.randn(qkv[0].shape[:3])
        first, again = (gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream) for _ in range(2))
        assert all(map(torch.equal, again, first))


# --- sequences ----------------------------------------------------------------------------------------------

RAGGED = ("dense", "causal", "alibi causal", "softcap window", "document", "sinks window", "relative table")
Q_LENGTHS, K_LENGTHS = (3, 0, 300, 129, 1, 257, 64), (7, 4, 128, 513, 0, 257, 1)
Q_USED, K_USED = (2, 0, 130, 129, 0, 5, 64), (7, 0, 100, 200, 0, 1, 1)
LONGEST = Sizes(batch=7, q_len=300, kv_len=513)
SIDES = (0, 1, 1, 0)
"""Sides of q, k, v and dout: 0 where they have the lengths of queries, 1 of keys."""


def unused(rows: Sequence[Sequence[int]], used: Sequence[Sequence[int]]) -> list[Tensor]:
    """Masks, for each side, of the packed rows past the used length of their sequence."""
    every = [zip(r, u, strict=True) for r, u in zip(rows, used, strict=True)]
    return [torch.cat([torch.arange(n) >= m for n, m in pairs]) for pairs in every]


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("partly", [False, True], ids=["", "used lengths"])
@pytest.mark.parametrize("name", RAGGED)
def test_packed(name: str, partly: bool, dim: int) -> None:
    """Rows past the used lengths, here NaN, are not read, and their gradients are 0."""
    sizes = LONGEST.wide(dim)
    used = [torch.tensor(n, dtype=torch.int32) for n in (Q_USED, K_USED)] if partly else []
    ends = [cumulative(n) for n in (Q_LENGTHS, K_LENGTHS)]
    ranges = tuple(
        reference.sequence_ranges(*x) for x in (zip(ends, used, strict=True) if partly else zip(ends))
    )
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    drawn = [
        torch.randn(int(ends[side][-1]), h, dim).bfloat16() for h, side in zip(heads, SIDES, strict=True)
    ]
    dlse = torch.randn(sizes.heads, sum(Q_LENGTHS))
    clean = [x.clone() for x in drawn], dlse.clone()
    past = unused((Q_LENGTHS, K_LENGTHS), (Q_USED, K_USED) if partly else (Q_LENGTHS, K_LENGTHS))
    for x, side in zip(drawn, SIDES, strict=True):
        x[past[side]] = torch.nan
    composition = FEW[name].make(sizes)
    attn, known, varlen = compiled(**composition), oracle_takes(composition), Varlen(*ends, *used)
    found = gradients(
        lambda *x: attn(*x, varlen=varlen, return_lse=True), drawn[:3], (drawn[3].nan_to_num(0), dlse)
    )
    for x, side in zip(found, SIDES, strict=False):
        assert x[past[side]].count_nonzero() == 0, "gradients past the end"
    (*qkv, dout), dlse = clean
    dout[past[0]] = 0
    wide = [x.double() for x in qkv]
    exact = gradients(lambda *x: reference.varlen(x, ranges, **known), wide, (dout, dlse))
    judge_gradients(found, exact, gradients(lambda *x: plain_packed(x, ranges, known), qkv, (dout, dlse)))


@pytest.mark.parametrize("name", RAGGED)
def test_padded(name: str) -> None:
    """A padded batch has the gradients of its used rows, whatever lies in the others."""
    sizes = LONGEST.wide(64)
    used = [torch.tensor(n, dtype=torch.int32) for n in (Q_LENGTHS, K_LENGTHS)]
    real = [torch.arange(n) < u[:, None] for n, u in zip((sizes.q_len, sizes.kv_len), used, strict=True)]
    qkv = sizes.qkv()
    dout, dlse = torch.randn(*qkv[0].shape[:3], 64).bfloat16(), torch.randn(qkv[0].shape[:3])
    flat = [x.transpose(1, 2)[real[side]] for x, side in zip((*qkv, dout), SIDES, strict=True)]
    for x, side in zip(qkv, SIDES, strict=False):
        x.transpose(1, 2)[~real[side]] = torch.nan
    composition = FEW[name].make(sizes)
    attn, known = compiled(**composition), oracle_takes(composition)
    found = gradients(
        lambda *x: attn(*x, varlen=Varlen(seqused_q=used[0], seqused_k=used[1]), return_lse=True),
        qkv,
        (dout, dlse),
    )
    rows = [x.transpose(1, 2) for x in found]
    for x, side in zip(rows, SIDES, strict=False):
        assert x[~real[side]].count_nonzero() == 0, "gradients past the end"
    ranges = (
        reference.sequence_ranges(cumulative(Q_LENGTHS)),
        reference.sequence_ranges(cumulative(K_LENGTHS)),
    )
    upstream = flat[3], dlse.transpose(1, 2)[real[0]].T
    exact = gradients(
        lambda *x: reference.varlen(x, ranges, **known), [x.double() for x in flat[:3]], upstream
    )
    same = gradients(lambda *x: plain_packed(x, ranges, known), flat[:3], upstream)
    judge_gradients([x[real[side]] for x, side in zip(rows, SIDES, strict=False)], exact, same)
