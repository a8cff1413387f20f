"""The operator `fa4flex::attention_in_pages`: keys and values in pages, without gradients, as code
under torch.compile calls it. Kernels read pages where they lie; where there is none for a call, and on a CPU,
all pages of the table are copied first.

Contents are looked at on a CPU, and with FA4FLEX_VALIDATE=1 on a device. Else kernels find what does not fit,
or, where pages are copied, conditions that nobody waits for; and a later call tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.contents import validating
from fa4flex.default_device import on_the_host
from fa4flex.primitives.paging import Paging, conditions_of
from fa4flex.runtime import autocast
from fa4flex.runtime.cuda import in_place
from fa4flex.runtime.cuda.calls.call import NO_LENGTHS, Pages, SequenceLengths, Tensors
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.layouts import empty_output
from fa4flex.runtime.ops import call_of, empty, forward, numbers_of
from fa4flex.runtime.programs import Numbers, Published, read
from ptxsim.active import simulating

Results = tuple[Tensor, Tensor, Tensor]
"""out in the layout of q; lse [B, Hq, Sq], or [Hq, Tq] of packed queries; max_scores alike, empty where they
are not asked for."""


@on_the_host
def attention_in_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    paged_keys: Tensor,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
    *rest: Any,
) -> Results:
    """q [B, H, Sq, D] if `heads_first`, else [B, Sq, H, D], or packed [Tq, H, D] with cu_seqlens_q; k, v
    [pages, page_size, Hkv, D]."""
    operands, sinks, text, ints, floats, scale, heads_first, max_scores = rest
    program, numbers = read(text), numbers_of(ints, floats, scale)
    on_device = not q.is_cpu or simulating()
    if not on_device or validating():
        Paging(page_table, paged_keys).check_contents(k)
    lengths = NO_LENGTHS if cu_seqlens_q is None else SequenceLengths(cu_seqlens_q, seqused_q=seqused_q)
    given = Tensors(q, k, v, sinks, lengths, tuple(operands))
    with autocast.off(q):
        if (q.is_cuda or simulating()) and not by_flex(program.backend, q) and not empty(q, k):
            pages = Pages(page_table, paged_keys)
            found = _in_place(program, given, numbers, pages, heads_first, max_scores)
            if found is not None:
                return found
        paging = Paging(page_table, paged_keys)
        if on_device:
            for condition, message in conditions_of(paging, k):
                later.require_at_each_replay(condition, message)
        return _copied(program, given, numbers, paging, heads_first, max_scores)


def _in_place(
    program: Published, given: Tensors, numbers: Numbers, pages: Pages, heads_first: bool, max_scores: bool
) -> Results | None:
    """The results by a kernel that reads the pages; None where there is none."""
    statistics = ("lse", "max_scores") if max_scores else ("lse",)
    call = call_of(program, given, numbers, statistics)._replace(heads_first=heads_first, pages=pages)
    if heads_first:
        call = call._replace(k=call.k.transpose(1, 2), v=call.v.transpose(1, 2))
    ready = in_place.ready_for(program.engine, call, lambda: None)
    if ready is None:
        return None
    out, lse, largest = ready(call)
    assert lse is not None
    return out, lse, lse.new_empty(0) if largest is None else largest


def _copied(
    program: Published, given: Tensors, numbers: Numbers, paging: Paging, heads_first: bool, max_scores: bool
) -> Results:
    """The results over a copy of all pages."""
    q, k, v, sinks, lengths, operands = given
    swap = lengths is NO_LENGTHS and not heads_first
    if lengths is NO_LENGTHS:
        q = q.transpose(1, 2) if swap else q
        k, v = (paging.spread(x).transpose(1, 2) for x in (k, v))
        lengths = SequenceLengths(seqused_k=paging.seqused_k)
    else:
        k, v, starts = packed_pages(paging, k, v)
        lengths = lengths._replace(cu_seqlens_k=starts, seqused_k=paging.seqused_k)
    spread = Tensors(q, k, v, sinks, lengths, operands)
    out, lse, largest, _ = forward(program, spread, numbers, max_scores, differentiable=False)
    return out.transpose(1, 2) if swap else out, lse, largest if max_scores else lse.new_empty(0)


def packed_pages(paging: Paging, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of all pages of each sequence, used or not, packed [T, Hkv, D], and where each sequence
    starts in them. Differentiable."""
    k, v = paging.spread(k), paging.spread(v)  # [B, T, Hkv, D]
    batch, tokens = k.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * tokens
    return k.flatten(0, 1), v.flatten(0, 1), starts


def attention_in_pages_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
    cu_seqlens_q, (text, *_, heads_first, max_scores) = rest[2], rest[6:]
    precision = read(text).precision
    compute, output = precision.compute_dtype(q.dtype), precision.output_dtype(q.dtype)
    rows: Sequence[Any] = (q.shape[1], q.shape[0])
    if cu_seqlens_q is None:
        rows = q.shape[:3] if heads_first else (q.shape[0], q.shape[2], q.shape[1])
    out = empty_output(q, v.shape[-1], output)
    lse, largest = (q.new_empty(size, dtype=compute) for size in (rows, rows if max_scores else (0,)))
    return out, lse, largest
