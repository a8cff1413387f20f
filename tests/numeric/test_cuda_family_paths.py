"""Calls that look like an earlier one on a GPU: of other lengths, batches, tables and captured tensors, each
right, though none of them but the first few was looked for by its key."""

from __future__ import annotations

import random
from typing import Any

import on_gpus
import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import Paging, Varlen
from fa4flex.runtime import launch
from fa4flex.variants import alibi, causal

pytestmark = on_gpus.HOPPER

STEPS, LOOKED_FOR = 12, 3
MANY = range(769, 1400)
"""Queries of prompts that have one tile, whatever their number."""

Given = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def lengths(draw: random.Random, count: int, most: int) -> Tensor:
    found = [draw.randint(0, most) for _ in range(count)]
    return torch.tensor(found, dtype=torch.int32, device="cuda")


def dense(draw: random.Random) -> Given:
    batch, q_len, keys = draw.randint(1, 5), draw.randint(1, 16), draw.randint(16, 4000)
    cache = drawn(batch, 2, 4096, 128)
    return (drawn(batch, 8, q_len, 64), *cache[:, :, :keys].split(64, -1)), {}  # type: ignore[return-value]


def prompts(draw: random.Random) -> Given:
    """Those of lengths that have one tile."""
    batch, n = draw.randint(2, 3), draw.choice(MANY)
    return (drawn(batch, 8, n, 64), drawn(batch, 2, n, 64), drawn(batch, 2, n, 64)), {}


def padded(draw: random.Random) -> Given:
    qkv, _ = dense(draw)
    return qkv, {"varlen": Varlen(seqused_k=lengths(draw, qkv[0].shape[0], qkv[1].shape[2]))}


def packed(draw: random.Random) -> Given:
    """Sequences that are short on average: 16 to 31 of them have a launch of their own."""
    tokens, inner = draw.randint(600, 2000), draw.randint(15, 20)
    ends = sorted(draw.randint(0, tokens) for _ in range(inner))
    cu = torch.tensor([0, *ends, tokens], dtype=torch.int32, device="cuda")
    return (drawn(tokens, 8, 64), drawn(tokens, 2, 64), drawn(tokens, 2, 64)), {"varlen": Varlen(cu)}


def paged(draw: random.Random) -> Given:
    batch, columns = draw.randint(1, 5), draw.randint(1, 60)
    table = torch.randperm(400)[: batch * columns].view(batch, columns).int().cuda()
    used = lengths(draw, batch, columns * 64)
    pools = drawn(400, 64, 2, 64), drawn(400, 64, 2, 64)
    return (drawn(batch, 8, draw.randint(1, 4), 64), *pools), {"paging": Paging(table, used)}


def exactly(attn: Any, given: Given) -> Tensor:
    """The same in float64 on the CPU."""
    q, k, v = (x.cpu().double() for x in given[0])
    options = dict(given[1])
    if "varlen" in options:
        names = ("cu_seqlens_q", "seqused_k")
        one = options["varlen"]
        options["varlen"] = Varlen(
            **{name: None if getattr(one, name) is None else getattr(one, name).cpu() for name in names}
        )
    if "paging" in options:
        one = options["paging"]
        options["paging"] = Paging(one.page_table.cpu(), one.seqused_k.cpu())
    found: Tensor = attn(q, k, v, **options)
    return found


@pytest.mark.parametrize("kind", (dense, prompts, padded, packed, paged), ids=lambda kind: kind.__name__)
def test_calls_that_are_not_looked_for_are_right(
    kind: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    attn, draw, looked_for, run = fa4flex.compile(alibi, causal), random.Random(seed), [], launch.run

    def counted(now: Any, q: Tensor, *given: Any) -> Any:
        looked_for.append(q)
        return run(now, q, *given)

    for _ in range(STEPS):
        given = kind(draw)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "run", counted)
            out = attn(*given[0], **given[1])
        exact = exactly(attn, given)
        assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
    assert len(looked_for) <= LOOKED_FOR


def test_captured_tensors_of_each_call_are_read(seed: int) -> None:
    bias = [torch.zeros(8, device="cuda")]
    attn, draw = fa4flex.compile(lambda s, b, h, q_idx, kv_idx: s + bias[0][h], causal), random.Random(seed)
    plain, scaled = fa4flex.compile(mask=causal), 3.0
    for n in range(STEPS):
        (q, k, v), _ = dense(draw)
        bias[0] = torch.full((8,), scaled * n, device="cuda")
        _, lse = attn(q, k, v, return_lse=True)
        _, before = plain(q, k, v, return_lse=True)
        seen = before > -torch.inf
        assert torch.allclose((lse - before)[seen], torch.full_like(lse[seen], scaled * n), atol=1e-3)


def test_launches_that_were_repeated_are_captured_in_graphs(seed: int) -> None:
    """A graph of a call of lengths that came never before, over contents that change."""
    attn, draw = fa4flex.compile(mask=causal), random.Random(seed)
    for _ in range(5):
        (q, k, v), options = paged(draw)
        attn(q, k, v, **options)
    (q, k, v), options = paged(draw)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = attn(q, k, v, **options)
    for _ in range(5):
        q.copy_(torch.randn_like(q))
        used = options["paging"].seqused_k
        used.copy_(lengths(draw, used.shape[0], options["paging"].page_table.shape[1] * 64))
        graph.replay()
        exact = exactly(attn, ((q, k, v), options))
        assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
