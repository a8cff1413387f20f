"""Calls seen before: launches of earlier calls, and what tells the calls that they serve.

Host time counts in microseconds here. To find a launch by its key (calls/launch_cache.py) takes a Python call
for each of a tensor's properties; torch compares all tensors at once, with the guard that its compiler puts
in front of its graphs.

A launch is known twice. The first time, batch, lengths and strides are left out of the comparison: the launch
reads them itself, and what is left are extents, which are compared with those that it is valid for, and
alignments. The second time all shapes and strides are compared, and what follows from them is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from fa4flex.codegen.analyze.extents import Extents, Reach
from fa4flex.contents import VALIDATE
from fa4flex.exact import exactly
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.looks import ALIGNMENT
from fa4flex.runtime.key_sources import Contiguous, KeySource
from fa4flex.torch_internals import TensorGuards

MOST_KNOWN = 8
MOST_OF_ONE = 4
LONG_ROW = 16

Form = tuple[Any, ...]
Numbers = tuple[int | float, ...]

PLAIN: Form = (), None
"""`brought` by calls of q, k and v alone."""


@dataclass(eq=False, slots=True)
class Known:
    """A launch, and what tells the calls that it serves. It holds no tensors of theirs.

    ready       what launches
    form        all that decides the launch and no tensor tells, as one value
    numbers     captured ones; None where the launch takes others
    guard       compares types, dtypes, devices, shapes, strides and requires_grad of all tensors, and
                whatever takes part in dispatch: modes, transforms, inference mode
    valid       extents that it serves, where `guard` leaves these and most strides out; else None
    extents     those of the call that it was made for
    alignments  of addresses of tensors that are none of heads
    wide        the same launch for other extents, of one that `guard` compares all shapes for
    row         extents of the last call that it served, and how many others had the same before
    """

    ready: Any
    form: Form
    numbers: Numbers | None
    guard: Callable[..., bool]
    valid: Reach | None
    extents: Extents
    alignments: list[int]
    wide: Known | None = field(default=None, kw_only=True)
    row: tuple[Extents, int] = field(init=False)

    def __post_init__(self) -> None:
        self.row = self.extents, 0

    def serves(
        self, call: Call, others: Sequence[Tensor], results: tuple[Tensor, ...] = ()
    ) -> Extents | None:
        """Extents of a call in place whose tensors the guard has found to be alike; None if it is not one of
        these. others: tensors that are none of heads; results: of the forward pass, of heads."""
        kv = call.kv
        heads = call.q, kv.k, kv.v, *results
        if not self.aligned(heads, others):
            return None
        if self.valid is None:
            return self.extents
        places = 0
        for x in heads:
            steps = x.stride()
            places |= (steps[0] | steps[-3] | steps[-2]) * x.element_size()
        extents = None if places % ALIGNMENT else extents_now(call)
        return extents if extents is not None and self.valid.holds(extents) else None

    def aligned(self, heads: tuple[Tensor, ...], others: Sequence[Tensor]) -> bool:
        """True if tensors have the alignment of those that this was made for."""
        places = 0
        for x in heads:
            places |= x.data_ptr()
        if places % ALIGNMENT:
            return False
        return not others or [x.data_ptr() % ALIGNMENT for x in others] == self.alignments

    def has(self, numbers: Numbers) -> bool:
        """True if the launch has these captured numbers: of the same types and bits."""
        own = self.numbers
        if own is None or (len(numbers) == len(own) and all(map(is_, numbers, own))):
            return True
        return exactly(*numbers) == exactly(*own)


Kind = TypeVar("Kind", bound=Known)


class Shortlist(Generic[Kind]):
    """A few known launches, the youngest first. Threads read and store the whole list at once.

    One is added for a launch that was found by its key: it was made for an earlier call. Of one launch and
    form MOST_OF_ONE are kept, and no more made: calls may have tensors that torch does not compare.
    A launch that serves two calls in a row of the same extents is made known for these alone; where it is
    known for others, after LONG_ROW more.
    """

    def __init__(self) -> None:
        self.kept: tuple[Kind, ...] = ()

    def lacks(self, ready: Any, form: Form) -> bool:
        """True if a launch that was found by its key is to be added."""
        alike = [one for one in self.kept if one.ready is ready and one.form == form and one.wide is None]
        return len(alike) < MOST_OF_ONE

    def add(self, known: Kind) -> None:
        self.kept = (known, *self.kept)[:MOST_KNOWN]

    def recurs(self, known: Kind, extents: Extents) -> bool:
        """True if `known`, which serves a call of these extents, is to be narrowed to them."""
        last, count = known.row
        count = count + 1 if last == extents else 0
        known.row = extents, count
        return count == LONG_ROW or (count == 1 and all(one.wide is not known for one in self.kept))

    def narrow(self, narrow: Kind) -> None:
        """Keep one that was narrowed to a call, in place of that for an earlier one."""
        self.kept = (narrow, *[one for one in self.kept if one.wide is not narrow.wide])[:MOST_KNOWN]


# --- what is compared -------------------------------------------------------------------------------------


def brought(kv: KeySource, lengths: SequenceLengths) -> tuple[Form, tuple[Tensor, ...]]:
    """All that a source of keys and lengths are besides k and v: their form, and tensors, each once, as
    torch's guard takes none twice."""
    contiguous = type(kv) is Contiguous
    if contiguous and lengths is NO_LENGTHS:
        return PLAIN, ()
    form, tensors = ((), ()) if contiguous else kv.parts()
    tensors = tensors[2:]
    if lengths is NO_LENGTHS:
        return (form, None), tensors
    cu_q, cu_k, used_q, used_k = lengths
    of_lengths = cu_q is None, cu_k is None, cu_k is cu_q, used_q is None, used_k is None, used_k is used_q
    own = cu_q, None if cu_k is cu_q else cu_k, used_q, None if used_k is used_q else used_k
    return (form, of_lengths), (*tensors, *[x for x in own if x is not None])


def extents_now(call: Call) -> Extents | None:
    """Extents of a call in place whose tensors are like an earlier one's but for sizes; None where these do
    not agree, or where there is nothing to launch."""
    sizes, cu, rows = call.q.shape, call.lengths.cu_seqlens_q, 2 if call.heads_first else 1
    batch, length = (sizes[0], sizes[rows]) if cu is None else (cu.shape[0] - 1, sizes[0])
    slots = call.kv.slots(batch, cu is not None, rows)
    return (batch, length, slots) if batch and length and slots else None


def checked(kv: KeySource, lengths: SequenceLengths) -> bool:
    """True if each call has its contents checked."""
    return VALIDATE and not (type(kv) is Contiguous and lengths is NO_LENGTHS)


def alignments_of(others: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() % ALIGNMENT for x in others]


class Row(NamedTuple):
    """A tensor, and shape and strides as a guard compares them: None for any."""

    tensor: Tensor
    shape: list[int | None]
    strides: list[int | None]

    @staticmethod
    def of(x: Tensor, free: Sequence[int] = (), unit: bool | None = None) -> Row:
        """free: dimensions that launches read themselves; unit: whether of strides the last alone is
        compared, None for all of them, False for none."""
        shape = [None if i in free else n for i, n in enumerate(x.shape)]
        if unit is None:
            return Row(x, shape, [*x.stride()])
        last = [1] if unit else [None]
        return Row(x, shape, [*[None] * (x.ndim - 1), *last])


def rows_of(call: Call, kv: KeySource, more: Sequence[Tensor]) -> list[Row]:
    """Rows of queries, keys, and of what a call brought besides (`brought`), but for sizes that launches read
    themselves. kv: the source as it was brought."""
    packed, rows = call.packed, 2 if call.heads_first else 1
    of_keys = kv.free(packed, rows)
    result = [Row.of(call.q, (0,) if packed else (0, rows), unit=True)]
    result += [Row.of(x, free, unit=True) for x, free in zip((kv.k, kv.v), of_keys)]
    result += [Row.of(x, free, unit=False) for x, free in zip(more, of_keys[2:])]
    return [*result, *[Row.of(x, (0,)) for x in more[len(of_keys) - 2 :]]]


def guard_of(rows: Sequence[Row]) -> Callable[..., bool] | None:
    """A function that tells whether tensors are like those of the rows. None where this torch has none that
    works, or where a tensor is given twice, which it does not allow."""
    if TensorGuards is None:
        return None
    tensors, shapes, strides = zip(*rows, strict=True)
    try:
        guard = TensorGuards(*tensors, dynamic_dims_sizes=list(shapes), dynamic_dims_strides=list(strides))
        alike: Callable[..., bool] = guard.check
        return alike if alike(*tensors) else None
    except (TypeError, RuntimeError):
        return None


def nothing_alike(*tensors: Tensor) -> bool:
    """The guard of calls that torch cannot compare."""
    return False
