"""Registers: how a block's are split between its warpgroups."""

from __future__ import annotations

from fa4flex.kernels.fwd_sm100.config import FRAGMENT, InPlace, Registers
from fa4flex.kernels.fwd_sm100.tiles import Tiles
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.work import Work

SPLITS = (Registers(192, 80, 48), Registers(184, 80, 64))
"""FlashAttention-4's, and one with more for single warps, which find the tiles of keys."""

NARROW = (Registers(200, 64, 48), Registers(192, 64, 64))
"""The same where the output is at most 64 columns wide: less to correct at a time. Not where scores read
tensors: the assembler then keeps so many elements in flight that it spills; nor for elementwise weights, with
which it spills likewise."""


WIDE = Registers(192, 72, 56)
"""Between both, where operands are wider than 128: single warps have more addresses, the softmax as much to
hold as ever."""

WIDE_PAIR = Registers(200, 64, 48)
"""Registers where pairs of CTAs multiply such operands: twice as many of their exponentials are polynomials,
and there are no tiles of keys to find."""


AHEAD = Registers(240, 128, 112, 32)
"""Registers where one query tile has two stages of scores: the other softmax warpgroup leaves its own."""


def choose_registers(tiles: Tiles, request: ForwardRequest) -> Registers:
    """Single warps keep the bounds of two spans of keys per row."""
    if tiles.score_stages > 1:
        return AHEAD
    if tiles.head_dim > 128:
        return WIDE_PAIR if tiles.ctas == 2 else WIDE
    form, keys = request.problem.mask_form, request.facts.keys
    two = form == "spans" and keys is not None and len(keys.spans) > 1
    if form == "tables" and tiles.head_dim_v <= 64:
        return SPLITS[1]  # of all, the one with which no mask by tables spills
    narrow = tiles.head_dim_v <= 64 and request.problem.weights == "softmax"
    return (NARROW if narrow and not request.work.loads else SPLITS)[two]


MOST_LOADS = 1
"""Per score that is modified in registers."""

MOST_ARITHMETIC = 24
"""Likewise, slots of the fp32 pipe, softmax included."""


def in_place(work: Work) -> InPlace:
    """Tiles whose scores are modified in tensor memory. In registers, next to a whole row of scores, the code
    of a score that reads tensors is long, and the elements in flight spill where they are many. Where
    arithmetic is as long, writing scores back is nothing beside it."""
    if work.loads > MOST_LOADS or work.fp32 > MOST_ARITHMETIC:
        return "all"
    return "masked" if work.loads else "none"


LOADS_IN_FLIGHT = FRAGMENT * MOST_LOADS
"""Loads in flight for one piece of scores that is modified in tensor memory: what they bring takes registers,
and each is compiled for."""

LEAST_PIECE = 4
"""Columns: each piece waits once for what it reads."""


def piece(work: Work) -> int:
    """Columns whose scores are modified in tensor memory at a time."""
    columns = FRAGMENT
    while columns > LEAST_PIECE and columns * work.loads > LOADS_IN_FLIGHT:
        columns //= 2
    return columns
