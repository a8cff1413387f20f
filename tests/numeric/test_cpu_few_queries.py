"""A few queries at once: what they give is what tiles give, and the oracle."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_cases import CASES, Case, Sizes, uniform
from helpers import close
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import fa4flex
from fa4flex import reference
from fa4flex.codegen.evaluate import Captured
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.runtime import blockwise
from fa4flex.runtime.cpu import Forward, Inputs, few, forward
from fa4flex.variants import causal, sliding_window

F64 = torch.float64
SIZES = {
    "decoding": Sizes(q_len=1),
    "four queries": Sizes(1, 6, 2, 4, 90, 8, 24),
    "one head": Sizes(3, 1, 1, 2, 130),
    "one key": Sizes(2, 4, 4, 1, 1),
}


def inputs(case: Case, sizes: Sizes, sinks: bool) -> tuple[Inputs, list[Tensor], Tensor | None]:
    tables, sink = case.tables(sizes), uniform(sizes.heads) * 3 if sinks else None
    return Inputs(*sizes.qkv(F64), Captured(tuple(tables)), 0.25, sink), tables, sink


def by_tiles(case: Case, given: Inputs, monkeypatch: pytest.MonkeyPatch) -> Forward:
    with monkeypatch.context() as patched:
        patched.setattr(few, "FEW_QUERIES", 0)
        return forward(case.facts, given)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, sinks: bool, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    given, tables, sink = inputs(case, sizes, sinks)
    found, tiles = forward(case.facts, given), by_tiles(case, given, monkeypatch)
    score_mod, mask_mod = case.mods(tables)
    out, lse = reference.attention(given.q, given.k, given.v, score_mod, mask_mod, scale=0.25, sinks=sink)
    assert close(found.out, out) and close(found.lse, lse)
    assert close(found.max_scores, tiles.max_scores) and close(found.total, tiles.total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_are_those_of_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = CASES["alibi"], Sizes(q_len=1)
    one = Inputs(*given.qkv(dtype), Captured((uniform(given.heads).float(),)), 0.25)
    results, tiles = vars(forward(case.facts, one)), vars(by_tiles(case, one, monkeypatch))
    assert results.pop("entropy") is tiles.pop("entropy") is None
    for a, b in zip(results.values(), tiles.values(), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b)


def test_strides_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["causal"]
    q, k, v = (torch.randn(2, n, 3, 16, dtype=F64).transpose(1, 2) for n in (2, 40, 40))
    for given in (Inputs(q, k, v), Inputs(q, k[:, :1].expand_as(k), v[..., ::2])):
        found, tiles = forward(case.facts, given).out, by_tiles(case, given, monkeypatch).out
        assert close(found, tiles) and found.stride() == tiles.stride()


@pytest.mark.parametrize("name", ["causal", "nothing at all", "soft cap"])
def test_infinite_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose every score is -inf give what tiles give, not NaN where those give none."""
    case, sizes = CASES[name], Sizes(q_len=1)
    q, k, v = sizes.qkv(F64)
    given = Inputs(q.abs(), torch.full_like(k, -torch.inf), v, Captured(tuple(case.tables(sizes))))
    found, tiles = forward(case.facts, given), by_tiles(case, given, monkeypatch)
    torch.testing.assert_close(found.out, tiles.out, equal_nan=True)
    torch.testing.assert_close(found.lse, tiles.lse, equal_nan=True)


def test_reads_past_a_table_where_the_mask_hides_them() -> None:
    table = torch.randn(5, requires_grad=True)
    attn = fa4flex.compile(
        lambda s, b, h, q_idx, kv_idx: s + table[kv_idx], lambda b, h, q_idx, kv_idx: kv_idx < 5
    )
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 30, 30))
    out = attn(q, k, v)
    want = fa4flex.compile(lambda s, b, h, q_idx, kv_idx: s + table[kv_idx])(q, k[:, :, :5], v[:, :, :5])
    torch.testing.assert_close(out, want)


def test_reads_past_a_table_raise() -> None:
    table = torch.zeros(5)
    attn = fa4flex.compile(lambda s, b, h, q_idx, kv_idx: s + table[kv_idx])
    with pytest.raises(IndexError, match="past"):
        attn(*(torch.randn(1, 2, n, 8) for n in (1, 30, 30)))


def test_gradients() -> None:
    """The backward pass reads what the forward pass saved."""
    sizes = Sizes(q_len=2, kv_len=40)
    tensors = [*sizes.qkv(F64), uniform(sizes.heads)]
    for x in tensors:
        x.requires_grad_()
    q, k, v, sinks = tensors
    slopes = uniform(sizes.heads).requires_grad_()

    def alibi(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + slopes[h] * (q_idx - kv_idx)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + 30

    attn = fa4flex.compile(alibi, mask, sinks=sinks, scale=0.25)
    out, lse = attn(q, k, v, return_lse=True)
    found = torch.autograd.grad(out.sin().sum() + lse.sum(), [*tensors, slopes])
    out, lse = reference.attention(q, k, v, alibi, mask, scale=0.25, sinks=sinks)
    want = torch.autograd.grad(out.sin().sum() + lse.sum(), [*tensors, slopes])
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_chosen_tile_and_long_calls_walk_tiles() -> None:
    q, k, v = Sizes(q_len=1).qkv(F64)
    assert few.few_queries(CASES["dense"].facts, Inputs(q, k, v)) is not None
    assert few.few_queries(CASES["dense"].facts, Inputs(q, k, v, tile=(16, 16))) is None
    assert few.few_queries(CASES["dense"].facts, Inputs(q.expand(-1, -1, 5, -1), k, v)) is None
    long = k[:, :, :1].expand(-1, -1, few.FEW_PRODUCTS // 64, -1)
    assert few.few_queries(CASES["dense"].facts, Inputs(q, long, long)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2)], ids=str)
def test_single_queries(order: tuple[int, int, int], dtype: torch.dtype) -> None:
    """PyTorch's kernel gives what the tile gives, in the same memory."""
    sizes = Sizes(q_len=1)

    def laid_out(x: Tensor) -> Tensor:
        kept = x.permute(*order, 3).contiguous()
        return kept.permute(*(order.index(i) for i in range(3)), 3)

    given = Inputs(*(laid_out(x) for x in sizes.qkv(dtype)), scale=0.3)
    plain = CASES["dense"].facts
    tile, found = forward(plain, given), few.single_queries(plain, given)
    assert found is not None
    out, lse = found
    torch.testing.assert_close(out, tile.out)
    torch.testing.assert_close(lse, tile.lse)
    order_of = [[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (out, tile.out)]
    assert order_of[0] == order_of[1] and out.dtype == tile.out.dtype and lse.dtype == tile.lse.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_of_half_precision_in_turns(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a few heads are widened at once, to the same bits."""
    given = Inputs(*Sizes(3, 10, 5, 1).qkv(dtype), scale=0.3)
    plain = CASES["dense"].facts
    whole = few.single_queries(plain, given)
    for most in (1, 260 * 16, 260 * 16 * 2):
        monkeypatch.setattr(few, "WIDENED", most)
        found = few.single_queries(plain, given)
        assert whole is not None and found is not None
        assert all(map(torch.equal, found, whole))


def test_what_is_no_plain_single_query_is_left_to_others() -> None:
    plain, sizes = CASES["dense"].facts, Sizes(q_len=1)
    q, k, v = sizes.qkv(torch.float32)
    one = Inputs(q, k, v)
    assert few.single_queries(plain, one) is not None
    others = (
        replace(one, q=torch.cat((q, q), 2)),
        replace(one, sinks=torch.zeros(sizes.heads)),
        replace(one, v=torch.cat((v, v), 3)),
        replace(one, compute=torch.float64),
        replace(one, k=k.mT.contiguous().mT),
        replace(one, k=k[:, :, :0], v=v[:, :, :0]),
    )
    assert all(few.single_queries(plain, other) is None for other in others)
    assert few.single_queries(CASES["alibi"].facts, replace(one, captured=Captured((q[0, :, 0, 0],)))) is None
    by_head = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: kv_idx <= 2 * h).program.facts
    assert few.single_queries(by_head, one) is None


@pytest.mark.parametrize("kv_len", [1, 7, 40])
@pytest.mark.parametrize("mask", [causal, sliding_window(9), causal & sliding_window(9)], ids=str)
def test_a_single_query_sees_keys_that_lie_together(mask: Any, kv_len: int) -> None:
    program, sizes = fa4flex.compile(mask=mask).program, Sizes(q_len=1, kv_len=kv_len)
    given = Inputs(*sizes.qkv(torch.float32), captured=program.captured())
    found, tile = few.single_queries(program.facts, given), forward(program.facts, given)
    assert found is not None
    torch.testing.assert_close(found[0], tile.out)
    torch.testing.assert_close(found[1], tile.lse)


def test_maxima_and_gradients_of_a_single_query() -> None:
    """Both need more than PyTorch's kernel gives."""
    q, k, v = (x.requires_grad_() for x in Sizes(q_len=1).qkv(F64))
    small = [x.detach().float() for x in (q, k, v)]
    _, aux = fa4flex.flex_attention(*small, enable_gqa=True, return_aux=AuxRequest(max_scores=True))
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ wide_k.mT * q.shape[-1] ** -0.5
    torch.testing.assert_close(aux.max_scores, scores.amax(-1).float())
    single = [x.requires_grad_() for x in small]
    found = torch.autograd.grad(fa4flex.compile()(*single).sum(), single)
    exact = torch.autograd.grad((scores.softmax(-1) @ wide_v).sum(), (q, k, v))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_spans_of_a_single_query_follow_numbers_and_lengths() -> None:
    """Spans are kept by what they follow from: a window's number may be new at each call, as its keys are."""
    window = SimpleNamespace(size=9)
    attn = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: kv_idx < window.size)
    for size, kv_len in [(9, 40), (4, 40), (9, 40), (9, 7), (50, 7), (4, 7)]:
        window.size = size
        q, k, v = Sizes(q_len=1, kv_len=kv_len).qkv(torch.float32)
        whole = fa4flex.compile()(q, k[:, :, :size], v[:, :, :size])
        torch.testing.assert_close(attn(q, k, v), whole)


def served(
    attn: fa4flex.Attention, qkv: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, bool]:
    """(out, lse), and whether the call passed by the checks of each tensor."""
    made, compute = [], blockwise.single_queries
    with monkeypatch.context() as patched:
        patched.setattr(blockwise, "single_queries", lambda *given: made.append(compute(*given)) or made[-1])
        found = attn(*qkv, return_lse=True)
    return found, any(x is not None for x in made)


@pytest.mark.parametrize("mask", [None, sliding_window(9) & causal], ids=str)
@pytest.mark.parametrize("dtype", few.DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_single_queries_pass_by_checks(
    layout: Any, dtype: torch.dtype, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are the same with the checks and without them."""
    attn = fa4flex.compile(mask=mask, layout=layout)
    for kv_len in (1, 8, 40):  # as a cache grows
        q, k, v = Sizes(q_len=1, kv_len=kv_len).qkv(dtype)
        given = (q, k, v) if layout == "bhsd" else tuple(x.transpose(1, 2) for x in (q, k, v))
        found, passed = served(attn, given, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(blockwise, "fit", lambda *_: False)
            checked, others = served(attn, given, monkeypatch)
        assert passed and not others
        for a, b in zip(found, checked, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


Q1, K1 = (torch.zeros(2, heads, n, 16) for heads, n in ((4, 1), (2, 40)))
UNFIT = {
    "batch": ((Q1[:1], K1, K1), InputError, "batch sizes differ"),
    "values": ((Q1, K1, K1[:, :, :39]), InputError, "k and v differ in length"),
    "heads": ((Q1[:, :3], K1, K1), InputError, "3 query heads with 2"),
    "width": ((Q1[..., :8], K1, K1), InputError, "differ in head_dim"),
    "rank": ((Q1, K1[0], K1[0]), InputError, "ranks do not fit"),
    "dtype": ((Q1, K1.bfloat16(), K1), InputError, "mixed dtypes"),
    "integers": ((Q1.int(), K1.int(), K1.int()), UnsupportedError, "dtype torch.int32"),
    "device": ((Q1, K1.to("meta"), K1.to("meta")), InputError, "to have the same device"),
    "sparse": ((Q1, K1.to_sparse(), K1), InputError, "torch.sparse_coo"),
    "channels": ((Q1[..., :0], K1[..., :0], K1[..., :0]), InputError, "an empty tensor"),
    "no tensor": ((Q1, K1.tolist(), K1), InputError, "k is a list"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_single_queries_are_refused(name: str) -> None:
    given, error, said = UNFIT[name]
    with pytest.raises(error, match=said):
        fa4flex.compile()(*given)


def test_others_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with captured tensors, sinks, maps, gradients or transforms do not pass by the checks."""
    q, k, v = Sizes(q_len=1, kv_len=40).qkv(torch.float32)
    with pytest.raises(InputError, match="sinks"):
        fa4flex.compile(sinks=torch.zeros(3))(q, k, v)
    with pytest.raises(InputError, match="40"):
        fa4flex.compile(
            blocks=fa4flex.BlockMap(torch.full((1, 1, 1, 3), 2, dtype=torch.uint8), (16, 16), 1, 48)
        )(q, k, v)
    attn = fa4flex.compile()
    torch.testing.assert_close(torch.func.vmap(attn)(q[None], k[None], v[None])[0], attn(q, k, v))
    table = torch.zeros(40)
    for attn in (fa4flex.compile(lambda s, b, h, q_idx, kv_idx: s + table[kv_idx]), fa4flex.compile()):
        given = tuple(x.clone().requires_grad_() for x in (q, k, v))
        assert not served(attn, given, monkeypatch)[1] and attn(*given).requires_grad
        with torch.no_grad():
            assert served(attn, given, monkeypatch)[1] == (attn.variant.score_mod is None)
