"""Caches that hold keys and values in one tensor are read in place, whatever their layout."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.errors import UnsupportedError
from fa4flex.integrations.paged_cache import Batch, attend, views, write
from fa4flex.primitives.kv_scales import KVScales
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.variants import causal

BLOCKS, SIZE, HEADS, WIDTH = 12, 8, 2, 64
SIZES = {"B": BLOCKS, "N": SIZE, "H": HEADS, "C": 2 * WIDTH, "D": WIDTH, "2": 2, "L": 3}
SHAPES = ["BHNC", "BNHC", "B2NHD", "2BNHD", "B2HND", "2BHND"]
"""Dimensions of blocks, heads, places in a block, keys or values (2) of D columns, or both in C columns."""


def made(shape: str, memory: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Tensor:
    """Cache of this shape whose dimensions lie in memory in the other order, of a middle layer where memory
    has layers. Each element is its place in memory."""
    of = SIZES | sizes
    lengths = [of[axis] for axis in memory]
    buffer = torch.arange(prod(lengths)).remainder(251).to(dtype).view(lengths)
    whole = buffer.permute([memory.index(axis) for axis in ("L" if "L" in memory else "") + shape])
    return whole[1] if "L" in memory else whole


def memories(shape: str) -> list[str]:
    """Some orders in memory, with layers anywhere; columns last."""
    outer = list(shape[:-1])
    return [shape, *("".join(random.sample([*outer, "L"], len(outer) + 1)) + shape[-1] for _ in range(4))]


def cell(cache: Tensor, shape: str, at: dict[str, int], values: bool) -> Tensor:
    """Key or value of a place of a head of a block, by the shape's names."""
    index = tuple({**at, "2": int(values)}[axis] for axis in shape[:-1])
    row = cache[index]
    return row if shape[-1] == "D" else row[WIDTH:] if values else row[:WIDTH]


@pytest.mark.parametrize("shape", SHAPES)
def test_views_share_the_memory_of_the_cache_and_can_be_read_by_copies_of_tiles(
    shape: str, seed: int
) -> None:
    for memory in memories(shape):
        cache = made(shape, memory)
        for values, view in enumerate(views(cache, HEADS, WIDTH)):
            assert view.shape == (BLOCKS, SIZE, HEADS, WIDTH)
            assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
            at = {"B": random.randrange(BLOCKS), "N": random.randrange(SIZE), "H": random.randrange(HEADS)}
            mine = view[at["B"], at["N"], at["H"]]
            by_name = cell(cache, shape, at, bool(values))
            assert mine.data_ptr() == by_name.data_ptr() and mine.stride() == by_name.stride() == (1,)
            assert tma_able(view), memory


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("one", ["H", "B", "N"])
def test_strides_of_dimensions_of_one_mean_nothing(shape: str, one: str) -> None:
    """PyTorch allows any stride there, and a copy of tiles does not."""
    cache = made(shape, shape, **{one: 1})
    strides = list(cache.stride())
    strides[shape.index(one)] = 1
    odd = cache.as_strided(cache.shape, strides)
    heads = 1 if one == "H" else HEADS
    for plain, view in zip(views(cache, heads, WIDTH), views(odd, heads, WIDTH), strict=True):
        assert tma_able(view) and view.data_ptr() == plain.data_ptr() and view.equal(plain)


def test_shapes_that_are_no_cache_of_these_heads_are_refused() -> None:
    for sizes in [
        (5, 2, 8, 64),
        (5, 3, 8, 128),
        (5, 8, 128),
        (3, 5, 8, 2, 64),
        (5, 2, 8, 2, 32),
        (2, 5, 8, 3, 64),
    ]:
        with pytest.raises(UnsupportedError, match=r"a cache of shape .* for 2 heads of 64"):
            views(torch.zeros(sizes), HEADS, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_write_and_read_them_in_place(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch writes, one decodes, one has a chunk; nothing gathers pages or copies a tensor of keys."""
    from fa4flex.primitives.paging import Paging
    from fa4flex.runtime.cuda.calls import conversions

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("keys are copied")

    for owner, name in ((Paging, "gather"), (Paging, "spread"), (conversions, "compact")):
        monkeypatch.setattr(owner, name, refused)
    cache = made(shape, memories(shape)[1])
    cache.fill_(torch.nan)
    caches = views(cache, HEADS, WIDTH)
    table = torch.randperm(BLOCKS).view(2, 6).int()
    lengths = torch.tensor([20, 33], dtype=torch.int32)
    starts = torch.tensor([0, 1, 10], dtype=torch.int32)
    k, v = (torch.randn(53, HEADS, WIDTH).bfloat16() for _ in range(2))
    slots = torch.cat(
        [table[n, t // SIZE].long() * SIZE + t % SIZE for n, t in enumerate(map(torch.arange, (20, 33)))]
    )
    q, attn = torch.randn(10, 4, WIDTH).bfloat16(), fa4flex.compile(mask=causal)
    batch = Batch.of_starts(table, lengths, starts, starts)
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        write(caches, (k, v), slots)
        out = attend(attn, q, caches, batch)
        decoded = attend(attn, q[:2], caches, Batch.decoding(table, lengths))
    assert not gpu.findings, gpu.report()
    monkeypatch.undo()
    wide = caches[0].double(), caches[1].double()
    for found, exact in (
        (out, attend(attn, q.double(), wide, batch)),
        (decoded, attend(attn, q[:2].double(), wide, Batch.decoding(table, lengths))),
    ):
        assert (found.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


@pytest.mark.slow
def test_caches_of_8_bits_are_written_and_decoded_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale for all heads is one number, of stride 0."""
    from fa4flex.primitives.paging import Paging

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("keys are copied")

    scales = KVScales(*(torch.tensor(x).reshape(-1).expand(HEADS) for x in (0.02, 0.03)))
    cache = torch.full((BLOCKS, HEADS, 16, 2 * WIDTH), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    caches = views(cache, HEADS, WIDTH)
    table, lengths = torch.randperm(BLOCKS).view(2, 6).int(), torch.tensor([40, 70], dtype=torch.int32)
    k, v = (torch.randn(110, HEADS, WIDTH).bfloat16() for _ in range(2))
    tokens = map(torch.arange, (40, 70))
    slots = torch.cat([table[n, t // 16].long() * 16 + t % 16 for n, t in enumerate(tokens)])
    q, attn = torch.randn(2, 4, WIDTH).bfloat16(), fa4flex.compile(mask=causal)
    batch = Batch.decoding(table, lengths)
    for name in ("gather", "spread"):
        monkeypatch.setattr(Paging, name, refused)
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        write(caches, (k, v), slots, scales)
        out = attend(attn, q, caches, batch, kv_scales=scales)
    assert not gpu.findings, gpu.report()
    monkeypatch.undo()
    assert scales.k is not None
    held = caches[0][table[1].long()].double().flatten(0, 1)[:70] * scales.k.double().view(-1, 1)
    assert ((held - k[40:].double()).abs() <= k[40:].double().abs() / 16 + 1e-4).all()
    exact = attend(attn, q.double(), caches, batch, kv_scales=scales)
    assert (out.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
