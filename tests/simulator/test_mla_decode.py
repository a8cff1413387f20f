"""The kernels for latent rows on the simulated GPU: right against the oracle, as their graphs say, and
nothing found, however many blocks share the keys and however rows fall into tiles."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decoding import SIMULATED, split_in
from helpers import drawn_timing
from paged_pools import Size
from paged_pools import drawn as pools
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Latent, Sinks, Varlen, reference
from fa4flex.variants import alibi, causal, sliding_window, softcap

WIDTH, VALUE, SCALE = 576, 512, 192**-0.5

KERNELS = {"sm_90a": "mla_decode_sm90", "sm_100a": "mla_decode_sm100"}


@pytest.fixture(autouse=True, params=KERNELS)
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIMULATED, "chip", request.param)


def drawn(
    heads: int, q_len: int, kv_len: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Queries [B, H, Sq, 576] and rows [B, S, 1, 576]."""
    return torch.randn(batch, heads, q_len, WIDTH).to(dtype), torch.randn(batch, kv_len, 1, WIDTH).to(dtype)


def attend(
    attn: fa4flex.Attention,
    q: Tensor,
    rows: Tensor | Latent,
    timed: tuple[str, int] | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under this timing or a random one; nothing may be found."""
    timing, seed = timed or drawn_timing()
    latent = rows if isinstance(rows, Latent) else Latent(rows)
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"], seed, timing) as gpu:
        out, lse = attn(q, latent, return_lse=True, **more)
    name = KERNELS[SIMULATED["chip"]]
    assert any(name in result.kernel for result in gpu.results), "another kernel was launched"
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def exact(q: Tensor, rows: Tensor, *mods: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The formula over keys and values of their own, in float64."""
    k = rows.double().transpose(1, 2)
    return reference.attention(q.double(), k, k[..., :VALUE].clone(), *mods, scale=SCALE, **options)


def compare(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> None:
    """Errors are within twice those of the same maths at this dtype; rows without keys are zeros."""
    (out, lse), (wide, wide_lse) = found, truth
    rounding = torch.finfo(out.dtype).eps / 2
    assert (out.double() - wide).abs().max().item() <= 2 * rounding * wide.abs().max().item()
    empty = wide_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
    torch.testing.assert_close(lse.double()[~empty], wide_lse[~empty], atol=1e-4, rtol=0)


TABLE = torch.randn(16, 700) / 2


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, q_idx - kv_idx + 600]


def nobody(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Heads from 2 on see no key."""
    return kv_idx < 100 - 50 * h


def striped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No intervals: asked of every pair."""
    return (kv_idx * 7 + q_idx + h) % 5 > 1


def rising(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Each block has larger maxima than those before it."""
    return score + 0.3 * kv_idx


def falling(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Each block has larger maxima than those after it: full tiles are met last to first."""
    return score - 0.3 * kv_idx


MODS: dict[str, tuple[Any, Any]] = {
    "causal": (None, causal),
    "alibi, causal": (alibi, causal),
    "softcap, window": (softcap(20.0), causal & sliding_window(90)),
    "relative": (relative, None),
    "empty rows": (None, nobody),
    "pairs": (None, striped),
    "rising": (rising, None),
    "falling": (falling, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize("name", MODS)
def test_variant(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, splits)
    # Where maxima rise, the last tile has keys of both blocks: what they were before counts for nothing.
    (q, rows), mods = drawn(16, 2, 250 if name == "rising" else 301), MODS[name]
    compare(attend(fa4flex.compile(*mods, scale=SCALE), q, rows), exact(q, rows, *mods))


SIZES = {
    "one key": (3, 1, 1),
    "64 heads": (64, 1, 140),
    "128 heads, two tiles": (128, 1, 130),
    "33 heads, 3 tokens: tiles of 17 and 16": (33, 3, 129),
    "16 heads, 8 tokens": (16, 8, 150),
    "2 heads, 40 tokens": (2, 40, 200),
    "a block of keys": (4, 1, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_rows_fall_into_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice((1, 2)))
    q, rows = drawn(*SIZES[name])
    compare(attend(fa4flex.compile(alibi, causal, scale=SCALE), q, rows), exact(q, rows, alibi, causal))


@pytest.mark.slow
@pytest.mark.parametrize("width, value", [(320, 256), (448, 384), (512, 512)])
def test_other_widths(width: int, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 512 columns are values as a whole, with the rotated part in them."""
    if width == value and SIMULATED["chip"] == "sm_90a":
        pytest.skip("probabilities lie over a piece that is no value")
    split_in(monkeypatch, random.choice((1, 2)))
    q, rows = torch.randn(1, 20, 2, width).bfloat16(), torch.randn(1, 270, 1, width).bfloat16()
    attn = fa4flex.compile(alibi, causal, scale=SCALE)
    found = attend(attn, q, Latent(rows, value_dim=value, rope_dim=64))
    k = rows.double().transpose(1, 2)
    truth = reference.attention(q.double(), k, k[..., :value].clone(), alibi, causal, scale=SCALE)
    compare(found, truth)


@pytest.mark.slow
def test_every_timing_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are also those of another order of copies, products and warps."""
    split_in(monkeypatch, 2)
    (q, rows), attn = drawn(16, 2, 301), fa4flex.compile(alibi, causal, scale=SCALE)
    every = [attend(attn, q, rows, timing) for timing in (("eager", 0), ("late", 1), ("random", 2))]
    for out, lse in every[1:]:
        assert torch.equal(out, every[0][0]) and torch.equal(lse, every[0][1])
    compare(every[0], exact(q, rows, alibi, causal))


@pytest.mark.slow
def test_float16_and_layout_bshd(monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, 2)
    q, rows = drawn(8, 2, 300, dtype=torch.float16)
    attn = fa4flex.compile(mask=causal, scale=SCALE, layout="bshd")
    out, lse = attend(attn, q.transpose(1, 2).contiguous(), rows)
    compare((out.transpose(1, 2), lse), exact(q, rows, None, causal))


@pytest.mark.slow
@pytest.mark.parametrize("used", (False, True))
def test_rows_that_are_all_value(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 512 columns, the rotated ones among their values: probabilities have room of their own."""
    split_in(monkeypatch, random.choice((1, 2)))
    q, rows = torch.randn(1, 16, 2, VALUE).bfloat16(), torch.randn(1, 400, 1, VALUE).bfloat16()
    lengths = Varlen(seqused_k=torch.tensor([370], dtype=torch.int32)) if used else None
    attn, seen = fa4flex.compile(mask=causal, scale=SCALE), rows[:, : 370 if used else 400]
    compare(attend(attn, q, rows, varlen=lengths), exact(q, seen, None, causal))


@pytest.mark.slow
@pytest.mark.parametrize("splits", (1, 2))
def test_sinks_join_once(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a row has no key but the sink."""
    split_in(monkeypatch, splits)
    sinks, (q, rows) = torch.tensor([0.5, 3.0, -torch.inf, 1.0]), drawn(4, 1, 200)
    attn = fa4flex.compile(mask=nobody, sinks=Sinks(sinks), scale=SCALE)
    out, lse = attend(attn, q, rows)
    truth, truth_lse = exact(q, rows, None, nobody, sinks=sinks)
    assert (out.double() - truth).abs().max().item() <= 2 * 2**-8 * truth.abs().max().item()
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("splits", (1, 2))
def test_used_lengths(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence's own keys are split; what lies past its end may be anything."""
    split_in(monkeypatch, splits)
    q, rows = drawn(5, 2, 300, batch=4)
    used = torch.tensor([300, 129, 65, 0], dtype=torch.int32)
    for b, length in enumerate(used):
        rows[b, length:] = torch.nan
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    varlen = Varlen(seqused_q=torch.tensor([2, 1, 2, 2], dtype=torch.int32), seqused_k=used)
    out, lse = attend(attn, q, rows, varlen=varlen)
    truth, truth_lse = attn(q.double(), Latent(rows.double().nan_to_num()), varlen=varlen, return_lse=True)
    for b, n in enumerate((2, 1, 2, 2)):
        compare((out[b, :, :n], lse[b, :, :n]), (truth[b, :, :n], truth_lse[b, :, :n]))


@pytest.mark.slow
def test_fixed_parts_do_not_depend_on_the_batch() -> None:
    """The same bits for a sequence alone and among longer ones."""
    attn = fa4flex.compile(alibi, causal, scale=SCALE, schedule=fa4flex.Schedule(split=128))
    q, rows = drawn(4, 1, 400, batch=2)
    used = torch.tensor([130, 400], dtype=torch.int32)
    out, lse = attend(attn, q, rows, varlen=Varlen(seqused_k=used))
    for b, length in enumerate(used):
        alone = attend(attn, q[b : b + 1], rows[b : b + 1, :length].contiguous())
        assert torch.equal(alone[0][0], out[b]) and torch.equal(alone[1][0], lse[b])


@pytest.mark.slow
def test_output_functions_and_strided_rows() -> None:
    """The function is applied by a launch after it; rows of a wider cache are read where they lie."""
    wide = torch.randn(1, 150, 1, 640).bfloat16()
    q, rows = torch.randn(1, 4, 1, WIDTH).bfloat16(), wide[..., :WIDTH]
    attn = fa4flex.compile(mask=causal, scale=SCALE, output_mod=lambda out, b, h, q_idx, d_idx: out * 2)
    out, lse = attend(attn, q, rows)
    truth, truth_lse = exact(q, rows, None, causal)
    compare((out, lse), (2 * truth, truth_lse))


# --- pages ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
@pytest.mark.parametrize("page", (8, 16, 48, 64, 256))
def test_pages_are_read_in_place(page: int, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots without a key are poisoned, pages lie in any order, and the table ends with numbers of none."""
    split_in(monkeypatch, random.choice((1, 2)))
    lengths = [260, 65, 1]
    d = pools(Size(heads=6, q_len=2, lengths=tuple(lengths), d=WIDTH, dv=WIDTH, page_size=page))
    attn = fa4flex.compile(alibi, causal, scale=SCALE, layout=layout)
    q = d.q if layout == "bhsd" else d.q.transpose(1, 2).contiguous()
    out, lse = attend(attn, q, d.k, paging=d.paging)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    for b, length in enumerate(lengths):
        slots = torch.arange(length)
        rows = d.k[d.paging.page_table[b, slots // page].long(), slots % page]
        compare((out[b : b + 1], lse[b : b + 1]), exact(d.q[b : b + 1], rows[None], alibi, causal))


@pytest.mark.slow
def test_a_length_past_the_table_is_told() -> None:
    d = pools(Size(heads=2, q_len=1, lengths=(60, 33), d=WIDTH, dv=WIDTH, page_size=16))
    d.paging.seqused_k[1] = 5000
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"]):
        fa4flex.compile(scale=SCALE)(d.q, Latent(d.k), paging=d.paging)
    with pytest.raises(fa4flex.InputError, match="seqused_k of 5000"):
        fa4flex.synchronize()


def test_pages_of_few_keys_are_gathered() -> None:
    """PyTorch operations compute such calls."""
    d = pools(Size(heads=2, q_len=1, lengths=(60, 33), d=WIDTH, dv=WIDTH, page_size=1))
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"]) as gpu:
        out = attn(d.q, Latent(d.k), paging=d.paging)
    assert not any("mla_decode" in result.kernel for result in gpu.results)
    truth = attn(d.q.double(), Latent(d.k.double()), paging=d.paging)
    assert (out.double() - truth).abs().max().item() <= 2 * 2**-8 * truth.abs().max().item()
