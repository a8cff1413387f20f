"""compile(), attention() and the call: every primitive against the oracle, forward and backward."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import agree, cumulative, leaf
from torch import Tensor

import fa4flex
from fa4flex import BlockMap, Paging, Precision, Schedule, Varlen, reference
from fa4flex.variants import alibi, causal, document, sliding_window, softcap

CLOSE = {"rtol": 1e-9, "atol": 1e-10}  # two float64 computations of one formula, in different orders


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (5, 1), (8, 1)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_heads_and_layouts(heads: tuple[int, int], layout: str) -> None:
    q, k, v = leaf(2, heads[0], 37, 8), leaf(2, heads[1], 53, 8), leaf(2, heads[1], 53, 12)
    mods = {"score_mod": alibi >> softcap(5.0), "mask": causal & sliding_window(20)}
    attn = fa4flex.compile(**mods, layout=layout)  # type: ignore[arg-type]
    given = [x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v)]
    out, lse = attn(*given, return_lse=True)
    out = out.transpose(1, 2) if layout == "bshd" else out
    agree([out, lse], reference.attention(q, k, v, **mods), [q, k, v])


@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences(used: bool) -> None:
    """Indices and lengths are per sequence, `b` is the sequence, and an empty one is no trouble."""
    lengths_q, lengths_k = (7, 0, 30, 12), (9, 4, 41, 0)
    q, k, v = leaf(49, 4, 8), leaf(54, 2, 8), leaf(54, 2, 8)
    bias = leaf(4, 4)
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    seqused = torch.tensor([5, 2, 40, 0], dtype=torch.int32) if used else None

    def per_sequence(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score + bias[b, h] * (q_idx - kv_idx)

    attn = fa4flex.compile(per_sequence, causal & sliding_window(11))
    found = attn(q, k, v, varlen=Varlen(cu_q, cu_k, seqused_k=seqused), return_lse=True)
    ranges = reference.sequence_ranges(cu_q), reference.sequence_ranges(cu_k, seqused)
    agree(
        found, reference.varlen((q, k, v), ranges, per_sequence, causal & sliding_window(11)), [q, k, v, bias]
    )
    assert found[1][:, 37:].eq(-torch.inf).all() and found[0][37:].eq(0).all()


def test_padded_batch_with_used_lengths() -> None:
    q, k, v = leaf(3, 4, 10, 8), leaf(3, 4, 20, 8), leaf(3, 4, 20, 8)
    used = torch.tensor([20, 3, 0], dtype=torch.int32)
    out, lse = fa4flex.compile(mask=causal)(q, k, v, varlen=Varlen(seqused_k=used), return_lse=True)
    each = [
        reference.attention(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], mask=causal)
        for i, n in enumerate(used.tolist())
        if n
    ]
    agree([out[:2], lse[:2]], [torch.cat(x) for x in zip(*each, strict=True)], [q, k, v])
    assert out[2].eq(0).all() and lse[2].eq(-torch.inf).all()


@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("ragged", [False, True])
def test_paged_cache(page: int, ragged: bool) -> None:
    """Logical indices, any page size; entries behind the last page may hold anything."""
    lengths = torch.tensor([17, 3, 0], dtype=torch.int32)
    pages, most = 64, -(-17 // page)
    order = torch.randperm(pages)[: 3 * most].view(3, most).to(torch.int32)
    live = torch.arange(most) * page < lengths[:, None]
    table = torch.where(live, order, torch.full_like(order, -999))
    k, v = leaf(pages, page, 2, 8), leaf(pages, page, 2, 8)
    q = leaf(3, 4, 3, 8)
    attn = fa4flex.compile(softcap(3.0), causal & sliding_window(6))
    readable = torch.where(live, table, 0)
    rows, key_ranges = reference.unpage(k, readable, lengths)
    packed = q.transpose(1, 2).flatten(0, 1), rows, reference.unpage(v, readable, lengths)[0]
    ranges = reference.sequence_ranges(cumulative([3, 3, 3])), key_ranges
    truth = reference.varlen(packed, ranges, softcap(3.0), causal & sliding_window(6))
    if ragged:
        ragged_queries = Varlen(cumulative([3, 3, 3]))
        found = attn(packed[0], k, v, varlen=ragged_queries, paging=Paging(table, lengths), return_lse=True)
    else:
        out, lse = attn(q, k, v, paging=Paging(table, lengths), return_lse=True)
        found = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    agree(found, truth, [q, k, v])


@pytest.mark.parametrize("layout, shape", [("bhsd", (2, 4, 0, 8)), ("bshd", (2, 0, 4, 8))])
def test_no_queries_over_pages(layout: Any, shape: tuple[int, ...]) -> None:
    k, v = leaf(6, 4, 2, 8), leaf(6, 4, 2, 8)
    paging = Paging(torch.arange(6).view(2, 3), torch.tensor([5, 12]))
    out, lse = fa4flex.compile(mask=causal, layout=layout)(leaf(*shape), k, v, paging=paging, return_lse=True)
    assert out.shape == shape and lse.shape == (2, 4, 0)


@pytest.mark.parametrize("tile", [None, (8, 16), (16, 8), (40, 7)])
def test_block_map_with_and_without_mask(tile: tuple[int, int] | None) -> None:
    classes = torch.randint(0, 3, (2, 3, 5, 4), dtype=torch.uint8)
    blocks = BlockMap.from_dense(classes, (8, 16), 37, 61)
    q, k, v = leaf(2, 3, 37, 8), leaf(2, 3, 61, 8), leaf(2, 3, 61, 8)
    pairs = classes.repeat_interleave(8, 2).repeat_interleave(16, 3)[:, :, :37, :61]
    near = (torch.arange(37)[:, None] - torch.arange(61)).abs() < 9

    def window(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (q_idx - kv_idx).abs() < 9

    for mask, allowed in ((None, pairs > 0), (window, (pairs == 2) | ((pairs == 1) & near))):
        attn = fa4flex.compile(mask=mask, blocks=blocks, schedule=Schedule(tile=tile))
        truth = reference.attention(q, k, v, mask=lambda b, h, i, j, allowed=allowed: allowed[b, h, i, j])
        agree(attn(q, k, v, return_lse=True), truth, [q, k, v])


def test_maps_of_calls_take_turns() -> None:
    """Each with other overrides beside it, and without; what a call brought is none of another's."""
    maps = [BlockMap.from_dense(torch.tensor([[True, x], [True, True]]), 8) for x in (False, True)]
    q, k, v = leaf(1, 2, 16, 8), leaf(1, 2, 16, 8), leaf(1, 2, 16, 8)
    attn = fa4flex.compile()
    for turn in (0, 0, 1, 0, None, 1, 1):
        for more in ({}, {"scale": 0.5}, {"sinks": torch.ones(2)}):
            blocks = None if turn is None else maps[turn]
            fresh = fa4flex.compile(blocks=blocks, **more)(q, k, v)  # type: ignore[arg-type]
            assert torch.equal(attn(q, k, v, blocks=blocks, **more), fresh)  # type: ignore[arg-type]
    copied = copy.deepcopy(attn)
    assert torch.equal(copied(q, k, v, blocks=maps[0]), attn(q, k, v, blocks=maps[0]))
    assert torch.equal(copied(q, k, v), attn(q, k, v))


def test_sinks() -> None:
    q, k, v, sinks = leaf(2, 4, 20, 8), leaf(2, 2, 30, 8), leaf(2, 2, 30, 8), leaf(4)
    mask = lambda b, h, i, j: (j <= i) & (i > 2)  # noqa: E731
    found = fa4flex.compile(mask=mask, sinks=sinks)(q, k, v, return_lse=True)
    agree(found, reference.attention(q, k, v, mask=mask, sinks=sinks), [q, k, v, sinks])
    assert torch.equal(found[1][:, :, 0], sinks.expand(2, 4)), "a row without keys has its sink for an lse"


def test_a_query_without_keys_gives_zeros() -> None:
    q, k, v = leaf(1, 2, 9, 8), leaf(1, 2, 9, 8), leaf(1, 2, 9, 8)
    slope = leaf(2)

    def explosive(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return torch.log(score - score) * slope[h]  # -inf, with an undefined derivative

    nothing = lambda b, h, i, j: (i < 4) & (j < 0)  # noqa: E731
    for attn in (fa4flex.compile(mask=nothing), fa4flex.compile(explosive, nothing)):
        out, lse = attn(q, k, v, return_lse=True)
        assert out.eq(0).all() and lse.eq(-torch.inf).all()
        out.sum().backward()
        for x in (q, k, v, *((slope,) if slope.grad is not None else ())):
            assert x.grad is not None and x.grad.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision(dtype: torch.dtype) -> None:
    """compute="float64" leaves the rounding of the inputs and of the output only."""
    q, k, v = (torch.randn(1, 2, 40, 16).to(dtype) for _ in range(3))
    exact = reference.attention(q, k, v, mask=causal)[0]
    precise = fa4flex.compile(mask=causal, precision=Precision(compute="float64", output=torch.float64))(
        q, k, v
    )
    torch.testing.assert_close(precise, exact, **CLOSE)
    wide = fa4flex.compile(mask=causal, precision=Precision(output=torch.float32))(q, k, v)
    assert wide.dtype == torch.float32 and (wide - exact).abs().max() < 1e-5
    assert fa4flex.compile(mask=causal)(q, k, v).dtype == dtype


def test_captured_tensors_are_read_at_each_call() -> None:
    table = torch.zeros(4)
    q, k, v = leaf(1, 4, 8, 8), leaf(1, 4, 8, 8), leaf(1, 4, 8, 8)
    attn = fa4flex.compile(lambda s, b, h, i, j: s + (table * 2)[h] * j)
    before = attn(q, k, v)
    table += 1
    torch.testing.assert_close(
        attn(q, k, v), reference.attention(q, k, v, lambda s, b, h, i, j: s + 2 * j)[0], **CLOSE
    )
    assert not torch.equal(before, attn(q, k, v))


def test_new_numbers_make_no_new_program() -> None:
    def make(window: int, cap: float) -> fa4flex.Attention:
        return fa4flex.compile(softcap(cap), causal & sliding_window(window))

    assert make(5, 30.0).trace is make(900, 2.0).trace
    assert make(5, 30.0).program.scalars != make(900, 2.0).program.scalars


def test_one_shot_attention_is_compile_and_call() -> None:
    q, k, v = leaf(1, 2, 12, 8), leaf(1, 2, 12, 8), leaf(1, 2, 12, 8)
    assert torch.equal(
        fa4flex.attention(q, k, v, score_mod=alibi, mask=causal), fa4flex.compile(alibi, causal)(q, k, v)
    )


def test_equal_calls_give_equal_bits() -> None:
    q, k, v = (leaf(2, 4, 130, 16, dtype=torch.float32) for _ in range(3))
    bias = leaf(4, 260, dtype=torch.float32)
    attn = fa4flex.compile(lambda s, b, h, i, j: s + bias[h, i - j + 130], causal)

    def once() -> list[Tensor]:
        out = attn(q, k, v)
        return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, bias])]

    first = once()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize("shift", [-(2.0**100), -(2.0**30), -(2.0**15), 2.0**30])
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_of_scores_far_from_zero(shift: float, sinks: bool) -> None:
    """A row hidden by an additive -1e9 weighs its keys alike; its lse has no digits left for their number."""
    q, k, v = (leaf(1, 2, 40, 8, dtype=torch.float32) for _ in range(3))
    logits = (leaf(2, dtype=torch.float32).detach() + shift).requires_grad_() if sinks else None

    def hidden(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return torch.where(kv_idx <= q_idx, score * 0.1, 0.0) * (q_idx % 2) + shift * (q_idx % 2 == 0)

    attn = fa4flex.compile(hidden, sinks=logits, scale=0.5)
    exact = reference.attention(q, k, v, hidden, scale=0.5, sinks=logits)[0]
    upstream = torch.randn_like(q)
    leaves = [q, k, v, *([] if logits is None else [logits])]
    found = torch.autograd.grad(attn(q, k, v), leaves, upstream)
    wanted = torch.autograd.grad(exact, leaves, upstream.double())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_remembered_tile_map_is_never_that_of_other_numbers() -> None:
    """Masks of numbers alone are classified once for each length; those that read tensors, at each call."""
    limit = torch.tensor([5])
    masks = [sliding_window(3), sliding_window(70), causal, lambda b, h, q, kv: kv < limit[0] * (b + 1)]
    attns = [fa4flex.compile(mask=mask, schedule=Schedule(tile=(16, 16))) for mask in masks]
    for length in (40, 90, 40):
        limit.add_(20)
        q, k, v = leaf(2, 2, length, 8), leaf(2, 2, 90, 8), leaf(2, 2, 90, 8)
        for attn, mask in zip(attns, masks, strict=True):
            agree(attn(q, k, v, return_lse=True), reference.attention(q, k, v, mask=mask), [q, k, v])


def test_copies_read_copies_of_what_was_captured() -> None:
    given = leaf(1, 2, 8, 8), leaf(1, 2, 8, 8), leaf(1, 2, 8, 8)
    bias = torch.randn(2)
    attn = fa4flex.compile(lambda s, b, h, i, j: s + bias[h] * j)
    before, other = attn(*given), copy.deepcopy(attn)
    assert copy.copy(attn) is attn
    torch.testing.assert_close(other(*given), before)
    bias.add_(1)
    torch.testing.assert_close(other(*given), before)
    assert not torch.equal(attn(*given), before)


def test_pickles_carry_what_was_composed() -> None:
    given = leaf(1, 2, 8, 8), leaf(1, 2, 8, 8), leaf(1, 2, 8, 8)
    attn = fa4flex.compile(alibi(torch.rand(2)), causal & sliding_window(3), sinks=torch.randn(2))
    torch.testing.assert_close(pickle.loads(pickle.dumps(attn))(*given), attn(*given))
    bias = torch.randn(2)
    with pytest.raises(fa4flex.UnsupportedError, match=r"test_api\.py"):
        pickle.dumps(fa4flex.compile(lambda s, b, h, i, j: s + bias[h]))


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "alibi + window": lambda: {"score_mod": alibi, "mask": sliding_window(5)},
    "softcap + documents": lambda: {
        "score_mod": softcap(2.0),
        "mask": causal & document(ids=torch.tensor([0] * 5 + [1] * 4)),
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradcheck(name: str) -> None:
    attn = fa4flex.compile(**VARIANTS[name]())
    q, k, v = leaf(1, 2, 9, 4), leaf(1, 1, 9, 4), leaf(1, 1, 9, 4)
    assert torch.autograd.gradcheck(lambda *x: attn(*x, return_lse=True), (q, k, v), atol=1e-6)


def test_importing_stays_light() -> None:
    """Neither `import fa4flex` nor compile() loads sympy, Dynamo or a GPU compiler, beyond what the module of
    torch's BlockMask does, which loads sympy from torch 2.14 on."""
    code = (
        "import sys, torch.nn.attention.flex_attention; by_torch = set(sys.modules);"
        "import fa4flex; from fa4flex.variants import causal; fa4flex.compile(mask=causal);"
        "heavy = {'sympy', 'networkx', 'matplotlib', 'torch._dynamo', 'cutlass'};"
        "print(*sorted(heavy & (sys.modules.keys() - by_torch)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []
