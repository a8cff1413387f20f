"""New tokens in their slots, and steps whose sequences are of all kinds."""

from __future__ import annotations

import pytest
import torch
from engines import Definition, History

import fa4flex
import ptxsim
from fa4flex import Precision, Schedule
from fa4flex.integrations.paged_cache import Batch, attend, write
from fa4flex.variants import causal


@pytest.mark.parametrize("slots", [[3, -1, 0, -1], [-1, -1, 5, 11], [-1, -1, -1, -1], []])
def test_tokens_are_written_to_their_slots_and_padding_nowhere(slots: list[int]) -> None:
    """Caches of other strides and another dtype, int32 slots and slot 0 are served, too."""
    both = torch.randn(3, 2, 2, 4, 8, dtype=torch.float64)  # [pages, key or value, heads, page_size, width]
    caches = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    new = torch.randn(2, len(slots), 2, 8)
    want = both.clone()
    for t, slot in enumerate(slots):
        if slot >= 0:
            want[slot // 4, :, :, slot % 4] = new[:, t].double()
    write(caches, (new[0], new[1]), torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(both, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_launch_writes_them_on_a_gpu(dtype: torch.dtype) -> None:
    both = torch.randn(3, 2, 4, 2, 64).bfloat16()  # [pages, key or value, page_size, heads, width]
    new, slots = torch.randn(2, 4, 2, 64).bfloat16(), [7, -1, 8, -1]
    want = both.clone()
    want[1, :, 3], want[2, :, 0] = new[:, 0], new[:, 2]
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        write((both[:, 0], both[:, 1]), (new[0], new[1]), torch.tensor(slots, dtype=dtype))
    assert len(gpu.results) == 1 and torch.equal(both, want)


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 3, 1], [2, 1, 4], [1, 0, 2], [1, 1, 0], [0, 0, 0]])
@pytest.mark.parametrize("padding", [0, 2])
def test_steps_of_all_kinds(counts: list[int], padding: int) -> None:
    history, page_size = History(), 4
    history.grow({0: 5, 1: 2, 2: 9})
    steps = dict(enumerate(counts))
    q, *_ = history.grow(steps)
    caches = tuple(torch.full((12, page_size, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2))
    table = torch.randperm(12).view(3, 4).int()
    for n in steps:
        tokens = torch.arange(history.length(n))
        slots = table[n, tokens // page_size] * page_size + tokens % page_size
        write((caches[0], caches[1]), (history.k[n], history.v[n]), slots)
    lengths = torch.tensor([history.length(n) for n in steps])
    starts = torch.tensor([0, *counts]).cumsum(0)
    attn = fa4flex.compile(mask=causal, scale=0.5)
    rows = torch.cat([q, torch.full((padding, *q.shape[1:]), torch.nan, dtype=q.dtype)])
    out = attend(attn, rows, (caches[0], caches[1]), Batch.of_starts(table, lengths, starts, starts))
    torch.testing.assert_close(out[: len(q)], history.expected(Definition(0.5), q, steps))
    assert out.shape == rows.shape and not out[len(q) :].any()


LAUNCHES = {
    "both kinds": ("sm_90a", 64, {}, ["mixed"]),
    "no room for both": ("sm_90a", 192, {}, ["decode", "fwd"]),
    "parts of fixed size": ("sm_90a", 64, {"schedule": Schedule(split=64)}, ["decode", "mixed"]),
    "a wider output": ("sm_90a", 64, {"precision": Precision(output=torch.float32)}, ["decode", "fwd"]),
    "another chip": ("sm_100a", 64, {}, ["decode", "fwd"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_chunks_and_sequences_that_decode_are_one_launch_where_a_kernel_has_both(case: str) -> None:
    chip, width, options, kernels = LAUNCHES[case]
    counts, keys = [1, 1, 70], [9, 40, 70]
    caches = tuple(torch.randn(12, 16, 1, width).bfloat16() for _ in range(2))
    table, lengths = torch.randperm(12)[:9].view(3, 3).repeat(1, 2).int(), torch.tensor(keys).int()
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    attn = fa4flex.compile(mask=causal, **options)
    q, batch = torch.randn(75, 2, width).bfloat16(), Batch.of_starts(table, lengths, starts, starts)
    exact = attend(attn, q.double(), (caches[0].double(), caches[1].double()), batch)
    with torch.no_grad(), ptxsim.device(chip) as gpu:
        out = attend(attn, q, (caches[0], caches[1]), batch)
    found = [name for r in gpu.results for name in ("mixed", "decode", "fwd") if f"kernels{name}" in r.kernel]
    assert found == kernels
    assert (out.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max() and not out[72:].any()
