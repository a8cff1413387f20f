"""A launch of attention and its tangents in which only pointers are missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.extents import Reach
from fa4flex.compiler.background import Awaited
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.device.counters import counters
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel
from fa4flex.runtime.layouts import empty_output


class Tangents(NamedTuple):
    """Tangents of the tensors of heads of a call, which look like these; None for what has none."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None

    @property
    def moved(self) -> tuple[str, ...]:
        """Names of those that there are."""
        return tuple(name for name, x in self._asdict().items() if x is not None)


class Pushed(NamedTuple):
    """out [B, H, S, Dv], lse float32 [B, H, S], and the tangents of both; packed [T, H, Dv] and [H, T]."""

    out: Tensor
    lse: Tensor
    tout: Tensor
    tlse: Tensor


PARAMETERS = (
    "call", "tangents", "out", "lse", "tout", "tlse", "tables", "max_q_len", "counters", "order",
    *SequenceLengths._fields,
)  # fmt: skip
"""Parameters of the launch function; other arguments are the same for all calls that look alike."""

ABSENT = (
    "max_scores", "max_logit", "entropy", "splits", "even_splits", "workspace", "used_keys", "faults",
)  # fmt: skip
"""Arguments of forward passes that it does not have."""


@dataclass(frozen=True, eq=False)
class ReadyTangents:
    """A launch in which only pointers are missing.

    launch    a function of PARAMETERS
    dtype     of the output
    counted   whether blocks take tiles from a counter
    reach     extents of the calls that it serves
    lengths   what corrects the lengths of a ragged batch, and sorts its tiles where that is asked for
    tables    makes or finds the block tables of a call, where the mask is told by them
    watch     looks after contents of captured tensors that launches take for granted, where there are any
    answers   to questions about speed that the kernel was planned with
    """

    launch: Callable[..., None]
    dtype: torch.dtype
    counted: bool
    reach: Reach
    lengths: LengthsKernel | None = None
    tables: Callable[..., Any] | None = None
    watch: Callable[[Call], None] | None = None
    answers: Answers = NO_ANSWERS
    until: Awaited | None = None

    def __call__(self, call: Call, tangents: Tangents) -> Pushed:
        q, width = call.q, call.kv.v.shape[-1]
        out, tout = (empty_output(q, width, self.dtype) for _ in range(2))
        rows = (q.shape[1], q.shape[0]) if call.packed else call.turned().q.shape[:3]
        lse, tlse = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
        if call.lengths.seqused_q is not None:  # rows that no sequence uses are not written
            out.zero_(), tout.zero_(), lse.fill_(-math.inf), tlse.zero_()
        lengths, order = (NO_LENGTHS, None) if self.lengths is None else self.lengths(call)
        tables = None if self.tables is None else self.tables(call, lengths)
        if self.watch is not None:
            self.watch(call)
        taken = counters(q.get_device()) if self.counted else None
        length = q.shape[0] if call.packed else call.extents().q_len
        self.launch(call, tangents, out, lse, tout, tlse, tables, length, taken, order, *lengths)
        return Pushed(out, lse, tout, tlse)
