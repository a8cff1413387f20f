"""Calls of each kind, at extents that a test draws, and what knows them again; what they launch, compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from launch_changes import HEADS, by_name, same
from test_gpu_calls import Recorder
from torch import Tensor

import fa4flex
from fa4flex import KVScales, Paging, Varlen
from fa4flex.runtime.recent import KnownCall, Recent

MADE = ("out", "lse", "max_scores", "workspace", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
"""Memory of a launch's own: it is compared by what it looks like, lengths by contents."""

QKV = tuple[Tensor, Tensor, Tensor]

TABLE, WINDOW = torch.linspace(-1, 1, 2048).view(2, 1024), 5000


@dataclass(frozen=True)
class Step:
    """One call of an Attention."""

    qkv: QKV
    varlen: Varlen | None = None
    paging: Paging | None = None
    lse: bool = False
    scales: KVScales | None = None

    def __call__(self, attn: fa4flex.Attention) -> Any:
        beside = {"varlen": self.varlen, "paging": self.paging, "kv_scales": self.scales}
        return attn(*self.qkv, **beside, return_lse=self.lse)

    def of(self, name: str, change: Callable[[Tensor], Any]) -> Step:
        """Step with one of q, k, v changed."""
        qkv = [change(x) if n == name else x for n, x in zip("qkv", self.qkv, strict=True)]
        return replace(self, qkv=tuple(qkv))


@dataclass(frozen=True)
class Path:
    """One known launch, apart from others."""

    recent: Recent[Any]
    known: KnownCall

    @staticmethod
    def of(attn: fa4flex.Attention, step: Step, narrow: bool = False) -> Path:
        """The launch that serves such steps: of all extents, or `narrow`, of the very same shapes."""
        for _ in range(4):
            step(attn)
        recent = attn._caller.recent  # type: ignore[union-attr]
        assert recent is not None
        (known,) = (one for one in recent.known.kept if (one.valid is None) == narrow)
        path = Path(recent, known)
        assert path.serves(step, attn)
        return path

    def serves(self, step: Step, attn: fa4flex.Attention) -> bool:
        """True if a step of such an Attention is served."""
        self.recent.known.kept = (self.known,)
        statistics = ("lse",) if step.lse else ()
        given = step.qkv, step.varlen, step.paging, step.scales, statistics
        return self.recent.serve(attn.variant, *given) is not None


def heads(count: int, *sizes: int) -> Tensor:
    batch, length = sizes
    return torch.zeros(batch, count, length, 64, dtype=torch.bfloat16)


def lengths(batch: int, most: int, draw: random.Random) -> Tensor:
    return torch.tensor([draw.randint(0, most) for _ in range(batch)], dtype=torch.int32)


def dense(draw: random.Random) -> Step:
    batch, q_len, keys = draw.randint(1, 9), draw.randint(1, 30), draw.randint(1, 4000)
    return Step((heads(HEADS, batch, q_len), heads(2, batch, keys), heads(2, batch, keys)))


def sliced(draw: random.Random) -> Step:
    """Keys and values out of a larger cache, with its strides."""
    q, k, _ = dense(draw).qkv
    room = torch.zeros(k.shape[0], 2, 4096, 2 * 64, dtype=torch.bfloat16)
    return Step((q, *(x[:, :, : k.shape[2]] for x in room.split(64, -1))))  # type: ignore[arg-type]


def of_long_queries(draw: random.Random) -> Step:
    # A prompt alone has a plan of its own: its tiles all run at once.
    batch, q_len, keys = draw.randint(2, 4), draw.randint(257, 400), draw.randint(1, 300)
    return Step((heads(HEADS, batch, q_len), heads(2, batch, keys), heads(2, batch, keys)))


def used(draw: random.Random) -> Step:
    step = dense(draw)
    return replace(step, varlen=Varlen(seqused_k=lengths(step.qkv[0].shape[0], step.qkv[1].shape[2], draw)))


def used_both(draw: random.Random) -> Step:
    """Lengths of queries and of keys in one tensor."""
    step = dense(draw)
    q, k, _ = step.qkv
    both = lengths(q.shape[0], min(q.shape[2], k.shape[2]), draw)
    return replace(step, varlen=Varlen(seqused_q=both, seqused_k=both))


def packed(draw: random.Random) -> Step:
    """Sequences, short and long, whose heads have keys of their own: of groups, short ones are told apart."""
    tokens, sequences = draw.randint(40, 4000), draw.randint(1, 9)
    inner = sorted(draw.randint(0, tokens) for _ in range(sequences - 1))
    cu = torch.tensor([0, *inner, tokens], dtype=torch.int32)
    q, k, v = (torch.zeros(tokens, HEADS, 64, dtype=torch.bfloat16) for _ in range(3))
    return Step((q, k, v), varlen=Varlen(cu))


def packed_apart(draw: random.Random) -> Step:
    step = packed(draw)
    assert step.varlen is not None and step.varlen.cu_seqlens_q is not None
    return replace(step, varlen=Varlen(step.varlen.cu_seqlens_q, step.varlen.cu_seqlens_q.clone()))


POOL = tuple(torch.zeros(40, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv")


def paged(draw: random.Random) -> Step:
    batch, columns = draw.randint(1, 9), draw.randint(1, 200)
    table = torch.zeros(batch, 200, dtype=torch.int32)[:, :columns]
    used = lengths(batch, columns * 16, draw)
    return Step((heads(HEADS, batch, draw.randint(1, 4)), *POOL), paging=Paging(table, used))  # type: ignore[arg-type]


def packed_pages(draw: random.Random) -> Step:
    """Packed queries of sequences whose keys lie in pages."""
    step = paged(draw)
    assert step.paging is not None
    counts = [draw.randint(1, 4) for _ in range(step.paging.page_table.shape[0])]
    cu = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = torch.zeros(sum(counts), HEADS, 64, dtype=torch.bfloat16)
    return replace(step, qkv=(q, *POOL), varlen=Varlen(cu))  # type: ignore[arg-type]


def eight_bit(draw: random.Random) -> Step:
    """A cache with scales of sequences' heads, and of heads."""
    q, *kv = dense(draw).qkv
    scales = KVScales(torch.ones(q.shape[0], 2), torch.ones(2))
    return Step((q[:, :, :1], *(x.to(torch.float8_e4m3fn) for x in kv)), scales=scales)  # type: ignore[arg-type]


def unscaled(draw: random.Random) -> Step:
    return replace(eight_bit(draw), scales=None)


def eight_bit_tokens(draw: random.Random) -> Step:
    step = eight_bit(draw)
    return replace(step, scales=KVScales(torch.ones(step.qkv[1].shape[:3]), None))


def eight_bit_used(draw: random.Random) -> Step:
    step = eight_bit(draw)
    q, k, _ = step.qkv
    return replace(step, varlen=Varlen(seqused_k=lengths(q.shape[0], k.shape[2], draw)))


SMALL = tuple(x.to(torch.float8_e4m3fn) for x in POOL)


def eight_bit_pages(draw: random.Random) -> Step:
    """Scales of pages, and of tokens."""
    step = paged(draw)
    scales = KVScales(torch.ones(40, 2), torch.ones(40, 16, 2))
    return replace(step, qkv=(step.qkv[0][:, :, :1], *SMALL), scales=scales)  # type: ignore[arg-type]


OF_PAGES = (paged, packed_pages, eight_bit_pages)
KINDS = {
    one.__name__: one
    for one in (
        dense, sliced, of_long_queries, used, used_both, packed, packed_apart, *OF_PAGES,
        eight_bit, unscaled, eight_bit_tokens, eight_bit_used,
    )
}  # fmt: skip


def turned(step: Step) -> Step:
    """The step in the layout bshd; packed tensors and pages have one layout."""
    q, k, v = (x if x.ndim == 3 else x.transpose(1, 2).contiguous() for x in step.qkv)
    if step.paging is not None:
        return replace(step, qkv=(q, *step.qkv[1:]))
    scales = step.scales
    if scales is not None and scales.k is not None and scales.k.ndim == 3:
        scales = KVScales(scales.k.transpose(1, 2).contiguous(), scales.v)
    return replace(step, qkv=(q, k, v), scales=scales)


def attention(table: Tensor = TABLE, window: int = WINDOW, **options: Any) -> fa4flex.Attention:
    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h % 2, kv_idx % 1024]

    return fa4flex.compile(score, lambda b, h, q_idx, kv_idx: kv_idx - q_idx < window, **options)


def launched(recorder: Recorder) -> dict[str, Any]:
    return by_name(recorder.launches[-1])


def differing(given: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def shown(name: str, x: Any) -> Any:
        if name in MADE and isinstance(x, Tensor):
            look = x.shape, x.stride(), x.dtype
            return (look, x.tolist()) if x.dtype == torch.int32 else look
        return x

    return [name for name in given if not same(shown(name, given[name]), shown(name, expected[name]))]
