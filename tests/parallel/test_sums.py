"""Sums of what rectangles contribute: as if all were added up at the precision of sums, and rounded once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fa4flex.parallel.sums import Result, Sums

LENGTH = 40


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def test_sums_of_overlapping_ranges(seed: int) -> None:
    """Ranges in any order and number, written in other ranges than they came in."""
    rng = random.Random(seed)
    for _ in range(50):
        exact, sums, given = torch.zeros(2, 3, LENGTH, 4), Sums(torch.float32), []
        for _ in range(rng.randrange(6)):
            lo = rng.randrange(LENGTH)
            hi = rng.randrange(lo, LENGTH) + 1
            x = drawn(2, 3, hi - lo, 4)
            given.append((x, x.clone()))
            exact[:, :, lo:hi] += x
            sums.take_in((lo, hi), x)
        cuts = sorted({0, LENGTH, *(rng.randrange(LENGTH) for _ in range(rng.randrange(3)))})
        ranges = list(pairwise(cuts))
        rng.shuffle(ranges)
        like = torch.full((2, 3, LENGTH, 4), torch.nan, dtype=torch.bfloat16)
        found = sums.whole(tuple(ranges), like)
        wanted = torch.cat([exact[:, :, lo:hi] for lo, hi in ranges], 2).bfloat16()
        assert torch.equal(found, wanted)
        assert all(torch.equal(x, as_given) for x, as_given in given), "what was given is another's"


def test_a_lone_sum_is_what_came() -> None:
    x, sums = drawn(1, 2, 8, 4), Sums(torch.float32)
    sums.take_in((8, 16), x)
    assert sums.whole(((8, 16),), x).data_ptr() == x.data_ptr()
    assert torch.equal(sums.whole(((8, 12),), x[:, :, :4]), x[:, :, :4])
    sums.take_in((8, 16), x)
    assert torch.equal(sums.whole(((8, 16),), x), 2 * x)


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
        result.take_in(*attended(slice(8 * at, 8 * at + 8)))
    out, lse = attended(slice(None))
    if sinks:
        result.take_in_sinks(logits)
        whole = torch.logaddexp(lse, logits[:, None].expand_as(lse))
        out, lse = out * (lse - whole).exp().unsqueeze(-1), whole
    found, sums = torch.full_like(out, torch.nan, dtype=torch.float32), torch.full_like(lse, torch.nan)
    result.write(found, sums)
    torch.testing.assert_close(found, out.float())
    torch.testing.assert_close(sums, lse)
