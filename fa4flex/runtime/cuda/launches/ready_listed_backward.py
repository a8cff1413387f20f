"""A backward pass over listed keys that is ready to launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa4flex.codegen.analyze.extents import Reach
from fa4flex.kernels.plan.lengths import ROW_BLOCK
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.launches.ready_backward import Gradients, Saved, empty_gradient, of_sinks
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel

PARAMETERS = (
    "call", "saved", "lse2", "delta", "dq", "dk", "dv", "dk_sum", "dv_sum", *SequenceLengths._fields,
)  # fmt: skip
"""Parameters of its launch function; other arguments are the same for all calls that look alike, or none."""


@dataclass(frozen=True, eq=False)
class ReadyListedBackward:
    """A launch in which only pointers are missing.

    launch      a function of PARAMETERS
    widths      of the tiles that hold rows of k and of v, and so of sums of their gradients
    together    keys that the kernel after it reads together
    reach       extents of the calls that it serves
    lengths     what corrects the lengths of a ragged batch
    answers, until   as of ReadyBackward: a launch is planned by looks alone, and nothing replaces it
    """

    launch: Callable[..., None]
    widths: tuple[int, int]
    together: int
    reach: Reach
    lengths: LengthsKernel | None = None
    answers: Answers = NO_ANSWERS
    until: None = None

    def __call__(self, call: Call, saved: Saved) -> Gradients:
        q, k, v = call.q, call.kv.k, call.kv.v
        *of_heads, rows = saved.lse.shape
        padded = self.padded(call, rows)
        lse2, delta = (saved.lse.new_empty((*of_heads, padded)) for _ in range(2))
        dq, dk, dv = map(empty_gradient, (q, k, v))
        if call.lengths is not NO_LENGTHS:  # rows of q that no sequence has are not written
            dq.zero_()
        tokens, batch = k.shape[0 if call.packed else 2 if call.heads_first else 1], k.shape[0]
        keys = -(-tokens // self.together) * self.together
        shape = (call.kv_heads,) if call.packed else (batch, call.kv_heads)
        sums = (q.new_zeros((*shape, keys * width), dtype=torch.float32) for width in self.widths)
        lengths = NO_LENGTHS if self.lengths is None else self.lengths(call)[0]
        self.launch(call, saved, lse2, delta, dq, dk, dv, *sums, *lengths)
        dsinks = None if call.sinks is None else of_sinks(call.sinks, call.packed, (None, lse2, delta))
        return Gradients(dq, dk, dv, dsinks, ())

    def padded(self, call: Call, rows: int) -> int:
        """Rows of a head's statistics: whole blocks, of each sequence of a packed batch."""
        if call.packed:
            return (rows // ROW_BLOCK + call.extents().batch) * ROW_BLOCK
        return -(-rows // ROW_BLOCK) * ROW_BLOCK
