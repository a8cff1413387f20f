"""Calls whose host time is measured, on a GPU (host_time.py) and without one (host_time_stub.py).

All that changes from one call to the next is made beforehand, but for what a caller makes at each: slices,
`Varlen` and `Paging`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import fa4flex
from fa4flex import BlockMap, KVScales, Lists, Paging, Varlen
from fa4flex.variants import alibi, causal, document, sliding_window

HEADS, KV_HEADS, D, KEYS, BATCH, PAGE = 32, 8, 128, 8192, 4, 64
DTYPE = torch.bfloat16
Call = Callable[[], Any]


def rotating(call: Callable[..., Any], *given: list[Any]) -> Call:
    """A call with the next of what is given, again and again from the first."""
    turns: Iterator[Any] = itertools.cycle(zip(*given, strict=True))
    return lambda: call(*next(turns))


def heads(batch: int, count: int, length: int) -> Tensor:
    return torch.empty(batch, count, length, D, dtype=DTYPE)


def decoding() -> dict[str, Call]:
    """One query per sequence over a cache; all that changes is made beforehand."""
    attn, steps = fa4flex.compile(mask=causal), range(1000, 1400)
    q, k, v = heads(BATCH, HEADS, 1), heads(BATCH, KV_HEADS, KEYS), heads(BATCH, KV_HEADS, KEYS)
    used = [torch.full((BATCH,), n, dtype=torch.int32) for n in steps]
    grown = [[x[:, :, :n] for n in steps] for x in (k, v)]
    large = heads(64, HEADS, 1), *(heads(64, KV_HEADS, 1000) for _ in range(2))
    batches = [[x[: 1 + n % 64] for n in steps] for x in large]
    attended = [fa4flex.compile(mask=causal) for _ in range(6)]
    of_used, of_lengths, of_batches, of_kinds, _, _ = attended
    prompts = [heads(1, HEADS, 512)[:, :, : 100 + n % 256] for n in steps]
    mixed = [q[:1] if n % 2 else prompt for n, prompt in zip(steps, prompts, strict=True)]
    slots = [(k[:1], v[:1])[i][:, :, :n] for i in (0, 1) for n in steps]
    return {
        "repeated": lambda: attn(q, k, v),
        "one more key per call": rotating(lambda k, v: attn(q, k, v), *grown),
        "the same with seqused, contents as before": (
            lambda lengths: lambda: of_used(q, k, v, varlen=lengths)
        )(Varlen(seqused_k=used[0])),
        "the same with new seqused": rotating(
            lambda x: of_lengths(q, k, v, varlen=Varlen(seqused_k=x)), used
        ),
        "another batch size": rotating(of_batches, *batches),
        "prompts and single queries in turns": rotating(
            of_kinds, mixed, slots[: len(steps)], slots[len(steps) :]
        ),
    }


def pages() -> dict[str, Call]:
    columns = KEYS // PAGE
    q, k, v = heads(BATCH, HEADS, 1), *(torch.empty(600, PAGE, KV_HEADS, D, dtype=DTYPE) for _ in range(2))
    table = torch.zeros(BATCH, columns, dtype=torch.int32)
    used = [torch.full((BATCH,), n, dtype=torch.int32) for n in range(64)]
    tables = [table[:, : 10 + n] for n in range(64)]
    many = [x.expand(256, *x.shape[1:]) for x in (q[:1], table[:1], used[0][:1])]
    fixed, lengths, grown, large = (fa4flex.compile(mask=causal) for _ in range(4))
    kept, kept_large = Paging(table, used[0]), Paging(*many[1:])
    return {
        "pages, repeated": lambda: fixed(q, k, v, paging=kept),
        "pages, batch of 256, repeated": lambda: large(many[0], k, v, paging=kept_large),
        "pages, new lengths": rotating(lambda x: lengths(q, k, v, paging=Paging(table, x)), used),
        "pages, one more column": rotating(lambda x, n: grown(q, k, v, paging=Paging(x, n)), tables, used),
    }


def eight_bit() -> dict[str, Call]:
    """Caches of e4m3, with scales of heads."""
    attn, grown, paged = (fa4flex.compile(mask=causal) for _ in range(3))
    q, k, v = (
        heads(BATCH, HEADS, 1),
        *(heads(BATCH, KV_HEADS, KEYS).to(torch.float8_e4m3fn) for _ in range(2)),
    )
    pools = [torch.empty(600, PAGE, KV_HEADS, D, dtype=DTYPE).to(torch.float8_e4m3fn) for _ in range(2)]
    scales, steps = KVScales(torch.ones(KV_HEADS), torch.ones(KV_HEADS)), range(1000, 1400)
    table = torch.zeros(BATCH, KEYS // PAGE, dtype=torch.int32)
    used = [torch.full((BATCH,), n, dtype=torch.int32) for n in range(64)]
    return {
        "8-bit cache, repeated": lambda: attn(q, k, v, kv_scales=scales),
        "8-bit cache, one more key per call": rotating(
            lambda k, v: grown(q, k, v, kv_scales=scales), *[[x[:, :, :n] for n in steps] for x in (k, v)]
        ),
        "8-bit pages, new lengths": rotating(
            lambda x: paged(q, *pools, paging=Paging(table, x), kv_scales=scales), used
        ),
    }


def listed() -> dict[str, Call]:
    """Lists of tokens, new ones at each call as a selector makes them."""
    attn, grown = fa4flex.compile(mask=causal), fa4flex.compile(mask=causal)
    q, k, v = heads(BATCH, HEADS, 1), heads(BATCH, KV_HEADS, KEYS), heads(BATCH, KV_HEADS, KEYS)
    ids, steps = torch.zeros(BATCH, KV_HEADS, 1, 512, dtype=torch.int32), range(1000, 1400)
    slices = [[x[:, :, :n] for n in steps] for x in (k, v)]
    return {
        "lists, repeated": lambda: attn(q, k, v, blocks=Lists(ids, kv_len=KEYS)),
        "lists, one more key per call": rotating(
            lambda k, v, n: grown(q, k, v, blocks=Lists(ids, kv_len=n)), *slices, [*steps]
        ),
    }


def packed() -> dict[str, Call]:
    attn, mixed = fa4flex.compile(mask=causal), fa4flex.compile(mask=causal)
    tokens = 2048
    q, k, v = (torch.empty(tokens, n, D, dtype=DTYPE) for n in (HEADS, KV_HEADS, KV_HEADS))
    cu = [torch.arange(17, dtype=torch.int32) * (tokens // 16) for _ in range(64)]
    fewer = [tokens - n for n in range(64)]
    ending = [x.clamp(max=n) for x, n in zip(cu, fewer, strict=True)]  # where the tokens do
    kept = Varlen(cu[0])
    return {
        "packed, repeated": lambda: attn(q, k, v, varlen=kept),
        "packed, new cu_seqlens": rotating(lambda x: attn(q, k, v, varlen=Varlen(x)), cu),
        "packed, new cu_seqlens and token count": rotating(
            lambda x, n: mixed(q[:n], k[:n], v[:n], varlen=Varlen(x)), ending, fewer
        ),
    }


class Captured:
    """Tensors that functions read by attribute."""

    def __init__(self, given: Tensor) -> None:
        self.now = given


def captured() -> dict[str, Call]:
    """Captured tensors of new contents are new tensors here, more of them than anything is kept for."""
    q, k, v = (torch.empty(2, 4, 512, 64, dtype=DTYPE) for _ in range(3))
    biases = [torch.zeros(4, 1023) for _ in range(64)]
    ids = [torch.arange(512) // 50 for _ in range(64)]
    of_bias, of_ids = Captured(biases[0]), Captured(ids[0])

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + of_bias.now[h, q_idx - kv_idx + 511]

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (of_ids.now[q_idx] == of_ids.now[kv_idx]) & (q_idx >= kv_idx)

    still, new = fa4flex.compile(relative, causal), fa4flex.compile(relative, causal)
    documents, changing = fa4flex.compile(mask=causal & document(ids[0])), fa4flex.compile(mask=same)

    def biased(x: Tensor) -> Any:
        of_bias.now = x
        return new(q, k, v)

    def assigned(x: Tensor) -> Any:
        of_ids.now = x
        return changing(q, k, v)

    return {
        "captured bias, repeated": lambda: still(q, k, v),
        "captured bias, another tensor": rotating(biased, biases),
        "documents, repeated": lambda: documents(q, k, v),
        "documents, other ids": rotating(assigned, ids),
    }


def blocks() -> dict[str, Call]:
    """A map that a call brings, and torch's with lists in place of classes."""
    q, k, v = (torch.empty(2, 4, 512, 64, dtype=DTYPE) for _ in range(3))
    attn, classes = fa4flex.compile(mask=causal), torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    map_of_call = BlockMap(classes, (128, 128), 512, 512)

    def before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    mask = create_block_mask(before, None, None, 512, 512, device=q.device)
    return {
        "flex_attention, BlockMask": lambda: fa4flex.flex_attention(q, k, v, block_mask=mask),
        "map given to the call": lambda: attn(q, k, v, blocks=map_of_call),
    }


def training() -> dict[str, Call]:
    attn = fa4flex.compile(score_mod=alibi, mask=causal & sliding_window(128))
    grown, lengths = fa4flex.compile(score_mod=alibi, mask=causal), range(200, 300)
    qkv = [torch.empty(2, 4, 512, 64, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    cut = [[x.detach()[:, :, :n].requires_grad_() for n in lengths] for x in qkv]
    dout = torch.empty(2, 4, 512, 64, dtype=DTYPE)
    of_cut = [dout[:, :, :n] for n in lengths]
    return {
        "with gradients, forward": lambda: attn(*qkv),
        "with gradients, forward, new length": rotating(grown, *cut),
        "forward and backward": lambda: torch.autograd.grad(attn(*qkv), qkv, dout),
        "forward and backward, new length": rotating(
            lambda q, k, v, dout: torch.autograd.grad(grown(q, k, v), (q, k, v), dout), *cut, of_cut
        ),
    }


def new_contents() -> dict[str, Call]:
    """Forward and backward with a mask told by block tables: ids that are written in place, and new lengths
    of packed sequences."""
    ids = torch.arange(512) // 50
    qkv = [torch.empty(2, 4, 512, 64, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    dout = torch.empty(2, 4, 512, 64, dtype=DTYPE)
    tokens = [torch.empty(2048, 4, 64, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    of_tokens = torch.empty(2048, 4, 64, dtype=DTYPE)
    cu = [torch.arange(5, dtype=torch.int32) * 512 for _ in range(64)]
    dense, ordered, packed = (
        fa4flex.compile(mask=causal & document(ids), schedule=fa4flex.Schedule(deterministic=one))
        for one in (False, True, False)
    )

    def both(attn: Any, renewed: bool) -> Call:
        def step() -> Any:
            if renewed:
                ids.add_(0)
            return torch.autograd.grad(attn(*qkv), qkv, dout)

        return step

    def lengths(x: Tensor) -> Any:
        ids.add_(0)
        return torch.autograd.grad(packed(*tokens, varlen=Varlen(x)), tokens, of_tokens)

    return {
        "documents, forward and backward": both(dense, False),
        "documents, forward and backward, new ids": both(dense, True),
        "documents, sums in one order, new ids": both(ordered, True),
        "packed documents, new ids and cu_seqlens": rotating(lengths, cu),
    }


def rows() -> dict[str, Call]:
    """Calls by name, with tensors of the default device; the others are compared with the first."""
    return {
        **decoding(), **pages(), **eight_bit(), **listed(), **packed(), **captured(), **blocks(),
        **training(), **new_contents(),
    }  # fmt: skip
