"""A few queries at once, as in decoding: all pairs in one tile, without a map of tiles.

Where the scores are few, proving which of them are masked takes longer than computing them. The batch is a
dimension of the tile, [B, KV heads, query heads per KV head, queries, keys].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.evaluate import Captured, Number, Value, evaluate
from fa4flex.codegen.expr import TRUE, Expr
from fa4flex.errors import InputError
from fa4flex.exact import exactly
from fa4flex.runtime.cpu.softmax import INFINITY, Forward
from fa4flex.runtime.cpu.tiles import Inputs, exponential
from fa4flex.runtime.layouts import empty_output
from fa4flex.torch_internals import fused_kernel

FEW_QUERIES = 4
FEW_PRODUCTS = 1 << 23
"""Multiplications that take about as long as a map of tiles does."""

WIDENED = 1 << 19
"""Elements of half-precision keys that each thread widens at once: 2 MB."""

DTYPES = torch.float32, torch.bfloat16, torch.float16
"""Dtypes of q, k and v whose scores are float32, unless a variant asks for more."""
LIMITS = {
    dtype: (torch.finfo(dtype).min, torch.finfo(dtype).tiny) for dtype in (torch.float32, torch.float64)
}
"""The lowest and the smallest positive number of each dtype of scores."""


def few_queries(facts: Facts, inputs: Inputs) -> Forward | None:
    """Results, or None where the pairs are not few.

    None also where a mod cannot be evaluated at some pair: the mask may hide it, and tiles know that.
    """
    if facts.kept is not None or not _are_few(inputs):
        return None
    q, k, v = (
        x if x.dtype == inputs.precision else x.to(inputs.precision) for x in (inputs.q, inputs.k, inputs.v)
    )
    batch, heads, q_len, width = q.shape
    tiles, rows, kv_len = batch * k.shape[1], inputs.ratio * q_len, k.shape[2]
    keys = k.reshape(tiles, kv_len, width)
    scores = torch.baddbmm(
        q.new_empty(()), q.reshape(tiles, rows, width), keys.mT, beta=0, alpha=inputs.scale
    )
    try:
        if not facts.plain:
            _modify(facts, inputs, scores.view(batch, k.shape[1], inputs.ratio, q_len, kv_len))
    except InputError:
        return None
    maximum = scores.amax(-1, keepdim=True)
    sinks = None if inputs.sinks is None else _sinks(inputs)
    # Subtracting the lowest number from -inf leaves -inf, where -inf would make it NaN.
    lowest, tiny = LIMITS[q.dtype]
    shift = (maximum if sinks is None else torch.maximum(maximum, sinks)).clamp(min=lowest)
    weights = scores.sub_(shift).exp_() if facts.plain else exponential(scores.sub_(shift))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total.add_((sinks - shift).exp_())
    # A row that attends to nothing has output 0 and total 0. Any other total is about 1 or more.
    out = torch.bmm(weights, v.reshape(tiles, kv_len, -1)).div_(total.clamp(min=tiny))
    lse = total.log().add_(shift)
    shape = batch, heads, q_len
    result = empty_output(inputs.q, v.shape[3], inputs.output or inputs.q.dtype)
    result.copy_(out.view(*shape, -1))
    return Forward(result, lse.view(shape), maximum.view(shape), total.view(shape))


def fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for single queries on a CPU, q [B, Hq, 1, D] and k, v [B, Hkv, Skv, D], as checks would have
    them."""
    if not (q.ndim == k.ndim == v.ndim == 4 and q.device.type == k.device.type == v.device.type == "cpu"):
        return False
    batch, heads, q_len, width = q.shape
    shape = k.shape
    k_batch, kv_heads, _, k_width = shape
    same = q_len == 1 and shape == v.shape and batch == k_batch and width == k_width > 0
    return same and kv_heads > 0 and heads % kv_heads == 0 and q.dtype is k.dtype is v.dtype in DTYPES


def single_queries(facts: Facts, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of sequences' single queries without a score mod and sinks, over keys that lie together, by
    PyTorch's own kernel; None for anything else. The backward pass needs more than that: `few_queries` gives
    it."""
    if fused_kernel is None or inputs.precision is not torch.float32:
        return None
    if facts.score is not SCORE or facts.kept is not None or inputs.sinks is not None:
        return None
    q, k, v = arguments = inputs.q, inputs.k, inputs.v
    if q.shape[2] != 1 or not _are_few(inputs):
        return None
    kv_len = k.shape[2]
    seen = _seen_by_one(facts, inputs)
    if seen is None:
        return None
    if seen != (0, kv_len):
        k, v = (x[:, :, seen[0] : seen[1]] for x in (k, v))
    if q.shape[3] != v.shape[3] or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    if q.dtype is torch.float32:
        out, lse = fused_kernel(q, k, v, 0.0, False, scale=inputs.scale)
    else:
        out, lse = _widened(q, k, v, inputs.scale)
    if arguments[0].stride(0) < arguments[0].stride(1) and q.shape[0] > 1:
        out = empty_output(arguments[0], v.shape[3], out.dtype).copy_(out)
    kind = inputs.output or arguments[0].dtype
    return out if out.dtype is kind else out.to(kind), lse


def _widened(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The kernel's (out, lse) of half-precision tensors in float32. Of many keys, a few heads' are widened at
    once: to read them from a cache takes less time than to have as much new memory as all need."""
    assert fused_kernel is not None
    batch, heads, kv_len, width = k.shape
    if k.numel() <= WIDENED * torch.get_num_threads():
        return fused_kernel(q.float(), k.float(), v.float(), 0.0, False, scale=scale)
    ratio, threads = q.shape[1] // heads, torch.get_num_threads()
    together = min(heads, max(threads, WIDENED * threads // (kv_len * width)))
    wide = torch.empty(2, 1, together, kv_len, width)
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:3])
    for b in range(batch):
        for h in range(0, heads, together):
            keys, rows = slice(h, h + together), slice(h * ratio, (h + together) * ratio)
            own = wide[:, :, : min(together, heads - h)]
            of_k, of_v = (to.copy_(x[b : b + 1, keys]) for to, x in zip(own, (k, v), strict=True))
            parts = fused_kernel(q[b : b + 1, rows].float(), of_k, of_v, 0.0, False, scale=scale)
            out[b : b + 1, rows], lse[b : b + 1, rows] = parts
    return out, lse


def _seen_by_one(facts: Facts, inputs: Inputs) -> tuple[int, int] | None:
    """(first, past the last) of the keys that the single query of every sequence and head sees, if these lie
    together and there are some; None where that does not follow from lengths and captured numbers."""
    kv_len = inputs.k.shape[2]
    if facts.mask is TRUE:
        return 0, kv_len
    keys = facts.keys
    if keys is None or len(keys.spans) != 1 or keys.sorted_operands or keys.nonnegative:
        return None
    if facts.mask.free & {"b", "h"}:
        return None
    place = keys.spans[0], kv_len, inputs.q.shape[1]
    if inputs.captured.operands:
        lo, hi = _span_of_one(*place, inputs.captured)
    else:
        numbers = inputs.captured.scalars
        lo, hi = _span_of_numbers(*place, numbers, exactly(*numbers))
    if isinstance(lo, Tensor) or isinstance(hi, Tensor):
        return None
    first, last = max(int(lo), 0), min(int(hi), kv_len)
    return (first, last) if first < last else None


def _span_of_one(span: Sequence[Expr], kv_len: int, heads: int, captured: Captured) -> list[Value]:
    symbols = {"q": 0, "q_len": 1, "kv_len": kv_len, "num_heads": heads}
    return evaluate(span, symbols, captured)


@lru_cache(maxsize=256)
def _span_of_numbers(
    span: Sequence[Expr], kv_len: int, heads: int, scalars: tuple[Number, ...], exact: str
) -> list[Value]:
    """The same without captured tensors: it follows from the key, and a model's layers ask alike. `exact`
    tells numbers apart that compare equal."""
    return _span_of_one(span, kv_len, heads, Captured((), scalars))


def _are_few(inputs: Inputs) -> bool:
    batch, heads, q_len, width = inputs.q.shape
    kv_len, out_width = inputs.v.shape[2:]
    walked = inputs.tile is not None or inputs.skip
    if walked or not 0 < q_len <= FEW_QUERIES or inputs.k.numel() == 0 or out_width == 0:
        return False
    if inputs.entropy:
        return False
    return batch * heads > 0 and batch * heads * q_len * kv_len * (width + out_width) <= FEW_PRODUCTS


def _modify(facts: Facts, inputs: Inputs, scores: Tensor) -> None:
    """The score mod in place, then -inf where the mask hides scores."""
    symbols = _symbols(inputs, facts.score.free | facts.mask.free)
    if facts.score is not SCORE:
        (value,) = evaluate([facts.score], {**symbols, "score": scores}, inputs.captured, inputs.precision)
        scores.copy_(value) if isinstance(value, Tensor) else scores.fill_(value)
    if facts.mask is not TRUE:
        (allowed,) = evaluate([facts.mask], symbols, inputs.captured, inputs.precision)
        if isinstance(allowed, Tensor):
            scores.masked_fill_(~allowed, -INFINITY)
        elif not allowed:
            scores.fill_(-INFINITY)


def _sinks(inputs: Inputs) -> Tensor:
    """A logit for each row of the tiles: [B * KV heads, query heads per KV head * queries, 1]."""
    assert inputs.sinks is not None
    batch, heads, q_len, _ = inputs.q.shape
    sinks = inputs.sinks.to(inputs.precision).view(1, heads, 1).expand(batch, heads, q_len)
    return sinks.reshape(-1, inputs.ratio * q_len, 1)


def _symbols(inputs: Inputs, read: frozenset[str]) -> dict[str, Value]:
    """The indices that are read, shaped to broadcast over the tile; one alone is a number."""
    batch, heads, q_len, _ = inputs.q.shape
    made: dict[str, Value] = {"q_len": q_len, "kv_len": inputs.k.shape[2], "num_heads": heads}
    made |= {"b": 0 if inputs.sequence is None else inputs.sequence, "h": 0, "q": 0}
    if "b" in read and inputs.sequence is None and batch > 1:
        made["b"] = torch.arange(batch).view(-1, 1, 1, 1, 1)
    if "h" in read and heads > 1:
        made["h"] = torch.arange(heads).view(-1, inputs.ratio, 1, 1)
    if "q" in read and q_len > 1:
        made["q"] = torch.arange(q_len).view(-1, 1)
    if "kv" in read:
        made["kv"] = torch.arange(inputs.k.shape[2])
    return made
