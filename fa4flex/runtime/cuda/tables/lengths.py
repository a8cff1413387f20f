"""Lengths of ragged batches on a device: corrected there, with the order of tiles that follows from them, by
one small kernel. The host waits for none of it.

What is launched gets the corrected lengths, never those that were given. They stand in memory that is kept
for where those lie that were given; each call launches the kernel, which compares these with the last ones
and stops early where they are the same. So changes count that torch does not. While a CUDA graph is captured,
the kernel becomes a part of it: replays read what the tensors hold then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex.compiler.signature import Signature
from fa4flex.contents import Guards, VersionedCache, capturing, guards_of, hold
from fa4flex.kernels.plan.arguments import LENGTHS
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.looks import memory_key
from fa4flex.runtime.cuda.calls.signatures import Kinds, kinds_of, numbers_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.counters import capture_of
from ptxsim import active as simulated

if TYPE_CHECKING:
    from fa4flex.lower import Lowered

MOST_KEPT = 16
"""Sets of lengths for which one launch keeps memory."""


@dataclass(eq=False, slots=True)
class Corrected:
    """Memory that launches write anew where lengths differ from the last ones.

    lengths   safe to use, int32
    order     int32 [tiles, 2]: sequence and tile in the order in which they are taken, those that do not
              exist last; None where they are not sorted
    arguments all of a launch but the lengths given: see SEQUENCES
    guards    of the lengths given, where torch's count of changes decides
    """

    lengths: SequenceLengths
    order: Tensor | None
    arguments: tuple[Any, ...]
    guards: Guards | None = None


@dataclass(frozen=True, eq=False, slots=True)
class LengthsKernel:
    """The kernel for the lengths of calls that look alike.

    launch    takes the arguments of SEQUENCES
    tile_m    queries of the tiles that it sorts, 0 where it sorts none
    scalars   captured numbers, where the order follows from some
    counted   whether torch's count of changes decides if lengths are new
    """

    launch: Callable[..., None]
    tile_m: int
    scalars: tuple[int | float, ...] | None
    counted: bool = False
    _kept: VersionedCache[Corrected] = field(default_factory=lambda: VersionedCache(MOST_KEPT))

    def __call__(self, call: Call) -> tuple[SequenceLengths, Tensor | None]:
        """The corrected lengths of a call, and the order of its tiles where they are sorted."""
        place = capture_of(call.q)
        if place is None or place[1]:
            return self.compute(call)
        cu_q, cu_k, used_q, used_k = call.lengths
        # The launch reads lengths of keys that are those of queries twice, and has corrected ones of both.
        of_keys = cu_k is cu_q or memory_key(cu_k), used_k is used_q or memory_key(used_k)
        sizes = call.q.shape, call.kv.k.shape, call.heads_first
        key = place, sizes, memory_key(cu_q), memory_key(used_q), of_keys, simulated.gpu()
        known: Corrected | None = self._kept.get(key, ())
        kept, guards = known or self.room(call), None
        if self.counted:
            arguments = [x for x in call.lengths if x is not None]
            if kept.guards is not None and hold(kept.guards, arguments):
                return kept.lengths, kept.order
            guards = guards_of(arguments)
        self.launch(*call.lengths, *kept.arguments)
        kept.guards = guards  # after the launch: another thread takes what it finds for made
        if known is None:
            self._kept.keep(key, (), kept)
        return kept.lengths, kept.order

    def compute(self, call: Call) -> tuple[SequenceLengths, Tensor | None]:
        """The same, in memory of its own. Raises InputError for lengths of another batch."""
        made = self.room(call, keeps=False)
        self.launch(*call.lengths, *made.arguments)
        return made.lengths, made.order

    def room(self, call: Call, keeps: bool = True) -> Corrected:
        """Memory for the results of calls with such lengths; `keeps`: the kernel compares with the last ones.
        Raises InputError for lengths of another batch."""
        shape, value = call.extents(), call.lengths
        sizes = [x.shape[0] for x in value if x is not None]
        expected = [shape.batch + (i < 2) for i, x in enumerate(value) if x is not None]
        if sizes != expected:
            Varlen(*value).check_padded(shape.batch, shape.q_len, shape.kv_len)
        known, tiles = call.q.new_zeros(1 + sum(sizes), dtype=torch.int64), 0
        if self.tile_m:
            per_row = -(-shape.q_len // self.tile_m) * shape.batch
            tiles = shape.q_len // self.tile_m + shape.batch if call.packed else per_row
            sizes += [shape.batch + 1, 2 * tiles]
        memory = call.q.new_empty(sum(sizes), dtype=torch.int32)
        parts = iter((memory,) if len(sizes) == 1 else memory.split_with_sizes(sizes))
        made = SequenceLengths(*[None if x is None else next(parts) for x in value])
        starts, order = (next(parts), next(parts).view(tiles, 2)) if self.tile_m else (None, None)
        rest = int(keeps), self.scalars, shape.q_len, shape.kv_len, shape.heads, faults.table()
        return Corrected(made, order, (*made, starts, order, known, *rest))


def lengths_of(
    kinds: Kinds, call: Call, lowered: Lowered, counted: bool = False, tile: tuple[int, int] | None = None
) -> LengthsKernel | None:
    """Kernel that corrects the lengths of calls like this one of a pass, and sorts their tiles of queries if
    `tile` is given; None for dense ones. `counted`: see LengthsKernel."""
    asked = lengths_kernel(kinds, call, lowered, tile)
    if asked is None:
        return None
    result, signature = asked
    kernel, numbers = result.compile(signature), numbers_of(kinds, call) if signature.scalars else None
    made = LengthsKernel(kernel.launch, 0 if tile is None else tile[0], numbers, counted)
    if kernel.key not in _launched:
        _launched.add(kernel.key)
        # The driver loads code at its first launch, which may not be one that is captured.
        made(call)
    return made


_launched: set[str] = set()
"""Keys of the kernels that were launched before."""


def lengths_kernel(
    kinds: Kinds, call: Call, lowered: Lowered, tile: tuple[int, int] | None = None
) -> tuple[Lowered, Signature] | None:
    """The kernel that `lengths_of` has compiled; None for dense calls."""
    if call.lengths is NO_LENGTHS:
        return None
    from fa4flex.lower import lower_lengths

    result = lower_lengths(lowered.facts, lowered.problem, lowered.plan.target, tile)
    reads = bool(call.scalars) and result.problem.mask_form == "spans"
    named = [(row.name, x) for row, x in zip(LENGTHS, call.lengths) if x is not None]
    used = tuple(name for name, _ in named if name.startswith("seqused"))
    wide = tuple(name for name, x in named if x.dtype == torch.int64)
    return result, Signature(scalars=kinds_of(kinds, call) if reads else (), given=used, wide=wide)


def check_lengths(call: Call) -> None:
    """Raise InputError unless cu_seqlens and seqused stay within q and k. This waits for the device; while a
    CUDA graph is captured, nothing is looked at."""
    if call.lengths is NO_LENGTHS:
        return
    if capturing():
        return
    shape, varlen = call.extents(), Varlen(*call.lengths)
    varlen.check_contents()
    if call.packed:
        varlen.check_tokens(shape.q_len, shape.kv_len if call.kv.seqused_k is None else None)
    else:
        varlen.check_used(shape.q_len, shape.kv_len)
