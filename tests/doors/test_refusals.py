"""Requests that used to be taken for others: heads, argument order, roles, numpy arrays, tiles."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import fa4flex
from fa4flex import BlockMap, InputError, Paging, Schedule, Sinks, TraceError, Varlen
from fa4flex.variants import alibi, causal, graphormer, learned_bias, sliding_window, softcap, t5_bias
from fa4flex.variants._cases import allowed

BLOCKS = BlockMap.from_dense(torch.tril(torch.ones(2, 2)).bool(), 8)


def qkv(heads: int = 4, kv_heads: int = 4, length: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, h, length, 8) for h in (heads, kv_heads, kv_heads))  # type: ignore[return-value]


def block_mask() -> Any:
    return create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 16, 16, device="cpu", BLOCK_SIZE=8)


# --- tables for another number of heads -------------------------------------------------------------------

PER_HEAD: dict[str, Callable[[int], fa4flex.ScoreMod]] = {
    "alibi": lambda h: alibi(torch.ones(h)),
    "alibi by batch": lambda h: alibi(torch.ones(1, h)),
    "t5": lambda h: t5_bias(torch.ones(8, h), max_distance=16),
    "t5 heads first": lambda h: t5_bias(torch.ones(h, 8), max_distance=16, axes="head_bucket"),
    "relative": lambda h: learned_bias(torch.ones(h, 31)),
    "dense": lambda h: learned_bias(torch.ones(h, 16, 16)),
    "dense by batch": lambda h: learned_bias(torch.ones(1, h, 16, 16)),
    "graphormer": lambda h: graphormer(torch.ones(h, 3), torch.ones(1, 16, 16).long()),
}


@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize("name", PER_HEAD)
def test_a_table_for_other_heads_is_refused(name: str, heads: int) -> None:
    attn = fa4flex.compile(softcap(30.0) >> PER_HEAD[name](heads), causal)
    with pytest.raises(InputError, match=rf"(?s)holds a table of {heads} heads, q has 4 query heads"):
        attn(*qkv())
    fa4flex.compile(PER_HEAD[name](4), causal)(*qkv(4, 2))
    packed = [x[0].transpose(0, 1) for x in qkv()]
    with pytest.raises(InputError, match="query heads"):
        attn(*packed, varlen=Varlen(torch.tensor([0, 6, 16])))


def test_one_bias_for_all_heads_serves_any_number() -> None:
    for shape in ((1, 31), (1, 16, 16), (1, 1, 16, 16)):
        fa4flex.compile(learned_bias(torch.ones(shape)))(*qkv())


def test_a_user_s_longer_table_is_legal() -> None:
    table = torch.ones(8)
    out = fa4flex.compile(lambda s, b, h, q, kv: s + table[h])(*qkv())
    assert out.shape == (1, 4, 16, 8)


# --- argument names in another order ----------------------------------------------------------------------


def swapped_mask(b: Any, h: Any, kv_idx: Any, q_idx: Any) -> Any:
    return q_idx >= kv_idx


def scores_last(b: Any, h: Any, q_idx: Any, kv_idx: Any, score: Any) -> Any:
    return score


def heads_first(score: Any, h: Any, b: Any, q: Any, kv: Any) -> Any:
    return score


@pytest.mark.parametrize(
    ("role", "mod", "names"),
    [
        ("mask", swapped_mask, "b, h, kv_idx, q_idx"),
        ("mask", lambda b, h, kv, q: q >= kv, "b, h, kv, q"),
        ("mask", causal & swapped_mask, "b, h, kv_idx, q_idx"),
        ("mask", lambda batch, head, kv_idx, q_idx: q_idx >= kv_idx, "batch, head, kv_idx, q_idx"),
        ("mask", functools.partial(lambda n, b, h, kv_idx, q_idx: q_idx >= kv_idx, 3), "b, h, kv_idx, q_idx"),
        ("score_mod", scores_last, "b, h, q_idx, kv_idx, score"),
        ("score_mod", heads_first, "score, h, b, q, kv"),
    ],
)
def test_standard_names_in_another_order_are_refused(role: str, mod: Any, names: str) -> None:
    with pytest.raises(TraceError, match=rf"(?s)takes \({names}\).*expected: .*q_idx, kv_idx\)"):
        fa4flex.compile(**{role: mod})


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        lambda b, h, q, kv: q >= kv,
        lambda _b, _h, i, j: i >= j,
        lambda z, h_q, m, n: m >= n,
        lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx,
        lambda b, kv, q, k: q >= k,
        lambda *indices: indices[2] >= indices[3],
    ],
)
def test_names_of_one_s_own_are_legal(mask: Any) -> None:
    plain = fa4flex.compile(mask=causal)
    q, k, v = qkv()
    torch.testing.assert_close(fa4flex.compile(mask=mask)(q, k, v), plain(q, k, v))


# --- one role's object given as the other -----------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [causal, causal(), causal & sliding_window(3), BLOCKS, block_mask()],
    ids=lambda m: type(m).__name__,
)
def test_a_mask_as_score_mod_is_refused(mask: Any) -> None:
    q, k, v = qkv()
    for call in (
        lambda: fa4flex.compile(score_mod=mask),
        lambda: fa4flex.flex_attention(q, k, v, mask),
        lambda: fa4flex.as_score(mask),
        lambda: softcap >> mask,
    ):
        with pytest.raises(InputError, match=r"(?s)was given as a score_mod.*pass it as mask="):
            call()


@pytest.mark.parametrize("mod", [softcap, alibi(), alibi >> softcap], ids=repr)
def test_a_score_mod_as_mask_is_refused(mod: Any) -> None:
    for call in (
        lambda: fa4flex.compile(mask=mod),
        lambda: fa4flex.as_mask(mod),
        lambda: causal & mod,
        lambda: mod | causal(),
        lambda: BLOCKS & mod,
    ):
        with pytest.raises(InputError, match=r"(?s)score mod .* was given as a mask.*pass it as score_mod="):
            call()


# --- block maps combine as masks --------------------------------------------------------------------------


def test_block_maps_combine_with_masks() -> None:
    blocks, rows = BLOCKS, torch.arange(16).view(-1, 1)
    listed = rows // 8 >= torch.arange(16) // 8
    below = rows >= torch.arange(16)
    combinations = {
        "map and mask": (blocks & causal(), listed & below),
        "mask and map": (causal() & blocks, listed & below),
        "map and family": (blocks & causal, listed & below),
        "family and map": (causal & blocks, listed & below),
        "map and function": (blocks & (lambda b, h, q, kv: kv < 3), listed & (torch.arange(16) < 3)),
        "function and map": ((lambda b, h, q, kv: kv < 3) & blocks, listed & (torch.arange(16) < 3)),
        "or": (blocks | ~causal(), listed | ~below),
        "or, mask first": (sliding_window(2) | blocks, listed),
        "not": (~blocks, ~listed),
        "maps": (blocks & ~blocks, listed & ~listed),
        "torch's and mask": (block_mask() & sliding_window(3), below & (rows < torch.arange(16) + 3)),
        "mask or torch's": (sliding_window(3) | block_mask(), below),
        "map and torch's": (blocks & block_mask(), below),
    }
    for name, (mask, wanted) in combinations.items():
        assert isinstance(mask, fa4flex.Mask), name
        assert torch.equal(allowed(mask, 16, 16)[0], wanted), name
        q, k, v = qkv()
        bias = torch.zeros(16, 16).masked_fill(~wanted, -torch.inf)
        dense = torch.nan_to_num(torch.softmax(q @ k.mT / 8**0.5 + bias, -1)) @ v
        torch.testing.assert_close(fa4flex.compile(mask=mask)(q, k, v), dense, msg=name)
    with pytest.raises(TraceError, match="truth value"):
        bool(blocks)


# --- numpy arrays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sinks(numpy.ones(4, numpy.float32)),  # type: ignore[arg-type]
        lambda: Varlen(numpy.array([0, 16], numpy.int32)),  # type: ignore[arg-type]
        lambda: Paging(numpy.zeros((1, 1), numpy.int32), numpy.ones(1, numpy.int32)),  # type: ignore[arg-type]
        lambda: BlockMap(numpy.ones((1, 1, 2, 2), numpy.uint8), 8, 16, 16),  # type: ignore[arg-type]
        lambda: BlockMap.from_dense(numpy.ones((2, 2), bool), 8),  # type: ignore[arg-type]
        lambda: BlockMap.from_counts(numpy.ones((1, 1, 2), numpy.int32), torch.ones(1, 1, 2, 2), 8, 16, 16),  # type: ignore[arg-type]
        lambda: alibi(numpy.ones(4)),
        lambda: fa4flex.compile()(*(x.numpy() for x in qkv())),
        lambda: fa4flex.compile(mask=numpy.ones((16, 16), bool)),  # type: ignore[arg-type]
    ],
)
def test_a_numpy_array_is_called_one(make: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=r"numpy\.ndarray.*\n.*expected") as raised:
        make()
    assert "to fix:" in str(raised.value)


# --- tensors without data or in other layouts ---------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_sinks_are_strided() -> None:
    for logits in (torch.ones(4).to_sparse(), torch.nested.nested_tensor([torch.ones(2)] * 2)):
        with pytest.raises(InputError, match=r"(?s)sinks .*strided"):
            Sinks(logits)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_captured_tensors_are_strided() -> None:
    table = torch.ones(16).to_sparse()
    square = torch.ones(16, 16).to_sparse_csr()
    for mod, name in (
        (lambda s, b, h, q, kv: s + table[kv], "table"),
        (lambda s, b, h, q, kv: s + square[q, kv], "square"),
    ):
        with pytest.raises(
            TraceError, match=rf"(?s)captured tensor '{name}' is of layout .*to_dense.*{name}\["
        ):
            fa4flex.compile(mod)(*qkv())


def test_captured_tensors_have_data() -> None:
    ids = torch.empty(16, dtype=torch.int64, device="meta")
    with pytest.raises(InputError, match="captured tensor 'ids' is on meta, q on cpu"):
        fa4flex.compile(mask=lambda b, h, q, kv: ids[q] == ids[kv])(*qkv())


def test_sinks_on_meta_are_refused_where_they_are_used() -> None:
    with pytest.raises(InputError, match="sinks on meta, q on cpu"):
        fa4flex.compile(sinks=torch.ones(4, device="meta"))(*qkv())


# --- tiles and listings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(10**9, 10**9), (10**9, 8), (8, 10**9), (2**62, 2**62)])
def test_a_tile_beyond_the_lengths_takes_no_memory(tile: tuple[int, int]) -> None:
    q, k, v = qkv(length=32)
    attn = fa4flex.compile(softcap(20.0), causal, schedule=Schedule(tile=tile))
    q.requires_grad_()
    tracemalloc.start()
    out = attn(q, k, v)
    out.sum().backward()
    assert "1 tiles" in attn.explain(32) or "4 tiles" in attn.explain(32)
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()
    torch.testing.assert_close(out, fa4flex.compile(softcap(20.0), causal)(q, k, v))


def test_listings_name_what_they_take() -> None:
    attn = fa4flex.compile(mask=causal)
    with pytest.raises(InputError, match=r"(?s)foo=1.*head_dim.*leave foo out"):
        attn.source(foo=1)
    with pytest.raises(InputError, match=r"(?s)foo=1.*arch.*head_dim"):
        attn.source("plan", foo=1)
    with pytest.raises(InputError, match=r"(?s)head_dmi=64.*did you mean head_dim"):
        attn.source("forward", head_dmi=64)
    with pytest.raises(InputError, match=r"(?s)head_dim for stage='trace'"):
        attn.source("trace", head_dim=64)
