"""The CPU forward against the fp64 oracle."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_cases import CASES, MODIFIED, PLAIN, Case, Sizes, uniform
from helpers import DRAWS, close, no_worse, worst
from largest import largest_tensor
from torch import Tensor

from fa4flex import reference
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import const
from fa4flex.errors import InputError
from fa4flex.runtime.cpu import Forward, Inputs, forward, tiles

F64 = torch.float64


def run(case: Case, qkv: list[Tensor], tables: list[Tensor], sinks: Tensor | None = None) -> Forward:
    return forward(case.facts, Inputs(*qkv, Captured(tuple(tables)), 0.25, sinks))


def oracle(
    case: Case, qkv: list[Tensor], tables: list[Tensor], sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    score_mod, mask_mod = case.mods(tables)
    return reference.attention(*qkv, score_mod, mask_mod, scale=0.25, sinks=sinks)


def check(case: Case, sizes: Sizes, sinks: bool = False) -> None:
    qkv, tables = sizes.qkv(F64), case.tables(sizes)
    sink = uniform(sizes.heads) * 3 if sinks else None
    got, (out, lse) = run(case, qkv, tables, sink), oracle(case, qkv, tables, sink)
    assert close(got.out, out) and close(got.lse, lse)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, sinks: bool) -> None:
    check(CASES[name], Sizes(), sinks)


@pytest.mark.parametrize("name", ["dense", "window per head", "alibi"])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_grouped_heads(ratio: int, name: str) -> None:
    check(CASES[name], Sizes(1, 2 * ratio, 2, 90, 140))
    check(CASES[name], Sizes(2, ratio, 1, 70, 130, 8, 24))


@pytest.mark.parametrize("kv_len", [1, 127, 128, 129, 255, 257])
@pytest.mark.parametrize("q_len", [1, 127, 128, 129, 255, 257])
def test_lengths(q_len: int, kv_len: int) -> None:
    for name in ("dense", "bottom-right"):
        check(CASES[name], Sizes(1, 2, 1, q_len, kv_len, 8, 4))


def test_empty_tensors() -> None:
    for sizes in (Sizes(q_len=0), Sizes(kv_len=0), Sizes(batch=0), Sizes(dim_v=0), Sizes(dim=0)):
        check(PLAIN["dense"], sizes)


def test_long_rows_take_several_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a score buffer of one tile every row is an online softmax over many spans."""
    monkeypatch.setattr(tiles, "SCORES", 128 * 128)
    for name in ("dense", "soft cap", "rows that see nothing", "mask in the score", "window per head"):
        check(CASES[name], Sizes(1, 2, 1, 200, 500), sinks=True)


def test_strides_do_not_matter() -> None:
    q, k, v = (torch.randn(2, 90, 3, 16, dtype=F64).transpose(1, 2) for _ in range(3))
    case = PLAIN["causal"]
    wide = torch.randn(2, 3, 90, 32, dtype=F64)[..., ::2]
    for qkv in ([q, k, v], [wide, k.expand(2, 3, 90, 16), v]):
        got, (out, lse) = run(case, qkv, []), oracle(case, qkv, [])
        assert close(got.out, out) and close(got.lse, lse)


def test_max_scores() -> None:
    sizes, case = Sizes(), MODIFIED["soft cap"]
    q, k, v = sizes.qkv(F64)
    scores = torch.tanh(0.25 * q @ k.repeat_interleave(2, 1).mT * 0.5) * 2
    hidden = torch.ones(sizes.q_len, sizes.kv_len, dtype=torch.bool).triu(1)
    want = scores.masked_fill(hidden, -math.inf).amax(-1)
    torch.testing.assert_close(run(case, [q, k, v], []).max_scores, want)


def test_large_scores_do_not_overflow() -> None:
    qkv = Sizes(1, 2, 2, 40, 300).qkv(F64)
    got = run(PLAIN["causal"], [qkv[0] * 1e4, qkv[1] * 1e4, qkv[2]], [])
    out, lse = oracle(PLAIN["causal"], [qkv[0] * 1e4, qkv[1] * 1e4, qkv[2]], [])
    assert close(got.out, out) and close(got.lse, lse)


def plain_scores(case: Case, qkv: list[Tensor], tables: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All modified scores by PyTorch in the inputs' own dtype, and v repeated to the query heads."""
    q, (k, v) = qkv[0], (x.repeat_interleave(qkv[0].shape[1] // x.shape[1], 1) for x in qkv[1:])
    batch, heads, q_len, _ = q.shape
    index = torch.meshgrid(*map(torch.arange, (batch, heads, q_len, k.shape[2])), indexing="ij")
    score_mod, mask_mod = case.mods(tables)
    scores = (q @ k.mT) * 0.25
    scores = scores if score_mod is None else score_mod(scores, *index).to(q.dtype)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*index), -math.inf)
    return scores, v


def plainly(case: Case, qkv: list[Tensor], tables: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same maths by PyTorch in the inputs' own dtype, with the whole score matrix."""
    scores, v = plain_scores(case, qkv, tables)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "causal", "soft cap", "alibi"])
def test_precision(name: str, dtype: torch.dtype) -> None:
    """At most twice plain PyTorch's error in the same dtype, in the worst element and row."""
    case, sizes = CASES[name], Sizes(1, 4, 2, 200, 300, 64, 64)
    ours, plain = [], []
    for _ in range(DRAWS):
        qkv, tables = sizes.qkv(dtype), [t.to(dtype) for t in case.tables(sizes)]
        got, (out, lse) = run(case, qkv, tables), oracle(case, qkv, tables)
        plain_out, plain_lse = plainly(case, qkv, tables)
        assert got.out.dtype == dtype and got.lse.dtype == torch.float32
        ours.append([*worst(got.out, out), worst(got.lse, lse)[0]])
        plain.append([*worst(plain_out, out), worst(plain_lse, lse)[0]])
    no_worse(ours, plain)


def test_skipped_keys_are_never_read() -> None:
    """NaN in keys that no query sees, from the next tile on, does not reach the result."""
    case = PLAIN["causal"]
    q, k, v = Sizes(1, 2, 2, 128, 500).qkv(F64)
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.inf
    got = run(case, [q, k, v], [])
    out, lse = oracle(case, [q, k[:, :, :128], v[:, :, :128]], [])
    assert close(got.out, out) and close(got.lse, lse)


def test_mask_runs_in_partial_tiles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One evaluation of the mask for every partial tile, shared by the heads; none elsewhere."""
    case, length, evaluated = PLAIN["causal"], 1024, []
    original = tiles.evaluate

    def counting(roots, symbols, captured, dtype):  # type: ignore[no-untyped-def]
        values = original(roots, symbols, captured, dtype)
        if list(roots) == [case.mask]:
            evaluated.append(values[0].numel())
        return values

    monkeypatch.setattr(tiles, "evaluate", counting)
    run(case, Sizes(1, 4, 2, length, length).qkv(torch.float32), [])
    side = tiles.Walk(case.facts, Inputs(*Sizes(1, 4, 2, length, length).qkv(torch.float32))).rows
    dense = torch.ones(length, length, dtype=torch.bool).tril()
    blocks = dense.unflatten(0, (-1, side)).unflatten(2, (-1, tiles.KEY_TILE))
    partial = blocks.any(3).any(1) & ~blocks.all(3).all(1)
    assert sum(evaluated) == partial.sum().item() * side * tiles.KEY_TILE
    evaluated.clear()
    run(PLAIN["dense"], Sizes(1, 4, 2, length, length).qkv(torch.float32), [])
    assert evaluated == []


def test_memory_is_bounded() -> None:
    """No tensor is larger than the score buffer (8 MiB) or the inputs; all scores would be 25 MiB."""
    for name in ("window", "alibi"):
        case, sizes = CASES[name], Sizes(1, 1, 1, 2560, 2560)
        with largest_tensor() as largest:
            run(case, sizes.qkv(torch.float32), case.tables(sizes))
        assert largest.nbytes <= max(4 * tiles.SCORES, 8 * 2560 * sizes.dim)


def test_repeats_are_bit_equal() -> None:
    sizes = Sizes(1, 4, 2, 500, 700, 64, 64)
    for name in ("causal", "alibi"):
        qkv, tables = sizes.qkv(torch.float32), CASES[name].tables(sizes)
        first, second = run(CASES[name], qkv, tables), run(CASES[name], qkv, tables)
        assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)


def test_reading_past_a_table_is_an_error() -> None:
    sizes, case = Sizes(), MODIFIED["table as long as the window"]
    with pytest.raises(InputError, match="read past a captured tensor"):
        run(case, sizes.qkv(F64), [uniform(sizes.heads, 39)])


def test_scores_that_are_constant() -> None:
    """A mod that ignores the score: the softmax is uniform."""
    q, k, v = Sizes().qkv(F64)
    got = run(Case(const(1.5)), [q, k, v], [])
    torch.testing.assert_close(got.out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(got.out))
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, 1.5 + math.log(260)))
