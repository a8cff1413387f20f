"""Lengths of ragged batches on a device: corrected there, with the order of tiles that follows from them, by
one small kernel per set of lengths. The host waits for none of it.

What is launched gets the corrected lengths, never those that were given. They are kept for as long as torch
counts no change of the tensors. While a CUDA graph is captured, the kernel becomes a part of it: replays read
what the tensors hold then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex.codegen.plan.arguments import LENGTHS
from fa4flex.compiler import simulated
from fa4flex.compiler.signature import Signature
from fa4flex.contents import VersionedCache, capturing
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.cuda.calls.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.signatures import Kinds, kinds_of, numbers_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.counters import capture_of

if TYPE_CHECKING:
    from fa4flex.lower import Lowered

MOST_KEPT = 16
"""Sets of lengths whose corrected ones are kept, and orders of tiles of one set."""


@dataclass(eq=False, slots=True)
class Corrected:
    """Lengths that are safe to use, int32; and by sorting kernel the orders of tiles, int32 [tiles, 2]:
    sequence and tile, those that do not exist last."""

    lengths: SequenceLengths
    orders: dict[Any, Tensor] = field(default_factory=dict)


_kept: VersionedCache[Corrected] = VersionedCache(MOST_KEPT)


@dataclass(frozen=True, eq=False, slots=True)
class LengthsKernel:
    """The kernel for the lengths of calls that look alike.

    launch    takes the arguments of SEQUENCES
    tile_m    queries of the tiles that it sorts, 0 where it sorts none
    sorting   what the order of tiles follows from besides lengths
    scalars   captured numbers, where the order follows from some
    """

    launch: Callable[..., None]
    tile_m: int
    sorting: Any
    scalars: tuple[int | float, ...] | None

    def __call__(self, call: Call) -> tuple[SequenceLengths, Tensor | None]:
        """The corrected lengths of a call, and the order of its tiles where they are sorted."""
        key, given = _key(call), [x for x in call.lengths if x is not None]
        known: Corrected | None = _kept.get(key, given)
        if known is not None:
            if not self.tile_m:
                return known.lengths, None
            order = known.orders.get(self.sorting)
            if order is not None:
                return known.lengths, order
        return self.made(call, key, known)

    def made(
        self, call: Call, key: tuple[Any, ...], known: Corrected | None
    ) -> tuple[SequenceLengths, Tensor | None]:
        """The same, launched now, and kept."""
        lengths, order = self.compute(call)
        if known is None:
            known = Corrected(lengths)
            if key[0] is not None:
                _kept.keep(key, [x for x in call.lengths if x is not None], known)
        if order is not None:
            known.orders[self.sorting] = order
            if len(known.orders) > MOST_KEPT:
                known.orders.pop(next(iter(known.orders)), None)
        return lengths, order

    def compute(self, call: Call) -> tuple[SequenceLengths, Tensor | None]:
        """The same, launched now, in memory of its own. Raises InputError for lengths of another batch."""
        shape, given = call.extents(), call.lengths
        sizes = [x.shape[0] for x in given if x is not None]
        expected = [shape.batch + (i < 2) for i, x in enumerate(given) if x is not None]
        if sizes != expected:
            Varlen(*given).check_padded(shape.batch, shape.q_len, shape.kv_len)
        tiles = 0
        if self.tile_m:
            per_row = -(-shape.q_len // self.tile_m) * shape.batch
            tiles = shape.q_len // self.tile_m + shape.batch if call.packed else per_row
            sizes += [shape.batch + 1, 2 * tiles]
        memory = call.q.new_empty(sum(sizes), dtype=torch.int32)
        parts = iter((memory,) if len(sizes) == 1 else memory.split_with_sizes(sizes))
        made = SequenceLengths(*[None if x is None else next(parts) for x in given])
        starts, order = (next(parts), next(parts).view(tiles, 2)) if self.tile_m else (None, None)
        self.launch(
            *given, *made, starts, order, self.scalars, shape.q_len, shape.kv_len, shape.heads, faults.table()
        )
        return made, order


def _key(call: Call) -> tuple[Any, ...]:
    """Key of corrected lengths, besides those given."""
    return capture_of(call.q), call.q.shape, call.k.shape, call.heads_first, simulated.gpu()


def lengths_of(
    kinds: Kinds, call: Call, lowered: Lowered, tile: tuple[int, int] | None = None
) -> LengthsKernel | None:
    """Kernel that corrects the lengths of calls like this one of a pass, and sorts their tiles of queries if
    `tile` is given; None for dense ones."""
    asked = lengths_kernel(kinds, call, lowered, tile)
    if asked is None:
        return None
    found, signature = asked
    kernel, numbers = found.compile(signature), numbers_of(kinds, call) if signature.scalars else None
    sorting = kernel.key, repr(numbers), call.extents().heads
    made = LengthsKernel(kernel.launch, 0 if tile is None else tile[0], sorting, numbers)
    if kernel.key not in _launched:
        _launched.add(kernel.key)
        # The driver loads code at its first launch, which may not be one that is captured.
        made.made(call, _key(call), None)
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

    found = lower_lengths(lowered.facts, lowered.problem, lowered.plan.target, tile)
    reads = bool(call.scalars) and found.problem.mask_form == "spans"
    named = [(row.name, x) for row, x in zip(LENGTHS, call.lengths) if x is not None]
    used = tuple(name for name, _ in named if name.startswith("seqused"))
    wide = tuple(name for name, x in named if x.dtype == torch.int64)
    return found, Signature(scalars=kinds_of(kinds, call) if reads else (), given=used, wide=wide)


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
        varlen.check_tokens(shape.q_len, None if call.pages.page_table is not None else shape.kv_len)
    else:
        varlen.check_used(shape.q_len, shape.kv_len)
