"""Memory in which kernels make the gradients of captured tensors, and how these leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import written_once
from fa4flex.codegen.expr import sym
from fa4flex.runtime.cuda.call import Call

if TYPE_CHECKING:
    from fa4flex.codegen.plan.problem import Adding, Problem

MOST_COPIES = 64
"""Memory adds numbers to one place one after the other. With so many copies of a small tensor, blocks rarely
wait for each other."""

COPIED_BYTES = 2 << 20
"""What the copies may take together, unless one alone takes more."""


@dataclass(frozen=True)
class CapturedSum:
    """The gradient of captured tensor `slot`: [copies, shape...] of `dtype`, rows made even where pairs of
    keys are written. `whole`: every element is written, so that the memory may hold anything before."""

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


def sums_of(facts: Facts, call: Call, problem: Problem, needs: Sequence[int]) -> tuple[CapturedSum, ...]:
    return tuple(_sum_of(facts, call, problem, slot) for slot in needs)


def _sum_of(facts: Facts, call: Call, problem: Problem, slot: int) -> CapturedSum:
    tensor, extents = call.operands[slot], call.extents()
    alone = [name for name, n in (("b", extents.batch), ("h", extents.heads)) if n == 1]
    shape = tuple(tensor.shape) or (1,)
    if not written_once(facts.gradient.of_slots([slot]), alone):
        copies = MOST_COPIES
        while copies > 1 and copies * tensor.numel() * 4 > COPIED_BYTES:
            copies //= 2
        return CapturedSum(slot, "sum", torch.float32, (copies, *shape), False)
    # Every pair writes, if every tile is visited; and every element belongs to one, if there are as many.
    pairs = extents.batch * extents.heads * extents.q_len * extents.kv_len
    whole = problem.mask_form == "none" and problem.lengths == "dense" and tensor.numel() == pairs
    (term,) = facts.gradient.of_slots([slot])
    if tensor.dtype in (torch.float16, torch.bfloat16) and term.index[-1] is sym("kv"):
        even = (1, *shape[:-1], shape[-1] + shape[-1] % 2)
        return CapturedSum(slot, "once in pairs", tensor.dtype, even, whole)
    return CapturedSum(slot, "once", torch.float32, (1, *shape), whole)
