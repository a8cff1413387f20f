"""Output functions, and calls of every kind with one, beside the same in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import called, cumulative
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.primitives.output import as_output

LENGTHS = ((5, 9), (0, 4), (11, 11), (3, 1))
"""Queries and keys of the sequences of a ragged batch: one has no query, one fewer keys than queries."""


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 11
    kv_len: int = 13
    dim: int = 16
    dim_v: int = 16


def full(s: Sizes, leaf: Callable[..., Tensor]) -> tuple[Any, list[Tensor]]:
    gate = leaf(s.batch, s.heads, s.q_len, s.dim_v)
    return (lambda out, b, h, q_idx, d_idx: out * torch.sigmoid(gate[b, h, q_idx, d_idx])), [gate]


def rows(s: Sizes, leaf: Callable[..., Tensor]) -> tuple[Any, list[Tensor]]:
    gate = leaf(s.batch, s.heads, s.q_len)
    return (lambda out, b, h, q_idx, d_idx: out * torch.sigmoid(gate[b, h, q_idx])), [gate]


def heads(s: Sizes, leaf: Callable[..., Tensor]) -> tuple[Any, list[Tensor]]:
    scale, shift = leaf(s.heads), leaf()
    return (lambda out, b, h, q_idx, d_idx: torch.tanh(out * scale[h] + shift)), [scale, shift]


def scattered(s: Sizes, leaf: Callable[..., Tensor]) -> tuple[Any, list[Tensor]]:
    """Elements that indices share, and the same tensor twice, of the lengths that a function may ask for."""
    table = leaf(7)

    def mod(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, q_len: Any, num_heads: Any) -> Any:
        return out * table[(3 * q_idx + d_idx) % 7] + table[h % 7] * out * out + q_len - 2 * num_heads + b

    return mod, [table]


def chained(s: Sizes, leaf: Callable[..., Tensor]) -> tuple[Any, list[Tensor]]:
    first, gate = full(s, leaf)
    then, scale = heads(s, leaf)
    return as_output(first) >> then, [*gate, *scale]


FUNCTIONS = {f.__name__: f for f in (full, rows, heads, scattered, chained)}

Oracle = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Made:
    """One call: `attend` and `oracle` of q, k, v give out and lse, the latter by reference.attention, or by
    another function in its place."""

    qkv: tuple[Tensor, ...]
    attend: Callable[..., Any]
    oracle: Oracle


def wrapped(attn: Any, wrap: Any, *qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return wrap(lambda *x: called(attn, *x, **options))(*qkv)  # type: ignore[no-any-return]


def ragged(s: Sizes) -> Sizes:
    longest = [max(each) for each in zip(*LENGTHS, strict=True)]
    return Sizes(len(LENGTHS), s.heads, s.kv_heads, *longest, s.dim, s.dim_v)


def dense(s: Sizes, leaf: Callable[..., Tensor], composition: dict[str, Any], layout: str = "bhsd") -> Made:
    shapes = (s.heads, s.q_len, s.dim), (s.kv_heads, s.kv_len, s.dim), (s.kv_heads, s.kv_len, s.dim_v)
    qkv = tuple([leaf(s.batch, *shape) for shape in shapes])
    swapped = layout == "bshd"

    def attend(*qkv: Tensor, wrap: Any = lambda f: f) -> Any:
        attn = fa4flex.compile(**composition, layout=layout)  # type: ignore[arg-type]
        turned = [x.transpose(1, 2) for x in qkv] if swapped else qkv
        out, lse = wrapped(attn, wrap, *turned)
        return out.transpose(1, 2) if swapped else out, lse

    return Made(qkv, attend, lambda qkv, by=reference.attention: of_dense(qkv, composition, by))


def in_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    mask: Any,
    *,
    output_mod: Any,
    sinks: None = None,
    normalizer: Any = None,
) -> tuple[Tensor, Tensor]:
    """The same maths in the dtype of q, each step rounded, but for the softmax and the function itself."""
    assert score_mod is None and sinks is None
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT).float() / q.shape[-1] ** 0.5
    allowed = reference.allowed_pairs(mask, tuple(scores.shape))  # type: ignore[arg-type]
    if normalizer is not None and normalizer.kind != "softmax":
        weights = reference.normalised(scores.double(), allowed, normalizer).to(q.dtype)
        out = reference.modified_output((weights @ v).double(), output_mod)
        return out.to(q.dtype), scores.new_zeros(scores.shape[:3])
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isfinite().unsqueeze(-1), (scores - lse.unsqueeze(-1)).exp(), 0).to(q.dtype)
    out = reference.modified_output((weights @ v).double(), output_mod)
    return out.to(q.dtype), lse


def _unsummed(composition: dict[str, Any]) -> bool:
    normalizer = composition.get("normalizer")
    return normalizer is not None and normalizer.kind != "softmax"


def of_dense(
    qkv: tuple[Tensor, ...], composition: dict[str, Any], by: Any = reference.attention, n: int | None = None
) -> Any:
    """The oracle of one dense call, or of sequence n."""
    score, output = (composition.get(name) for name in ("score_mod", "output_mod"))
    mask = composition.get("mask")
    if mask is not None:
        mask = fa4flex.as_mask(mask)
    if n is not None:
        score, output = reference.of_sequence(score, n, 1), reference.of_sequence(output, n, 1)
        mask = None if mask is None else reference.of_sequence(mask, n, 0)
    q, k, v = qkv
    rest: Any = {name: composition[name] for name in ("dropout",) if name in composition}
    rest |= {"first": n or 0} if rest else {}
    rest |= {"sinks": composition.get("sinks"), "output_mod": output}
    if (normalizer := composition.get("normalizer")) is not None:
        rest["normalizer"] = normalizer if n is None else reference.normalizer_of_sequence(normalizer, n)
    result = by(q, k, v, score, mask, **rest)
    return result


def packed(s: Sizes, leaf: Callable[..., Tensor], composition: dict[str, Any]) -> Made:
    of_q, of_k = (cumulative([x[at] for x in LENGTHS]) for at in (0, 1))
    q, k = leaf(int(of_q[-1]), s.heads, s.dim), leaf(int(of_k[-1]), s.kv_heads, s.dim)
    v = leaf(int(of_k[-1]), s.kv_heads, s.dim_v)
    varlen = fa4flex.Varlen(of_q, of_k)

    def attend(*qkv: Tensor, wrap: Any = lambda f: f) -> Any:
        attn = fa4flex.compile(**composition)
        return wrapped(attn, wrap, *qkv, varlen=varlen)

    def oracle(qkv: tuple[Tensor, ...], by: Any = reference.attention) -> Any:
        outs, lses = [], []
        for n in range(len(LENGTHS)):
            rows, keys = (slice(int(cu[n]), int(cu[n + 1])) for cu in (of_q, of_k))
            one = [x.transpose(0, 1)[None] for x in (qkv[0][rows], qkv[1][keys], qkv[2][keys])]
            out, lse = of_dense(tuple(one), composition, by, n)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    return Made((q, k, v), attend, oracle)


def padded(s: Sizes, leaf: Callable[..., Tensor], composition: dict[str, Any]) -> Made:
    base = dense(s, leaf, composition)
    used = [torch.tensor([x[at] for x in LENGTHS], dtype=torch.int32) for at in (0, 1)]
    varlen = fa4flex.Varlen(seqused_q=used[0], seqused_k=used[1])

    def attend(*qkv: Tensor, wrap: Any = lambda f: f) -> Any:
        attn = fa4flex.compile(**composition)
        return wrapped(attn, wrap, *qkv, varlen=varlen)

    def oracle(qkv: tuple[Tensor, ...], by: Any = reference.attention) -> Any:
        outs, lses = [], []
        for n, (rows, keys) in enumerate(LENGTHS):
            one = [x[n : n + 1, :, :end] for x, end in zip(qkv, (rows, keys, keys), strict=True)]
            out, lse = of_dense(tuple(one), composition, by, n)
            left = s.q_len - rows
            outs.append(torch.nn.functional.pad(out, (0, 0, 0, left)))
            value = 0.0 if _unsummed(composition) else -torch.inf
            lses.append(torch.nn.functional.pad(lse, (0, left), value=value))
        return torch.cat(outs), torch.cat(lses)

    return Made(base.qkv, attend, oracle)


def paged(s: Sizes, leaf: Callable[..., Tensor], composition: dict[str, Any], page: int = 4) -> Made:
    """Queries of as many rows for each sequence, keys of different numbers in pages."""
    per = -(-s.kv_len // page)
    q = leaf(s.batch, s.heads, s.q_len, s.dim)
    pools = [leaf(s.batch * per + 1, page, s.kv_heads, dim) for dim in (s.dim, s.dim_v)]
    table = torch.randperm(s.batch * per).view(s.batch, per).to(torch.int32)
    lengths = [max(1, s.kv_len - 3 * n) for n in range(s.batch)]
    paging = fa4flex.Paging(table, torch.tensor(lengths, dtype=torch.int32))

    def attend(*qkv: Tensor, wrap: Any = lambda f: f) -> Any:
        attn = fa4flex.compile(**composition)
        return wrapped(attn, wrap, *qkv, paging=paging)

    def oracle(qkv: tuple[Tensor, ...], by: Any = reference.attention) -> Any:
        outs, lses = [], []
        for n, length in enumerate(lengths):
            k, v = (x[table[n].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in qkv[1:])
            out, lse = of_dense((qkv[0][n : n + 1], k, v), composition, by, n)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    return Made((q, *pools), attend, oracle)


def few(s: Sizes, leaf: Callable[..., Tensor], composition: dict[str, Any]) -> Made:
    """Two queries, of a batch as it is decoded."""
    return dense(s, leaf, composition)


KINDS = {f.__name__: f for f in (dense, packed, padded, paged, few)}


def sizes_of(kind: str, s: Sizes) -> Sizes:
    """Sizes at which a kind of call is made."""
    if kind in ("packed", "padded"):
        return ragged(s)
    return Sizes(s.batch, s.heads, s.kv_heads, 2, s.kv_len, s.dim, s.dim_v) if kind == "few" else s


def leaves(dtype: torch.dtype, device: str = "cpu") -> Callable[..., Tensor]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()

    return leaf
