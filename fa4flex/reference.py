"""The oracle: dense attention in float64 that reads like the formula and calls the user's own functions.

Nothing here shares code with the tracer, the analyses or the executors. It is slow and holds the whole
score matrix; use it to check results, at sizes where that fits.

    score = mod(scale * q.k, b, h, q_idx, kv_idx)   where the mask allows, else -inf
    p     = softmax(score), or f(score) / (sum g(score) + c) over allowed pairs with a normaliser;
            times kept(b, h, q_idx, kv_idx) / (1 - rate) with dropout
    out   = output_mod(p v, b, h, q_idx, d_idx)    of a row without allowed keys: of 0
    lse   = log(sum(exp(score)))                    natural logarithm; such a row gives -inf

Statistics beside these, of p = exp(score - lse), of a sink's p as well where there is one:

    max_scores = max(score) of each row             without the sink; -inf without allowed keys
    max_logit  = the largest of a head's max_scores, over batch and queries
    entropy    = -sum(p log(p)) of each row         0 without allowed keys
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fa4flex.errors import InputError
from fa4flex.primitives.base import accepted_context, call_mod, settle
from fa4flex.primitives.normalizer import Normalizer

__all__ = [
    "allowed_pairs", "attention", "kept_pairs", "modified_scores", "probabilities", "sequence_ranges",
    "skip_bound", "unpage", "varlen",
]  # fmt: skip

Mod = Callable[..., Any]
Ranges = list[tuple[int, int]]
Statistics = dict[str, Tensor]
"""max_scores and entropy [B, H, Sq], or packed [H, Tq], and max_logit [H], in float64."""


class _GatherByTensors(TorchFunctionMode):
    """`table[indices]` with 0-d tensors as a gather, which vmap can batch; indexing would call .item().

    Tables are read in float64, so that arithmetic on what was read, and the sum of its gradients, is too.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            table = table.double() if table.is_floating_point() else table
            if index and all(isinstance(i, Tensor) and i.dtype != torch.bool for i in index):
                return torch.ops.aten.index(table, [i.long() for i in index])
            args = (table, args[1])
        return function(*args, **(kwargs or {}))


@contextmanager
def _float64_indexing() -> Iterator[None]:
    """Inside, `(h + 1) * 8.0` is computed in float64 and `table[h, q_idx]` gathers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _GatherByTensors():
            yield
    finally:
        torch.set_default_dtype(before)


def allowed_pairs(mask: Any, shape: tuple[int, int, int, int]) -> Tensor:
    """Pairs that take part: bool of `shape` [B, H, Sq, Skv], from a mask_mod, a torch BlockMask, or None.

    A BlockMask allows a pair where its block is listed, and the block is full or mask_mod holds.
    """
    if mask is None or 0 in shape:
        return torch.ones(shape, dtype=torch.bool)
    if hasattr(mask, "kv_num_blocks"):
        partial = _listed_pairs(mask, mask.kv_num_blocks, mask.kv_indices, shape)
        full = _listed_pairs(mask, mask.full_kv_num_blocks, mask.full_kv_indices, shape)
        return (partial & allowed_pairs(mask.mask_mod, shape)) | full
    context = {"q_len": shape[2], "kv_len": shape[3], "num_heads": shape[1]}

    def mod(*indices: Tensor) -> Tensor:
        return torch.as_tensor(call_mod(settle(mask), indices, context)).bool()

    for axis in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=tuple(0 if i == axis else None for i in range(4)))
    with _float64_indexing():
        return mod(*(torch.arange(n) for n in shape))


def _listed_pairs(mask: Any, count: Tensor | None, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The pairs in the blocks that a BlockMask lists: the first `count` of `indices`, per row of blocks."""
    if count is None:
        return torch.zeros(shape, dtype=torch.bool)
    listed = torch.arange(indices.shape[-1]) < count.unsqueeze(-1)
    blocks = torch.zeros(indices.shape, dtype=torch.int).scatter_add(-1, indices.long(), listed.int()) > 0
    pairs = blocks.repeat_interleave(mask.BLOCK_SIZE[0], 2).repeat_interleave(mask.BLOCK_SIZE[1], 3)
    return pairs[:, :, : shape[2], : shape[3]].expand(shape)


def modified_scores(scores: Tensor, allowed: Tensor, score_mod: Mod | None) -> Tensor:
    """`score_mod` of the allowed pairs, -inf elsewhere; both [B, H, Sq, Skv].

    The mod is asked only about allowed pairs, so what it would do elsewhere (log(0), an index past a
    table) reaches neither the result nor a gradient.
    """
    masked = torch.full_like(scores, -math.inf)
    pairs = allowed.nonzero().unbind(-1)
    if score_mod is None or pairs[0].numel() == 0:
        return torch.where(allowed, scores, masked)
    context = {"q_len": scores.shape[2], "kv_len": scores.shape[3], "num_heads": scores.shape[1]}

    def mod(*point: Tensor) -> Tensor:
        return torch.as_tensor(call_mod(settle(score_mod), point, context)).to(torch.float64)

    with _float64_indexing():
        values = torch.vmap(mod)(scores[pairs], *pairs)
    return masked.index_put(pairs, values)


def modified_output(out: Tensor, output_mod: Mod | None) -> Tensor:
    """`output_mod` of every element of an output [B, H, Sq, D]."""
    if output_mod is None or out.numel() == 0:
        return out
    context = {"q_len": out.shape[2], "num_heads": out.shape[1]}

    def mod(*point: Tensor) -> Tensor:
        return torch.as_tensor(call_mod(settle(output_mod), point, context)).to(torch.float64)

    with _float64_indexing():
        points = torch.meshgrid(*(torch.arange(n) for n in out.shape), indexing="ij")
        return torch.vmap(mod)(out.flatten(), *(p.flatten() for p in points)).view(out.shape)


def kept_pairs(dropout: Any, shape: tuple[int, int, int, int], first: int = 0) -> Tensor:
    """Pairs that a fa4flex.Dropout with a seed keeps: bool of `shape` [B, H, Sq, Skv], the first entry of the
    batch being number `first`. See fa4flex/primitives/dropout.py for the definition.

    Raises InputError for dropout whose seed is drawn at each call.
    """
    if dropout.seed is None:
        raise InputError(
            "dropout without a seed", "dropout whose pairs can be told", "fa4flex.Dropout(p, seed=0)"
        )
    b, h, q, k = np.ix_(*(np.arange(n, dtype=np.uint32) for n in shape))
    seed = int(dropout.seed) % 2**64
    entry = b + np.uint32(first)

    def chain(start: int) -> Any:
        state = np.full((1, 1, 1, 1), start, dtype=np.uint32)
        for word in (np.uint32(seed % 2**32), np.uint32(seed // 2**32), entry, h):
            state = mixed(state ^ word)
        return state

    def mixed(x: Any) -> Any:
        x = (x ^ (x // np.uint32(2**16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x // np.uint32(2**13))) * np.uint32(0xC2B2AE35)
        return x ^ (x // np.uint32(2**16))

    def number(start: Any, i: Any, step: int) -> Any:
        pair = i // np.uint32(16) * np.uint32(8) + i % np.uint32(8)
        return (start | np.uint32(1)) + pair * np.uint32(step)

    rows, keys = chain(0x243F6A88), chain(0x85A308D3)
    x = number(rows, q, 0x9E3779B2) * number(keys, k, 0x85EBCA76) + mixed(rows ^ keys)
    octets = np.ascontiguousarray(x.astype("<u4")).view(np.uint8).reshape(*x.shape, 4)
    y = np.ascontiguousarray(octets[..., [2, 0, 3, 1]]).view("<u4")[..., 0]
    bits = x.astype(np.uint64) * y.astype(np.uint64)
    # Byte 2, 3, 4 or 5 of eight.
    place = 2 + q // np.uint32(8) % np.uint32(2) * np.uint32(2) + k // np.uint32(8) % np.uint32(2)
    drawn = (bits >> (np.uint64(8) * place.astype(np.uint64))).astype(np.uint8).astype(np.int8)
    return torch.from_numpy(drawn < 128 - _in_256(dropout.p))


def _in_256(p: float) -> int:
    """Probability of dropping a pair in units of 1 / 256: 0 and 256 for 0 and 1 alone."""
    return int(p) * 256 if p in (0, 1) else min(max(math.floor(p * 256 + 0.5), 1), 255)


def _factors(dropout: Any, shape: tuple[int, int, int, int], first: int) -> Tensor:
    """Factors of normalised weights."""
    rate = _in_256(dropout.p) / 256
    kept = kept_pairs(dropout, shape, first)
    return kept.double() / (1 - rate) if rate < 1 else torch.zeros(shape, dtype=torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    output_mod: Mod | None = None,
    dropout: Any = None,
    first: int = 0,
    normalizer: Normalizer | None = None,
    statistics: Statistics | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64: out [B, H, Sq, Dv] and lse [B, H, Sq], both float64 and differentiable.

    q [B, H, Sq, D], k [B, Hk, Skv, D], v [B, Hv, Skv, Dv], H a multiple of Hk and of Hv; sinks [H] is one
    more logit per head in the softmax denominator, without a value. `scale` defaults to 1 / sqrt(D). `mask`
    is a mask_mod or a torch BlockMask. `dropout` is a fa4flex.Dropout with a seed, for which the first entry
    of the batch is number `first`. Gradients reach q, k, v, sinks and the floating tensors that the mods
    captured. With a normaliser but the softmax (plus n, which lse includes) there is no log-sum-exp: lse is
    0. `statistics` is a dict that the others are put into; its entropy is differentiable. Raises InputError
    where H is not a multiple of Hk and of Hv.
    """
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    for kv_heads in (k.shape[1], v.shape[1]):
        if kv_heads == 0 or heads % kv_heads:
            raise InputError(
                f"{heads} query heads with {kv_heads} key-value heads",
                "a number of query heads that is a multiple of the key-value heads",
                "repeat or drop heads so that H % Hkv == 0",
            )
    q, k, v = q.double(), *(x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scale = 1 / math.sqrt(dim) if scale is None else scale
    allowed = allowed_pairs(mask, (batch, heads, q_len, kv_len))
    scores = modified_scores(scale * (q @ k.mT), allowed, score_mod)
    factors = None
    if dropout is not None:
        factors = _factors(dropout, (batch, heads, q_len, kv_len), first).to(v.device)
    normalizer = Normalizer() if normalizer is None else normalizer
    if normalizer.kind != "softmax":
        weights = normalised(scores, allowed, normalizer)
        out = (weights if factors is None else weights * factors) @ v
        return modified_output(out, output_mod), out.new_zeros(out.shape[:3])
    sink = scores.new_full((heads,), -math.inf) if sinks is None else sinks.double()
    if normalizer.plus:
        sink = torch.logaddexp(sink, sink.new_full((), math.log(normalizer.plus)))
    logits = torch.cat([scores, sink.view(1, heads, 1, 1).expand(batch, heads, q_len, 1)], -1)
    out, lse = _softmax(logits, v, factors)
    if statistics is not None:
        statistics |= statistics_of(logits)
    return modified_output(out, output_mod), lse


def probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    score_mod: Mod | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """exp(score - lse) of every pair [B, H, Sq, Skv], in float64; 0 of pairs that the mask hides, and of rows
    whose lse is -inf.

    q, k, mask and scale as in `attention`, lse [B, H, Sq] as it returns it: sinks are inside. Gradients reach
    q, k, lse and the floating tensors that the mods captured.
    """
    heads = q.shape[1]
    keys = k.double().repeat_interleave(heads // k.shape[1], 1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    seen = (lse > -math.inf)[..., None]
    allowed = allowed_pairs(mask, (*q.shape[:3], k.shape[2])) & seen
    scores = modified_scores(scale * (q.double() @ keys.mT), allowed, score_mod)
    return torch.exp(scores - torch.where(seen, lse.double()[..., None], 0))


def skip_bound(
    skip: float, v: Tensor, allowed: Tensor, sinks: bool = False, dropout: Any = None, first: int = 0
) -> Tensor:
    """Bound of the error of each element of an output under `Precision(skip=skip)`: [B, H, Sq, Dv], float64.

    v [B, Hkv, Skv, Dv], allowed [B, H, Sq, Skv]. It is skip times the range of the channel's values at the
    allowed keys, with 0 among them where there are sinks; 0 for a query without keys. Values of pairs that
    dropout keeps count as v / (1 - rate), of others as 0.
    """
    values = v.double().repeat_interleave(allowed.shape[1] // v.shape[1], 1).unsqueeze(2)
    if dropout is not None:
        batch, heads, rows, keys = allowed.shape
        values = values * _factors(dropout, (batch, heads, rows, keys), first).unsqueeze(-1)
    there = allowed.unsqueeze(-1)
    most = torch.where(there, values, -math.inf).amax(3)
    least = torch.where(there, values, math.inf).amin(3)
    if sinks:
        most, least = most.clamp(min=0), least.clamp(max=0)
    return torch.where(allowed.any(-1, keepdim=True), skip * (most - least), 0)


def _softmax(logits: Tensor, v: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and lse from logits whose last column is the sink. No inf - inf and no log(0), in either pass.
    `factors` multiply normalised weights."""
    largest = logits.detach().amax(-1, keepdim=True)
    largest = torch.where(largest == -math.inf, 0, largest)
    weights = torch.exp(logits - largest)
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1, total)
    lse = torch.where(total == 0, -math.inf, largest + safe.log())
    weights = weights[..., :-1] / safe
    return (weights if factors is None else weights * factors) @ v, lse.squeeze(-1)


def normalised(scores: Tensor, allowed: Tensor, normalizer: Normalizer) -> Tensor:
    """Weights of modified scores by a normaliser that is no softmax; 0 where pairs are not allowed."""
    if normalizer.kind == "elementwise":
        values = modified_scores(scores, allowed, normalizer.function)
        return torch.where(allowed, values, 0)
    kept = torch.where(allowed, scores, 0)
    largest = kept.detach().amax(-1, keepdim=True).clamp(min=0) if kept.shape[-1] else 0
    # exp(s) - 1 over exp(largest), by expm1 where the difference would have no digits
    scaled = torch.where(
        kept < 1, torch.expm1(kept.clamp(max=1)) * torch.exp(-torch.as_tensor(largest)),
        torch.exp(kept.clamp(min=1) - largest) - torch.exp(-torch.as_tensor(largest)),
    )  # fmt: skip
    scaled = torch.where(allowed, scaled, 0)
    total = scaled.abs().sum(-1, keepdim=True) + normalizer.eps * torch.exp(-torch.as_tensor(largest))
    return scaled.clamp(min=0) / total


def statistics_of(logits: Tensor) -> Statistics:
    """Statistics of logits [B, H, Sq, Skv + 1] whose last column is the sink; masked ones are -inf."""
    masked, scores = logits == -math.inf, logits[..., :-1].detach()
    nothing = masked.all(-1, keepdim=True)
    log_p = torch.log_softmax(logits.masked_fill(nothing, 0), -1).masked_fill(masked, -math.inf)
    entropy = -(log_p.exp() * log_p.masked_fill(masked, 0)).sum(-1)
    largest = _largest(scores)
    of_heads = _largest(largest.transpose(0, 1).flatten(1))
    return {"max_scores": largest, "max_logit": of_heads, "entropy": entropy}


def _largest(x: Tensor) -> Tensor:
    """The largest along the last dimension, of none -inf."""
    return torch.cat([x, x.new_full((*x.shape[:-1], 1), -math.inf)], -1).amax(-1)


def sequence_ranges(cu_seqlens: Tensor, seqused: Tensor | None = None) -> Ranges:
    """(start, stop) of each sequence in packed rows, from cumulative lengths [N+1] and used lengths [N]."""
    bounds = cu_seqlens.tolist()
    stops = bounds[1:] if seqused is None else [a + n for a, n in zip(bounds, seqused.tolist())]
    return list(zip(bounds[:-1], stops, strict=True))


def of_sequence(mod: Mod | None, n: int, position: int) -> Mod | None:
    """`mod` with b, its argument at `position`, fixed to n."""
    if mod is None:
        return None

    def fixed(*point: Tensor, **context: int) -> Any:
        b = torch.full_like(point[position], n)
        return settle(mod)(*point[:position], b, *point[position + 1 :], **context)

    fixed.context = accepted_context(settle(mod))  # type: ignore[attr-defined]
    return fixed


def varlen(
    qkv: tuple[Tensor, Tensor, Tensor],
    ranges: tuple[Ranges, Ranges],
    score_mod: Mod | None = None,
    mask: Mod | None = None,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    output_mod: Mod | None = None,
    dropout: Any = None,
    normalizer: Normalizer | None = None,
    statistics: Statistics | None = None,
) -> tuple[Tensor, Tensor]:
    """A ragged batch, one sequence after the other: out [Tq, H, Dv] and lse [H, Tq] in float64.

    `qkv` is packed: q [Tq, H, D], k [Tk, Hk, D], v [Tk, Hv, Dv]. `ranges` holds the rows of each sequence
    in q and in k (`sequence_ranges`). In a mod, b is the sequence, indices and lengths are its own.
    Rows of q in no sequence have out 0, lse -inf and entropy 0. `statistics`: see `attention`.
    """
    q, k, v = qkv
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[0], q.shape[1]), -math.inf, dtype=torch.float64)
    largest, entropy = lse.clone(), torch.zeros_like(lse)
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(*ranges, strict=True)):
        one = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        mods = of_sequence(score_mod, n, 1), of_sequence(mask, n, 0)
        after = of_sequence(output_mod, n, 1)
        more: Statistics | None = None if statistics is None else {}
        rest: dict[str, Any] = {"scale": scale, "sinks": sinks, "output_mod": after, "statistics": more}
        rest |= {"normalizer": normalizer_of_sequence(normalizer, n), "dropout": dropout, "first": n}
        o, s = attention(one[0], one[1], one[2], *mods, **rest)
        out = _placed(out, q0, q1, o[0].transpose(0, 1))
        lse = _placed(lse, q0, q1, s[0].transpose(0, 1))
        if more is not None:
            largest = _placed(largest, q0, q1, more["max_scores"][0].transpose(0, 1))
            entropy = _placed(entropy, q0, q1, more["entropy"][0].transpose(0, 1))
    if statistics is not None:
        of_heads = _largest(largest.transpose(0, 1))
        rows = {"max_scores": largest.transpose(0, 1), "entropy": entropy.transpose(0, 1)}
        statistics |= {**rows, "max_logit": of_heads}
    return out, lse.transpose(0, 1)


def _placed(whole: Tensor, start: int, stop: int, part: Tensor) -> Tensor:
    """`whole` with these rows replaced."""
    return torch.cat([whole[:start], part, whole[stop:]])


def normalizer_of_sequence(normalizer: Normalizer | None, n: int) -> Normalizer | None:
    """The normaliser with b, of the function that it may have, fixed to n."""
    if normalizer is None or normalizer.function is None:
        return normalizer
    function = of_sequence(normalizer.function, n, 1)
    assert function is not None
    return Normalizer.elementwise(function)


def unpage(pages: Tensor, page_table: Tensor, lengths: Tensor) -> tuple[Tensor, Ranges]:
    """Pages [P, page, Hkv, D] gathered into packed rows [T, Hkv, D], and the rows of each sequence.

    page_table [N, most pages] names the pages of each sequence in order; lengths [N] counts its keys. What
    `paged` attention over the pool means is `varlen` over these rows.
    """
    page = pages.shape[1]
    used = [(t[: -(-n // page)], n) for t, n in zip(page_table.tolist(), lengths.tolist())]
    rows = torch.cat([pages[:0].flatten(0, 1), *(pages[table].flatten(0, 1)[:n] for table, n in used)])
    return rows, sequence_ranges(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
