"""Hooks of a variant in a kernel: what a hook is called with, and when.

A kernel calls hooks at six rates. Each sees what the slower ones returned:

    uniform    once per work tile        at.b at.h and the lengths
    row        once per query row        also at.q at.q_float at.uniform
    column     once per key of a tile    also at.kv at.kv_float at.uniform
    diagonal   once per kv - q           also at.offset at.offset_float at.uniform
    pair       once per score            all of these, at.row, at.column, at.diagonal, but no score
    element    once per score            also at.pair, at.folds, and at.score

All but `element` run before the scores are there, where a kernel would otherwise wait for its products.

Where an element lies is known as a number that its tile shares plus a Python int: at.kv is at.kv_base +
at.kv_step and at.offset is at.offset_base + at.offset_step. What is computed from a base is computed once per
tile, and what a step adds to it is an immediate operand. Past the end of a sequence, where at.guard is set,
at.kv is the last key instead.

Hooks are plain functions, inlined while the kernel is traced: no `if` on values that exist at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Value = Any
Hook = Callable[["At"], Any]


@dataclass(frozen=True)
class At:
    """The place a hook is called for. Indices are Int32 and logical; `_float` is the same number as Float32.

    `operands` and `scalars` are the captured tensors and numbers by slot. `guard` is a Python bool: True
    where rows or keys past the end of a sequence may be asked for, so that loads must be clamped.
    `score` is the accumulated q.k, before `scale`; what it started from is in it. `kv_base` is even.
    `loop` are the indices of the loop of a share or a fold. `scale_log2` is scale * log2(e), in backward
    passes. `logistic` computes the logistic function of a weight, where the weight says by which.
    """

    b: Value = None
    h: Value = None
    q_len: Value = None
    kv_len: Value = None
    num_heads: Value = None
    scale: Value = None
    operands: tuple[Value, ...] = ()
    scalars: tuple[Value, ...] = ()
    guard: bool = True
    uniform: tuple[Value, ...] = ()
    q: Value = None
    q_float: Value = None
    row: tuple[Value, ...] = ()
    kv: Value = None
    kv_float: Value = None
    kv_base: Value = None
    kv_base_float: Value = None
    kv_step: int = 0
    column: tuple[Value, ...] = ()
    offset: Value = None
    offset_float: Value = None
    offset_base: Value = None
    offset_base_float: Value = None
    offset_step: int = 0
    diagonal: tuple[Value, ...] = ()
    pair: tuple[Value, ...] = ()
    folds: tuple[Value, ...] = ()
    score: Value = None
    loop: tuple[Value, ...] = ()
    scale_log2: Value = None
    logistic: Value = None

    def but(self, **changes: Value) -> At:
        return replace(self, **changes)


@dataclass(frozen=True)
class Fold:
    """A long sum, or the like, for each score: `how` ("sum", "prod", "max", "min", "any", "all") folds what
    `term` returns, of the type `like`, for at.loop = (0,) to (extent - 1,). It sees what `pair` returned, but
    no score."""

    term: Hook
    extent: int
    how: str
    like: type


@dataclass(frozen=True)
class Pointwise:
    """A function of every (q, kv) pair, cut by rate. All but `element` return tuples and may be absent.
    `folds`: what comes in at.folds. `scored`: of a weight, whether it reads at.score. `branches`: of a start,
    whether a function that it calls has branches. `logistic`: of an elementwise weight that calls at.logistic
    once for each score, how that is computed (logistic.py)."""

    element: Hook
    row: Hook | None = None
    column: Hook | None = None
    diagonal: Hook | None = None
    pair: Hook | None = None
    folds: tuple[Fold, ...] = ()
    scored: bool = False
    branches: bool = False
    logistic: Any = None


@dataclass(frozen=True)
class Share:
    """Contribution of every (q, kv) pair to the gradient of a captured tensor: the gradient of its modified
    score, times a weight, at a place.

    which    the position of the tensor's gradient among those that a launch asks for
    rate     what a place depends on, "uniform", "row", "column", "diagonal" or "pair": pairs of one place are
             added up before memory is touched. "once": each element belongs to one pair, which writes it.
             "copy": likewise, in the dtype of q, and what it writes is the scaled score's gradient
    place    the element's index, a tuple of integers; called at that rate, "uniform" with at.uniform alone
    weight   the derivative of the modified score by the element, a Float32; absent: 1
    scaled   the weight is that of the scaled score's gradient instead: `slope` is in that one
    axes     of these two: which of the place's integers are at.q and at.kv; the others depend on neither
    loop     extents of loops: a pair adds at every place of at.loop; the weight needs no score
    """

    which: int
    rate: str
    place: Pointwise
    weight: Pointwise | None = None
    scaled: bool = False
    axes: tuple[int, ...] = ()
    loop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Dropped:
    """Dropout of normalised weights: the slots of the captured tensor that is its seed, and of the captured
    number that is its threshold."""

    seed: int
    threshold: int


@dataclass(frozen=True)
class Hooks:
    """A variant's behaviour.

    uniform   values shared by all other hooks, a tuple
    start     what the accumulation of q.k starts from, in its units, a Float32 that needs no score; absent: 0
    score     y, a Float32, where a probability is proportional to exp2(factor * y); absent: y is at.score
    slope     of backward passes: the derivative of the modified score by the scaled one, a Float32; absent: 1
    factor    a positive Float32 that depends on (b, h) alone; absent: at.scale * log2(e)
    weights   "softmax"; "softpick": the rectified one, whose sums begin with `eps`; or "elementwise": y is
              the weight itself. y of masked pairs is 0 of the last two
    output    the function of the normalised output, a Float32 that is at at.score, with the channel at at.kv;
              absent: it is written as it is
    dropout   of probabilities, after what they are divided by is known; absent: all are kept
    mask      whether the pair takes part, a Boolean; absent: all do, or `spans` decides
    spans     the keys of row at.q as a tuple of (lo, hi), half open; None for lo = 0 and for hi = kv_len
    queries   of backward passes: the queries of key at.kv likewise, None for hi = q_len; instead of `spans`
    shares    of backward passes: what pairs add to the gradients of captured tensors
    certain, possible   of block tables: whether all pairs of a tile take part, and whether some may, as
              Booleans; called with the first query and the first key of the tile
    ranges    of block tables: integers that depend on the query or the key alone
    searched  of block tables: elements of captured tensors at at.kv, Int64, to be sorted where `spans` hold
    derivatives   of gradients of output functions: by the elements of captured tensors, Float32
    """

    uniform: Hook | None = None
    start: Pointwise | None = None
    score: Pointwise | None = None
    slope: Pointwise | None = None
    factor: Hook | None = None
    mask: Pointwise | None = None
    spans: Hook | None = None
    queries: Hook | None = None
    shares: tuple[Share, ...] = ()
    certain: Pointwise | None = None
    possible: Pointwise | None = None
    ranges: tuple[Pointwise, ...] = ()
    searched: tuple[Pointwise, ...] = ()
    output: Pointwise | None = None
    derivatives: tuple[Pointwise, ...] = ()
    dropout: Dropped | None = None
    weights: str = "softmax"
    eps: float = 0.0

    @property
    def rectified(self) -> bool:
        """True if weights below 0 become 0, and rows are divided by the sum of all without their signs."""
        return self.weights == "softpick"

    @property
    def elementwise(self) -> bool:
        """True if nothing of a row is summed."""
        return self.weights == "elementwise"

    @property
    def plain(self) -> bool:
        """True if y is q.k as it is: finite in tiles that nothing masks, wherever float32 holds it."""
        return self.start is None and self.score is None

    @property
    def hidden(self) -> float:
        """y of masked pairs."""
        return -float("inf") if self.weights == "softmax" else 0.0
