"""The launch of an earlier call, for calls that look like it: of other extents, with other captured tensors,
lengths and pages.

What makes up a look (families.py) is compared by torch at once, with the guard that its compiler puts in
front of its graphs; batch, lengths and strides are left out of that. What is left are extents, which are
compared with those that were proved, and alignments. Launches of other extents differ in a few integers,
which `Ready.__call__` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fa4flex.codegen.analyze.extents import Extents
from fa4flex.codegen.trace.paths import Reader
from fa4flex.contents import VALIDATE
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.looks import ALIGNMENT
from fa4flex.runtime.cuda.launches.ready import Ready
from fa4flex.runtime.cuda.repeats.fast_path import guard_of
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.key_sources import Paged as PagedKeys
from fa4flex.torch_internals import forward_ad
from fa4flex.variant import Variant, default_scale

Beside = tuple[SequenceLengths, tuple[Tensor, ...]]
"""Lengths of a call, and these or its pages as tensors, each once: torch's guard takes none twice."""

QKV = tuple[Tensor, Tensor, Tensor]

COMPARED = (
    "q", "kv", "operands", "sinks", "lengths", "scalars", "scale", "heads_first", "statistics"
)  # fmt: skip
"""Fields of a Call that a path compares. Calls that bring something else have none."""


# --- kinds of calls -----------------------------------------------------------------------------------------


class Kind(Protocol):
    """Differences between dense, ragged and paged calls."""

    def beside(self, varlen: Varlen | None, paging: Paging | None) -> Beside | None:
        """Inputs of a call besides q, k and v; None for a call of another kind."""

    def extents(self, qkv: QKV, beside: Beside) -> Extents | None:
        """Extents of a call; None where those of its tensors do not agree, or where there is nothing to
        launch."""

    def free(self, qkv: QKV) -> list[tuple[int, ...]]:
        """Dimensions of q, k and v that launches read themselves."""

    def steps(self, qkv: QKV) -> tuple[int, int, int]:
        """The bits that any stride but the last has, of q, of k and of v."""


class Dense:
    """Calls of one length. rows: the dimension of q, k and v that has it."""

    def __init__(self, call: Call) -> None:
        self.rows = 2 if call.heads_first else 1

    def beside(self, varlen: Varlen | None, paging: Paging | None) -> Beside | None:
        return NOTHING if varlen is None and paging is None else None

    def extents(self, qkv: QKV, beside: Beside) -> Extents | None:
        (q, k, v), rows = qkv, self.rows
        sizes = q.shape
        batch, length = sizes[0], sizes[rows]
        sizes = k.shape
        keys = sizes[rows]
        if batch != sizes[0] or not (batch and length and keys):
            return None
        sizes = v.shape
        return (batch, length, keys) if batch == sizes[0] and keys == sizes[rows] else None

    def free(self, qkv: QKV) -> list[tuple[int, ...]]:
        return [(0, self.rows)] * 3

    def steps(self, qkv: QKV) -> tuple[int, int, int]:
        q, k, v = qkv
        (a, b, c, _), (d, e, f, _), (g, h, i, _) = q.stride(), k.stride(), v.stride()
        return a | b | c, d | e | f, g | h | i


NOTHING: Beside = NO_LENGTHS, ()


class Used(Dense):
    """Padded batches, and with `Packed` packed ones, that bring the same lengths as `call`."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.given = _given(call.lengths)
        self.places = [i for i, own in enumerate(_own(call.lengths)) if own is not None]

    def beside(self, varlen: Varlen | None, paging: Paging | None) -> Beside | None:
        if paging is not None or type(varlen) is not Varlen:
            return None
        lengths = SequenceLengths(varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k)
        if _given(lengths) != self.given:
            return None
        return lengths, tuple([lengths[i] for i in self.places])  # type: ignore[misc]


class Packed(Used):
    def extents(self, qkv: QKV, beside: Beside) -> Extents | None:
        (q, k, v), cu = qkv, beside[0].cu_seqlens_q
        assert cu is not None
        keys = k.shape[0]
        return (cu.shape[0] - 1, q.shape[0], keys) if keys and keys == v.shape[0] else None

    def free(self, qkv: QKV) -> list[tuple[int, ...]]:
        return [(0,)] * 3

    def steps(self, qkv: QKV) -> tuple[int, int, int]:
        q, k, v = qkv
        (a, b, _), (d, e, _), (g, h, _) = q.stride(), k.stride(), v.stride()
        return a | b, d | e, g | h


class Paged(Dense):
    """Calls whose keys lie in pages, k and v as they are given: [pages, page size, heads, width]."""

    def beside(self, varlen: Varlen | None, paging: Paging | None) -> Beside | None:
        if varlen is not None or type(paging) is not Paging:
            return None
        return NO_LENGTHS, (paging.page_table, paging.seqused_k)

    def extents(self, qkv: QKV, beside: Beside) -> Extents | None:
        (q, k, v), (table, used) = qkv, beside[1]
        sizes = q.shape
        batch, length = sizes[0], sizes[self.rows]
        (rows, columns), (pages, size, _, _) = table.shape, k.shape
        if not (rows == batch == used.shape[0] and pages == v.shape[0]) or not (batch and length and pages):
            return None
        return batch, length, columns * size

    def free(self, qkv: QKV) -> list[tuple[int, ...]]:
        return [(0, self.rows), (0,), (0,)]


def _given(lengths: SequenceLengths) -> tuple[bool, ...]:
    """Flags that tell which lengths there are, and which are the same tensor."""
    cu_q, cu_k, used_q, used_k = lengths
    return cu_q is None, cu_k is cu_q, used_q is None, used_k is None, used_k is used_q


def _own(lengths: SequenceLengths) -> tuple[Tensor | None, ...]:
    """The lengths, but those of keys that are those of queries."""
    cu_q, cu_k, used_q, used_k = lengths
    return cu_q, None if cu_k is cu_q else cu_k, used_q, None if used_k is used_q else used_k


def _kind(call: Call) -> Kind | None:
    """Kind of a call; None for lengths beside pages, and for other sources of keys."""
    if type(call.kv) is PagedKeys:
        return Paged(call) if call.lengths is NO_LENGTHS else None
    if type(call.kv) is not Contiguous:
        return None
    if call.lengths is NO_LENGTHS:
        return Dense(call)
    return Packed(call) if call.packed else Used(call)


# --- the path -----------------------------------------------------------------------------------------------


class FamilyPath:
    """One launch, and what tells the calls that it serves. It holds no tensors.

    reading   the captured tensors of a variant, if it has the numbers of this launch
    looks     compares types, dtypes, devices, heads, widths, requires_grad, last strides, and whatever takes
              part in dispatch: modes, transforms, inference mode; of captured tensors and sinks shapes and
              strides, too
    """

    __slots__ = (
        "alignments", "default_scale", "heads_first", "kind", "looks", "paged", "positive",
        "reading", "ready", "requires_grad", "scalars", "sinks", "sizes", "statistics", "trains",
    )  # fmt: skip

    def __init__(self, call: Call, qkv: QKV, kind: Kind, ready: Ready, reader: Reader) -> None:
        self.ready, self.kind = ready, kind
        self.reading, self.scalars = reader.tensors_with(call.scalars), call.scalars
        self.default_scale, self.positive = default_scale(call.q.shape[-1]), call.scale > 0
        self.heads_first, self.statistics = call.heads_first, call.statistics
        others, self.sinks = _others(call.operands, call.sinks), call.sinks is not None
        self.alignments = [x.data_ptr() % ALIGNMENT for x in others]
        self.sizes = tuple([x.element_size() for x in qkv])
        kv, own = call.kv, _own(call.lengths)
        self.paged = isinstance(kv, PagedKeys)
        beside = (kv.page_table, kv.paged_keys) if isinstance(kv, PagedKeys) else own
        arguments = [x for x in beside if x is not None]
        self.requires_grad = any(x.requires_grad for x in (*qkv, *others))
        self.trains = self.requires_grad and torch.is_grad_enabled()
        self.looks = _looks(qkv, self.kind.free(qkv), arguments, others, self.paged)

    @staticmethod
    def of(call: Call, qkv: QKV, ready: Ready, reader: Reader) -> FamilyPath | None:
        """Path of this launch; None where torch cannot compare the tensors of such calls at once, where they
        are converted, or where each call's contents are checked."""
        kind = _kind(call)
        others = [name for name in call._fields if name not in COMPARED]
        if any(getattr(call, name) is not call._field_defaults.get(name) for name in others):
            return None
        if kind is None or (VALIDATE and type(kind) is not Dense):
            return None
        result = FamilyPath(call, qkv, kind, ready, reader)
        return result if result.looks is not None and result._readable(qkv) else None

    def find(
        self, variant: Variant, qkv: QKV, varlen: Varlen | None, paging: Paging | None
    ) -> tuple[Call, Extents] | None:
        """A call of these tensors and its extents, if this launch serves it. Raises StateError or InputError
        for a block map that does not fit."""
        beside = self.kind.beside(varlen, paging)
        if beside is None:
            return None
        operands = self.reading(variant.score_mod, variant.allowed)
        if operands is None:
            return None
        scale, sinks = variant.scale, variant.sinks
        scale = self.default_scale if scale is None else scale
        sinks_now = None if sinks is None else sinks.now()
        lengths, value = beside
        if (scale > 0) is not self.positive or (sinks_now is not None) is not self.sinks:
            return None
        others = operands if sinks_now is None else (*operands, sinks_now)
        assert self.looks is not None
        if not (self.looks(*qkv, *value, *others) and self._readable(qkv)):
            return None
        if others and [x.data_ptr() % ALIGNMENT for x in others] != self.alignments:
            return None
        if self.requires_grad and torch.is_grad_enabled() != self.trains:
            return None
        extents = self.kind.extents(qkv, beside)
        if extents is None or forward_ad._current_level >= 0 or not self.ready.reach.holds(extents):
            return None
        q, k, v = qkv
        if variant.blocks is not None:
            batch, q_len, kv_len = extents
            variant.blocks.fits(q_len, kv_len, batch, q.shape[1 if self.heads_first else 2])
        rest = operands, sinks_now, lengths, self.scalars, scale, self.heads_first, self.statistics
        if not self.paged:
            return Call(q, Contiguous(k, v), *rest), extents
        if self.heads_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return Call(q, PagedKeys(k, v, *value), *rest), extents

    def _readable(self, qkv: QKV) -> bool:
        """True if the tensor memory accelerator can read q, k and v, whose last strides were compared."""
        (q, k, v), (q_size, k_size, v_size) = qkv, self.sizes
        of_q, of_k, of_v = self.kind.steps(qkv)
        places = q.data_ptr() | k.data_ptr() | v.data_ptr() | of_q * q_size | of_k * k_size | of_v * v_size
        return not places % ALIGNMENT


def _others(operands: tuple[Tensor, ...], sinks: Tensor | None) -> tuple[Tensor, ...]:
    return operands if sinks is None else (*operands, sinks)


def _looks(
    qkv: QKV,
    free: Sequence[tuple[int, ...]],
    arguments: Sequence[Tensor],
    others: Sequence[Tensor],
    paged: bool,
) -> Callable[..., bool] | None:
    """Torch's comparison with tensors like these; None where this torch has none that works, where a tensor
    is given twice, which it does not allow, or where rows of q, k or v have gaps."""
    if not all(x.stride(-1) == 1 for x in qkv):
        return None
    shapes: list[list[int | None]] = [
        [None if i in dims else n for i, n in enumerate(x.shape)] for x, dims in zip(qkv, free, strict=True)
    ]
    strides: list[list[int | None]] = [[*[None] * (x.ndim - 1), 1] for x in qkv]
    for x in arguments:
        shapes.append([None] * x.ndim)
        strides.append([None] * x.ndim if paged else list(x.stride()))
    shapes += [list(x.shape) for x in others]
    strides += [list(x.stride()) for x in others]
    return guard_of((*qkv, *arguments, *others), shapes, strides)
