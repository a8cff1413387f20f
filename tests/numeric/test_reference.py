"""The oracle against loops over scalars, and against torch's own dense flex_attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fa4flex import reference
from fa4flex.errors import InputError

F64 = torch.float64


def by_loops(
    q: Tensor, k: Tensor, v: Tensor, score: Callable[..., float], sinks: list[float] | None
) -> tuple[Tensor, Tensor]:
    """The formula on Python numbers. `score` returns -inf for a masked pair."""
    ratio = q.shape[1] // k.shape[1]
    out, lse = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64), torch.full(q.shape[:3], -math.inf, dtype=F64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        dots = [float(q[b, h, i].double() @ k[b, h // ratio, j].double()) for j in range(k.shape[2])]
        weights = [math.exp(score(s / math.sqrt(q.shape[3]), b, h, i, j)) for j, s in enumerate(dots)]
        total = sum(weights) + (math.exp(sinks[h]) if sinks else 0)
        if total:
            lse[b, h, i] = math.log(total)
            out[b, h, i] = sum(
                (w / total * v[b, h // ratio, j].double() for j, w in enumerate(weights)), out[b, h, i]
            )
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 2.0, 0.0]])
def test_formula(sinks: list[float] | None, dtype: torch.dtype) -> None:
    q, k, v = (
        torch.randn(2, 4, 5, 3).to(dtype),
        torch.randn(2, 2, 6, 3).to(dtype),
        torch.randn(2, 2, 6, 2).to(dtype),
    )
    bias = torch.randn(4, 5, dtype=F64)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, kv_len: int) -> Tensor:
        return torch.tanh(s) * ((h + 1) * 0.1) + bias[h, i] * (j - b) / kv_len

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < i) & (j != h)

    def scalar(s: float, b: int, h: int, i: int, j: int) -> float:
        modified = math.tanh(s) * (h + 1) * 0.1 + float(bias[h, i]) * (j - b) / 6
        return modified if j < i and j != h else -math.inf

    out, lse = reference.attention(
        q, k, v, score_mod, mask_mod, sinks=None if sinks is None else torch.tensor(sinks)
    )
    want_out, want_lse = by_loops(q, k, v, scalar, sinks)
    assert out.dtype == lse.dtype == F64
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_against_flex_attention() -> None:
    q, k, v = (torch.randn(2, 2, 130, 8, dtype=F64) for _ in range(3))
    slopes, ids = torch.rand(2, dtype=F64), torch.randint(0, 3, (2, 130)).sort().values

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - slopes[h] * (i - j)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ids[b, i] == ids[b, j]) & (j <= i)

    blocks = create_block_mask(mask_mod, 2, None, 130, 130, device="cpu")
    want = flex_attention(q, k, v, score_mod, blocks)
    for mask in (mask_mod, blocks):
        torch.testing.assert_close(reference.attention(q, k, v, score_mod, mask)[0], want)


def test_block_map_without_a_mask_mod_is_a_mask() -> None:
    count = torch.ones(1, 1, 3, dtype=torch.int32)
    diagonal = torch.tensor([[0, 1, 2], [1, 0, 2], [2, 0, 1]], dtype=torch.int32).view(1, 1, 3, 3)
    blocks = BlockMask.from_kv_blocks(count, diagonal, BLOCK_SIZE=4)
    allowed = reference.allowed_pairs(blocks, (1, 1, 12, 12))
    assert torch.equal(allowed[0, 0], torch.block_diag(*[torch.ones(4, 4)] * 3).bool())
    upper = BlockMask.from_kv_blocks(
        count * 0, diagonal, count, diagonal, BLOCK_SIZE=4, mask_mod=lambda b, h, i, j: j > 99
    )
    assert torch.equal(reference.allowed_pairs(upper, (1, 1, 12, 12)), allowed)


def test_gradients_by_finite_differences() -> None:
    q, k, v = (
        torch.randn(1, 2, 3, 2, dtype=F64),
        torch.randn(1, 1, 4, 2, dtype=F64),
        torch.randn(1, 1, 4, 2, dtype=F64),
    )
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(2, dtype=F64), torch.randn(2, 3, dtype=F64))]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> Any:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s.sin() + bias[h, i] * j

        return reference.attention(q, k, v, score_mod, lambda b, h, i, j: j < i + 2, sinks=sinks)

    assert torch.autograd.gradcheck(run, leaves)


def test_a_fully_masked_row_has_no_nan() -> None:
    q, k, v = (torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    bias = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    # log(0) at j == 0, which the mask hides.
    out, lse = reference.attention(
        q, k, v, lambda s, b, h, i, j: s + bias[i] * j.log(), lambda b, h, i, j: (i > 1) & (j > 0)
    )
    assert (out[0, 0, :2] == 0).all() and (lse[0, 0, :2] == -math.inf).all()
    (out.sum() + lse[0, 0, 2:].sum()).backward()
    for x in (q, k, v, bias):
        assert x.grad is not None and x.grad.dtype == x.dtype and x.grad.isfinite().all()
    assert (q.grad[0, 0, :2] == 0).all() and q.grad.abs().sum() > 0


def test_only_the_sink_is_left() -> None:
    x = torch.randn(1, 2, 3, 4)
    sinks = torch.tensor([0.25, -2.0])
    out, lse = reference.attention(x, x, x, None, lambda b, h, i, j: j < 0, sinks=sinks)
    assert (out == 0).all() and torch.equal(lse, sinks.double().view(1, 2, 1).expand(1, 2, 3))


def test_ragged_and_paged() -> None:
    """Sequences are independent, see themselves as b, and pages only say where keys are."""
    lengths_q, lengths_k = [2, 0, 3], [4, 3, 5]
    q = torch.randn(sum(lengths_q), 2, 4, dtype=F64)
    pools = torch.randn(2, 9, 2, 2, 4, dtype=F64)
    page_table = torch.tensor([[7, 2, 0], [1, 8, 0], [3, 5, 6]])
    lengths = torch.tensor(lengths_k)
    (k, ranges), (v, _) = (reference.unpage(pool, page_table, lengths) for pool in pools)
    rows = reference.sequence_ranges(torch.tensor([0, 2, 2, 5]))
    out, lse = reference.varlen(
        (q, k, v), (rows, ranges), lambda s, b, h, i, j, q_len: s * (b + 1) + j * q_len
    )
    for n, (start, stop) in enumerate(rows):
        if start == stop:
            continue
        keys, values = (torch.cat([pool[p] for p in page_table[n]])[: lengths_k[n]] for pool in pools)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys) / 2 * (n + 1)
        scores = scores + torch.arange(lengths_k[n]) * lengths_q[n]
        torch.testing.assert_close(out[start:stop], torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        torch.testing.assert_close(lse[:, start:stop], scores.logsumexp(-1))


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(InputError, match="3 query heads with 2 key-value heads"):
        reference.attention(torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))
