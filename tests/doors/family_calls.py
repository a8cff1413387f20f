"""Calls for the paths of families: of each kind, at extents that a test draws; what they launch, compared."""

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
from fa4flex import Paging, Varlen
from fa4flex.runtime.cuda.repeats.family_path import QKV, FamilyPath

MADE = ("out", "lse", "max_scores", "workspace", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
"""Memory of a launch's own: it is compared by what it looks like, lengths by contents."""

TABLE, WINDOW = torch.linspace(-1, 1, 2048).view(2, 1024), 5000


@dataclass(frozen=True)
class Step:
    """One call of an Attention."""

    qkv: QKV
    varlen: Varlen | None = None
    paging: Paging | None = None
    lse: bool = False

    def __call__(self, attn: fa4flex.Attention) -> Any:
        return attn(*self.qkv, varlen=self.varlen, paging=self.paging, return_lse=self.lse)

    def find(self, path: FamilyPath, attn: fa4flex.Attention) -> Any:
        return path.find(attn.variant, self.qkv, self.varlen, self.paging)

    def of(self, name: str, change: Callable[[Tensor], Any]) -> Step:
        """Step with one of q, k, v changed."""
        qkv = [change(x) if n == name else x for n, x in zip("qkv", self.qkv, strict=True)]
        return replace(self, qkv=tuple(qkv))


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
    batch, q_len, keys = draw.randint(1, 4), draw.randint(257, 400), draw.randint(1, 300)
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


KINDS = {
    one.__name__: one
    for one in (dense, sliced, of_long_queries, used, used_both, packed, packed_apart, paged)
}


def turned(step: Step) -> Step:
    """The step in the layout bshd; packed tensors and pages have one layout."""
    q, k, v = (x if x.ndim == 3 else x.transpose(1, 2).contiguous() for x in step.qkv)
    return replace(step, qkv=(q, k, v) if step.paging is None else (q, *step.qkv[1:]))


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
