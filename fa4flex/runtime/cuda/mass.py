"""Sums of probabilities per key on NVIDIA GPUs, from a log-sum-exp: one kernel, if there is one for the call.

What is decided once per look of a call is kept, as for the forward pass (engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.prove import proving
from fa4flex.compiler.background import Awaited
from fa4flex.contents import VALIDATE
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.arguments import MASS
from fa4flex.kernels.plan.lengths import ROW_BLOCK, row_block
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.arguments import conversions_of, launch_function
from fa4flex.runtime.cuda.calls.conversions import compact
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.calls.signatures import signature_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.engine import Engine, lowered_for
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel, check_lengths, lengths_of
from fa4flex.runtime.cuda.tables.tables import tables_of
from fa4flex.runtime.key_sources import Contiguous

PARAMETERS = ("call", "lse2", "mass", "tables", *SequenceLengths._fields)
"""Parameters of a launch function; other arguments are the same for all calls that look alike."""


def key_mass(engine: Engine, call: Call, lse: Tensor) -> Tensor | None:
    """Sums float32 [B, H, Skv], packed [H, Tk], of a call whose keys stand for its values. None where there
    is no kernel for it. Raises InputError for what an earlier call was wrong in."""
    if faults.pending.value or later.awaited:
        faults.check()
    if VALIDATE:
        check_lengths(call)
    found = engine.key(call)
    if found is None:
        return None
    ready = engine.mass.find(*found)
    if ready is MISSING:
        require_not_capturing()
        try:
            with proving():
                ready = _make_ready(engine, call)
        except UnsupportedError:
            ready = None
        engine.mass.keep(*found, ready)
    if ready is None:
        check_lengths(call)  # the host reads them
        return None
    result: Tensor = ready(call, lse)
    return result


@dataclass(frozen=True, eq=False)
class ReadyMass:
    """A launch in which only pointers are missing.

    launch      a function of PARAMETERS
    row_block   rows that log-sum-exps are padded to a multiple of
    tables      makes or finds the block tables of a call, where the mask is told by them
    lengths     what corrects the lengths of a ragged batch
    watch       asks the device about captured integers, where there are some
    reach       extents of the calls that it serves
    """

    launch: Callable[..., None]
    row_block: int
    tables: Callable[..., Any] | None
    lengths: LengthsKernel | None
    watch: Callable[[Call], None] | None
    reach: Reach
    answers: Answers = NO_ANSWERS
    until: Awaited | None = None

    def __call__(self, call: Call, lse: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(call)
        call, lengths = _in_whole_tokens(call), NO_LENGTHS
        if self.lengths is not None:
            lengths = self.lengths(call)[0]
        k = call.kv.k
        shape = (lse.shape[0], k.shape[0]) if call.packed else (*lse.shape[:2], k.shape[2])
        # Keys that no sequence has are not written.
        make = lse.new_empty if lengths is NO_LENGTHS else lse.new_zeros
        mass = make(shape, dtype=torch.float32)
        tables = None if self.tables is None else self.tables(call, lengths)
        self.launch(call, self.rows(call, lse, lengths), mass, tables, *lengths)
        return mass

    def rows(self, call: Call, lse: Tensor, lengths: SequenceLengths) -> Tensor:
        """Log-sum-exps in log2 units, in whole blocks of rows, of each sequence of a packed batch: inf where
        there is no row, or it has no keys. Nothing waits for the device."""
        values = (lse.float() * math.log2(math.e)).masked_fill(lse == -torch.inf, torch.inf)
        if not call.packed:
            rows = values.shape[-1]
            more = -(-rows // self.row_block) * self.row_block - rows
            return torch.nn.functional.pad(values, (0, more), value=torch.inf).contiguous()
        starts = lengths.cu_seqlens_q
        assert starts is not None
        count = starts.shape[0] - 1
        number = torch.arange(count, device=lse.device)
        first = (starts[:-1] // ROW_BLOCK + number) * ROW_BLOCK  # as kernels have it: `first_row`
        row = torch.arange((values.shape[-1] // ROW_BLOCK + count) * ROW_BLOCK, device=lse.device)
        b = (torch.searchsorted(first, row, right=True) - 1).clamp(min=0)
        token = starts[b] + row - first[b]
        inside = token < starts[b + 1]
        found = values.index_select(1, torch.where(inside, token, 0))
        return found.masked_fill(~inside, torch.inf)


def _in_whole_tokens(call: Call) -> Call:
    """The same call, copied where kernels could not find the ends of a padded batch's sequences: see
    ready_backward.py."""
    if call.lengths is NO_LENGTHS or call.packed or call.q.shape[0] == 1:
        return call
    q, k = (x if x.stride(2) and x.stride(0) % x.stride(2) == 0 else compact(x) for x in (call.q, call.kv.k))
    return call._replace(q=q, kv=Contiguous(k, k))


def _make_ready(engine: Engine, call: Call) -> ReadyMass:
    from fa4flex.lower import lower_mass

    lowered, value, reach = lowered_for(engine, call, engine.schedule, lower_mass, queries=True)
    kernel, captured = lowered.compile(signature_of(engine.kinds, call)), value.captured
    conversions = conversions_of(MASS, call=call._replace(lengths=NO_LENGTHS))
    return ReadyMass(
        launch_function(MASS, kernel.launch, PARAMETERS, {"scalars": captured.scalars or None}, conversions),
        row_block(lowered.plan.config().tile_m),
        tables_of(engine.kinds, call, lowered, captured, engine.counted),
        lengths_of(engine.kinds, call, lowered, engine.counted),
        engine.watch_integers if engine.watches_integers else None,
        reach,
        lowered.answers,
    )
