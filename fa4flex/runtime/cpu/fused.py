"""Large calls without a score mod, of which nothing but out and lse is wanted, by PyTorch's fused kernel.

The kernel knows a float mask that is added to the scores, and the causal mask of a square. It is handed the
whole call where every key counts or the mask is causal, else a block of queries with the keys of tiles that
are not empty, with a mask unless all of these are full; for small blocks of a map, keys that were gathered
(`gathered.py`). The choice follows from shapes, dtypes and the mask alone, so that equal calls have equal
bits, the first one and all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.analyze.shifts import follows_diagonals
from fa4flex.codegen.evaluate import Value, evaluate
from fa4flex.codegen.expr import TRUE, Expr
from fa4flex.errors import InputError
from fa4flex.runtime.cpu.few import DTYPES
from fa4flex.runtime.cpu.gathered import attend as attend_gathered
from fa4flex.runtime.cpu.scattered import scattered
from fa4flex.runtime.cpu.softmax import INFINITY, beside_sinks, finite
from fa4flex.runtime.cpu.tiles import KEY_TILE, QUERY_TILE, SCORES, Block, Heads, Inputs, Span, Walk, spans
from fa4flex.runtime.layouts import empty_output
from fa4flex.torch_internals import fused_kernel

LEAST_PRODUCTS = 1 << 25
"""Multiplications of all pairs from which a call is large: about a millisecond of one core."""

Results = tuple[Tensor, Tensor]
"""out [B, H, Sq, Dv] and lse [B, H, Sq]."""


def takes(facts: Facts, q: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype) -> bool:
    """True for programs and shapes of q and v that the kernel is for."""
    batch, heads, q_len, width = q
    kv_len, out_width = v[2:]
    products = batch * heads * q_len * kv_len * (width + out_width)
    plain = fused_kernel is not None and facts.score is SCORE and facts.kept is None and dtype in DTYPES
    return plain and width == out_width and products >= LEAST_PRODUCTS


def attend(facts: Facts, inputs: Inputs) -> Results | None:
    """Results of a call whose integers fit in 64 bits; None for what the kernel is not for.

    None also where scores or results are no numbers: what NaN and infinities reach depends on tiles.
    """
    fits = inputs.tile is None and inputs.precision is torch.float32 and not inputs.skip
    if not (fits and takes(facts, inputs.q.shape, inputs.v.shape, inputs.q.dtype)):
        return None
    out = empty_output(inputs.q, inputs.v.shape[3], inputs.output or inputs.q.dtype)
    lse = torch.empty(inputs.q.shape[:3])
    wide = replace(inputs, q=_wide(inputs.q), k=_wide(inputs.k), v=_wide(inputs.v))
    _attend(facts, wide, (out, lse))
    return None if _strange(wide, out, lse) else (out, lse)


def _wide(x: Tensor) -> Tensor:
    """float32, with channels that lie together."""
    x = x.float()
    return x if x.stride(3) == 1 else x.contiguous()


def _strange(inputs: Inputs, out: Tensor, lse: Tensor) -> bool:
    """True if some result is NaN, or a lse of 0 may be that of a row whose scores are all -inf."""
    if bool(out.sum(dtype=torch.float32).isnan()):
        return True
    return bool((lse == 0).any()) and not bool((inputs.q.sum() + inputs.k.sum()).isfinite())


def _attend(facts: Facts, inputs: Inputs, results: Results) -> None:
    """Write the results of a large call."""
    whole = facts.mask is TRUE
    if whole or _is_causal(facts, inputs):
        for part in _parts(inputs, results, 1, 1):
            part.write(slice(None), part.run(part.q, part.k, part.v, None, not whole))
        return
    call = scattered(facts, inputs)
    if call is not None and attend_gathered(call, *results):
        return
    walk = Walk(facts, replace(inputs, tile=(QUERY_TILE, KEY_TILE)))
    maps = walk.tiles.map_batch, walk.tiles.map_heads
    masks = _Masks(facts.mask)
    parts = list(_parts(inputs, results, *maps))
    for row in range(walk.tiles.rows):
        for part in parts:
            part.attend(_block(walk, part.heads, row), masks)


def _is_causal(facts: Facts, inputs: Inputs) -> bool:
    """True if query i sees keys 0 .. i of as many, as far as numbers and lengths tell."""
    keys, q_len = facts.keys, inputs.q.shape[2]
    if q_len != inputs.k.shape[2] or keys is None or len(keys.spans) != 1:
        return False
    if keys.sorted_operands or keys.nonnegative or facts.mask.free & {"b", "h"}:
        return False
    rows = torch.arange(q_len)
    symbols: dict[str, Value] = {"q": rows, "q_len": q_len, "kv_len": q_len, "num_heads": inputs.q.shape[1]}
    try:
        first, stop = (torch.as_tensor(x) for x in evaluate(keys.spans[0], symbols, inputs.captured))
    except InputError:
        return False
    return bool((first <= 0).all()) and bool((stop.clamp(max=q_len) == rows + 1).all())


@dataclass(frozen=True)
class _Part:
    """Heads and sequences that one call of the kernel takes together, all [sequences, heads, length, ...]."""

    inputs: Inputs
    heads: Heads
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def attend(self, block: Block, masks: _Masks) -> None:
        """Write the results of a block of queries."""
        rows = block.rows
        results: Results | None = None
        for piece in _pieces(block.spans, SCORES // (rows.stop - rows.start)):
            mask, dead = masks.of(block, piece)
            k, v = (_of_spans(x, piece) for x in (self.k, self.v))
            out, lse = self.run(self.q[:, :, rows], k, v, mask, False)
            if dead is not None:  # the kernel gives 0
                lse.masked_fill_(dead, -INFINITY)
            results = (out, lse) if results is None else _merged(results, (out, lse))
        if results is None:
            shape = self.lse[:, :, rows].shape
            results = self.q.new_zeros(*shape, self.out.shape[3]), self.q.new_full(shape, -INFINITY)
        self.write(rows, results)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Results:
        assert fused_kernel is not None
        return fused_kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=self.inputs.scale)

    def write(self, rows: slice, results: Results) -> None:
        """Store results of some rows, with sinks."""
        out, lse = results
        if self.inputs.sinks is not None:
            sinks = self.inputs.sinks.float()[self.heads.start : self.heads.stop]
            out, lse = beside_sinks(out, lse, sinks.view(-1, lse.shape[1], 1))
        self.out[:, :, rows] = out
        self.lse[:, :, rows] = lse


def _parts(inputs: Inputs, results: Results, maps_of_batch: int, maps_of_heads: int) -> Iterator[_Part]:
    """Parts that have one mask each: query heads that share keys are `ratio` heads of a sequence."""
    out, lse = results
    q, k, v, ratio = inputs.q, inputs.k, inputs.v, inputs.ratio
    batch, heads = q.shape[:2]
    if maps_of_heads > 1:
        for b in range(batch):
            for h in range(heads):
                of_keys = h // ratio
                own = (x[b : b + 1, h : h + 1] for x in (out, lse))
                keys = (x[b : b + 1, of_keys : of_keys + 1] for x in (k, v))
                yield _Part(inputs, Heads(b, h, h + 1, 1, of_keys), q[b : b + 1, h : h + 1], *keys, *own)
    elif ratio == 1 and maps_of_batch == 1:
        yield _Part(inputs, Heads(0, 0, heads, 1, 0), q, k, v, out, lse)
    else:
        groups = heads // ratio
        for b in range(batch):
            rows = (x[b].unflatten(0, (groups, ratio)) for x in (out, lse))
            keys = (x[b].unsqueeze(1).expand(-1, ratio, -1, -1) for x in (k, v))
            part = q[b].unflatten(0, (groups, ratio))
            yield _Part(inputs, Heads(b, 0, heads, ratio, 0), part, *keys, *rows)


def _block(walk: Walk, heads: Heads, row: int) -> Block:
    """Row `row` of the map, as a block of queries."""
    q_len, kv_len = walk.inputs.q.shape[2], walk.inputs.k.shape[2]
    rows = slice(row * walk.rows, min((row + 1) * walk.rows, q_len))
    runs = walk.tiles.runs(heads.batch, heads.start, row)
    return Block(walk, heads, rows, spans(runs, walk.keys, kv_len, SCORES // walk.rows), {})


def _pieces(given: list[Span], most: int) -> Iterator[list[Span]]:
    """Spans of at most `most` keys together, in order."""
    piece: list[Span] = []
    for span in given:
        if piece and sum(x.stop - x.start for x in piece) + span.stop - span.start > most:
            yield piece
            piece = []
        piece.append(span)
    if piece:
        yield piece


Added = tuple[Tensor | None, Tensor | None]
"""Mask added to the scores of a block [queries, keys], None where that is 0, and True for each query without
keys, None where all have some."""


class _Masks:
    """Masks of the blocks of one call. The last one is kept: heads and sequences share it, and the next block
    of a mask that looks alike along diagonals."""

    def __init__(self, mask: Expr) -> None:
        self._free = mask.free
        self._alike = follows_diagonals(mask)
        self._last: tuple[Hashable, Added] | None = None

    def of(self, block: Block, piece: list[Span]) -> Added:
        if not any(span.partial for span in piece):
            return None, None
        key = self._place(block, piece)
        if self._last is None or self._last[0] != key:
            self._last = key, _added(block, piece)
        return self._last[1]

    def _place(self, block: Block, piece: list[Span]) -> Hashable:
        """All that the mask of a block depends on within a call."""
        rows, heads = block.rows, block.heads
        origin = rows.start if self._alike else 0
        ends = [tuple(y - origin for y in (x.start, x.stop, *sum(x.partial, ()))) for x in piece]
        of_batch, of_heads = heads.batch if "b" in self._free else 0, heads.start if "h" in self._free else 0
        return rows.start - origin, rows.stop - rows.start, of_batch, of_heads, tuple(ends)


def _added(block: Block, piece: list[Span]) -> Added:
    masks = []
    for span in piece:
        mask = torch.zeros(block.rows.stop - block.rows.start, span.stop - span.start)
        block.hide(mask, span, -INFINITY)
        masks.append(mask)
    mask = masks[0] if len(masks) == 1 else torch.cat(masks, 1)
    dead = mask.amax(1) == -INFINITY
    return mask, dead if bool(dead.any()) else None


def _of_spans(x: Tensor, piece: list[Span]) -> Tensor:
    """Keys of some spans, side by side."""
    parts = [x[:, :, span.keys] for span in piece]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _merged(first: Results, second: Results) -> Results:
    """Results over the keys of both."""
    lse = torch.logaddexp(first[1], second[1])
    shift = finite(lse)
    shares = [(own - shift).exp_().unsqueeze(-1) for _, own in (first, second)]
    return first[0] * shares[0] + second[0] * shares[1], lse
