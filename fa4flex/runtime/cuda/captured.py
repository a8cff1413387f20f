"""Memory in which kernels make the gradients of captured tensors, and how these leave it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import written_once
from fa4flex.codegen.expr import sym
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.cuda.call import Call

if TYPE_CHECKING:
    from fa4flex.codegen.plan.backward import BackwardPlan
    from fa4flex.codegen.plan.problem import Adding, Problem
    from fa4flex.codegen.plan.target import Target

MOST_COPIES = 64
"""Memory adds numbers to one place one after the other. With so many copies of a small tensor, blocks rarely
wait for each other."""

ROW_BYTES = 16
"""What a lane or a copy of a tile writes at least where each element is written once."""

MOST_SEPARATE = 64 << 20
"""Bytes of copies that are written by one warp each."""

ADDING = 8
"""Warps of a block that add."""

COPIED_BYTES = 2 << 20
"""What the copies may take together, unless one alone takes more."""


@dataclass(frozen=True)
class CapturedSum:
    """The gradient of captured tensor `slot`: [copies, shape...] of `dtype`, rows along keys padded to a
    multiple of ROW_BYTES. `whole`: every element is written, so that the memory may hold anything before."""

    slot: int
    adding: Adding
    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: bool

    def memory(self, q: Tensor) -> Tensor:
        if self.whole:
            return q.new_empty(self.shape, dtype=self.dtype)
        return q.new_zeros(self.shape, dtype=self.dtype)

    def result(self, sums: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """In the shape and dtype of what it belongs to."""
        like = operands[self.slot]
        total = sums[0] if self.shape[0] == 1 else sums.sum(0)
        if like.ndim == 0:
            total = total[0]
        elif total.shape != like.shape:
            total = total[..., : like.shape[-1]].contiguous()
        return total.to(like.dtype)


def sums_of(
    facts: Facts, call: Call, problem: Problem, target: Target, needs: Sequence[int]
) -> tuple[CapturedSum, ...]:
    from fa4flex.codegen.plan.backward import ERASING

    erases = target.family in ERASING
    return tuple(_sum_of(facts, call, problem, slot, erases) for slot in needs)


def separate(
    sums: tuple[CapturedSum, ...], facts: Facts, call: Call, plan: BackwardPlan
) -> tuple[CapturedSum, ...]:
    """A copy for every warp that adds, so that nothing is added up in memory, where the order is nobody's.
    Raises UnsupportedError where several lanes add to an element, or copies take too much."""
    return tuple(one if one.adding != "sum" else _separate(one, facts, call, plan) for one in sums)


def _separate(one: CapturedSum, facts: Facts, call: Call, plan: BackwardPlan) -> CapturedSum:
    extents, tile_n = call.extents(), plan.tile[1]
    kv_heads = call.k.shape[1 if call.packed or call.heads_first else 2]
    # As many as BackwardCourse.grid has, of plan.ctas blocks each, of ADDING warps.
    tiles = -(-extents.kv_len // tile_n) * extents.batch
    if call.packed:
        tiles = extents.kv_len // tile_n + extents.batch
    shape = (tiles * kv_heads * plan.ctas * ADDING, *one.shape[1:])
    patterns = {term.pattern for term in facts.gradient.of_slots([one.slot])}
    if patterns != {"constant in q and kv"} or 4 * math.prod(shape) > MOST_SEPARATE:
        raise UnsupportedError(
            "deterministic gradients of a captured tensor to whose elements several lanes add",
            f"elements that depend on neither query nor key, and copies of at most {MOST_SEPARATE} bytes",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    return replace(one, shape=shape)


def _sum_of(facts: Facts, call: Call, problem: Problem, slot: int, erases: bool) -> CapturedSum:
    """`erases`: kernels write the zeros of tiles that the mask hides, where memory lies along the keys."""
    tensor, extents = call.operands[slot], call.extents()
    alone = [name for name, n in (("b", extents.batch), ("h", extents.heads)) if n == 1]
    shape = tuple(tensor.shape) or (1,)
    if not written_once(facts.gradient.of_slots([slot]), alone):
        copies = MOST_COPIES
        while copies > 1 and copies * tensor.numel() * 4 > COPIED_BYTES:
            copies //= 2
        return CapturedSum(slot, "sum", torch.float32, (copies, *shape), False)
    (term,) = facts.gradient.of_slots([slot])
    along_keys = term.index[-1] is sym("kv")
    pairs = extents.batch * extents.heads * extents.q_len * extents.kv_len
    # Every element belongs to a pair, if there are as many.
    hidden = problem.mask_form != "none" and not (erases and along_keys)
    whole = problem.lengths == "dense" and not hidden and tensor.numel() == pairs
    if not along_keys:
        return CapturedSum(slot, "once", torch.float32, (1, *shape), whole)
    adding: Adding = "once"
    dtype = torch.float32
    if tensor.dtype in (torch.float16, torch.bfloat16):
        adding, dtype = "once in pairs", tensor.dtype
    per_row = ROW_BYTES // dtype.itemsize
    padded = (1, *shape[:-1], -(-shape[-1] // per_row) * per_row)
    return CapturedSum(slot, adding, dtype, padded, whole)
