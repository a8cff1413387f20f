"""Every published score mod against its formula, written here from the papers, number by number."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers import added

from fa4flex import variants as v
from fa4flex.errors import InputError
from fa4flex.primitives.sinks import Sinks
from fa4flex.variants._cases import scored


def test_alibi_slopes_are_the_published_ones() -> None:
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    twelve = [*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    for slopes in (eight, twelve):
        bias = added(v.alibi(), (1, len(slopes), 5, 5))
        for h, slope in enumerate(slopes):
            expected = torch.tensor([[slope * (kv - q) for kv in range(5)] for q in range(5)])
            torch.testing.assert_close(bias[0, h].float(), expected, rtol=1e-6, atol=1e-6)


def test_alibi_of_given_slopes() -> None:
    slopes = torch.rand(2, 3, dtype=torch.float64)
    bias = added(v.alibi(slopes, symmetric=True), (2, 3, 4, 7))
    for b in range(2):
        for head in range(3):
            rows = [[-float(slopes[b, head]) * abs(q + 3 - kv) for kv in range(7)] for q in range(4)]
            torch.testing.assert_close(bias[b, head], torch.tensor(rows, dtype=torch.float64))
    torch.testing.assert_close(added(v.alibi(slopes[0]), (1, 3, 4, 4))[0, :, 0, 3], 3 * slopes[0])


def test_softcap() -> None:
    scores = 40 * torch.randn(1, 2, 5, 5, dtype=torch.float64)
    expected = torch.tensor([30 * math.tanh(s / 30) for s in scores.flatten().tolist()]).view(scores.shape)
    torch.testing.assert_close(scored(v.softcap(), scores), expected.double(), rtol=1e-6, atol=1e-5)
    assert scored(v.softcap(2.0), torch.full((1, 1, 1, 1), 1e9)).item() == 2.0


def test_relative_position() -> None:
    bias = added(v.relative_position(0.25), (1, 1, 3, 5))
    expected = [[0.25 * (q + 2 - kv) for kv in range(5)] for q in range(3)]
    torch.testing.assert_close(bias[0, 0], torch.tensor(expected, dtype=torch.float64))


def t5_bucket(relative: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """Mesh TensorFlow's relative_position_bucket, from the paper's description, one number at a time."""
    result = 0
    distance = -relative  # relative = memory position - query position
    if bidirectional:
        num_buckets //= 2
        result += num_buckets if distance < 0 else 0
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    max_exact = num_buckets // 2
    if distance < max_exact:
        return result + distance
    # 1e-9 keeps a distance on a bucket's edge in the upper bucket whatever the logarithms round to.
    grown = math.log(distance / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    return result + min(max_exact + int(grown + 1e-9), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_bias(bidirectional: bool, seed: int) -> None:
    """Long keys show all distances behind the query, long queries those ahead of it."""
    rng = random.Random(seed)
    for buckets, far in ((32, 128), (rng.choice([4, 8, 12, 20]), rng.randint(20, 60))):
        table = torch.randn(buckets, 3, dtype=torch.float64)
        swapped = v.t5_bias(table.T.contiguous(), bidirectional, far, axes="head_bucket")
        for q_len, kv_len in ((9, 170), (170, 9)):
            ahead = torch.arange(kv_len) - torch.arange(q_len)[:, None] - (kv_len - q_len)
            expected = [[t5_bucket(d, bidirectional, buckets, far) for d in row] for row in ahead.tolist()]
            values = table[torch.tensor(expected)].permute(2, 0, 1)
            for mod in (v.t5_bias(table, bidirectional, far), swapped):
                torch.testing.assert_close(added(mod, (1, 3, q_len, kv_len))[0], values)


def test_learned_bias() -> None:
    dense = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(added(v.learned_bias(dense), (2, 3, 4, 5)), dense)
    torch.testing.assert_close(added(v.learned_bias(dense[0]), (2, 3, 4, 5)), dense[0].expand(2, 3, 4, 5))
    row = dense[:1, :1, :1]
    torch.testing.assert_close(added(v.learned_bias(row), (2, 3, 4, 5)), row.expand(2, 3, 4, 5))
    relative = torch.randn(3, 5, dtype=torch.float64)
    bias = added(v.learned_bias(relative), (1, 3, 4, 6))
    for h in range(3):
        for q in range(4):
            for kv in range(6):
                behind = max(-2, min(2, q + 2 - kv))
                assert bias[0, h, q, kv] == relative[h, behind + 2]
    assert torch.equal(added(v.learned_bias(relative[:1]), (1, 3, 4, 6))[0, 2], bias[0, 0])


def test_learned_bias_trains() -> None:
    bias = torch.zeros(2, 5, requires_grad=True)
    scored(v.learned_bias(bias), torch.zeros(1, 2, 3, 3)).sum().backward()
    assert bias.grad is not None
    assert bias.grad[0].tolist() == [1, 2, 3, 2, 1]  # pairs at each distance of a 3 by 3 grid


def test_graphormer() -> None:
    distances = torch.randint(0, 6, (2, 7, 7))
    table = torch.randn(3, 6, dtype=torch.float64)
    bias = added(v.graphormer(table, distances), (2, 3, 7, 7))
    for b in range(2):
        for h in range(3):
            for q in range(7):
                assert bias[b, h, q].tolist() == [table[h, distances[b, q, kv]].item() for kv in range(7)]


def test_sandwich() -> None:
    heads, d_bar, n = 4, 16, 9
    bias = added(v.sandwich(n, d_bar), (1, heads, n, n))
    for h in range(heads):
        for q in range(n):
            for kv in range(n):
                cosines = [math.cos((q - kv) * 10000 ** (-2 * i / d_bar)) for i in range(d_bar // 2)]
                assert bias[0, h, q, kv].item() == pytest.approx(
                    sum(cosines) * heads / (8 * (h + 1)), rel=1e-6
                )
    with pytest.raises(IndexError):
        added(v.sandwich(n - 1, d_bar), (1, heads, n, n))


# --- helpers that are not families ----------------------------------------------------------------------


def test_gpt_oss_sinks() -> None:
    logits = torch.randn(4, requires_grad=True)
    sinks = v.gpt_oss_sinks(logits)
    assert isinstance(sinks, Sinks) and sinks.logits is logits
    assert v.gpt_oss_sinks(3).logits.tolist() == [0, 0, 0]


def test_mla() -> None:
    shapes = v.mla()
    assert (shapes.qk_dim, shapes.value) == (192, 128)
    assert shapes.scale == pytest.approx(192**-0.5)
    assert v.mla(mscale=1.5).scale == pytest.approx(1.5 * 1.5 * 192**-0.5)
    q, good, bad = torch.zeros(1, 1, 1, 192), torch.zeros(1, 1, 1, 128), torch.zeros(1, 1, 1, 64)
    shapes.check(q, q, good)
    with pytest.raises(InputError, match=r"v with head_dim 64.*\n  expected: 128 \(value\)"):
        shapes.check(q, q, bad)
    with pytest.raises(InputError, match=r"k with head_dim 128.*\n  expected: 192 = nope 128 \+ rope 64"):
        shapes.check(q, good, good)
