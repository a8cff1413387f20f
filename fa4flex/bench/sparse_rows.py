"""Rows of the sparse suite: maps of blocks, lists of keys, selections, and a step that selects. As data, with
the problems that they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fa4flex import BlockMap, Lists
from fa4flex.bench.accuracy import MOST_ROWS, Accuracy, worst
from fa4flex.bench.suites import Draw, Target

QUERIES = 32
"""Query rows of a list's result that are judged."""
MOST_UNEVEN = 0.1
"""Most difference between sums over keys and over queries that are equal but for rounding, over the norm of
what is summed."""
MOST_NEW = 0.35
"""Most cost of a map that is new at every call: 0.02 to 0.34 were measured, most where fewest blocks are
visited."""


@dataclass(frozen=True)
class SparseRow:
    """Common fields of rows of this suite, those that reports ask of any row."""

    name: str
    targets: tuple[Target, ...] = field(default=(), kw_only=True)
    base: str = field(default="", kw_only=True)
    most_cost: float = field(default=MOST_NEW, kw_only=True)
    shrink: int = field(default=1, kw_only=True)
    backward: bool = field(default=False, kw_only=True)
    unit: ClassVar[str] = "TFLOP/s"

    def about(self) -> dict[str, Any]:
        """The row in a file of numbers."""
        aside = "name", "targets", "base", "most_cost", "shrink", "backward"
        shape = {name: x for name, x in asdict(self).items() if name not in aside}
        return {"kind": type(self).__name__, "shape": shape, "pass": ("forward", "backward")[self.backward]}

    def small(self) -> SparseRow:
        """The row at a size for a dry run on a CPU."""
        raise NotImplementedError

    def problem(self, draw: Draw) -> Problem:
        """Random tensors of the row, drawn on its device."""
        raise NotImplementedError


@dataclass(frozen=True)
class MapRow(SparseRow):
    """A random map, another for each head, of full blocks of `rows` x `keys`, of which `density` percent are
    visited in each row; batch 1, as many KV heads. `new`: another map in every call, made of its classes."""

    heads: int = 16
    length: int = 16384
    rows: int = 128
    keys: int = 128
    density: float = 25
    width: int = 128
    new: bool = False

    def small(self) -> MapRow:
        return replace(self, heads=2, length=512, width=16, shrink=16)

    def problem(self, draw: Draw) -> Problem:
        shape = 1, self.heads, self.length, self.width
        q, k, v = (draw.normal(*shape) for _ in "qkv")
        classes = self.classes(draw)
        products = 10 if self.backward else 4
        flops = products * int((classes > 0).sum()) * self.rows * self.keys * self.width
        dout = draw.normal(*shape) if self.backward else None
        return Problem(self, (q, k, v), flops, dout, blocks=self.map_of(classes))

    def classes(self, draw: Draw) -> Tensor:
        """Classes [1, heads, R, C]: full blocks in each row by the density, 1 at least."""
        device, rows, columns = draw.generator.device, self.length // self.rows, self.length // self.keys
        count = max(round(columns * self.density / 100), 1)
        random = torch.rand(1, self.heads, rows, columns, generator=draw.generator, device=device)
        listed = torch.zeros(1, self.heads, rows, columns, dtype=torch.uint8, device=device)
        return listed.scatter_(-1, random.argsort(-1)[..., :count], 2)

    def map_of(self, classes: Tensor) -> BlockMap:
        return BlockMap(classes, (self.rows, self.keys), self.length, self.length)


@dataclass(frozen=True)
class ListsRow(SparseRow):
    """Lists of `entries` units of `unit` keys, spread over the keys up to each query's own, and a window, for
    each query and KV head; causal. `alike` queries next to each other list the same; `tied`: values are the
    keys; `shuffled`: entries are in no order."""

    heads: int = 64
    kv_heads: int = 4
    batch: int = 1
    q_len: int = 65536
    kv_len: int = 65536
    entries: int = 16
    keys: int = 64
    window: int = 0
    width: int = 128
    shuffled: bool = False
    alike: int = 1
    tied: bool = False

    def small(self) -> ListsRow:
        small = replace(self, batch=min(self.batch, 2), heads=2 * self.kv_heads, width=16, shrink=16)
        entries = min(self.entries, 16 if self.keys == 1 else 4)
        window, q_len = min(self.window, 32), min(self.q_len, 64)
        return replace(small, entries=entries, window=window, q_len=q_len, kv_len=512)

    @property
    def listed(self) -> int:
        """Keys that a query attends to, where all entries fit."""
        return min(self.entries * self.keys + self.window, self.kv_len)

    def problem(self, draw: Draw) -> Problem:
        q = draw.normal(self.batch, self.heads, self.q_len, self.width)
        k = draw.normal(self.batch, self.kv_heads, self.kv_len, self.width)
        v = k if self.tied else draw.normal(*k.shape)
        products = 10 if self.backward else 4
        flops = products * self.batch * self.heads * self.q_len * self.listed * self.width
        lists = Lists(self.ids(draw), kv_len=self.kv_len, unit=self.keys, window=self.window)
        dout = draw.normal(*q.shape) if self.backward else None
        return Problem(self, (q, k, v), flops, dout, blocks=lists)

    def ids(self, draw: Draw) -> Tensor:
        """int32 [batch, KV heads, queries, entries], each at most once; -1 stands for none."""
        device = draw.generator.device
        place = torch.arange(self.q_len, device=device) + self.kv_len - self.q_len
        units = (place // self.keys + 1).view(1, 1, -1, 1)
        step = torch.arange(self.entries, device=device)
        shape = self.batch, self.kv_heads, -(-self.q_len // self.alike), self.entries
        random = torch.rand(shape, generator=draw.generator, device=device)
        random = random.repeat_interleave(self.alike, 2)[:, :, : self.q_len]
        spread = ((step + random) / self.entries * units).long().clamp(max=units - 1)
        ids = torch.where(units >= self.entries, spread, torch.where(step < units, step, -1)).int()
        ids[..., 1:].masked_fill_(ids[..., 1:] == ids[..., :-1], -1)
        if self.shuffled:
            ids = ids[..., torch.randperm(self.entries, generator=draw.generator, device=device)]
        return ids.contiguous()


@dataclass(frozen=True)
class TopkRow(SparseRow):
    """The `k` largest of `units` scores of `rows` rows; `ties`: most scores are 0, as of a ReLU."""

    rows: int = 64
    units: int = 1 << 17
    k: int = 2048
    ties: bool = False
    unit: ClassVar[str] = "TB/s"

    def small(self) -> TopkRow:
        return replace(self, rows=2, units=min(self.units, 3000), k=min(self.k, 40), shrink=16)

    def problem(self, draw: Draw) -> Problem:
        values = draw.normal(self.rows, self.units, dtype=torch.float32)
        values = torch.where(values > 2.5, values, 0.0) if self.ties else values
        return Problem(self, (values,), 4 * self.rows * self.units)


@dataclass(frozen=True)
class StepRow(SparseRow):
    """A step of training with mixture of block attention: mean keys of blocks, the best `chosen` of each
    block of queries with its own, forward and backward; causal. FLOPs are those of both passes over these."""

    heads: int = 8
    length: int = 65536
    keys: int = 512
    chosen: int = 8
    width: int = 128

    def small(self) -> StepRow:
        return replace(self, heads=2, length=512, keys=64, chosen=3, width=16, shrink=16)

    def problem(self, draw: Draw) -> Problem:
        shape = 1, self.heads, self.length, self.width
        q, k, v = (draw.normal(*shape) for _ in "qkv")
        flops = 14 * self.heads * self.length * self.chosen * self.keys * self.width
        return Problem(self, (q, k, v), flops, held=draw.normal(*shape))


@dataclass(frozen=True)
class Problem:
    """A row with its tensors.

    tensors  q, k and v; or the scores of a selection
    work     FLOPs over what is listed, or bytes that are read
    dout     gradient of the output of a backward row; held: of a step, which computes both passes
    blocks   the map or the lists
    """

    row: SparseRow
    tensors: tuple[Tensor, ...]
    work: int
    dout: Tensor | None = None
    held: Tensor | None = None
    blocks: Any = None

    @property
    def q(self) -> Tensor:
        return self.tensors[0]

    @property
    def k(self) -> Tensor:
        return self.tensors[1]

    @property
    def v(self) -> Tensor:
        return self.tensors[2]


# --- what is right ------------------------------------------------------------------------------------------


def judged(problem: Problem, result: Any, ours: bool) -> Accuracy:
    """Errors of a result, beside those of plain PyTorch in its dtype."""
    if isinstance(problem.row, TopkRow):
        return _selection(problem, problem.row, result, ours)
    if problem.dout is None:
        return _rows(problem, result)
    of_row = _listed_gradients if isinstance(problem.row, ListsRow) else _gradients
    return of_row(problem, problem.dout, result)


def _selection(problem: Problem, row: TopkRow, ids: Tensor, ours: bool) -> Accuracy:
    """Rows of the first ones whose values are not the largest, or, of ours, not those of a stable sort."""
    (values,), wrong = problem.tensors, 0
    for scores, found in zip(values[:8], ids[:8].long(), strict=True):
        wanted = scores.sort(descending=True, stable=True)
        right = torch.equal(scores[found].sort(descending=True).values, wanted.values[: row.k])
        right = right and (not ours or torch.equal(found, wanted.indices[: row.k].sort().values))
        wrong += not right
    return Accuracy(wrong, wrong, 0, 0)


def _attend(qkv: Sequence[Tensor], allowed: Tensor) -> Tensor:
    q, k, v = qkv
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v


def _rows(problem: Problem, result: Tensor) -> Accuracy:
    """Errors of some rows of two heads of an output, or of dq."""
    (q, k, v), dout = problem.tensors, problem.dout
    blocks = step_lists(problem) if problem.blocks is None else problem.blocks
    group, (batch, heads, length, _) = q.shape[1] // k.shape[1], q.shape
    at = torch.linspace(0, length - 1, QUERIES, device=q.device).long().unique()
    found: list[Tensor] = []
    exact: list[Tensor] = []
    plain: list[Tensor] = []
    for b, h in {(0, 0), (batch - 1, heads - 1)}:
        allowed = _seen(blocks, b, h, heads, at)
        one = q[b, h, at], k[b, h // group], v[b, h // group]
        upstream = None if dout is None else dout[b, h, at]
        found.append(result[b, h, at])
        for computed, dtype in ((exact, torch.float64), (plain, q.dtype)):
            computed.append(_computed([x.detach().to(dtype) for x in one], allowed, upstream))
    return Accuracy(*worst(found, exact), *worst(plain, exact))


def _computed(qkv: Sequence[Tensor], allowed: Tensor, upstream: Tensor | None) -> Tensor:
    """The output, or dq where its gradient arrives."""
    if upstream is None:
        return _attend(qkv, allowed)
    q = qkv[0].requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(_attend(qkv, allowed), q, upstream.to(q.dtype))[0]


def _listed_gradients(problem: Problem, dout: Tensor, gradients: Sequence[Tensor]) -> Accuracy:
    """Errors of some rows of dq, infinite where other gradients do not add up: dv of all keys to dout, as
    weights of a query do to 1, and dk times k to dq times q, for each KV head."""
    (q, k, _), (dq, dk, dv) = problem.tensors, gradients
    errors, group = _rows(problem, dq), q.shape[1] // k.shape[1]
    of_keys = dv.double(), (dk.double() * k.double()).sum(-1, keepdim=True)
    of_queries = dout.double(), (dq.double() * q.double()).sum(-1, keepdim=True)
    for mine, other in zip(of_keys, of_queries, strict=True):
        total = other.unflatten(1, (-1, group)).sum((2, 3))
        if ((mine.sum(2) - total).abs() > MOST_UNEVEN * mine.norm(dim=2)).any():
            return replace(errors, element=math.inf)
    return errors


def _gradients(problem: Problem, dout: Tensor, found: Sequence[Tensor]) -> Accuracy:
    """Errors of the worst of the last head's gradients."""
    heads, queries = problem.q.shape[1], torch.arange(problem.q.shape[2], device=problem.q.device)

    def computed(dtype: torch.dtype | None) -> list[Tensor]:
        parts, sums = [], [torch.zeros((), device=dout.device)] * 2
        for at in queries.split(MOST_ROWS):
            inputs = [x[0, -1].to(dtype) for x in problem.tensors]
            inputs = [x.detach().requires_grad_() for x in (inputs[0][at], *inputs[1:])]
            with torch.enable_grad():
                out = _attend(inputs, _seen(problem.blocks, 0, heads - 1, heads, at))
            dq, *others = torch.autograd.grad(out, inputs, dout[0, -1, at].to(out.dtype))
            parts.append(dq)
            sums = [one + x.to(torch.promote_types(x.dtype, torch.float32)) for one, x in zip(sums, others)]
        return [torch.cat(parts), *(x.to(parts[0].dtype) for x in sums)]

    judged = [
        Accuracy(*worst([one[0, -1]], [exact]), *worst([plain], [exact]))
        for one, exact, plain in zip(found, computed(torch.float64), computed(None), strict=True)
    ]
    return max(judged, key=lambda one: math.inf if math.isnan(one.ratio) else one.ratio)


def _seen(blocks: BlockMap | Lists, b: int, h: int, heads: int, queries: Tensor) -> Tensor:
    """bool [queries, kv_len]: keys that queries of a head attend to; of lists, with a causal mask."""
    keys = torch.arange(blocks.kv_len, device=queries.device)
    if isinstance(blocks, BlockMap):
        rows, columns = blocks.block_size
        return blocks.classes[0, h, queries // rows][:, keys // columns] > 0
    assert blocks.q_len is not None
    own = (queries + blocks.kv_len - blocks.q_len).unsqueeze(1)
    ids = blocks.ids[b, h * blocks.ids.shape[1] // heads, queries // blocks.queries]
    listed = torch.stack([torch.isin(keys // blocks.unit, row) for row in ids])
    return (listed | (keys > own - blocks.window)) & (keys <= own)


def step_lists(problem: Problem) -> Lists:
    """Blocks that a step selects, a list for each block of queries."""
    from fa4flex.select import pool, score, topk

    row = problem.row
    assert isinstance(row, StepRow)
    with torch.no_grad():
        pooled = score(pool(problem.q, row.keys), pool(problem.k, row.keys))
        return topk(pooled.causal(), row.chosen, own=1)


# --- rows ---------------------------------------------------------------------------------------------------


def _maps() -> list[SparseRow]:
    rows: list[SparseRow] = []
    best = (Target("best", 1.0),)
    for heads, length in ((16, 16384), (8, 65536)):
        for sizes in ((128, 128), (64, 64), (64, 16)):
            for density in (50, 25, 12.5, 6):
                name = f"map {sizes[0]}x{sizes[1]} {density:g}% {length // 1024}k"
                row = MapRow(name, heads, length, *sizes, density, targets=best)
                rows += [row, replace(row, name=f"{name} backward", backward=True)]
                if density == 12.5:
                    rows.append(replace(row, name=f"{name} new", base=name, targets=(), new=True))
    return rows


_DENSE = (Target("dense", 1.0),)
_TOKENS = ListsRow("tokens 64:1", 64, 1, 1, 4096, 65536, 2048, 1, targets=_DENSE)
_DECODE = ListsRow("decode 64:1", 64, 1, 64, 1, 131072, 2048, 1, targets=_DENSE)
_BLOCKS = ListsRow("blocks 64:4 window", window=512, targets=_DENSE)
_ALIKE = replace(_BLOCKS, name="blocks 64:4 window alike", alike=4)
_LISTS: tuple[ListsRow, ...] = (
    _BLOCKS,
    replace(_BLOCKS, name="blocks 64:4 window backward", backward=True),
    _ALIKE,
    replace(_ALIKE, name="blocks 64:4 window alike backward", backward=True),
    replace(_BLOCKS, name="blocks 64:4 window 16k", q_len=16384, kv_len=16384),
    replace(_BLOCKS, name="blocks 64:4 NSA", window=0),
    replace(_BLOCKS, name="blocks 64:4 NSA backward", window=0, backward=True),
    _TOKENS,
    replace(_TOKENS, name="tokens 64:1 backward", backward=True),
    replace(_TOKENS, name="tokens 128:1", heads=128),
    replace(_TOKENS, name="tokens 128:1 backward", heads=128, backward=True),
    replace(_TOKENS, name="tokens 128:1 K=V", heads=128, tied=True),
    replace(_TOKENS, name="tokens 128:1 shuffled", heads=128, shuffled=True),
    ListsRow("units of 4, 24:2 d256", 24, 2, 1, 4096, 65536, 512, 4, 3, 256, targets=_DENSE),
    _DECODE,
    replace(_DECODE, name="decode 128:1", heads=128),
    replace(_DECODE, name="decode 64:4 blocks", kv_heads=4, entries=32, keys=64),
    replace(_DECODE, name="decode 64:1 shuffled", shuffled=True),
    replace(_DECODE, name="decode 1 x 64:1", batch=1),
)


def _selections() -> list[SparseRow]:
    faster = (Target("torch.topk", 1.0),)
    sizes = (
        ("64 x 128k", 64, 1 << 17, 2048), ("64 x 1M", 64, 1 << 20, 2048), ("4096 x 64k", 4096, 1 << 16, 2048),
        ("16384 x 128", 16384, 128, 8), ("65536 x 1024", 65536, 1024, 64),
    )  # fmt: skip
    return [
        TopkRow(f"top {k} of {name}{' ties' * ties}", rows, units, k, ties, targets=faster)
        for name, rows, units, k in sizes
        for ties in (False, True)
    ]


ROWS: tuple[SparseRow, ...] = (*_maps(), *_LISTS, *_selections(), StepRow("MoBA step 64k"))
