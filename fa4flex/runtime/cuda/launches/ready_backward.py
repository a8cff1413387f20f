"""A backward pass that is ready to launch, what it takes of the forward pass, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.extents import Reach, extents_of
from fa4flex.compiler.background import Awaited
from fa4flex.kernels.plan.groups import Groups
from fa4flex.kernels.plan.lengths import ROW_BLOCK
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.primitives.heads import ALIKE, Shares
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.conversions import compact
from fa4flex.runtime.cuda.device.counters import counters
from fa4flex.runtime.cuda.launches.captured_sums import memory_of, result_of
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.layouts import output_layout

if TYPE_CHECKING:
    from fa4flex.kernels.plan.captured_sums import CapturedSum


class Saved(NamedTuple):
    """Results of the forward pass, and the gradients that arrive: out, dout [B, H, S, D]; lse, dlse [B, H,
    S], dlse None where nothing depends on the log-sum-exp; dentropy and entropy like these, None where
    nothing depends on that. Packed: [T, H, D] and [H, T]."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dentropy: Tensor | None = None
    entropy: Tensor | None = None


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    captured: tuple[Tensor, ...]
    """Gradients of the captured tensors asked for, in their dtypes."""


def empty_gradient(x: Tensor) -> Tensor:
    """Memory for the gradient of q, k or v, whose dimensions lie in the order of x's: where heads are made by
    a transposition, what is made of the gradient needs no copy of it."""
    return _like(x) if x.is_contiguous() else x.new_empty_strided(*output_layout(x, x.shape[-1]))


PARAMETERS = (
    "call", "saved", "pulled", "lse2", "delta", "dq_sum", "dq", "dk", "dv", "dk_parts", "dv_parts", "tables",
    "turns", "gradients", "cleared", "counters", *SequenceLengths._fields,
)  # fmt: skip
"""Parameters of a backward launch function; other arguments are the same for all calls that look alike."""


@dataclass(frozen=True, eq=False)
class ReadyBackward:
    """A launch in which only pointers are missing.

    launch      a function of PARAMETERS
    width       of the tile that holds rows of q
    turn_rows   where sums are ordered, how many rows take turns together, else None
    counted     whether blocks take tiles of keys from a counter
    stores_dq   whether the kernel writes dQ itself: there are no sums of it
    clears      whether the kernel clears sums itself, and counts what was cleared
    tables      makes or finds the block tables of a call, where the mask is told by them, from it and
                its corrected lengths
    reach       extents of the calls that it serves
    sums        memory for the gradients of captured tensors
    groups      where query heads share keys: in how many parts they are taken
    shares      KV heads that share a head of k, and of v
    lengths     what corrects the lengths of a ragged batch
    answers     to questions about speed that the kernel was planned with
    until       what is to replace it, where it serves until a faster kernel is compiled
    """

    launch: Callable[..., None]
    width: int
    row_block: int
    turn_rows: int | None
    counted: bool
    stores_dq: bool
    clears: bool
    tables: Callable[..., Any] | None
    sums: tuple[CapturedSum, ...]
    reach: Reach
    lengths: LengthsKernel | None = None
    groups: Groups | None = None
    shares: Shares = ALIKE
    answers: Answers = NO_ANSWERS
    until: Awaited | None = None

    def __call__(self, call: Call, saved: Saved) -> Gradients:
        call, saved = _in_whole_tokens(call, saved)
        q, k, v = call.q, call.kv.k, call.kv.v
        *of_heads, rows = saved.lse.shape
        padded = self.padded(call, rows)
        lse2, delta = (_rows_like(saved.lse, padded) for _ in range(2))
        pulled = None if saved.dentropy is None else _rows_like(saved.lse, padded)
        dq_sum = None
        if not self.stores_dq:
            dq_sum = q.new_empty((*of_heads, padded * self.width), dtype=torch.float32)
        dq, dk, dv = map(empty_gradient, (q, k, v))
        parts = self.parts(call, dk, dv)
        if call.lengths.seqused_k is not None:  # keys that no sequence uses are not written
            for x in parts or (dk, dv):
                x.zero_()
        made = dq, dk, dv, *(parts or (None, None))
        sums = tuple([memory_of(one, q) for one in self.sums]) if self.sums else None
        lengths = NO_LENGTHS if self.lengths is None else self.lengths(call)[0]
        tables, turns = None if self.tables is None else self.tables(call, lengths), None
        if self.turn_rows is not None:
            done = q.new_zeros(*of_heads, padded // self.turn_rows, dtype=torch.int32)
            tables, turns = None, (done, *(tables or (None, None, None)))
        cleared = q.new_empty(of_heads, dtype=torch.int32) if self.clears else None
        taken = counters(q.get_device()) if self.counted else None
        given = pulled, lse2, delta
        self.launch(call, saved, *given, dq_sum, *made, tables, turns, sums, cleared, taken, *lengths)
        dsinks = None if call.sinks is None else of_sinks(call.sinks, call.packed, given)
        if sums is None:
            return Gradients(dq, dk, dv, dsinks, ())
        captured = tuple(result_of(one, x, call.operands) for one, x in zip(self.sums, sums, strict=True))
        return Gradients(dq, dk, dv, dsinks, captured)

    def parts(self, call: Call, dk: Tensor, dv: Tensor) -> Sequence[Tensor] | None:
        """Memory for dK and dV as blocks write them where they are added up afterwards, else None."""
        if self.groups is None and self.shares == ALIKE:
            return None
        parts = 1 if self.groups is None else self.groups.parts(*extents_of(call.extents()))
        if self.shares == ALIKE:
            return _parts(parts, call, dk, dv)
        of_k, of_v = (parts * share for share in self.shares)
        return _shared(call, dk, of_k), _shared(call, dv, of_v)

    def padded(self, call: Call, rows: int) -> int:
        """Rows of a head's statistics and sums: whole blocks, of each sequence of a packed batch."""
        if call.lengths is not NO_LENGTHS and call.packed:
            return (rows // ROW_BLOCK + call.extents().batch) * ROW_BLOCK
        return -(-rows // self.row_block) * self.row_block


def _in_whole_tokens(call: Call, saved: Saved) -> tuple[Call, Saved]:
    """The same call, copied where kernels could not find the ends of a padded batch's sequences: they count
    in tokens from one entry to the next (kernels/common/transfer.py, `ending`)."""
    if call.lengths is NO_LENGTHS or call.packed or call.q.shape[0] == 1:
        return call, saved
    axis = 2 if call.heads_first else 1
    q, k, v, dout = (
        x if x.stride(axis) and x.stride(0) % x.stride(axis) == 0 else compact(x)
        for x in (call.q, call.kv.k, call.kv.v, saved.dout)
    )
    return call._replace(q=q, kv=Contiguous(k, v)), saved._replace(dout=dout)


def _like(x: Tensor) -> Tensor:
    """Contiguous memory of the shape and dtype of x, for half the host time of x.new_empty."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rows_like(lse: Tensor, rows: int) -> Tensor:
    """Contiguous memory for so many rows of each head."""
    return _like(lse) if rows == lse.shape[-1] else lse.new_empty((*lse.shape[:-1], rows))


def _shared(call: Call, of_heads: Tensor, parts: int) -> Tensor:
    """Memory for the parts of dK or dV, which is its own where there is one."""
    if parts == 1:
        return of_heads
    shape = list(of_heads.shape)
    shape[-3 if call.heads_first and not call.packed else -2] *= parts
    return of_heads.new_empty(shape)


def _parts(parts: int, call: Call, dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
    """Memory for dK and dV of parts of groups, which is that of dK and dV where there is one part each."""
    if parts == 1:
        return dk, dv
    heads = -3 if call.heads_first and not call.packed else -2
    shape, widths = list(dk.shape), (dk.shape[-1], dv.shape[-1])
    shape[heads] *= parts
    shape[-1] = sum(widths)
    return dk.new_empty(shape).split(widths, -1)


def of_sinks(sinks: Tensor, packed: bool, rows: tuple[Tensor | None, Tensor, Tensor]) -> Tensor:
    """Gradient of the sinks: d lse / d sink is the sink's own share of the denominator, which has no value to
    bring. Rows (pulled, lse2, delta) that are none, or see nothing, have lse2 inf."""
    pulled, lse2, delta = rows
    logs = sinks.detach().float()[:, None] * math.log2(math.e) - lse2
    if pulled is not None:
        delta = delta - pulled * logs.clamp(min=LEAST)
    return (logs.exp2() * delta).sum(-1 if packed else (0, 2)).to(sinks.dtype)


LEAST = -1000.0
"""Logarithm of base 2 of shares that are 0, which are multiplied by it."""
