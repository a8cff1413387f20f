"""Sums of what rectangles contribute: as if all were added up at the precision of sums, and rounded once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fa4flex.parallel.pieces import copy_into
from fa4flex.parallel.sums import Result, Sums

LENGTH = 40


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def test_sums_of_overlapping_ranges(seed: int) -> None:
    """Ranges in any order and number, written in other ranges than they came in."""
    rng = random.Random(seed)
    for _ in range(50):
        exact, sums = torch.zeros(2, 3, LENGTH, 4), Sums(torch.float32)
        for _ in range(rng.randrange(6)):
            lo = rng.randrange(LENGTH)
            hi = rng.randrange(lo, LENGTH) + 1
            x = drawn(2, 3, hi - lo, 4)
            exact[:, :, lo:hi] += x
            sums.add((lo, hi), x)
        cuts = sorted({0, LENGTH, *(rng.randrange(LENGTH) for _ in range(rng.randrange(3)))})
        ranges = list(pairwise(cuts))
        rng.shuffle(ranges)
        like = torch.full((2, 3, LENGTH, 4), torch.nan, dtype=torch.bfloat16)
        found = sums.whole(tuple(ranges), like)
        wanted = torch.cat([exact[:, :, lo:hi] for lo, hi in ranges], 2).bfloat16()
        assert torch.equal(found, wanted)


def test_a_lone_sum_is_what_came() -> None:
    x, sums = drawn(1, 2, 8, 4), Sums(torch.float32)
    sums.add((8, 16), x)
    assert sums.whole(((8, 16),), x).data_ptr() == x.data_ptr()
    assert torch.equal(sums.whole(((8, 12),), x[:, :, :4]), x[:, :, :4])
    sums.add((8, 16), x.clone())
    twice = 2 * x
    assert all(torch.equal(sums.whole(((8, 16),), x), twice) for _ in range(2))


def test_what_others_add_to_a_part_is_added_in_its_memory() -> None:
    """But not what was taken out of the sums, nor in another dtype."""
    x, few, more = drawn(1, 2, 8, 4), drawn(1, 2, 3, 4), drawn(1, 2, 3, 4)
    exact = x.float()
    exact[:, :, 2:5] += few.float() + more.float()
    like = x.clone()
    parts = [((8, 16), x), ((10, 13), few), ((10, 13), more)]
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):  # which comes first
        sums, given = Sums(torch.float32), [(where, part.clone()) for where, part in parts]
        for at in order:
            sums.add(*given[at])
        found = sums.whole(((8, 10), (10, 16)), like)
        assert found.data_ptr() == given[0][1].data_ptr() and torch.equal(found, exact.bfloat16())

    sums = Sums(torch.float32)
    sums.add((8, 16), like)
    taken = torch.empty_like(like[:, :, :3])
    sums.pop(((8, 11),), taken)
    assert torch.equal(taken, like[:, :, :3])
    found = sums.whole(((8, 16),), like)
    assert found.data_ptr() != like.data_ptr() and not found[:, :, :3].any()
    assert torch.equal(found[:, :, 3:], like[:, :, 3:])
    assert sums.whole(((11, 16),), torch.empty(1, 2, 5, 4)).dtype == torch.float32


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_copies_sixteen_bytes_at_a_time(dtype: torch.dtype) -> None:
    """Into and from memory with gaps, and where places or rows are no multiples of 16 bytes."""
    for width, start in ((16, 0), (16, 1), (12, 0), (9, 0)):
        x = torch.randn(2, 3, 7, 32).to(dtype)[:, :, 2:5, start : start + width]
        into = torch.zeros(2, 3, 9, width).to(dtype)
        copy_into(into[:, :, 4:7], x)
        assert torch.equal(into[:, :, 4:7], x) and not into[:, :, :4].any() and not into[:, :, 7:].any()
        wide = torch.zeros(x.shape).half()
        copy_into(wide, x)
        assert torch.equal(wide, x.half())


@pytest.mark.parametrize("parts", (1, 2, 3, 5))
@pytest.mark.parametrize("sinks", (False, True))
def test_results_of_parts(parts: int, sinks: bool) -> None:
    """Parts of the keys of 6 queries, of which some have none, and one has none in any part."""
    scores, values = torch.randn(2, 3, 6, 8 * parts).double(), torch.randn(2, 3, 8 * parts, 4).double()
    scores.masked_fill_(torch.rand(2, 3, 6, parts).repeat_interleave(8, 3) < 0.3, -torch.inf)
    scores[:, :, 2] = -torch.inf
    logits = torch.randn(3).double()

    def attended(some: slice) -> tuple[Tensor, Tensor]:
        lse = scores[..., some].logsumexp(-1)
        weights = (scores[..., some] - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
        return weights @ values[:, :, some], lse

    result = Result(*attended(slice(0, 8)))
    for at in range(1, parts):
        result.add(*attended(slice(8 * at, 8 * at + 8)))
    out, lse = attended(slice(None))
    if sinks:
        result.add_sinks(logits)
        whole = torch.logaddexp(lse, logits[:, None].expand_as(lse))
        out, lse = out * (lse - whole).exp().unsqueeze(-1), whole
    found, sums = torch.full_like(out, torch.nan, dtype=torch.float32), torch.full_like(lse, torch.nan)
    result.write(found, sums)
    torch.testing.assert_close(found, out.float())
    torch.testing.assert_close(sums, lse)
