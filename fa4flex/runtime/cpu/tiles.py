"""Common part of forward and backward: the inputs, the walk over non-empty tiles, and the mods on a tile.

A tile is a block of scores [groups, ratio, rows, keys]: `groups` key-value heads of one batch entry, the
`ratio` query heads that share each of them, a range of query rows, a range of keys. Index tensors of a
tile broadcast against that shape. Grouping the query heads next to the keys they share is what spares
grouped-query attention a copy of k and v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts, analyze
from fa4flex.codegen.analyze.overflow import fitted
from fa4flex.codegen.analyze.tiles import Shape, TileMap, tile_map
from fa4flex.codegen.evaluate import Captured, DividedByZero, PastTheEnd, Value, evaluate
from fa4flex.codegen.expr import Expr
from fa4flex.primitives.dropout import ONE
from fa4flex.primitives.schedule import Contents

QUERY_TILE, KEY_TILE = 128, 128
SCORES = 2048 * 1024
"""Scores held at once (elements): 8 MB in fp32 stay in the last-level cache from matmul to exp to matmul."""


@dataclass(frozen=True)
class Inputs:
    """Operands of one attention call, any strides.

    q [B, H, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv] with H a multiple of Hkv; sinks [H]. `scale`
    multiplies q.k before the score mod. `sequence` fixes the index `b` when the call is one sequence of
    a ragged batch. `compute` is the dtype of scores and sums, None for `precision`'s default; `output`
    that of the result, None for q's; `tile` (queries, keys) of the walk, None for one that suits the caches;
    `contents` as a schedule has it; `skip` is the probability that a query may leave out; `entropy`: whether
    it is wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captured: Captured = Captured()
    scale: float = 1.0
    sinks: Tensor | None = None
    sequence: int | None = None
    compute: torch.dtype | None = None
    output: torch.dtype | None = None
    tile: tuple[int, int] | None = None
    contents: Contents = "compared"
    skip: float = 0.0
    entropy: bool = False

    @property
    def shape(self) -> Shape:
        batch, heads, q_len, _ = self.q.shape
        return Shape(batch, heads, q_len, self.k.shape[2], self.sequence)

    @property
    def precision(self) -> torch.dtype:
        """The dtype of scores, softmax and sums: by default float64 for float64 inputs, else float32."""
        if self.compute is not None:
            return self.compute
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def ratio(self) -> int:
        """Query heads per key-value head."""
        return self.q.shape[1] // max(self.k.shape[1], 1)


@dataclass(frozen=True)
class Heads:
    """Query heads `start`..`stop` of batch entry `batch`, `ratio` of them to a key-value head."""

    batch: int
    start: int
    stop: int
    ratio: int
    kv_start: int

    @property
    def groups(self) -> int:
        return (self.stop - self.start) // self.ratio

    def queries(self, x: Tensor, rows: slice) -> Tensor:
        """Rows of a [B, H, Sq, ...] tensor as [groups, ratio, rows, ...]."""
        return x[self.batch, self.start : self.stop, rows].unflatten(0, (self.groups, self.ratio))

    def keys(self, x: Tensor, keys: slice) -> Tensor:
        """Rows of a [B, Hkv, Skv, ...] tensor as [groups, keys, ...]."""
        return x[self.batch, self.kv_start : self.kv_start + self.groups, keys]

    def indices(self) -> Value:
        """The query head indices, shaped to broadcast over a tile."""
        if self.stop - self.start == 1:
            return self.start
        return torch.arange(self.start, self.stop).view(self.groups, self.ratio, 1, 1)


@dataclass(frozen=True)
class Span:
    """Keys `start`..`stop`, none of whose tiles is empty; the mask is needed only within `partial`."""

    start: int
    stop: int
    partial: tuple[tuple[int, int], ...]

    @property
    def keys(self) -> slice:
        return slice(self.start, self.stop)


def fitted_call(facts: Facts, inputs: Inputs, shape: Shape | None = None) -> tuple[Facts, Inputs]:
    """The same call with all integers of its mods in int64, whose extents are `shape`'s or the inputs'.

    Raises UnsupportedError where they may not fit, InputError where one is divided by a number that is 0.
    """
    if facts.plain:
        return facts, inputs
    captured = inputs.captured.signed()
    if captured is not inputs.captured:
        inputs = replace(inputs, captured=captured)
    score, mask = fitted((facts.score, facts.mask), inputs.shape if shape is None else shape, captured)
    same = score is facts.score and mask is facts.mask
    return facts if same else analyze(score, mask, facts.kept, facts.weights), inputs


def spans(runs: Sequence[tuple[int, int, bool]], tile: int, kv_len: int, limit: int) -> list[Span]:
    """Runs of tiles joined where they touch, then cut into pieces of at most `limit` keys."""
    pieces: list[Span] = []
    for first, last, full in runs:
        start, stop = first * tile, min(last * tile, kv_len)
        while start < stop:
            joined = bool(pieces) and pieces[-1].stop == start and start - pieces[-1].start < limit
            origin = pieces[-1].start if joined else start
            cut = min(stop, origin + limit)
            partial = (pieces.pop().partial if joined else ()) + (() if full else ((start, cut),))
            pieces.append(Span(origin, cut, partial))
            start = cut
    return pieces


def _head_groups(inputs: Inputs, tiles: TileMap, rows: int) -> Iterator[tuple[int, int, list[Heads]]]:
    """(batch, head whose tiles stand for all, the blocks of heads to compute together)."""
    batch, heads = inputs.q.shape[:2]
    ratio = inputs.ratio
    together = max(1, SCORES // max(1, ratio * rows * min(inputs.k.shape[2], 4 * KEY_TILE)))
    for b in range(batch):
        if tiles.map_heads == 1:
            step = together * ratio
            blocks = [(h, min(h + step, heads)) for h in range(0, heads, step)]
            yield b, 0, [Heads(b, h, stop, ratio, h // ratio) for h, stop in blocks]
        else:
            for h in range(heads):
                yield b, h, [Heads(b, h, h + 1, 1, h // ratio)]


@dataclass
class Block:
    """Query rows of some heads, with the spans of keys they attend to and the program to run on them."""

    walk: Walk
    heads: Heads
    rows: slice
    spans: list[Span]
    masks: dict[tuple[int, int], Value] = field(repr=False)

    def symbols(self, keys: slice) -> dict[str, Value]:
        inputs = self.walk.inputs
        return {
            "b": self.heads.batch if inputs.sequence is None else inputs.sequence,
            "h": self.heads.indices(),
            "q": torch.arange(self.rows.start, self.rows.stop).view(-1, 1),
            "kv": torch.arange(keys.start, keys.stop),
            "q_len": inputs.q.shape[2],
            "kv_len": inputs.k.shape[2],
            "num_heads": inputs.q.shape[1],
        }

    def evaluate(
        self, roots: Sequence[Expr], span: Span, extra: Mapping[str, Value] = MappingProxyType({})
    ) -> list[Value]:
        """Expressions on the tile of this block's rows and the keys of `span`, with `extra` symbols.

        A mod may read past a captured tensor, or divide by 0, for pairs that the mask hides (a bias table as
        long as the window). Where that happens the expressions are evaluated at the allowed pairs alone.
        Raises InputError when it happens for an allowed pair.
        """
        inputs = self.walk.inputs
        symbols = {**self.symbols(span.keys), **extra}
        try:
            return evaluate(roots, symbols, inputs.captured, inputs.precision)
        except (PastTheEnd, DividedByZero):
            return self._evaluate_allowed(roots, span, symbols)

    def _evaluate_allowed(self, roots: Sequence[Expr], span: Span, symbols: dict[str, Value]) -> list[Value]:
        heads, inputs = self.heads, self.walk.inputs
        shape = heads.groups, heads.ratio, self.rows.stop - self.rows.start, span.stop - span.start
        allowed = torch.ones(shape, dtype=torch.bool)
        self.hide(allowed, span, False)
        flat = {
            name: value.expand(shape)[allowed] if isinstance(value, Tensor) else value
            for name, value in symbols.items()
        }
        values = evaluate(roots, flat, inputs.captured, inputs.precision)
        return [
            v if not isinstance(v, Tensor) or v.ndim == 0 else v.new_zeros(shape).masked_scatter_(allowed, v)
            for v in values
        ]

    def hide(self, x: Tensor, span: Span, value: float | bool) -> None:
        """Write `value` over the masked entries of a tile [groups, ratio, rows, keys of span]."""
        for start, stop in span.partial:
            allowed = self._allowed(start, stop)
            part = x[..., start - span.start : stop - span.start]
            if isinstance(allowed, Tensor):
                part.masked_fill_(~allowed, value)
            elif not allowed:
                part.fill_(value)

    def keep(self, x: Tensor, span: Span) -> Tensor:
        """Dropout's factor in place of a tile of weights, or of gradients of dropped ones: x / (1 - rate) for
        pairs that are kept, else 0."""
        kept = self.walk.facts.kept
        if kept is not None:
            (there,) = self.evaluate([kept], span)
            x.mul_(self.walk.remaining).mul_(there)
        return x

    def exponentials(self, x: Tensor, span: Span) -> Tensor:
        """exp in place of a tile of shifted scores, with care where results may underflow.

        Masked scores are -inf, and a score mod may send any score far down (ALiBi does). Scaled products of
        queries and keys do not spread that far; where they do, exp is slow but right.
        """
        if not self.walk.plain:
            return exponential(x)
        start = 0
        for first, last in (*((a - span.start, b - span.start) for a, b in span.partial), (x.shape[-1],) * 2):
            x[..., start:first].exp_()
            exponential(x[..., first:last])
            start = last
        return x

    def _allowed(self, start: int, stop: int) -> Value:
        # Heads that share their tiles share the mask: it is computed for the first and kept for the rest.
        if (start, stop) not in self.masks:
            inputs, symbols = self.walk.inputs, self.symbols(slice(start, stop)) | {"h": self.heads.start}
            (self.masks[start, stop],) = evaluate(
                [self.walk.facts.mask], symbols, inputs.captured, inputs.precision
            )
        return self.masks[start, stop]


class Walk:
    """The non-empty tiles of one attention call, in an order that never changes."""

    def __init__(self, facts: Facts, inputs: Inputs, rows: int = QUERY_TILE) -> None:
        self.facts, self.inputs = facts, inputs
        # Query heads that share keys stand in one tile: it keeps its size when each gives fewer rows.
        fitting = max(16, min(rows, _power_of_two(rows // max(inputs.ratio, 1)))), KEY_TILE
        if inputs.tile is not None:  # a larger tile than the lengths is one of their size
            q_len, kv_len = inputs.q.shape[2], inputs.k.shape[2]
            fitting = max(1, min(inputs.tile[0], q_len)), max(1, min(inputs.tile[1], kv_len))
        self.rows, self.keys = tile = fitting
        with torch.device("cpu"):  # masks are analysed on the host, whatever torch's default device is
            self.tiles = tile_map(
                facts.mask, facts.keys, inputs.shape, inputs.captured, tile, inputs.precision, inputs.contents
            )
        self.plain = facts.score is SCORE
        self.remaining = remaining(facts, inputs)

    def __iter__(self) -> Iterator[Block]:
        q_len, kv_len = self.inputs.q.shape[2], self.inputs.k.shape[2]
        rows = min(self.rows, q_len)
        for b, h, groups in _head_groups(self.inputs, self.tiles, rows):
            for row in range(-(-q_len // self.rows)):
                runs = self.tiles.runs(b, h, row)
                block_rows = slice(row * self.rows, min((row + 1) * self.rows, q_len))
                masks: dict[tuple[int, int], Value] = {}
                # Tiles are left out one by one.
                limit = self.keys if self.inputs.skip else _key_limit(groups, block_rows)
                result = spans(runs, self.keys, kv_len, limit)
                for heads in groups:
                    yield Block(self, heads, block_rows, result, masks)


def remaining(facts: Facts, inputs: Inputs) -> float:
    """Factor of weights that dropout keeps: 1 / (1 - rate), 0 where it keeps none."""
    if facts.kept is None:
        return 1.0
    left = ONE - int(inputs.captured.scalars[facts.kept.args[1].value])
    return ONE / left if left > 0 else 0.0


def _power_of_two(x: int) -> int:
    """The largest power of two that is at most x, and at least 1."""
    return 1 << max(0, x.bit_length() - 1)


def _key_limit(groups: list[Heads], rows: slice) -> int:
    """Keys per span such that the scores of the largest group stay within SCORES."""
    height = max((g.stop - g.start) * (rows.stop - rows.start) for g in groups) if groups else 1
    return max(KEY_TILE, SCORES // height // KEY_TILE * KEY_TILE)


def exponential(x: Tensor) -> Tensor:
    """exp(x) in place, exactly 0 where it would be below about 1.7e-38 (fp64: 3.4e-308). NaN stays NaN.

    torch's vectorised exp is 20 to 150 times slower where its result underflows, -inf included, and a matrix
    product of subnormal numbers likewise; clamping first and cutting afterwards costs two cheap passes.
    """
    lowest, cut = (-708.0, 3.4e-308) if x.dtype == torch.float64 else (-87.0, 1.7e-38)
    return torch.threshold_(x.clamp_(min=lowest).exp_(), cut, 0.0)


class Workspace:
    """Named scratch buffers, grown to the largest tile seen and reused for every tile."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor of `shape`; valid until the same name is taken again."""
        size = 1
        for extent in shape:
            size *= extent
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype)
        return buffer[:size].view(shape)

    @property
    def elements(self) -> int:
        """Size of all buffers together."""
        return sum(buffer.numel() for buffer in self._buffers.values())


def matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
    """out (+)= a @ b for [n, M, K] @ [n, K, N]; one group takes the plain matrix product, which is faster."""
    beta = 1 if accumulate else 0
    if a.shape[0] == 1:
        torch.addmm(out[0], a[0], b[0], beta=beta, out=out[0])
    else:
        torch.baddbmm(out, a, b, beta=beta, out=out)
    return out


def scaled_queries(block: Block, space: Workspace) -> Tensor:
    """scale * q of a block at compute precision, [groups, ratio * rows, D]."""
    inputs, heads = block.walk.inputs, block.heads
    q = heads.queries(inputs.q, block.rows)
    scaled = space.take("queries", *q.shape).copy_(q).mul_(inputs.scale)
    return scaled.flatten(1, 2)


def raw_scores(block: Block, span: Span, queries: Tensor, space: Workspace) -> Tensor:
    """scale * q.k of a tile, [groups, ratio, rows, keys]."""
    inputs, heads = block.walk.inputs, block.heads
    keys = heads.keys(inputs.k, span.keys).to(inputs.precision)
    scores = space.take("scores", heads.groups, queries.shape[1], span.stop - span.start)
    matmul(queries, keys.transpose(1, 2), scores)
    return scores.unflatten(1, (heads.ratio, -1))
