"""Selection of keys: pooling, scores and choices, beside plain loops in float64."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import close, leaf
from torch import Tensor

import fa4flex
from fa4flex import Lists, reference, select, variants
from fa4flex.errors import InputError, StateError, UnsupportedError
from fa4flex.select import Scores, mass, pool, score, threshold, topk
from fa4flex.select import scoring as scoring_module
from fa4flex.variants import causal

# --- pooling ------------------------------------------------------------------------------------------------

HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "last": lambda x: x[-1],
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("length", "block"), [(12, 4), (13, 4), (3, 5), (1, 1)])
def test_pooled_rows(how: Any, length: int, block: int) -> None:
    x = torch.randn(2, 3, length, 4, dtype=torch.float64)
    made = pool(x, block, how)
    assert (made.block, made.length) == (block, length)
    for b in range(2):
        for h in range(3):
            rows = [HOW[how](x[b, h, at : at + block]) for at in range(0, length, block)]
            assert close(made.values[b, h], torch.stack(rows))


def test_pooling_by_weights_and_phases() -> None:
    x = torch.randn(1, 2, 7, 3, dtype=torch.float64)
    of_block, of_tokens = torch.rand(4, dtype=torch.float64), torch.rand(1, 2, 7, dtype=torch.float64)
    by_block, by_token = pool(x, 4, of_block).values, pool(x, 4, of_tokens).values
    for h in range(2):
        for row, first in enumerate((0, 4)):
            tokens = range(first, min(first + 4, 7))
            assert close(by_block[0, h, row], sum(of_block[t - first] * x[0, h, t] for t in tokens))
            assert close(by_token[0, h, row], sum(of_tokens[0, h, t] * x[0, h, t] for t in tokens))
    zeros = torch.zeros(1, 2, 1, 3, dtype=torch.float64)
    whole = torch.cat((x, zeros), 2)
    assert torch.equal(pool(x, 4, "phases").values[0, 1, 1], whole[0, 1, 4:].flatten())
    assert torch.equal(pool(x, 4, "reversed").values[0, 1, 0], whole[0, 1, [3, 2, 1, 0]].flatten())
    assert pool(x.bfloat16(), 4).values.dtype == torch.bfloat16
    assert pool(x, 7, of_tokens[0, 0]).values.shape == (1, 2, 1, 3)


def test_sums_along_antidiagonals() -> None:
    """Strided products as XAttention has them: (a, b) with a + b = stride - 1 within squares of `stride`."""
    q, k = (torch.randn(1, 1, 12, 4, dtype=torch.float64) for _ in range(2))
    found = score(pool(q, 4, "reversed"), pool(k, 4, "phases"), scale=0.5).values[0, 0]
    for i in range(3):
        for j in range(3):
            pairs = [q[0, 0, 4 * i + a] @ k[0, 0, 4 * j + 3 - a] for a in range(4)]
            assert math.isclose(float(found[i, j]), 0.5 * float(sum(pairs)), rel_tol=1e-9, abs_tol=1e-12)


# --- scores -------------------------------------------------------------------------------------------------


def dense(q: Tensor, k: Tensor, fn: Callable[..., float], scale: float) -> Tensor:
    """fn of all products of tokens, one by one."""
    batch, heads, rows, columns = *q.shape[:3], k.shape[2]
    made = torch.zeros(batch, heads, rows, columns, dtype=torch.float64)
    for b, h, i, j in torch.ones_like(made).nonzero().tolist():
        product = float(q[b, h, i] @ k[b, h * k.shape[1] // heads, j])
        made[b, h, i, j] = fn(scale * product, b, h, i, j)
    return made


FOLD = {"sum": sum, "max": max, "mean": lambda x: sum(x) / len(x)}
FOLD["logsumexp"] = lambda x: math.log(sum(map(math.exp, x)))


def folded(x: Tensor, how: str, size: int, dim: int) -> Tensor:
    x = x.movedim(dim, -1)
    parts = [x[..., at : at + size] for at in range(0, x.shape[-1], size)]
    made = [[FOLD[how](row) for row in part.reshape(-1, part.shape[-1]).tolist()] for part in parts]
    return torch.tensor(made, dtype=torch.float64).view(len(parts), *x.shape[:-1]).movedim(0, dim)


@pytest.mark.parametrize("how", FOLD)
def test_reductions(how: str) -> None:
    q, k = torch.randn(2, 4, 7, 8, dtype=torch.float64), torch.randn(2, 2, 9, 8, dtype=torch.float64)
    want = dense(q, k, lambda x, *_: x, 8**-0.5)
    assert close(score(q, k).values, want)
    assert close(score(q, k, over_keys=(how, 4)).values, folded(want, how, 4, 3))
    both = score(q, k, over_keys=(how, 4), over_queries=("max", 3))
    assert close(both.values, folded(folded(want, how, 4, 3), "max", 3, 2))
    assert (both.queries, both.keys, both.q_len, both.kv_len) == (3, 4, 7, 9)
    assert close(score(q, k, over_heads=how).values, folded(want, how, 4, 1))
    assert close(score(q, k, over_heads=(how, 2)).values, folded(want, how, 2, 1))


def test_the_indexer_with_relu() -> None:
    """sum over heads of weights[b, h, q] * relu(q.k), as DeepSeek's indexer, and the block maxima of it."""
    q, k = torch.randn(2, 3, 6, 8, dtype=torch.float64), torch.randn(2, 1, 9, 8, dtype=torch.float64)
    weights = torch.randn(2, 3, 6, dtype=torch.float64)
    each = dense(q, k, lambda x, b, h, i, j: float(weights[b, h, i]) * max(x, 0.0), 1.0)
    made = score(q, k, lambda s, b, h, q_idx, kv_idx: torch.relu(s), over_heads=weights, scale=1.0)
    assert close(made.values, each.sum(1, keepdim=True))
    by_block = made.reduced(over_keys=("max", 4))
    assert close(by_block.values, folded(each.sum(1, keepdim=True), "max", 4, 3)) and by_block.keys == 4


def test_functions_know_indices_lengths_and_captures() -> None:
    q, k = torch.randn(1, 2, 6, 8, dtype=torch.float64), torch.randn(1, 2, 10, 8, dtype=torch.float64)
    bias = torch.randn(2, 16, dtype=torch.float64)

    def fn(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return torch.where(kv_idx <= q_idx + kv_len - q_len, s + bias[h, q_idx + kv_idx], -float("inf"))

    def plain(s: float, b: int, h: int, i: int, j: int) -> float:
        return s + float(bias[h, i + j]) if j <= i + 4 else -math.inf

    got, want = score(q, k, fn).values, dense(q, k, plain, 8**-0.5)
    assert torch.equal(got.isinf(), want.isinf()) and close(
        got.nan_to_num(neginf=0), want.nan_to_num(neginf=0)
    )
    pooled = score(pool(q, 2), pool(k, 4), lambda s, b, h, q_idx, kv_idx: 0 * s + q_idx * 100 + kv_idx).values
    assert pooled[0, 1].tolist() == [[100 * i + j for j in (0, 4, 8)] for i in (0, 2, 4)]


def test_gradients_reach_what_is_scored() -> None:
    q, k, weights, bias = leaf(1, 2, 4, 8), leaf(1, 1, 6, 8), leaf(1, 2, 4), leaf(6)

    def run(q: Tensor, k: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        fn = lambda s, b, h, q_idx, kv_idx: torch.relu(s + bias[kv_idx])  # noqa: E731
        return score(q, k, fn, over_keys=("logsumexp", 4), over_heads=weights).values

    assert torch.autograd.gradcheck(run, (q, k, weights, bias))


def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, weights = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 4, 6)
    fn = lambda s, b, h, q_idx, kv_idx: s * (1 + q_idx)  # noqa: E731
    how: dict[str, Any] = {"over_queries": ("max", 2), "over_keys": ("sum", 4), "over_heads": weights}
    whole = score(q, k, fn, **how)
    monkeypatch.setattr(scoring_module, "MOST_AT_ONCE", 2 * 4 * 9 * 5)
    parts = score(q, k, fn, **how)
    torch.testing.assert_close(parts.values, whole.values)


def test_causal_scores() -> None:
    for q_len, kv_len, queries, keys in ((10, 10, 3, 4), (5, 11, 2, 3), (6, 4, 2, 2)):
        shape = 1, 1, -(-q_len // queries), -(-kv_len // keys)
        scores = Scores(torch.zeros(shape), queries, keys, q_len, kv_len)
        some, whole = scores.causal().selectable[0, 0], scores.causal(whole=True).selectable[0, 0]
        for r in range(shape[2]):
            places = [q + kv_len - q_len for q in range(r * queries, min((r + 1) * queries, q_len))]
            for c in range(shape[3]):
                tokens = range(c * keys, min((c + 1) * keys, kv_len))
                assert bool(some[r, c]) == any(kv <= p for p in places for kv in tokens)
                assert bool(whole[r, c]) == all(kv <= p for p in places for kv in tokens)


def test_causal_scores_are_masked_when_they_are_read() -> None:
    """With the gradient that was wanted when they were made; what is written to them counts, and what was
    written to those that they are made of is told."""
    values = torch.randn(1, 2, 5, 6, requires_grad=True)
    scores = Scores(values, 2, 2, 10, 12)
    late = torch.arange(6) * 2 > (torch.arange(5) * 2 + 3).unsqueeze(1)
    wanted = torch.where(late, -math.inf, values)
    causal_scores = scores.causal()
    with torch.no_grad():
        assert topk(causal_scores, 2).ids.shape == (1, 2, 5, 2)
        assert torch.equal(causal_scores.values, wanted)
    (gradient,) = torch.autograd.grad(causal_scores.values.exp().sum(), values)
    assert torch.equal(gradient, torch.where(late, 0.0, values.exp()))
    with torch.inference_mode():
        read = scores.causal()
    assert torch.equal(read.values, wanted)
    plain = Scores(values.detach().clone(), 2, 2, 10, 12)
    other = dataclasses.replace(plain.causal(), values=plain.values)
    assert torch.equal(other.values, plain.values) and torch.equal(topk(other, 2).ids, topk(plain, 2).ids)
    written = plain.causal()
    written.values[..., 0] = math.inf
    assert (topk(written, 1).ids == 0).all()
    twice = plain.causal().causal(whole=True)
    assert torch.equal(twice.values, plain.causal(whole=True).values)
    unread = plain.causal()
    plain.values.add_(1)
    with pytest.raises(StateError, match="written to after causal"):
        topk(unread, 2)


def test_causal_scores_stay_where_torch_does_not_count_what_is_written() -> None:
    with torch.inference_mode():
        scores = Scores(torch.randn(1, 2, 5, 6), 2, 2, 10, 12)
        before, wanted = scores.causal(), topk(scores.causal(), 2)
        values = before.values.clone()
        unread = scores.causal()
        scores.values.neg_()
        assert torch.equal(unread.values, values) and torch.equal(before.values, values)
        assert torch.equal(topk(unread, 2).ids, wanted.ids)


# --- choices ------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, dtype: torch.dtype = torch.float32) -> Scores:
    """Scores with many ties, infinities and NaN."""
    queries, keys, rows, columns = (rng.randint(1, n) for n in (4, 4, 5, 9))
    q_len, kv_len = rows * queries - rng.randrange(queries), columns * keys - rng.randrange(keys)
    values = torch.randint(-3, 4, (rng.randint(1, 2), rng.randint(1, 3), rows, columns)).to(dtype)
    odd = torch.rand(values.shape)
    values[odd < 0.1], values[(odd >= 0.1) & (odd < 0.2)], values[odd > 0.95] = -math.inf, math.nan, math.inf
    return Scores(values, queries, keys, q_len, kv_len)


def forced_units(scores: Scores, row: int, first: int, own: int, last: int) -> set[int]:
    units = scores.values.shape[3]
    found = {c for c in range(units) if c < first or c >= units - last}
    for q in range(row * scores.queries, min((row + 1) * scores.queries, scores.q_len)):
        unit = (q + scores.kv_len - scores.q_len) // scores.keys
        low = max(row * scores.queries + scores.kv_len - scores.q_len, 0) // scores.keys
        found |= {c for c in range(min(low, unit) - own + 1, unit + 1) if own and 0 <= c < units}
    return found


def by_a_stable_sort(row: list[float], k: int, forced: set[int]) -> list[int]:
    others = [c for c, x in enumerate(row) if c not in forced and not math.isnan(x) and x > -math.inf]
    return sorted([*forced, *sorted(others, key=lambda c: -row[c])[: k - len(forced)]])


@pytest.mark.parametrize("number", range(40))
def test_topk_is_a_stable_sort(number: int, seed: int) -> None:
    rng = random.Random(seed + number)
    scores = drawn(rng, rng.choice([torch.float32, torch.float64]))
    first, own, last = (rng.randint(0, 1) for _ in range(3))
    units = scores.values.shape[3]
    least = first + last + (own and own + -(-(scores.queries - 1) // scores.keys))
    k = rng.randint(max(min(least, units), 1), units + 2)
    lists = topk(scores, k, first=first, own=own, last=last)
    assert lists.capacity == min(k, units) and (lists.unit, lists.queries) == (scores.keys, scores.queries)
    for b, h, r in torch.ones(scores.values.shape[:3]).nonzero().tolist():
        forced = forced_units(scores, r, first, own, last)
        want = by_a_stable_sort(scores.values[b, h, r].tolist(), k, forced)
        assert lists.ids[b, h, r].tolist() == want + [-1] * (lists.capacity - len(want))
        assert int(lists.counts[b, h, r]) == len(want)


@pytest.mark.parametrize("number", range(20))
def test_threshold_and_mass(number: int, seed: int) -> None:
    rng = random.Random(seed + number)
    scores = drawn(rng, torch.float64)
    scores.values[scores.values == math.inf] = 2.5
    share, least = rng.choice([0.0, 0.31, 0.87]), rng.choice([-1.0, 0.0, 2.5])
    forced = {"first": rng.randint(0, 1), "own": rng.randint(0, 1), "last": rng.randint(0, 1)}
    above, heavy = threshold(scores, least, **forced), mass(scores, share, **forced)
    for b, h, r in torch.ones(scores.values.shape[:3]).nonzero().tolist():
        row, always = scores.values[b, h, r].tolist(), forced_units(scores, r, **forced)
        open = [c for c, x in enumerate(row) if not math.isnan(x) and x > -math.inf]
        want = {c for c in open if row[c] >= least} | always
        assert above.classes[b, h, r].nonzero().flatten().tolist() == sorted(want)
        total, sofar, chosen = sum(math.exp(row[c]) for c in open), 0.0, set()
        for c in sorted(open, key=lambda c: -row[c]):
            if not chosen or sofar / total < share - 1e-12:
                chosen.add(c)
            sofar += math.exp(row[c])
        found = set(heavy.classes[b, h, r].nonzero().flatten().tolist())
        # Sums that are a share to the last bit may fall on either side.
        assert found == chosen | always or (
            share in (0.3, 0.9, 1.0) and abs(len(found) - len(chosen | always)) <= 1
        )
        assert share == 1.0 or found == chosen | always


@pytest.mark.parametrize("number", range(12))
def test_as_few_units_as_are_forced_may_be_asked_for(number: int, seed: int) -> None:
    """Blocks of queries as large as units have one own unit, and k=2 leaves room for it and the first."""
    rng = random.Random(seed + number)
    queries, keys = rng.choice([1, 2, 3, 4, 6, 8, 16]), rng.choice([1, 2, 4, 5, 8])
    q_len, kv_len = queries * rng.randint(40, 50), rng.randint(400, 900)
    q_len = min(q_len, kv_len // queries * queries)
    values = torch.randn(1, 1, q_len // queries, -(-kv_len // keys))
    scores = Scores(values, queries, keys, q_len, kv_len)
    rule = scores._rule(rng.randint(0, 1), rng.randint(1, 2), 0)
    forced = rule.forced(values.device)
    assert forced is not None and int(forced.sum(-1).max()) == rule.most
    chosen = topk(scores, rule.most, first=rule.first, own=rule.own)
    assert torch.equal((chosen.classes()[0, 0] != 0) & forced, forced)


def test_a_share_that_is_reached_exactly() -> None:
    """Two of four equal scores hold a half, the lower ones; a share of 1 takes all that there are."""
    scores = Scores(torch.tensor([[[[0.0, 0.0, -math.inf, 0.0, 0.0]]]]), 1, 1, 1, 5)
    assert mass(scores, 0.5).classes.flatten().tolist() == [1, 1, 0, 0, 0]
    assert mass(scores, 0.0).classes.flatten().tolist() == [1, 0, 0, 0, 0]
    assert mass(scores, torch.tensor(1.0)).classes.flatten().tolist() == [1, 1, 0, 1, 1]


def test_a_share_of_one_takes_every_unit_and_infinite_scores_all_of_it() -> None:
    """Sums of many small weights are 1 before the last in float32, and +inf has no softmax."""
    values = 3 * torch.randn(1, 1, 8, 4096)
    assert mass(Scores(values, 1, 1, 8, 4096), 1.0).counts["empty"] == 0
    values[..., 7] = math.inf
    assert mass(Scores(values, 1, 1, 8, 4096), 0.9).classes.nonzero()[:, 3].tolist() == [7] * 8


def test_selections_of_an_empty_batch() -> None:
    q, k = torch.randn(0, 2, 8, 4), torch.randn(0, 1, 8, 4)
    chosen = topk(score(pool(q, 2), pool(k, 2)).causal(), 2)
    assert fa4flex.attention(q, k, k, mask=causal, blocks=chosen).shape == q.shape
    assert fa4flex.attention(q, k, k, blocks=mass(score(q, k), 0.5)).shape == q.shape


def test_within_an_earlier_selection() -> None:
    values = torch.randn(1, 2, 6, 8)
    scores = Scores(values, 2, 4, 12, 32)
    coarse = topk(scores.reduced("max", ("max", 2), ("max", 2)), 2)
    inside = topk(scores, 3, within=coarse)
    allowed = coarse.classes()[0, 0].bool().repeat_interleave(2, 0).repeat_interleave(2, 1)
    for h in range(2):
        for r in range(6):
            row = torch.where(allowed[r], values[0, h, r], -math.inf).tolist()
            want = by_a_stable_sort(row, 3, set())
            assert inside.ids[0, h, r].tolist() == want + [-1] * (3 - len(want))
    same = threshold(scores, -math.inf, within=coarse.map())
    assert torch.equal(same.classes[0, 1].bool(), allowed)
    with pytest.raises(InputError, match="within blocks of 2 x 4"):
        topk(scores.reduced(over_keys=("max", 3)), 2, within=topk(scores, 2))


def test_selections_of_key_heads_in_attention() -> None:
    q = torch.randn(1, 4, 32, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 2, 32, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scores = score(pool(q, 8), pool(k, 8), over_heads=("sum", 2)).causal()
    for chosen in (topk(scores, 2, own=1), mass(scores, 0.5, own=1)):
        out = fa4flex.compile(mask=causal)(q, k, v, blocks=chosen)
        classes = chosen.classes() if isinstance(chosen, Lists) else chosen.classes
        allowed = classes.bool().repeat_interleave(2, 1).repeat_interleave(8, 2).repeat_interleave(8, 3)
        mask = lambda b, h, q_idx, kv_idx, a=allowed: a[0, h, q_idx, kv_idx] & (kv_idx <= q_idx)  # noqa: E731
        assert close(out, reference.attention(q, k, v, None, mask)[0])
        assert not chosen.ids.requires_grad if isinstance(chosen, Lists) else True


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without contents have all that is asked for: shapes."""
    q, k = torch.randn(1, 4, 128, 16, device="meta"), torch.randn(1, 2, 128, 16, device="meta")
    bias = torch.randn(128, device="meta")

    def seen(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kv_idx <= q_idx, torch.relu(s) + bias[kv_idx], -math.inf)

    scores = score(q, pool(k, 16), seen, over_heads=("max", 2), over_queries=("max", 8))
    lists = topk(scores.causal(), 3, own=1, first=1)
    assert (lists.ids.shape, lists.counts.shape) == ((1, 2, 16, 3), (1, 2, 16))
    for blocks in (mass(scores, 0.5), threshold(scores, 0.0, within=lists), lists.map()):
        assert blocks.classes.shape == (1, 2, 16, 8) and blocks.classes.device.type == "meta"
        part = blocks.grown(kv_len=200)[:, [1], 2:4].for_query_heads(4)
        assert part.classes.shape == (1, 4, 2, 13) and Lists.of(part, 5).ids.shape == (1, 4, 2, 5)
    compressed = torch.randn(1, 2, 7, 16, device="meta")
    chosen = (
        (variants.moba(q, k, 16, 3).ids, (1, 4, 128, 3)),
        (variants.quest(q, k, 16, 2).ids, (1, 4, 128, 2)),
        (variants.nsa(q, compressed, 128, 4, 32, 32, 16).ids, (1, 2, 128, 4)),
        (variants.xattention(q, k, 0.9, 32, 8).classes, (1, 4, 4, 4)),
        (variants.video_blocks(q, k, 16, 2).ids, (1, 4, 8, 2)),
        (select.lines(q, k, 3, 3)[0], (4, 128)),
    )
    for found, shape in chosen:
        assert found.shape == shape and found.device.type == "meta"


def test_one_graph_selects_anew() -> None:
    """Without a function to trace, and with blocks known by then, all of it is one graph."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = topk(score(pool(q, 8), pool(k, 8)).causal(), 2, own=1)
        return fa4flex.attention(q, k, v, mask=causal, blocks=chosen)

    for _ in range(2):
        qkv = [torch.randn(1, 2, 32, 8) for _ in range(3)]
        chosen = topk(score(pool(qkv[0], 8), pool(qkv[1], 8)).causal(), 2, own=1)
        torch.testing.assert_close(run(*qkv), fa4flex.attention(*qkv, mask=causal, blocks=chosen))


def test_vertical_and_slash_lines() -> None:
    q, k = torch.randn(1, 2, 9, 4, dtype=torch.float64), torch.randn(1, 1, 12, 4, dtype=torch.float64)
    columns, slashes = select.lines(q, k, 3, 2, last=5)
    for h in range(2):
        by_key, by_distance = [0.0] * 12, [0.0] * 12
        for row in range(4, 9):
            position = row + 3
            weights = [math.exp(float(q[0, h, row] @ k[0, 0, kv]) / 2) for kv in range(position + 1)]
            for kv, weight in enumerate(weights):
                by_key[kv] += weight / sum(weights)
                by_distance[position - kv] += weight / sum(weights)
        assert columns[h].nonzero().flatten().tolist() == by_a_stable_sort(by_key, 3, set())
        assert slashes[h].nonzero().flatten().tolist() == by_a_stable_sort(by_distance, 2, set())
    assert not select.lines(q, k[:, :, :2], 1, 1)[0].isnan().any()


def test_tokens_in_tiles() -> None:
    order = select.tile_order((2, 4, 6), (1, 2, 3)).tolist()
    places = [(t, y, x) for t in range(2) for y in range(4) for x in range(6)]
    want = sorted(range(48), key=lambda at: (tuple(n // m for n, m in zip(places[at], (1, 2, 3))), at))
    assert order == want


# --- errors -------------------------------------------------------------------------------------------------

X = torch.randn(1, 2, 8, 4)
S = Scores(torch.zeros(1, 2, 4, 4), 2, 2, 8, 8)
IDS = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: pool(X[0], 2), r"pool of torch.float32\[2, 8, 4\]"),
    (lambda: pool(X, 0), "block=0"),
    (lambda: pool(X, 2, "median"), "how='median'"),
    (lambda: pool(X, 2, torch.rand(3)), r"weights torch.float32\[3\] of 8 tokens"),
    (lambda: pool(X, 2).beside(pool(X, 4)), "the same blocks"),
    (lambda: score(X[0], X), "q of torch.float32"),
    (lambda: score(X[:, :1], X), "heads a multiple of the heads of k"),
    (lambda: score(X, X, over_keys="max"), "over_keys='max'"),
    (lambda: score(X, X, over_queries=("max", 0)), r"over_queries=\('max', 0\)"),
    (lambda: score(X, X, over_heads=("max", 3)), r"over_heads=\('max', 3\) of 2 heads"),
    (lambda: score(X, X, over_heads=torch.rand(3)), r"over_heads of torch.float32\[3\]"),
    (lambda: Scores(torch.zeros(1, 2, 4, 4), 2, 2, 9, 8), r"\[B, H, 5, 4\]"),
    (lambda: Scores(torch.zeros(1, 2, 4, 4).int(), 2, 2, 8, 8), "scores of torch.int32"),
    (lambda: topk(X, 2), "a selection of torch.float32"),
    (lambda: topk(S, 0), "k=0"),
    (lambda: topk(S, 1, first=1, own=1), r"k=1 with first=1, own=1, last=0: up to 2 units"),
    (lambda: topk(S, 1, own=-1), "own=-1"),
    (lambda: mass(S, 1.5), "share=1.5"),
    (lambda: topk(S, 1, within=X), "within=torch.float32"),
    (lambda: select.tile_order((4, 6), (3, 3)), "tiles that divide"),
    (lambda: select.lines(X.expand(2, 2, 8, 4), X, 1, 1), r"lines of q \[2, 2, 8, 4\]"),
    (lambda: select.lines(X, X, 0, 1), "vertical=0"),
    (lambda: select.lines(X, X[..., :2], 1, 1), r"k \[1, 2, 8, 2\]"),
    (lambda: select.lines(X.int(), X, 1, 1), "q of torch.int32"),
    (lambda: select.tile_order((4, 6), (0, 3)), "two tuples of positive ints"),
    (lambda: select.tile_order(4, 2), "two tuples of positive ints"),  # type: ignore[arg-type]
    (lambda: pool(X, 2, ["mean"]), r"how=\['mean'\]"),  # type: ignore[arg-type]
    (lambda: pool(X, 2, torch.rand(3, 8)), r"weights torch.float32\[3, 8\] of 8 tokens"),
    (lambda: pool(X, 2).beside(pool(X[:, :1], 2)), "the same blocks"),
    (lambda: pool(X, 2).beside(X), "the same blocks"),  # type: ignore[arg-type]
    (lambda: score(X, X, scale=math.nan), "scale=nan"),
    (lambda: score(X, X, over_heads=torch.rand(1, 2, 9)), r"over_heads of torch.float32\[1, 2, 9\]"),
    (lambda: threshold(S, "0"), "least='0'"),  # type: ignore[arg-type]
    (lambda: threshold(S, torch.zeros(3)), r"least of shape \[3\]"),
    (lambda: mass(S, torch.zeros(4)), r"share of shape \[4\]"),
    (lambda: mass(S, None), "share=None"),  # type: ignore[arg-type]
    (lambda: topk(S, 1, within=Lists(IDS, kv_len=8, unit=2, queries=2, window=1)), "tail, window and sinks"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_says_what_was_given_and_what_to_do(number: int) -> None:
    make, text = ERRORS[number]
    with pytest.raises((InputError, UnsupportedError), match=text) as raised:
        make()
    assert "to fix:" in str(raised.value)


def test_the_package_is_public() -> None:
    assert fa4flex.select is select and set(select.__all__) <= set(dir(select))
