"""Calls through torch's flex_attention against our executor: ragged, paged, block maps, layouts, graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import agree, cumulative, leaf
from torch import Tensor

import fa4flex
from fa4flex import BlockMap, KVScales, Paging, Varlen, reference
from fa4flex import variants as v


def both(
    qkv: tuple[Tensor, ...],
    learned: list[Tensor] | None = None,
    call: dict[str, Any] | None = None,
    **composed: Any,
) -> tuple[Tensor, Tensor]:
    """Results through flex_attention, which agree with our executor's, gradients included."""
    call = call or {}
    found = fa4flex.compile(**composed, backend="flex")(*qkv, return_lse=True, **call)
    agree(found, fa4flex.compile(**composed)(*qkv, return_lse=True, **call), [*qkv, *(learned or [])])
    assert found[0].stride() == fa4flex.compile(**composed)(*qkv, **call).stride()
    return found


def test_packed_sequences_against_the_oracle() -> None:
    """Indices, lengths and batch entries are those of each sequence; some have no queries, or no keys."""
    cu_q, cu_k, slopes = cumulative([13, 0, 5, 2]), cumulative([9, 3, 7, 0]), leaf(4, 4)
    q, k, value = leaf(20, 4, 6), leaf(19, 2, 6), leaf(19, 2, 5)
    mods = v.alibi(slopes), v.causal & v.sliding_window(5)
    ranges = reference.sequence_ranges(cu_q), reference.sequence_ranges(cu_k)
    found = fa4flex.compile(*mods, backend="flex")(q, k, value, varlen=Varlen(cu_q, cu_k), return_lse=True)
    agree(found, reference.varlen((q, k, value), ranges, *mods), [q, k, value, slopes])


def test_tokens_that_are_not_used_may_hold_nan() -> None:
    cu_q, cu_k = cumulative([13, 4, 5]), cumulative([9, 3, 7])
    used_q, used_k = torch.tensor([10, 4, 0]), torch.tensor([9, 1, 6])
    q, k, value = leaf(22, 4, 6), leaf(19, 2, 6), leaf(19, 2, 5)
    with torch.no_grad():
        q[11], k[18], value[10] = math.nan, math.nan, math.nan
    lengths = Varlen(cu_q, cu_k, used_q, used_k)
    both((q, k, value), score_mod=v.alibi, mask=v.causal, call={"varlen": lengths})


@pytest.mark.parametrize("mask", [None, v.causal], ids=["every key", "causal"])
@pytest.mark.parametrize("sides", ["both", "keys"])
def test_padded_batches(sides: str, mask: Any) -> None:
    used_q, used_k = torch.tensor([10, 4, 0]), torch.tensor([9, 1, 6])
    q, k, value = leaf(3, 4, 12, 6), leaf(3, 2, 11, 6), leaf(3, 2, 11, 5)
    with torch.no_grad():
        k[2, :, 8], value[1, :, 3] = math.nan, math.nan
    lengths = Varlen(seqused_q=used_q if sides == "both" else None, seqused_k=used_k)
    both((q, k, value), score_mod=v.alibi, mask=mask, call={"varlen": lengths})


@pytest.mark.parametrize("lengths", [([0, 0], [2, 3]), ([2, 3], [0, 0]), ([0, 0], [0, 0])])
def test_packed_sequences_without_queries_or_keys(lengths: Any) -> None:
    cu_q, cu_k = map(cumulative, lengths)
    q, k, value = (leaf(int(cu[-1]), heads, 6) for cu, heads in ((cu_q, 4), (cu_k, 2), (cu_k, 2)))
    both((q, k, value), mask=v.causal, call={"varlen": Varlen(cu_q, cu_k)})


@pytest.mark.parametrize("packed", [False, True], ids=["dense queries", "packed queries"])
def test_pages(packed: bool) -> None:
    pool_k, pool_v = torch.randn(10, 4, 2, 6), torch.randn(10, 4, 2, 5)
    table = torch.tensor([[1, 2, 3], [4, 5, 0], [7, 8, 9]], dtype=torch.int32)
    pages = Paging(table, torch.tensor([11, 6, 9], dtype=torch.int32))
    q = torch.randn(5, 4, 6) if packed else torch.randn(3, 4, 2, 6)
    varlen = Varlen(cumulative([2, 0, 3])) if packed else None
    given: dict[str, Any] = {"paging": pages, "varlen": varlen, "return_lse": True}
    found, wanted = (
        fa4flex.compile(v.alibi, v.causal, backend=backend)(q, pool_k, pool_v, **given)
        for backend in ("flex", "auto")
    )
    torch.testing.assert_close(found, wanted)


def test_eight_bit_caches() -> None:
    q = torch.randn(2, 4, 8, 16)
    k, value = (torch.randn(2, 2, 9, 16).to(torch.float8_e4m3fn) for _ in range(2))
    scales = KVScales(torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.1]))
    found, wanted = (
        fa4flex.compile(mask=v.causal, backend=backend)(q, k, value, kv_scales=scales, return_lse=True)
        for backend in ("flex", "auto")
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("mask", [None, v.causal], ids=["map alone", "with a mask"])
def test_block_maps(mask: Any) -> None:
    """A map without a mask is a mask, and full blocks do not ask the mask."""
    blocks = BlockMap(torch.randint(0, 3, (1, 4, 5, 4), dtype=torch.uint8), (8, 16), 37, 60)
    both((leaf(2, 4, 37, 6), leaf(2, 2, 60, 6), leaf(2, 2, 60, 5)), mask=mask, blocks=blocks)


def test_layout_and_scale() -> None:
    qkv = leaf(2, 14, 4, 6), leaf(2, 21, 2, 6), leaf(2, 21, 2, 5)
    both(qkv, mask=v.causal, layout="bshd", scale=0.3)


@pytest.mark.parametrize("shape", [(2, 7, 0), (2, 0, 7), (0, 5, 5)])
def test_nothing_to_attend(shape: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = shape
    qkv = leaf(batch, 4, q_len, 6), leaf(batch, 2, kv_len, 6), leaf(batch, 2, kv_len, 5)
    both(qkv, mask=v.causal)


def test_one_tensor_read_in_several_places() -> None:
    bias, table = leaf(4, 30), torch.randint(0, 30, (30,))

    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + bias[h, kv_idx] - bias[h, table[q_idx]] * bias[0, -1]

    both((leaf(2, 4, 14, 6), leaf(2, 2, 21, 6), leaf(2, 2, 21, 5)), [bias], score_mod=mod)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_learned_numbers(shape: tuple[int, ...]) -> None:
    """An element that is the same for all scores."""
    table = leaf(*shape) if shape else torch.randn((), dtype=torch.float64, requires_grad=True)
    place = tuple(n - 1 for n in shape)

    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * table[place] + table[place] ** 2

    both((leaf(2, 4, 14, 6), leaf(2, 2, 21, 6), leaf(2, 2, 21, 5)), [table], score_mod=mod)


def test_integers_of_python() -> None:
    """Floor division and remainder of negative numbers, shifts, and indices that count from the end."""
    table = leaf(40)

    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        apart = kv_idx - q_idx
        return s + table[apart // 3] + apart % 5 + (q_idx >> 1) * 0.1 + torch.where(apart > 0, 1, 2)

    both((leaf(1, 2, 14, 6), leaf(1, 2, 21, 6), leaf(1, 2, 21, 5)), [table], score_mod=mod)


def test_max_scores_of_the_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function, where no kernels are, through the same backend."""
    from torch.nn.attention.flex_attention import AuxRequest

    from fa4flex import mask_calls

    composed = mask_calls.compose
    monkeypatch.setattr(mask_calls, "compose", lambda *x, **named: composed(*x, **named, backend="flex"))
    qkv = torch.randn(1, 2, 9, 6), torch.randn(1, 2, 9, 6), torch.randn(1, 2, 9, 6)
    out, aux = fa4flex.flex_attention(*qkv, return_aux=AuxRequest(lse=True, max_scores=True))
    scores = qkv[0] @ qkv[1].mT / math.sqrt(6)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ qkv[2])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_a_compiled_model(backend: str) -> None:
    """An operator in the graph; its gradients come of a forward pass that runs again."""
    bias, sinks = leaf(4, 40), leaf(4)

    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + bias[h, (q_idx - kv_idx).abs()]

    attn = fa4flex.compile(mod, v.causal, sinks=lambda: sinks, backend="flex")
    qkv = leaf(2, 4, 40, 16), leaf(2, 2, 40, 16), leaf(2, 2, 40, 16)

    def step(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attn(*x, return_lse=True)
        return out * 2, lse

    torch._dynamo.reset()
    found = torch.compile(step, backend=backend, fullgraph=True)(*qkv)
    agree(found, step(*qkv), [*qkv, bias, sinks])


def test_inside_inference_mode() -> None:
    attn = fa4flex.compile(v.alibi, v.causal, backend="flex")
    qkv = [torch.randn(1, 2, 9, 16) for _ in range(3)]
    wanted = attn(*qkv, return_lse=True)
    torch._dynamo.reset()
    with torch.inference_mode():
        torch.testing.assert_close(attn(*qkv, return_lse=True), wanted)
        compiled = torch.compile(lambda *x: attn(*x, return_lse=True), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*qkv), wanted)
    q, k, value = (x.requires_grad_() for x in qkv)
    torch.autograd.grad(attn(q, k, value).sum(), [q, k, value])  # what inference made is not saved
