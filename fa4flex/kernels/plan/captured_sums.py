"""Memory in which backward kernels make the gradients of captured tensors. Data only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import written_once
from fa4flex.codegen.expr import sym
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.groups import groups_of
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.pipeline import BackwardPlan
from fa4flex.kernels.plan.problem import Adding, Problem, itemsize

MOST_COPIES = 64
"""Memory adds numbers to one place one after the other. With so many copies of a small tensor, blocks rarely
wait for each other."""

ROW_BYTES = 16
"""Minimum bytes that a lane or a copy of a tile writes where each element is written once."""

MOST_SEPARATE = 64 << 20
"""Bytes of copies that are written by one warp each."""

ADDING = 8
"""Warps of a block that add."""

COPIED_BYTES = 2 << 20
"""Maximum bytes of the copies together, unless one alone takes more."""


@dataclass(frozen=True)
class CapturedSum:
    """The gradient of captured tensor `slot`: [copies, shape...] of `dtype`, rows along keys padded to a
    multiple of ROW_BYTES. `whole`: every element is written, so that the memory may hold anything before."""

    slot: int
    adding: Adding
    dtype: str
    shape: tuple[int, ...]
    whole: bool


def sums_of(
    facts: Facts, inputs: Inputs, problem: Problem, zero_fills: bool, needs: Sequence[int]
) -> tuple[CapturedSum, ...]:
    """One for each slot of `needs`. `zero_fills`: kernels write the zeros of tiles that the mask hides, where
    memory lies along the keys."""
    return tuple(_sum_of(facts, inputs, problem, slot, zero_fills) for slot in needs)


def separate(
    sums: tuple[CapturedSum, ...], facts: Facts, inputs: Inputs, plan: BackwardPlan
) -> tuple[CapturedSum, ...]:
    """A copy for every warp that adds, so that nothing is added up in memory, where the order is nobody's.
    Raises UnsupportedError where several lanes add to an element, or copies take too much."""
    return tuple(one if one.adding != "sum" else _separate(one, facts, inputs, plan) for one in sums)


def _separate(one: CapturedSum, facts: Facts, inputs: Inputs, plan: BackwardPlan) -> CapturedSum:
    extents, tile_n = inputs.extents, plan.tile[1]
    # As many as the grid of tiles of keys has, of plan.ctas blocks each, of ADDING warps.
    tiles = -(-extents.kv_len // tile_n) * extents.batch
    if inputs.lengths == "packed":
        tiles = extents.kv_len // tile_n + extents.batch
    groups = groups_of(inputs, plan)
    parts = 1 if groups is None else groups.parts(extents.batch, extents.q_len, extents.kv_len)
    shape = (tiles * inputs.kv_heads * parts * plan.ctas * ADDING, *one.shape[1:])
    patterns = {term.pattern for term in facts.gradient.of_slots([one.slot])}
    if patterns != {"constant in q and kv"} or 4 * math.prod(shape) > MOST_SEPARATE:
        raise UnsupportedError(
            "deterministic gradients of a captured tensor to whose elements several lanes add",
            f"elements that depend on neither query nor key, and copies of at most {MOST_SEPARATE} bytes",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    return replace(one, shape=shape)


def _sum_of(facts: Facts, inputs: Inputs, problem: Problem, slot: int, zero_fills: bool) -> CapturedSum:
    (dtype, value), extents = inputs.captured[slot], inputs.extents
    alone = [name for name, n in (("b", extents.batch), ("h", extents.heads)) if n == 1]
    shape, elements = value or (1,), math.prod(value)
    if not written_once(facts.gradient.of_slots([slot]), alone):
        copies = MOST_COPIES
        while copies > 1 and copies * elements * 4 > COPIED_BYTES:
            copies //= 2
        return CapturedSum(slot, "sum", "float32", (copies, *shape), False)
    (term,) = facts.gradient.of_slots([slot])
    along_keys = term.index[-1] is sym("kv")
    pairs = extents.batch * extents.heads * extents.q_len * extents.kv_len
    # Every element belongs to a pair, if there are as many.
    hidden = problem.mask_form != "none" and not (zero_fills and along_keys)
    whole = problem.lengths == "dense" and not hidden and elements == pairs
    if not along_keys:
        return CapturedSum(slot, "once", "float32", (1, *shape), whole)
    adding: Adding = "once"
    made = "float32"
    if dtype in ("float16", "bfloat16"):
        adding, made = "once in pairs", dtype
    per_row = ROW_BYTES // itemsize(made)
    padded = (1, *shape[:-1], -(-shape[-1] // per_row) * per_row)
    return CapturedSum(slot, adding, made, padded, whole)
