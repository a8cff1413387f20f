"""The CPU backward against torch.autograd through the fp64 oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpu_cases import CASES, MODIFIED, PLAIN, Case, Sizes, uniform
from helpers import DRAWS, close, no_worse, worst
from largest import largest_tensor
from test_cpu_forward import plain_scores
from torch import Tensor

from fa4flex import reference
from fa4flex.codegen.evaluate import Captured
from fa4flex.runtime.cpu import Gradients, Inputs, backward, forward, tiles

F64 = torch.float64


def floating(tables: list[Tensor]) -> list[int]:
    return [slot for slot, t in enumerate(tables) if t.is_floating_point()]


def run(
    case: Case, qkv: list[Tensor], tables: list[Tensor], upstream: list[Any], sinks: Tensor | None = None
) -> Gradients:
    inputs = Inputs(*qkv, Captured(tuple(tables)), 0.25, sinks)
    return backward(case.facts, inputs, forward(case.facts, inputs), *upstream, floating(tables))


def by_autograd(results: list[Tensor], leaves: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    kept = [(r, u) for r, u in zip(results, upstream) if r.requires_grad and u is not None]
    if not kept:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad([r for r, _ in kept], leaves, [u for _, u in kept], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves)]


def oracle(
    case: Case, qkv: list[Tensor], tables: list[Tensor], upstream: list[Any], sinks: Tensor | None = None
) -> list[Tensor]:
    """Gradients of q, k, v, the floating tables, and the sinks."""
    qkv = [x.detach().clone().requires_grad_() for x in qkv]
    tables = [t.clone().requires_grad_(t.is_floating_point()) for t in tables]
    extra = [] if sinks is None else [sinks.clone().requires_grad_()]
    results = reference.attention(*qkv, *case.mods(tables), scale=0.25, sinks=extra[0] if extra else None)
    return by_autograd(list(results), [*qkv, *(tables[i] for i in floating(tables)), *extra], upstream)


def listed(got: Gradients) -> list[Tensor]:
    return [x for x in (got.dq, got.dk, got.dv, *got.operands, got.sinks) if x is not None]


def upstreams(sizes: Sizes) -> list[Tensor]:
    rows = sizes.batch, sizes.heads, sizes.q_len
    return [torch.randn(*rows, sizes.dim_v, dtype=F64), torch.randn(*rows, dtype=F64)]


def check(case: Case, sizes: Sizes, sinks: bool = False) -> None:
    qkv, tables, upstream = sizes.qkv(F64), case.tables(sizes), upstreams(sizes)
    sink = uniform(sizes.heads) * 3 if sinks else None
    got, want = run(case, qkv, tables, upstream, sink), oracle(case, qkv, tables, upstream, sink)
    assert len(listed(got)) == len(want)
    for g, w in zip(listed(got), want):
        assert close(g, w)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, sinks: bool) -> None:
    check(CASES[name], Sizes(), sinks)


@pytest.mark.parametrize("name", ["dense", "window per head", "alibi", "bias by distance"])
@pytest.mark.parametrize("ratio", [1, 3, 8])
def test_grouped_heads(ratio: int, name: str) -> None:
    check(CASES[name], Sizes(1, 2 * ratio, 2, 90, 140))
    check(CASES[name], Sizes(2, ratio, 1, 70, 130, 8, 24))


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 257), (127, 129), (129, 127), (256, 128), (255, 257)]
)
def test_lengths(q_len: int, kv_len: int) -> None:
    for name in ("bottom-right", "bias by distance"):
        check(CASES[name], Sizes(1, 2, 1, q_len, kv_len, 8, 4))


def test_empty_tensors() -> None:
    for sizes in (Sizes(q_len=0), Sizes(kv_len=0), Sizes(batch=0), Sizes(dim_v=0), Sizes(dim=0)):
        check(PLAIN["dense"], sizes)


def test_many_spans_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SCORES", 128 * 128)
    for name in ("soft cap", "rows that see nothing", "buckets", "dot of tables"):
        check(CASES[name], Sizes(1, 2, 1, 200, 500), sinks=True)


def test_upstream_gradients_of_any_layout() -> None:
    """Expanded, transposed, or no gradient of the lse."""
    sizes, case = Sizes(), PLAIN["causal"]
    qkv = sizes.qkv(F64)
    rows = sizes.batch, sizes.heads, sizes.q_len
    for dout, dlse in (
        (torch.ones((), dtype=F64).expand(*rows, sizes.dim_v), None),
        (torch.randn(2, 150, 4, 16, dtype=F64).transpose(1, 2), torch.ones((), dtype=F64).expand(rows)),
    ):
        got = run(case, qkv, [], [dout, dlse])
        for g, w in zip(listed(got), oracle(case, qkv, [], [dout, dlse])):
            assert close(g, w)


def test_rows_that_see_nothing_have_zero_gradients() -> None:
    sizes, case = Sizes(), PLAIN["rows that see nothing"]
    got = run(case, sizes.qkv(F64), [], upstreams(sizes))
    rows = torch.arange(sizes.q_len)
    empty = (rows % 7 == 2) | (rows + 3 >= sizes.kv_len - 1)
    assert empty.any() and (got.dq[:, :, empty] == 0).all() and not (got.dq[:, :, ~empty] == 0).all()


def test_only_what_is_needed_is_computed() -> None:
    sizes, case = Sizes(), MODIFIED["bias by query"]
    qkv, tables = sizes.qkv(F64), case.tables(sizes)
    inputs = Inputs(*qkv, Captured(tuple(tables)), 0.25)
    got = backward(case.facts, inputs, forward(case.facts, inputs), *upstreams(sizes), needs=(1,))
    assert got.operands[0] is None and got.operands[1] is not None and got.sinks is None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, case: Case, *tensors: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v, sinks, *tables = tensors
        ctx.case, ctx.inputs = case, Inputs(q, k, v, Captured(tuple(tables)), 0.3, sinks)
        ctx.saved = forward(case.facts, ctx.inputs)
        return ctx.saved.out, ctx.saved.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = range(len(ctx.inputs.captured.operands))
        g = backward(ctx.case.facts, ctx.inputs, ctx.saved, dout, dlse, needs)
        return None, g.dq, g.dk, g.dv, g.sinks, *g.operands


@pytest.mark.parametrize("name", ["soft cap", "bias by distance", "dot of tables"])
def test_gradcheck(name: str) -> None:
    """Finite differences: independent of the oracle."""
    case, sizes = CASES[name], Sizes(1, 2, 1, 4, 5, 3, 2)
    tensors = [*sizes.qkv(F64), uniform(2), *case.tables(sizes)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: _Attention.apply(case, *t), leaves, fast_mode=True)


def plain_gradients(case: Case, qkv: list[Tensor], tables: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Gradients by plain PyTorch in the inputs' own dtype.

    Half precision: autograd. In fp32 the blockwise formula with whole matrices, because autograd's softmax
    subtracts rowsum(P dP), which cancels better than rowsum(dO O); the formula is what is compared there.
    """
    leaves = [x.clone().requires_grad_() for x in (*qkv, *tables)]
    scores, v = plain_scores(case, leaves[:3], leaves[3:])
    if dout.dtype != torch.float32:
        return by_autograd([scores.softmax(-1) @ v], leaves, [dout])
    with torch.no_grad():
        p = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        dscores = p * (dout @ v.mT - (dout * (p @ v)).sum(-1, keepdim=True))
    return by_autograd([scores, p @ v], leaves, [dscores, dout])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "soft cap", "alibi"])
def test_precision(name: str, dtype: torch.dtype) -> None:
    """At most twice plain PyTorch's error in the same dtype, in the worst element and row."""
    case, sizes = CASES[name], Sizes(1, 4, 2, 200, 300, 64, 64)
    ours, plain = [], []
    for _ in range(DRAWS):
        qkv, tables = sizes.qkv(dtype), [t.to(dtype) for t in case.tables(sizes)]
        dout = upstreams(sizes)[0].to(dtype)
        got = listed(run(case, qkv, tables, [dout, None]))
        want = oracle(case, qkv, tables, [dout.double(), None])
        same = plain_gradients(case, qkv, tables, dout)
        assert all(g.dtype == dtype for g in got)
        ours.append([e for g, w in zip(got, want, strict=True) for e in worst(g, w)])
        plain.append([e for p, w in zip(same, want, strict=True) for e in worst(p, w)])
    no_worse(ours, plain)


def test_repeats_are_bit_equal() -> None:
    sizes = Sizes(1, 2, 1, 300, 400, 64, 64)
    for name in ("alibi", "buckets", "dot of tables", "bias by distance"):
        case = CASES[name]
        qkv, tables = sizes.qkv(torch.float32), [t.float() for t in case.tables(sizes)]
        upstream = [x.float() for x in upstreams(sizes)]
        first, second = (listed(run(case, qkv, tables, upstream)) for _ in range(2))
        for a, b in zip(first, second):
            assert torch.equal(a, b)


def test_hidden_keys_get_no_gradient_and_are_not_read() -> None:
    case = PLAIN["causal"]
    q, k, v = Sizes(1, 2, 2, 128, 500).qkv(F64)
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.inf
    got = run(case, [q, k, v], [], upstreams(Sizes(1, 2, 2, 128, 500)))
    assert all(x.isfinite().all() for x in (got.dq, got.dk, got.dv))
    assert (got.dk[:, :, 128:] == 0).all() and (got.dv[:, :, 128:] == 0).all()


def test_memory_is_bounded() -> None:
    for name in ("window", "alibi"):
        case, sizes = CASES[name], Sizes(1, 1, 1, 2560, 2560)
        qkv, tables = sizes.qkv(torch.float32), [t.float() for t in case.tables(sizes)]
        upstream = [x.float() for x in upstreams(sizes)]
        with largest_tensor() as largest:
            run(case, qkv, tables, upstream)
        # Index arithmetic is int64: twice the bytes of a score.
        assert largest.nbytes <= 8 * tiles.SCORES
