"""Registers: how a block's are split between its warpgroups."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fa4flex.codegen.kernels.fwd_sm100.config import FRAGMENT, InPlace, Registers
from fa4flex.codegen.plan.fault import PlanError
from fa4flex.codegen.plan.request import Request
from fa4flex.codegen.plan.sm100.tiles import Tiles
from fa4flex.codegen.plan.target import Target
from fa4flex.codegen.plan.work import Work

WARPGROUPS = 4
"""Two take softmaxes (with one tile of queries, one of them is idle), one corrects, one has single warps."""

SPLITS = (Registers(192, 80, 48), Registers(184, 80, 64))
"""FlashAttention-4's, and one with more for single warps, which find the tiles of keys."""

NARROW = (Registers(200, 64, 48), Registers(192, 64, 64))
"""The same where the output is at most 64 columns wide: less to correct at a time. Not where scores read
tensors: the assembler then keeps so many elements in flight that it spills."""


WIDE = Registers(192, 72, 56)
"""Between both, where operands are wider than 128: single warps have more addresses, the softmax as much to
hold as ever."""

WIDE_PAIR = Registers(200, 64, 48)
"""Where pairs of CTAs multiply such operands: twice as many of their exponentials are polynomials, and there
are no tiles of keys to find."""


def choose_registers(tiles: Tiles, request: Request) -> Registers:
    """Single warps keep the bounds of two spans of keys per row."""
    if tiles.head_dim > 128:
        return WIDE_PAIR if tiles.ctas == 2 else WIDE
    form, keys = request.problem.mask_form, request.facts.keys
    two = form == "spans" and keys is not None and len(keys.spans) > 1
    if form == "tables" and tiles.head_dim_v <= 64:
        return SPLITS[1]  # of all, the one with which no mask by tables spills
    return (NARROW if tiles.head_dim_v <= 64 and not request.work.loads else SPLITS)[two]


MOST_LOADS = 1
"""Per score that is modified in registers."""

MOST_ARITHMETIC = 24
"""Likewise, slots of the fp32 pipe, softmax included."""


def in_place(work: Work) -> InPlace:
    """Of which tiles scores are modified in tensor memory. In registers, next to a whole row of scores, the
    code of a score that reads tensors is long, and the elements in flight spill where they are many. Where
    arithmetic is as long, writing scores back is nothing beside it."""
    if work.loads > MOST_LOADS or work.fp32 > MOST_ARITHMETIC:
        return "all"
    return "masked" if work.loads else "none"


LOADS_IN_FLIGHT = FRAGMENT * MOST_LOADS
"""Of one piece of scores that is modified in tensor memory: what they bring takes registers, and each is
compiled for."""

LEAST_PIECE = 4
"""Columns: each piece waits once for what it reads."""


def piece(work: Work) -> int:
    """Columns whose scores are modified in tensor memory at a time."""
    columns = FRAGMENT
    while columns > LEAST_PIECE and columns * work.loads > LOADS_IN_FLIGHT:
        columns //= 2
    return columns


def check_registers(r: Any, twice: str, target: Target, advice: str) -> None:
    """Of a split by role, in whose role `twice` two warpgroups get more than they are launched with, and one
    in every other gets fewer. PlanError unless setmaxnreg takes the numbers, and their sum is there: it would
    wait for ever."""
    pool = target.register_pool(WARPGROUPS)
    each, step = pool // WARPGROUPS, target.register_step
    split = asdict(r)
    for name, count in split.items():
        raised = name == twice
        least, most = (each, target.register_most) if raised else (target.register_least, each)
        if not least <= count <= most or count % step:
            raise PlanError(
                f"{count} registers per {name} thread",
                f"a multiple of {step} in {least}..{most}: warps are launched with {each}",
                advice,
            )
    wanted = sum(split.values()) + split[twice]
    if wanted > pool:
        terms = " + ".join(f"2 x {count}" if name == twice else f"{count}" for name, count in split.items())
        raise PlanError(
            f"{terms} = {wanted} registers per thread",
            f"at most {pool}, what {WARPGROUPS} warpgroups are launched with",
            "give one of them fewer",
        )
