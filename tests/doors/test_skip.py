"""`Precision(skip=...)` at every door: within its bound where it is honoured, refused in words elsewhere."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import InputError, Paging, Precision, Schedule, UnsupportedError, Varlen, reference
from fa4flex.primitives.precision import refuse_skip
from fa4flex.runtime.programs import publish, read
from fa4flex.variants import alibi, causal

SKIP = 1e-2
B, H, KV, S, D = 2, 4, 2, 96, 16
SLOPES = torch.full((H,), 0.5)
TILE = Schedule(tile=(16, 16))


def qkv(rows: int = S, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (H, rows), (KV, S), (KV, S)
    return tuple(torch.randn(B, heads, n, D).to(dtype) for heads, n in shapes)  # type: ignore[return-value]


def compiled(skip: float | None = SKIP, **more: Any) -> fa4flex.Attention:
    options: dict[str, Any] = {"precision": Precision(skip=skip), "schedule": TILE, **more}  # type: ignore[arg-type]
    return fa4flex.compile(alibi(SLOPES), causal, **options)


def within(out: Tensor, q: Tensor, k: Tensor, v: Tensor, skip: float = SKIP) -> float:
    """The error of an output, of which each element keeps its bound."""
    exact, _ = reference.attention(q, k, v, alibi(SLOPES), causal)
    allowed = reference.allowed_pairs(causal, (*q.shape[:3], k.shape[2]))
    error = (out - exact).abs()
    assert bool((error <= reference.skip_bound(skip, v, allowed) + 1e-12).all())
    return float(error.max())


# --- the option -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [-1e-3, 1, 1.5, math.nan, math.inf, True, "1e-3", torch.tensor(0.1)])
def test_what_is_no_share_is_refused(skip: Any) -> None:
    with pytest.raises(InputError, match=r"(?s)skip=.*at least 0 and below 1.*1e-3"):
        Precision(skip=skip)


def test_none_is_zero_and_both_are_exact_to_the_last_bit(seed: int) -> None:
    assert Precision(skip=None) == Precision(skip=0) == Precision()  # type: ignore[arg-type]
    for rows in (1, S):
        given = qkv(rows, torch.float32)
        plain = fa4flex.compile(alibi(SLOPES), causal)
        for skip in (None, 0):
            assert torch.equal(compiled(skip, schedule=Schedule())(*given), plain(*given))


def test_repr_and_program_text_hold_it() -> None:
    variant = compiled().variant
    assert eval(repr(variant.precision)) == variant.precision
    program = compiled().prepared.program
    assert read(program.text) is program and "0.01" in program.text
    other = publish(program.facts, program.schedule, Precision(skip=0.5))
    assert other is not program and read(other.text).precision.skip == 0.5


# --- doors that honour it -----------------------------------------------------------------------------------


def once(**more: Any) -> Callable[..., Tensor]:
    composed = {"score_mod": alibi(SLOPES), "mask": causal, "precision": Precision(skip=SKIP)}
    return lambda q, k, v: fa4flex.attention(q, k, v, schedule=TILE, **composed, **more)


def by_module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module = fa4flex.nn.Attention(alibi(SLOPES), causal, precision=Precision(skip=SKIP), schedule=TILE)
    return copy.deepcopy(module)(q, k, v)


def exported(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled()(q, k, v)

    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (q, k, v)), file)
    file.seek(0)
    return torch.export.load(file).module()(q, k, v)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two parts of the keys, each with its own share left out."""
    parts = []
    for start, stop in ((0, S // 2), (S // 2, S)):

        def part(b, h, q_idx, kv_idx, start=start, stop=stop):  # type: ignore[no-untyped-def]
            return (start <= kv_idx) & (kv_idx < stop) & (kv_idx <= q_idx)

        attn = fa4flex.compile(alibi(SLOPES), part, precision=Precision(skip=SKIP), schedule=TILE)
        parts.append(attn(q, k, v, return_lse=True))
    return fa4flex.merge(*zip(*parts, strict=True))[0]


def paged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = torch.arange(B * S // 16, dtype=torch.int32).view(B, -1)
    k, v = (x.transpose(1, 2).reshape(-1, 16, KV, D) for x in (k, v))
    paging = Paging(table, torch.full((B,), S, dtype=torch.int32))
    return compiled()(q, k, v, paging=paging)


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    used = torch.full((B,), S, dtype=torch.int32)
    return compiled()(q, k, v, varlen=Varlen(seqused_q=used, seqused_k=used))


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    varlen = Varlen(torch.arange(B + 1, dtype=torch.int32) * S)
    out = compiled()(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), varlen=varlen)
    return out.unflatten(0, (B, S)).transpose(1, 2)


DOORS: dict[str, Callable[..., Tensor]] = {
    "compile": lambda q, k, v: compiled()(q, k, v),
    "attention": once(),
    "module": by_module,
    "bshd": lambda q, k, v: once(layout="bshd")(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),
    "torch.compile": lambda q, k, v: torch.compile(lambda *x: compiled()(*x), backend="eager")(q, k, v),
    "export": exported,
    "merge": merged,
    "paged": paged,
    "padded": padded,
    "packed": packed,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_door_leaves_out_and_keeps_the_bound(door: str, seed: int) -> None:
    given = qkv()
    assert within(DOORS[door](*given), *given) > 1e-9, "something is left out"


def test_single_queries_keep_it_too(seed: int) -> None:
    given = qkv(1)
    assert within(compiled()(*given), *given) > 1e-9


# --- what was left out --------------------------------------------------------------------------------------


def test_skipped_counts_by_query_and_head(seed: int) -> None:
    q, k, v = qkv()
    slopes = torch.tensor([0.0, 0.01, 0.5, 4.0])
    attn = fa4flex.compile(alibi(slopes), causal, precision=Precision(skip=SKIP), schedule=TILE)
    share = attn.skipped(q * 0.1, k, v)
    assert share.shape == (B, H, S) and share.dtype == torch.float32
    assert not share[:, 0].any() and not share[:, :, :16].any()
    assert bool((share[:, 3, -1] > share[:, 2, -1]).all()) and bool((share[:, 2, -1] > 0).all())
    assert float(share.max()) < 1
    varlen = Varlen(torch.arange(B + 1, dtype=torch.int32) * S)
    flat = attn.skipped(*(x.transpose(1, 2).flatten(0, 1) for x in (q * 0.1, k, v)), varlen=varlen)
    assert torch.equal(flat.unflatten(1, (B, S)).transpose(0, 1), share)
    assert not fa4flex.compile(alibi(slopes), causal).skipped(q, k, v).any()


def test_nan_is_never_left_out(seed: int) -> None:
    q, k, v = qkv()
    k[:, :, 3] = math.nan
    assert bool(compiled()(q, k, v)[:, :, -1].isnan().all())


# --- doors that refuse --------------------------------------------------------------------------------------


def test_what_cannot_be_combined_is_refused(seed: int) -> None:
    given = qkv()
    attn = compiled()
    with pytest.raises(UnsupportedError, match=r'(?s)skip=0\.01.*backend "flex".*skip=0'):
        compiled(backend="flex")
    with pytest.raises(UnsupportedError, match=r"(?s)skip=0\.01.*exact function"):
        torch.func.jvp(lambda q: attn(q, *given[1:]), (given[0],), (given[0],))
    with pytest.raises(UnsupportedError, match=r"(?s)skip=0\.01.*exact function"):
        torch.func.vmap(lambda q: attn(q[None], given[1][:1], given[2][:1]))(given[0])
    q = given[0].requires_grad_()
    (grad,) = torch.autograd.grad(attn(*given).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"(?s)skip=0\.01.*exact function"):
        grad.sum().backward()
    refuse_skip(0.0, "anything", "nothing is left out")


def test_explain_tells_the_bounds() -> None:
    text = str(compiled().explain(S))
    assert "hold at most 0.01 of a query's probability" in text and "backward: leaves out nothing" in text
    assert "0.0101" in text and "fused kernel" not in text
    assert "skip" not in str(fa4flex.compile(alibi(SLOPES), causal).explain(S)).split("mask")[0]
    with_sinks = str(compiled(sinks=torch.zeros(H)).explain(S))
    assert "and 0" in with_sinks
